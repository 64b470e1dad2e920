"""The benchmark of logging measures what a run does, and leaves the run as it was."""

from benchmarks import logging as benchmark
from burnish.trainer.ppo.dumps import Dumps
from burnish.trainer.ppo.run_log import RunLog


def test_waiting_and_the_threads_behind_it_are_told_apart(monkeypatch):
    small = benchmark.made_batch(8, 16, 30)
    monkeypatch.setattr(benchmark, "made_batch", lambda *args: small)
    before = RunLog.step, Dumps._guarded
    row = benchmark.measure_long(["file"], steps=2, dumps=True, step_s=10.0)
    assert row["share"] == row["waiting_ms"] / row["step_ms"]
    assert row["threads_ms"] > 0
    assert (RunLog.step, Dumps._guarded) == before
