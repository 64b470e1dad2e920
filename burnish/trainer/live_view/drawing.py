"""Small drawings in one line of text."""

import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"
# Control characters of a response would move the cursor; their pictures do not.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
_PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """The last ``width`` values as bars between their least and their greatest; one that is not finite is a gap."""
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    shown = list(values)[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return " " * len(shown)
    low, high = min(finite), max(finite)
    span = high - low

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return " "
        place = 0.5 if span == 0 else (value - low) / span
        return blocks[min(len(blocks) - 1, int(place * len(blocks)))]

    return "".join(map(bar, shown))


def shares(parts: Sequence[tuple[str, float]], width: int) -> list[tuple[str, int]]:
    """How many of ``width`` cells each part of a whole gets: in proportion, all of them, the largest remainders first.

    Args:
        parts: name and size, none negative.
    """
    total = sum(size for _, size in parts)
    if total <= 0 or width <= 0:
        return []
    exact = [(name, width * size / total) for name, size in parts]
    cells = {name: int(size) for name, size in exact}
    left = width - sum(cells.values())
    for name, _ in sorted(exact, key=lambda part: part[1] - int(part[1]), reverse=True)[:left]:
        cells[name] += 1
    return [(name, cells[name]) for name, _ in exact if cells[name]]


def duration(seconds: float) -> str:
    """ "8.2 s", "4:05", "3:04:05" or "2 d 03 h"."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02d} h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def printable(text: str, encoding: str = "utf-8") -> str:
    """``text`` without what a terminal would obey or could not encode."""
    return text.translate(_PICTURES).encode(encoding, "replace").decode(encoding)


def number(value: float) -> str:
    """Four digits."""
    return f"{value:.4g}"
