"""How long a step takes, from what the device can do at most and the share of it that burnish reaches."""

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.config import PPOTrainerConfig, needs_old_log_probs
from burnish.config.plan import BatchPlan
from burnish.engine.estimate import ModelEstimate
from burnish.rollout.native.memory import layer_shapes
from burnish.trainer.cluster import has_critic_pool
from burnish.trainer.ppo.roles import need_reference_policy
from burnish.utils.device_table import DECODE_EFFICIENCY, PASS_EFFICIENCY, UPDATE_EFFICIENCY, DeviceCeilings

# What a decode step takes beside its traffic.
_STEP_OVERHEAD = 0.4e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of the stages of a step in which every response has its full length."""

    stages: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Of the whole step, without rewards and what the driver does."""
        return sum(self.stages.values())


def estimate_step_time(
    config: PPOTrainerConfig, plan: BatchPlan, models: Mapping[str, ModelEstimate], device: DeviceCeilings
) -> StepTime:
    """The estimate for ``device``; several workers share the samples evenly. Of a critic in a pool of its own it counts what the
    policy's workers wait for."""
    actor, rollout = models["actor"], config.actor_rollout_ref.rollout
    samples = plan.samples / plan.workers
    tokens = samples * (plan.prompt_tokens + plan.response_tokens)
    stages = {"gen": _decode(plan, rollout.max_num_seqs, samples, actor, device)}

    def operations(model: ModelEstimate, factor: float, workers: int = plan.workers) -> float:
        return factor * model.num_parameters * tokens * plan.workers / workers

    passes = device.bf16_flops * PASS_EFFICIENCY
    if needs_old_log_probs(config):
        stages["old_log_prob"] = operations(actor, 2) / passes
    if need_reference_policy(config):
        stages["ref"] = operations(models.get("ref", actor), 2) / passes
    updates = device.bf16_flops * UPDATE_EFFICIENCY
    per_weight = 6 if actor.num_trained == actor.num_parameters else 4
    update_actor = operations(actor, per_weight) * config.actor_rollout_ref.actor.ppo_epochs / updates
    if "critic" in models and plan.critic is not None:
        critic, workers = models["critic"], plan.critic.workers
        is_apart = has_critic_pool(config)
        beside_values = stages.get("old_log_prob", 0.0) + stages.get("ref", 0.0) if is_apart else 0.0
        beside_update = update_actor if is_apart else 0.0
        update_critic = operations(critic, 6, workers) * config.critic.ppo_epochs / updates
        stages["values"] = max(0.0, operations(critic, 2, workers) / passes - beside_values)
        stages["update_critic"] = max(0.0, update_critic - beside_update)
    return StepTime(stages=stages | {"update_actor": update_actor})


def _decode(plan: BatchPlan, max_num_seqs: int, samples: float, actor: ModelEstimate, device: DeviceCeilings) -> float:
    """Each step reads the weights once and the keys and values of every running sequence, of half its length on average."""
    running = min(max_num_seqs, max(1.0, samples))
    layers = layer_shapes(actor.module.model)
    token = actor.dtype.itemsize * sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
    length = plan.prompt_tokens + plan.response_tokens / 2
    traffic = actor.num_parameters * actor.dtype.itemsize + running * length * token
    products = 2 * actor.num_parameters * running / (device.bf16_flops * PASS_EFFICIENCY)
    step = max(traffic / (device.bandwidth * DECODE_EFFICIENCY), products) + _STEP_OVERHEAD
    rounds = max(1.0, samples / running)
    prompts = samples / plan.samples_per_prompt * plan.prompt_tokens
    prefill = 2 * actor.num_parameters * prompts / (device.bf16_flops * PASS_EFFICIENCY)
    return plan.response_tokens * rounds * step + prefill
