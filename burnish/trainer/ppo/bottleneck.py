"""Where a step's time goes, how far each stage is from what the device can do, and the key to turn.

Reads logged metrics and a configuration, nothing else, and imports no torch: a report of a run that is over uses it as the run
itself does.

A stage's *gap* is its seconds less those that the same work would take at the pace that burnish reaches where nothing is wrong
(shares of the device's ceilings, see `burnish.utils.device_table`). What does no work of the model (rewards, the driver, saving)
could ideally take no time at all, so its gap is all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from burnish.trainer.ppo.bottleneck_advice import Advice, advise
from burnish.utils.device_table import DECODE_EFFICIENCY, PASS_EFFICIENCY, UPDATE_EFFICIENCY

STEP_STAGES = (
    "gen",
    "reward",
    "filter",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
    "train",
)
"""The stages of a step, in their order, the last one of supervised fine-tuning; what else is timed lies inside one of them."""
STAGES_BESIDE = ("testing", "save_checkpoint")
"""What some steps are followed by; ``timing_s/step`` is without it."""
# The reward model's passes are timed by themselves, and lie in generation where they take their turn.
_INSIDE = {"gen": "reward_model"}
_UTILISATION = {
    "update_actor": ("actor", UPDATE_EFFICIENCY),
    "update_critic": ("critic", UPDATE_EFFICIENCY),
    "train": ("train", UPDATE_EFFICIENCY),
    "old_log_prob": ("old_log_prob", PASS_EFFICIENCY),
    "ref": ("ref", PASS_EFFICIENCY),
    "values": ("values", PASS_EFFICIENCY),
    "reward_model": ("reward_model", PASS_EFFICIENCY),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What there is to say of one stage."""

    stage: str
    """As in ``timing_s/<stage>``; "other" is what no stage accounts for."""
    seconds: float
    share: float
    """Of the step's seconds, with those of validation and saving where the step has them."""
    num_tokens: float | None
    """That the stage works on; None where it works on none."""
    utilisation: float | None
    """Share of the device's ceiling, 0 to 1; None where it is not known, or the stage does no work of the model."""
    ceiling: str | None
    """What the utilisation is of: "operations" or "bandwidth"."""
    gap_s: float
    """Seconds that could be saved at most."""
    keys: tuple[str, ...]
    """Configuration keys to turn, the most promising first; empty where there is nothing to advise."""
    advice: str
    """What to do, in a sentence or two."""

    def __str__(self) -> str:
        """Stage, share and advice as one line."""
        used = "" if self.utilisation is None else f", {self.utilisation:.0%} of the device's {self.ceiling}"
        return f"{self.stage} takes {self.share:.0%} of the step ({self.seconds:.3g} s{used}). {self.advice}"


def explain(metrics: Mapping[str, float], config: Mapping[str, Any]) -> list[Finding]:
    """The stages of a step, the largest gap first.

    Args:
        metrics: of a step, or the means over several, as they are logged (``timing_s/*``, ``perf/*``, ...).
        config: the configuration as nested dictionaries: the run's ``config.yaml`` as it is read, or
            `burnish.config.to_dict` of it. Keys may be missing.

    Returns:
        a finding for each stage that took time; none where the metrics have no ``timing_s/step``.
    """
    seconds = stage_seconds(metrics)
    total = sum(seconds.values())
    if not total:
        return []
    findings = [_finding(stage, taken, total, metrics, config) for stage, taken in seconds.items() if taken > 0]
    return sorted(findings, key=lambda finding: -finding.gap_s)


def stage_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by stage, which do not overlap: what is timed inside another stage is taken out of it, and "other" is what
    is left of the step."""
    timed = {key.removeprefix("timing_s/"): value for key, value in metrics.items() if key.startswith("timing_s/")}
    if not timed.get("step", 0.0) > 0:
        return {}
    seconds = {stage: timed[stage] for stage in STEP_STAGES if stage in timed}
    other = timed["step"] - sum(seconds.values())
    for outer, inner in _INSIDE.items():
        if outer not in seconds or inner not in timed:
            continue
        seconds[inner] = timed[inner]
        if f"{inner}_beside" in timed:
            # On devices of its own it works beside other stages, and is waited for behind them.
            other -= timed[inner]
        else:
            seconds[outer] = max(0.0, seconds[outer] - timed[inner])
    seconds["other"] = max(0.0, other)
    return seconds | {stage: timed[stage] for stage in STAGES_BESIDE if stage in timed}


def bottleneck_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """``bottleneck/share/<stage>`` and ``bottleneck/tokens/<stage>`` of every stage, and of the stage with the largest gap
    ``bottleneck/gap_s`` and ``bottleneck/gap_share``; which one that is, `explain` says."""
    found = explain(metrics, {})
    if not found:
        return {}
    shares = {f"bottleneck/share/{finding.stage}": finding.share for finding in found}
    tokens = {
        f"bottleneck/tokens/{finding.stage}": finding.num_tokens for finding in found if finding.num_tokens is not None
    }
    total = sum(finding.seconds for finding in found)
    return shares | tokens | {"bottleneck/gap_s": found[0].gap_s, "bottleneck/gap_share": found[0].gap_s / total}


def _finding(
    stage: str, seconds: float, total: float, metrics: Mapping[str, float], config: Mapping[str, Any]
) -> Finding:
    utilisation, ceiling, ideal = _utilisation(stage, seconds, metrics)
    advice: Advice = advise(stage, metrics, config)
    return Finding(
        stage=stage,
        seconds=seconds,
        share=seconds / total,
        num_tokens=_num_tokens(stage, metrics),
        utilisation=utilisation,
        ceiling=ceiling,
        gap_s=max(0.0, seconds - ideal),
        keys=advice.keys,
        advice=advice.sentence,
    )


def _utilisation(stage: str, seconds: float, metrics: Mapping[str, float]) -> tuple[float | None, str | None, float]:
    """The share of the ceiling, which ceiling, and the seconds that the stage's work takes where nothing is wrong."""
    if stage == "gen":
        return _utilisation_of_rollout(seconds, metrics)
    if stage not in _UTILISATION:
        return None, None, 0.0
    name, reachable = _UTILISATION[stage]
    mfu = metrics.get(f"perf/mfu/{name}")
    if mfu is None:
        return None, None, 0.0
    return mfu, "operations", seconds * mfu / reachable


def _utilisation_of_rollout(seconds: float, metrics: Mapping[str, float]) -> tuple[float | None, str | None, float]:
    """Sampling is bound by the memory's bandwidth where few sequences run, and by operations where many do: the ceiling that
    is nearer counts."""
    decoding = metrics.get("perf/rollout/decode_seconds", seconds)
    by_ceiling = {
        "operations": (metrics.get("perf/mfu/rollout"), seconds, PASS_EFFICIENCY),
        "bandwidth": (metrics.get("perf/mbu/rollout"), decoding, DECODE_EFFICIENCY),
    }
    known = {
        name: (share, share * over / reachable)
        for name, (share, over, reachable) in by_ceiling.items()
        if share is not None
    }
    if not known:
        return None, None, 0.0
    ceiling = max(known, key=lambda name: known[name][1])
    return known[ceiling][0], ceiling, known[ceiling][1]


def _num_tokens(stage: str, metrics: Mapping[str, float]) -> float | None:
    """Tokens by the stage's seconds and its seconds a token, which the step has logged."""
    seconds, per_token = metrics.get(f"timing_s/{stage}"), metrics.get(f"timing_per_token_ms/{stage}")
    return round(seconds * 1000 / per_token) if seconds and per_token else None
