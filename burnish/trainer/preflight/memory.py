"""Memory of each stage on one rank, estimated from the models' configurations: what is held, what a stage takes beside it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from burnish.config import PPOTrainerConfig, needs_old_log_probs
from burnish.config.actor_rollout_ref import FSDPActorConfig
from burnish.config.critic import CriticModelConfig, FSDPCriticConfig
from burnish.config.plan import BatchPlan, UpdatePlan
from burnish.engine.estimate import ModelEstimate, estimate_model
from burnish.rollout.native.engine import GPU_BLOCK_SIZE
from burnish.rollout.native.memory import layer_shapes, wanted_blocks
from burnish.trainer.cluster import has_critic_pool
from burnish.trainer.ppo.roles import need_reference_policy
from burnish.trainer.preflight.token_counts import micro_batch_tokens

GIB = 2**30
# The CUDA context with its loaded kernels and the libraries' workspaces: 0.81 GiB in a GRPO run on an H200 with CUDA 13.
_CONTEXT_BYTES = int(0.9 * GIB)
# Buffers of NCCL's channels for each group of ranks; assumed, not measured.
_NCCL_BYTES = int(0.5 * GIB)
# What allocators leave between blocks, as a share of what is allocated.
_SLACK = 0.05
# vLLM beside its share of the memory while it sleeps: its context and captured graphs.
_SLEEPING_VLLM_BYTES = int(1.5 * GIB)
# Float32 logits that exist at once while tokens are drawn (`burnish.rollout.native.runner`), and what drawing writes.
_DRAW_BYTES = 2 * 4 * (1 << 25)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """One stage on one rank.

    Attributes:
        name: "gen", "old_log_prob", "ref", "reward_model", "values", "update_critic", "update_actor" or "update_weights".
        held: bytes of what is there in any case, by name.
        taken: bytes of what the stage takes beside it, by name.
        key: what to turn where it does not fit, with its value.
        note: what the numbers rest on.
    """

    name: str
    held: Mapping[str, int]
    taken: Mapping[str, int]
    key: str
    note: str = ""

    @property
    def bytes(self) -> int:
        """What PyTorch has allocated at the peak of the stage."""
        return sum(self.held.values()) + sum(self.taken.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """The plan of one rank.

    Attributes:
        pool: the workers it is about: "policy", "critic" or "reward_model".
        total_bytes: of the device; None is not known.
        beside_bytes: what lies on the device beside what PyTorch has allocated.
        stages: in the order of a step.
        models: the estimates by role.
    """

    pool: str
    total_bytes: int | None
    beside_bytes: int
    stages: list[StageMemory]
    models: Mapping[str, ModelEstimate] = field(default_factory=dict)

    def needed(self, stage: StageMemory) -> int:
        """Bytes of the device that ``stage`` fills: what is allocated, gaps, and what lies beside."""
        return int(stage.bytes * (1 + _SLACK)) + self.beside_bytes

    @property
    def worst(self) -> StageMemory:
        """The stage that needs most."""
        return max(self.stages, key=lambda stage: stage.bytes)


def estimate_memory(
    config: PPOTrainerConfig, plan: BatchPlan, *, device: str, total_bytes: int | None
) -> list[MemoryReport]:
    """The plan of a rank of the policy's workers, and of the critic's where those are others.

    Args:
        device: "cuda" or "cpu".
        total_bytes: memory of a device; None plans as if there were plenty.

    Raises:
        ModelError: a model's configuration cannot be read.
    """
    policy, critic = config.actor_rollout_ref, config.critic
    total = total_bytes if total_bytes is not None else 1 << 50
    common: dict[str, Any] = {"device": device, "total_memory": total}
    models = {
        "actor": estimate_model(
            policy.model, policy.actor.fsdp_config, policy.actor.optim, world_size=plan.workers, **common
        )
    }
    has_adapters = models["actor"].num_trained < models["actor"].num_parameters
    if need_reference_policy(config) and not has_adapters:
        models["ref"] = estimate_model(policy.model, policy.ref.fsdp_config, None, world_size=plan.workers, **common)
    pools = {"policy": models}
    if plan.critic is not None:
        estimate = estimate_model(
            critic.model,
            critic.model.fsdp_config,
            critic.optim,
            module="value",
            world_size=plan.critic.workers,
            **common,
        )
        (pools.setdefault("critic", {}) if has_critic_pool(config) else models)["critic"] = estimate
    scorer = config.reward.reward_model
    if scorer.enable and scorer.model_path is not None:
        own_pool = scorer.enable_resource_pool and scorer.n_gpus_per_node * scorer.nnodes > 0
        (pools.setdefault("reward_model", {}) if own_pool else models)["reward_model"] = estimate_model(
            CriticModelConfig(
                path=scorer.model_path,
                trust_remote_code=scorer.model.trust_remote_code,
                override_config=scorer.model.override_config,
                fsdp_config=scorer.model.fsdp_config,
            ),
            scorer.model.fsdp_config,
            None,
            module="value",
            world_size=scorer.n_gpus_per_node * scorer.nnodes if own_pool else plan.workers,
            **common,
        )
    workers_of = {
        "policy": plan.workers,
        "critic": plan.critic.workers if plan.critic is not None else 0,
        "reward_model": scorer.n_gpus_per_node * scorer.nnodes,
    }
    reports = []
    for pool, estimates in pools.items():
        workers = workers_of[pool]
        beside = _beside(config, device, workers) if device == "cuda" else 0
        maker = _Stages(config, plan, estimates, device, total, beside, has_adapters)
        reports.append(
            MemoryReport(pool=pool, total_bytes=total_bytes, beside_bytes=beside, stages=maker.all(), models=estimates)
        )
    return reports


class _Stages:
    """Makes the stages of one pool."""

    def __init__(
        self,
        config: PPOTrainerConfig,
        plan: BatchPlan,
        models: Mapping[str, ModelEstimate],
        device: str,
        total: int,
        beside: int,
        has_adapters: bool,
    ) -> None:
        self.config, self.plan, self.models = config, plan, models
        self.device, self.total, self.beside, self.has_adapters = device, total, beside, has_adapters

    def all(self) -> list[StageMemory]:
        """In the order of a step."""
        stages = []
        if "actor" in self.models:
            stages.append(self._rollout())
            if needs_old_log_probs(self.config):
                stages.append(self._pass("actor", "old_log_prob", "rollout.log_prob"))
            if "ref" in self.models:
                stages.append(self._pass("ref", "ref", "ref.log_prob"))
            elif self.has_adapters and need_reference_policy(self.config):
                stages.append(self._pass("actor", "ref", "ref.log_prob"))
        if "reward_model" in self.models:
            stages.append(self._reward_model())
        if "critic" in self.models:
            stages += [self._values(), self._update("critic")]
        if "actor" in self.models:
            stages.append(self._update("actor"))
            if (sync := self._sync()) is not None:
                stages.append(sync)
        return stages

    def _held(self, in_use: str | None, *, updating: bool = False) -> dict[str, int]:
        """What every model has on the device, and a rollout that does not give its memory back."""
        held: dict[str, int] = {}
        for role, model in self.models.items():
            used = role == in_use
            held |= {f"{role} {name}": n for name, n in model.resident(in_use=used, updating=used and updating).items()}
        if in_use is not None and "actor" in self.models:
            held |= self._sleeping_rollout()
        return held

    def _sleeping_rollout(self) -> dict[str, int]:
        rollout = self.config.actor_rollout_ref.rollout
        if rollout.mode == "server":
            return {}
        if rollout.name == "vllm":
            return {} if rollout.free_cache_engine else {"vLLM": self._vllm_bytes()}
        copy = {"rollout weights": self._copy_bytes()} if not self._shares_weights else {}
        return copy if rollout.free_cache_engine else copy | {"KV cache": self._cache_bytes()}

    @property
    def _shares_weights(self) -> bool:
        """Whether the rollout reads the actor's own weights."""
        rollout, actor = self.config.actor_rollout_ref.rollout, self.models["actor"]
        same = rollout.dtype == "auto" or getattr(torch, rollout.dtype) == actor.dtype
        return actor.num_shards == 1 and not (actor.config.fsdp_size != 1 and self.plan.workers > 1) and same

    def _copy_bytes(self) -> int:
        rollout, actor = self.config.actor_rollout_ref.rollout, self.models["actor"]
        dtype = actor.dtype if rollout.dtype == "auto" else getattr(torch, rollout.dtype)
        return actor.num_parameters * dtype.itemsize

    def _vllm_bytes(self) -> int:
        return int(self.config.actor_rollout_ref.rollout.gpu_memory_utilization * self.total)

    def _cache_bytes(self) -> int:
        """The native engine's key-value cache: what its sequences need, within `gpu_memory_utilization`."""
        rollout, actor = self.config.actor_rollout_ref.rollout, self.models["actor"]
        longest = rollout.max_model_len or rollout.prompt_length + rollout.response_length
        block = GPU_BLOCK_SIZE if self.device == "cuda" else longest
        running = min(rollout.max_num_seqs, -(-self.plan.samples // self.plan.workers))
        itemsize = actor.dtype.itemsize if rollout.dtype == "auto" else getattr(torch, rollout.dtype).itemsize
        layers = layer_shapes(actor.module.model)
        token = itemsize * sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
        wanted = wanted_blocks(longest, block, running) * block * token
        return max(0, min(wanted, int(rollout.gpu_memory_utilization * self.total) - self._copy_bytes()))

    def _rollout(self) -> StageMemory:
        rollout, actor = self.config.actor_rollout_ref.rollout, self.models["actor"]
        key = f"actor_rollout_ref.rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g}"
        held = self._held(None)
        if rollout.mode == "server":
            return StageMemory(name="gen", held=held, taken={}, key=key, note="the engine runs elsewhere")
        if rollout.name == "vllm":
            return StageMemory(name="gen", held=held, taken={"vLLM": self._vllm_bytes()}, key=key)
        if not self._shares_weights:
            held["rollout weights"] = self._copy_bytes()
        if rollout.name != "native":
            note = f"rollout.name={rollout.name} is taken to need what the native engine does"
            return StageMemory(name="gen", held=held, taken={"KV cache": self._cache_bytes()}, key=key, note=note)
        prompts = min(rollout.max_num_batched_tokens, self.plan.prompts * rollout.prompt_length)
        prefill = 0 if actor.cost is None else int(prompts * actor.cost.block)
        taken = {"KV cache": self._cache_bytes(), "prefill and sampling": max(prefill, _DRAW_BYTES)}
        running = min(rollout.max_num_seqs, -(-self.plan.samples // self.plan.workers))
        return StageMemory(name="gen", held=held, taken=taken, key=key, note=f"{running:,} sequences at once")

    def _pass(self, role: str, stage: str, keys: str) -> StageMemory:
        policy = self.config.actor_rollout_ref
        section = policy.rollout if keys.startswith("rollout") else policy.ref
        samples = -(-self.plan.samples * self.plan.actor.sequence_parallel // self.plan.workers)
        by_rows = not section.log_prob_use_dynamic_bsz and section.log_prob_micro_batch_size_per_gpu is not None
        cut = UpdatePlan(
            updates=1,
            prompts=self.plan.prompts,
            samples=self.plan.samples,
            workers=self.plan.workers,
            sequence_parallel=self.plan.actor.sequence_parallel,
            micro_batch_samples=section.log_prob_micro_batch_size_per_gpu if by_rows else None,
            micro_batch_tokens=section.log_prob_max_token_len_per_gpu,
        )
        tokens = micro_batch_tokens(cut, self.plan, policy.actor.use_prefix_grouper, samples=samples)
        name = f"actor_rollout_ref.{keys}_{'micro_batch_size_per_gpu' if by_rows else 'max_token_len_per_gpu'}"
        value = section.log_prob_micro_batch_size_per_gpu if by_rows else section.log_prob_max_token_len_per_gpu
        return StageMemory(
            name=stage,
            held=self._held(role),
            taken={"a pass": self.models[role].pass_bytes(tokens)},
            key=f"{name}={value}",
            note=f"{tokens:,} tokens at once",
        )

    def _reward_model(self) -> StageMemory:
        scorer = self.config.reward.reward_model
        by_rows = scorer.micro_batch_size_per_gpu is not None and not scorer.use_dynamic_bsz
        each = scorer.max_length or self.plan.prompt_tokens + self.plan.response_tokens
        tokens = (scorer.micro_batch_size_per_gpu or 0) * each if by_rows else scorer.forward_max_token_len_per_gpu
        name = "micro_batch_size_per_gpu" if by_rows else "forward_max_token_len_per_gpu"
        return StageMemory(
            name="reward_model",
            held=self._held("reward_model"),
            taken={"a pass": self.models["reward_model"].pass_bytes(tokens)},
            key=f"reward.reward_model.{name}={getattr(scorer, name)}",
            note=f"{tokens:,} tokens at once",
        )

    def _values(self) -> StageMemory:
        critic, update = self.config.critic, self.plan.critic
        assert update is not None
        samples = -(-self.plan.samples * update.sequence_parallel // update.workers)
        by_rows = not critic.use_dynamic_bsz and critic.forward_micro_batch_size_per_gpu is not None
        cut = replace(
            update,
            micro_batch_samples=critic.forward_micro_batch_size_per_gpu if by_rows else None,
            micro_batch_tokens=critic.forward_max_token_len_per_gpu,
        )
        tokens = micro_batch_tokens(cut, self.plan, critic.use_prefix_grouper, samples=samples)
        taken = {"a pass": self.models["critic"].pass_bytes(tokens)}
        name = "forward_micro_batch_size_per_gpu" if by_rows else "forward_max_token_len_per_gpu"
        key = f"critic.{name}={getattr(critic, name)}"
        return StageMemory(
            name="values", held=self._held("critic"), taken=taken, key=key, note=f"{tokens:,} tokens at once"
        )

    def _update(self, role: str) -> StageMemory:
        update: UpdatePlan | None = self.plan.actor if role == "actor" else self.plan.critic
        section: FSDPActorConfig | FSDPCriticConfig = (
            self.config.actor_rollout_ref.actor if role == "actor" else self.config.critic
        )
        assert update is not None
        model, held = self.models[role], self._held(role, updating=True)
        tokens = micro_batch_tokens(update, self.plan, section.use_prefix_grouper)
        # Nothing lies beside on a CPU.
        taken, how = update_memory(model, tokens, self.total - self.beside - sum(held.values()))
        by_rows = update.micro_batch_samples is not None
        name = "ppo_micro_batch_size_per_gpu" if by_rows else "ppo_max_token_len_per_gpu"
        where = "actor_rollout_ref.actor" if role == "actor" else "critic"
        return StageMemory(
            name=f"update_{role}",
            held=held,
            taken=taken,
            key=f"{where}.{name}={getattr(section, name)}",
            note=f"{tokens:,} tokens at once{how}",
        )

    def _sync(self) -> StageMemory | None:
        rollout = self.config.actor_rollout_ref.rollout
        if rollout.name != "vllm" and self._shares_weights:
            return None
        megabytes = rollout.checkpoint_engine.update_weights_bucket_megabytes
        taken = {"two buckets of weights": 2 * megabytes << 20}
        held = self._held("actor")
        if rollout.name == "vllm" and rollout.mode != "server" and rollout.free_cache_engine:
            taken["vLLM's weights"] = -(-self._copy_bytes() // rollout.tensor_model_parallel_size)
        if self.models["actor"].num_shards > 1:
            taken["gathered weights"] = self.models["actor"].state.gathered
        key = f"actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes={megabytes}"
        return StageMemory(name="update_weights", held=held, taken=taken, key=key)


def update_memory(model: ModelEstimate, num_tokens: int, room: int) -> tuple[dict[str, int], str]:
    """What an update of ``num_tokens`` at once takes beside what is held, by name, and how activations are kept, in words.

    Args:
        room: bytes of the device beside what is held.
    """
    activations = model.update_plan(num_tokens, int(0.9 * max(0, room)))
    needed = 0 if activations is None else activations.needed_bytes
    fixed = model.state.passing + model.update_head_bytes(num_tokens)
    taken = {"logits, gradients in passing, gathered weights": fixed, "activations": max(0, needed - fixed)}
    step = model.step_bytes()
    if step > sum(taken.values()):
        taken = {"pieces of the optimizer's step": step}
    if activations is None:
        return taken, ""
    mlps = activations.num_without_mlp - activations.num_recomputed
    return taken, f", {activations.num_recomputed} of {activations.num_blocks} blocks recomputed" + (
        f" and the MLP of {mlps} more" if mlps else ""
    )


def context_bytes(workers: int) -> int:
    """What lies on a GPU beside PyTorch's own memory: the context, and NCCL's buffers where there are several workers."""
    return _CONTEXT_BYTES + (_NCCL_BYTES if workers > 1 else 0)


def _beside(config: PPOTrainerConfig, device: str, workers: int) -> int:
    """What lies on a GPU beside PyTorch's own memory: contexts, NCCL's buffers, a sleeping engine of vLLM's."""
    rollout = config.actor_rollout_ref.rollout
    vllm = _SLEEPING_VLLM_BYTES if rollout.name == "vllm" and rollout.mode != "server" else 0
    return context_bytes(workers) + vllm
