"""Metrics of a training step, under verl's names.

``critic/*`` are statistics of scores, rewards, advantages, returns and values (also when there is no critic: the name is
the field's). ``timing_s/*`` are seconds per stage, ``perf/*`` the pace. Timing and pace are not part of what two equal runs
have in common; everything else is.
"""

import math
from collections.abc import Mapping

import torch

from burnish.config import PPOTrainerConfig
from burnish.core_algos.blocks import row_lengths
from burnish.protocol import DataProto
from burnish.trainer.ppo.roles import need_critic
from burnish.trainer.ppo.token_statistics import kept_tokens, statistics_of_tokens

NON_DETERMINISTIC_PREFIXES = ("timing_s/", "timing_per_token_ms/", "perf/")


def _summary(name: str, values: torch.Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {}
    values = values.float()
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def compute_data_metrics(
    batch: DataProto, use_critic: bool, max_prompt_length: int, max_response_length: int
) -> dict[str, float]:
    """Statistics of one step's batch: scores, rewards, advantages, returns, values, lengths.

    Rows without a score (``valid`` is False) are left out of all but the lengths, and tokens that are not trained on out of
    advantages, returns and values. ``clip_ratio`` is the share of rows as long as is allowed.
    """
    tensors = batch.tensors
    response_mask, valid = tensors["response_mask"], tensors["valid"]
    aborted = torch.tensor([reason == "abort" for reason in batch.non_tensor_batch["finish_reason"]])
    response_length = row_lengths(response_mask)
    prompt_length = row_lengths(tensors["attention_mask"][:, : -response_mask.shape[1]])
    return {
        **_summary("critic/score", tensors["token_level_scores"].sum(-1)[valid]),
        **_summary("critic/rewards", tensors["token_level_rewards"].sum(-1)[valid]),
        **_token_summaries(batch, use_critic),
        **_summary("response_length", response_length),
        **_summary("response_length_non_aborted", response_length[~aborted]),
        **_summary("prompt_length", prompt_length),
        "prompt_length/clip_ratio": (prompt_length >= max_prompt_length).float().mean().item(),
        "response_length/clip_ratio": (response_length >= max_response_length).float().mean().item(),
        "training/num_rows": float(len(batch)),
        "training/num_valid_rows": float(valid.sum()),
        "response/aborted_ratio": aborted.float().mean().item(),
    }


def _token_summaries(batch: DataProto, use_critic: bool) -> dict[str, float]:
    """Of the tokens that are trained on: advantages and returns; with a critic its values, and how much of the returns'
    variance they explain."""
    tensors = batch.tensors
    names = ["advantages", "returns", *(["values"] if use_critic else [])]

    def values_of(rows: slice) -> dict[str, torch.Tensor]:
        values = {name: kept_tokens(tensors[name], tensors["loss_mask"], rows) for name in names}
        return values | ({"unexplained": values["returns"] - values["values"]} if use_critic else {})

    statistics = statistics_of_tokens(values_of, tensors["loss_mask"])
    metrics: dict[str, float] = {}
    for name in names:
        metrics |= statistics[name].summary(f"critic/{name}")
    if use_critic and statistics["returns"].count > 1:
        unexplained, variance = statistics["unexplained"].variance(), statistics["returns"].variance()
        metrics["critic/vf_explained_var"] = 1 - unexplained / (variance + 1e-5)
    return metrics


def compute_rollout_difference(batch: DataProto) -> dict[str, float]:
    """How far the rollout engine's probabilities are from the trainer's, on the sampled tokens."""
    tensors = batch.tensors
    if "old_log_probs" not in tensors or "rollout_log_probs" not in tensors:
        return {}
    mask = tensors["response_mask"]

    def values_of(rows: slice) -> dict[str, torch.Tensor]:
        ours = kept_tokens(tensors["old_log_probs"], mask, rows).exp_()
        theirs = kept_tokens(tensors["rollout_log_probs"], mask, rows).exp_()
        difference = ours - theirs
        return {"ours": ours, "theirs": theirs, "difference": difference, "distance": difference.abs()}

    statistics = statistics_of_tokens(values_of, mask)
    distance = statistics["distance"]
    metrics = {
        "training/rollout_probs_diff_mean": distance.mean.item(),
        "training/rollout_probs_diff_max": distance.maximum.item(),
        "training/rollout_probs_diff_std": math.sqrt(distance.variance(correction=0)),
    }
    ours, theirs, difference = (statistics[name].variance() for name in ("ours", "theirs", "difference"))
    if ours * theirs > 0:
        covariance = (ours + theirs - difference) / 2
        metrics["training/rollout_actor_probs_pearson_corr"] = covariance / math.sqrt(ours * theirs)
    return metrics


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float], num_gen_tokens: int) -> dict[str, float]:
    """Seconds per stage, and milliseconds per token of the tokens that the stage works on.

    Args:
        num_gen_tokens: tokens that were sampled in the step; dynamic sampling leaves some of them out of the batch.
    """
    num_tokens = int(batch.tensors["attention_mask"].count_nonzero())
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    worked_on = {"gen": num_gen_tokens} | dict.fromkeys(
        ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"), num_tokens
    )
    for name, tokens in worked_on.items():
        if name in timing_raw and tokens:
            metrics[f"timing_per_token_ms/{name}"] = timing_raw[name] * 1000 / tokens
    return metrics


def compute_throughout_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """The pace of the whole step: ``perf/throughput`` is tokens per second and device (the name is verl's)."""
    num_tokens = int(batch.tensors["attention_mask"].count_nonzero())
    seconds = timing_raw["step"]
    return {
        "perf/total_num_tokens": float(num_tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": num_tokens / (seconds * n_gpus),
    }


def compute_step_metrics(
    batch: DataProto, timing_raw: Mapping[str, float], config: PPOTrainerConfig, *, num_gen_tokens: int, n_gpus: int
) -> dict[str, float]:
    """What there is to say of a finished step: its batch, its seconds, its pace."""
    data = config.data
    return {
        **compute_data_metrics(batch, need_critic(config), data.max_prompt_length, data.max_response_length),
        **compute_timing_metrics(batch, timing_raw, num_gen_tokens),
        **compute_throughout_metrics(batch, timing_raw, n_gpus),
    }
