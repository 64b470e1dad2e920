"""Metrics as lines on the console."""

from collections.abc import Mapping

from burnish.utils import console
from burnish.utils.tracking.base import LOGGERS, RunInfo


@LOGGERS.register("console")
class ConsoleLogger:
    """One line a step: what a person watches, every validation result, and every counter of trouble that is not 0."""

    in_turn = True

    HEADLINES: Mapping[str, str] = {
        "train/loss": "loss",
        "train/token_accuracy": "right tokens",
        "train/grad_norm": "grad_norm",
        "train/lr": "lr",
        "critic/score/mean": "score",
        "critic/rewards/mean": "reward",
        "actor/pg_loss": "pg_loss",
        "actor/kl_loss": "kl_loss",
        "actor/entropy": "entropy",
        "actor/grad_norm": "grad_norm",
        "critic/vf_loss": "vf_loss",
        "response_length/mean": "length",
        "timing_s/step": "seconds",
        "perf/throughput": "tokens/s/gpu",
    }
    TROUBLE = ("_count", "skipped_updates", "empty_updates", "dropped_values")

    def __init__(self, info: RunInfo) -> None:
        pass

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Prints the line of ``step``."""
        with console.outliving_the_reader():
            console.console.print(self.line(data, step), soft_wrap=True)

    log_partial = log

    def line(self, data: Mapping[str, float], step: int) -> str:
        """The text for ``step``; a batch of unknown metrics is shown whole."""
        shown = {label: data[key] for key, label in self.HEADLINES.items() if key in data}
        shown |= {key: value for key, value in data.items() if key.startswith(("val/", "val-core/"))}
        shown |= {key: value for key, value in data.items() if key.endswith(self.TROUBLE) and value}
        return "  ".join([f"step {step}", *(f"{key} {value:.4g}" for key, value in (shown or data).items())])

    def finish(self) -> None:
        """Nothing is open."""
