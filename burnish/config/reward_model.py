"""`reward.reward_model`: a model that scores responses, in workers of its own."""
# ruff: noqa: RUF009  `key` and `section` declare dataclass fields.

from dataclasses import dataclass
from typing import Any

from burnish.config import names
from burnish.config.actor_rollout_ref import FSDPEngineConfig
from burnish.config.profiler import ProfilerConfig
from burnish.config.section import Section, key, section


@dataclass(kw_only=True, slots=True)
class RewardModelModelConfig(Section):
    """How the reward model is loaded, and how texts reach it."""

    input_tokenizer: str | None = key("auto", is_path=True)
    """Tokenizer that responses are decoded with before the reward model's own tokenizer and chat template render the
    conversation; auto: the policy's. null: the reward model has the policy's tokenizer and template, and takes ids as they
    are."""
    trust_remote_code: bool = key(False)
    """Run Python code that comes with the model."""
    external_lib: str | None = key(None, follows="actor_rollout_ref.model.external_lib")
    """Module that is imported before the model is loaded."""
    override_config: dict[str, Any] = key({})
    """Entries of the model's own configuration to replace."""
    fsdp_config: FSDPEngineConfig = section(FSDPEngineConfig)
    """Layout on the workers."""


@dataclass(kw_only=True, slots=True)
class RewardModelConfig(Section):
    """A reward model: sequence classification with one label."""

    enable: bool = key(False)
    """Score responses by a reward model. Without `function_weight` no reward function is called."""
    model_path: str | None = key(None, is_path=True)
    """Folder or hub name of the reward model."""
    model: RewardModelModelConfig = section(RewardModelModelConfig)
    """How it is loaded."""
    function_weight: float = key(0.0)
    """The score is that of the reward model plus `function_weight` times that of the reward function; 0: the function is not
    called."""
    max_length: int | None = key(None, ge=1)
    """Tokens of a conversation that the reward model sees; of longer ones the beginning is cut. null: as many as it has
    positions."""
    micro_batch_size_per_gpu: int | None = key(None, ge=1)
    """Samples that go through the model at once, per worker; null: `use_dynamic_bsz` becomes true."""
    use_dynamic_bsz: bool = key(None, follows="critic.use_dynamic_bsz")
    """Cut micro-batches by tokens instead of samples."""
    forward_max_token_len_per_gpu: int = key(None, follows="critic.forward_max_token_len_per_gpu", ge=1)
    """Tokens that go through the model at once, per worker, when micro-batches are cut by tokens."""
    strategy: str = key("fsdp", choices=names.STRATEGIES, planned=names.PLANNED_STRATEGIES)
    """Both names mean FSDP2."""
    enable_resource_pool: bool = key(False)
    """Give the reward model workers of its own; false: it shares the policy's."""
    n_gpus_per_node: int = key(0, ge=0)
    """Workers per node of its own pool."""
    nnodes: int = key(0, ge=0)
    """Nodes of its own pool."""
    profiler: ProfilerConfig = section(ProfilerConfig)
    """Recording its passes."""
