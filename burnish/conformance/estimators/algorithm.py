"""What the checks know of an advantage estimator, and how they call it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from burnish.config import AlgoConfig
from burnish.conformance.batches import RaggedBatch
from burnish.conformance.cases import SettingCase
from burnish.conformance.comparison import close
from burnish.conformance.references import ESTIMATOR_SETTINGS, EstimatorReference
from burnish.utils.errors import ConfigError

# What `compute_advantage` tells every estimator that names it; anything else has the estimator's own default.
_TOLD = ("gamma", "lam", "num_repeat", "norm_adv_by_std_in_grpo")
_CONFIG_KEYS = ("gamma", "lam", "norm_adv_by_std_in_grpo", "allow_single_sample_groups", "gdpo_reward_weights")


@dataclass(frozen=True, kw_only=True)
class HandAnswer:
    """A batch small enough to be worked out on paper, and what must come out."""

    batch: RaggedBatch
    advantages: list[list[float]]
    returns: list[list[float]] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-7


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """An advantage estimator as the checks see it.

    Attributes:
        name: as `compute_advantage` takes it: a registered name, or ``package.module:function``.
        function: what it names.
        reference: the naive loop, where there is one.
        hand: answers worked out on paper.
        cases: what its hyper-parameters do.
        zero_for_equal_rewards: whether a group of equal rewards must get exactly 0.
        custom: the user's own keys, ``algorithm.custom``.
        masks_rewards: whether rewards outside the mask may be anything; else they are 0, as the trainer has them.
    """

    name: str
    function: Callable[..., tuple[Tensor, Tensor]]
    reference: EstimatorReference | None = None
    hand: tuple[HandAnswer, ...] = ()
    cases: tuple[SettingCase, ...] = ()
    zero_for_equal_rewards: bool = False
    masks_rewards: bool = True
    custom: Mapping[str, Any] = field(default_factory=dict)

    kind: str = "advantage estimator"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return tuple(inspect.signature(self.function).parameters)

    def __call__(self, batch: RaggedBatch, **settings: Any) -> tuple[Tensor, Tensor]:
        """(advantages, returns), called by name as `compute_advantage` does.

        Args:
            settings: replace what it is told by default; a batch key given here replaces the one of the batch.

        Raises:
            ConfigError: it wants something that no batch of a check holds.
        """
        told: dict[str, Any] = {name: ESTIMATOR_SETTINGS[name] for name in _TOLD}
        told |= {"config": algorithm_config(settings, self.custom), **settings}
        known = {**batch.keyed(), **told}
        arguments: dict[str, Any] = {}
        for name, parameter in inspect.signature(self.function).parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments |= {**told, "index": batch.uids}
            elif name in known:
                arguments[name] = known[name]
            elif parameter.default is inspect.Parameter.empty:
                raise ConfigError(
                    f"The advantage estimator {self.name} needs {name!r}, which conformance has no values for. "
                    f"It has: {', '.join(sorted(known))}."
                )
        return self.function(**arguments)

    def expected(self, batch: RaggedBatch, **settings: Any) -> tuple[Tensor, Tensor]:
        """(advantages, returns) of the naive loop, in float64."""
        assert self.reference is not None
        advantages, returns = self.reference(batch.keyed(), {**ESTIMATOR_SETTINGS, **settings})
        return torch.as_tensor(advantages, dtype=torch.float64), torch.as_tensor(returns, dtype=torch.float64)


def algorithm_config(settings: Mapping[str, Any], custom: Mapping[str, Any]) -> AlgoConfig:
    """The section ``algorithm`` with these settings and these keys of the user's own."""
    known = {**ESTIMATOR_SETTINGS, **settings}
    return AlgoConfig(custom=dict(custom), **{key: known[key] for key in _CONFIG_KEYS})


def same_result(
    what: str,
    got: tuple[Tensor, Tensor],
    want: tuple[Tensor, Tensor],
    mask: Tensor,
    tolerance: float = 1e-9,
) -> None:
    """Advantages equal everywhere (they are zero outside the mask), returns inside the mask, where they mean something."""
    close(f"{what}, the advantage", got[0], want[0], tolerance)
    returns = [torch.where(mask, tensor, 0.0) if tensor.shape == mask.shape else tensor for tensor in (got[1], want[1])]
    close(f"{what}, the return", returns[0], returns[1], tolerance)
