"""Which responses fit into the page: all where they do, else a sample that keeps the same prompts at every step."""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from burnish.report.rollouts import Dumps, Row
from burnish.report.tokens import Pieces

MOST_ROWS = 20_000
"""Responses in a page, whatever their size: a table of more is slow in a browser."""
_MOST_ROWS_OF_A_STEP = 4096
# The newest steps are looked at most: this many times the share of an old step, halved every few steps.
_NEWEST, _HALVED_AFTER = 12.0, 4.0
_FEWEST_ROWS = 4
# A step is chosen anew, up to so many times, where its size was foretold worse than this share.
_TRIES, _PRECISION = 3, 0.15


@dataclass
class Chosen:
    """The responses of a folder of dumps that the page has.

    Attributes:
        rows: step -> the rows, in their file's order.
        chunks: step -> `Dumps.whole` of them, packed by `pack`.
    """

    rows: dict[int, list[Row]] = field(default_factory=dict)
    chunks: dict[int, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes that all of it takes in the page."""
        return sum(map(len, self.chunks.values())) + sum(_beside(rows) for rows in self.rows.values())


def pack(value: Any) -> str:
    """JSON, compressed, as text that needs no escaping in HTML."""
    text = json.dumps(value, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=4, mtime=0)).decode()


def choose(dumps: Dumps, pieces: Pieces | None, budget: int, most_rows: int = MOST_ROWS) -> Chosen:
    """Takes responses from the newest step to the oldest, as many as the budget allows to each.

    Args:
        budget: bytes that `Chosen.size` does not exceed.
    """
    chosen = Chosen()
    steps = sorted(dumps.index, reverse=True)
    weights = {step: 1 + _NEWEST * 0.5 ** (place / _HALVED_AFTER) for place, step in enumerate(steps)}
    left, weight_left, rows_left = float(budget), sum(weights.values()), float(most_rows)
    # Bytes in the page for one of `_cost`; corrected by what chunks really take.
    factor = 1.0
    for step in steps:
        share = weights[step] / weight_left
        most = min(_MOST_ROWS_OF_A_STEP, rows_left * share)
        for _ in range(_TRIES):
            rows = pick(dumps.index[step], left * share / factor, most)
            if not rows:
                break
            chunk = pack(dumps.whole(step, rows, pieces))
            size = len(chunk) + _beside(rows)
            foretold = factor * sum(map(_cost, rows))
            factor *= size / foretold
            if size > left:
                # So near to the budget a little less is sure to fit.
                factor *= 1 + _PRECISION
            elif abs(size / foretold - 1) < _PRECISION or len(rows) in (_FEWEST_ROWS, len(dumps.index[step])):
                break
        while rows and size > left:
            rows = rows[: len(rows) // 2]
            chunk = pack(dumps.whole(step, rows, pieces))
            size = len(chunk) + _beside(rows)
        if rows:
            chosen.rows[step], chosen.chunks[step] = rows, chunk
            left -= size
            rows_left -= len(rows)
        weight_left -= weights[step]
    return chosen


def _beside(rows: Sequence[Row]) -> int:
    """Bytes of a chunk's element and of its rows in the index."""
    return 80 + 48 * len(rows)


def pick(rows: Sequence[Row], cost: float, most_rows: float) -> list[Row]:
    """Some rows of a step, in their order: whole groups first, always those of the same prompts, and of the first group that
    does not fit as a whole the best, the worst and the longest.

    Args:
        cost: of all that are taken, in the units of `_cost`; a few rows are taken in any case.
    """
    if sum(map(_cost, rows)) <= cost and len(rows) <= most_rows:
        return list(rows)
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.prompt_id, row.uid), []).append(row)
    taken: list[Row] = []
    spent = 0.0
    for _, group in sorted(groups.items()):
        for row in group if _fits(group, spent, len(taken), cost, most_rows) else _telling(group):
            if len(taken) >= _FEWEST_ROWS and not _fits([row], spent, len(taken), cost, most_rows):
                break
            taken.append(row)
            spent += _cost(row)
        else:
            continue
        break
    return sorted(taken, key=lambda row: row.offset)


def _fits(rows: Sequence[Row], spent: float, num_taken: int, cost: float, most_rows: float) -> bool:
    return spent + sum(map(_cost, rows)) <= cost and num_taken + len(rows) <= most_rows


def _telling(group: Sequence[Row]) -> list[Row]:
    """The rows of a group, those first that say most about it."""
    by_score = sorted(group, key=lambda row: (row.score is None, -(row.score or 0.0)))
    longest = max(group, key=lambda row: row.cost)
    return list({id(row): row for row in (by_score[0], by_score[-1], longest, *group)}.values())


def _cost(row: Row) -> float:
    """About the bytes of a row in the page: compressed text, and the numbers of its tokens."""
    return 150 + 0.4 * row.cost + 9.0 * (row.num_tokens or 0)


def index_of(kept: Mapping[int, Sequence[Row]], all_rows: Mapping[int, Sequence[Row]]) -> dict[str, Any]:
    """What the page knows of its responses without opening a chunk.

    Returns:
        ``sources`` and ``finishes`` (texts), and ``steps``: for each step its number, all its responses and the kept ones as
        [prompt id, score, tokens, source, finish reason, sample index, valid] with places in these two.
    """
    sources: dict[str, int] = {}
    finishes: dict[str, int] = {}
    steps = []
    for step in sorted(all_rows):
        rows = [
            [
                row.prompt_id,
                None if row.score is None else float(f"{row.score:.6g}"),
                row.num_tokens,
                sources.setdefault(row.source, len(sources)),
                finishes.setdefault(row.finish, len(finishes)),
                row.sample_index,
                int(row.valid),
            ]
            for row in kept.get(step, ())
        ]
        steps.append({"step": step, "total": len(all_rows[step]), "rows": rows})
    return {"sources": list(sources), "finishes": list(finishes), "steps": steps}
