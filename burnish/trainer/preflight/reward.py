"""Rewards before training: right answers, made from the ground truth, and an empty one, scored by the run's own function."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.config import PPOTrainerConfig
from burnish.protocol import DataProto
from burnish.reward.compute_score import reference_solution
from burnish.reward.manager import result_of
from burnish.rollout import RolloutResponse, requests_from_dataproto, responses_to_dataproto
from burnish.trainer.ppo.prompts import repeat_prompts
from burnish.trainer.preflight.findings import Findings
from burnish.utils.errors import RewardError
from burnish.utils.foreign_code import Caught

_AREA = "reward"
_ROWS_OF_A_SOURCE = 3
_MOST_SOURCES = 16
# Each of their scores costs somebody's money or another machine's time.
_PAID = ("rate_limited", "remote")
# How a right answer may have to look where the function does not say.
_PHRASINGS = (
    "{}",
    "#### {}",
    "The answer is {}.",
    "\\boxed{{{}}}",
    "Answer: {}",
    "<answer>{}</answer>",
    "<think>\nThat is easy.\n</think>\n<answer>{}</answer>",
)


@dataclass(frozen=True, slots=True)
class _Try:
    """A response to be scored: which row, how it is phrased, and whether it is known to be right."""

    row: int
    text: str
    is_known: bool = False


def probe_reward(
    config: PPOTrainerConfig,
    manager: Any,
    dataset: Any,
    tokenizer: Any,
    findings: Findings,
    *,
    known_only: bool = False,
    key: str = "data.train_files",
) -> None:
    """Lets the reward manager score right answers and an empty one to some rows of every data source.

    Args:
        known_only: only where the built-in function itself tells a right answer, which costs nothing and runs no code of the
            user's.
        key: of the dataset, for messages.
    """
    if config.reward.reward_model.enable and not config.reward.reward_model.function_weight:
        return  # No function is called.
    if _is_paid(config):
        if not known_only:
            findings.note(_AREA, "Scores cost money or another machine's time here, so none was asked for.")
        return
    custom = getattr(manager, "compute_score", None)
    built_in = _is_built_in(custom)
    if known_only and not built_in:
        return
    rows = _sample(dataset)
    tries = [_Try(row, "") for row in rows]
    for row in rows:
        tries += _right_answers(dataset[row], row, built_in)
    if known_only:
        tries = [one for one in tries if one.is_known]
    if not tries:
        return
    with Caught() as caught:
        scores, num_failed = _score(manager, dataset, tries, tokenizer)
    if caught.error is not None:
        error = caught.error
        told = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
        (findings.error if not known_only else findings.warning)(
            _AREA, f"The reward function fails on sample rows of {key}: {told}", _function_key(config)
        )
        return
    if num_failed:
        findings.warning(
            _AREA,
            f"The reward function fails on {num_failed} of {len(tries)} responses to sample rows of {key}: it raises, takes "
            f"too long, dies, or returns no score or no finite one. The first is logged above; in training "
            f"reward.on_error={config.reward.on_error} would decide.",
            _function_key(config),
        )
    by_row: dict[int, list[tuple[_Try, float | None]]] = {}
    for one, score in zip(tries, scores, strict=True):
        by_row.setdefault(one.row, []).append((one, score))
    judged: dict[tuple[str, str, str], list[str]] = {}
    best = {row: _judge(row, found, dataset, judged, key) for row, found in by_row.items()}
    for (level, where, _), messages in judged.items():
        # Sample rows of a data source that are wrong alike are one mistake.
        others = len(messages) - 1
        likewise = f" {others} other sample row{' is' if others == 1 else 's are'} likewise." if others else ""
        findings.add(level, _AREA, messages[0] + likewise, where or _function_key(config))  # type: ignore[arg-type]
    values = [value for value in best.values() if value is not None]
    findings.facts.setdefault("reward", {})[key] = {"rows": len(by_row), "best_scores": values}
    if not known_only:
        _tell_scores(by_row, values, findings, key)


def _tell_scores(
    by_row: dict[int, list[tuple[_Try, float | None]]], best: list[float], findings: Findings, key: str
) -> None:
    """What right answers and an empty one scored, so that a person sees what the function pays for."""
    empty = [score for found in by_row.values() for one, score in found if not one.text and score is not None]
    if not best or not empty:
        return
    rows = f"{len(best)} sample row{'' if len(best) == 1 else 's'}"
    findings.note(_AREA, f"{key}: right answers to {rows} score {_span(best)}, empty ones {_span(empty)}.")


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _is_paid(config: PPOTrainerConfig) -> bool:
    return config.reward.reward_manager.name in _PAID or config.reward.judge.url is not None


def _is_built_in(function: Any) -> bool:
    from burnish.reward import default_compute_score

    while hasattr(function, "func"):
        function = function.func
    return function is default_compute_score


def _function_key(config: PPOTrainerConfig) -> str:
    if config.reward.functions:
        return "reward.functions"
    path = config.reward.custom_reward_function.path
    return "reward.custom_reward_function.path" if path else "data.reward_fn_key"


def _sample(dataset: Any) -> list[int]:
    """Positions of a few rows of each data source, spread over the dataset."""
    num_rows, chosen = len(dataset), []
    counts: dict[str, int] = {}
    step = max(1, num_rows // 512)
    for position in range(0, num_rows, step):
        source = dataset[position].get("data_source") or "unknown"
        if source not in counts and len(counts) == _MOST_SOURCES:
            continue
        counts[source] = counts.get(source, 0) + 1
        if counts[source] <= _ROWS_OF_A_SOURCE:
            chosen.append(position)
    return chosen


def _right_answers(row: dict[str, Any], position: int, built_in: bool) -> Iterator[_Try]:
    truth, extra = (row.get("reward_model") or {}).get("ground_truth"), row.get("extra_info")
    if built_in:
        try:
            known = reference_solution(row.get("data_source") or "unknown", truth, extra)
        except RewardError:
            return  # Told by the check of every row.
        if known is not None:
            yield _Try(position, known, is_known=True)
        return
    if truth is None:
        return
    for answer in _as_texts(truth):
        for phrasing in _PHRASINGS:
            yield _Try(position, phrasing.format(answer))


def _as_texts(truth: Any) -> list[str]:
    """What a person would write for a ground truth."""
    if isinstance(truth, str):
        # A worked solution, as gsm8k's answers are, is a right response itself.
        return [truth, truth.rpartition("####")[2].strip()] if "####" in truth else [truth]
    if isinstance(truth, list | tuple):
        return [str(entry) for entry in truth[:3] if isinstance(entry, str | int | float)] or [
            json.dumps(truth, default=str)
        ]
    if isinstance(truth, dict):
        inner = [truth[name] for name in ("answer", "target", "ground_truth", "solution") if name in truth]
        return [text for value in inner[:1] for text in _as_texts(value)] or [json.dumps(truth, default=str)]
    return [str(truth)]


def _score(manager: Any, dataset: Any, tries: Sequence[_Try], tokenizer: Any) -> tuple[list[float | None], int]:
    """The scores of the tries, None where there is none, and how many of them failed."""
    from burnish.data import collate_fn

    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else pad
    batch = _responses(
        collate_fn([dataset[one.row] for one in tries], pad), [one.text for one in tries], tokenizer, end, pad
    )
    result = result_of(manager, batch)
    totals = result.token_level_scores.sum(-1).tolist()
    valid = result.valid.tolist()
    num_failed = sum(int(result.metrics.get(f"reward/{name}_count", 0)) for name in ("error", "timeout", "non_finite"))
    return [total if is_valid else None for total, is_valid in zip(totals, valid, strict=True)], num_failed


def _responses(batch_dict: dict[str, Any], texts: Sequence[str], tokenizer: Any, end: int, pad: int) -> DataProto:
    """A batch as generation leaves it, with these texts as responses."""
    batch = repeat_prompts(batch_dict, n=1, uid_prefix="check", pad_token_id=pad)
    prompts = batch.pop(["input_ids", "attention_mask", "position_ids"])
    prompts.non_tensor_batch = {key: batch.non_tensor_batch[key] for key in ("uid", "sample_index")}
    responses = []
    for request, text in zip(requests_from_dataproto(prompts), texts, strict=True):
        ids = [*tokenizer.encode(text, add_special_tokens=False), end]
        responses.append(
            RolloutResponse(request.request_id, ids, [0.0] * len(ids), finish_reason="stop", policy_version=0)
        )
    return batch.union(responses_to_dataproto(prompts, responses, pad_token_id=pad))


def _judge(
    row: int,
    found: list[tuple[_Try, float | None]],
    dataset: Any,
    told: dict[tuple[str, str, str], list[str]],
    key: str,
) -> float | None:
    """Notes in ``told`` what the scores of one row say, by level, key and likeness; returns the best of a right answer."""
    location = getattr(dataset, "location", lambda position: f"row {position} of {key}")(row)
    source = dataset[row].get("data_source") or "unknown"
    empty = next((score for one, score in found if one.text == ""), None)
    right = [(score, one) for one, score in found if one.text and score is not None]
    where = f"{location} (data source {source})"
    if not right:
        if any(one.text for one, _ in found):
            told.setdefault(("error", "", f"{source} none"), []).append(
                f"{where}: the reward function gives no score to a right answer."
            )
        return None
    best, answer = max(right, key=lambda pair: pair[0])
    shown = answer.text if len(answer.text) <= 80 else f"{answer.text[:77]}..."
    if answer.is_known and best <= 0:
        told.setdefault(("error", "data.reward_fn_key", f"{source} known"), []).append(
            f"{where}: the right answer {shown!r}, made from its ground truth, scores {best:g}."
        )
    elif not answer.is_known and (best <= 0 or (empty is not None and best <= empty)):
        than = f"and an empty response {empty:g}" if empty is not None else "in whatever way it is put"
        truth = (dataset[row].get("reward_model") or {}).get("ground_truth")
        told.setdefault(("warning", "", f"{source} {best:g} {empty}"), []).append(
            f"{where}: its ground truth {truth!r:.60} ({type(truth).__name__}) as the answer scores {best:g} at best (tried: "
            f"{', '.join(repr(one.text[:40]) for _, one in right[:4])}, ...), {than}. Does the function read ground_truth as "
            f"it is in this row?"
        )
    return best
