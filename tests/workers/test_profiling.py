"""Which calls of a worker are recorded, and by what; torch's own recording is in the runs of tests/e2e."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from burnish.config import load_config
from burnish.config.profiler import ProfilerConfig
from burnish.single_controller.worker import WorkerContext
from burnish.workers import profiling
from burnish.workers.profiling import ProcessRecorder, ProfiledWorker, profiled


@pytest.fixture(autouse=True)
def recorder(monkeypatch) -> ProcessRecorder:
    """A recorder of this test's own."""
    made = ProcessRecorder()
    monkeypatch.setattr(profiling, "_recorder", made)
    return made


def config_of(*keys: str) -> ProfilerConfig:
    given = ["actor_rollout_ref.model.path=/m", "data.train_files=a.jsonl", "global_profiler.steps=[1]", *keys]
    return load_config(given).actor_rollout_ref.actor.profiler


class Adder(ProfiledWorker):
    """A worker with one role."""

    profile_name = "adder"

    def __init__(self, config: ProfilerConfig, rank: int = 0) -> None:
        self.config = config
        self.context = WorkerContext(rank=rank, world_size=4)

    def profilers(self) -> dict[str, ProfilerConfig]:
        return {"actor": self.config}

    @profiled("actor")
    def add(self, one: int, other: int) -> int:
        return int((torch.tensor(one) + torch.tensor(other)).item())

    @profiled("nobody")
    def subtract(self, one: int, other: int) -> int:
        return one - other


def files_of(worker: Adder, folder: Path, **where: str) -> list[str]:
    worker.start_profile("step_1", str(folder), str(folder))
    assert worker.add(1, 2) == 3
    assert worker.add(other=4, one=2) == 6
    assert worker.subtract(3, 2) == 1
    files = worker.stop_profile()
    assert all(Path(file).is_file() for file in files)
    assert worker.stop_profile() == []
    assert worker.add(1, 1) == 2
    return [str(Path(file).relative_to(folder)) for file in files]


def test_outside_of_the_steps_nothing_is_recorded(recorder: ProcessRecorder) -> None:
    assert Adder(config_of("global_profiler.tool=torch")).add(1, 2) == 3
    assert not recorder.traces


def test_the_calls_of_a_step_are_one_trace_or_one_each(tmp_path: Path) -> None:
    whole = Adder(config_of("global_profiler.tool=torch"))
    assert files_of(whole, tmp_path) == ["profile/step_1/adder-rank0.trace.json.gz"]
    each = Adder(config_of("global_profiler.tool=torch", "global_profiler.global_tool_config.torch.discrete=true"))
    names = ["profile/step_1/actor.add-rank0.trace.json.gz", "profile/step_1/actor.add-rank0-2.trace.json.gz"]
    assert files_of(each, tmp_path) == names


@pytest.mark.parametrize(
    ("key", "ranks"),
    [
        ("enable=true", [0]),
        ("enable=false", []),
        ("all_ranks=true", [0, 1, 2, 3]),
        ("ranks=[1,3]", [1, 3]),
        ("ranks=[]", [0]),
    ],
)
def test_the_ranks_that_are_named_record(key: str, ranks: list[int]) -> None:
    config = config_of("global_profiler.tool=torch", f"actor_rollout_ref.actor.profiler.{key}")
    assert [rank for rank in range(4) if config.takes(rank)] == ranks


def test_a_relative_folder_is_where_the_run_was_started(tmp_path: Path) -> None:
    worker = Adder(config_of("global_profiler.tool=torch", "global_profiler.save_path=traces"))
    worker.start_profile("step_1", "/the/run", str(tmp_path))
    worker.add(1, 2)
    assert worker.stop_profile() == [str(tmp_path / "traces" / "step_1" / "adder-rank0.trace.json.gz")]


def test_what_a_call_raises_goes_through_and_the_trace_is_written(tmp_path: Path) -> None:
    worker = Adder(config_of("global_profiler.tool=torch"))
    worker.start_profile("step_1", str(tmp_path), str(tmp_path))
    with pytest.raises(TypeError):
        worker.add("one", "two")
    assert len(worker.stop_profile()) == 1


def test_snapshots_of_the_memory_have_the_history_that_was_asked_for(tmp_path: Path, monkeypatch) -> None:
    asked: list[tuple] = []
    memory = SimpleNamespace(
        _record_memory_history=lambda enabled, **options: asked.append((enabled, options)),
        _dump_snapshot=lambda file: Path(file).write_bytes(b"snapshot"),
    )
    monkeypatch.setattr(torch.cuda, "memory", memory)
    tool = "global_profiler.global_tool_config.torch_memory"
    keys = [f"{tool}.trace_alloc_max_entries=500", f"{tool}.context=alloc", f"{tool}.stacks=all"]
    worker = Adder(config_of("global_profiler.tool=torch_memory", *keys))
    assert files_of(worker, tmp_path) == ["profile/step_1/adder-rank0.memory.pickle"]
    assert asked == [("all", {"context": "alloc", "stacks": "all", "max_entries": 500}), (None, {})]


@pytest.mark.gpu
def test_a_gpu_records_kernels_and_memory(tmp_path: Path) -> None:
    class OnGpu(Adder):
        @profiled("actor")
        def add(self, one: int, other: int) -> int:
            return int((torch.tensor(one, device="cuda") + torch.tensor(other, device="cuda")).item())

    assert files_of(OnGpu(config_of("global_profiler.tool=torch")), tmp_path)
    assert files_of(OnGpu(config_of("global_profiler.tool=torch_memory")), tmp_path)
    assert (tmp_path / "profile/step_1/adder-rank0.memory.pickle").stat().st_size > 0
