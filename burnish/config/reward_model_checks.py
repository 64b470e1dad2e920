"""Checks of the reward model, and of what it leaves without effect."""

from collections.abc import Iterator

from burnish.config.build import shown
from burnish.config.schema import leaves
from burnish.config.trainer import PPOTrainerConfig
from burnish.utils.errors import ConfigError

_MODEL = "reward.reward_model"


def has_reward_pool(config: PPOTrainerConfig) -> bool:
    """Whether the reward model has workers of its own."""
    return config.reward.reward_model.enable and config.reward.reward_model.enable_resource_pool


def check_reward_model(config: PPOTrainerConfig) -> None:
    """A reward model is named, its pool has workers, and a reward function that is named beside it is called.

    Raises:
        ConfigError: it is not so.
    """
    model = config.reward.reward_model
    if not model.enable:
        return
    if not (model.model_path or "").strip():
        raise ConfigError(
            f"{shown(config, f'{_MODEL}.enable')} needs {_MODEL}.model_path: a folder or org/model on the hub that holds a "
            f"sequence classifier with one label."
        )
    if has_reward_pool(config):
        if not (model.nnodes and model.n_gpus_per_node):
            raise ConfigError(
                f"{shown(config, f'{_MODEL}.enable_resource_pool')} needs {_MODEL}.nnodes and {_MODEL}.n_gpus_per_node "
                f"above 0: the workers of the reward model."
            )
        if config.trainer.controller == "local":
            raise ConfigError(
                f"{shown(config, 'trainer.controller')} runs one worker in the driver's process, but "
                f"{shown(config, f'{_MODEL}.enable_resource_pool')} asks for more. Set trainer.controller=ray."
            )
    size, workers = model.model.fsdp_config.ulysses_sequence_parallel_size, model.nnodes * model.n_gpus_per_node
    if has_reward_pool(config) and workers % size:
        key = f"{_MODEL}.model.fsdp_config.ulysses_sequence_parallel_size"
        raise ConfigError(f"{shown(config, key)} does not divide the {workers} workers of the reward model's pool.")
    _check_token_bound(config, size)
    own = next((key for key, is_set in _functions(config) if is_set), None)
    if own is not None and model.function_weight == 0:
        raise ConfigError(
            f"{shown(config, own)} and {shown(config, f'{_MODEL}.enable')}: the reward model's score is the score, so the "
            f"function would never be called. Set {_MODEL}.function_weight=1.0 to add its score, or leave it out. (A reward "
            f"model is a sequence classifier; a generative one, which the function would ask, is a judge: reward.judge.url.)"
        )


def _check_token_bound(config: PPOTrainerConfig, num_sharing: int) -> None:
    """A conversation of the greatest length fits into a micro-batch. What another tokenizer makes of it is not known here."""
    model, rollout = config.reward.reward_model, config.actor_rollout_ref.rollout
    longest = rollout.prompt_length + rollout.response_length
    seen = min(longest, model.max_length or longest)
    by_rows = model.micro_batch_size_per_gpu is not None and not model.use_dynamic_bsz
    if by_rows or model.forward_max_token_len_per_gpu * num_sharing >= seen:
        return
    key = f"{_MODEL}.forward_max_token_len_per_gpu"
    by_group = f" for each of the {num_sharing} workers that share a conversation's tokens" if num_sharing > 1 else ""
    cut = f", of which {_MODEL}.max_length={model.max_length} are seen" if seen < longest else ""
    raise ConfigError(
        f"{shown(config, key)} is a bound that holds{by_group}, but a conversation has up to {rollout.prompt_length} + "
        f"{rollout.response_length} = {longest} tokens (data.max_prompt_length + data.max_response_length){cut}. The nearest "
        f"value is {key}={-(-seen // num_sharing)}."
    )


def _functions(config: PPOTrainerConfig) -> Iterator[tuple[str, bool]]:
    reward = config.reward
    yield "reward.custom_reward_function.path", reward.custom_reward_function.path is not None
    yield "reward.functions", bool(reward.functions)
    yield "reward.judge.url", reward.judge.url is not None
    yield "reward.remote.url", reward.remote.url is not None


def unused_of_reward_model(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    """Keys that nothing reads, with the reason."""
    model = config.reward.reward_model
    if not model.enable:
        switch = shown(config, f"{_MODEL}.enable")
        for key in leaves():
            if key.startswith(f"{_MODEL}.") and key != f"{_MODEL}.enable":
                yield key, switch
        return
    layout = f"{_MODEL}.model.fsdp_config"
    for name in ("defer_gradient_sync", "optimizer_offload"):
        yield f"{layout}.{name}", "a reward model is not trained"
    if not model.enable_resource_pool:
        for name in ("nnodes", "n_gpus_per_node"):
            yield f"{_MODEL}.{name}", shown(config, f"{_MODEL}.enable_resource_pool")
    if model.micro_batch_size_per_gpu is not None and not model.use_dynamic_bsz:
        yield f"{_MODEL}.forward_max_token_len_per_gpu", shown(config, f"{_MODEL}.micro_batch_size_per_gpu")
    if model.function_weight == 0:
        reason = "the reward model's score is the score (reward.reward_model.function_weight=0)"
        prefixes = ("reward.reward_kwargs.", "reward.reward_manager.", "reward.sandbox.", "reward.sandbox_fusion.")
        names = ("num_workers", "timeout", "memory_limit_mb", "launch_reward_fn_async")
        for key in leaves():
            if key.startswith(prefixes) or key in {f"reward.{name}" for name in names}:
                yield key, reason
