"""What a check found: sentences with a weight, collected instead of stopping at the first."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from burnish.utils.errors import BurnishError

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One sentence.

    Attributes:
        level: "error": the run would fail, or train on what is wrong; "warning": worth a look; "note": a fact.
        area: "config", "data", "reward", "template", "memory", "time", "disk", "cluster" or "versions".
        key: the key to turn, where one can.
        message: what was found and what to do.
    """

    level: Level
    area: str
    message: str
    key: str | None = None


@dataclass
class Findings:
    """Collects findings and the facts that go with them.

    Attributes:
        items: in the order in which they were made.
        facts: numbers for machines, by area.
    """

    items: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, level: Level, area: str, message: str, key: str | None = None) -> None:
        """Notes one, but the same sentence once."""
        finding = Finding(level=level, area=area, message=message, key=key or key_of(message))
        if all((other.area, other.message) != (area, message) for other in self.items):
            self.items.append(finding)

    def error(self, area: str, message: str, key: str | None = None) -> None:
        """Notes what must be mended."""
        self.add("error", area, message, key)

    def warning(self, area: str, message: str, key: str | None = None) -> None:
        """Notes what deserves a look."""
        self.add("warning", area, message, key)

    def note(self, area: str, message: str, key: str | None = None) -> None:
        """Notes a fact."""
        self.add("note", area, message, key)

    @contextmanager
    def attempt(self, area: str) -> Iterator[None]:
        """What burnish refuses inside becomes an error of ``area``; the checks behind it go on."""
        try:
            yield
        except BurnishError as error:
            self.error(area, str(error))

    def of(self, level: Level) -> Sequence[Finding]:
        """Those of one level."""
        return [finding for finding in self.items if finding.level == level]

    def log(self, logger: logging.Logger) -> None:
        """Errors and warnings as warnings of ``logger``, at a start that goes on all the same."""
        for finding in self.items:
            if finding.level != "note":
                logger.warning("%s", finding.message)

    def tells_error_of(self, key: str) -> bool:
        """Whether something is wrong with what ``key`` names: what follows from that is not worth telling too."""
        return any(item.key == key and item.level == "error" for item in self.items)

    @property
    def ok(self) -> bool:
        """Whether nothing must be mended."""
        return not self.of("error")


def key_of(message: str) -> str | None:
    """The key that a message of the configuration begins with, as all of them do."""
    first = message.split(maxsplit=1)[0] if message.strip() else ""
    name = first.partition("=")[0].rstrip(":,.")
    return name if "." in name and all(part.replace("_", "").isalnum() for part in name.split(".")) else None
