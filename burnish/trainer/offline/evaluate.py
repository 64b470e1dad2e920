"""``burnish eval``: how good a finished model is on a file of prompts, how sure that is, and whether another one is better."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from burnish.config import PPOTrainerConfig
from burnish.protocol import DataProto
from burnish.reward import check_data_sources, load_reward_manager
from burnish.reward.result import EXTRA_PREFIX
from burnish.reward.score import Score
from burnish.trainer.offline import numbers
from burnish.trainer.offline.generate import Asked, Asking, prepare, rows_of, set_response_length
from burnish.trainer.offline.settings import AskOptions
from burnish.trainer.offline.source import find_model
from burnish.trainer.ppo.scoring import score_batch
from burnish.utils.errors import ConfigError, DataError, RewardError

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """What to measure.

    Attributes:
        models: one, or two to compare.
        ask: the prompts, and how responses are sampled.
        sizes: the k of pass@k and maj@k; None: 1, 2, 4, ... and n.
        pass_score: the least score of a response that counts as right, where the reward function gives no ``acc``.
        confidence: of intervals, two-sided.
        keeps_rows: whether the responses are wanted, too.
    """

    models: Sequence[str]
    ask: AskOptions
    sizes: Sequence[int] | None = None
    pass_score: float = 1.0
    confidence: float = 0.95
    keeps_rows: bool = False


@dataclass(kw_only=True)
class Measured:
    """A model's responses as far as numbers are made of them: lists over all responses, prompt after prompt.

    Attributes:
        prompts, sources, scores, lengths, finish_reasons: of each response its prompt's name, data source, score, number of
            tokens, and why it ended.
        first_error: what the reward function said first when it failed.
        rows: the responses themselves, where they are wanted.
    """

    prompts: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


def evaluate(
    options: EvalOptions, on_progress: OnProgress | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measures one model, or two and their difference.

    Returns:
        the result, in JSON's types, and the responses where they are wanted (else none).

    Raises:
        ConfigError, DataError, ModelError: a wrong request; nothing was generated.
        RewardError: the reward function cannot be started, or failed under reward.on_error=raise.
    """
    _check(options)
    # Both before either is loaded: what is wrong with the second is said at once.
    asked = _prepare(options)
    sizes = _sizes(options.sizes, asked[0].n)
    _check_reward(asked[0])
    measured = []
    for one in asked:
        measured.append(_measure(one, options.keeps_rows, on_progress))
        gc.collect()
        if one.device.type == "cuda":
            torch.cuda.empty_cache()
    result: dict[str, Any] = {
        "n": asked[0].n,
        "k": sizes,
        "confidence": options.confidence,
        "sampling": _sampling_facts(asked[0].config),
        "models": [_summary(one, found, sizes, options) for one, found in zip(asked, measured, strict=True)],
    }
    if len(measured) == 2:
        result["comparison"] = _comparison(measured[0], measured[1], sizes, options)
    rows = [
        {**({"model": one.source.name} if len(asked) > 1 else {}), **row}
        for one, found in zip(asked, measured, strict=True)
        for row in found.rows
    ]
    return result, rows


def _check(options: EvalOptions) -> None:
    if len(options.models) not in (1, 2):
        raise ConfigError(f"{len(options.models)} models: one is measured, or two are compared.")
    if options.ask.prompts:
        raise ConfigError("A prompt alone has no right answer to compare with: eval reads --data.")
    if not options.ask.data and not any("data.val_files" in text for text in options.ask.overrides):
        raise ConfigError(
            "--data names the file of prompts with their right answers: burnish eval MODEL --data test.jsonl"
        )
    if math.isnan(options.pass_score):
        raise ConfigError("--pass-score=nan: every response would be wrong. It must be a number, as 1.0.")
    if not 0 < options.confidence < 1:
        raise ConfigError(f"--confidence={options.confidence}: it must be between 0 and 1, as 0.95.")


def _prepare(options: EvalOptions) -> list[Asked]:
    """All models, asked alike: as the run of the first that has one says, and for responses of the same length."""
    sources = [find_model(name, base=options.ask.base) for name in options.models]
    like = next((source for source in sources if source.run_config is not None), sources[0])
    asked = [prepare(name, options.ask, like=like) for name in options.models]
    length = min(one.config.actor_rollout_ref.rollout.response_length for one in asked)
    for one in asked:
        set_response_length(one.config, length)
    return asked


def _sizes(wanted: Sequence[int] | None, n: int) -> list[int]:
    if wanted is None:
        from burnish.trainer.statistics import ks

        return [1, *ks(n)]
    if wrong := [k for k in wanted if not 1 <= k <= n]:
        raise ConfigError(f"-k {wrong[0]}: of {n} responses to a prompt (-n {n}) 1 to {n} can be drawn.")
    return sorted(set(wanted))


def _check_reward(asked: Asked) -> None:
    """That every row can be scored, before anything is generated."""
    if asked.config.reward.reward_model.enable:
        raise ConfigError(
            "reward.reward_model.enable=true: eval scores by functions and judges; a reward model needs the workers of a run. "
            "Name a function by --reward."
        )
    manager = load_reward_manager(asked.config.reward, asked.tokenizer)
    try:
        check_data_sources(asked.dataset, manager)
    except RewardError as error:
        raise DataError(str(error)) from error
    finally:
        _close(manager)


def _measure(asked: Asked, keeps_rows: bool, on_progress: OnProgress | None) -> Measured:
    found = Measured()
    manager = load_reward_manager(asked.config.reward, asked.tokenizer)
    start = time.perf_counter()
    try:
        with Asking(asked) as asking:
            done = None if on_progress is None else lambda num, total: on_progress(asked.source.name, num, total)
            for batch in asking.batches(done, manager):
                scored, metrics = score_batch(manager, batch)
                _take(found, scored, metrics)
                if keeps_rows:
                    found.rows += rows_of(scored, asked.tokenizer, asked.config)
    finally:
        _close(manager)
    found.seconds = time.perf_counter() - start
    return found


def _take(found: Measured, batch: DataProto, metrics: Mapping[str, float]) -> None:
    tensors, columns = batch.tensors, batch.non_tensor_batch
    values = tensors["token_level_scores"].double().sum(-1).tolist()
    valid = tensors["valid"].tolist()
    extras = batch.meta_info["reward_extra_keys"]
    unknown = ["unknown"] * len(batch)
    found.prompts += map(str, columns["uid"])
    found.sources += map(str, columns.get("validation_set", columns.get("data_source", unknown)))
    found.lengths += tensors["response_mask"].sum(-1).tolist()
    found.finish_reasons += map(str, columns["finish_reason"])
    for i in range(len(batch)):
        said = {key.removeprefix(EXTRA_PREFIX): columns[key][i] for key in extras if columns[key][i] is not None}
        found.scores.append(Score(value=values[i] if valid[i] else None, extras=said))
    for reason in numbers.REASONS:
        count = int(metrics.get(f"reward/{reason}_count", 0))
        found.failures[reason] = found.failures.get(reason, 0) + count


def _summary(asked: Asked, found: Measured, sizes: Sequence[int], options: EvalOptions) -> dict[str, Any]:
    return {
        "model": asked.source.name,
        "folder": asked.source.folder,
        "step": asked.source.step,
        "engine": asked.config.actor_rollout_ref.rollout.name,
        "device": str(asked.device),
        "dtype": str(asked.dtype).removeprefix("torch."),
        **_numbers(found, list(range(len(found.scores))), sizes, options),
        **{f"num_{reason}": count for reason, count in found.failures.items()},
        "data_sources": {source: _numbers(found, rows, sizes, options) for source, rows in _by_source(found).items()},
        "seconds": round(found.seconds, 3),
        "tokens_per_second": round(sum(found.lengths) / max(found.seconds, 1e-9), 1),
    }


def _numbers(found: Measured, rows: Sequence[int], sizes: Sequence[int], options: EvalOptions) -> dict[str, Any]:
    scores = [found.scores[i] for i in rows]
    of_prompts = _of_prompts(found, rows, sizes, options)
    return {
        "num_prompts": len(_groups(found, rows)),
        "num_responses": len(rows),
        "num_scored": sum(score.value is not None for score in scores),
        "response_length": float(np.mean([found.lengths[i] for i in rows])),
        "truncated": float(np.mean([found.finish_reasons[i] == "length" for i in rows])),
        "metrics": numbers.with_intervals(
            of_prompts, len(rows), options.confidence, is_share=numbers.shares(of_prompts, scores)
        ),
    }


def _of_prompts(
    found: Measured, rows: Sequence[int], sizes: Sequence[int], options: EvalOptions
) -> dict[str, np.ndarray]:
    groups = [[found.scores[i] for i in group] for group in _groups(found, rows)]
    of_prompts = numbers.prompt_numbers(groups, options.pass_score, sizes)
    # Where scores only say what is right it is pass@n under another name.
    if all(score.value in (0.0, 1.0, None) for group in groups for score in group):
        of_prompts = {name: values for name, values in of_prompts.items() if not name.startswith("best@")}
    return of_prompts


def _comparison(first: Measured, second: Measured, sizes: Sequence[int], options: EvalOptions) -> dict[str, Any]:
    """Over all prompts, and over those of each data source."""

    def over(rows: Sequence[int]) -> dict[str, Any]:
        one, other = (_of_prompts(found, rows, sizes, options) for found in (first, second))
        return numbers.comparison(one, other, options.confidence)

    # The prompts are rendered from the same rows in the same order.
    assert first.prompts == second.prompts
    return {
        "num_prompts": len(set(first.prompts)),
        "metrics": over(list(range(len(first.scores)))),
        "data_sources": {source: {"metrics": over(rows)} for source, rows in _by_source(first).items()},
    }


def _groups(found: Measured, rows: Sequence[int]) -> list[list[int]]:
    """The rows of each prompt."""
    groups: dict[str, list[int]] = {}
    for i in rows:
        groups.setdefault(found.prompts[i], []).append(i)
    return list(groups.values())


def _by_source(found: Measured) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for i, source in enumerate(found.sources):
        rows.setdefault(source, []).append(i)
    return rows


def _sampling_facts(config: PPOTrainerConfig) -> dict[str, Any]:
    rollout = config.actor_rollout_ref.rollout
    sampling = rollout.val_kwargs
    greedy = not sampling.do_sample or sampling.temperature == 0
    return {
        "temperature": 0.0 if greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": rollout.response_length,
        "seed": rollout.seed,
    }


def _close(manager: Any) -> None:
    if close := getattr(manager, "close", None):
        close()
