"""The live view: what it shows in terminals of every size, where it appears, and what it leaves behind."""

import io
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console, Group

from burnish.trainer.live_view import RunState, body, console_mode, headline, loggers_beside
from burnish.trainer.live_view.drawing import duration, printable, shares, sparkline
from burnish.trainer.ppo.stages import StepReport
from tests.terminal import run_on_a_terminal


class Clock:
    """Seconds, as the test says."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def report(step: int, **metrics: float) -> StepReport:
    timing = {"timing_s/step": 2.0, "timing_s/gen": 1.2, "timing_s/update_actor": 0.6}
    sample = {"prompt": "12+30=", "response": "42 \x1b[2J\x07done", "score": 1.0, "ground_truth": "42"}
    named = {key.replace("__", "/"): value for key, value in metrics.items()}
    return StepReport(step=step, total_steps=10, metrics=timing | named, sample=sample)


def state_of(*scores: float, clock: Clock | None = None) -> RunState:
    clock = clock or Clock()
    state = RunState(total_steps=10, run_dir="runs/one", clock=clock)
    for step, score in enumerate(scores, start=1):
        clock.now += 3
        state.on_step(
            report(step, critic__score__mean=score, response_length__mean=20.0 + step, perf__throughput=900.0)
        )
    return state


def drawn(state: RunState, width: int, height: int, encoding: str = "utf-8") -> str:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(
        file=out, width=width, height=height, force_terminal=True, color_system=None, legacy_windows=False
    )
    console.print(Group(headline(state, console), body(state, console)))
    out.flush()
    return out.buffer.getvalue().decode(encoding)


# ------------------------------------------------------------------------------------------------ drawings


def test_a_sparkline_spans_from_the_least_to_the_greatest_of_the_last_values() -> None:
    assert sparkline([9.0, *range(8)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, math.nan, 1.0, math.inf], 10) == "▁ █ "
    assert sparkline([math.nan], 5) == " "
    assert sparkline([], 5) == ""
    assert len(sparkline([2.0, 2.0], 5)) == 2
    assert sparkline([0, 1], 5, ascii_only=True).isascii()


def test_shares_fill_the_whole_width() -> None:
    parts = [("a", 1.0), ("b", 1.0), ("c", 1.0), ("d", 0.0)]
    for width in range(1, 40):
        assert sum(cells for _, cells in shares(parts, width)) == width
    assert shares(parts, 30) == [("a", 10), ("b", 10), ("c", 10)]
    assert shares([("a", 0.0)], 10) == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.24, "8.2 s"), (245, "4:05"), (11045, "3:04:05"), (183_600, "2 d 03 h"), (math.nan, "?")]
)
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_what_a_terminal_would_obey_is_shown_instead() -> None:
    assert printable("a\x1b[2J\x07\r\n\tb\x9bc\ud800") == "a␛[2J␇␍\n\tb\ufffdc?"


# -------------------------------------------------------------------------------------------- state and view


def test_what_is_left_follows_the_pace_of_the_last_steps() -> None:
    clock = Clock()
    state = RunState(total_steps=10, clock=clock)
    assert state.seconds_left is None
    state.on_step(StepReport(step=0, total_steps=10, metrics={"val-core/math/acc/mean@1": 0.5}))
    assert state.seconds_left is None, "a validation before training is no step"
    for step in (1, 2, 3):
        clock.now += 4
        state.on_step(report(step))
    assert state.seconds_left == 7 * 4
    clock.now += 3
    assert state.seconds_left == 7 * 4 - 3
    clock.now += 1000
    assert state.seconds_left == 0


def test_a_resumed_run_begins_where_it_was_and_does_not_count_its_start_as_a_step() -> None:
    clock = Clock()
    state = RunState(total_steps=100, clock=clock)
    state.is_in(0, "start")
    clock.now += 500
    state.on_step(StepReport(step=50, total_steps=100, metrics={"val-core/math/acc/mean@1": 0.5}))
    clock.now += 100
    state.is_in(51, "gen")
    assert state.step == 50
    assert state.seconds_left is None
    clock.now += 4
    state.on_step(StepReport(step=51, total_steps=100, metrics={"timing_s/step": 3.0}))
    assert state.seconds_left == 49 * 4


def test_the_current_stage_counts_its_own_seconds() -> None:
    clock = Clock()
    state = RunState(total_steps=10, clock=clock)
    state.is_in(1, "gen")
    clock.now += 5
    state.is_in(1, "gen")
    assert state.seconds_in_stage == 5
    state.is_in(1, "reward")
    assert state.seconds_in_stage == 0
    assert "in step 1: reward" in drawn(state, 100, 30)


def test_the_view_has_progress_curve_stages_validation_bottleneck_and_a_response() -> None:
    state = state_of(0.1, 0.5, 0.9)
    state.on_step(report(4, critic__score__mean=0.7, **{"val-core__math__acc__mean@1": 0.25}))
    state.on_step(
        report(5, critic__score__mean=0.8, **{"val-core__math__acc__mean@1": 0.5}, actor__skipped_updates=2.0)
    )
    state.on_event({"kind": "checkpoint", "step": 5, "message": "saved"})
    state.on_event({"kind": "warning", "step": 5, "message": "The KL is large."})
    state.on_event({"kind": "start", "step": 5, "message": "not for this place"})
    text = drawn(state, 110, 40)
    assert "step 5 of 10  50%" in text
    assert re.search(r"score +0.8 +▁▅█[▆▇][▇█]", text)
    assert "gen 60%" in text
    assert "update_actor 30%" in text
    assert "validation at step 5: math/acc/mean@1 0.5, 0.25 at step 4" in text
    assert "most to gain: gen takes 60% of the step" in text
    assert "! step 5: The KL is large." in text
    assert "! actor/skipped_updates 2" in text
    assert "not for this place" not in text
    assert "12+30=42" in text
    assert "score 1, right is 42" in text
    assert "checkpoint of step 5, files in runs/one" in text
    assert "\x1b" not in text
    assert "␛[2J␇done" in text


def test_a_curve_that_says_the_same_as_another_is_left_out() -> None:
    state = RunState(total_steps=10)
    state.on_step(report(1, critic__score__mean=0.5, critic__rewards__mean=0.5, reward__acc__mean=0.25))
    text = drawn(state, 100, 40)
    assert "score " in text
    assert "accuracy " in text
    assert "reward  " not in text


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize(("width", "height"), [(20, 8), (40, 12), (80, 24), (200, 60)])
def test_the_view_fits_terminals_of_every_size(width: int, height: int, encoding: str) -> None:
    state = state_of(*(step / 7 for step in range(9)), math.nan)
    state.sample["response"] = "x" * 5000
    lines = drawn(state, width, height, encoding).splitlines()
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= max(height, 19)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("piece", ["\n", "漢"])
def test_a_long_response_is_drawn_as_fast_as_a_short_one(piece: str) -> None:
    state = state_of(0.5)
    state.sample["response"] = f"it begins {piece * (5_000_000 // len(piece))}"
    assert "it begins" in drawn(state, 80, 24)


def test_before_the_first_numbers_it_says_so() -> None:
    assert "Loading" in drawn(RunState(total_steps=10), 80, 24)


# ------------------------------------------------------------------------------------------- where it appears


def terminal(**options: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, **options)


@pytest.mark.parametrize(
    ("setting", "variables", "mode"),
    [
        ("auto", {}, "live"),
        ("auto", {"NO_COLOR": "1"}, "plain"),
        ("auto", {"CI": "true"}, "plain"),
        ("auto", {"CI": "false"}, "live"),
        ("auto", {"TERM": "dumb"}, "plain"),
        ("live", {"CI": "true", "NO_COLOR": "1"}, "live"),
        ("live", {"TERM": "dumb"}, "plain"),
        ("plain", {}, "plain"),
        ("off", {}, "off"),
    ],
)
def test_where_a_view_is_drawn(monkeypatch, setting: str, variables: dict[str, str], mode: str) -> None:
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert console_mode(setting, terminal()) == mode
    assert console_mode(setting, Console(file=io.StringIO())) == ("off" if setting == "off" else "plain")


def test_a_run_whose_loggers_leave_out_the_console_shows_nothing_by_itself(monkeypatch) -> None:
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert console_mode("auto", terminal(), has_console_logger=False) == "off"
    assert console_mode("live", terminal(), has_console_logger=False) == "live"


def test_lines_and_view_do_not_come_together() -> None:
    display = object()
    assert loggers_beside("auto", ["console", "file"], None) == ["console", "file"]
    assert loggers_beside("auto", ["console", "file"], display) == ["file"]
    assert loggers_beside("off", ["console", "file"], None) == ["file"]
    assert loggers_beside("plain", ["file"], None) == ["console", "file"]
    assert loggers_beside("auto", ["file"], None) == ["file"]


# ------------------------------------------------------------------------------------------ on a real terminal

SCRIPT = """
import logging, os, signal, sys, time
logging.basicConfig(format="%(message)s")
handler = logging.root.handlers[0]
from burnish.trainer.live_view import LiveDisplay, RunState
from burnish.trainer.ppo.stages import StepReport
from burnish.utils.console import console, error_console
display = LiveDisplay(RunState(total_steps=3), console)
before = (handler.stream, sys.stdout, sys.stderr)
display.start(lambda: (1, "gen"))
try:
    for step in (1, 2, 3):
        display.on_step(StepReport(step=step, total_steps=3, metrics={"timing_s/step": 1.0, "critic/score/mean": step / 4}))
        logging.warning("warned in step %d", step)
        print("printed in step", step)
        print("told in step", step, file=sys.stderr)
        error_console.print(f"reported in step {step}")
    END
finally:
    display.stop()
    display.stop()
    assert (handler.stream, sys.stdout, sys.stderr) == before
    error_console.print("at the end")
"""


def on_a_terminal(ending: str) -> tuple[int, str]:
    """Exit status of the script and everything that it wrote to its terminal."""
    command = [sys.executable, "-c", SCRIPT.replace("END", ending)]
    return run_on_a_terminal(command, columns=80, lines=24, timeout=60)


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("pass", 0),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", -2),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
    ],
    ids=["end", "ctrl-c", "kill-9"],
)
def test_other_output_does_not_tear_the_view_and_the_terminal_is_left_as_it_was(ending: str, status: int) -> None:
    code, text = on_a_terminal(ending)
    assert code == status, text
    for step in (1, 2, 3):
        for said in ("warned", "printed", "told", "reported"):
            # A whole line of its own: it begins where the view was erased or a line ended, and ends with a line's end.
            assert re.search(rf"(\n|\x1b\[2K|\r|\x1b\[\?25h){said} in step {step} *\r?\n", text), (said, step)
    cursor = re.findall(r"\x1b\[\?25([lh])", text)
    assert cursor[-1] == "h", "the cursor is there"
    assert "\x1b[?1049h" not in text, "the scrolled text stays"
    if status == 0:
        assert "step 3 of 3  100%" in text
        assert text.rstrip().endswith("at the end")


def test_in_a_pipe_there_is_no_control_code(tmp_path: Path) -> None:
    script = """
from burnish.config import load_config
from burnish.trainer.live_view import loggers_beside, make_display
from burnish.utils.tracking import Tracking
config = load_config(["actor_rollout_ref.model.path=/m", "data.train_files=a.jsonl", "trainer.console=live"])
assert make_display(config, 3) is None
tracking = Tracking("p", "e", loggers_beside("live", ["file"], None), run_dir="run")
tracking.log({"critic/score/mean": 0.5}, step=1)
tracking.finish()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "step 1  score 0.5\n"
    assert "\x1b" not in done.stderr
    assert "this is no terminal" in done.stderr
