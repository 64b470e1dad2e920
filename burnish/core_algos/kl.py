"""Estimators of KL(policy || reference) per token, the penalty in the reward, and its controllers."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from burnish.core_algos.masks import loss_mask_of
from burnish.protocol import DataProto
from burnish.utils.errors import ConfigError
from burnish.utils.torch_functional import (
    as_mask,
    at_least_fp32,
    check_finite,
    check_shapes,
    masked_mean,
    zero_outside,
)

_BASES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_PENALTIES = (*_BASES, *(f"{base}+" for base in _BASES))


def kl_penalty(
    logprob: Float[Tensor, "batch response"],
    ref_logprob: Float[Tensor, "batch response"],
    kl_penalty: str,
    response_mask: Shaped[Tensor, "batch response"] | None = None,
) -> Float[Tensor, "batch response"]:
    """Estimates KL(policy || reference) from the sampled tokens, d = logprob - ref_logprob.

    ============= ==================================================================
    kl, k1        d
    abs           abs(d)
    mse, k2       d^2 / 2
    low_var_kl,   exp(-d) + d - 1, with -d clamped to +-20 and the result to +-10
    k3
    NAME+         the value of NAME with the gradient of k2, which is that of the KL
    ============= ==================================================================

    From J. Schulman's note on approximating KL divergence. As a loss, plain k1 has zero expected gradient on policy
    and k3 has not the gradient of the KL: their ``+`` forms have.

    Args:
        logprob: of the policy, with gradient where it is part of a loss.
        ref_logprob: of the reference, from which no gradient is taken.
        kl_penalty: one of `KL_PENALTIES`.
        response_mask: tokens outside it get 0 and no gradient, whatever the inputs hold there. Give it in a loss.

    Raises:
        ConfigError: an unknown estimator, or ``full``.
        TrainingError: shapes that differ, a mask that is none, or NaN or inf in ref_logprob inside the mask given.
    """
    if response_mask is not None:
        response_mask = as_mask(response_mask, logprob, "response_mask")
        check_finite(response_mask, ref_logprob=ref_logprob)
    return _kl_per_token(logprob, ref_logprob, kl_penalty, response_mask)


def _kl_per_token(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str, mask: Tensor | None) -> Tensor:
    if kl_penalty.startswith("full"):
        raise ConfigError(
            f"kl_penalty={kl_penalty}: the KL over the whole vocabulary needs the logits, which the fused head never "
            f"makes. Use one of the estimators from sampled tokens: {', '.join(KL_PENALTIES)}."
        )
    if kl_penalty not in KL_PENALTIES:
        raise ConfigError(
            f"kl_penalty={kl_penalty}: no such KL estimator. Known: {', '.join(KL_PENALTIES)}, full (not supported)."
        )
    check_shapes(logprob, ref_logprob=ref_logprob)
    if mask is not None:
        logprob, ref_logprob = zero_outside(mask, logprob=logprob, ref_logprob=ref_logprob)
    difference = at_least_fp32(logprob) - at_least_fp32(ref_logprob.detach())
    estimate = _estimate(difference, kl_penalty.removesuffix("+"))
    if not kl_penalty.endswith("+"):
        return estimate
    k2 = _estimate(difference, "k2")
    return k2 - k2.detach() + estimate.detach()


def _estimate(difference: Tensor, base: str) -> Tensor:
    if base in ("kl", "k1"):
        return difference
    if base == "abs":
        return difference.abs()
    if base in ("mse", "k2"):
        return 0.5 * difference.square()
    # Clamped before exp: an exp that overflows has no gradient worth having.
    negated = (-difference).clamp(-20.0, 20.0)
    # By expm1, as exp(x) - 1 - x of an x near 0 has no correct digit in float32, nor the right sign.
    return (negated.expm1() - negated).clamp(-10.0, 10.0)


class FixedKLController:
    """A KL coefficient that stays as it is."""

    def __init__(self, kl_coef: float | int) -> None:
        self.value = kl_coef

    def update(self, current_kl: float | int, n_steps: int) -> None:
        """Does nothing."""


class AdaptiveKLController:
    """A KL coefficient that is steered towards a target KL (arXiv:1909.08593).

    Args:
        init_kl_coef: the coefficient to start with.
        target_kl: the KL per token to hold.
        horizon: rows after which a steady relative error e of the KL has changed the coefficient by the factor 1 + e.
    """

    def __init__(self, init_kl_coef: float | int, target_kl: float | int, horizon: float | int) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ConfigError(
                f"algorithm.kl_ctrl: target_kl={target_kl} and horizon={horizon}: type=adaptive needs both above 0."
            )
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float | int, n_steps: int) -> None:
        """value *= 1 + clip(current_kl / target - 1, +-0.2) * n_steps / horizon; n_steps counts rows."""
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon


@runtime_checkable
class KLController(Protocol):
    """Holds the coefficient of the KL in the reward and is told the KL after every batch."""

    value: float

    def update(self, current_kl: float | int, n_steps: int) -> None:
        """Adapts ``value`` to the KL per token of a batch of ``n_steps`` rows."""


@runtime_checkable
class KLControlSettings(Protocol):
    """The section ``algorithm.kl_ctrl``."""

    @property
    def type(self) -> str: ...

    @property
    def kl_coef(self) -> float: ...

    @property
    def horizon(self) -> int: ...

    @property
    def target_kl(self) -> float: ...


def get_kl_controller(kl_ctrl: KLControlSettings) -> FixedKLController | AdaptiveKLController:
    """The controller that ``algorithm.kl_ctrl`` describes.

    Raises:
        ConfigError: ``type`` is neither fixed nor adaptive, or an adaptive one has no positive target and horizon.
    """
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise ConfigError(f"algorithm.kl_ctrl.type={kl_ctrl.type}: there is no such controller. Known: adaptive, fixed.")


@torch.no_grad()
def apply_kl_penalty(
    data: DataProto, kl_ctrl: KLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Adds ``token_level_rewards`` = ``token_level_scores`` - beta KL on the tokens of the response mask.

    The KL told to the controller, and logged, is the mean over rows of their means over tokens, of the rows that count
    (``valid``, with a token in the loss mask, or in the response mask where there is no other yet); the controller's
    ``n_steps`` is their number. The coefficient of this batch is the one before the update.

    Args:
        data: holds ``token_level_scores``, ``old_log_probs``, ``ref_log_prob``, ``response_mask``, maybe ``valid``
            and ``loss_mask``.
        kl_ctrl: gives beta and is updated.
        kl_penalty: an estimator, see the function of that name.

    Returns:
        ``data`` itself, and the metrics ``actor/reward_kl_penalty`` and ``actor/reward_kl_penalty_coeff``.

    Raises:
        ConfigError: an unknown estimator, or ``full``.
        TrainingError: a mask that is none, or NaN or inf in a log-prob inside the mask of a row that counts.
    """
    batch = data.batch
    assert batch is not None, "A batch without tensors has no scores."
    mask = as_mask(batch["response_mask"], batch["token_level_scores"], "response_mask")
    counts = loss_mask_of(batch, batch["token_level_scores"]).any(dim=-1)
    old_log_probs, ref_log_prob = batch["old_log_probs"], batch["ref_log_prob"]
    check_finite(mask & counts[:, None], old_log_probs=old_log_probs, ref_log_prob=ref_log_prob)
    penalty = _kl_per_token(old_log_probs, ref_log_prob, kl_penalty, mask)
    beta = kl_ctrl.value
    batch["token_level_rewards"] = torch.where(
        mask, batch["token_level_scores"] - beta * penalty, batch["token_level_scores"]
    )
    num_rows = int(counts.sum())
    current_kl = masked_mean(penalty[counts], mask[counts], axis=-1).mean().item() if num_rows else 0.0
    if num_rows:
        kl_ctrl.update(current_kl=current_kl, n_steps=num_rows)
    return data, {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": beta}
