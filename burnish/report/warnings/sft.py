"""Rules of `burnish.report.warnings` on supervised fine-tuning."""

from collections.abc import Iterator

from burnish.report.warnings.base import Evidence, Warning, recent_mean, rule

_WORSE = 1.02
"""A loss above its best by less may be noise."""


@rule
def overfitting(evidence: Evidence) -> Iterator[Warning]:
    """The loss on held-out rows rises while that of training falls on."""
    held_out, train = evidence.series.points("val/loss"), evidence.series.points("train/loss")
    if len(held_out) < 3 or not train:
        return
    step, best = min(held_out, key=lambda point: point[1])
    last_step, last = held_out[-1]
    around_best = [value for at, value in train if at <= max(step, 1)][-5:]
    now = recent_mean(train, 5)
    if (
        step == last_step
        or not last > _WORSE * best
        or not around_best
        or not now < sum(around_best) / len(around_best)
    ):
        return
    yield Warning(
        kind="overfitting",
        severity="warning",
        title="The model learns its rows by heart",
        seen=f"val/loss was best at step {step} ({best:.4g}) and is {last:.4g} at step {last_step}; train/loss is {now:.4g}.",
        why="What it still learns of the training rows no longer helps with others.",
        tries=(
            "Take the best checkpoint: trainer.keep_best=val/loss keeps it.",
            "Train for fewer epochs: trainer.total_epochs.",
            "Halve optim.lr, train adapters (recipe=lora), or give more rows.",
        ),
        metrics=("val/loss", "train/loss"),
    )
