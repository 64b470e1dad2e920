"""Scores of the tasks of reasoning-gym, by each task's own verifier (https://github.com/open-thought/reasoning-gym).

A row's data source is ``reasoning_gym/<task>``, and its ``extra_info["entry"]`` the task's entry (question, answer,
metadata) as JSON text; `burnish data reasoning_gym` writes such rows. The answer is what stands in the last ``<answer>``,
else after the last "Answer:" or in the last box, else the whole response.
"""

import functools
import json
from typing import Any

from burnish.reward.functions.answer import last_answer, last_tag
from burnish.reward.functions.reference import with_reference
from burnish.utils.errors import ConfigError, RewardError

_TUPLE, _PAIRS = "__tuple__", "__pairs__"
INSTALL = "reasoning_gym is not installed: pip install 'burnish[reasoning-gym]'."


@functools.cache
def load_scorer(task: str) -> Any:
    """The dataset of a task, whose ``score_answer(answer, entry)`` scores.

    Raises:
        ConfigError: reasoning-gym is not installed.
        RewardError: it has no such task.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(f"The data source reasoning_gym/{task} cannot be scored. {INSTALL}") from error
    if task not in DATASETS:
        raise RewardError(f"reasoning_gym has no task {task!r}. `burnish data reasoning_gym --list` names them.")
    return reasoning_gym.create_dataset(task, size=1, seed=0)


def encode_entry(entry: dict[str, Any]) -> str:
    """An entry as JSON text, from which `decode_entry` makes an equal one: verifiers know tuples from lists.

    Raises:
        TypeError: it holds what JSON cannot.
    """
    return json.dumps(_mark(entry), ensure_ascii=False)


def decode_entry(text: str) -> dict[str, Any]:
    """The entry that `encode_entry` wrote, or one of plain JSON."""
    return json.loads(text, object_hook=_unmark)


def _mark(value: Any) -> Any:
    """``value`` with tuples, and dicts whose keys are no texts, as dicts of one marked key."""
    if isinstance(value, tuple):
        return {_TUPLE: [_mark(entry) for entry in value]}
    if isinstance(value, list):
        return [_mark(entry) for entry in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _mark(entry) for key, entry in value.items()}
        return {_PAIRS: [[_mark(key), _mark(entry)] for key, entry in value.items()]}
    return value


def _unmark(value: dict[str, Any]) -> Any:
    if value.keys() == {_TUPLE}:
        return tuple(value[_TUPLE])
    return dict(value[_PAIRS]) if value.keys() == {_PAIRS} else value


def read_entry(extra_info: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """The row's task and its entry.

    Raises:
        RewardError: it has none.
    """
    try:
        entry = (extra_info or {})["entry"]
        entry = decode_entry(entry) if isinstance(entry, str) else entry
        return entry["metadata"]["source_dataset"], entry
    except (KeyError, TypeError, ValueError) as error:
        raise RewardError(
            "A row of reasoning_gym needs its entry in extra_info['entry'], as `burnish data reasoning_gym` writes it: JSON "
            "with question, answer and metadata, in which source_dataset names the task."
        ) from error


def extract_answer(solution_str: str) -> str:
    """What a response gives as its answer, see above."""
    tagged = last_tag(solution_str)
    if tagged is not None:
        return tagged[1].strip()
    stated = last_answer(solution_str)
    return solution_str.strip() if stated is None else stated


def reference_solution(ground_truth: Any, extra_info: dict[str, Any] | None = None) -> str | None:
    """The entry's answer in ``<answer>`` tags; None for tasks that have no answer of their own."""
    answer = read_entry(extra_info)[1].get("answer")
    return None if answer is None else f"<answer>{answer}</answer>"


@with_reference(reference_solution)
def compute_score(
    solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, *, data_source: str = ""
) -> dict[str, Any]:
    """The score by the task's verifier, 0..1: 1 for a right answer, partly right ones between, as the task defines.

    Args:
        ground_truth: the entry's answer; the verifier reads the entry.

    Returns:
        ``score``; ``acc``, whether it is 1; ``pred``, the answer found.

    Raises:
        ConfigError: reasoning-gym is not installed.
        RewardError: the row has no entry, or of an unknown task.
    """
    task, entry = read_entry(extra_info)
    pred = extract_answer(solution_str)
    score = float(load_scorer(task).score_answer(pred, entry))
    return {"score": score, "acc": score >= 1.0, "pred": pred}
