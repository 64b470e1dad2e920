"""Draws a `RunState` for a terminal of any size."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from burnish.trainer.live_view.drawing import duration, number, printable, shares, sparkline
from burnish.trainer.live_view.state import RunState

CURVES = (
    ("train/loss", "loss"),
    ("train/token_accuracy", "right tokens"),
    ("critic/score/mean", "score"),
    ("critic/rewards/mean", "reward"),
    ("reward/acc/mean", "accuracy"),
    ("response_length/mean", "length"),
    ("response_length/clip_ratio", "cut off"),
    ("actor/entropy", "entropy"),
    ("actor/kl_loss", "KL"),
    ("actor/pg_clipfrac", "clipped"),
    ("actor/grad_norm", "grad norm"),
    ("train/grad_norm", "grad norm"),
    ("critic/vf_loss", "value loss"),
)
"""Metrics that have a line, the first ones where there is little room."""
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green", "bright_yellow")
_LEAST_SAMPLE = 3
# Lines beside curves and sample: headline, bar, stages, pace, validation, bottleneck, notes, footer, the panel's edges.
_OTHER_LINES = 14


def headline(state: RunState, console: Console) -> RenderableType:
    """Progress, time and the current stage; the only part that changes within a step."""
    width = console.width
    share = min(1.0, state.step / state.total_steps) if state.total_steps else 1.0
    left = state.seconds_left
    facts = [
        f"step {state.step} of {state.total_steps}",
        f"{share:.0%}",
        duration(state.elapsed),
        "measuring ..." if left is None else f"{duration(left)} left",
    ]
    where = f"{state.stage} {duration(state.seconds_in_stage)}"
    if state.running_step > state.step:
        where = f"in step {state.running_step}: {where}"
    text = _line("  ".join(facts), console, "bold")
    text.append(f"  {where}", style="not bold dim")
    full = round(share * width)
    filled, empty = ("#", "-") if _ascii(console) else ("━", "─")
    bar = Text(filled * full, style="green", no_wrap=True)
    bar.append(empty * (width - full), style="dim")
    return Group(text, bar)


def body(state: RunState, console: Console) -> RenderableType:
    """Everything else."""
    if not state.metrics:
        return Text("Loading the models ...", style="dim")
    num_curves = max(2, min(len(CURVES), console.height - _OTHER_LINES - _LEAST_SAMPLE))
    parts: list[RenderableType] = [_curves(state, console, num_curves), *_stages(state, console)]
    parts += [_line(line, console) for line in (_pace(state), *_validation(state)) if line]
    if state.bottleneck is not None:
        parts.append(_line(f"most to gain: {state.bottleneck}", console, "dim"))
    for step, sentence in state.notes:
        parts.append(_line(f"! {sentence}" if step is None else f"! step {step}: {sentence}", console, "yellow"))
    if troubles := state.troubles():
        said = ", ".join(f"{key} {number(value)}" for key, value in troubles.items())
        parts.append(_line(f"! {said}", console, "yellow"))
    if state.sample:
        parts.append(_sample(state, console, num_curves))
    saved = "" if state.checkpoint is None else f"checkpoint of step {state.checkpoint}, "
    parts.append(_line(f"{saved}files in {state.run_dir}", console, "dim"))
    return Group(*parts)


def _ascii(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


def _line(text: str, console: Console, style: str = "") -> Text:
    """One line, cut where the terminal ends."""
    shown = printable(text.replace("\n", " "), console.encoding)
    return Text(shown, style=style, no_wrap=True, overflow="crop" if _ascii(console) else "ellipsis")


def _curves(state: RunState, console: Console, most: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, overflow="crop")
    width = max(8, min(60, console.width - 26))
    shown: list[list[float]] = []
    for key, label in CURVES:
        values = list(state.history.get(key, ()))
        # Without a KL in the reward it is the score, and often the accuracy is too.
        if not values or values in shown or len(shown) == most:
            continue
        shown.append(values)
        colour = "green" if label in ("score", "reward", "accuracy") else "cyan"
        table.add_row(
            label, number(values[-1]), Text(sparkline(values, width, ascii_only=_ascii(console)), style=colour)
        )
    return table


def _stages(state: RunState, console: Console) -> Iterator[RenderableType]:
    stages = state.stages()
    total = sum(seconds for _, seconds in stages)
    if not total:
        return
    colours = {name: _COLOURS[place % len(_COLOURS)] for place, (name, _) in enumerate(stages)}
    bar, legend = Text(no_wrap=True), _line("", console)
    block = "=" if _ascii(console) else "█"
    for name, cells in shares(stages, console.width):
        bar.append(block * cells, style=colours[name])
    legend.append(f"{duration(state.metrics.get('timing_s/step', total))} a step: ", style="dim")
    for name, seconds in sorted(stages, key=lambda stage: -stage[1]):
        if seconds >= 0.005 * total:
            legend.append(f"{name} {seconds / total:.0%}  ", style=colours[name])
    yield bar
    yield legend


def _pace(state: RunState) -> str:
    metrics = state.metrics
    parts = []
    for key, label in (
        ("perf/throughput", "{:.4g} tokens/s a worker"),
        ("perf/mfu/actor", "MFU {:.1%}"),
        ("perf/max_memory_allocated_gb", "{:.3g} GiB of GPU memory"),
        ("perf/cpu_memory_used_gb", "{:.3g} GiB of memory"),
    ):
        value = metrics.get(key)
        if value is not None and math.isfinite(value) and value > 0:
            parts.append(label.format(value))
    return ", ".join(parts)


def _validation(state: RunState) -> Iterator[str]:
    if not state.validations:
        return
    step, last = state.validations[-1]
    first_step, first = state.validations[0]
    names = [key for key in last if "/mean@" in key and key.startswith("val-core/")] or list(last)
    for key in names[:3]:
        name = key.split("/", 1)[1]
        before = f", {number(first[key])} at step {first_step}" if first_step != step and key in first else ""
        yield f"validation at step {step}: {name} {number(last[key])}{before}"


def _sample(state: RunState, console: Console, num_curves: int) -> RenderableType:
    sample = state.sample
    score, answer = sample.get("score"), sample.get("ground_truth")
    title = "a response" if score is None else f"a response, score {number(float(score))}"
    if answer is not None:
        title += f", right is {printable(str(answer), console.encoding)[:40]}"
    height = max(_LEAST_SAMPLE, console.height - _OTHER_LINES - num_curves + 2)
    inner = max(10, console.width - 4)
    # The prompt's end and the response's beginning belong together, as much of them as can be seen: to break all of a long
    # response into lines may take longer than the step.
    prompt = str(sample.get("prompt", ""))[-inner * max(1, height // 3) :]
    response = "\n".join(str(sample.get("response", ""))[: inner * height].split("\n")[:height])
    text = Text(printable(prompt, console.encoding), style="dim")
    text.append(printable(response, console.encoding), style="not dim")
    lines = text.wrap(console, inner)
    shown = Text("\n").join(list(lines)[:height])
    return Panel(shown, title=Text(title), title_align="left", border_style="dim")
