"""The rollout engine of a trained model."""

import copy
from typing import Any, Protocol

import torch
from torch import nn

from burnish.config import ActorRolloutRefConfig, RolloutConfig, SamplingConfig
from burnish.model.load import build_causal_lm
from burnish.model.lora import add_same_adapters
from burnish.rollout.base import BaseRollout, SamplingParams, get_rollout_cls


class TrainedPolicy(Protocol):
    """What a rollout needs to know of the engine that trains the policy."""

    @property
    def module(self) -> Any:
        """``module.model`` is the Hugging Face causal LM."""
        ...

    @property
    def shares_storage(self) -> bool:
        """Whether the parameters of ``module.model`` are whole and stay at their addresses."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it computes in."""
        ...


def build_rollout(
    policy: TrainedPolicy, config: ActorRolloutRefConfig, device: torch.device | str, tokenizer: Any = None
) -> BaseRollout:
    """The engine ``rollout.name``, on the policy's own weights where their layout and ``rollout.dtype`` allow it.

    Otherwise it gets a second model of the same configuration, with random weights until ``update_weights`` fills it, and
    with the buffers of the trained one: no update brings those, since they are not trained. Where the trained one has adapters
    it gets the same.

    An engine class with ``for_policy(policy, config, device, tokenizer)`` is asked for the engine instead: it brings a model of
    its own. All ranks call it together.

    Args:
        tokenizer: the model's, which an engine needs for stop strings; an engine is given none that is None.

    Raises:
        ConfigError: there is no engine of that name.
    """
    rollout = config.rollout
    engine_cls: Any = rollout_class(rollout)
    if hasattr(engine_cls, "for_policy"):
        engine: BaseRollout = engine_cls.for_policy(policy, config, device, tokenizer)
        return engine
    given: dict[str, Any] = {"device": device} | ({} if tokenizer is None else {"tokenizer": tokenizer})
    dtype = rollout_dtype(policy, rollout)
    if policy.shares_storage and dtype == policy.dtype:
        return engine_cls(policy.module.model, rollout, shares_storage=True, **given)
    # There at once: a copy that every rank of a computer makes in its memory first would fill that.
    model: Any = build_causal_lm(copy.deepcopy(policy.module.model.config), dtype, device=device, check=False)
    _copy_buffers(policy.module.model, model)
    add_same_adapters(model, policy.module.model)
    return engine_cls(model.to(device), rollout, shares_storage=False, **given)


def rollout_class(config: RolloutConfig) -> Any:
    """The class of the engine that is configured.

    Raises:
        ConfigError: there is no engine of that name.
    """
    if config.name == "vllm" and config.mode == "server":
        from burnish.rollout.vllm.server import ServerRollout

        return ServerRollout
    return get_rollout_cls(config.name)


def ranks_per_engine(config: RolloutConfig) -> int:
    """Neighbouring ranks that are one engine: they get the same rows, and the first of them answers."""
    if config.name in ("native", "hf") or config.mode == "server":
        return 1
    return config.tensor_model_parallel_size * config.data_parallel_size


def rollout_dtype(policy: TrainedPolicy, config: RolloutConfig) -> torch.dtype:
    """The dtype of the weights that the rollout samples from."""
    dtype: torch.dtype = policy.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    return dtype


def _copy_buffers(source: nn.Module, target: nn.Module) -> None:
    own = dict(target.named_buffers())
    for name, buffer in source.named_buffers():
        own[name].copy_(buffer)


def sampling_of(
    rollout: RolloutConfig,
    source: RolloutConfig | SamplingConfig,
    eos_token_ids: tuple[int, ...],
    *,
    greedy: bool = False,
) -> SamplingParams:
    """How the configuration says that responses are drawn.

    Args:
        source: what says it: ``rollout`` itself for training, its ``val_kwargs`` for validation.
        eos_token_ids: what ends a response.
        greedy: whatever ``source`` says of that.
    """
    return SamplingParams(
        temperature=source.temperature,
        top_p=source.top_p,
        top_k=source.top_k,
        min_p=source.min_p,
        repetition_penalty=source.repetition_penalty,
        do_sample=source.do_sample and not greedy,
        max_new_tokens=rollout.response_length,
        min_new_tokens=source.min_new_tokens,
        ignore_eos=rollout.ignore_eos,
        seed=rollout.seed,
        eos_token_ids=eos_token_ids,
        stop_token_ids=tuple(source.stop_token_ids),
        stop=tuple(source.stop),
    )
