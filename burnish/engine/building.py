"""The module that an engine trains or reads (a policy, a value function, a reward model), read from a folder and laid out."""

import importlib
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from burnish.config import CriticModelConfig, FSDPEngineConfig, HFModelConfig
from burnish.engine import ranks
from burnish.engine.checkpoint.model_files import has_value_head, load_value_head
from burnish.engine.layout import Layout, Module, Replicated, Sharded
from burnish.engine.loading import build_from_rank_zero
from burnish.engine.memory import total_memory
from burnish.engine.offload import can_offload
from burnish.engine.state_bytes import defers_sync
from burnish.model.load import (
    backbone_skeleton,
    causal_lm_skeleton,
    load_backbone,
    load_causal_lm,
    load_classifier,
    load_config,
)
from burnish.model.policy import PolicyModule, ValueModule, classifier_module
from burnish.utils.errors import ConfigError


class ModuleBuilder:
    """Builds the module of one kind from a model's folder.

    Args:
        config: which model, and how it is read.
        kind: "policy", "value" or "reward".

    Raises:
        ConfigError: ``external_lib`` cannot be imported.
    """

    def __init__(self, config: HFModelConfig | CriticModelConfig, kind: Literal["policy", "value", "reward"]) -> None:
        self.config = config
        self.kind = kind
        self.dtype = torch.float32
        """In which weights are read."""
        if config.external_lib:
            _import_external(config.external_lib)

    def build(self, path: str | None, model: PreTrainedModel | None = None) -> Module:
        """The module at ``path``, or around ``model``, whole on the CPU."""
        if self.kind == "policy":
            return PolicyModule(load_causal_lm(str(path), self.dtype, **self._how) if model is None else model)
        if self.kind == "reward" and model is None and not has_value_head(str(path)):
            return classifier_module(load_classifier(str(path), self.dtype, **self._how))
        value = ValueModule(load_backbone(str(path), self.dtype, **self._how) if model is None else model)
        if path is not None:
            load_value_head(value, path)
        return value

    @property
    def _how(self) -> dict[str, Any]:
        """Keyword arguments of everything that reads a model's folder."""
        config = self.config
        return {"trust_remote_code": bool(config.trust_remote_code), "override_config": config.override_config}

    def config_of(self, model: PreTrainedModel | None) -> PreTrainedConfig:
        """The Hugging Face configuration of ``model``, or of the one at the configured path."""
        return load_config(str(self.config.path), **self._how) if model is None else model.config

    def build_everywhere(self, model: PreTrainedModel | None) -> tuple[Module, bool]:
        """The configured module, and whether only rank 0 has its weights yet: with several ranks one reads for all."""
        path = self.config.path
        if model is not None or ranks.world_size() == 1:
            return self.build(path, model), False

        def make_skeleton() -> Module:
            if self.kind == "policy":
                return PolicyModule(causal_lm_skeleton(str(path), self.dtype, **self._how))
            return ValueModule(backbone_skeleton(str(path), self.dtype, **self._how))

        return build_from_rank_zero(lambda: self.build(path), make_skeleton)


def make_layout(
    whole: Module, dtype: torch.dtype, device: torch.device, config: FSDPEngineConfig, *, from_rank_zero: bool
) -> Layout:
    """Lays ``whole`` out over the ranks: on each of them, or sharded."""
    if ranks.world_size() == 1 or config.fsdp_size == 1:
        return Replicated(
            whole,
            dtype,
            device,
            from_rank_zero=from_rank_zero,
            frees_grads=config.param_offload and can_offload(device),
        )
    return Sharded(
        whole,
        dtype,
        device,
        fsdp_size=config.fsdp_size,
        reshard_after_forward=config.reshard_after_forward,
        forward_prefetch=config.forward_prefetch,
        defers_sync=_defers_sync(whole, device, config),
        on_cpu=config.offload_policy,
        from_rank_zero=from_rank_zero,
    )


def _defers_sync(whole: Module, device: torch.device, config: FSDPEngineConfig) -> bool:
    """Whether gradients are reduced once per update: where nobody says, if whole ones take little of the memory."""
    num_trained = sum(parameter.numel() for parameter in whole.parameters() if parameter.requires_grad)
    takes_little = defers_sync(config, num_trained, total_memory(device, ranks.world_size()))
    if config.defer_gradient_sync != "auto":
        return takes_little
    # Devices may differ in size, and ranks that reduce at different times wait for each other for ever.
    (num_ranks,) = ranks.all_reduce_numbers([float(takes_little)], "sum", device)
    return num_ranks == ranks.world_size()


def _import_external(name: str) -> None:
    """Imports the module that registers a user's model classes with transformers."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"model.external_lib={name}: this module cannot be imported: {error}.") from error
