"""Checks of the rollout engine's keys against each other and against the workers; they load no engine."""

from burnish.config.build import shown, value_of
from burnish.config.trainer import PPOTrainerConfig
from burnish.config.values import divisors
from burnish.utils.errors import ConfigError

_ROLLOUT = "actor_rollout_ref.rollout"


def check_rollout_engine(config: PPOTrainerConfig) -> None:
    """The engine can be where it is asked to be, and its workers divide.

    Raises:
        ConfigError: names the key.
    """
    rollout = config.actor_rollout_ref.rollout
    if rollout.mode == "server":
        _check_server(config)
    elif rollout.name == "vllm":
        if rollout.mode == "sync" and rollout.data_parallel_size > 1:
            raise ConfigError(
                f"{shown(config, f'{_ROLLOUT}.data_parallel_size')} joins engines in processes of their own, but there is "
                f"{shown(config, f'{_ROLLOUT}.mode')}. Set {_ROLLOUT}.mode=async."
            )
        check_engine_workers(config)
        _check_prefill(config)


def _check_server(config: PPOTrainerConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name in ("native", "hf"):
        raise ConfigError(
            f"{shown(config, f'{_ROLLOUT}.mode')} takes responses from engines that run elsewhere, but "
            f"{shown(config, f'{_ROLLOUT}.name')} runs in the workers. Set {_ROLLOUT}.name=vllm, or leave mode out."
        )
    if not rollout.server.url:
        raise ConfigError(
            f"{shown(config, f'{_ROLLOUT}.mode')} needs the address of a server, as "
            f"{_ROLLOUT}.server.url=http://localhost:8000."
        )
    for url in rollout.server.url:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{shown(config, f'{_ROLLOUT}.server.url')}: an address begins with http:// or https://. The nearest value "
                f"is {_ROLLOUT}.server.url=http://{url}."
            )
    if rollout.server.weights_dir is None and not config.trainer.val_only:
        raise ConfigError(
            f"{shown(config, f'{_ROLLOUT}.mode')} samples from engines that would never get the trained weights: set "
            f"{_ROLLOUT}.server.weights_dir to a folder that the servers see too (docs/vllm.md), or trainer.val_only=true."
        )
    if rollout.server.weights_dir is not None and config.actor_rollout_ref.model.lora_rank:
        raise ConfigError(
            f"{shown(config, 'actor_rollout_ref.model.lora_rank')} trains adapters, but {_ROLLOUT}.server.weights_dir hands "
            f"whole models over. Set {_ROLLOUT}.mode=async, or actor_rollout_ref.model.lora_rank=0."
        )


def check_engine_workers(config: PPOTrainerConfig) -> None:
    """The workers of a node divide into the groups that are one engine; nothing is known while their number is auto.

    Raises:
        ConfigError: they do not.
    """
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    if rollout.name != "vllm" or rollout.mode == "server" or trainer.n_gpus_per_node == "auto":
        return
    workers = int(trainer.n_gpus_per_node)
    for name in ("data_parallel_size", "tensor_model_parallel_size"):
        key = f"{_ROLLOUT}.{name}"
        size = value_of(config, key)
        others = 1 if name == "data_parallel_size" else rollout.data_parallel_size
        if workers % (size * others) == 0:
            continue
        legal = [number for number in divisors(workers) if workers % (number * others) == 0]
        nearest = min(legal, key=lambda number: (abs(number - size), -number))
        beside = f" (times {shown(config, f'{_ROLLOUT}.data_parallel_size')})" if others > 1 else ""
        raise ConfigError(
            f"{shown(config, key)}{beside}: so many workers of a node are one engine, but "
            f"trainer.n_gpus_per_node={workers} does not divide into such groups. The nearest value is {key}={nearest}."
        )


def _check_prefill(config: PPOTrainerConfig) -> None:
    """Without chunks a prompt goes into the model at once, so vLLM wants room for the longest sequence."""
    rollout = config.actor_rollout_ref.rollout
    longest = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    if rollout.enable_chunked_prefill or rollout.max_num_batched_tokens >= longest:
        return
    raise ConfigError(
        f"{shown(config, f'{_ROLLOUT}.max_num_batched_tokens')} is less than the {longest} tokens of the longest sequence, "
        f"which vLLM takes in at once with {shown(config, f'{_ROLLOUT}.enable_chunked_prefill')}. The nearest value is "
        f"{_ROLLOUT}.max_num_batched_tokens={longest}."
    )
