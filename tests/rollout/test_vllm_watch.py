"""An engine in another process as this one sees it: what arrives from it, what it prints, and whether it lives."""

import asyncio
import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from burnish.rollout.base import RolloutRequest, SamplingParams
from burnish.rollout.lifecycle import Lifecycle
from burnish.rollout.vllm.arrivals import Arrival, Running, StepCounter
from burnish.rollout.vllm.engine_log import EngineLog
from burnish.rollout.vllm.engine_watch import EngineWatch, Heartbeat
from burnish.rollout.vllm.launch import launch_environment, wait_for_end
from burnish.rollout.vllm.process import ProcessCore
from burnish.rollout.vllm.requests import Progress, prepare
from burnish.rollout.vllm.standalone import EngineProcess, StandaloneRollout
from burnish.utils.errors import RolloutError


def running(*, cumulative: bool = True, **sampling: Any) -> Running:
    params = SamplingParams(max_new_tokens=9, **sampling)
    return Running(Progress(prepare(RolloutRequest("r", [5, 6], "p"), params)), cumulative=cumulative)


def output(num_tokens: int, reason: str | None = "length", columns: int = 1) -> Any:
    flat = [-(token + column / 10) for token in range(num_tokens) for column in range(columns)]
    return SimpleNamespace(
        token_ids=list(range(num_tokens)),
        logprobs=SimpleNamespace(logprobs=flat),
        finish_reason=reason,
        stop_reason=None,
    )


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_the_end_of_a_process_is_noticed(has_pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    waiting = threading.Thread(target=wait_for_end, args=(process.pid,))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    process.kill()
    if not has_pidfd:
        process.wait()  # A number alone does not tell an ended process whose status nobody has read.
    waiting.join(10)
    assert not waiting.is_alive()
    process.wait()
    wait_for_end(process.pid)


@pytest.mark.slow
def test_an_engine_ends_with_the_process_that_started_it_also_while_it_starts() -> None:
    engine = (
        "import time; from burnish.rollout.vllm.launch import follow_starter\n"
        "follow_starter(); print(flush=True); time.sleep(90)"
    )
    starter = (
        "import subprocess, sys; from burnish.rollout.vllm.launch import launch_environment\n"
        f"with launch_environment({{}}): subprocess.run([sys.executable, '-c', {engine!r}])"
    )
    process = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    process.kill()
    start = time.monotonic()
    assert process.stdout.read() == b""  # Its end: the engine has it open too.
    assert time.monotonic() - start < 20
    process.wait()


def test_tokens_that_come_at_the_end_are_of_the_versions_that_were_marked_meanwhile() -> None:
    request = running()
    request.marks = [(1, 3), (2, 3), (4, 7)]  # Nothing was sampled while version 2 was there.
    finished = request.take(Arrival("r", 5, output=output(9)))
    assert finished is not None
    assert finished.versions == ((1, 3), (4, 4), (5, 2))
    assert finished.token_ids == list(range(9))


def test_tokens_that_come_as_they_are_sampled_are_of_the_version_that_there_was_then() -> None:
    request = running(cumulative=False)
    request.marks = [(1, 4)]
    assert request.take(Arrival("r", 1, output=output(4, reason=None))) is None
    finished = request.take(Arrival("r", 2, output=output(5)))
    assert finished is not None
    assert finished.versions == ((1, 4), (2, 5))


def test_the_two_columns_of_log_probs_are_told_apart_and_an_abort_may_have_none() -> None:
    finished = running(top_k=3).take(Arrival("r", 0, output=output(3, columns=2)))
    assert finished is not None
    assert finished.log_probs == [0.0, -1.0, -2.0]
    assert finished.truncated_log_probs == [-0.1, -1.1, -2.1]
    aborted = running(top_k=3).take(Arrival("r", 0, output=output(0, "abort", columns=2)))
    assert aborted is not None
    assert (aborted.finish_reason, aborted.token_ids, aborted.truncated_log_probs) == ("abort", [], [])


def test_a_request_that_vllm_gave_up_is_an_error() -> None:
    with pytest.raises(RolloutError, match="'r' with the reason 'error'"):
        running().take(Arrival("r", 0, output=output(3, "error")))


def test_parts_of_one_step_are_counted_as_one() -> None:
    states: dict[str, Any] = {}
    for name, tokens in (("a", 0), ("b", 2), ("c", 2)):
        states[name] = SimpleNamespace(detokenizer=SimpleNamespace(num_output_tokens=lambda tokens=tokens: tokens))
    processor = SimpleNamespace(request_states=states, process_outputs=lambda outputs, timestamp, *rest: len(outputs))
    counter = StepCounter(processor)
    of = {name: SimpleNamespace(request_id=name) for name in "abc"}
    now = time.monotonic()
    assert counter([of["a"], of["b"]], now + 1, None) == 2
    counter([of["c"]], now + 1, None)
    counter([of["b"]], now + 3, None)
    assert (counter.num_steps, counter.max_running) == (2, 3)
    assert counter.prefill_seconds == pytest.approx(1, abs=0.2)
    assert counter.decode_seconds == pytest.approx(2)


def test_what_processes_print_is_kept_and_goes_where_it_always_went(capfd: pytest.CaptureFixture[str]) -> None:
    log = EngineLog()
    with log:
        process = subprocess.Popen([sys.executable, "-c", "import sys; print('one'); print('two', file=sys.stderr)"])
    process.wait()
    assert sorted(log.lines()) == ["one", "two"]
    seen = capfd.readouterr()
    assert "one" in seen.out + seen.err
    assert "two" in seen.out + seen.err
    print("of this process", flush=True)  # noqa: T201  It is what is tested.
    assert "of this process" in capfd.readouterr().out


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_printed_while_it_starts_is_shown_only_where_it_does_not(
    capfd: pytest.CaptureFixture[str], fails: bool
) -> None:
    log, says = EngineLog(hides_start=True), "import sys; print('starts', flush=True); input(); print('runs')"
    with contextlib.suppress(KeyError), log:
        process = subprocess.Popen([sys.executable, "-c", says], stdin=subprocess.PIPE)
        while log.lines(0.05) != ["starts"]:
            pass
        if fails:
            raise KeyError
    process.communicate(b"\n")
    assert log.lines() == ["starts", "runs"]
    seen = capfd.readouterr().err
    assert "runs" in seen
    assert ("starts" in seen) is fails


def sleeper() -> Any:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    return process


def test_waiting_for_an_engine_ends_when_it_dies() -> None:
    process, watch = sleeper(), EngineWatch(EngineLog(), 30.0)
    watch.begin([process], lambda: False)
    watch.check()
    process.kill()
    start = time.monotonic()
    with pytest.raises(RolloutError, match=f"process {process.pid} .* signal SIGKILL.*its log holds no error"):
        watch.wait(Future())
    assert time.monotonic() - start < 10
    with pytest.raises(RolloutError, match="SIGKILL"):
        watch.check()


def test_an_engine_that_gives_no_answer_is_ended() -> None:
    process, watch = sleeper(), EngineWatch(None, 0.2)
    watch.begin([process], lambda: False)
    with pytest.raises(RolloutError, match="no answer for 0.2 s"):
        watch.wait(Future())
    process.join(10)
    assert process.exitcode is not None


def test_a_heart_that_beats_is_asked_again_and_one_that_does_not_is_ended() -> None:
    process, watch, asked = sleeper(), EngineWatch(None, 0.4), list[Future[Any]]()
    watch.begin([process], lambda: False)

    def ask() -> "Future[Any]":
        asked.append(Future())
        return asked[-1]

    heart = Heartbeat(watch, ask, 0.4)
    heart.check()
    assert not asked
    time.sleep(0.15)
    heart.check()
    asked[0].set_result(True)
    heart.check()
    time.sleep(0.15)
    heart.check()
    assert len(asked) == 2
    time.sleep(0.35)
    with pytest.raises(RolloutError, match=r"no answer for 0\.4 s"):
        heart.check()


def test_an_engine_has_its_time_to_answer_also_where_nobody_looked_for_long() -> None:
    process, watch = sleeper(), EngineWatch(None, 0.4)
    watch.begin([process], lambda: False)
    answer: Future[Any] = Future()
    heart = Heartbeat(watch, lambda: answer, 0.4)
    time.sleep(0.5)  # As while generating is paused.
    heart.check()
    heart.check()
    assert watch.dead is None
    answer.set_result(True)
    heart.check()
    process.kill()


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "Call to collective_rpc method failed: The weight stream holds 'x' twice.",
            "The weight stream holds 'x' twice.",
        ),
        (
            "Call to collective_rpc method failed: Worker failed with error 'No room.', please check the stack trace above "
            "for the root cause",
            "No room.",
        ),
        ("Something else.", "Something else."),
    ],
)
def test_what_went_wrong_in_a_worker_is_said_in_its_own_words(said: str, shown: str) -> None:
    watch = EngineWatch(None, 1.0)
    assert str(watch.named(Exception(said))) == shown


def test_processes_start_without_what_belongs_to_this_rank_and_with_what_is_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with launch_environment({"CUDA_VISIBLE_DEVICES": "1,2"}):
        assert "RANK" not in os.environ
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert (os.environ["RANK"], os.environ["CUDA_VISIBLE_DEVICES"]) == ("3", "0")
    os.environ.pop("VLLM_WORKER_MULTIPROC_METHOD", None)


def test_every_data_parallel_engine_is_asked_and_heard() -> None:
    async def ask(method: str, *args: Any, engine: str) -> list[str]:
        return [f"{engine}: {method}{args}"]

    core = object.__new__(ProcessCore)
    core._engine = SimpleNamespace(
        engine_core=SimpleNamespace(core_engines=["first", "second"], _call_utility_async=ask)
    )
    asked = "collective_rpc('fingerprints', None, (1,), None)"
    assert asyncio.run(core._call_workers("fingerprints", (1,))) == [f"first: {asked}", f"second: {asked}"]


def test_an_engine_that_wakes_up_while_it_is_paused_hears_of_the_pause_before_it_has_woken_up() -> None:
    said: list[str] = []

    async def wake_up(tags: list[str]) -> None:
        said.append("wakes up")
        await asyncio.sleep(0.05)
        said.append(f"is awake: {tags}")

    async def pause() -> None:
        said.append("pause")

    core = object.__new__(ProcessCore)
    core._engine, core._asleep, core._paused = SimpleNamespace(wake_up=wake_up), {"weights", "kv_cache"}, True
    core._pause, core._watch = pause, EngineWatch(None, 5.0)  # type: ignore[method-assign]
    core._loop = asyncio.new_event_loop()
    thread = threading.Thread(target=core._loop.run_forever, daemon=True)
    thread.start()
    try:
        core.wake_up(["weights"])
    finally:
        core._loop.call_soon_threadsafe(core._loop.stop)
        thread.join(5)
    assert said == ["wakes up", "pause", "is awake: ['weights']"]
    assert core._asleep == {"kv_cache"}


class Standing(StandaloneRollout):
    """An engine that makes steps until it is told to hang."""

    def __init__(self, num_steps: int) -> None:
        self._lifecycle = Lifecycle(shares_storage=False)
        self._steps_left = num_steps

    def generate(self, requests: Any, sampling: Any, on_finished: Any = None) -> list[Any]:
        self._is_generating = True
        for _ in range(self._steps_left):
            self._between_steps()
            time.sleep(0.05)
        time.sleep(60 if requests else 0)
        return []


@pytest.mark.slow
def test_a_standalone_engine_that_hangs_in_a_step_is_ended_and_one_that_makes_steps_is_not() -> None:
    engine = EngineProcess(Standing, 40, timeout=20.0)
    engine._timeout = engine._watch._timeout = 1.0
    assert engine.generate([], SamplingParams(max_new_tokens=1)) == []
    with pytest.raises(RolloutError, match="no answer for 1 s"):
        engine.generate([RolloutRequest("r", [1], "p")], SamplingParams(max_new_tokens=1))
    # Another thread may be waiting for the process as well, and only one of them is told at once.
    deadline = time.monotonic() + 20
    while engine.process.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engine.process.exitcode is not None


def test_a_callback_that_fails_does_not_hold_up_the_other_calls_of_a_standalone_engine() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = object.__new__(EngineProcess)
    process._pipe, process._pending, process._lock, process._next = ours, {}, threading.Lock(), 0
    process.process, process._watch = SimpleNamespace(join=lambda _: None), EngineWatch(None, 1.0)  # type: ignore[assignment]

    def fail(response: Any) -> None:
        raise KeyError(response)

    failing, given_up, last = (process.call("generate", on_finished=callback) for callback in (fail, None, None))
    given_up.cancel()
    threading.Thread(target=process._listen, daemon=True).start()
    for message in ((0, "finished", "a"), (0, "finished", "b"), (0, "result", []), (1, "result", []), (2, "result", 7)):
        theirs.send(message)
    assert last.result(5) == 7
    assert isinstance(failing.exception(5), KeyError)
    theirs.close()
