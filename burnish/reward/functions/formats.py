"""Scores of how a response is written, whatever it says; one of several functions, with a weight:

reward.functions.format.path=pkg://burnish.reward.functions.formats reward.functions.format.name=think_answer
"""

import functools
import re
from typing import Any

from burnish.utils.errors import RewardError


def think_answer(
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    *,
    data_source: str = "",
    opened: bool = False,
) -> float:
    """1.0 for ``<think>...</think><answer>...</answer>`` and nothing else but white space, each tag once, neither part
    empty; else 0.0.

    Args:
        opened: the prompt's template ends in ``<think>``, so that the response has the closing tag only.
    """
    text = f"<think>{solution_str}" if opened else solution_str
    return float(_in_order(text.strip(), ("think", "answer")))


def think(
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    *,
    data_source: str = "",
    opened: bool = False,
) -> float:
    """1.0 for ``<think>...</think>`` and text behind it, each tag once, neither part empty; else 0.0. ``opened`` as in
    `think_answer`."""
    text = (f"<think>{solution_str}" if opened else solution_str).strip()
    head, closing, rest = text.partition("</think>")
    once = text.count("<think>") == 1 and text.count("</think>") == 1
    inside = head.removeprefix("<think>")
    return float(once and head.startswith("<think>") and bool(closing and inside.strip() and rest.strip()))


def tags(
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    *,
    data_source: str = "",
    names: tuple[str, ...] | list[str] = ("think", "answer"),
) -> float:
    """The share of ``<name>`` and ``</name>`` that occur exactly once, in 0..1: a slope towards `think_answer`.

    Raises:
        RewardError: no ``names``.
    """
    if not names:
        raise RewardError("formats.tags needs the names of tags: reward_kwargs.names=[think,answer].")
    wanted = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]
    return sum(solution_str.count(tag) == 1 for tag in wanted) / len(wanted)


def matches(
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    *,
    data_source: str = "",
    pattern: str,
    whole: bool = False,
) -> float:
    """1.0 where the regular expression ``pattern`` is found in the response, or with ``whole`` is all of it; else 0.0.
    ``.`` does not match the end of a line; write ``(?s)`` in front where it should. Patterns such as ``(a+)+$`` take time
    that doubles with each character: `reward.timeout` ends them where functions run in processes of their own.

    Raises:
        RewardError: ``pattern`` is no regular expression.
    """
    expression = _compiled(pattern)
    return float((expression.fullmatch if whole else expression.search)(solution_str) is not None)


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise RewardError(f"The pattern {pattern!r} of formats.matches is no regular expression: {error}.") from error


def _in_order(text: str, names: tuple[str, ...]) -> bool:
    """Whether ``text`` is the named parts one after the other, each tag once, no part empty."""
    position = 0
    for name in names:
        opening, closing = f"<{name}>", f"</{name}>"
        if text.count(opening) != 1 or text.count(closing) != 1 or not text.startswith(opening, position):
            return False
        start, end = position + len(opening), text.find(closing, position)
        if end < 0 or not text[start:end].strip():
            return False
        position = end + len(closing)
        position += len(text[position:]) - len(text[position:].lstrip())
    return position == len(text)
