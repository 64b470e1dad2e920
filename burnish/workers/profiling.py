"""Recording what a worker does in some steps: torch's traces, and snapshots of a GPU's memory.

`profiled` marks the methods that belong to a role; `ProfiledWorker.start_profile` and ``stop_profile`` enclose the steps. Where
several roles share a process they share its trace, since torch records a process once at a time: it begins with the first call
of a role that is recorded, and holds everything from there to the end of the step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from burnish.config.profiler import ProfilerConfig, RoleTorchConfig, RoleTorchMemoryConfig
from burnish.single_controller import Dispatch, Worker, register
from burnish.utils import local_paths

TRACE_END = ".trace.json.gz"
MEMORY_END = ".memory.pickle"


class ProcessRecorder:
    """What is being recorded in this process."""

    def __init__(self) -> None:
        self._trace: tuple[profile, Path] | None = None
        self._memory: Path | None = None

    @property
    def traces(self) -> bool:
        """Whether a trace is being recorded."""
        return self._trace is not None

    def start_trace(self, config: RoleTorchConfig, file: Path) -> None:
        """Begins a trace that goes to ``file``, unless there is one."""
        if self._trace is None:
            recorded = profile(
                activities=_activities(config.contents),
                profile_memory="memory" in config.contents,
                record_shapes="shapes" in config.contents,
                with_stack="stack" in config.contents,
                acc_events=True,
            )
            recorded.start()
            self._trace = (recorded, file)

    def start_memory(self, config: RoleTorchMemoryConfig, file: Path) -> None:
        """Begins to remember allocations on the GPU for a snapshot that goes to ``file``, unless that is done already."""
        if self._memory is None:
            torch.cuda.memory._record_memory_history(
                "all", context=config.context, stacks=config.stacks, max_entries=config.trace_alloc_max_entries
            )
            self._memory = file

    def finish(self) -> list[str]:
        """Ends both; returns the files that were written."""
        return [str(file) for file in (self._finish_trace(), self._finish_memory()) if file is not None]

    def _finish_trace(self) -> Path | None:
        if self._trace is None:
            return None
        (recorded, file), self._trace = self._trace, None
        recorded.stop()
        return _written(file, lambda path: recorded.export_chrome_trace(path))

    def _finish_memory(self) -> Path | None:
        if self._memory is None:
            return None
        file, self._memory = self._memory, None
        try:
            return _written(file, torch.cuda.memory._dump_snapshot)
        finally:
            torch.cuda.memory._record_memory_history(None)


_recorder = ProcessRecorder()


def profiled(role: str) -> Callable:
    """Marks a worker's method as the work of ``role``, which is recorded if its profiler says so.

    Args:
        role: a name of `ProfiledWorker.profilers`.
    """

    def decorator(method: Callable) -> Callable:
        @wraps(method)
        def recorded(self: ProfiledWorker, *args: Any, **kwargs: Any) -> Any:
            with self._recording(role, method.__name__):
                return method(self, *args, **kwargs)

        return recorded

    return decorator


class ProfiledWorker(Worker):
    """A worker whose calls can be recorded."""

    profile_name = "worker"
    """What the file of a whole process is called, after the worker that began it."""
    _profiled: tuple[str, str, str] | None = None
    """While steps are recorded: their name, the run's folder, and the folder that relative paths begin from."""
    _profiled_calls: dict[str, int]
    _profiled_files: list[str]

    def profilers(self) -> Mapping[str, ProfilerConfig]:
        """The profilers of this worker's roles by their names."""
        return {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, steps: str, run_dir: str, start_dir: str) -> None:
        """Records the following calls, as far as the roles' profilers say so.

        Args:
            steps: the name of what they belong to ("step_3", "step_3-5"); it becomes a folder.
            run_dir: the run's folder; `profile` in it is where files go that no ``save_path`` sends elsewhere.
            start_dir: the folder that the run was started in, from which relative paths begin wherever this process is.
        """
        self._profiled, self._profiled_calls, self._profiled_files = (steps, run_dir, start_dir), {}, []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> list[str]:
        """Ends that; returns the files of this rank."""
        if self._profiled is None:
            return []
        self._profiled = None
        return [*self._profiled_files, *_recorder.finish()]

    @contextmanager
    def _recording(self, role: str, call: str) -> Iterator[None]:
        profiler = self.profilers().get(role)
        if self._profiled is None or profiler is None or not profiler.takes(self.rank):
            yield
            return
        settings = profiler.tool_config
        if profiler.tool == "torch_memory":
            _recorder.start_memory(settings.torch_memory, self._profile_file(profiler, self.profile_name, MEMORY_END))
            yield
            return
        alone = settings.torch.discrete and not _recorder.traces
        name = f"{role}.{call}" if settings.torch.discrete else self.profile_name
        if not _recorder.traces:
            _recorder.start_trace(settings.torch, self._profile_file(profiler, name, TRACE_END))
        try:
            with record_function(f"{role}.{call}"):
                yield
        finally:
            if alone:
                self._profiled_files += _recorder.finish()

    def _profile_file(self, profiler: ProfilerConfig, name: str, end: str) -> Path:
        assert self._profiled is not None
        steps, run_dir, start_dir = self._profiled
        number = self._profiled_calls[name] = self._profiled_calls.get(name, 0) + 1
        again = f"-{number}" if number > 1 else ""
        folder = Path(run_dir, "profile") if profiler.save_path is None else local_paths.expanded(profiler.save_path)
        return Path(start_dir, folder) / steps / f"{name}-rank{self.rank}{again}{end}"


def _activities(contents: list[str]) -> list[ProfilerActivity]:
    wanted = [ProfilerActivity.CPU]
    if "cuda" in contents and torch.cuda.is_available():
        wanted = [ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if "cpu" in contents else [])]
    return wanted


def _written(file: Path, write: Callable[[str], Any]) -> Path:
    """Writes under another name first, so that whoever watches the folder finds whole files."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{os.getpid()}-{file.name}")
    write(str(temporary))
    os.replace(temporary, file)
    return file
