"""Curves of results as a small picture."""

from io import BytesIO
from pathlib import Path
from typing import Any

COLORS = ("#1f5fa8", "#d1662b", "#2f8a4e", "#8b4fa3", "#a33b4a", "#5c6670", "#b59a1f", "#2a9aa5")
SMOOTHED = 15
"""Scores of training are drawn as means of as many steps as leave so many stretches: single steps are noise."""


def draw(results: list[dict[str, Any]], png: Path, *, most_bytes: int) -> Path:
    """Held-out accuracy (left) and the score of training (right) over the steps, the mean of each result's seeds in their band.

    Raises:
        ValueError: nothing to draw, or a file of more than ``most_bytes``.
    """
    pyplot = _pyplot()
    panels = [panel for panel in ("accuracy", "train_reward") if any(_points(result, panel) for result in results)]
    if not panels:
        raise ValueError("None of the results has a curve to draw.")
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.4 * len(panels), 3.3), squeeze=False)
    window = max(1, max(len(_points(result, "train_reward")) for result in results) // SMOOTHED)
    over = f" (mean of {window} steps)" if window > 1 else ""
    labels = {"accuracy": "accuracy on held-out prompts", "train_reward": f"score in training{over}"}
    for axis, panel in zip(axes[0], panels, strict=True):
        for result, color in zip(results, COLORS * (1 + len(results) // len(COLORS)), strict=False):
            points = _points(result, panel)
            points = smoothed(points, window) if panel == "train_reward" else points
            _line(axis, points, result.get("title", result["name"]), color)
        axis.set_xlabel("step (updates of the weights)")
        axis.set_ylabel(labels[panel])
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        # From 0, or from below it: a punished score may be negative.
        lows = [low for result in results for _, _, low, _ in _points(result, panel)]
        axis.set_ylim(bottom=0 if min(lows) >= 0 else None)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0][0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    png.parent.mkdir(parents=True, exist_ok=True)
    _save(figure, png)
    pyplot.close(figure)
    if (size := png.stat().st_size) > most_bytes:
        png.unlink()
        raise ValueError(f"{png}: {size} bytes are more than a figure's {most_bytes}; draw fewer results at once.")
    return png


def smoothed(points: list[tuple[float, ...]], window: int) -> list[tuple[float, ...]]:
    """Each point as the mean of itself and the ``window`` - 1 before it, as many as there are; steps stay."""
    found = []
    for end in range(1, len(points) + 1):
        last = points[max(0, end - window) : end]
        found.append((points[end - 1][0], *(sum(column) / len(last) for column in list(zip(*last, strict=True))[1:])))
    return found


def _save(figure: Any, png: Path) -> None:
    """With a palette of 64 colours: a third of the bytes, and nothing to be seen of it."""
    from PIL import Image

    whole = BytesIO()
    figure.savefig(whole, dpi=100)
    Image.open(whole).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(png, optimize=True)


def _points(result: dict[str, Any], panel: str) -> list[tuple[float, ...]]:
    """(step, mean, least, greatest) over the seeds."""
    if panel == "accuracy":
        return [(point["step"], point["mean"], point["min"], point["max"]) for point in result["summary"]["curve"]]
    rewards = [run["train_reward"] for run in result["runs"] if run.get("train_reward")]
    return [
        (step, sum(values) / len(values), min(values), max(values))
        for step, values in enumerate(zip(*rewards, strict=False), start=1)
    ]


def _line(axis: Any, points: list[tuple[float, ...]], label: str, color: str) -> None:
    if not points:
        return
    steps, means, lows, highs = zip(*points, strict=True)
    axis.plot(steps, means, color=color, linewidth=1.6, label=label, marker="o" if len(steps) < 15 else None, ms=3)
    axis.fill_between(steps, lows, highs, color=color, alpha=0.18, linewidth=0)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("Figures are drawn by matplotlib: pip install 'burnish[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
