"""What the checks know of a term of the loss: a policy loss, a KL form, the value loss, a mode of aggregation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from burnish.config import FSDPActorConfig, PolicyLossConfig, RolloutCorrectionConfig
from burnish.conformance.batches import RaggedBatch
from burnish.conformance.cases import SettingCase
from burnish.conformance.comparison import must
from burnish.conformance.references import LOSS_SETTINGS, LossReference
from burnish.core_algos.aggregation import LOSS_AGG_MODES
from burnish.core_algos.collectives import ONE_RANK, Collective

Settings = Mapping[str, Any]
LossAndMetrics = tuple[Tensor, dict[str, Tensor]]

_OF_POLICY_LOSS = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")
_OF_ACTOR = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg", "loss_agg_mode")


@dataclass(frozen=True, kw_only=True)
class HandAnswer:
    """A batch small enough to be worked out on paper, and the loss and its gradient."""

    batch: RaggedBatch
    loss: float
    gradient: list[list[float]]
    settings: Settings = field(default_factory=dict)
    tolerance: float = 1e-7


@dataclass(frozen=True, kw_only=True)
class LossTerm:
    """A term of the loss as the checks see it.

    Attributes:
        kind: what it is, in words.
        name: as the configuration calls it.
        leaf: the field of a batch that has the gradient.
        compute: (batch, settings, global_batch_info, prepared) -> (loss, metrics).
        prepare: (batch, settings, collective) -> what it decides over the whole mini-batch, or None if nothing.
        reference: the naive loop, where there is one.
        modes: the modes of aggregation that it is checked under.
        settings: what the checks set where its defaults would hardly show in small batches.
        variants: further settings, under which random batches are compared in turn.
        takes_weights: whether importance weights of the rollout are handed to it.
        constants: fields that must be finite inside the mask.
        detaches: fields from which it must take no gradient, though they had one.
        actor: (settings) -> the actor whose whole loss holds this term; None: the critic's does.
        of_log_probs: whether it is a function of log-probs, which may lie far apart.
    """

    kind: str
    name: str
    leaf: str
    compute: Callable[[RaggedBatch, Settings, Mapping[str, Any], Mapping[str, Tensor]], LossAndMetrics]
    prepare: Callable[[RaggedBatch, Settings, Collective], dict[str, Tensor] | None] | None = None
    actor: Callable[[Settings], FSDPActorConfig] | None = None
    reference: LossReference | None = None
    hand: tuple[HandAnswer, ...] = ()
    cases: tuple[SettingCase, ...] = ()
    modes: tuple[str, ...] = LOSS_AGG_MODES
    settings: Settings = field(default_factory=dict)
    variants: tuple[Settings, ...] = ({},)
    takes_weights: bool = False
    constants: tuple[str, ...] = ()
    detaches: tuple[str, ...] = ()
    of_log_probs: bool = True

    def with_settings(self, **settings: Any) -> dict[str, Any]:
        """`LOSS_SETTINGS`, this term's own, and ``settings``, the later ones counting more."""
        return {**LOSS_SETTINGS, "weighted": False, **self.settings, **settings}


@dataclass(frozen=True)
class Evaluated:
    """The loss of a batch, its gradient with respect to the leaf, and the metrics."""

    loss: Tensor
    gradient: Tensor
    metrics: dict[str, Tensor]


def evaluate(term: LossTerm, batch: RaggedBatch, **settings: Any) -> Evaluated:
    """The batch as one mini-batch on one rank, prepared and counted as the trainer does it."""
    known = term.with_settings(**settings)
    batch, prepared = prepare(term, batch, known, ONE_RANK)
    return evaluate_part(term, batch, known, counts(batch.mask, known), prepared)


def prepare(
    term: LossTerm, batch: RaggedBatch, settings: Settings, collective: Collective
) -> tuple[RaggedBatch, dict[str, Tensor]]:
    """The batch with the mask that the preparation leaves, and the arguments that it has for the loss."""
    prepared = dict(term.prepare(batch, settings, collective) or {}) if term.prepare else {}
    return replace(batch, mask=prepared.pop("response_mask", batch.mask)), prepared


def evaluate_part(
    term: LossTerm, batch: RaggedBatch, settings: Settings, info: Mapping[str, Any], prepared: Mapping[str, Tensor]
) -> Evaluated:
    """One micro-batch of a mini-batch that ``info`` has counted."""
    leaf = getattr(batch, term.leaf).clone().requires_grad_()
    loss, metrics = term.compute(replace(batch, **{term.leaf: leaf}), settings, info, prepared)
    must(loss.shape == (), f"The loss has shape {tuple(loss.shape)}, but it must be a scalar.")
    must(loss.requires_grad, "The loss has no gradient.")
    (gradient,) = torch.autograd.grad(loss, leaf)
    return Evaluated(loss.detach(), gradient, metrics)


def counts(mask: Tensor, settings: Settings, dp_size: int = 1) -> dict[str, Any]:
    """``global_batch_info`` of an optimizer step with this mask."""
    return {
        "dp_size": dp_size,
        "batch_num_tokens": int(mask.sum()),
        "global_batch_size": int(mask.any(dim=1).sum()),
        "loss_scale_factor": settings["loss_scale_factor"],
    }


def reference_inputs(batch: RaggedBatch, weighted: bool) -> dict[str, Any]:
    """The batch as nested lists, by the names that the naive loops use."""
    tensors = {
        "log_prob": batch.log_probs,
        "frozen_log_prob": batch.log_probs,
        "old_log_prob": batch.old_log_probs,
        "ref_log_prob": batch.ref_log_probs,
        "advantages": batch.advantages,
        "response_mask": batch.mask,
        "noise": batch.noise,
        "vpreds": batch.vpreds,
        "values": batch.values,
        "returns": batch.returns,
        "loss_mat": batch.values,
    }
    lists: dict[str, Any] = {name: tensor.tolist() for name, tensor in tensors.items()}
    return {**lists, "rollout_is_weights": batch.weights.tolist() if weighted else None}


# The name that the naive loops have for a leaf.
LEAF_INPUTS = {"log_probs": "log_prob", "vpreds": "vpreds", "values": "loss_mat"}


def actor_config(
    settings: Settings, loss_mode: str = "vanilla", info: Mapping[str, Any] | None = None, **changes: Any
) -> FSDPActorConfig:
    """The section ``actor`` with these settings."""
    policy_loss = PolicyLossConfig(
        loss_mode=loss_mode,
        rollout_correction=RolloutCorrectionConfig(**settings["rollout_correction"]),
        custom=dict(settings.get("custom", {})),
        **{key: settings[key] for key in _OF_POLICY_LOSS},
    )
    of_actor = {key: settings[key] for key in _OF_ACTOR}
    return FSDPActorConfig(policy_loss=policy_loss, global_batch_info=dict(info or {}), **of_actor, **changes)
