"""Checks across keys; they need no model, no GPU, no Ray and no file, and come before all of these.

Each raises a `ConfigError` that names the keys as typed, the rule and the nearest legal value.
"""

from collections.abc import Iterator

from burnish.config.algorithm_checks import check_algorithm
from burnish.config.build import shown, value_of
from burnish.config.settle import settle
from burnish.config.trainer import PPOTrainerConfig
from burnish.utils.errors import ConfigError

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"


def check(config: PPOTrainerConfig, *, train_rows_given: bool = False) -> None:
    """Decides what was left open, and runs every check.

    Raises:
        ConfigError: keys contradict each other.
    """
    check_algorithm(config)
    settle(config)
    check_optimizers(config)
    check_batch_sizes(config)
    check_lengths(config)
    check_sampling(config)
    check_token_bounds(config)
    check_workers(config)
    check_layout(config)
    check_resume(config)
    check_custom_code(config)
    if not config.data.train_files and not train_rows_given:
        raise ConfigError(f"{shown(config, 'data.train_files')}: name at least one parquet or jsonl file to train on.")


def check_optimizers(config: PPOTrainerConfig) -> None:
    """AdamW averages gradients and their squares, so there are two rates."""
    for key in (f"{_ACTOR}.optim.betas", "critic.optim.betas"):
        if len(value_of(config, key)) != 2:
            raise ConfigError(f"{shown(config, key)}: there must be two numbers. The usual value is {key}=[0.9,0.999].")


def check_batch_sizes(config: PPOTrainerConfig) -> None:
    """A step divides into updates, an update among workers, and a micro-batch is no larger than an update."""
    for model in (_ACTOR, "critic") if config.critic.enable else (_ACTOR,):
        mini_key, micro_key = f"{model}.ppo_mini_batch_size", f"{model}.ppo_micro_batch_size_per_gpu"
        _check_mini_batch(config, mini_key)
        n = config.actor_rollout_ref.rollout.n
        samples = value_of(config, mini_key) * n
        _check_division(config, mini_key, _num_workers(config, model))
        micro = value_of(config, micro_key)
        if micro is not None and not value_of(config, f"{model}.use_dynamic_bsz") and micro > samples:
            raise ConfigError(
                f"{shown(config, micro_key)} is more than an update has: {value_of(config, mini_key)} prompts "
                f"(ppo_mini_batch_size) x {n} responses (rollout.n) = {samples} samples. The nearest value is "
                f"{micro_key}={samples}."
            )


def _check_mini_batch(config: PPOTrainerConfig, key: str) -> None:
    prompts, mini = config.data.train_batch_size, value_of(config, key)
    if prompts % mini == 0:
        return
    nearest = min(_divisors(prompts), key=lambda size: (abs(size - mini), -size))
    rule = "is more than" if mini > prompts else "does not divide"
    raise ConfigError(
        f"{shown(config, key)} {rule} {shown(config, 'data.train_batch_size')}: the prompts of a step are split into "
        f"updates of equal size, and both keys count prompts. The nearest value is {key}={nearest}."
    )


def _check_division(config: PPOTrainerConfig, key: str, workers: int) -> None:
    prompts, mini, n = config.data.train_batch_size, value_of(config, key), config.actor_rollout_ref.rollout.n
    if mini * n % workers == 0:
        return
    legal = [size for size in _divisors(prompts) if size * n % workers == 0]
    if legal:
        advice = f"The nearest value is {key}={min(legal, key=lambda size: (abs(size - mini), -size))}."
    else:
        advice = f"Make data.train_batch_size={prompts} a multiple of {workers} first."
    raise ConfigError(
        f"{shown(config, key)}: an update has {mini} prompts x {n} responses = {mini * n} samples, which do not divide "
        f"among {workers} workers. {advice}"
    )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _num_workers(config: PPOTrainerConfig, model: str = _ACTOR) -> int:
    """Workers of a model; 1 while ``trainer.n_gpus_per_node`` is auto."""
    trainer, critic = config.trainer, config.critic
    if model == "critic" and critic.nnodes and critic.n_gpus_per_node:
        return critic.nnodes * critic.n_gpus_per_node
    return 1 if trainer.n_gpus_per_node == "auto" else int(trainer.n_gpus_per_node) * trainer.nnodes


def check_lengths(config: PPOTrainerConfig) -> None:
    """What the dataset lets through fits into the rollout."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.prompt_length < config.data.max_prompt_length:
        raise ConfigError(
            f"{shown(config, f'{_ROLLOUT}.prompt_length')} is less than {shown(config, 'data.max_prompt_length')}: "
            f"some prompts of the dataset would not fit. Set data.max_prompt_length alone; the rollout follows it."
        )
    longest = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        raise ConfigError(
            f"{shown(config, f'{_ROLLOUT}.max_model_len')} is too short: {_lengths(config)}. The nearest value is "
            f"{_ROLLOUT}.max_model_len={longest}."
        )


def check_sampling(config: PPOTrainerConfig) -> None:
    """A response that must have some tokens may have as many."""
    longest = config.actor_rollout_ref.rollout.response_length
    for key in (f"{_ROLLOUT}.min_new_tokens", f"{_ROLLOUT}.val_kwargs.min_new_tokens"):
        if (value_of(config, key) or 0) > longest:
            raise ConfigError(
                f"{shown(config, key)}: a response has up to {longest} tokens (data.max_response_length). The nearest "
                f"value is {key}={longest}."
            )


def check_token_bounds(config: PPOTrainerConfig) -> None:
    """The longest sample fits into every bound of tokens that is in use, since the bounds hold."""
    rollout = config.actor_rollout_ref.rollout
    longest = rollout.prompt_length + rollout.response_length
    for key in _token_bounds_in_use(config):
        if value_of(config, key) < longest:
            raise ConfigError(
                f"{shown(config, key)} is a bound that holds, but {_lengths(config)}. The nearest value is "
                f"{key}={longest}."
            )


def _lengths(config: PPOTrainerConfig) -> str:
    rollout = config.actor_rollout_ref.rollout
    return (
        f"a sample has up to {rollout.prompt_length} + {rollout.response_length} = "
        f"{rollout.prompt_length + rollout.response_length} tokens (data.max_prompt_length + data.max_response_length)"
    )


def _token_bounds_in_use(config: PPOTrainerConfig) -> Iterator[str]:
    needs_reference = config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss
    if value_of(config, f"{_ACTOR}.use_dynamic_bsz"):
        yield f"{_ACTOR}.ppo_max_token_len_per_gpu"
    if value_of(config, f"{_ROLLOUT}.log_prob_use_dynamic_bsz"):
        yield f"{_ROLLOUT}.log_prob_max_token_len_per_gpu"
    if value_of(config, f"{_REF}.log_prob_use_dynamic_bsz") and needs_reference:
        yield f"{_REF}.log_prob_max_token_len_per_gpu"
    if config.critic.use_dynamic_bsz and config.critic.enable:
        yield "critic.ppo_max_token_len_per_gpu"
        yield "critic.forward_max_token_len_per_gpu"


def check_workers(config: PPOTrainerConfig) -> None:
    """One process is one worker; a pool of the critic's own has both nodes and workers."""
    has_pool = config.critic.nnodes > 0
    if has_pool != (config.critic.n_gpus_per_node > 0):
        raise ConfigError(
            f"{shown(config, 'critic.nnodes')} and {shown(config, 'critic.n_gpus_per_node')}: a pool of the critic's "
            f"own needs both above 0; without one both are 0."
        )
    if config.trainer.controller == "local" and (_num_workers(config) > 1 or has_pool):
        raise ConfigError(
            f"{shown(config, 'trainer.controller')} runs one worker in the driver's process, but "
            f"{shown(config, 'trainer.n_gpus_per_node')}, {shown(config, 'trainer.nnodes')} and a pool of the critic's "
            f"own ask for more. Set trainer.controller=ray."
        )


def check_layout(config: PPOTrainerConfig) -> None:
    """All workers share one copy of a model, or each has its own."""
    if config.trainer.n_gpus_per_node == "auto":
        return
    for model, section in ((_ACTOR, _ACTOR), (_REF, _REF), ("critic", "critic.model")):
        key = f"{section}.fsdp_config.fsdp_size"
        workers = _num_workers(config, model)
        if value_of(config, key) not in (-1, 1, workers):
            raise ConfigError(
                f"{shown(config, key)}: all {workers} workers share one copy of the model (-1), or each has its own "
                f"(1); groups in between do not exist in burnish yet. The nearest value is {key}=-1."
            )


def check_resume(config: PPOTrainerConfig) -> None:
    """A folder to resume from and the mode that takes it come together."""
    mode, path = config.trainer.resume_mode, config.trainer.resume_from_path
    if mode == "resume_path" and path is None:
        raise ConfigError(
            "trainer.resume_mode=resume_path needs trainer.resume_from_path: a checkpoint's folder global_step_N. "
            "trainer.resume_mode=auto finds the newest in trainer.default_local_dir by itself."
        )
    if mode != "resume_path" and path is not None:
        raise ConfigError(
            f"{shown(config, 'trainer.resume_from_path')} is taken only with trainer.resume_mode=resume_path, but "
            f"there is {shown(config, 'trainer.resume_mode')}."
        )


def check_custom_code(config: PPOTrainerConfig) -> None:
    """A file with code of the user's own and the name to take from it come together."""
    for file_key, name_key in (
        ("data.custom_cls.path", "data.custom_cls.name"),
        ("data.sampler.class_path", "data.sampler.class_name"),
    ):
        file, name = value_of(config, file_key), value_of(config, name_key)
        if file is not None and name is None:
            raise ConfigError(f"{shown(config, file_key)} needs {name_key}: what to take from that file.")
        if file is None and name is not None:
            raise ConfigError(f"{shown(config, name_key)} needs {file_key}: the file that defines it.")
