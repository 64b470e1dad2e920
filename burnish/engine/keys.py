"""Which configuration keys an engine answers to, for its messages: actor, critic and reference have their own."""

import logging
from dataclasses import dataclass
from typing import Any

from burnish.config import CriticModelConfig, FSDPEngineConfig, HFModelConfig
from burnish.engine.out_of_memory import MicroBatch

logger = logging.getLogger("burnish.engine")

_POLICY = "actor_rollout_ref"


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """Names of the sections and stages of one engine.

    Attributes:
        model_section, fsdp_section: where its model's and its layout's keys are.
        update, inference: section and prefix of the keys that cut its micro-batches in either.
        update_stage, infer_stage, step_stage: what they are called.
    """

    model_section: str
    fsdp_section: str
    update: str
    inference: str
    update_stage: str
    infer_stage: str
    step_stage: str

    @classmethod
    def of(cls, kind: str, *, trained: bool) -> "Keys":
        """Those of a "policy", a "value" function or a "reward" model, which is trained or only read; "sft" is a policy that is
        trained by supervised fine-tuning."""
        if kind == "reward":
            section = "reward.reward_model"
            return cls(
                model_section=f"{section}.model",
                fsdp_section=f"{section}.model.fsdp_config",
                update=section,
                inference=section,
                update_stage="the update of the reward model",
                infer_stage="the pass of the reward model",
                step_stage="the optimizer step of the reward model",
            )
        if kind == "value":
            return cls(
                model_section="critic.model",
                fsdp_section="critic.model.fsdp_config",
                update="critic.ppo",
                inference="critic.forward",
                update_stage="the update of the critic",
                infer_stage="the pass for the critic's values",
                step_stage="the optimizer step of the critic",
            )
        if kind == "sft":
            return cls(
                model_section="model",
                fsdp_section="engine",
                update="data",
                inference="data",
                update_stage="the update",
                infer_stage="the pass of the validation",
                step_stage="the optimizer step",
            )
        return cls(
            model_section=f"{_POLICY}.model",
            fsdp_section=f"{_POLICY}.{'actor' if trained else 'ref'}.fsdp_config",
            update=f"{_POLICY}.actor.ppo",
            inference=f"{_POLICY}.{'rollout' if trained else 'ref'}.log_prob",
            update_stage="the update of the actor",
            infer_stage="the pass for the actor's log-probs" if trained else "the pass for the reference's log-probs",
            step_stage="the optimizer step of the actor",
        )

    def fsdp(self, key: str) -> str:
        """A key of the layout."""
        return f"{self.fsdp_section}.{key}"

    def model(self, key: str) -> str:
        """A key of the model."""
        return f"{self.model_section}.{key}"

    def micro_batch(self, *, update: bool, by_rows: bool) -> MicroBatch:
        """An empty micro-batch with the keys that cut it."""
        prefix = self.update if update else self.inference
        if prefix == "reward.reward_model":
            # As they have always been called.
            size, tokens = f"{prefix}.micro_batch_size_per_gpu", f"{prefix}.forward_max_token_len_per_gpu"
            return MicroBatch(size_key=size, tokens_key=tokens, by_rows=by_rows)
        if prefix == "data":
            size, tokens = f"{prefix}.micro_batch_size_per_gpu", f"{prefix}.max_token_len_per_gpu"
            return MicroBatch(size_key=size, tokens_key=tokens, by_rows=by_rows)
        return MicroBatch(
            size_key=f"{prefix}_micro_batch_size_per_gpu",
            tokens_key=f"{prefix}_max_token_len_per_gpu",
            by_rows=by_rows,
        )

    def for_update(self, model_config: Any, *, recomputes_all: bool, can_move: bool) -> list[str]:
        """What leaves an update more memory for activations.

        Args:
            can_move: whether the CPU is a place for them; they may lie there anyway.
        """
        moves = model_config.enable_activation_offload and can_move
        ways = [] if recomputes_all or moves else [self.model("enable_gradient_checkpointing=true")]
        if can_move and not moves:
            ways.append(self.model("enable_activation_offload=true"))
        return ways

    def for_step(self, engine_config: Any) -> list[str]:
        """What moves state away that only an optimizer step needs."""
        names = [name for name in ("optimizer_offload", "param_offload") if not getattr(engine_config, name)]
        return [self.fsdp(f"{name}=true") for name in names]

    def say_what_has_no_effect(
        self, config: FSDPEngineConfig, model: HFModelConfig | CriticModelConfig, *, trained: bool
    ) -> None:
        """Tells of the keys that move state to the CPU, on a device whose state is there already."""
        keys = [self.fsdp(f"{name}=true") for name in ("param_offload", "optimizer_offload") if getattr(config, name)]
        if trained and model.enable_activation_offload:
            keys.append(self.model("enable_activation_offload=true"))
        if keys:
            logger.warning("%s: no effect on a CPU, where all state lies anyway.", ", ".join(keys))
