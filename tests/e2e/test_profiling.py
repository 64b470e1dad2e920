"""Steps of real runs, recorded: which files there are, and what is in them."""

import gzip
import json
from pathlib import Path

import pytest

from burnish.config import load_config, load_sft_config, load_with_notices
from burnish.config.profiler_checks import check_profiled_device
from burnish.trainer.ppo.profiling import StepProfiler
from burnish.utils.errors import ConfigError
from burnish.utils.events import read_events
from tests.e2e.runs import logged, tiny_run
from tests.e2e.sft import sft_run

MODEL = "actor_rollout_ref.model.path=/m"
DATA = "data.train_files=a.jsonl"
SMALL = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=2"]


def spans_of(file: Path) -> list[str]:
    """The names of a trace's events."""
    with gzip.open(file, "rt") as lines:
        return [event.get("name", "") for event in json.load(lines)["traceEvents"]]


def files_in(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


PPO = [*SMALL, "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"]


def test_all_roles_of_a_process_are_in_the_trace_of_a_wanted_step(tmp_path: Path) -> None:
    tiny_run(
        tmp_path / "recorded",
        *PPO,
        "trainer.total_training_steps=2",
        "global_profiler.tool=torch",
        "global_profiler.steps=[2]",
    )
    folder = tmp_path / "recorded" / "profile"
    assert files_in(folder) == ["step_2/policy-rank0.trace.json.gz"]
    spans = spans_of(folder / "step_2" / "policy-rank0.trace.json.gz")
    for call in (
        "rollout.generate_sequences",
        "actor.compute_log_prob",
        "ref.compute_ref_log_prob",
        "critic.compute_values",
        "critic.update_critic",
        "actor.update_actor",
    ):
        assert spans.count(call) == 1, call
    assert any(name.startswith("aten::") for name in spans)
    (event,) = (event for event in read_events(tmp_path / "recorded") if event["kind"] == "profile")
    assert event["step"] == 2
    assert event["files"] == [str(folder / "step_2" / "policy-rank0.trace.json.gz")]


def test_a_step_of_supervised_fine_tuning_is_recorded_and_its_numbers_are_the_same(tmp_path: Path) -> None:
    steps = ["trainer.total_training_steps=2"]
    sft_run(tmp_path / "plain", *steps)
    sft_run(tmp_path / "recorded", *steps, "global_profiler.tool=torch", "global_profiler.steps=[2]")
    folder = tmp_path / "recorded" / "profile"
    assert files_in(folder) == ["step_2/model-rank0.trace.json.gz"]
    assert spans_of(folder / "step_2" / "model-rank0.trace.json.gz").count("model.train_batch") == 1
    assert logged(tmp_path / "plain") == logged(tmp_path / "recorded")


@pytest.mark.slow
def test_each_call_of_one_role_has_a_trace_of_its_own(tmp_path: Path) -> None:
    tiny_run(
        tmp_path,
        *SMALL,
        "trainer.total_training_steps=1",
        "global_profiler.tool=torch",
        "global_profiler.steps=[1,7]",
        "global_profiler.global_tool_config.torch.discrete=true",
        f"actor_rollout_ref.actor.profiler.save_path={tmp_path / 'elsewhere'}",
        "actor_rollout_ref.actor.profiler.tool_config.torch.contents=[cpu,memory,shapes]",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.rollout.profiler.enable=false",
        "actor_rollout_ref.ref.profiler.ranks=[3]",
    )
    assert not (tmp_path / "profile").exists()
    assert files_in(tmp_path / "elsewhere") == ["step_1/actor.update_actor-rank0.trace.json.gz"]
    spans = spans_of(tmp_path / "elsewhere" / "step_1" / "actor.update_actor-rank0.trace.json.gz")
    assert "actor.update_actor" in spans
    assert "[memory]" in spans


@pytest.mark.slow
def test_a_recorded_run_has_the_numbers_of_one_that_is_not(tmp_path: Path) -> None:
    tiny_run(tmp_path / "plain", *PPO)
    tiny_run(tmp_path / "recorded", *PPO, "global_profiler.tool=torch", "global_profiler.steps=[1,2]")
    assert logged(tmp_path / "plain") == logged(tmp_path / "recorded")


@pytest.mark.slow
def test_the_wanted_ranks_of_a_cluster_are_recorded(tmp_path: Path) -> None:
    tiny_run(
        tmp_path,
        "trainer.total_training_steps=3",
        "trainer.controller=ray",
        "trainer.n_gpus_per_node=2",
        "global_profiler.tool=torch",
        "global_profiler.steps=[1,2,3]",
        "global_profiler.profile_continuous_steps=true",
        "actor_rollout_ref.actor.profiler.all_ranks=true",
        "actor_rollout_ref.rollout.profiler.enable=false",
    )
    names = files_in(tmp_path / "profile")
    assert names == ["step_1-3/policy-rank0.trace.json.gz", "step_1-3/policy-rank1.trace.json.gz"]
    for name in names:
        assert spans_of(tmp_path / "profile" / name).count("actor.update_actor") == 3


class Workers:
    """A group of two ranks that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def start_profile(self, steps: str, run_dir: str, start_dir: str) -> None:
        self.told.append(steps)

    def stop_profile(self) -> list[list[str]]:
        self.told.append("stop")
        return [["/p/a"], []]


@pytest.mark.parametrize(
    ("joins", "calls"),
    [
        (False, ["step_2", "stop", "step_3", "stop", "step_5", "stop"]),
        (True, ["step_2-3", "stop", "step_5", "stop"]),
    ],
)
def test_steps_that_follow_each_other_are_one_where_that_is_asked_for(joins: bool, calls: list[str]) -> None:
    config = load_config(
        [MODEL, DATA, "global_profiler.steps=[2,3,5,6]", f"global_profiler.profile_continuous_steps={joins}"]
    ).global_profiler
    profiler, workers = StepProfiler(config, Path("run"), last_step=5), Workers()
    for step in range(1, 6):
        with profiler.step(step, [workers, object()], lambda *args, **fields: None):
            workers.told += []
    assert workers.told == calls


def test_a_step_that_does_not_come_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config([MODEL, DATA, "global_profiler.steps=[2,7]"]).global_profiler
    StepProfiler(config, Path("run"), last_step=5)
    assert "names step 7, which is not recorded: the run ends at step 5" in caplog.text


def test_a_step_that_fails_is_written_and_its_own_error_is_told() -> None:
    config = load_config([MODEL, DATA, "global_profiler.steps=[1]"]).global_profiler
    profiler, workers = StepProfiler(config, Path("run"), last_step=5), Workers()
    workers_gone = Workers()
    workers_gone.stop_profile = lambda: 1 / 0
    with pytest.raises(ValueError, match="the step's own"), profiler.step(1, [workers], lambda *args, **fields: None):
        raise ValueError("the step's own")
    assert workers.told == ["step_1", "stop"]
    with pytest.raises(ValueError, match="own"), profiler.step(1, [workers_gone], lambda *args, **fields: None):
        raise ValueError("the step's own")


def test_what_cannot_be_recorded_is_refused() -> None:
    for tool, why in {"nsys": "wraps a process from outside", "npu": "NPUs"}.items():
        with pytest.raises(ConfigError, match=why):
            load_config([f"global_profiler.tool={tool}"])
    with pytest.raises(ConfigError, match=r"actor.profiler.enable=true names no tool"):
        load_config([MODEL, DATA, "actor_rollout_ref.actor.profiler.enable=true"])
    config = load_config(
        [MODEL, DATA, "trainer.device=cpu", "global_profiler.tool=torch_memory", "global_profiler.steps=[1]"]
    )
    of_sft = load_sft_config(
        [DATA, "trainer.device=cpu", "profiler.tool=torch_memory", "profiler.enable=true", "global_profiler.steps=[1]"]
    )
    for one, key in ((config, "global_profiler.tool"), (of_sft, "profiler.tool")):
        with pytest.raises(
            ConfigError, match=rf"^{key}=torch_memory takes snapshots of a GPU's memory.*\[cpu,memory\]"
        ):
            check_profiled_device(one)


def test_settings_that_record_nothing_are_told() -> None:
    def notices(*keys: str) -> str:
        return " ".join(load_with_notices([MODEL, DATA, *keys]).notices)

    assert "global_profiler.steps names no step" in notices("global_profiler.tool=torch")
    assert "no tool is set" in notices("global_profiler.steps=[1]")
    assert "no role is recorded by torch_memory" in notices(
        "global_profiler.tool=torch",
        "global_profiler.steps=[1]",
        "global_profiler.global_tool_config.torch_memory.context=alloc",
    )
    assert notices("global_profiler.tool=torch", "global_profiler.steps=[1]") == ""
