"""Metrics of a training step's batch, under verl's names; docs/metrics.md lists all of them with their formulas.

``critic/*`` are statistics of scores, rewards, advantages, returns and values (also when there is no critic: the name is
the field's). Seconds and pace are in `burnish.trainer.ppo.pace`: they are not part of what two equal runs have in common;
everything else is.
"""

import math

import torch

from burnish.core_algos.blocks import row_lengths
from burnish.core_algos.policy_difference import map_rows
from burnish.protocol import DataProto
from burnish.reward.placement import turn_ends
from burnish.trainer.ppo.token_statistics import kept_tokens, statistics_of_tokens

NON_DETERMINISTIC_PREFIXES = ("timing_s/", "timing_per_token_ms/", "perf/", "bottleneck/")


def _summary(name: str, values: torch.Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {}
    values = values.float()
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def _clip_ratio(name: str, lengths: torch.Tensor, limit: int) -> dict[str, float]:
    return {f"{name}/clip_ratio": (lengths >= limit).float().mean().item()} if lengths.numel() else {}


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
        **_clip_ratio("prompt_length", prompt_length, max_prompt_length),
        **_clip_ratio("response_length", response_length, max_response_length),
        **_clip_ratio("response_length_non_aborted", response_length[~aborted], max_response_length),
        "training/num_rows": float(len(batch)),
        "training/num_valid_rows": float(valid.sum()),
        "response/aborted_ratio": aborted.float().mean().item(),
        **turn_metrics("num_turns", response_mask),
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


def turn_metrics(name: str, response_mask: torch.Tensor) -> dict[str, float]:
    """``NAME/mean``, ``max`` and ``min``: runs of tokens that the policy sampled, in a response; nothing where no response has
    more than one."""
    num_turns = torch.cat(map_rows(lambda rows: row_lengths(turn_ends(response_mask[rows])), response_mask))
    return _summary(name, num_turns) if num_turns.numel() and num_turns.max() > 1 else {}
