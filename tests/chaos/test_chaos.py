"""Whatever happens to a run: no completed checkpoint is lost, nothing of it stays behind, and it goes on to the very bits."""

import random
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from tests.chaos.harness import (
    HERE,
    ONE_PROCESS,
    STEPS,
    TINY,
    TWO_RANKS,
    Chaos,
    assert_equal_runs,
    checkpoints,
    contents,
    events,
    resume,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PPO = ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", *ONE_PROCESS)
IN_BACKGROUND = ("actor_rollout_ref.actor.checkpoint.async_save=true",)
KEEPS_ONE = ("trainer.max_actor_ckpt_to_keep=1",)
STAGES = {
    ONE_PROCESS: ("gen", "reward", "adv", "update_actor", "update_weights"),
    PPO: ("gen", "reward", "values", "adv", "update_critic", "update_actor", "update_weights"),
}
MOST_CALLS = {2: 40, 4: 40, 5: 20}
"""Changes to the disk that certainly come once the save of a step has begun; after the last step no other save follows."""


def drawn(seed: int) -> tuple[dict, tuple[str, ...], tuple[str, ...]]:
    """What happens, in which kind of run, with which further overrides."""
    rng = random.Random(f"chaos {seed}")
    kind = rng.choice(list(STAGES))
    more = rng.choice([(), (), KEEPS_ONE])
    if seed % 2:
        step = rng.choice(list(MOST_CALLS))
        what = {"do": "kill_driver", "step": step, "call": rng.randint(1, MOST_CALLS[step])}
        return what, kind, (*more, *rng.choice([(), IN_BACKGROUND]))
    return {"do": "kill_driver", "step": rng.randint(1, 5), "stage": rng.choice(STAGES[kind])}, kind, more


def assert_nothing_is_lost(folder: Path, *, keeps_all: bool = True) -> None:
    """What was told to be saved is there and complete, and the tracker names one of them."""
    told = {event["step"] for event in events(folder, "checkpoint")}
    there = checkpoints(folder)
    tracker = folder / "latest_checkpointed_iteration.txt"
    assert told <= there.keys() if keeps_all else (not told or max(told) in there)
    assert not tracker.exists() or int(tracker.read_text()) in there


@pytest.mark.parametrize("seed", range(10))
def test_a_run_that_is_killed_anywhere_goes_on_to_the_bit(tmp_path, reference, seed):
    what, kind, more = drawn(seed)
    run = Chaos(tmp_path / "run", what, *kind, *more)
    assert run.end() == -signal.SIGKILL, run.said
    assert "now: " in run.said
    assert_nothing_is_lost(tmp_path / "run", keeps_all=KEEPS_ONE[0] not in more)
    resume(tmp_path / "run", *kind, *more)
    assert_equal_runs(tmp_path / "run", reference(*kind))


@pytest.mark.parametrize("stage", ["gen", "update_actor", "save_checkpoint"])
def test_sigterm_saves_and_the_run_goes_on_to_the_bit(tmp_path, reference, stage):
    run = Chaos(tmp_path / "run", {"do": "terminate", "step": 4, "stage": stage}, *ONE_PROCESS)
    assert run.end() == 143, run.said
    assert max(checkpoints(tmp_path / "run")) == (3 if stage == "gen" else 4)
    assert_nothing_is_lost(tmp_path / "run")
    resume(tmp_path / "run", *ONE_PROCESS)
    assert_equal_runs(tmp_path / "run", reference(*ONE_PROCESS))


VALIDATES = (
    f"data.val_files={TINY / 'data' / 'test.jsonl'}",
    "data.val_max_samples=16",
    "trainer.test_freq=2",
    "trainer.val_before_train=false",
)


@pytest.mark.parametrize(
    ("is_sft", "do", "step", "stage", "status", "saved"),
    [
        (False, "interrupt", 3, "gen", 130, 2),
        (False, "hang_up", 3, "update_actor", 129, 3),
        (False, "terminate_group", 4, "testing", 143, 4),
        (False, "terminate_group", 2, "save_checkpoint", 143, 2),
        (True, "hang_up", 3, "train", 129, 3),
        (True, "interrupt", 2, "testing", 130, 2),
        (True, "terminate_group", 2, "save_checkpoint", 143, 2),
    ],
)
def test_a_signal_while_the_driver_waits_for_ray_saves_and_the_run_goes_on_to_the_bit(
    tmp_path, reference, is_sft, do, step, stage, status, saved
):
    kind = TWO_RANKS if is_sft else (*TWO_RANKS, *VALIDATES)
    # A moment later: what waits in Ray's native code hears of signals by Ray.
    what = {"do": do, "step": step, "stage": stage, "after": 0.5}
    run = Chaos(tmp_path / "run", what, *kind, is_sft=is_sft)
    assert run.end() == status, run.said
    assert max(checkpoints(tmp_path / "run")) == saved, run.said
    assert "Traceback" not in run.said
    assert_nothing_is_lost(tmp_path / "run")
    resume(tmp_path / "run", *kind, is_sft=is_sft)
    ours, theirs = (checkpoints(folder)[STEPS] for folder in (tmp_path / "run", reference(*kind, is_sft=is_sft)))
    assert contents(ours) == contents(theirs)


def test_a_second_ctrl_c_ends_a_run_on_ray_at_once_and_loses_no_checkpoint(tmp_path):
    # Of a step that cannot end: only what ends the run at once ends it.
    what = {"do": "interrupt_twice", "step": 3, "stage": "update_actor", "after": 0.5}
    run = Chaos(tmp_path / "run", what, *TWO_RANKS)
    assert run.end() == 130, run.said
    assert checkpoints(tmp_path / "run").keys() == {2}
    assert_nothing_is_lost(tmp_path / "run")


def test_reward_processes_that_are_killed_are_replaced(tmp_path, reference):
    run = Chaos(tmp_path / "run", {"do": "kill_reward_processes", "step": 3, "stage": "update_actor"}, *ONE_PROCESS)
    assert run.end() == 0, run.said
    assert_equal_runs(tmp_path / "run", reference(*ONE_PROCESS))


def test_a_worker_that_is_killed_ends_the_run_by_name_and_it_goes_on_to_the_bit(tmp_path, reference):
    run = Chaos(tmp_path / "run", {"do": "kill_worker", "step": 3, "stage": "gen"}, *TWO_RANKS)
    assert run.end() == 1, run.said
    assert "WorkerDiedError: actor_rollout rank 1 of 2 (node " in run.said
    (death,) = events(tmp_path / "run", "worker_death")
    assert death["step"] == 3
    assert_nothing_is_lost(tmp_path / "run")
    resume(tmp_path / "run", *TWO_RANKS)
    assert_equal_runs(tmp_path / "run", reference(*TWO_RANKS))


def test_a_worker_that_stops_answering_ends_the_run_by_name(tmp_path):
    what = {"do": "freeze_worker", "step": 2, "stage": "update_actor"}
    run = Chaos(tmp_path / "run", what, *TWO_RANKS, "trainer.stage_timeout=40")
    assert run.end() == 1, run.said
    assert "StalledError: actor_rollout got no further in update_actor for 40 s (trainer.stage_timeout)" in run.said
    assert "rank 1 of 2" in run.said.split("No answer from:")[1]
    (hang,) = events(tmp_path / "run", "hang")
    assert hang["stage"] == "update_actor"
    # Rank 0 waits for rank 1 in a collective of torch, and its stacks say so.
    texts = [file.read_text() for file in (tmp_path / "run" / "stacks").glob("*rank_0*")]
    assert any("train_batch" in text or "optimizer_step" in text for text in texts)


def test_a_driver_that_is_killed_leaves_nothing_of_ray_behind(tmp_path):
    run = Chaos(tmp_path / "run", {"do": "kill_driver", "step": 2, "stage": "update_actor"}, *TWO_RANKS)
    assert run.end() == -signal.SIGKILL, run.said


@pytest.mark.parametrize("what", ["hang", "hang_deaf"])
def test_a_driver_that_hangs_ends_with_its_stage_and_stacks(tmp_path, what):
    run = Chaos(tmp_path / "run", {"do": what, "step": 2, "stage": "reward"}, *ONE_PROCESS, "trainer.stage_timeout=40")
    assert run.end() == 1, run.said
    assert (
        "StalledError: The driver got no further in stage reward of step 2 for 40 s (trainer.stage_timeout)" in run.said
    )
    (hang,) = events(tmp_path / "run", "hang")
    assert (hang["stage"], hang["step"]) == ("reward", 2)
    assert events(tmp_path / "run", "warning")[0]["message"].startswith("Nothing has got further for ")
    texts = [file.read_text() for file in (tmp_path / "run" / "stacks").iterdir()]
    assert any(f"in {what}" in text for text in texts)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 40 MiB: enough for two checkpoints of 10 MiB and what has to stay free beside one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("Mounting a file system needs root.")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def more_room(disk: Path) -> None:
    """The file system is large from here on."""
    subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_full_disk_costs_no_checkpoint_and_the_run_goes_on_when_there_is_room(
    small_disk, tmp_path, reference, on_error
):
    folder = small_disk / "run"
    more = (*ONE_PROCESS, "trainer.save_freq=1")
    run = Chaos(folder, {}, *more, f"trainer.on_save_error={on_error}", logs=tmp_path)
    assert run.end() == 1, run.said
    assert "DiskError: Step " in run.said
    assert checkpoints(folder).keys() == {1, 2}
    assert_nothing_is_lost(folder)
    assert events(folder, "out_of_disk")
    more_room(small_disk)
    resume(folder, *more, logs=tmp_path)
    assert_equal_runs(folder, reference(*ONE_PROCESS))


def test_a_disk_that_fills_up_while_a_checkpoint_is_written_leaves_the_one_before(small_disk, tmp_path, reference):
    folder = small_disk / "run"
    run = Chaos(folder, {"do": "fill_disk", "step": 4, "call": 2}, *ONE_PROCESS, logs=tmp_path)
    assert run.end() == 1, run.said
    assert "now: " in run.said
    assert checkpoints(folder).keys() == {2}
    (small_disk / "filler").unlink()
    more_room(small_disk)
    resume(folder, *ONE_PROCESS, logs=tmp_path)
    assert_equal_runs(folder, reference(*ONE_PROCESS))


def deadly(folder: Path, times: int) -> tuple[str, ...]:
    """Kills the driver when it scores in step 3, ``times`` times."""
    given = "reward.custom_reward_function.reward_kwargs."
    return (
        f"reward.custom_reward_function.path={HERE / 'deadly_rewards.py'}",
        "reward.num_workers=0",
        f"{given}times={times}",
        f"{given}folder={folder}",
    )


def test_a_driver_that_is_killed_is_started_again_by_itself(tmp_path, reference):
    given = "reward.custom_reward_function.reward_kwargs.kill_at=40"
    run = Chaos(tmp_path / "run", {}, *ONE_PROCESS, *deadly(tmp_path, 1), given, "trainer.max_restarts=2")
    assert run.end() == 0, run.said
    assert [event["step"] for event in events(tmp_path / "run", "restart")] == [3]
    assert "The driver's process was ended by SIGKILL" in run.said
    assert "Starting again (1 of 2)." in run.said
    assert_equal_runs(tmp_path / "run", reference(*ONE_PROCESS))


def test_what_kills_the_driver_at_the_same_place_again_ends_the_run(tmp_path):
    # Without checkpoints each attempt begins at the first step.
    given = ("reward.custom_reward_function.reward_kwargs.kill_at=20", "trainer.save_freq=-1")
    run = Chaos(tmp_path / "run", {}, *ONE_PROCESS, *deadly(tmp_path, 9), *given, "trainer.max_restarts=5")
    assert run.end() == 1, run.said
    assert len(events(tmp_path / "run", "restart")) == 1
    assert "The same happened before in the same stage of step 2" in run.said


def test_two_runs_of_two_ranks_start_at_once_on_one_machine(tmp_path):
    """No port, name or folder is shared by chance."""
    runs = [Chaos(tmp_path / name, {}, *TWO_RANKS, "trainer.total_training_steps=1") for name in ("one", "two")]
    ends = [threading.Thread(target=run.process.wait) for run in runs]
    for end in ends:
        end.start()
    for run in runs:
        assert run.end() == 0, run.said


@pytest.mark.parametrize(("do", "status"), [("interrupt", 130), ("kill_driver", -signal.SIGKILL)])
def test_the_end_of_a_run_with_a_ray_of_its_own_is_nothing_to_another_one(tmp_path, reference, do, status):
    what = {"do": do, "step": 2, "stage": "update_actor"}
    other, ended = (Chaos(tmp_path / name, made, *TWO_RANKS) for name, made in (("other", {}), ("ended", what)))
    assert ended.end() == status, ended.said
    assert other.end() == 0, other.said
    assert_equal_runs(tmp_path / "other", reference(*TWO_RANKS))
