"""docs/metrics.md as patterns, to compare what runs log with what the page says."""

import itertools
import json
import re
from functools import cache
from pathlib import Path

from tests.conftest import REPO

_PLACEHOLDERS = {
    "<source>": r".+",
    "<variable>": r"[^@]+",
    "<extra>": r".+",
    "<stage>": r"[a-z_]+",
    "<rule>": r"[a-z0-9_]+",
    "<N>": r"\d+",
    "<k>": r"\d+",
}


@cache
def rows() -> dict[str, str]:
    """Every metric of the page's tables, with braces written out, and the condition of its row."""
    found: dict[str, str] = {}
    for line in (REPO / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| `"):
            continue
        for name in re.findall(r"`([^`]+)`", cells[0]):
            for written in _expand(name):
                assert written not in found, f"docs/metrics.md has {written} twice"
                found[written] = cells[-1]
    return found


def _expand(name: str) -> list[str]:
    """``a/{b,c}`` -> ``a/b``, ``a/c``."""
    parts = [part.split(",") for part in re.split(r"[{}]", name)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


@cache
def patterns() -> dict[str, re.Pattern]:
    """A pattern for every metric of the page."""
    found = {}
    for name in rows():
        parts = re.split(r"(<\w+>)", name)
        found[name] = re.compile(
            "".join(_PLACEHOLDERS[part] if part.startswith("<") else re.escape(part) for part in parts)
        )
    return found


def undocumented(keys) -> set[str]:
    """The keys that no row of the page stands for."""
    return {key for key in keys if not any(pattern.fullmatch(key) for pattern in patterns().values())}


def produced(keys) -> set[str]:
    """The rows of the page that the keys are instances of."""
    return {name for name, pattern in patterns().items() if any(pattern.fullmatch(key) for key in keys)}


def logged_keys(run_dir: Path) -> set[str]:
    """All metrics in a run's ``metrics.jsonl``."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {key for line in lines for key in json.loads(line)} - {"step"}
