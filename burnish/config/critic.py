"""`critic`: the value function, which estimators such as `gae` need."""
# ruff: noqa: RUF009  `key` and `section` declare dataclass fields.

from dataclasses import dataclass
from typing import Any

from burnish.config import names
from burnish.config.actor_rollout_ref import CheckpointConfig, FSDPEngineConfig, FSDPOptimizerConfig
from burnish.config.profiler import ProfilerConfig
from burnish.config.section import Section, key, section


@dataclass(kw_only=True, slots=True)
class CriticModelConfig(Section):
    """The critic's model: a causal LM whose head is replaced by a value head."""

    path: str = key(None, follows="actor_rollout_ref.model.path", is_path=True)
    """Folder or hub name of the model the critic starts from."""
    tokenizer_path: str = key(None, follows="actor_rollout_ref.model.tokenizer_path", is_path=True)
    """Folder of the tokenizer; the ids must be the policy's."""
    trust_remote_code: bool = key(None, follows="actor_rollout_ref.model.trust_remote_code")
    """Run Python code that comes with the model."""
    external_lib: str | None = key(None, follows="actor_rollout_ref.model.external_lib")
    """Module that is imported before the model is loaded."""
    override_config: dict[str, Any] = key({})
    """Entries of the model's own configuration to replace."""
    enable_gradient_checkpointing: bool | str = key("auto", choices=("auto",))
    """Recompute activations in the backward pass: less memory, about a third more time. auto: in as many blocks as the free
    memory asks for, often none."""
    enable_activation_offload: bool = key(False)
    """Keep the activations of the blocks on the CPU between forward and backward."""
    lora_rank: int = key(0, ge=0)
    """Rank of the adapters that are trained instead of the model (LoRA, arXiv:2106.09685); 0: the model itself is trained."""
    lora_alpha: int = key(16, ge=1)
    """What an adapter computes is multiplied by `lora_alpha / lora_rank`."""
    target_modules: list[str] = key(["all-linear"])
    """Linear layers that get an adapter: `all-linear` (all but the head), the last parts of their names (`[q_proj,v_proj]`),
    or regular expressions of whole names."""
    exclude_modules: list[str] = key([])
    """Layers that get none, likewise."""
    lora_adapter_path: str | None = key(None, is_path=True)
    """Folder of an adapter in peft's format to start from; it decides rank, alpha and layers."""
    lora_seed: int = key(None, follows="trainer.seed", ge=0, le=2**32 - 1)
    """Seed of the adapters' first values."""
    fsdp_config: FSDPEngineConfig = section(FSDPEngineConfig)
    """Layout on the workers."""


@dataclass(kw_only=True, slots=True)
class FSDPCriticConfig(Section):
    """Training the critic."""

    enable: bool | None = key(None)
    """Train a critic; null: when the advantage estimator needs one."""
    n_gpus_per_node: int = key(0, ge=0)
    """Workers per node of a pool of its own; 0: on the policy's workers."""
    nnodes: int = key(0, ge=0)
    """Nodes of a pool of its own; 0: on the policy's workers."""
    strategy: str = key("fsdp", choices=names.STRATEGIES, planned=names.PLANNED_STRATEGIES)
    """Both names mean FSDP2."""
    ppo_mini_batch_size: int = key(None, follows="actor_rollout_ref.actor.ppo_mini_batch_size", ge=1)
    """Prompts of one optimizer step; each counts with all its samples."""
    ppo_micro_batch_size_per_gpu: int | None = key(None, ge=1)
    """Samples that go through the model at once, per worker; null: `use_dynamic_bsz` becomes true."""
    use_dynamic_bsz: bool = key(None, follows="actor_rollout_ref.actor.use_dynamic_bsz")
    """Cut micro-batches by tokens instead of samples."""
    use_prefix_grouper: bool | None = key(None, follows="actor_rollout_ref.actor.use_prefix_grouper")
    """Compute the prompt of a group once for all its samples in a micro-batch; null: where that saves enough."""
    ppo_max_token_len_per_gpu: int = key(32768, ge=1)
    """Tokens that go through the model at once, per worker, when micro-batches are cut by tokens."""
    forward_micro_batch_size_per_gpu: int | None = key(None, follows=".ppo_micro_batch_size_per_gpu", ge=1)
    """Samples that go through the model at once when values are computed, per worker."""
    forward_max_token_len_per_gpu: int = key(None, follows=".ppo_max_token_len_per_gpu", ge=1)
    """Tokens that go through the model at once when values are computed, per worker."""
    ppo_epochs: int = key(None, follows="actor_rollout_ref.actor.ppo_epochs", ge=1)
    """Passes over a batch."""
    shuffle: bool = key(None, follows="actor_rollout_ref.actor.shuffle")
    """Draw the mini-batches in a new order in every pass."""
    data_loader_seed: int = key(None, follows="trainer.seed", ge=0, le=2**32 - 1)
    """Seed of that order."""
    cliprange_value: float = key(0.5, gt=0)
    """How far a value may move from the old one before its loss is clipped."""
    loss_agg_mode: str = key(None, follows="actor_rollout_ref.actor.loss_agg_mode", choices=names.LOSS_AGG_MODES)
    """How token losses become one number."""
    loss_scale_factor: float | None = key(None, follows="actor_rollout_ref.actor.loss_scale_factor", gt=0)
    """seq-mean-token-sum-norm: the divisor; null: `data.max_response_length`."""
    optim: FSDPOptimizerConfig = section(FSDPOptimizerConfig, lr=1e-5)
    """Optimizer."""
    model: CriticModelConfig = section(CriticModelConfig)
    """The model."""
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    """Contents of checkpoints."""
    profiler: ProfilerConfig = section(ProfilerConfig)
    """Recording its updates and passes."""
