"""What one model takes on one rank, from its configuration alone: no weight is read and no device is asked.

The model is built on the meta device, where tensors have shapes and no memory, and prepared as the engine prepares it; the sizes
come from the functions that the engine itself plans with (`burnish.engine.state_bytes`, `burnish.engine.memory`).
"""

from dataclasses import dataclass
from typing import Literal

import torch

from burnish.config import CriticModelConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from burnish.engine.compute_dtype import resolve_dtype
from burnish.engine.memory import ActivationCost, MemoryPlan, activation_bytes, activation_cost, plan_memory
from burnish.engine.prepare import prepare_module
from burnish.engine.state_bytes import (
    BUCKET_BYTES,
    Head,
    StateBytes,
    head_bytes,
    replicated_bytes,
    sharded_bytes,
)
from burnish.model import lora
from burnish.model.load import backbone_skeleton, causal_lm_skeleton, load_config
from burnish.model.policy import PolicyModule, ValueModule, transformer_blocks
from burnish.utils.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelEstimate:
    """Bytes of one model on one rank.

    Attributes:
        state: weights, masters, gradients and moments, wherever they lie.
        cost: activations per token; None where the model names no blocks.
        num_blocks: of the model.
        head: its language-model head; None for a critic.
        mode: `enable_gradient_checkpointing`; "offloaded" where activations go to the CPU.
        config: where its state lies between uses.
        num_shards: ranks that share one copy.
        num_parameters, num_trained: of the whole model.
        dtype: in which it computes.
        module: on the meta device.
        on_gpu: whether it computes on a GPU.
    """

    state: StateBytes
    cost: ActivationCost | None
    num_blocks: int
    head: Head | None
    mode: bool | str
    config: FSDPEngineConfig
    num_shards: int
    num_parameters: int
    num_trained: int
    dtype: torch.dtype
    module: PolicyModule | ValueModule
    on_gpu: bool

    @property
    def _moves(self) -> bool:
        """Whether the keys that send state to the CPU have an effect."""
        return self.on_gpu

    @property
    def is_trained(self) -> bool:
        """Whether it has an optimizer."""
        return self.num_trained > 0

    @property
    def _on_cpu(self) -> bool:
        return self._moves and self.config.offload_policy and self.num_shards > 1

    def resident(self, *, in_use: bool, updating: bool = False) -> dict[str, int]:
        """What lies on the device, by name: while this model is used, or between its uses.

        Args:
            updating: it is being trained, from the second update on: gradients and moments exist.
        """
        state, config = self.state, self.config
        if self._on_cpu:
            return {}
        parks = self._moves and config.param_offload
        # Sharded weights and those of a model that is only read come back for a use; masters only for the step.
        weights_leave = parks and not in_use and (self.num_shards > 1 or not self.is_trained)
        held = {
            "weights": 0 if weights_leave else state.weights,
            "masters": 0 if parks else state.masters,
            "gradients": state.gradients if updating or (state.keeps_gradients and not parks) else 0,
            "moments": 0 if self._moves and config.optimizer_offload else state.moments,
        }
        return {name: size for name, size in held.items() if size}

    def update_plan(self, num_tokens: int, free_bytes: int) -> MemoryPlan | None:
        """How an update of ``num_tokens`` at once fits into ``free_bytes``, its state being there already.

        The same plan as the engine's, which counts missing gradients and moments too: here they are part of what is held.
        """
        if self.cost is None:
            return None
        fixed = self.state.passing + self.update_head_bytes(num_tokens)
        if self.mode == "auto":
            return plan_memory(
                self.cost,
                num_blocks=self.num_blocks,
                num_tokens=num_tokens,
                fixed_bytes=fixed,
                free_bytes=free_bytes,
            )
        recomputed = self.num_blocks if self.mode is True or self.mode == "offloaded" else 0
        needed = fixed + activation_bytes(self.cost, self.num_blocks, recomputed, recomputed, num_tokens)
        if self.mode == "offloaded":
            # Inputs too are on the CPU; two blocks' activations travel while one computes.
            needed = fixed + int(num_tokens * (self.cost.outside + 3 * self.cost.block))
        return MemoryPlan(
            num_blocks=self.num_blocks,
            num_recomputed=recomputed,
            num_without_mlp=recomputed,
            num_with_product=0,
            num_tokens=num_tokens,
            needed_bytes=needed,
            free_bytes=free_bytes,
        )

    def step_bytes(self) -> int:
        """What the optimizer's step takes beside the state: the pieces that come from the CPU."""
        offloads = self.config.optimizer_offload or (self.config.param_offload and self.state.masters)
        return 3 * BUCKET_BYTES if self._moves and offloads and not self._on_cpu else 0

    def pass_bytes(self, num_tokens: int) -> int:
        """What a pass without gradient over ``num_tokens`` takes: a block's tensors or a chunk's logits, gathered weights."""
        gathered = self.state.gathered
        if self.cost is None:
            return gathered
        states = 2 * self.cost.block_input
        head = 0 if self.head is None else head_bytes(num_tokens, self.head, on_gpu=self.on_gpu, backward=False)
        return gathered + int(num_tokens * states) + max(head, int(num_tokens * self.cost.block))

    def update_head_bytes(self, num_tokens: int) -> int:
        """What the language-model head takes in an update of ``num_tokens`` at once."""
        return 0 if self.head is None else head_bytes(num_tokens, self.head, on_gpu=self.on_gpu)


def estimate_model(
    model_config: HFModelConfig | CriticModelConfig,
    engine_config: FSDPEngineConfig,
    optim_config: FSDPOptimizerConfig | None,
    *,
    module: Literal["policy", "value"] = "policy",
    device: str = "cuda",
    world_size: int = 1,
    total_memory: int = 1 << 62,
) -> ModelEstimate:
    """The estimate of the engine that would be made with these arguments on each of ``world_size`` ranks.

    Args:
        device: "cuda" or "cpu".
        total_memory: of a device, by which `defer_gradient_sync=auto` decides.

    Raises:
        ModelError: the model's configuration cannot be read.
        ConfigError: the dtype or the adapters cannot be.
    """
    how = {"trust_remote_code": bool(model_config.trust_remote_code), "override_config": model_config.override_config}
    path, torch_device, trained = str(model_config.path), torch.device(device), optim_config is not None
    dtype = resolve_dtype(engine_config.dtype, torch_device, lambda: load_config(path, **how))  # type: ignore[arg-type]
    whole: PolicyModule | ValueModule
    if module == "policy":
        whole = PolicyModule(causal_lm_skeleton(path, dtype, **how))  # type: ignore[arg-type]
    else:
        whole = ValueModule(backbone_skeleton(path, dtype, **how))  # type: ignore[arg-type]
    has_adapters = lora.wants_adapters(model_config)
    prepare_module(whole, model_config, trained=trained, has_adapters=has_adapters, dtype=dtype, device=torch_device)
    num_shards = world_size if engine_config.fsdp_size == -1 else engine_config.fsdp_size
    if world_size == 1 or engine_config.fsdp_size == 1:
        num_shards = 1
        state = replicated_bytes(whole, dtype, optim_config)
    else:
        state = sharded_bytes(
            whole, dtype, optim_config, engine_config, num_shards=num_shards, total_memory=total_memory
        )
    try:
        blocks = transformer_blocks(whole.model)
        cost = activation_cost(whole, blocks, dtype, device)
    except ModelError:
        blocks, cost = [], None
    mode: bool | str = model_config.enable_gradient_checkpointing if trained else False
    if trained and model_config.enable_activation_offload and device == "cuda":
        mode = "offloaded"
    head = Head.of(whole.model.get_output_embeddings().weight, dtype) if isinstance(whole, PolicyModule) else None
    parameters = list(whole.parameters())
    return ModelEstimate(
        state=state,
        cost=cost,
        num_blocks=len(blocks),
        head=head,
        mode=mode,
        config=engine_config,
        num_shards=num_shards,
        num_parameters=sum(p.numel() for p in parameters),
        num_trained=sum(p.numel() for p in parameters if p.requires_grad),
        dtype=dtype,
        module=whole,
        on_gpu=device == "cuda",
    )
