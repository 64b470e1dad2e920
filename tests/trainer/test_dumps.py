"""Responses on their way to the disk: in a thread, all of them, and never a reason to stop training."""

import errno
import os
import threading

import pytest

from burnish.config.trainer import TrainerConfig
from burnish.trainer import rollout_store
from burnish.trainer.ppo.dumps import Dumps, tokenizer_fingerprint
from burnish.trainer.ppo.generations import chosen_rows, show_generations
from burnish.trainer.ppo.run_log import RunLog
from burnish.utils.events import EventLog, read_events
from tests.trainer.test_rollout_store import Letters, batch_of


def dumps_of(tmp_path, **keys):
    config = TrainerConfig(default_local_dir=str(tmp_path / "run"), **keys)
    return Dumps(config, Letters(), EventLog(tmp_path / "run"))


def test_a_few_whole_groups_of_each_step_are_kept_where_nothing_else_is_asked_for(tmp_path):
    dumps = dumps_of(tmp_path, sample_rollouts=4)
    dumps.open(0)
    batch = batch_of([[row + 1] for row in range(16)])
    dumps.take_round(batch, {})
    dumps.step(batch, 1)
    dumps.close()
    rows = rollout_store.read_texts(tmp_path / "run" / "rollouts", 1)
    assert len(rows) == 4
    assert len({row["uid"] for row in rows}) == 2
    assert rollout_store.read_notes(tmp_path / "run" / "rollouts", 1)["complete"] is False


def test_none_are_kept_where_none_are_asked_for(tmp_path):
    dumps = dumps_of(tmp_path, sample_rollouts=0)
    dumps.open(0)
    dumps.step(batch_of([[1]]), 1)
    dumps.close()
    assert not (tmp_path / "run").exists()


def test_a_folder_of_all_responses_has_those_that_dynamic_sampling_left_out(tmp_path):
    dumps = dumps_of(tmp_path, rollout_data_dir=str(tmp_path / "all"))
    dumps.open(0)
    for step in (1, 2):
        rounds = [batch_of([[1], [2]]), batch_of([[3], [4], [5], [6]], uids=["r1-a"] * 2 + ["r1-b"] * 2)]
        for number, batch in enumerate(rounds):
            dumps.take_round(batch, {"reward/error_count": float(number)})
        dumps.step(rounds[1].select_idxs([2, 3]), step)
    dumps.close()
    rows = rollout_store.read_texts(tmp_path / "all", 2)
    assert [(row["uid"], row["trained"]) for row in rows] == [
        *[("r1-b", True)] * 2,
        *[("epoch0-0", False)] * 2,
        *[("r1-a", False)] * 2,
    ]
    notes = rollout_store.read_notes(tmp_path / "all", 2)
    assert notes["reward_metrics"] == [{"reward/error_count": 0.0}, {"reward/error_count": 1.0}]
    assert notes["tokenizer"] == tokenizer_fingerprint(Letters())


def test_what_cannot_be_written_is_told_and_the_next_step_is_written(tmp_path, monkeypatch):
    dumps = dumps_of(tmp_path, rollout_data_dir=str(tmp_path / "all"))
    dumps.open(0)
    write, calls = rollout_store.write_step, []

    def full_once(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return write(*args, **kwargs)

    monkeypatch.setattr(rollout_store, "write_step", full_once)
    dumps.step(batch_of([[1]]), 1)
    dumps.flush()
    dumps.step(batch_of([[2]]), 2)
    dumps.close()
    assert rollout_store.steps(tmp_path / "all") == [2]
    (event,) = read_events(tmp_path / "run")
    assert (event["kind"], event["step"]) == ("out_of_disk", 1)
    assert "The responses of step 1 cannot be written: OSError: [Errno 28] No space left" in event["message"]


def test_a_step_does_not_wait_for_the_disk_until_two_are_behind(tmp_path, monkeypatch):
    dumps = dumps_of(tmp_path, rollout_data_dir=str(tmp_path / "all"))
    disk, written = threading.Event(), []

    def slow(folder, step, *args, **kwargs):
        disk.wait(60)
        written.append(step)

    monkeypatch.setattr(rollout_store, "write_step", slow)
    dumps.step(batch_of([[1]]), 1)
    dumps.step(batch_of([[1]]), 2)
    assert written == []
    third = threading.Thread(target=dumps.step, args=(batch_of([[1]]), 3))
    third.start()
    assert third.is_alive()
    disk.set()
    third.join(60)
    dumps.close()
    assert written == [1, 2, 3]


def test_what_is_handed_over_is_what_is_written_whatever_becomes_of_the_batch(tmp_path, monkeypatch):
    dumps = dumps_of(tmp_path, rollout_data_dir=str(tmp_path / "all"))
    start, write = threading.Event(), rollout_store.write_step
    monkeypatch.setattr(rollout_store, "write_step", lambda *args, **kwargs: (start.wait(60), write(*args, **kwargs)))
    batch = batch_of([[1], [2]])
    dumps.step(batch, 1)
    batch.pop(batch_keys=["responses"])
    batch.non_tensor_batch["uid"] = batch.non_tensor_batch["uid"][::-1]
    batch.meta_info.clear()
    start.set()
    dumps.close()
    assert [row["response"] for row in rollout_store.read_texts(tmp_path / "all", 1)] == ["a", "b"]


def test_opening_sets_aside_what_is_run_again(tmp_path):
    dumps = dumps_of(tmp_path, rollout_data_dir=str(tmp_path / "all"), validation_data_dir=str(tmp_path / "val"))
    for step in (1, 2, 3):
        dumps.step(batch_of([[step]]), step)
        dumps.validation(batch_of([[step]]), step)
    dumps.close()
    dumps.open(2)
    for folder in (tmp_path / "all", tmp_path / "val"):
        assert rollout_store.steps(folder) == [1, 2]
        assert rollout_store.steps(folder / "set_aside.1") == [3]
    assert "trained" not in rollout_store.read_texts(tmp_path / "val", 1)[0]


@pytest.mark.parametrize("num_shown", [2, 5, 9])
def test_samples_of_a_validation_are_the_same_ones_every_time(num_shown):
    batch = batch_of([[row + 1] for row in range(5)])
    first, again = chosen_rows(batch, num_shown), chosen_rows(batch, num_shown)
    assert len(first) == min(num_shown, 5)
    assert first.tensors["responses"].equal(again.tensors["responses"])


class NoConfig:
    trainer = TrainerConfig(default_local_dir="unused")


def run_log(tmp_path, **keys):
    config = NoConfig()
    config.trainer = TrainerConfig(default_local_dir=str(tmp_path / "run"), **keys)
    return RunLog(config, Letters(), (), 5)


def test_a_disk_that_is_full_at_a_start_leaves_the_configuration_that_was_there(tmp_path, monkeypatch):
    def fsync(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("of the run before")
    monkeypatch.setattr("burnish.trainer.ppo.run_log.to_dict", lambda config: {})
    monkeypatch.setattr("burnish.trainer.ppo.run_log.to_shown_yaml", lambda config: "new")
    monkeypatch.setattr("burnish.trainer.ppo.run_log.write_origins", lambda config, folder: None)
    monkeypatch.setattr(os, "fsync", fsync)
    log = run_log(tmp_path, console="off")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        log.open(tmp_path / "run", 3)
    log.close()
    assert (tmp_path / "run" / "config.yaml").read_text() == "of the run before"


def test_two_samples_out_of_five_are_printed(tmp_path, capsys):
    run_log(tmp_path, log_val_generations=2).validation(batch_of([[row + 1] for row in range(5)]), 3)
    out = capsys.readouterr().out
    assert out.count("step 3 | score") == 2
    assert out.count("abc") == 2


def test_nothing_is_printed_where_the_console_is_off(tmp_path, capsys):
    run_log(tmp_path, log_val_generations=2, console="off").validation(batch_of([[1]]), 3)
    assert capsys.readouterr().out == ""


def test_a_sample_that_cannot_be_shown_stops_nothing_and_the_dump_is_complete(tmp_path, monkeypatch):
    def broken(rows, step):
        raise UnicodeError("what a terminal")

    monkeypatch.setattr("burnish.trainer.ppo.run_log.show_generations", broken)
    log = run_log(tmp_path, log_val_generations=2, validation_data_dir=str(tmp_path / "val"))
    log.validation(batch_of([[row + 1] for row in range(5)]), 3)
    log.close()
    assert len(rollout_store.read_texts(tmp_path / "val", 3)) == 5
    (event,) = read_events(tmp_path / "run")
    assert "cannot be shown: UnicodeError: what a terminal" in event["message"]


def test_a_lone_surrogate_can_be_printed(capsys):
    show_generations([{"score": 1.0, "prompt": "a", "response": "\ud83d"}], 1)
    assert "a?" in capsys.readouterr().out


def test_a_terminal_obeys_no_response(capsys):
    show_generations([{"score": 1.0, "prompt": "a\n", "response": "\x1b[2J\x9b1A\r数"}], 1)
    assert capsys.readouterr().out == "step 1 | score 1.000\na\n␛[2J�1A␍数\n"


def test_the_writers_tokenizer_is_its_own(tmp_path):
    dumps = dumps_of(tmp_path)
    assert dumps._tokenizer is not dumps._given_tokenizer


def test_a_tokenizer_is_known_by_its_tokens_and_their_ids():
    class Swapped(Letters):
        def get_vocab(self):
            return {**super().get_vocab(), "a": 2, "b": 1}

    assert tokenizer_fingerprint(Letters()) == tokenizer_fingerprint(Letters()) != tokenizer_fingerprint(Swapped())
    assert tokenizer_fingerprint(object()) == ""
