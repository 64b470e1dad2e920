"""The end of a run."""

from types import SimpleNamespace

import pytest

from burnish.trainer import cluster as of_cluster
from burnish.trainer import run as of_run
from burnish.trainer.ending import Terminated, ended_by
from burnish.trainer.loop import TrainingLoop
from burnish.utils.errors import StalledError, TrainingError
from burnish.utils.events import EventLog
from tests.e2e.runs import tiny_config


def test_everything_is_ended_and_the_logs_are_closed_last_also_where_something_cannot_be():
    ended = []

    def end(name):
        return lambda: ended.append(name)

    def cannot():
        ended.append("reward")
        raise OSError("gone already")

    trainer = SimpleNamespace(
        is_logged=True,
        worker_groups={
            "actor": SimpleNamespace(shutdown=end("actor")),
            "critic": SimpleNamespace(shutdown=end("critic")),
        },
        resource_pool_manager=SimpleNamespace(shutdown=end("pools")),
        own_parts=lambda: [SimpleNamespace(close=end("validation's reward")), object(), SimpleNamespace(close=cannot)],
        run_log=SimpleNamespace(close=end("log")),
    )
    with pytest.raises(OSError, match="gone already"):
        TrainingLoop.shutdown(trainer)
    assert ended == ["actor", "critic", "pools", "reward", "validation's reward", "log"]
    assert trainer.worker_groups == {}


def raises(error):
    def end():
        raise error

    return end


@pytest.mark.parametrize("own", [TrainingError("not finite"), KeyboardInterrupt(), Terminated()], ids=repr)
@pytest.mark.parametrize(
    ("of_end", "said"),
    [
        (
            OSError("gone already"),
            "The logs could not be ended in order: OSError: gone already (test_shutdown.py, line ",
        ),
        (KeyboardInterrupt(), "The logs: their end was cut short by Ctrl-C."),
        (Terminated(), "The logs: their end was cut short by SIGTERM."),
    ],
    ids=repr,
)
def test_what_ended_the_run_is_told_and_not_what_came_of_its_end(own, of_end, said, caplog):
    with pytest.raises(type(own)) as caught, ended_by(raises(of_end), "The logs"):
        raise own
    assert caught.value is own
    assert [message.startswith(said) for message in caplog.messages] == [True]


@pytest.mark.parametrize("error", [OSError("gone already"), KeyboardInterrupt()], ids=repr)
def test_an_end_that_fails_after_a_block_that_ended_well_is_an_error(error, caplog):
    with pytest.raises(type(error)), ended_by(raises(error), "The logs"):
        pass
    assert not caplog.messages


def test_a_signal_at_the_end_comes_out_of_native_code_as_what_it_is():
    def waits():
        try:
            raise StalledError("The driver got no further.")
        except StalledError as error:
            raise SystemError("returned a result with an exception set") from error

    with pytest.raises(StalledError, match="got no further"), ended_by(waits, "The logs"):
        pass


@pytest.mark.parametrize("controller", ["local", "ray"])
def test_a_run_fails_with_its_own_error_where_its_end_fails_too(controller, tmp_path, monkeypatch, caplog):
    """Else a run that cannot succeed were started again: of the error at its end nobody knows that."""
    import ray

    config = tiny_config(tmp_path, f"trainer.controller={controller}", "trainer.max_restarts=1")
    monkeypatch.setattr(of_cluster, "_start_ray", lambda config, own: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", raises(OSError("no Ray any more")))
    log = EventLog(tmp_path)
    trainer = SimpleNamespace(
        checkpoints=SimpleNamespace(root=tmp_path, stop=SimpleNamespace(count_from=lambda started: None)),
        run_log=SimpleNamespace(events=log),
        global_steps=3,
        total_training_steps=9,
        current_stage="update_actor",
        worker_groups={},
        init_workers=lambda: None,
        fit=raises(TrainingError("The loss is not finite.")),
        shutdown=raises(OSError("gone already")),
    )
    with pytest.raises(TrainingError, match="not finite"):
        of_run.live(config, lambda config: trainer)
    said = [message for message in caplog.messages if "in order" in message]
    assert [("gone already" in said[0]), *("no Ray any more" in text for text in said[1:])] == (
        [True, True] if controller == "ray" else [True]
    )
