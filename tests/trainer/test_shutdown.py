"""The end of a run."""

from types import SimpleNamespace

import pytest

from burnish.trainer.loop import TrainingLoop


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
