"""Seconds and pace of a training step: what stages took, a token and altogether."""

from collections.abc import Mapping

from burnish.protocol import DataProto


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
