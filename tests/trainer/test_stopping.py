"""A run that is asked to stop loses nothing, and one that is asked twice stops at once."""

import os
import signal

import pytest

from burnish.config import TrainerConfig
from burnish.trainer.ending import Terminated
from burnish.trainer.stopping import DEADLINE_VARIABLES, OUT_OF_TIME, Stop, StopControl, StopRun


class Clock:
    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _signals_as_in_a_terminal():
    """Tests that a shell runs in the background ignore Ctrl-C, and under nohup SIGHUP."""
    ours = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: lambda *_: None}
    before = {number: signal.signal(number, handler) for number, handler in ours.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _no_deadline_of_this_machine(monkeypatch):
    for name in DEADLINE_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def control(clock=None, *, in_process=False, **keys) -> StopControl:
    return StopControl(TrainerConfig(**{"save_freq": 5, **keys}), in_process=in_process, clock=clock or Clock())


def send(number: signal.Signals) -> None:
    # To this thread, which handles it before the next line.
    signal.raise_signal(number)


# ------------------------------------------------------------------------------------------------ signals


@pytest.mark.parametrize(
    ("number", "by", "status", "second"),
    [(signal.SIGINT, "Ctrl-C", 130, KeyboardInterrupt), (signal.SIGTERM, "SIGTERM", 143, Terminated)],
)
def test_the_first_signal_asks_and_the_second_ends_at_once(number, by, status, second):
    clock = Clock()
    stop = control(clock)
    before = signal.getsignal(number)
    with stop.signals():
        stop.begin_step()
        stop.enter("old_log_prob")
        send(number)
        assert stop.asked == Stop(by, status)
        clock.now += 1.0
        with pytest.raises(second):
            send(number)
    assert signal.getsignal(number) is before


def test_a_signal_that_comes_twice_at_once_is_one_request():
    """As `timeout` sends it, to the process and to its group; held keys are no echo for ever."""
    clock = Clock()
    stop = control(clock)
    with stop.signals():
        for _ in range(2):
            send(signal.SIGTERM)
        for _ in range(3):
            clock.now += 0.3
            send(signal.SIGTERM)
        clock.now += 0.3
        with pytest.raises(Terminated):
            send(signal.SIGTERM)


def test_a_terminal_that_is_closed_asks_and_whatever_else_its_end_sends_is_the_same_request(capfd):
    clock = Clock()
    stop = control(clock, in_process=True)
    with stop.signals():
        stop.begin_step()
        stop.enter("update_actor")
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            send(number)
        assert stop.asked == Stop("SIGHUP", 129)
        clock.now += 1.0
        send(signal.SIGHUP)
        with pytest.raises(Terminated) as second:
            send(signal.SIGTERM)
    assert second.value.number == signal.SIGTERM
    first, repeated = capfd.readouterr().err.splitlines()
    # One of them may be of the terminal's end.
    assert first == (
        "SIGHUP: saving and ending as soon as nothing is lost (stage: update_actor). Ctrl-C twice to end at once."
    )
    assert repeated == "SIGTERM: saving and ending already (SIGHUP). Once more to end at once."


def test_a_run_that_saves_since_its_time_is_over_is_not_ended_by_the_first_signal_that_says_the_same():
    clock = Clock()
    stop = control(clock, in_process=True)
    with stop.signals():
        stop.begin_step()
        stop.enter("gen")
        stop.ask(Stop("SLURM_JOB_END_TIME", OUT_OF_TIME))
        send(signal.SIGTERM)
        assert stop.asked.status == OUT_OF_TIME
        clock.now += 1.0
        with pytest.raises(Terminated):
            send(signal.SIGTERM)


def test_a_signal_that_whoever_started_the_run_ignores_stays_ignored():
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGINT)}
    try:
        stop = control()
        with stop.signals():
            for number in before:
                send(number)
        assert stop.asked is None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_before_the_first_update_the_step_is_given_up_at_its_next_stage():
    stop = control()
    stop.begin_step()
    stop.enter("gen")
    stop.ask(Stop("SIGTERM", 143))
    with pytest.raises(StopRun):
        stop.enter("reward")


def test_from_the_first_update_on_the_step_is_finished_and_its_validation_left_out():
    stop = control()
    stop.begin_step()
    stop.enter("update_critic")
    stop.ask(Stop("SIGTERM", 143))
    for stage in ("update_actor", "update_weights"):
        stop.enter(stage)
    stop.has_state()
    with pytest.raises(StopRun):
        stop.enter("testing")
    stop.enter("save_checkpoint")
    with pytest.raises(StopRun):
        stop.end_step()


@pytest.mark.parametrize("in_process", [True, False])
def test_generation_in_this_process_is_interrupted_and_that_of_others_is_waited_for(in_process):
    stop = control(in_process=in_process)
    left = False
    with stop.signals():
        stop.begin_step()
        stop.enter("gen")
        try:
            send(signal.SIGTERM)
        except StopRun:
            left = True
    assert left == in_process


def test_an_update_is_never_interrupted_by_the_first_signal():
    stop = control(in_process=True)
    with stop.signals():
        stop.begin_step()
        stop.enter("update_actor")
        send(signal.SIGTERM)
        stop.enter("reward_model")
    assert stop.asked is not None


def test_sigusr1_asks_for_a_checkpoint_and_nothing_else(capfd):
    stop = control(save_freq=-1)
    with stop.signals():
        os.kill(os.getpid(), signal.SIGUSR1)
        stop.enter("gen")
    assert stop.wants_checkpoint
    assert stop.asked is None
    assert "SIGUSR1: saving at the end of this step." in capfd.readouterr().err


def test_a_run_that_saves_nothing_is_ended_at_once():
    stop = control(save_freq=-1)
    before = signal.getsignal(signal.SIGTERM)
    with stop.signals():
        assert signal.getsignal(signal.SIGTERM) is before


# ------------------------------------------------------------------------------------------------ deadlines


def run_a_step(stop: StopControl, clock: Clock, seconds: float) -> bool:
    """Whether the run is to end after it."""
    stop.begin_step()
    clock.now += seconds
    stop.look_at_clock()
    if stop.asked is None:
        stop.end_step()
    return stop.asked is not None


def test_the_run_ends_while_another_step_and_a_save_would_not_fit_any_more():
    clock = Clock()
    stop = control(clock, max_wall_time=100.0)
    stop.saved(5.0)
    # After 80 s, 20 are left: one more step of 20 and a save of 5 is too much.
    ended = [run_a_step(stop, clock, 20.0) for _ in range(4)]
    assert ended == [False, False, False, True]
    assert stop.asked == Stop("trainer.max_wall_time=100", OUT_OF_TIME)


def test_the_longest_step_so_far_counts():
    clock = Clock()
    stop = control(clock, max_wall_time=100.0)
    stop.saved(0.0)
    assert [run_a_step(stop, clock, seconds) for seconds in (45.0, 15.0)] == [False, True]


@pytest.mark.parametrize("name", DEADLINE_VARIABLES)
def test_the_environment_says_when_the_machine_goes_away(monkeypatch, name):
    clock = Clock()
    monkeypatch.setenv(name, str(int(clock.now + 100)))
    stop, early = control(clock), control(clock, esi_redundant_time=60)
    for one in (stop, early):
        one.saved(5.0)
        one.begin_step()
    clock.now += 30
    for one in (stop, early):
        one.look_at_clock()
    assert stop.asked is None
    assert early.asked == Stop(name, OUT_OF_TIME)


def test_a_time_that_is_none_or_of_an_older_job_is_left_alone(monkeypatch):
    clock = Clock()
    monkeypatch.setenv("SLURM_JOB_END_TIME", "soon")
    monkeypatch.setenv("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", str(clock.now - 1))
    assert control(clock).deadlines == []


def test_without_checkpoints_the_environment_ends_nothing_but_the_wall_time_does(monkeypatch):
    clock = Clock()
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(clock.now + 1))
    stop = control(clock, save_freq=-1, max_wall_time=10.0)
    assert [deadline.by for deadline in stop.deadlines] == ["trainer.max_wall_time=10"]
    assert [run_a_step(stop, clock, 4.0) for _ in range(2)] == [False, True]
