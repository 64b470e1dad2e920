"""What `data.train_files` and `data.val_files` may name, told apart by the text alone: no file is opened here."""

import glob
import re
from dataclasses import dataclass
from pathlib import Path

from burnish.utils import local_paths

FORMATS = (".parquet", ".jsonl", ".json", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz")
"""The ends of names that are read, by `burnish.data.readers`."""

_HUB_SCHEME = "hf://"
# org/name, then perhaps :configuration, then perhaps :split.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]*){0,2}")


@dataclass(frozen=True, slots=True)
class HubName:
    """A data set of the Hugging Face hub: ``org/name``, ``org/name:configuration`` or ``org/name:configuration:split``.

    Attributes:
        name: ``org/name``.
        configuration: its configuration; None: the only one.
        split: its split; None: the one of the key that names it.
    """

    name: str
    configuration: str | None
    split: str | None

    def __str__(self) -> str:
        return ":".join([self.name, self.configuration or "", self.split or ""]).rstrip(":")


def is_pattern(name: str) -> bool:
    """Whether ``name`` has wildcards and is no file of that very name."""
    return any(mark in name for mark in "*?[") and not local_paths.exists(name)


def matches(pattern: str) -> list[Path]:
    """The files that a pattern names, sorted; ``**`` goes through folders."""
    found = glob.glob(str(local_paths.expanded(pattern)), recursive=True)
    return [Path(name) for name in sorted(found) if Path(name).is_file()]


def hub_name(name: str) -> HubName | None:
    """The data set of the hub that ``name`` can only mean, where nothing of that name is on the disk; else None."""
    text = name.removeprefix(_HUB_SCHEME)
    is_marked = text != name
    is_path = not is_marked and (name.startswith((".", "/", "~")) or name.lower().endswith(FORMATS))
    if is_path or not _HUB_NAME.fullmatch(text) or (not is_marked and local_paths.exists(name)):
        return None
    repository, configuration, split = (*text.split(":"), "", "")[:3]
    return HubName(repository, configuration or None, split or None)


def named_sets(files: list[str] | dict[str, object] | None) -> dict[str | None, list[str]]:
    """Files by the name of their set; ``{None: files}`` where they have none. A name with dots is a name all the same."""
    if not isinstance(files, dict):
        return {None: list(files)} if files else {}
    sets: dict[str | None, list[str]] = {}
    for name, one in files.items():
        if isinstance(one, dict):
            sets.update({f"{name}.{inner}": inside for inner, inside in named_sets(one).items()})
        elif one is not None:
            sets[name] = [str(file) for file in (one if isinstance(one, list) else [one])]
    return sets
