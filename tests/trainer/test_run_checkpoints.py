"""When a step is saved, what the trainer's state says of a run that differs, and what keep_best has to name."""

from types import SimpleNamespace

import pytest

from burnish.config import load_config
from burnish.trainer.ppo.checkpoints import RunCheckpoints
from burnish.trainer.ppo.checkpoints.state import differences, other_model
from burnish.trainer.stopping import Stop
from burnish.utils.errors import ConfigError, DiskError

BEST = "val-core/x/acc/mean@1"


def checkpoints_of(tmp_path, *overrides: str, step: int = 7, last: int = 100, **metrics: float) -> RunCheckpoints:
    config = load_config(
        ["data.train_files=x.jsonl", f"trainer.default_local_dir={tmp_path}", "trainer.save_freq=10", *overrides]
    )
    trainer = SimpleNamespace(
        config=config,
        global_steps=step,
        total_training_steps=last,
        is_last_step=step >= last,
        metrics=metrics,
        timing_raw={},
        run_log=SimpleNamespace(events=SimpleNamespace(write=lambda *args, **fields: None)),
    )
    return RunCheckpoints(trainer)


@pytest.mark.parametrize(("step", "due"), [(7, False), (10, True), (20, True), (25, True)])
def test_every_so_many_steps_are_saved_and_the_last_one(tmp_path, step, due):
    assert checkpoints_of(tmp_path, step=step, last=25).is_due() == due


def test_a_run_that_saves_nothing_has_no_step_that_is_due_but_the_one_that_is_asked_for(tmp_path):
    run = checkpoints_of(tmp_path, "trainer.save_freq=-1", step=25, last=25)
    assert not run.is_due()
    run.stop.wants_checkpoint = True
    assert run.is_due()


def test_a_run_that_stops_saves_whatever_the_step(tmp_path):
    run = checkpoints_of(tmp_path)
    run.stop.ask(Stop("SIGTERM", 143))
    assert run.is_due()


def test_the_best_step_so_far_is_saved(tmp_path):
    overrides = [f"trainer.keep_best={BEST}", "trainer.test_freq=1"]
    run = checkpoints_of(tmp_path, *overrides, **{BEST: 0.5})
    assert run.is_due()
    run.manager.best = 0.5
    assert not run.is_due()
    run.trainer.metrics = {}
    assert not run.is_due()


def test_keep_best_names_a_metric_of_the_validation_before_the_first_step(tmp_path, caplog):
    overrides = [f"trainer.keep_best={BEST}", "trainer.test_freq=1"]
    run = checkpoints_of(tmp_path, *overrides, step=0, **{"val-core/y/acc/mean@1": 0.5})
    with pytest.raises(ConfigError, match=r"has no such metric\. It has val-core/y/acc/mean@1\."):
        run.end_first_validation()
    # A run that has been trained is not ended for a name.
    later = checkpoints_of(tmp_path, *overrides, **{"val-core/y/acc/mean@1": 0.5})
    with later.leaves_validation():
        pass
    assert "has no such metric" in caplog.text


def test_a_run_that_cannot_save_when_it_stops_says_so(tmp_path, monkeypatch):
    run = checkpoints_of(tmp_path)
    run.trainer.is_logged, run.trainer.current_stage = False, "gen"
    run.stop.ask(Stop("SIGTERM", 143))

    def full():
        raise DiskError("the disk is full.")

    monkeypatch.setattr(run, "_save_boundary", full)
    run._end_early()
    assert run.how_it_ended() == (
        143,
        "Stopped by SIGTERM in step 7 (stage: gen). It could not be saved: the disk is full.",
    )


def test_a_run_that_ends_by_itself_is_finished(tmp_path):
    assert checkpoints_of(tmp_path).how_it_ended() == (0, "Finished after step 7.")


def test_what_differs_is_named():
    own = {
        "model": {"hidden_size": 64},
        "data": {"num_rows": 8, "rows": "a"},
        "config": {"actor_rollout_ref.actor.optim.lr": 1e-6, "data.train_batch_size": 8},
    }
    saved = {
        "model": {"hidden_size": 64},
        "data": {"num_rows": 8, "rows": "b"},
        "config": {"actor_rollout_ref.actor.optim.lr": 1e-5, "data.train_batch_size": 8},
    }
    assert differences(saved, own) == [
        "actor_rollout_ref.actor.optim.lr: 1e-05 -> 1e-06",
        "the training rows: other prompts at the same places",
    ]
    assert other_model(saved, own) is None
    # A state from before there were these says nothing.
    assert differences({}, own) == []
    assert other_model({}, own) is None
