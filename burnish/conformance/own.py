"""Algorithms of a user's own: found by name, and called once, so that what no check could use is told in one sentence."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from burnish.conformance.batches import advantage_batch, loss_batch
from burnish.conformance.comparison import Violation, must
from burnish.conformance.estimators import Estimator, own_estimator
from burnish.conformance.losses import LossTerm, policy_loss
from burnish.conformance.losses.term import counts, prepare
from burnish.core_algos.collectives import ONE_RANK
from burnish.core_algos.estimators import ADV_ESTIMATORS
from burnish.core_algos.policy_losses import POLICY_LOSSES, get_policy_loss_fn
from burnish.core_algos.policy_losses.base import ARGUMENTS
from burnish.utils.errors import BurnishError, ConfigError
from burnish.utils.foreign_code import Caught, told
from burnish.utils.registry import Registry

# Functions of the user's, by the option that names them.
_OWN: dict[str, Registry[Callable[..., Any]]] = {
    "--estimator": Registry("advantage estimator", "--estimator"),
    "--loss": Registry("policy loss", "--loss", called_with=ARGUMENTS),
    "--reference": Registry("naive loop", "--reference"),
}


def own_algorithms(estimator: str | None, loss: str | None, reference: str | None = None) -> list[Estimator | LossTerm]:
    """The algorithms of a user, each named as ``package.module:function``.

    Args:
        reference: the naive loop of the one that is given, as in `burnish.conformance.references`.

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
    found: list[Estimator | LossTerm] = []
    if estimator is not None:
        found.append(own_estimator(estimator, naive))
    if loss is not None:
        found.append(policy_loss(loss, naive))
    return found


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
        Violation: it is not.
    """
    if isinstance(algorithm, Estimator):
        _check_advantages(algorithm)
    else:
        _check_loss(algorithm)


def file_of(algorithm: Any) -> str | None:
    """Where the code of an estimator or of a policy loss is."""
    function: Any = None
    if isinstance(algorithm, Estimator):
        function = algorithm.function
    elif algorithm.name in POLICY_LOSSES or ":" in algorithm.name:
        function = get_policy_loss_fn(algorithm.name)
    return inspect.getsourcefile(inspect.unwrap(function)) if inspect.isfunction(function) else None


def _check_advantages(estimator: Estimator) -> None:
    batch = advantage_batch(0)
    got: Any = None
    with Caught() as caught:
        got = estimator(batch)
    if isinstance(caught.error, BurnishError):
        raise caught.error
    if caught.error is not None:
        raise Violation(
            f"It ends in {told(caught.error, file_of(estimator))}. It was called with {len(batch.uids)} rows in "
            f"{len(set(batch.uids))} groups of unequal size whose rows do not lie together, as it may be in training."
        ) from caught.error
    is_right = isinstance(got, tuple | list) and len(got) == 2
    is_right = is_right and all(isinstance(part, Tensor) and part.shape == batch.mask.shape for part in got)
    rows, tokens = batch.mask.shape
    must(
        is_right,
        f"It returns {_form(got)}. An advantage estimator returns (advantages, returns), two tensors "
        f"[batch, response], here of shape ({rows}, {tokens}).",
    )


def _check_loss(term: LossTerm) -> None:
    settings = term.with_settings()
    batch, prepared = prepare(term, loss_batch(0), settings, ONE_RANK)
    batch = replace(batch, **{term.leaf: getattr(batch, term.leaf).clone().requires_grad_()})
    got: Any = term.compute(batch, settings, counts(batch.mask, settings), prepared)
    is_right = isinstance(got, tuple | list) and len(got) == 2 and isinstance(got[1], dict)
    must(
        is_right and isinstance(got[0], Tensor) and got[0].shape == (),
        f"It returns {_form(got)}. A loss returns (loss, metrics): a scalar tensor, which agg_loss makes of the "
        f"losses of the tokens, and a dict.",
    )
    must(got[0].requires_grad, "The loss has no gradient: it does not depend on log_prob, or only on a detached one.")


def _form(value: Any) -> str:
    """What a value is, in words: ``a tensor of shape (2, 3)``, ``(Tensor, dict)``."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"({', '.join(_form(part) for part in value)})"
    return "None" if value is None else f"a {type(value).__name__}"
