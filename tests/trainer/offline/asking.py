"""Asking a model, for several tests."""

from pathlib import Path

from burnish.trainer.offline.generate import Asking, prepare, rows_of
from burnish.trainer.offline.settings import AskOptions

CPU = {"device": "cpu", "dtype": "float32"}
IN_THIS_PROCESS = ["reward.num_workers=0"]


def answers(model: Path | str, **options: object) -> list[dict]:
    asked = prepare(str(model), AskOptions(**CPU, **options))  # type: ignore[arg-type]
    with Asking(asked) as asking:
        return [row for batch in asking.batches() for row in rows_of(batch, asked.tokenizer, asked.config)]
