"""Validation: a response or several to every prompt that is set aside, scored, under verl's names.

``val-core/<source>/<variable>/mean@<n>`` is the number to look at; the core variable is ``acc`` where the reward function returns
it, else ``reward`` (the score itself).  Sets that have a name (``data.val_files={name: files}``) stand under it instead of the
data source.  docs/metrics.md lists all names with their formulas.  Every prompt counts once: its samples first, then the mean
over prompts.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from burnish.core_algos.blocks import row_lengths
from burnish.protocol import DataProto
from burnish.reward import RewardManager
from burnish.trainer import statistics
from burnish.trainer.generators import generators_kept
from burnish.trainer.ppo.metrics import turn_metrics
from burnish.trainer.ppo.scoring import as_numbers, concat_scored, find_extra, score_batch
from burnish.trainer.ppo.stages import timed_apart

if TYPE_CHECKING:
    from burnish.trainer.ppo.ray_trainer import RayPPOTrainer

VOTE_NAMES = ("pred", "prediction", "answer")
"""The extras of a reward function that may hold the answer which a response gives; the first that is there is voted on."""
# What the metrics read of a scored batch, and what dumps, tables and the console read beside that.
_SCORE_TENSORS = ("token_level_scores", "valid", "response_mask")
_TEXT_TENSORS = ("prompts", "responses", "attention_mask")
# Of these and the largest k the core variable's stand under val-core.
_CORE_STATISTICS = ("mean", "best", "maj")


def run_validation(trainer: "RayPPOTrainer") -> dict[str, float]:
    """Validates the trainer's policy and hands the responses to its log; returns the metrics."""
    config = trainer.config

    def respond(batch_dict: dict[str, Any]) -> DataProto:
        n = config.actor_rollout_ref.rollout.val_kwargs.n
        return trainer._sample(trainer._get_gen_batch(batch_dict, n=n, uid_prefix="val"), validate=True)

    # Training draws the same whether there was a validation or not: a run that goes on may have one more, or one less.
    with timed_apart(trainer), generators_kept():
        batch, metrics = validate(
            trainer.val_dataloader or (),
            respond,
            trainer.val_reward_fn,
            max_response_length=config.data.max_response_length,
            keeps_texts=trainer.run_log.shows_validation,
        )
    trainer.run_log.validation(batch, trainer.global_steps)
    return metrics


def validate(
    prompts: Iterable[dict[str, Any]],
    respond: Callable[[dict[str, Any]], DataProto],
    reward_fn: RewardManager,
    *,
    max_response_length: int,
    keeps_texts: bool,
) -> tuple[DataProto, dict[str, float]]:
    """Responses to all prompts, scored, with their metrics.

    Args:
        prompts: batches of the data loader; each prompt comes once.
        respond: a batch of prompts -> responses, without rows that only fill up.
        keeps_texts: whether somebody reads prompts and responses afterwards. Without them a validation of many long responses
            needs a fraction of the memory.

    Returns:
        the scored rows, with no tensors but those that are read, and the metrics.
    """
    kept = [*_SCORE_TENSORS, *(_TEXT_TENSORS if keeps_texts else ())]
    scored, rounds = [], []
    for batch_dict in prompts:
        batch, metrics = score_batch(reward_fn, respond(batch_dict))
        scored.append(batch.select(batch_keys=[key for key in kept if key in batch.tensors]))
        rounds.append(metrics)
    batch = concat_scored(scored)
    return batch, validation_metrics(batch, max_response_length) | failure_counts(rounds)


def validation_metrics(batch: DataProto, max_response_length: int) -> dict[str, float]:
    """Statistics over the samples of each prompt, averaged over prompts, per validation set that has a name, else per data
    source; and the lengths of all responses.

    Rows without a score (the reward function abstained or failed) are left out and counted in
    ``val-aux/<source>/num_invalid``.
    """
    lengths = row_lengths(batch.tensors["response_mask"]).double().numpy()
    metrics: dict[str, float] = {}
    variables = _variables(batch)
    for source, rows in _rows_of_sources(batch):
        metrics |= _source_metrics(batch, variables, str(source), rows)
        metrics |= _length_metrics(f"val-aux/{source}/response_length", lengths[rows], max_response_length)
    return (
        metrics
        | _length_metrics("val-aux/response_length", lengths, max_response_length)
        | turn_metrics("val-aux/num_turns", batch.tensors["response_mask"])
    )


def failure_counts(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """How many responses of all validation batches were not scored as they should be, under
    ``val-aux/reward/<reason>_count``: those of errors, timeouts, numbers that are not finite, and abstentions."""
    counts: dict[str, float] = {}
    for metrics in rounds:
        for key, value in metrics.items():
            if key.startswith("reward/") and key.endswith("_count"):
                counts[f"val-aux/{key}"] = counts.get(f"val-aux/{key}", 0.0) + value
    return counts


def _rows_of_sources(batch: DataProto) -> Iterator[tuple[Any, np.ndarray]]:
    others = batch.non_tensor_batch
    unknown = np.array(["unknown"] * len(batch), dtype=object)
    sources = others.get("validation_set", others.get("data_source", unknown))
    for rows in statistics.group_rows(list(sources)):
        yield sources[rows[0]], rows


def _source_metrics(
    batch: DataProto, variables: Mapping[str, np.ndarray], source: str, rows: np.ndarray
) -> dict[str, float]:
    """Counts, and the statistics of every variable, of the rows of one source."""
    uids = batch.non_tensor_batch["uid"]
    scored = rows[batch.tensors["valid"].numpy()[rows]]
    # Of all rows: a row without a score must not give the metric another name.
    n = max(Counter(uids[rows]).values())
    metrics = {
        f"val-aux/{source}/num_prompts": float(len(set(uids[rows]))),
        f"val-aux/{source}/num_invalid": float(len(rows) - len(scored)),
    }
    if len(scored) == 0:
        return metrics
    core = "acc" if "acc" in variables else "reward"
    votes = next((found for name in VOTE_NAMES if (found := find_extra(batch, name)) is not None), None)
    for name, values in variables.items():
        # A number that some rows lack is a statistic of those that have it.
        there = scored[np.isfinite(values[scored])]
        if len(there) == 0:
            metrics[f"{'val-core' if name == core else 'val-aux'}/{source}/{name}/mean@{n}"] = float("nan")
            continue
        groups = [there[group] for group in statistics.group_rows(uids[there])]
        samples = _samples(values, groups)
        answers = None if votes is None else [[_vote(vote) for vote in votes[group]] for group in groups]
        for statistic, number in _statistics(samples, answers, n).items():
            is_core = name == core and statistic.startswith(_CORE_STATISTICS) and f"@{n}/" in f"{statistic}/"
            metrics[f"{'val-core' if is_core else 'val-aux'}/{source}/{name}/{statistic}"] = number
        if name == core and len(samples) > 1:
            means = statistics.mean_at_n(samples)
            metrics[f"val-aux/{source}/{name}/stderr@{n}"] = float(means.std(ddof=1) / np.sqrt(len(means)))
    return metrics


def _variables(batch: DataProto) -> dict[str, np.ndarray]:
    """The score and every number that the reward function returns, float64 [batch], NaN where a row has none."""
    variables = {"reward": batch.tensors["token_level_scores"].sum(-1).double().numpy()}
    for key in batch.meta_info.get("reward_extra_keys", []):
        numbers = as_numbers(batch.non_tensor_batch[key])
        if numbers is not None:
            variables[key] = numbers
    return variables


def _samples(values: np.ndarray, groups: list[np.ndarray]) -> statistics.Samples:
    """[prompts, samples]; a list where prompts have different numbers of them."""
    if len({len(group) for group in groups}) == 1:
        return values[np.stack(groups)]
    return [values[group] for group in groups]


def _vote(answer: Any) -> str | None:
    return None if answer is None else str(answer)


def _statistics(samples: statistics.Samples, answers: list[list[str | None]] | None, n: int) -> dict[str, float]:
    """Of one variable, by their names; those of several samples only where there are several."""
    found = {f"mean@{n}": statistics.mean_at_n(samples)}
    if n > 1:
        found[f"std@{n}"] = statistics.std_at_n(samples)
    for k in statistics.ks(n):
        drawn = {
            f"best@{k}": statistics.best_at_k(samples, k, replace=True),
            f"worst@{k}": statistics.worst_at_k(samples, k, replace=True),
        }
        if answers is not None:
            drawn[f"maj@{k}"] = statistics.maj_at_k(samples, answers, k, replace=True)
        for name, of_prompts in drawn.items():
            found |= {f"{name}/mean": of_prompts.mean, f"{name}/std": of_prompts.std}
        found |= _pass_at_k(samples, k)
    return {name: float(np.mean(of_prompts)) for name, of_prompts in found.items()}


def _pass_at_k(samples: statistics.Samples, k: int) -> dict[str, np.ndarray]:
    """``pass@k`` of a variable that says right or wrong, over the prompts that have k samples with it."""
    every = np.concatenate(list(samples))
    if ((every != 0) & (every != 1)).any():
        return {}
    enough = samples if isinstance(samples, np.ndarray) else [values for values in samples if len(values) >= k]
    if len(enough) == 0 or len(enough[0]) < k:
        return {}
    return {f"pass@{k}": statistics.pass_at_k(enough, k)}


def _length_metrics(name: str, lengths: np.ndarray, max_response_length: int) -> dict[str, float]:
    return {
        f"{name}/mean": float(lengths.mean()),
        f"{name}/max": float(lengths.max()),
        f"{name}/min": float(lengths.min()),
        f"{name}/clip_ratio": float((lengths >= max_response_length).mean()),
    }
