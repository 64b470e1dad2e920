"""The terms of the loss: every policy loss, every KL form, the value loss and every mode of aggregation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from burnish.config.names import SEQUENCE_MEAN_POLICY_LOSSES
from burnish.conformance.batches import RaggedBatch
from burnish.conformance.losses import answers, cases
from burnish.conformance.losses.term import LossAndMetrics, LossTerm, Settings, actor_config
from burnish.conformance.references import LOSS_REFERENCES, LossReference, aggregate, losses
from burnish.core_algos.aggregation import LOSS_AGG_MODES, agg_loss
from burnish.core_algos.collectives import Collective
from burnish.core_algos.kl import KL_PENALTIES, kl_penalty
from burnish.core_algos.policy_losses import POLICY_LOSSES, get_policy_loss_fn, preparation_of
from burnish.core_algos.value_loss import compute_value_loss

# Where the defaults would show in none of a small batch's tokens, or in one alone.
_SETTINGS: dict[str, dict[str, Any]] = {
    "gspo": {"clip_ratio": 0.1},
    "clip_cov": {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.05, "clip_cov_ub": 3.0},
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5},
}

_NARROW = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.35}
_REJECTION = {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.4_2.5,0.3"}
_WEIGHTS = {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.2}
_VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "vanilla": ({}, {**_NARROW, "clip_ratio_c": 1.5}),
    "gspo": ({}, _NARROW),
    "sapo": ({}, {"tau_pos": 2.0, "tau_neg": 0.5}),
    "clip_cov": ({}, _NARROW),
    "kl_cov": ({}, {"kl_cov_ratio": 0.0}),
    "geo_mean": ({}, _NARROW),
    "cispo": ({}, _NARROW),
    "dppo_tv": ({}, {**_NARROW, "clip_ratio_c": 1.5}),
    "dppo_kl": ({}, {"clip_ratio_low": 0.02, "clip_ratio_high": 0.05, "clip_ratio_c": 1.5}),
    "dro": ({}, {"dro_beta": 1.0}),
    "bypass_mode": (
        {"rollout_correction": {**_WEIGHTS, **_REJECTION, "rollout_is_batch_normalize": True}},
        {"rollout_correction": {**_REJECTION, "loss_type": "ppo_clip"}},
        {"rollout_correction": {**_WEIGHTS, "rollout_is": "sequence"}},
        {"rollout_correction": {}},
    ),
}

# What else is in the loss of the actor when its gradient is looked at.
_OTHER_TERMS: dict[str, Any] = {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.1}


def policy_losses() -> list[LossTerm]:
    """Every registered policy loss."""
    return [
        policy_loss(
            name,
            reference=LOSS_REFERENCES.get(name),
            constants=("old_log_probs", "advantages"),
            detaches=("old_log_probs", "advantages", "weights"),
            hand=answers.POLICY_LOSSES.get(name, ()),
            cases=cases.POLICY_LOSSES.get(name, ()),
            settings=_SETTINGS.get(name, {}),
            variants=_VARIANTS.get(name, ({},)),
        )
        for name in POLICY_LOSSES
    ]


def policy_loss(
    name: str, reference: LossReference | None = None, constants: tuple[str, ...] = ("advantages",), **known: Any
) -> LossTerm:
    """The policy loss called ``name``, or the one at ``package.module:function``, which need not know an old policy.

    Raises:
        ConfigError: it cannot be loaded.
    """
    function = get_policy_loss_fn(name)
    # In bypass mode the weights are made in the loss.
    takes_weights = "rollout_is_weights" in inspect.signature(function).parameters and name != "bypass_mode"
    return LossTerm(
        kind="policy loss",
        name=name,
        leaf="log_probs",
        compute=partial(_compute_policy_loss, name),
        prepare=partial(_prepare_policy_loss, name),
        actor=partial(actor_config, loss_mode=name, **_OTHER_TERMS),
        reference=reference,
        modes=("seq-mean-token-mean",) if name in SEQUENCE_MEAN_POLICY_LOSSES else LOSS_AGG_MODES,
        takes_weights=takes_weights,
        constants=constants,
        **known,
    )


def _compute_policy_loss(
    name: str, batch: RaggedBatch, settings: Settings, info: Mapping[str, Any], prepared: Mapping[str, Tensor]
) -> LossAndMetrics:
    keywords = dict(prepared)
    weights = keywords.pop("rollout_is_weights", batch.weights if settings["weighted"] else None)
    # As the trainer calls it.
    return get_policy_loss_fn(name)(
        batch.old_log_probs,
        batch.log_probs,
        batch.advantages,
        batch.mask,
        settings["loss_agg_mode"],
        actor_config(settings, name, info),
        weights,
        **keywords,
    )


def _prepare_policy_loss(
    name: str, batch: RaggedBatch, settings: Settings, collective: Collective
) -> dict[str, Tensor] | None:
    config = actor_config(settings, name)
    preparation = preparation_of(get_policy_loss_fn(name), config)
    if preparation is None:
        return None
    return preparation(
        batch.old_log_probs,
        batch.log_probs.detach(),
        batch.advantages,
        batch.mask,
        config,
        noise=batch.noise,
        collective=collective,
    )


def kl_forms() -> list[LossTerm]:
    """Every KL estimator, as a term of the loss."""
    return [_kl_form(name) for name in KL_PENALTIES]


def _kl_form(name: str) -> LossTerm:
    def compute(
        batch: RaggedBatch, settings: Settings, info: Mapping[str, Any], prepared: Mapping[str, Tensor]
    ) -> LossAndMetrics:
        kl = kl_penalty(batch.log_probs, batch.ref_log_probs, name, batch.mask)
        return agg_loss(kl, batch.mask, settings["loss_agg_mode"], **info), {}

    return LossTerm(
        kind="KL form",
        name=name,
        leaf="log_probs",
        compute=compute,
        actor=partial(actor_config, use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=name),
        reference=partial(losses.kl_loss, form=name),
        hand=answers.KL_FORMS.get(name, ()),
        modes=("token-mean", "seq-mean-token-mean"),
        constants=("ref_log_probs",),
        detaches=("ref_log_probs",),
    )


def value_loss() -> LossTerm:
    """The critic's loss."""

    def compute(
        batch: RaggedBatch, settings: Settings, info: Mapping[str, Any], prepared: Mapping[str, Tensor]
    ) -> LossAndMetrics:
        loss, clipfrac = compute_value_loss(
            batch.vpreds,
            batch.returns,
            batch.values,
            batch.mask,
            settings["cliprange_value"],
            settings["loss_agg_mode"],
            global_batch_info=info,
        )
        return loss, {"critic/vf_clipfrac": clipfrac}

    return LossTerm(
        kind="value loss",
        name="value_loss",
        leaf="vpreds",
        compute=compute,
        reference=losses.value_loss,
        hand=answers.VALUE_LOSS,
        cases=cases.VALUE_LOSS,
        constants=("returns", "values"),
        detaches=("returns", "values"),
        of_log_probs=False,
    )


def aggregation_modes() -> list[LossTerm]:
    """Every mode of aggregation, of losses that are what the model gives."""
    return [_aggregation_mode(mode) for mode in LOSS_AGG_MODES]


def _aggregation_mode(mode: str) -> LossTerm:
    def compute(
        batch: RaggedBatch, settings: Settings, info: Mapping[str, Any], prepared: Mapping[str, Tensor]
    ) -> LossAndMetrics:
        return agg_loss(batch.values, batch.mask, mode, **info), {}

    def reference(inputs: Mapping[str, Any], settings: Settings) -> float:
        return aggregate(inputs["loss_mat"], inputs["response_mask"], mode, settings["loss_scale_factor"])

    return LossTerm(
        kind="aggregation mode",
        name=mode,
        leaf="values",
        compute=compute,
        actor=partial(actor_config, **_OTHER_TERMS),
        reference=reference,
        hand=answers.AGGREGATION_MODES.get(mode, ()),
        cases=cases.AGGREGATION_MODES.get(mode, ()),
        modes=(mode,),
        of_log_probs=False,
    )
