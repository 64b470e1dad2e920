"""What all policy losses share: their settings, their registry, their inputs, and the preparation of a mini-batch."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from burnish.core_algos.aggregation import GlobalBatchInfo, token_mean
from burnish.core_algos.collectives import ONE_RANK, Collective
from burnish.utils.errors import ConfigError, TrainingError
from burnish.utils.foreign_code import form
from burnish.utils.registry import Registry
from burnish.utils.torch_functional import as_mask, check_finite, zero_outside

LossAndMetrics = tuple[Float[Tensor, ""], dict[str, Tensor]]


@runtime_checkable
class PolicyLossSettings(Protocol):
    """What policy losses read of the section ``actor_rollout_ref.actor``; a loss with keys of its own extends it."""

    @property
    def clip_ratio(self) -> float: ...

    @property
    def clip_ratio_low(self) -> float | None: ...

    @property
    def clip_ratio_high(self) -> float | None: ...

    @property
    def clip_ratio_c(self) -> float: ...

    @property
    def global_batch_info(self) -> GlobalBatchInfo: ...


Settings = TypeVar("Settings", bound=PolicyLossSettings)


@runtime_checkable
class Prepare(Protocol):
    """What a loss decides over the whole mini-batch before the first of its micro-batches: the same on any number of ranks."""

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        config: Any,
        *,
        noise: Tensor | None = None,
        collective: Collective = ONE_RANK,
    ) -> dict[str, Tensor] | None:
        """The tensors [batch, response] that the loss gets for these rows, by the names of its keyword arguments.

        Args:
            old_log_prob, advantages, response_mask: this rank's rows of the mini-batch [batch, response].
            log_prob: of the policy, for these rows, by a pass without gradient.
            config: the ``actor`` section.
            noise: [batch, response], uniform in [0, 1), drawn for the whole batch before it was spread over the ranks;
                None draws it here, from a fixed seed: right for a mini-batch that lies on one rank.
            collective: the ranks that the mini-batch is spread over.

        Returns:
            One tensor a keyword; ``response_mask`` is no keyword but replaces the loss mask (and what counts it). None
            changes nothing.
        """


# What the actor calls every policy loss with, by place.
ARGUMENTS = (
    "old_log_prob",
    "log_prob",
    "advantages",
    "response_mask",
    "loss_agg_mode",
    "config",
    "rollout_is_weights",
)

POLICY_LOSSES: Registry[Callable[..., LossAndMetrics]] = Registry(
    "policy loss", "actor_rollout_ref.actor.policy_loss.loss_mode", called_with=ARGUMENTS
)


def register_policy_loss(
    name: str, prepare: Prepare | None = None, prepare_when: Callable[[Any], bool] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that registers a policy loss, a function of the signature that all of this package have, under ``name``.

    Args:
        name: what ``policy_loss.loss_mode`` calls it.
        prepare: what the loss decides over the whole mini-batch. It costs a forward pass over the mini-batch before the
            update. The loss takes each tensor that it returns as a keyword argument with the default None, and prepares
            itself on the tensors at hand where it is None.
        prepare_when: tells from the ``actor`` section whether that pass is needed; None: always.
    """

    def decorator(loss_fn: Any) -> Callable[..., Any]:
        if prepare is not None:
            loss_fn.prepare, loss_fn.prepare_when = prepare, prepare_when
        return POLICY_LOSSES.register(name)(loss_fn)

    return decorator


def get_policy_loss_fn(name: str) -> Callable[..., LossAndMetrics]:
    """The policy loss called ``name``, or the one at ``package.module:attribute``.

    Raises:
        ConfigError: no such loss; lists the choices.
    """
    return POLICY_LOSSES.get(name)


def check_loss(name: str, got: Any, *, learns: bool = True) -> LossAndMetrics:
    """What the policy loss called ``name`` returned, if it is of the form that the actor takes.

    Args:
        name: of the loss.
        got: what it returned.
        learns: whether it was given log-probs that have a gradient, so that the loss must have one.

    Raises:
        TrainingError: it is not; says what it is.
    """
    is_right = isinstance(got, tuple | list) and len(got) == 2 and isinstance(got[1], dict)
    if not is_right or not isinstance(got[0], Tensor) or got[0].shape != ():
        raise TrainingError(
            f"The policy loss {name} returned {form(got)}. It must return (loss, metrics): a scalar tensor, which agg_loss "
            f"makes of the losses of the tokens, and a dict."
        )
    if learns and not got[0].requires_grad:
        raise TrainingError(
            f"The policy loss {name} returned a loss without a gradient: it does not depend on log_prob, or on a detached "
            f"one only."
        )
    return got[0], got[1]


def preparation_of(loss_fn: Callable[..., Any], config: Any) -> Prepare | None:
    """What ``loss_fn`` wants to be done to a mini-batch before its update, or None if nothing.

    Args:
        loss_fn: a policy loss; one that is not registered may have the attributes ``prepare`` and ``prepare_when`` too.
        config: the ``actor`` section.
    """
    prepare: Prepare | None = getattr(loss_fn, "prepare", None)
    prepare_when: Callable[[Any], bool] | None = getattr(loss_fn, "prepare_when", None)
    if prepare is None or (prepare_when is not None and not prepare_when(config)):
        return None
    return prepare


def required(config: Settings | None) -> Settings:
    """``config``, which a loss cannot do without.

    Raises:
        ConfigError: it is None.
    """
    if config is None:
        raise ConfigError("A policy loss needs config, the actor_rollout_ref.actor section: it holds the clip ratios.")
    return config


def clip_range(config: PolicyLossSettings) -> tuple[float, float]:
    """(low, high) offsets of the ratio's clip: ``clip_ratio_low/high``, or ``clip_ratio`` where they are null."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


def ratio_bound(config: PolicyLossSettings) -> float:
    """``clip_ratio_c``, the bound of a ratio.

    Raises:
        ConfigError: it is not above 1.
    """
    if config.clip_ratio_c <= 1.0:
        raise ConfigError(
            f"actor_rollout_ref.actor.clip_ratio_c={config.clip_ratio_c} must be above 1: it bounds a ratio."
        )
    return config.clip_ratio_c


def loss_inputs(
    old_log_prob: Float[Tensor, "batch response"],
    log_prob: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
) -> tuple[
    Bool[Tensor, "batch response"],
    Float[Tensor, "batch response"],
    Float[Tensor, "batch response"],
    Float[Tensor, "batch response"],
]:
    """(mask, old_log_prob, log_prob, advantages) as a formula may use them.

    The mask is bool; the others are in fp32 or wider and 0 outside the mask, the constants without gradient.

    Raises:
        TrainingError: shapes that differ, a mask that is none, NaN or inf in a constant inside the mask. In log_prob it
            is no error but surfaces in loss and gradient, so that the engine can skip the update.
    """
    mask = as_mask(response_mask, log_prob, "response_mask")
    old_log_prob, advantages = old_log_prob.detach(), advantages.detach()
    check_finite(mask, old_log_prob=old_log_prob, advantages=advantages)
    old_log_prob, log_prob, advantages = zero_outside(
        mask, old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages
    )
    return mask, old_log_prob, log_prob, advantages


def clamped_log_ratio(
    log_prob: Float[Tensor, "batch response"], old_log_prob: Float[Tensor, "batch response"]
) -> Float[Tensor, "batch response"]:
    """log_prob - old_log_prob within +-20, so that its exp and the gradient stay finite."""
    return (log_prob - old_log_prob).clamp(-20.0, 20.0)


def ppo_terms(
    ratio: Float[Tensor, "batch response"], advantages: Float[Tensor, "batch response"], config: PolicyLossSettings
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """(-A rho, -A clip(rho, 1 - low, 1 + high)); PPO's loss is the larger one, and clipped where that is the second."""
    low, high = clip_range(config)
    return -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)


def weighted(
    losses: Float[Tensor, "batch response"],
    rollout_is_weights: Float[Tensor, "batch response"] | None,
    mask: Shaped[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """The loss per token times the rollout's importance weights, if there are any.

    Raises:
        TrainingError: weights of another shape, or NaN or inf inside the mask.
    """
    if rollout_is_weights is None:
        return losses
    weights = rollout_is_weights.detach()
    check_finite(mask, rollout_is_weights=weights)
    (weights,) = zero_outside(mask, rollout_is_weights=weights)
    return losses * weights


def token_metrics(
    mask: Bool[Tensor, "batch response"],
    config: PolicyLossSettings,
    **per_token: Shaped[Tensor, "batch response"],
) -> dict[str, Tensor]:
    """``actor/NAME``: this micro-batch's share of the mean over the tokens of the optimizer step, for each NAME."""
    num_tokens = config.global_batch_info.get("batch_num_tokens")
    return {f"actor/{name}": token_mean(values, mask, num_tokens) for name, values in per_token.items()}
