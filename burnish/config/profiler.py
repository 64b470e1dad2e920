"""`global_profiler` and the `profiler` section of each role: what is recorded of which steps, for looking at it afterwards."""
# ruff: noqa: RUF009  `key` and `section` declare dataclass fields.

from collections.abc import Iterator
from dataclasses import dataclass

from burnish.config import names
from burnish.config.section import Section, key, section

GLOBAL = "global_profiler"
_TOOLS = f"{GLOBAL}.global_tool_config"


@dataclass(kw_only=True, slots=True)
class TorchProfilerConfig(Section):
    """`tool=torch`, of every role."""

    contents: list[str] = key(["cpu", "cuda"], choices=names.PROFILER_CONTENTS)
    """What a trace holds: operations on the CPU (`cpu`), kernels on the GPU (`cuda`), every allocation of a tensor (`memory`),
    shapes of arguments (`shapes`), and lines of Python code (`stack`); the last three make it larger and the step slower."""
    discrete: bool = key(False)
    """One trace for each call of a role; false: one for each process and step."""


@dataclass(kw_only=True, slots=True)
class TorchMemoryConfig(Section):
    """`tool=torch_memory`, of every role."""

    trace_alloc_max_entries: int = key(100_000, ge=1)
    """Allocations that are remembered, the newest ones."""
    context: str = key("all", choices=("state", "alloc", "all"))
    """What has a stack: what is allocated at the end (`state`), every allocation (`alloc`), and every release too (`all`)."""
    stacks: str = key("python", choices=("python", "all"))
    """Frames of a stack: Python's, or also those of C++, which take much longer."""


@dataclass(kw_only=True, slots=True)
class GlobalToolConfig(Section):
    """Settings of the tools."""

    torch: TorchProfilerConfig = section(TorchProfilerConfig)
    """Traces."""
    torch_memory: TorchMemoryConfig = section(TorchMemoryConfig)
    """Snapshots of a GPU's memory."""


@dataclass(kw_only=True, slots=True)
class GlobalProfilerConfig(Section):
    """Which steps are recorded, and how."""

    tool: str | None = key(None, choices=names.PROFILERS, impossible=names.IMPOSSIBLE_PROFILERS)
    """`torch`: traces of operations and kernels; `torch_memory`: snapshots of a GPU's memory with its history. null: nothing."""
    steps: list[int] | None = key(None, ge=1)
    """Steps that are recorded; null: none."""
    profile_continuous_steps: bool = key(False)
    """Record steps that follow each other as one."""
    save_path: str | None = key(None, is_path=True)
    """Folder of what is recorded; null: `profile` in the run's folder."""
    global_tool_config: GlobalToolConfig = section(GlobalToolConfig)
    """Settings of the tools, for every role that has none of its own."""


@dataclass(kw_only=True, slots=True)
class RoleTorchConfig(Section):
    """`tool=torch`, of this role."""

    contents: list[str] = key(None, follows=f"{_TOOLS}.torch.contents", choices=names.PROFILER_CONTENTS)
    """What a trace holds."""
    discrete: bool = key(None, follows=f"{_TOOLS}.torch.discrete")
    """One trace for each call."""


@dataclass(kw_only=True, slots=True)
class RoleTorchMemoryConfig(Section):
    """`tool=torch_memory`, of this role."""

    trace_alloc_max_entries: int = key(None, follows=f"{_TOOLS}.torch_memory.trace_alloc_max_entries", ge=1)
    """Allocations that are remembered."""
    context: str = key(None, follows=f"{_TOOLS}.torch_memory.context", choices=("state", "alloc", "all"))
    """For which a stack is kept."""
    stacks: str = key(None, follows=f"{_TOOLS}.torch_memory.stacks", choices=("python", "all"))
    """Frames of a stack."""


@dataclass(kw_only=True, slots=True)
class RoleToolConfig(Section):
    """Settings of the tools for this role."""

    torch: RoleTorchConfig = section(RoleTorchConfig)
    """Traces."""
    torch_memory: RoleTorchMemoryConfig = section(RoleTorchMemoryConfig)
    """Snapshots."""


@dataclass(kw_only=True, slots=True)
class ProfilerConfig(Section):
    """Recording one role, in the steps of `global_profiler.steps`."""

    tool: str | None = key(
        None, follows=f"{GLOBAL}.tool", choices=names.PROFILERS, impossible=names.IMPOSSIBLE_PROFILERS
    )
    """As in `global_profiler`."""
    enable: bool | None = key(None)
    """Record this role; null: wherever a tool and steps are set."""
    all_ranks: bool = key(False)
    """On all workers."""
    ranks: list[int] = key([], ge=0)
    """On these workers; empty, without `all_ranks`: on the first."""
    save_path: str | None = key(None, follows=f"{GLOBAL}.save_path", is_path=True)
    """Folder of what is recorded."""
    tool_config: RoleToolConfig = section(RoleToolConfig)
    """Settings of the tools."""

    def takes(self, rank: int) -> bool:
        """Whether worker ``rank`` records this role."""
        if not self.enable or self.tool is None:
            return False
        return self.all_ranks or rank in (self.ranks or [0])


PROFILED_SECTIONS = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.rollout",
    "critic",
    "reward.reward_model",
)
"""The sections of reinforcement learning that have a `profiler`."""


def profiler_leaves(profiler: str) -> Iterator[str]:
    """The names of the keys of ``profiler``, but its switch."""
    yield from (f"{profiler}.{name}" for name in ("tool", "all_ranks", "ranks", "save_path"))
    for name in ("torch.contents", "torch.discrete"):
        yield f"{profiler}.tool_config.{name}"
    for name in ("trace_alloc_max_entries", "context", "stacks"):
        yield f"{profiler}.tool_config.torch_memory.{name}"
