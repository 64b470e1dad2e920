"""Checks across keys; they need no model, no GPU, no Ray and no file, and come before all of these.

Each raises a `ConfigError` that names the keys as typed, the rule and the nearest legal value.
"""

import importlib.util
from collections.abc import Iterator

from burnish.config import names
from burnish.config.algorithm_checks import check_algorithm
from burnish.config.build import shown, value_of
from burnish.config.checkpoint_checks import check_checkpoints
from burnish.config.dump_checks import check_dumps
from burnish.config.profiler_checks import check_profilers
from burnish.config.reward_manager_checks import check_reward_manager
from burnish.config.reward_model_checks import check_reward_model
from burnish.config.rollout_checks import check_rollout_engine
from burnish.config.settle import settle
from burnish.config.sft import SFTTrainerConfig
from burnish.config.trainer import PPOTrainerConfig
from burnish.config.values import divisors, near
from burnish.utils.errors import ConfigError

AnyConfig = PPOTrainerConfig | SFTTrainerConfig
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
    check_sequence_parallel(config)
    check_layout(config)
    check_rollout_engine(config)
    check_checkpoints(config)
    check_dumps(config)
    check_profilers(config)
    check_custom_code(config)
    check_reward_manager(config)
    check_reward_model(config)
    if not config.data.train_files and not train_rows_given:
        raise ConfigError(f"{shown(config, 'data.train_files')}: name at least one file to train on.")


def check_optimizers(config: PPOTrainerConfig) -> None:
    """The optimizer exists, is installed and gets two rates; its other arguments have no key of their own."""
    for model in (_ACTOR, "critic") if config.critic.enable else (_ACTOR,):
        check_optimizer(config, f"{model}.optim")


def check_optimizer(config: AnyConfig, optim: str) -> None:
    """The optimizer of the section ``optim``."""
    if len(value_of(config, f"{optim}.betas")) != 2:
        raise ConfigError(
            f"{shown(config, f'{optim}.betas')}: there must be two numbers. The usual value is {optim}.betas=[0.9,0.999]."
        )
    _check_optimizer_name(config, optim)
    for name in ("lr", "betas", "weight_decay"):
        if name in (value_of(config, f"{optim}.override_optimizer_config") or {}):
            raise ConfigError(
                f"{shown(config, f'{optim}.override_optimizer_config')}: {name} is the key {optim}.{name}."
            )


def _check_optimizer_name(config: AnyConfig, optim: str) -> None:
    name, library = value_of(config, f"{optim}.optimizer"), value_of(config, f"{optim}.optimizer_impl")
    if ":" in name:
        return
    package = library.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        close = near(library, names.OPTIMIZERS)
        if library in names.OPTIMIZERS:
            hint = "Install it: `pip install 'burnish[optimizers]'`."
        else:
            guess = f"Did you mean {close[0]}? " if close else ""
            hint = f"{guess}There is: {', '.join(names.OPTIMIZERS)}, or a module of your own."
        raise ConfigError(f"{shown(config, f'{optim}.optimizer_impl')}: {package} is not installed. {hint}")
    there = names.OPTIMIZERS.get(library)
    if there is None or name in there:
        return
    if library == "torch.optim" and name in names.IMPOSSIBLE_OPTIMIZERS:
        raise ConfigError(
            f"{shown(config, f'{optim}.optimizer')} is refused: {names.IMPOSSIBLE_OPTIMIZERS[name]}. There is: "
            f"{', '.join(there)}."
        )
    homes = [other for other, has in names.OPTIMIZERS.items() if name in has]
    close = near(name, there)
    hint = (
        f" It is one of {optim}.optimizer_impl={homes[0]}." if homes else f" Did you mean {close[0]}?" if close else ""
    )
    raise ConfigError(
        f"{shown(config, f'{optim}.optimizer')}: {library} has no such optimizer.{hint} There is: {', '.join(there)}. Your "
        f"own is named as package.module:Class."
    )


def check_batch_sizes(config: PPOTrainerConfig) -> None:
    """A step divides into updates, an update among workers, and a micro-batch is no larger than an update."""
    for model in (_ACTOR, "critic") if config.critic.enable else (_ACTOR,):
        mini_key, micro_key = f"{model}.ppo_mini_batch_size", f"{model}.ppo_micro_batch_size_per_gpu"
        _check_mini_batch(config, mini_key)
        n = config.actor_rollout_ref.rollout.n
        samples = value_of(config, mini_key) * n
        _check_division(config, mini_key, _num_workers(config, model), _sequence_parallel(config, model))
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
    nearest = min(divisors(prompts), key=lambda size: (abs(size - mini), -size))
    rule = "is more than" if mini > prompts else "does not divide"
    raise ConfigError(
        f"{shown(config, key)} {rule} {shown(config, 'data.train_batch_size')}: the prompts of a step are split into "
        f"updates of equal size, and both keys count prompts. The nearest value is {key}={nearest}."
    )


def _check_division(config: PPOTrainerConfig, key: str, workers: int, sequence_parallel: int) -> None:
    prompts, mini, n = config.data.train_batch_size, value_of(config, key), config.actor_rollout_ref.rollout.n
    # What does not divide into groups is for `check_sequence_parallel` to refuse.
    groups = max(1, workers // sequence_parallel)
    if mini * n % groups == 0:
        return
    legal = [size for size in divisors(prompts) if size * n % groups == 0]
    if legal:
        advice = f"The nearest value is {key}={min(legal, key=lambda size: (abs(size - mini), -size))}."
    else:
        advice = f"Make data.train_batch_size={prompts} a multiple of {groups} first."
    among = f"{workers} workers" if sequence_parallel == 1 else f"{groups} groups of {sequence_parallel} workers"
    raise ConfigError(
        f"{shown(config, key)}: an update has {mini} prompts x {n} responses = {mini * n} samples, which do not divide "
        f"among {among}. {advice}"
    )


def _num_workers(config: PPOTrainerConfig, model: str = _ACTOR) -> int:
    """Workers of a model; 1 while ``trainer.n_gpus_per_node`` is auto."""
    trainer, critic = config.trainer, config.critic
    if model == "critic" and critic.nnodes and critic.n_gpus_per_node:
        return critic.nnodes * critic.n_gpus_per_node
    return 1 if trainer.n_gpus_per_node == "auto" else int(trainer.n_gpus_per_node) * trainer.nnodes


def _sequence_parallel(config: PPOTrainerConfig, model: str) -> int:
    """Workers that share the tokens of a sample of a model."""
    return int(value_of(config, _sequence_parallel_key(model)))


def _sequence_parallel_key(model: str) -> str:
    return f"{'critic.model' if model == 'critic' else model}.fsdp_config.ulysses_sequence_parallel_size"


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
    for model, key in token_bounds_in_use(config):
        size = _sequence_parallel(config, model)
        if value_of(config, key) * size < longest:
            by_group = f" for each of the {size} workers that share a sample's tokens" if size > 1 else ""
            raise ConfigError(
                f"{shown(config, key)} is a bound that holds{by_group}, but {_lengths(config)}. The nearest value is "
                f"{key}={-(-longest // size)}."
            )


def _lengths(config: PPOTrainerConfig) -> str:
    rollout = config.actor_rollout_ref.rollout
    return (
        f"a sample has up to {rollout.prompt_length} + {rollout.response_length} = "
        f"{rollout.prompt_length + rollout.response_length} tokens (data.max_prompt_length + data.max_response_length)"
    )


def token_bounds_in_use(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    """The model that a bound is for, and its key."""
    needs_reference = config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss
    if value_of(config, f"{_ACTOR}.use_dynamic_bsz"):
        yield _ACTOR, f"{_ACTOR}.ppo_max_token_len_per_gpu"
    if value_of(config, f"{_ROLLOUT}.log_prob_use_dynamic_bsz"):
        yield _ACTOR, f"{_ROLLOUT}.log_prob_max_token_len_per_gpu"
    if value_of(config, f"{_REF}.log_prob_use_dynamic_bsz") and needs_reference:
        yield _REF, f"{_REF}.log_prob_max_token_len_per_gpu"
    if config.critic.use_dynamic_bsz and config.critic.enable:
        yield "critic", "critic.ppo_max_token_len_per_gpu"
        yield "critic", "critic.forward_max_token_len_per_gpu"


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


def check_sequence_parallel(config: PPOTrainerConfig) -> None:
    """Workers divide into the groups that share the tokens of a sample; nothing is known while their number is auto."""
    if config.trainer.n_gpus_per_node == "auto":
        return
    for model in (_ACTOR, _REF, "critic") if config.critic.enable else (_ACTOR, _REF):
        check_sharing_size(config, _sequence_parallel_key(model), _num_workers(config, model))


def check_sharing_size(config: AnyConfig, key: str, workers: int) -> None:
    """``workers`` divide into groups of the size ``key``."""
    size = int(value_of(config, key))
    if workers % size:
        nearest = min(divisors(workers), key=lambda divisor: (abs(divisor - size), -divisor))
        raise ConfigError(
            f"{shown(config, key)}: so many workers share the tokens of a sample, but {_counted(workers)} not divide "
            f"into such groups. The nearest value is {key}={nearest}."
        )


def _counted(workers: int) -> str:
    return "the one worker does" if workers == 1 else f"the {workers} workers do"


def check_layout(config: PPOTrainerConfig) -> None:
    """The workers that share one copy of a model divide all workers."""
    if config.trainer.n_gpus_per_node == "auto":
        return
    for model, section in ((_ACTOR, _ACTOR), (_REF, _REF), ("critic", "critic.model")):
        check_fsdp_size(config, f"{section}.fsdp_config.fsdp_size", _num_workers(config, model))


def check_fsdp_size(config: AnyConfig, key: str, workers: int) -> None:
    """``workers`` divide into groups of the size ``key``, or are one group."""
    size = value_of(config, key)
    if size == 0 or (size > 0 and workers % size != 0):
        sizes = divisors(workers)
        nearest = min(sizes, key=lambda number: abs(number - size))
        raise ConfigError(
            f"{shown(config, key)}: {workers} workers cannot be divided into groups of {size} that hold one copy of the "
            f"model each. Possible: -1 (all of them) or {', '.join(map(str, sizes))}. The nearest value is "
            f"{key}={nearest}."
        )


def check_custom_code(config: PPOTrainerConfig) -> None:
    """A file with code of the user's own and the name to take from it come together."""
    check_named_together(config, "data.custom_cls.path", "data.custom_cls.name")
    check_named_together(config, "data.sampler.class_path", "data.sampler.class_name")


def check_named_together(config: AnyConfig, file_key: str, name_key: str) -> None:
    """Neither key is set without the other."""
    file, name = value_of(config, file_key), value_of(config, name_key)
    if file is not None and name is None:
        raise ConfigError(f"{shown(config, file_key)} needs {name_key}: what to take from that file.")
    if file is None and name is not None:
        raise ConfigError(f"{shown(config, name_key)} needs {file_key}: the file that defines it.")
