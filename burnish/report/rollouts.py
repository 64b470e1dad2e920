"""Dumped responses of a run: a light index of all of them, and the whole of those that the page shows."""

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from burnish.report.series import is_number
from burnish.report.tokens import Pieces, page_tokens
from burnish.trainer.rollout_store import read_tokens
from burnish.utils.errors import DataError

_STEP_FILE = re.compile(r"^(\d+)\.jsonl$")
# What the index has, or the page shows in a place of its own; everything else is shown as an extra of the reward.
_OWN_FIELDS = (
    "step",
    "uid",
    "sample_index",
    "prompt",
    "response",
    "score",
    "num_tokens",
    "data_source",
    "finish_reason",
)


@dataclass(slots=True)
class Row:
    """One response of the index.

    Attributes:
        prompt_id: the same for the same prompt at every step of a run; evenly spread 32 bits.
        score: None where it is missing or not finite.
        num_tokens: None in dumps without it.
        trained: False where dynamic sampling left it out.
        cost: size of its texts, characters.
        line: its number in the file, from 0.
        offset, length: where its line lies in the file, bytes.
    """

    prompt_id: int
    uid: str
    sample_index: int
    score: float | None
    num_tokens: int | None
    source: str
    finish: str
    valid: bool
    trained: bool
    cost: int
    line: int
    offset: int
    length: int


class Dumps:
    """The responses of a folder of ``<step>.jsonl``, read file by file as they come.

    Attributes:
        folder: where they lie; it may not be there (yet).
        index: step -> rows in the file's order.
        num_broken: lines that are no JSON object.
        problems: files that could not be read, in sentences.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index: dict[int, list[Row]] = {}
        self.num_broken = 0
        self.problems: list[str] = []
        self.version = 0
        self._stamps: dict[int, tuple[int, int]] = {}
        self._broken: dict[int, int] = {}

    def refresh(self) -> bool:
        """Reads files that are new or have changed, forgets those that are gone; whether there were any."""
        found = {}
        for path in self.folder.glob("*.jsonl") if self.folder.is_dir() else ():
            match = _STEP_FILE.match(path.name)
            # Nothing where it is gone already, as when a run sets aside what it is going to write anew.
            if match and (stamp := stamp_of(path)) is not None:
                found[int(match[1])] = stamp
        changed = [step for step, stamp in found.items() if self._stamps.get(step) != stamp]
        gone = [step for step in self._stamps if step not in found]
        for step in gone:
            del self._stamps[step], self.index[step]
            self._broken.pop(step, None)
        for step in sorted(changed):
            self.index[step], self._broken[step] = self._read_index(step)
            self._stamps[step] = found[step]
        self.num_broken = sum(self._broken.values())
        self.version += bool(changed or gone)
        return bool(changed or gone)

    def path(self, step: int) -> Path:
        """The file of a step."""
        return self.folder / f"{step}.jsonl"

    def _read_index(self, step: int) -> tuple[list[Row], int]:
        rows: list[Row] = []
        broken, offset, seen = 0, 0, dict[str, int]()
        try:
            with self.path(step).open("rb") as file:
                for place, line in enumerate(file):
                    row = _parse(line)
                    if row is not None:
                        uid = str(row.get("uid"))
                        number = seen[uid] = seen.get(uid, -1) + 1
                        rows.append(_index_row(row, uid, number, place, offset, len(line)))
                    broken += row is None
                    offset += len(line)
        except OSError as error:
            self.problems.append(f"{self.path(step)} cannot be read: {error.strerror}.")
        return rows, broken

    def whole(self, step: int, rows: Sequence[Row], pieces: Pieces | None) -> dict[str, Any]:
        """What the page needs to show these rows of a step.

        Returns:
            ``prompts`` (id -> text) and ``rows``: for each its texts, its extras and, where the dump has tokens, ``tokens``
            (see `burnish.report.tokens.page_tokens`).
        """
        prompts: dict[str, str] = {}
        shown = []
        with self.path(step).open("rb") as file:
            for row in rows:
                file.seek(row.offset)
                entry = _parse(file.read(row.length)) or {}
                prompts[str(row.prompt_id)] = _text(entry.get("prompt"))
                extras = {name: value for name, value in entry.items() if name not in _OWN_FIELDS and value is not None}
                shown.append({"uid": row.uid, "response": _text(entry.get("response")), "extras": _small(extras)})
        for row, entry, found in zip(rows, shown, self._tokens(step, rows), strict=True):
            if found.get("uid") != row.uid or found.get("sample_index") != row.sample_index:
                continue
            tokens = entry["tokens"] = page_tokens(found, pieces)
            # The pieces are the response, unless the ids are not those of this tokenizer.
            if "".join(tokens.get("text", ())) == entry["response"]:
                del entry["response"]
        return {"prompts": prompts, "rows": shown}

    def _tokens(self, step: int, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Of each row what the token file has; an empty dict where there is none."""
        try:
            found = read_tokens(self.folder, step, [row.line for row in rows])
        except DataError as error:
            found = []
            self.problems.append(str(error))
        return found or [{}] * len(rows)


def stamp_of(path: Path) -> tuple[int, int] | None:
    """Two looks at a file have found the same content where they have found the same stamp; None where there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _index_row(row: dict[str, Any], uid: str, number: int, line: int, offset: int, length: int) -> Row:
    score, num_tokens, sample = row.get("score"), row.get("num_tokens"), row.get("sample_index")
    prompt, response = _text(row.get("prompt")), row.get("response")
    return Row(
        prompt_id=_hash(prompt),
        uid=uid,
        sample_index=sample if isinstance(sample, int) else number,
        score=float(score) if is_number(score) and np.isfinite(score) else None,
        num_tokens=num_tokens if is_number(num_tokens) and isinstance(num_tokens, int) else None,
        source=str(row.get("data_source") or ""),
        finish=str(row.get("finish_reason") or ""),
        valid=row.get("valid") is not False,
        trained=row.get("trained") is not False,
        cost=len(prompt) // 4 + (len(response) if isinstance(response, str) else 0),
        line=line,
        offset=offset,
        length=length,
    )


@lru_cache(maxsize=65536)
def _hash(prompt: str) -> int:
    return zlib.crc32(prompt.encode("utf-8", "surrogatepass"))


def _text(value: Any) -> str:
    return (
        value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    )


def _small(extras: dict[str, Any], most: int = 2000) -> dict[str, Any]:
    """Extras whose long texts are cut: a ground truth may be a whole set of tests."""
    small: dict[str, Any] = {}
    for name, value in extras.items():
        if isinstance(value, bool | int | float):
            small[name] = value
            continue
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        small[name] = value if len(text) <= most else f"{text[:most]} ... ({len(text):,} characters)"
    return small


def histograms(index: dict[int, list[Row]], most_columns: int = 120, num_bins: int = 24) -> dict[str, Any]:
    """How scores and lengths are spread, step by step.

    Returns:
        ``steps`` (the first step of each column), ``rows`` (responses of each column), and for "score" and "length", where
        there are any: ``low``, ``high`` and ``counts`` [column][bin]. Long runs have several steps in a column.
    """
    steps = sorted(index)
    width = -(-len(steps) // most_columns) or 1
    groups = [steps[start : start + width] for start in range(0, len(steps), width)]
    found: dict[str, Any] = {"steps": [group[0] for group in groups]}
    found["rows"] = [sum(len(index[step]) for step in group) for group in groups]
    for name, of_row in (("score", lambda row: row.score), ("length", lambda row: row.num_tokens)):
        values = [
            np.array(
                [value for step in group for row in index[step] if (value := of_row(row)) is not None], dtype=float
            )
            for group in groups
        ]
        there = [column for column in values if len(column)]
        if not there:
            continue
        low, high = min(float(column.min()) for column in there), max(float(column.max()) for column in there)
        if high - low == np.inf:
            continue
        # There are no bins narrower than a number's own precision.
        is_spread = high - low > 1e-9 * max(abs(low), abs(high))
        edges = (low, high) if is_spread else (low - 0.5, high + 0.5)
        counts = [np.histogram(column, bins=num_bins, range=edges)[0].tolist() for column in values]
        found[name] = {"low": edges[0], "high": edges[1], "counts": counts}
    return found


def constant_groups(index: dict[int, list[Row]]) -> Iterator[tuple[int, int, int]]:
    """(step, groups whose scores are all equal, groups with more than one score) of every step, of what was trained on."""
    for step in sorted(index):
        groups: dict[str, set[float]] = {}
        sizes: dict[str, int] = {}
        for row in index[step]:
            if row.score is not None and row.valid and row.trained:
                groups.setdefault(row.uid, set()).add(row.score)
                sizes[row.uid] = sizes.get(row.uid, 0) + 1
        several = [uid for uid, size in sizes.items() if size > 1]
        if several:
            yield step, sum(len(groups[uid]) == 1 for uid in several), len(several)
