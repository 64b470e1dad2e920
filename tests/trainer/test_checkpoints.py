"""A checkpoint is there whole or not at all, and the newest is never the one that is deleted."""

import pytest
import torch

from burnish.config import TrainerConfig
from burnish.trainer.ppo.checkpoint import STATE, TRACKER, CheckpointManager
from burnish.utils.errors import CheckpointError
from tests.engine.engine_program import make_engine


def manager_of(folder, keep=None, mode="auto", path=None) -> CheckpointManager:
    return CheckpointManager(
        TrainerConfig(
            default_local_dir=str(folder), max_actor_ckpt_to_keep=keep, resume_mode=mode, resume_from_path=path
        )
    )


def save(manager: CheckpointManager, step: int, mark: str = "") -> None:
    with manager.writing(step) as folder:
        manager.write_state(folder, {"global_steps": step, "mark": mark})


def names(folder) -> set[str]:
    return {path.name for path in folder.glob("*global_step_*")}


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_a_save_that_fails_half_way_leaves_the_old_checkpoint(tmp_path, error):
    manager = manager_of(tmp_path, keep=1)
    save(manager, 1)
    with pytest.raises(type(error)), manager.writing(2) as folder:  # noqa: PT012
        manager.write_state(folder, {"global_steps": 2})
        raise error
    assert manager.find() == str(tmp_path / "global_step_1")
    assert names(tmp_path) == {"global_step_1"}
    assert (tmp_path / TRACKER).read_text() == "1"
    save(manager, 3)
    assert names(tmp_path) == {"global_step_3"}


def test_a_model_that_is_not_finite_leaves_the_last_sound_checkpoint_to_resume_from(tmp_path):
    manager, engine = manager_of(tmp_path, keep=1), make_engine()
    with manager.writing(1) as folder:
        engine.save_checkpoint(f"{folder}/actor")
        manager.write_state(folder, {"global_steps": 1})
    sound = {name: weight.clone() for name, weight in engine.named_weights()}
    name, weight = next(iter(engine.named_weights()))
    weight.fill_(float("nan"))
    with pytest.raises(CheckpointError, match=name), manager.writing(2) as folder:
        engine.save_checkpoint(f"{folder}/actor")
    assert names(tmp_path) == {"global_step_1"}
    engine.load_checkpoint(f"{manager.find()}/actor")
    assert all(torch.equal(weight, sound[name]) for name, weight in engine.named_weights())


def test_a_step_that_is_saved_again_replaces_itself(tmp_path):
    manager = manager_of(tmp_path, keep=1)
    save(manager, 1, "first")
    save(manager, 1, "second")
    assert manager.read_state(manager.find())["mark"] == "second"
    assert names(tmp_path) == {"global_step_1"}


def test_the_newest_are_kept_by_number_and_not_by_name(tmp_path):
    manager = manager_of(tmp_path, keep=2)
    for step in (8, 9, 10, 11):
        save(manager, step)
    assert names(tmp_path) == {"global_step_10", "global_step_11"}


def test_checkpoints_of_an_older_run_in_the_folder_hide_no_new_one(tmp_path):
    save(manager_of(tmp_path), 50, "old run")
    manager = manager_of(tmp_path, keep=1)
    save(manager, 10)
    save(manager, 20, "new run")
    assert names(tmp_path) == {"global_step_20", "global_step_50"}
    assert manager.read_state(manager.find())["mark"] == "new run"


def test_a_folder_without_state_is_passed_over(tmp_path):
    manager = manager_of(tmp_path)
    save(manager, 1)
    (tmp_path / "global_step_2").mkdir()
    assert manager.find() == str(tmp_path / "global_step_1")


def test_what_was_asked_for_and_is_not_there_is_an_error(tmp_path):
    assert manager_of(tmp_path).find() is None
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        manager_of(tmp_path, mode="must").find()
    with pytest.raises(CheckpointError, match="no complete checkpoint there"):
        manager_of(tmp_path, mode="resume_path", path=str(tmp_path / "global_step_7")).find()


def test_a_state_that_cannot_be_read_is_named(tmp_path):
    manager = manager_of(tmp_path)
    save(manager, 1)
    (tmp_path / "global_step_1" / STATE).write_text("{")
    with pytest.raises(CheckpointError, match=STATE):
        manager.read_state(manager.find())
