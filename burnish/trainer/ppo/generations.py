"""Responses as people read them: samples on the console and in the tables of services, one for a live view."""

from typing import Any

import numpy as np

from burnish.protocol import DataProto
from burnish.trainer.live_view.drawing import printable
from burnish.trainer.rollout_store import text_rows
from burnish.utils.console import console, outliving_the_reader


def chosen_rows(batch: DataProto, num_shown: int) -> DataProto:
    """``num_shown`` rows of a validation, spread over it, and the same ones every time."""
    if num_shown >= len(batch):
        return batch
    rows = np.random.default_rng(0).permutation(len(batch))[:num_shown]
    return batch.select_idxs(np.sort(rows))


def show_generations(rows: list[dict[str, Any]], step: int) -> None:
    """Prints responses; their control characters are shown, not obeyed."""
    with outliving_the_reader():
        for row in rows:
            console.print(f"step {step} | score {row['score']:.3f}", style="bold")
            console.print(printable(f"{row['prompt']}{row['response']}"))


def sample_of(batch: DataProto, tokenizer: Any) -> dict[str, Any]:
    """One row as text: the first of the batch."""
    return next(iter(text_rows(batch[:1], tokenizer)))
