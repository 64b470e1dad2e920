"""Algorithms of a user's own: found by name, and called once, so that what no check could use is told in one sentence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from burnish.config import PPOTrainerConfig, load_config
from burnish.conformance.batches import RaggedBatch, advantage_batch, loss_batch
from burnish.conformance.comparison import Violation
from burnish.conformance.estimators import Estimator, own_estimator
from burnish.conformance.losses import LossTerm, policy_loss
from burnish.conformance.losses.term import counts, prepare
from burnish.core_algos.collectives import ONE_RANK
from burnish.core_algos.estimators import ADV_ESTIMATORS
from burnish.core_algos.estimators.base import check_advantages
from burnish.core_algos.policy_losses import POLICY_LOSSES, get_policy_loss_fn
from burnish.core_algos.policy_losses.base import ARGUMENTS, check_loss
from burnish.utils.errors import BurnishError, ConfigError
from burnish.utils.foreign_code import Caught, told
from burnish.utils.registry import Registry

# Functions of the user's, by the option that names them.
_OWN: dict[str, Registry[Callable[..., Any]]] = {
    "--estimator": Registry("advantage estimator", "--estimator"),
    "--loss": Registry("policy loss", "--loss", called_with=ARGUMENTS),
    "--reference": Registry("naive loop", "--reference"),
}

_KEYS = ("algorithm.custom.", "actor_rollout_ref.actor.policy_loss.custom.")

_LOSS_INPUTS = (
    "loss_inputs of burnish.core_algos.policy_losses makes float32 of the inputs, zeroes what lies outside the mask and "
    "refuses NaN; clamp a log-ratio before exp."
)
_AGG_LOSS = (
    "A loss ends in agg_loss(losses, mask, loss_agg_mode, **config.global_batch_info), which divides by the counts of the "
    "whole optimizer step, and token_metrics makes metrics that add up."
)
_INDEX = "The rows of a group are those of one uid in index, however many and wherever they lie."
REMEDIES = {
    ("advantage estimator", "row order"): _INDEX,
    ("advantage estimator", "group interleaving"): _INDEX,
    ("advantage estimator", "extremes and NaN"): "Write into no input, and mask by torch.where: 0 * NaN is NaN.",
    ("policy loss", "bf16"): _LOSS_INPUTS,
    ("policy loss", "extremes and NaN"): _LOSS_INPUTS,
    ("policy loss", "micro-batches"): _AGG_LOSS,
    ("policy loss", "ranks"): _AGG_LOSS,
    ("policy loss", "packing"): _AGG_LOSS,
}
"""What usually mends an algorithm that fails a check, by kind and column."""


def own_algorithms(
    estimator: str | None, loss: str | None, reference: str | None = None, keys: Sequence[str] = ()
) -> list[Estimator | LossTerm]:
    """The algorithms of a user, each named as ``package.module:function``.

    Args:
        reference: the naive loop of the one that is given, as in `burnish.conformance.references`.
        keys: their own keys, as in training: ``algorithm.custom.alpha=0.5``.

    Raises:
        ConfigError: one of them cannot be loaded or is no function, or it is not clear whose the reference is.
    """
    if reference is not None and (estimator is None) == (loss is None):
        raise ConfigError(
            f"--reference={reference} is the naive loop of one algorithm: give it with either --estimator or --loss."
        )
    for option, name in (("--estimator", estimator), ("--loss", loss), ("--reference", reference)):
        if name is not None:
            _check_name(option, name)
    naive = None if reference is None else _OWN["--reference"].get(reference)
    config = _config(keys)
    found: list[Estimator | LossTerm] = []
    if estimator is not None:
        found.append(own_estimator(estimator, naive, config.algorithm.custom))
    if loss is not None:
        custom = config.actor_rollout_ref.actor.policy_loss.custom
        found.append(policy_loss(loss, naive, settings={"custom": custom} if custom else {}))
    return found


def _config(keys: Sequence[str]) -> PPOTrainerConfig:
    for key in keys:
        if not key.lstrip("+").startswith(_KEYS):
            raise ConfigError(
                f"{key}: the checks set the keys of burnish themselves. Here go those of your own: "
                f"{' and '.join(f'{section}name=value' for section in _KEYS)}."
            )
    return load_config(keys, train_rows_given=True)


def _check_name(option: str, name: str) -> None:
    if name in ADV_ESTIMATORS or name in POLICY_LOSSES:
        raise ConfigError(f"{option}={name}: this is one of burnish's own, which --only={name} checks.")
    if ":" not in name:
        raise ConfigError(f"{option}={name}: a function of your own is named as package.module:function.")
    function = _OWN[option].get(name)
    if inspect.isclass(function):
        raise ConfigError(f"{option}={name}: this is a class, and a function is needed.")


def check_result(algorithm: Estimator | LossTerm) -> None:
    """One call, whose result is of the form that the trainer takes.

    Raises:
        Violation: the call failed.
        TrainingError: the result is of another form.
    """
    if isinstance(algorithm, Estimator):
        batch = advantage_batch(0)
        check_advantages(algorithm.name, _called(algorithm, batch), batch.mask.shape)
        return
    settings = algorithm.with_settings()
    batch, prepared = prepare(algorithm, loss_batch(0), settings, ONE_RANK)
    batch = replace(batch, **{algorithm.leaf: getattr(batch, algorithm.leaf).clone().requires_grad_()})
    check_loss(algorithm.name, algorithm.compute(batch, settings, counts(batch.mask, settings), prepared))


def _called(estimator: Estimator, batch: RaggedBatch) -> Any:
    with Caught() as caught:
        return estimator(batch)
    assert caught.error is not None
    if isinstance(caught.error, BurnishError):
        raise caught.error
    raise Violation(
        f"It ends in {told(caught.error, file_of(estimator))}. It was called with {len(batch.uids)} rows in "
        f"{len(set(batch.uids))} groups of unequal size whose rows do not lie together, as it may be in training."
    ) from caught.error


def file_of(algorithm: Any) -> str | None:
    """Where the code of an estimator or of a policy loss is."""
    function: Any = None
    if isinstance(algorithm, Estimator):
        function = algorithm.function
    elif algorithm.name in POLICY_LOSSES or ":" in algorithm.name:
        function = get_policy_loss_fn(algorithm.name)
    return inspect.getsourcefile(inspect.unwrap(function)) if inspect.isfunction(function) else None
