"""A checkpoint is there whole or not at all, and the newest is never the one that is deleted."""

import errno
import json
import logging
import os
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from burnish.config import TrainerConfig
from burnish.trainer.ppo.checkpoints import (
    MANIFEST,
    STATE,
    CheckpointManager,
    best_checkpoint,
    newest_checkpoint,
    problem_of,
    read_manifest,
)
from burnish.trainer.ppo.checkpoints import folders as folders_module
from burnish.trainer.ppo.checkpoints import manager as manager_module
from burnish.trainer.ppo.checkpoints.folders import BEST, RUN_ID, TRACKER
from burnish.trainer.ppo.checkpoints.resume import find, load
from burnish.trainer.ppo.checkpoints.state import read_state, write_state
from burnish.trainer.ppo.checkpoints.values import from_json, to_json
from burnish.utils.errors import CheckpointError, DataError, DiskError
from tests.engine.engine_program import make_engine


class Told:
    """Takes events down."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def __call__(self, kind: str, message: str, *, step: int | None = None, **fields) -> None:
        self.events.append((kind, message))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


def manager_of(folder, *, keep=None, mode="auto", path=None, tell=None, save_freq=1, **keys) -> CheckpointManager:
    config = TrainerConfig(
        default_local_dir=str(folder),
        max_actor_ckpt_to_keep=keep,
        resume_mode=mode,
        resume_from_path=path,
        save_freq=save_freq,
        **keys,
    )
    manager = CheckpointManager(config, tell=tell)
    manager.folder.begin_run(manager.folder.run)
    return manager


def writes(mark="", *, critic=False, size=8, parts=()):
    """What a trainer has written into a checkpoint's folder."""

    def write(folder):
        for part in ("actor", "critic") if critic else ("actor",):
            (folder / part).mkdir()
            (folder / part / "model.safetensors").write_bytes(b"w" * size)
        write_state(folder, {"format": 2, "global_steps": int(folder.name.rpartition("_")[2]), "mark": mark})
        return list(parts)

    return write


def save(manager: CheckpointManager, step: int, mark: str = "", *, critic=False, **keys) -> None:
    manager.save(step, writes(mark, critic=critic), **keys)
    manager.settle(wait=True)


def names(folder) -> set[str]:
    return {path.name for path in folder.glob("*global_step_*")}


# ------------------------------------------------------------------------------------------------ writing


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CheckpointError("NaN")])
def test_a_save_that_is_broken_off_leaves_the_old_checkpoint(tmp_path, error):
    manager = manager_of(tmp_path, keep=1)
    save(manager, 1)

    def half(folder):
        writes()(folder)
        raise error

    with pytest.raises(type(error)):
        manager.save(2, half)
    assert find(manager) == [tmp_path / "global_step_1"]
    assert names(tmp_path) == {"global_step_1"}
    assert (tmp_path / TRACKER).read_text() == "1"
    save(manager, 3)
    assert names(tmp_path) == {"global_step_3"}


def test_a_save_that_a_killed_run_left_half_is_no_checkpoint_and_is_cleaned_up(tmp_path):
    save(manager_of(tmp_path, keep=1), 1)
    left = tmp_path / "tmp_global_step_2"
    left.mkdir()
    writes()(left)
    manager = manager_of(tmp_path, keep=1)
    assert find(manager) == [tmp_path / "global_step_1"]
    save(manager, 2)
    assert names(tmp_path) == {"global_step_2"}


def test_what_cannot_be_removed_keeps_no_checkpoint_from_being_saved(tmp_path, monkeypatch):
    def rmdir(path, **where):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    manager = manager_of(tmp_path, keep=1)
    save(manager, 1)
    with monkeypatch.context() as somebody_reads_it:
        # Over NFS, of a file that is open, another name stays in its folder.
        somebody_reads_it.setattr(os, "rmdir", rmdir)
        save(manager, 2)
        assert (tmp_path / "tmp_global_step_1_removed").is_dir()
        save(manager, 3)
        assert find(manager) == [tmp_path / "global_step_3"]
    save(manager, 4)
    assert names(tmp_path) == {"global_step_4"}


def test_a_model_that_is_not_finite_leaves_the_last_sound_checkpoint_to_resume_from(tmp_path):
    manager, engine = manager_of(tmp_path, keep=1), make_engine()

    def write(folder):
        engine.save_checkpoint(f"{folder}/actor")
        write_state(folder, {"format": 2, "global_steps": 1})
        return []

    manager.save(1, write)
    manager.settle()
    sound = {name: weight.clone() for name, weight in engine.named_weights()}
    name, weight = next(iter(engine.named_weights()))
    weight.fill_(float("nan"))
    with pytest.raises(CheckpointError, match=name):
        manager.save(2, write)
    assert names(tmp_path) == {"global_step_1"}
    engine.load_checkpoint(find(manager)[0] / "actor")
    assert all(torch.equal(weight, sound[name]) for name, weight in engine.named_weights())


def test_a_checkpoint_that_is_written_in_the_background_gets_its_name_when_all_of_it_is_there(tmp_path):
    manager = manager_of(tmp_path)
    done = {"actor": False, "critic": False}

    def part(name):
        return lambda wait: done.__setitem__(name, done[name] or wait) or done[name]

    manager.save(1, writes(parts=[part("actor"), part("critic")]))
    manager.settle()
    done["actor"] = True
    manager.settle()
    assert find(manager) == []
    done["critic"] = True
    manager.settle()
    assert find(manager) == [tmp_path / "global_step_1"]


def test_a_second_save_waits_for_the_first(tmp_path):
    manager, waited = manager_of(tmp_path), []
    manager.save(1, writes(parts=[lambda wait: waited.append(wait) or wait]))
    manager.settle()
    save(manager, 2)
    assert waited == [False, True]
    assert names(tmp_path) == {"global_step_1", "global_step_2"}


def test_a_step_that_is_saved_again_replaces_itself(tmp_path):
    manager = manager_of(tmp_path, keep=1)
    save(manager, 1, "first")
    save(manager, 1, "second")
    assert read_state(find(manager)[0])["mark"] == "second"
    assert names(tmp_path) == {"global_step_1"}


def test_the_manifest_lists_every_file_with_its_size(tmp_path):
    save(manager_of(tmp_path), 1, critic=True, world_size=2)
    folder = tmp_path / "global_step_1"
    manifest = read_manifest(folder)
    on_disk = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert set(manifest.files) == on_disk - {MANIFEST}
    assert (manifest.step, manifest.world_size) == (1, 2)
    assert manifest.files["critic/model.safetensors"] == 8


def test_what_comes_into_a_checkpoints_folder_later_is_no_part_of_it(tmp_path):
    manager = manager_of(tmp_path, keep_best=SCORE)
    save(manager, 1)
    folder = tmp_path / "global_step_1"
    files = read_manifest(folder).files
    # What a run leaves that is killed while it writes the manifest anew, and a user's own.
    for name in (f"{MANIFEST}.tmp", "notes.txt"):
        (folder / name).write_text("{")
    manager.note_metrics(1, {SCORE: 0.5})
    (folder / "notes.txt").unlink()
    assert read_manifest(folder).metrics == {SCORE: 0.5}
    assert read_manifest(folder).files == files
    assert problem_of(folder) is None


def test_who_looks_while_the_run_removes_a_checkpoint_takes_another_one(tmp_path, monkeypatch):
    manager = manager_of(tmp_path)
    for step in (1, 2):
        save(manager, step)

    def read_too_late(folder):
        if folder.name == "global_step_2":
            shutil.rmtree(folder, ignore_errors=True)
        return read_manifest(folder)

    monkeypatch.setattr(folders_module, "read_manifest", read_too_late)
    assert newest_checkpoint(tmp_path) == tmp_path / "global_step_1"


# ------------------------------------------------------------------------------------- a disk that does not take it


def full_disk(folder):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_the_checkpoint_and_not_the_run_and_the_save_is_tried_again_soon(tmp_path, caplog):
    told = Told()
    manager = manager_of(tmp_path, keep=1, tell=told, save_freq=100)
    save(manager, 100)
    manager.save(200, full_disk)
    assert told.kinds()[-1] == "out_of_disk"
    assert "Training goes on" in caplog.text
    assert find(manager) == [tmp_path / "global_step_100"]
    assert [step for step in range(201, 301) if manager.is_due(step)] == list(range(201, 301))
    manager.save(201, full_disk)
    assert [step for step in range(202, 206) if manager.is_due(step)] == [203, 204, 205]
    assert manager.metrics() == {"checkpoint/failed_saves": 2.0}
    save(manager, 203)
    assert names(tmp_path) == {"global_step_203"}
    assert not manager.is_due(204)


@pytest.mark.parametrize("keys", [{"on_save_error": "raise"}, {"must_succeed": True}])
def test_a_full_disk_ends_the_run_where_that_is_wanted_and_at_the_last_step(tmp_path, keys):
    must = keys.pop("must_succeed", False)
    manager = manager_of(tmp_path, **keys)
    save(manager, 1)
    with pytest.raises(DiskError, match="Step 2 was not saved"):
        manager.save(2, full_disk, must_succeed=must)
    assert names(tmp_path) == {"global_step_1"}


def test_a_disk_that_fails_in_the_background_is_told_and_the_folder_goes_when_nobody_writes_any_more(tmp_path):
    told = Told()
    manager = manager_of(tmp_path, tell=told)
    asked = []

    def failing(wait):
        asked.append(wait)
        if len(asked) == 1:
            raise DiskError("the disk is full")
        return True

    manager.save(1, writes(parts=[failing, lambda wait: asked.append(wait) or wait]))
    manager.settle()
    assert told.kinds() == ["out_of_disk"]
    # Both are waited for before the folder is removed.
    assert asked == [False, False, True, True]
    assert names(tmp_path) == set()


def test_too_little_room_is_found_before_anything_is_written(tmp_path, monkeypatch):
    told = Told()
    manager = manager_of(tmp_path, tell=told)
    save(manager, 1)
    monkeypatch.setattr(manager_module, "free_bytes", lambda folder: 1000)
    manager.save(2, lambda folder: pytest.fail("nothing is to be written"))
    assert told.kinds()[-1] == "out_of_disk"
    assert "There is no room" in told.events[-1][1]
    assert find(manager) == [tmp_path / "global_step_1"]


# ------------------------------------------------------------------------------------------------ keeping


def test_the_newest_are_kept_by_number_and_not_by_name(tmp_path):
    manager = manager_of(tmp_path, keep=2)
    for step in (8, 9, 10, 11):
        save(manager, step)
    assert names(tmp_path) == {"global_step_10", "global_step_11"}


def test_no_number_to_keep_is_all_of_them(tmp_path):
    manager = manager_of(tmp_path, keep=0, max_critic_ckpt_to_keep=0)
    for step in (1, 2, 3):
        save(manager, step, critic=True)
    assert [len(list(tmp_path.glob(f"global_step_*/{part}"))) for part in ("actor", "critic")] == [3, 3]


def test_critics_go_earlier_than_their_policies_and_what_is_left_is_complete(tmp_path):
    manager = manager_of(tmp_path, keep=3, max_critic_ckpt_to_keep=1)
    for step in (1, 2, 3, 4):
        save(manager, step, critic=True)
    assert names(tmp_path) == {"global_step_2", "global_step_3", "global_step_4"}
    assert [path.parent.name for path in tmp_path.glob("*/critic")] == ["global_step_4"]
    assert problem_of(tmp_path / "global_step_3") is None
    assert find(manager, needs_critic=True) == [tmp_path / "global_step_4"]
    assert len(find(manager)) == 3


def test_the_best_checkpoint_stays_and_is_named(tmp_path):
    told = Told()
    metric = "val-core/x/acc/mean@1"
    manager = manager_of(tmp_path, keep=1, keep_best=metric, tell=told)
    for step, value in [(1, 0.2), (2, 0.9), (3, 0.9), (4, float("nan")), (5, 0.1)]:
        assert manager.is_better({metric: value}) == (step in (1, 2))
        save(manager, step, metrics={metric: value, "other": 1.0})
    assert names(tmp_path) == {"global_step_2", "global_step_5"}
    assert (tmp_path / BEST).read_text() == "2"
    assert best_checkpoint(tmp_path) == tmp_path / "global_step_2"
    assert newest_checkpoint(tmp_path) == tmp_path / "global_step_5"
    # Who starts again knows it from the disk.
    again = manager_of(tmp_path, keep=1, keep_best=metric)
    again.note_resumed(tmp_path / "global_step_5", 5)
    assert not again.is_better({metric: 0.5})
    assert again.is_better({metric: 0.95})


def test_the_best_may_be_the_least(tmp_path):
    metric = "val-aux/x/length/mean@1"
    manager = manager_of(tmp_path, keep=1, keep_best=metric, keep_best_mode="min")
    for step, value in [(1, 5.0), (2, 3.0), (3, 4.0)]:
        save(manager, step, metrics={metric: value})
    assert names(tmp_path) == {"global_step_2", "global_step_3"}


# ----------------------------------------------------------------------------------------------- resuming


def test_checkpoints_of_an_older_run_in_the_folder_are_neither_resumed_from_nor_removed(tmp_path, caplog):
    save(manager_of(tmp_path), 50, "old run")
    manager = manager_of(tmp_path, keep=1)
    manager.folder.begin_run()
    assert find(manager) == []
    assert "another run that was in this folder before wrote it" in caplog.text
    save(manager, 10)
    save(manager, 20, "new run")
    assert names(tmp_path) == {"global_step_20", "global_step_50"}
    assert [read_state(folder)["mark"] for folder in find(manager)] == ["new run"]
    chosen = manager_of(tmp_path, mode="resume_path", path=str(tmp_path / "global_step_50"))
    assert find(chosen) == [tmp_path / "global_step_50"]


def test_after_going_back_to_an_earlier_checkpoint_those_of_the_course_that_was_left_come_last(tmp_path):
    manager = manager_of(tmp_path)
    for step in (10, 20, 30, 40, 25):
        save(manager, step)
    assert [folder.name for folder in find(manager)] == [f"global_step_{step}" for step in (25, 20, 10, 40, 30)]


def test_a_run_that_passes_over_what_is_there_and_starts_afresh_removes_none_of_it(tmp_path):
    save(manager_of(tmp_path), 50, "another model")
    manager = manager_of(tmp_path, keep=1)
    assert load(SimpleNamespace(manager=manager), []) is None
    save(manager, 40)
    save(manager, 60)
    assert names(tmp_path) == {"global_step_50", "global_step_60"}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: shutil.rmtree(folder) or folder.mkdir(), "it is no complete checkpoint"),
        (lambda folder: (folder / MANIFEST).unlink(), f"{MANIFEST} is missing"),
        (lambda folder: (folder / "actor/model.safetensors").unlink(), "is missing"),
        (lambda folder: (folder / "actor/model.safetensors").write_bytes(b"w"), "has 1 bytes"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "cannot be read"),
        (lambda folder: (folder / MANIFEST).write_text('{"format": 99, "burnish": "9"}'), "of a newer burnish"),
        (lambda folder: (folder / STATE).write_text("x" * (folder / STATE).stat().st_size), "cannot be read"),
    ],
)
def test_what_is_not_whole_is_passed_over_with_the_reason_and_the_one_before_is_taken(tmp_path, caplog, damage, said):
    manager = manager_of(tmp_path)
    save(manager, 1)
    save(manager, 2)
    damage(tmp_path / "global_step_2")
    own = {"trainer": "ppo", "model": {}, "data": {"num_rows": 8}, "config": {}}
    assert find(manager, own) == [tmp_path / "global_step_1"]
    assert "Passing over" in caplog.text
    assert said in caplog.text
    named = manager_of(tmp_path, mode="resume_path", path=str(tmp_path / "global_step_2"))
    with pytest.raises(CheckpointError, match="no complete checkpoint there"):
        find(named, own)


def test_a_checkpoint_of_another_model_is_passed_over(tmp_path, caplog):
    manager = manager_of(tmp_path)
    shape = {"hidden_size": 64, "vocab_size": 10}
    own = {"trainer": "ppo", "model": shape, "data": {"num_rows": 8}, "config": {}}

    def write(folder, model):
        write_state(folder, {"format": 2, "global_steps": 1, "model": model, "data": {"num_rows": 8}})
        return []

    manager.save(1, lambda folder: write(folder, own["model"]))
    manager.save(2, lambda folder: write(folder, {"hidden_size": 128, "vocab_size": 10}))
    manager.settle()
    assert find(manager, own) == [tmp_path / "global_step_1"]
    assert "it is of another model (hidden_size 128, now 64)" in caplog.text


@pytest.mark.parametrize(
    ("written_by", "own_kind", "said"),
    [
        ({"trainer": "sft"}, "ppo", "of supervised fine-tuning.*actor_rollout_ref.model.path=<checkpoint>/actor"),
        ({"trainer": "ppo"}, "sft", "of reinforcement learning.* model.path=<checkpoint>/actor"),
        # Older ones say nothing.
        ({}, "sft", "of reinforcement learning"),
    ],
)
def test_a_checkpoint_of_the_other_trainer_is_no_place_to_go_on_from(tmp_path, caplog, written_by, own_kind, said):
    manager = manager_of(tmp_path)
    state = {"format": 2, "global_steps": 1, "data": {"num_rows": 8}, **written_by}
    manager.save(1, lambda folder: write_state(folder, state) or [])
    manager.settle()
    own = {"trainer": own_kind, "model": {}, "data": {"num_rows": 8}, "config": {}}
    assert find(manager, own) == []
    assert re.search(said, caplog.text)
    with pytest.raises(CheckpointError, match=said):
        find(manager_of(tmp_path, mode="resume_path", path=str(tmp_path / "global_step_1")), own)


def test_data_with_other_rows_are_refused_and_not_passed_over(tmp_path):
    manager = manager_of(tmp_path)
    manager.save(1, lambda folder: write_state(folder, {"format": 2, "global_steps": 1, "data": {"num_rows": 9}}) or [])
    manager.settle()
    with pytest.raises(DataError, match="num_rows 9 -> 8"):
        find(manager, {"trainer": "ppo", "model": {}, "data": {"num_rows": 8}, "config": {}})


def test_a_checkpoint_from_before_there_were_manifests_is_resumed_from(tmp_path):
    old = tmp_path / "global_step_3"
    (old / "actor").mkdir(parents=True)
    (old / STATE).write_text(json.dumps({"global_steps": 3, "epoch": 0, "dataloader": {}, "kl_coef": 0.1}))
    (tmp_path / TRACKER).write_text("3")
    manager = manager_of(tmp_path)
    assert find(manager) == [old]
    assert read_manifest(old).step == 3


def test_a_folder_of_verl_is_taken_when_it_is_named_and_else_left_alone(tmp_path, caplog):
    theirs = tmp_path / "global_step_7"
    (theirs / "actor").mkdir(parents=True)
    (theirs / "actor" / "model_world_size_2_rank_0.pt").write_bytes(b"")
    assert find(manager_of(tmp_path)) == []
    assert "verl wrote it" in caplog.text
    assert find(manager_of(tmp_path, mode="resume_path", path=str(theirs))) == [theirs]


def test_what_was_asked_for_and_is_not_there_is_an_error(tmp_path):
    assert find(manager_of(tmp_path)) == []
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        find(manager_of(tmp_path, mode="must"))
    with pytest.raises(CheckpointError, match="no complete checkpoint there"):
        find(manager_of(tmp_path, mode="resume_path", path=str(tmp_path / "global_step_7")))
    save(manager_of(tmp_path), 1)
    assert find(manager_of(tmp_path, mode="disable")) == []


def test_the_run_that_is_in_a_folder_stays_the_same_one_over_starts(tmp_path):
    first = manager_of(tmp_path).folder.run
    assert manager_of(tmp_path).folder.run == first == (tmp_path / RUN_ID).read_text()


# ------------------------------------------------------------------------------------------------- values


def test_what_a_sampler_remembers_comes_back_to_the_bit():
    state = {
        "scores": torch.tensor([0.1, float("nan"), -0.0], dtype=torch.float64),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "order": np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2],
        "raw": b"\x00\xff",
        "pair": (1, [2.5, None]),
        "by_row": {3: "x", "__kind__": "y"},
        "count": np.int64(7),
    }
    back = from_json(json.loads(json.dumps(to_json(state))))
    assert back["scores"].numpy().tobytes() == state["scores"].numpy().tobytes()
    assert torch.equal(back["half"], state["half"])
    assert np.array_equal(back["order"], state["order"])
    assert back["order"].dtype == np.int32
    assert {key: back[key] for key in ("raw", "pair", "by_row", "count")} == {
        "raw": b"\x00\xff",
        "pair": (1, [2.5, None]),
        "by_row": {3: "x", "__kind__": "y"},
        "count": 7,
    }


def test_what_a_checkpoint_cannot_hold_is_named_with_its_place():
    with pytest.raises(TypeError, match=r"state\.dataloader\.rng\[1\] is Generator"):
        to_json({"dataloader": {"rng": [1, np.random.default_rng()]}})


@pytest.fixture(autouse=True)
def _heard(caplog):
    caplog.set_level(logging.INFO, logger="burnish")


# ------------------------------------------------------------------------------ the best, and courses that were left

SCORE = "val-core/x/reward/mean@1"


def scored(manager: CheckpointManager, step: int, value: float, mark: str = "") -> None:
    save(manager, step, mark, metrics={SCORE: value})


def test_the_best_checkpoint_is_none_of_a_course_that_the_run_has_left(tmp_path):
    first = manager_of(tmp_path, keep_best=SCORE)
    for step, value in ((2, 0.5), (4, 0.6), (5, 0.9)):
        scored(first, step, value)
    assert best_checkpoint(tmp_path).name == "global_step_5"
    # The run goes on from step 4, since 5 could not be loaded, and saves at other steps than before.
    second = manager_of(tmp_path, keep_best=SCORE)
    second.note_resumed(tmp_path / "global_step_4", 4)
    assert (second.best, best_checkpoint(tmp_path).name) == (0.6, "global_step_4")
    scored(second, 6, 0.7)
    assert (second.best, best_checkpoint(tmp_path).name) == (0.7, "global_step_6")
    assert read_manifest(tmp_path / "global_step_5").is_left
    # What is written anew at a step of the left course counts again.
    scored(second, 8, 0.1)
    third = manager_of(tmp_path, keep_best=SCORE)
    third.note_resumed(tmp_path / "global_step_4", 4)
    scored(third, 5, 0.65)
    assert best_checkpoint(tmp_path).name == "global_step_5"
    assert [read_manifest(tmp_path / f"global_step_{step}").is_left for step in (2, 4, 5, 6, 8)] == [False] * 3 + [
        True
    ] * 2


def test_a_run_that_goes_back_to_a_checkpoint_of_a_left_course_has_it_as_its_own_again(tmp_path):
    manager = manager_of(tmp_path, keep_best=SCORE)
    for step, value in ((1, 0.1), (2, 0.9)):
        scored(manager, step, value)
    manager.note_resumed(tmp_path / "global_step_1", 1)
    scored(manager, 3, 0.2)
    manager.note_resumed(tmp_path / "global_step_2", 2)
    scored(manager, 4, 0.3)
    assert best_checkpoint(tmp_path).name == "global_step_2"


def test_where_only_the_tracker_cannot_be_written_nobody_is_told_that_the_checkpoint_is_lost(
    tmp_path, monkeypatch, caplog
):
    told = Told()
    manager = manager_of(tmp_path, tell=told, on_save_error="warn")
    save(manager, 1)
    written = folders_module.write_durably

    def full(file, text):
        if file.name == TRACKER:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(file, text)

    monkeypatch.setattr(folders_module, "write_durably", full)
    with caplog.at_level(logging.WARNING):
        save(manager, 2)
    assert problem_of(tmp_path / "global_step_2") is None
    ((kind, message),) = told.events[1:]
    assert kind == "out_of_disk"
    assert "global_step_2 is complete" in message
    assert "it says 1: a run that goes on would begin there" in message
    assert "was not saved" not in message + caplog.text
    monkeypatch.setattr(folders_module, "write_durably", written)
    save(manager, 3)
    assert (tmp_path / TRACKER).read_text() == "3"


def test_where_only_the_name_of_the_best_cannot_be_written_the_checkpoint_is_saved(tmp_path, monkeypatch, caplog):
    manager = manager_of(tmp_path, keep_best=SCORE)
    written = folders_module.write_durably

    def full(file, text):
        if file.name == BEST:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(file, text)

    monkeypatch.setattr(folders_module, "write_durably", full)
    scored(manager, 1, 0.5)
    assert (manager.saved_step, manager.num_failed) == (1, 0)
    assert f"{BEST} could not be written" in caplog.text
