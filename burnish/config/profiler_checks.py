"""What the profilers' keys mean together."""

from collections.abc import Iterator

from burnish.config.build import shown, value_of
from burnish.config.profiler import GLOBAL, PROFILED_SECTIONS, ProfilerConfig, profiler_leaves
from burnish.config.sft import SFTTrainerConfig
from burnish.config.trainer import PPOTrainerConfig
from burnish.utils.errors import ConfigError

AnyConfig = PPOTrainerConfig | SFTTrainerConfig

_TOOLS = f"{GLOBAL}.global_tool_config"
_KEYS_OF_TOOLS = {
    "torch": ("contents", "discrete"),
    "torch_memory": ("trace_alloc_max_entries", "context", "stacks"),
}


def role_profilers(config: AnyConfig) -> dict[str, ProfilerConfig]:
    """The profilers of the roles by their keys."""
    if isinstance(config, SFTTrainerConfig):
        return {"profiler": config.profiler}
    return {f"{section}.profiler": value_of(config, f"{section}.profiler") for section in PROFILED_SECTIONS}


def settle_profilers(config: AnyConfig) -> None:
    """Decides which roles are recorded: where nothing is said, all that there are, if anything is."""
    if not config.global_profiler.steps:
        return
    there: dict[str, bool | None] = {}
    if isinstance(config, PPOTrainerConfig):
        reward_model = config.reward.reward_model
        there = {"critic.profiler": config.critic.enable, "reward.reward_model.profiler": reward_model.enable}
    for key, profiler in role_profilers(config).items():
        if profiler.enable is None and profiler.tool is not None and there.get(key, True):
            profiler.enable = True


def check_profilers(config: AnyConfig) -> None:
    """Something is recorded where that is asked for.

    Raises:
        ConfigError: a tool is missing.
    """
    for key, profiler in role_profilers(config).items():
        if profiler.enable and profiler.tool is None:
            raise ConfigError(
                f"{shown(config, f'{key}.enable')} names no tool. Set {GLOBAL}.tool=torch and the steps to record, "
                f"{GLOBAL}.steps=[2]."
            )


def check_profiled_device(config: AnyConfig) -> None:
    """Only a GPU's memory has snapshots; call it when ``trainer.device`` is decided.

    Raises:
        ConfigError: the run is on a CPU.
    """
    if config.trainer.device != "cpu":
        return
    for role_key, profiler in role_profilers(config).items():
        if profiler.enable and profiler.tool == "torch_memory":
            own = f"{role_key}.tool"
            key = own if own in config.set_keys else f"{GLOBAL}.tool"
            raise ConfigError(
                f"{shown(config, key)} takes snapshots of a GPU's memory, and this run is on a CPU (trainer.device). Set "
                f"{key}=torch with {_TOOLS}.torch.contents=[cpu,memory]: the trace then has every allocation."
            )


def unused_of_profilers(config: AnyConfig) -> Iterator[tuple[str, str]]:
    """Keys that nothing reads, with the reason."""
    profilers = role_profilers(config)
    steps, tool = config.global_profiler.steps, config.global_profiler.tool
    if not steps:
        reason = f"{GLOBAL}.steps names no step to record"
        yield from ((f"{key}.enable", reason) for key, one in profilers.items() if one.enable)
        yield f"{GLOBAL}.tool", reason
    tools = {profiler.tool for profiler in profilers.values() if profiler.enable and steps}
    if not tools:
        reason = "nothing is recorded"
        for name in ("steps", "profile_continuous_steps", "save_path"):
            yield f"{GLOBAL}.{name}", f"no tool is set ({GLOBAL}.tool)" if tool is None else reason
    for name, keys in _KEYS_OF_TOOLS.items():
        if name not in tools:
            yield from ((f"{_TOOLS}.{name}.{key}", f"no role is recorded by {name}") for key in keys)
    for role_key, profiler in profilers.items():
        role = role_key.removesuffix("profiler").rstrip(".") or "the model"
        if not profiler.enable or not steps:
            yield from ((key, f"{role} is not recorded") for key in profiler_leaves(role_key))
            continue
        for name, keys in _KEYS_OF_TOOLS.items():
            if name != profiler.tool:
                why = f"{role} is recorded by {profiler.tool}"
                yield from ((f"{role_key}.tool_config.{name}.{key}", why) for key in keys)
        if profiler.all_ranks:
            yield f"{role_key}.ranks", shown(config, f"{role_key}.all_ranks")
