"""A run that was stopped and resumed is the run that was not, wherever and however it was stopped."""

import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from burnish.rollout.native import generation
from burnish.trainer.main_ppo import Parts
from burnish.trainer.ppo.checkpoints import read_manifest
from burnish.trainer.preflight.disk import first_checkpoint_bytes
from burnish.utils import storage
from burnish.utils.errors import ConfigError, DataError
from burnish.utils.events import read_events
from tests.e2e.runs import TINY, logged, tiny_config, tiny_run

PPO = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=100",
    "actor_rollout_ref.actor.shuffle=true",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.optim.total_training_steps=4",
    "actor_rollout_ref.actor.checkpoint.async_save=true",
    "critic.checkpoint.async_save=true",
]
GRPO = ["actor_rollout_ref.actor.use_kl_loss=true"]
LORA = [*GRPO, "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.actor.optim.lr=0.01"]
DYNAMIC = [
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.metric=score",
    "actor_rollout_ref.rollout.temperature=2",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "data.sampler.name=curriculum",
    "trainer.test_freq=1",
]
# Two batches of eight an epoch: step 2 is an epoch's last one, step 3 lies inside the second.
COMMON = ["trainer.save_freq=1", "trainer.resume_mode=auto", "data.train_max_samples=16", "data.shuffle=true"]
TWO_RANKS = ["trainer.controller=ray", "trainer.n_gpus_per_node=2"]


@pytest.fixture(autouse=True)
def _ctrl_c_as_in_a_terminal():
    """Tests that a shell runs in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def moody(data_source, solution_str, ground_truth, extra_info=None):
    """Draws from the generators that every Python program shares; responses differ only where the answer is odd."""
    noise = random.random() + float(np.random.rand())
    return noise * (sum(map(ord, solution_str)) % 10) if int(ground_truth) % 2 else 1.0


def files_of(folder: Path, without: str) -> list[Path]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(file for file in files if without not in file.parts)


def assert_equal_files(one: Path, other: Path, without: str = "") -> None:
    """Every file of two checkpoints has the same bytes, but for when and by whom they were written.

    Args:
        without: a folder in them that is not compared.
    """
    files = files_of(one, without)
    assert files == files_of(other, without)
    assert any(file.match("actor/optimizer/*.safetensors") for file in files)
    for file in files:
        if file.name == "manifest.json":
            ours, theirs = (json.loads((folder / file).read_text())["files"] for folder in (one, other))
            assert all(theirs[name] == size for name, size in ours.items() if without not in Path(name).parts)
        elif file.name == "trainer_state.json":
            ours, theirs = (json.loads((folder / file).read_text()) for folder in (one, other))
            changed = [key for key in ours if ours[key] != theirs[key]]
            assert not changed, changed
        else:
            assert (one / file).read_bytes() == (other / file).read_bytes(), file


def killed_after(step: int, whole: Path, folder: Path) -> Path:
    """What a run that was killed after ``step`` has left, made of one that was not."""
    shutil.copytree(whole, folder)
    for checkpoint in folder.glob("global_step_*"):
        if int(checkpoint.name.rpartition("_")[2]) > step:
            shutil.rmtree(checkpoint)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


def assert_resumes_to_the_bit(tmp_path: Path, overrides: list[str], steps=(2, 3), parts: Parts | None = None) -> None:
    whole = tmp_path / "whole"
    tiny_run(whole, "trainer.total_training_steps=4", *COMMON, *overrides, parts=parts)
    for step in steps:
        folder = killed_after(step, whole, tmp_path / f"killed_after_{step}")
        assert tiny_run(folder, "trainer.total_training_steps=4", *COMMON, *overrides, parts=parts).steps == 4
        assert logged(folder) == logged(whole)
        assert_equal_files(whole / "global_step_4", folder / "global_step_4")
        assert [event["step"] for event in read_events(folder) if event["kind"] == "resume"] == [step]


def test_ppo_with_a_critic_and_an_adaptive_kl_goes_on_at_and_inside_an_epochs_end(tmp_path):
    assert_resumes_to_the_bit(tmp_path, PPO)
    assert [metrics["training/epoch"] for metrics in logged(tmp_path / "whole")] == [0, 0, 1, 1]


@pytest.mark.slow
def test_dynamic_sampling_with_a_curriculum_and_a_reward_that_draws_goes_on(tmp_path):
    assert_resumes_to_the_bit(tmp_path, DYNAMIC, steps=(2,), parts=Parts(reward_fn=moody))
    assert max(metrics["train/num_gen_batches"] for metrics in logged(tmp_path / "whole")) > 1


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("overrides", [GRPO, LORA], ids=["grpo", "lora"])
def test_other_runs_go_on_with_processes_that_read_ahead(tmp_path, overrides, num_workers):
    assert_resumes_to_the_bit(tmp_path, [*overrides, f"data.dataloader_num_workers={num_workers}"])


@pytest.mark.slow
def test_two_ranks_go_on(tmp_path):
    assert_resumes_to_the_bit(tmp_path, [*PPO, *TWO_RANKS], steps=(3,))


# ------------------------------------------------------------------------------------------------ stopped


def stopping_parts(number: signal.Signals, *, at: str, step: int) -> Parts:
    """Objects of which one sends this process a signal: the reward function in ``step``, or the callback after it."""
    calls = {"reward": 0}

    def callback(report) -> None:
        if at == "end" and report.step == step:
            signal.raise_signal(number)

    def reward(data_source, solution_str, ground_truth, extra_info=None):
        calls["reward"] += 1
        if at == "reward" and calls["reward"] == 32 * (step - 1) + 5:
            os.kill(os.getpid(), number)
        return moody(data_source, solution_str, ground_truth, extra_info)

    return Parts(reward_fn=reward, callbacks=(callback,))


def once(do, when):
    """A function that does it the first time that ``when`` holds in generation."""
    done = []

    def maybe() -> None:
        is_generation = sys._getframe(1).f_code.co_filename == generation.__file__
        if not done and is_generation and when():
            done.append(True)
            do()

    return maybe


@pytest.mark.parametrize(
    ("number", "status", "at", "saved"),
    [
        (signal.SIGTERM, 143, "generation", 1),
        pytest.param(signal.SIGTERM, 143, "reward", 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, "end", 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_stopped_saves_and_goes_on_to_the_bit(tmp_path, monkeypatch, number, status, at, saved):
    overrides = ["trainer.total_training_steps=3", *COMMON, "trainer.save_freq=100"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    never = stopping_parts(number, at="never", step=0)
    tiny_run(whole, *overrides, parts=never)
    with monkeypatch.context() as patched:
        if at == "generation":
            in_second_step = lambda: (parts / "metrics.jsonl").stat().st_size > 0  # noqa: E731
            patched.setattr(generation.progress, "tick", once(lambda: signal.raise_signal(number), when=in_second_step))
        stopped = tiny_run(parts, *overrides, parts=stopping_parts(number, at=at, step=2))
    assert (stopped.status, stopped.steps, stopped.interrupted) == (status, saved, True)
    assert f"Step {saved} is saved." in stopped.ending
    assert [path.name for path in parts.glob("global_step_*")] == [f"global_step_{saved}"]
    assert len(logged(parts)) == saved
    finished = tiny_run(parts, *overrides, parts=stopping_parts(number, at="never", step=0))
    assert (finished.status, finished.steps) == (0, 3)
    assert logged(parts) == logged(whole)
    assert_equal_files(whole / "global_step_3", parts / "global_step_3")


@pytest.mark.slow
def test_two_ranks_that_are_asked_to_stop_save_and_go_on_to_the_bit(tmp_path):
    overrides = ["trainer.total_training_steps=2", *COMMON, "trainer.save_freq=100", *GRPO, *TWO_RANKS]
    tiny_run(tmp_path / "whole", *overrides)
    parts = stopping_parts(signal.SIGTERM, at="end", step=1)
    parts.reward_fn = None
    stopped = tiny_run(tmp_path / "parts", *overrides, parts=parts)
    assert (stopped.status, stopped.ending) == (143, "Stopped by SIGTERM after step 1. Step 1 is saved.")
    assert tiny_run(tmp_path / "parts", *overrides).steps == 2
    assert logged(tmp_path / "parts") == logged(tmp_path / "whole")
    # The generators of new processes begin where the system says, and nothing has drawn from them.
    assert_equal_files(tmp_path / "whole" / "global_step_2", tmp_path / "parts" / "global_step_2", without="extra")


def test_a_validation_that_is_left_is_made_up_for(tmp_path):
    overrides = [*COMMON, "trainer.total_training_steps=1", "trainer.test_freq=1", "trainer.save_freq=100"]
    metric = "val-core/burnish/arithmetic/acc/mean@1"
    calls = []

    def reward(data_source, solution_str, ground_truth, extra_info=None):
        calls.append(solution_str)
        if len(calls) == 33:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"score": 1.0, "acc": 1.0}

    stopped = tiny_run(tmp_path, *overrides, f"trainer.keep_best={metric}", parts=Parts(reward_fn=reward))
    assert (stopped.status, stopped.steps) == (143, 1)
    assert metric not in logged(tmp_path)[-1]
    tiny_run(tmp_path, *overrides, f"trainer.keep_best={metric}", parts=Parts(reward_fn=reward))
    assert logged(tmp_path)[-1][metric] == 1.0
    assert (tmp_path / "best_checkpoint.txt").read_text() == "1"


@pytest.mark.slow
def test_another_machine_goes_on_from_the_copy_at_the_url_and_the_best_is_kept(tmp_path):
    url = f"memory://{tmp_path.name}/run"
    overrides = [
        *COMMON,
        f"trainer.default_hdfs_dir={url}",
        "trainer.save_freq=100",
        "trainer.test_freq=1",
        "trainer.keep_best=val-core/burnish/arithmetic/acc/mean@1",
        "trainer.max_actor_ckpt_to_keep=1",
        "trainer.del_local_ckpt_after_load=true",
    ]
    scores = iter([1.0] * (32 + 16) + [0.5] * 1000)

    def best_first(data_source, solution_str, ground_truth, extra_info=None):
        score = next(scores)
        return {"score": score, "acc": score}

    parts = Parts(reward_fn=best_first)
    tiny_run(tmp_path / "here", *overrides, "trainer.total_training_steps=2", parts=parts)
    # The first step for its validation, the second since it is the last.
    assert {path.name for path in (tmp_path / "here").glob("global_step_*")} == {"global_step_1", "global_step_2"}
    assert (tmp_path / "here" / "best_checkpoint.txt").read_text() == "1"
    assert tiny_run(tmp_path / "there", *overrides, "trainer.total_training_steps=3", parts=parts).steps == 3
    assert [metrics["training/global_step"] for metrics in logged(tmp_path / "there")] == [3]
    assert [path.name for path in (tmp_path / "there").glob("global_step_*")] == ["global_step_3"]
    assert storage.list_folders(url) == ["global_step_1", "global_step_2", "global_step_3"]
    assert {"resume", "checkpoint_removed"} <= {event["kind"] for event in read_events(tmp_path / "there")}


def test_sigusr1_saves_and_the_run_goes_on(tmp_path):
    parts = stopping_parts(signal.SIGUSR1, at="reward", step=1)
    summary = tiny_run(tmp_path, *COMMON, "trainer.save_freq=-1", "trainer.total_training_steps=2", parts=parts)
    assert (summary.status, summary.steps) == (0, 2)
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_1"]
    # What is looked for on the disk before the first one is about its size.
    size = read_manifest(tmp_path / "global_step_1").num_bytes
    assert first_checkpoint_bytes(tiny_config(tmp_path, "trainer.device=cpu")) == pytest.approx(size, rel=0.05)


def test_a_run_whose_time_is_over_saves_and_says_that_it_is_to_be_gone_on_with(tmp_path):
    # Less than a step and a save may take: the first step is the last.
    summary = tiny_run(tmp_path, *COMMON, "trainer.save_freq=100", "trainer.max_wall_time=30")
    assert (summary.status, summary.steps) == (75, 1)
    assert "since its time was over (trainer.max_wall_time=30) after step 1. Step 1 is saved." in summary.ending


# ------------------------------------------------------------------------------------- what is not as it was


def test_a_run_that_is_at_or_past_its_last_step_says_so_and_ends(tmp_path, caplog):
    assert tiny_run(tmp_path, "trainer.total_training_steps=2", *COMMON).trained
    for last in (2, 1):
        caplog.clear()
        summary = tiny_run(tmp_path, f"trainer.total_training_steps={last}", *COMMON)
        # Keys that were not read are no mistake then.
        assert (summary.status, summary.trained) == (0, False)
        assert "Nothing to train: the checkpoint is of step 2" in caplog.text
        assert len(logged(tmp_path)) == 2


def test_a_checkpoint_that_cannot_be_loaded_is_told_and_the_one_before_is_taken(tmp_path):
    tiny_run(tmp_path, "trainer.total_training_steps=2", *COMMON)
    before = logged(tmp_path)
    weights = tmp_path / "global_step_2" / "actor" / "model.safetensors"
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    assert tiny_run(tmp_path, "trainer.total_training_steps=2", *COMMON).steps == 2
    assert logged(tmp_path) == before
    told = [event["message"] for event in read_events(tmp_path) if event["kind"] in ("warning", "resume")]
    assert "global_step_2 cannot be resumed from" in told[0]
    assert "global_step_1, after step 1" in told[1]
    # Where every one is broken the run does not start afresh in silence.
    for folder in tmp_path.glob("global_step_*"):
        broken = folder / "actor" / "model.safetensors"
        broken.write_bytes(b"\xff" * broken.stat().st_size)
    with pytest.raises(Exception, match="None of the 2 checkpoints"):
        tiny_run(tmp_path, "trainer.total_training_steps=2", *COMMON)


def test_a_change_of_the_configuration_is_told_and_one_of_the_data_refused(tmp_path, caplog):
    tiny_run(tmp_path, "trainer.total_training_steps=1", *COMMON)
    smaller = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    assert tiny_run(tmp_path, "trainer.total_training_steps=2", *COMMON, *smaller).steps == 2
    assert "data.train_batch_size: 8 -> 4" in caplog.text
    # Eight rows were seen, and the smaller batch goes on with the ninth.
    state = json.loads((tmp_path / "global_step_2" / "trainer_state.json").read_text())
    assert state["dataloader"]["_sampler_iter_state"]["samples_yielded"] == 12
    with pytest.raises((DataError, ConfigError), match="num_rows 16 -> 8"):
        tiny_run(tmp_path, "trainer.total_training_steps=3", *COMMON, "data.train_max_samples=8")


def test_a_run_goes_on_from_the_weights_and_the_step_of_verls_checkpoint(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(TINY / "model")
    with torch.no_grad():
        next(model.parameters()).add_(0.01)
    theirs = tmp_path / "verl" / "global_step_7" / "actor"
    (theirs / "huggingface").mkdir(parents=True)
    torch.save(model.state_dict(), theirs / "model_world_size_1_rank_0.pt")
    model.config.save_pretrained(theirs / "huggingface")
    named = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={theirs.parent}"]
    tiny_run(tmp_path / "own", *COMMON, *named, "trainer.total_training_steps=8", "actor_rollout_ref.actor.optim.lr=0")
    assert [metrics["training/global_step"] for metrics in logged(tmp_path / "own")] == [8]
    saved = load_file(tmp_path / "own" / "global_step_8" / "actor" / "model.safetensors")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in saved.items())


@pytest.mark.slow
def test_one_rank_goes_on_where_two_stopped(tmp_path):
    tiny_run(tmp_path / "whole", "trainer.total_training_steps=2", *COMMON, *PPO)
    tiny_run(tmp_path / "parts", "trainer.total_training_steps=1", *COMMON, *PPO, *TWO_RANKS)
    tiny_run(tmp_path / "parts", "trainer.total_training_steps=2", *COMMON, *PPO)
    for key in ("critic/score/mean", "actor/grad_norm", "critic/vf_loss", "actor/reward_kl_penalty_coeff"):
        assert logged(tmp_path / "parts")[1][key] == pytest.approx(logged(tmp_path / "whole")[1][key], rel=2e-3), key


def test_the_saved_configuration_says_what_was_asked_for_and_not_what_followed_from_it(tmp_path):
    tiny_run(tmp_path, "trainer.total_training_steps=1")
    assert "total_training_steps: -1" in (tmp_path / "config.yaml").read_text()
