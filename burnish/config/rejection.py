"""`algorithm.rollout_correction` in words: the presets, what `rollout_rs` and `rollout_rs_threshold` say together, and the bounds
of importance weights."""

import math
from dataclasses import dataclass
from typing import Any

from burnish.config.values import near
from burnish.utils.errors import ConfigError

LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
ESTIMATORS = ("k1", "k2", "k3")
RULES = tuple(f"{level}_{estimator}" for level in LEVELS for estimator in ESTIMATORS)
"""The names that `rollout_rs` may list."""

# What the field called them before they had an estimator in their names.
_OLDER_NAMES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}

_SECTION = "algorithm.rollout_correction"
_RS, _THRESHOLD = f"{_SECTION}.rollout_rs", f"{_SECTION}.rollout_rs_threshold"
_IS_THRESHOLD = f"{_SECTION}.rollout_is_threshold"

_TOKEN_IS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQ_IS = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_SEQ_RS = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
_GEO_RS = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3_RS = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.01"}
_PPO_CLIP = {"bypass_mode": True, "loss_type": "ppo_clip"}
_PG = {"bypass_mode": True, "loss_type": "reinforce"}

# Every preset says of all three whether there are any: that is a part of its meaning, whatever the defaults are.
_NEITHER: dict[str, Any] = {"rollout_is": None, "rollout_rs": None, "bypass_mode": False}

PRESETS: dict[str, dict[str, Any]] = {
    "decoupled_token_is": _NEITHER | _TOKEN_IS,
    "decoupled_token_icepop": _NEITHER | _ICEPOP,
    "decoupled_seq_is": _NEITHER | _SEQ_IS,
    "decoupled_seq_is_rs": _NEITHER | _SEQ_IS | _SEQ_RS,
    "decoupled_geo_rs": _NEITHER | _GEO_RS,
    "decoupled_geo_rs_token_tis": _NEITHER | _GEO_RS | _TOKEN_IS,
    "decoupled_geo_rs_seq_tis": _NEITHER | _GEO_RS | _SEQ_IS,
    "decoupled_k3_rs": _NEITHER | _K3_RS,
    "decoupled_k3_rs_token_tis": _NEITHER | _K3_RS | _TOKEN_IS,
    "decoupled_k3_rs_seq_tis": _NEITHER | _K3_RS | _SEQ_IS,
    "bypass_ppo_clip": _NEITHER | _PPO_CLIP,
    "bypass_ppo_clip_geo_rs": _NEITHER | _PPO_CLIP | _GEO_RS,
    "bypass_ppo_clip_k3_rs": _NEITHER | _PPO_CLIP | _K3_RS,
    "bypass_pg_is": _NEITHER | _PG | _SEQ_IS,
    "bypass_pg_token_icepop": _NEITHER | _PG | _ICEPOP,
    "bypass_pg_geo_rs": _NEITHER | _PG | _GEO_RS,
    "bypass_pg_geo_rs_token_tis": _NEITHER | _PG | _GEO_RS | _TOKEN_IS,
    "bypass_pg_geo_rs_seq_tis": _NEITHER | _PG | _GEO_RS | _SEQ_IS,
}
"""What each name of `algorithm.rollout_correction.preset` sets of the keys beside it."""


@dataclass(frozen=True, slots=True)
class RejectionRule:
    """One rule of `rollout_rs` with its bounds; r = exp(old - rollout), the ratio that importance weights are made of.

    Attributes:
        level: token, seq_sum, seq_mean or seq_max: what is compared with the bounds, and what is rejected.
        estimator: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r.
        lower: k1: the smallest ratio accepted, at most 1; None for k2 and k3.
        upper: k1: the largest ratio accepted, at least 1; k2 and k3: the largest value accepted.
    """

    level: str
    estimator: str
    lower: float | None
    upper: float

    @property
    def name(self) -> str:
        """As in `rollout_rs`."""
        return f"{self.level}_{self.estimator}"


def parse_rejection(rollout_rs: str | None, rollout_rs_threshold: str | float | None) -> tuple[RejectionRule, ...]:
    """The rules that ``rollout_rs`` lists, with their bounds; none where it is null.

    Args:
        rollout_rs: a comma list of names in `RULES`; all of them must accept.
        rollout_rs_threshold: bounds for all of them, or a comma list with one each: for k1 "lower_upper" ratios, or one
            number v of at least 1, which means 1/v to v; for k2 and k3 an upper bound.

    Raises:
        ConfigError: a name or a bound that is none, a name that is listed twice, another number of bounds than names,
            no bounds, or ratios that leave out 1: names both keys and says what to write.
    """
    if rollout_rs is None:
        return ()
    names = [name.strip() for name in rollout_rs.split(",")]
    for name in names:
        if name not in RULES:
            raise ConfigError(f"{_RS}={rollout_rs}: {name!r} is no rule.{_hint(name)} There is: {', '.join(RULES)}.")
        if names.count(name) > 1:
            raise ConfigError(f"{_RS}={rollout_rs} lists {name} twice: name each rule once, with its tightest bounds.")
    if rollout_rs_threshold is None:
        usual = ",".join(_usual_threshold(name) for name in names)
        raise ConfigError(f'{_RS}={rollout_rs} needs {_THRESHOLD}. To begin with, set {_THRESHOLD}="{usual}".')
    bounds = _texts(rollout_rs_threshold)
    if len(bounds) not in (1, len(names)):
        raise ConfigError(
            f"{_THRESHOLD}={rollout_rs_threshold} has {len(bounds)} entries and {_RS}={rollout_rs} has {len(names)}: "
            f"give one for all, or one each, in the same order."
        )
    bounds = bounds * len(names) if len(bounds) == 1 else bounds
    return tuple(_rule(name, text) for name, text in zip(names, bounds, strict=True))


def weight_bounds(rollout_is_threshold: str | float) -> tuple[float | None, float]:
    """(lower, upper) of importance weights, by ``rollout_is_threshold``.

    Args:
        rollout_is_threshold: a number, at which weights are truncated: lower is None; or "lower_upper", and weights outside
            of these bounds are 0.

    Raises:
        ConfigError: it is neither.
    """
    texts = str(rollout_is_threshold).split("_")
    numbers = [_above_zero(text) for text in texts]
    if isinstance(rollout_is_threshold, bool) or len(texts) > 2 or None in numbers:
        raise ConfigError(
            f"{_IS_THRESHOLD}={rollout_is_threshold}: give one number above 0, at which weights are truncated (2.0), or two "
            f"bounds outside of which they are 0 (0.5_5.0)."
        )
    lower, upper = numbers if len(numbers) == 2 else (None, numbers[0])
    assert upper is not None
    if not (lower or 0.0) <= 1.0 <= upper:
        raise ConfigError(
            f"{_IS_THRESHOLD}={rollout_is_threshold} changes the weight 1, which every token has where the two policies agree: "
            f"lower is at most 1 and upper at least 1, as in 2.0 and 0.5_5.0. (In a YAML file two bounds stand in quotes; it "
            f"reads 0.5_5 as the number 0.55.)"
        )
    return lower, upper


def _hint(name: str) -> str:
    if name[:1] == "[" or name[-1:] == "]":
        return " The rules are one text with commas, without brackets."
    close = [_OLDER_NAMES[name]] if name in _OLDER_NAMES else near(name, RULES)
    return f" Did you mean {close[0]}?" if close else ""


def _texts(threshold: str | float) -> list[str]:
    if isinstance(threshold, bool):
        raise ConfigError(f"{_THRESHOLD}={threshold}: give a number, or for k1 two ratios as 0.5_2.0.")
    return [text.strip() for text in str(threshold).split(",")]


def _rule(name: str, text: str) -> RejectionRule:
    level, estimator = name.rsplit("_", 1)
    given = f"{_THRESHOLD}: {text!r} for {name}"
    numbers = [_number(part, given, name) for part in text.split("_")]
    if estimator != "k1":
        if len(numbers) != 1:
            raise ConfigError(
                f"{given} is not one number: {estimator} is never negative and has an upper bound alone. "
                f"Set {_usual_threshold(name)}, for example; lower_upper ratios belong to k1."
            )
        return RejectionRule(level=level, estimator=estimator, lower=None, upper=numbers[0])
    if len(numbers) > 2:
        raise ConfigError(f"{given} has {len(numbers)} numbers: give lower_upper, as {_usual_threshold(name)}.")
    if len(numbers) == 1 and numbers[0] < 1.0:
        raise ConfigError(
            f"{given} is one number, so the largest ratio that is accepted, but it is below 1. Set {1 / numbers[0]:.6g} for "
            f"{numbers[0]:g}_{1 / numbers[0]:.6g}, or give both bounds, as {_usual_threshold(name)}. (In a YAML file and in "
            f"Python two bounds stand in quotes: both read 0.5_2 as the number 0.52.)"
        )
    lower, upper = (1.0 / numbers[0], numbers[0]) if len(numbers) == 1 else numbers
    if not lower <= 1.0 <= upper:
        raise ConfigError(
            f"{given} leaves out the ratio 1, which every token has where the two policies agree: lower is at most 1 "
            f"and upper at least 1, as in {_usual_threshold(name)}."
        )
    return RejectionRule(level=level, estimator=estimator, lower=lower, upper=upper)


def _number(text: str, given: str, name: str) -> float:
    number = _above_zero(text)
    if number is None:
        raise ConfigError(f"{given}: {text!r} is no number above 0. Set {_usual_threshold(name)}, for example.")
    return number


def _above_zero(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None


def _usual_threshold(name: str) -> str:
    """Bounds to begin with: a factor of 2 for a token or a whole sequence, much less for the mean of a sequence."""
    level, estimator = name.rsplit("_", 1)
    if estimator == "k1":
        return "0.999_1.001" if level == "seq_mean" else "0.5_2.0"
    return "0.01" if level == "seq_mean" else "0.25"
