"""Small runs of supervised fine-tuning, and the same steps once more in plain transformers and torch."""

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from burnish.config import load_sft_config
from burnish.trainer.run import Parts, RunSummary
from burnish.trainer.sft.main import SFTTaskRunner, run_sft
from tests.docs.metrics_page import logged_keys, undocumented
from tests.e2e.runs import TINY


def rows(number: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Sums with their answers; every fourth answer is many times as long, so that a mean of means is another one, and every fifth
    conversation goes on: between what is learnt there are tokens that are not.
    """
    draw = random.Random(seed)
    made = []
    for index in range(number):
        one, other = draw.randrange(100), draw.randrange(100)
        answer = str(one + other) * (8 if index % 4 == 3 else 1)
        messages = [{"role": "user", "content": f"{one}+{other}="}, {"role": "assistant", "content": answer}]
        if index % 5 == 4:
            messages += [{"role": "user", "content": f"{other}+1="}, {"role": "assistant", "content": str(other + 1)}]
        made.append({"messages": messages, "data_source": "long" if index % 4 == 3 else "short"})
    return made


def sft_config(run_dir: Path, *overrides: str):
    """Steps of 8 conversations in float32."""
    return load_sft_config(
        [
            f"model.path={TINY / 'model'}",
            "data.train_batch_size=8",
            "data.max_length=128",
            "engine.dtype=float32",
            "optim.lr=0.001",
            f"trainer.default_local_dir={run_dir}",
            "trainer.logger=[file]",
            "trainer.console=off",
            *overrides,
        ],
        train_rows_given=True,
    )


def sft_run(
    run_dir: Path,
    *overrides: str,
    train: list[dict[str, Any]] | None = None,
    val: list[dict[str, Any]] | None = None,
    task_runner_class: type[SFTTaskRunner] | None = None,
    **parts: Any,
) -> RunSummary:
    """Runs, and looks whether all that was logged is on the page of metrics."""
    given = Parts(train_rows=rows(32) if train is None else train, val_rows=val, **parts)
    summary = run_sft(sft_config(run_dir, *overrides), task_runner_class, parts=given, quiet=True)
    assert undocumented(logged_keys(run_dir)) == set(), "docs/metrics.md has no row for these"
    return summary


class PlainTrainer:
    """The same model, optimizer and loss from the definitions alone; one row at a time, no padding, no packing."""

    def __init__(self, path: str | Path, lr: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.01)

    def nll(self, item: dict[str, Any]) -> torch.Tensor:
        """Of the learnt tokens of a row, summed."""
        ids = torch.tensor([item["input_ids"]])
        log_probs = self.model(input_ids=ids).logits[0].log_softmax(-1)
        # The state of a token predicts the next one.
        of_next = log_probs[:-1].gather(1, ids[0, 1:, None])[:, 0]
        return -(of_next * torch.tensor(item["loss_mask"][1:], dtype=torch.float32)).sum()

    def step(self, items: list[dict[str, Any]]) -> tuple[float, float]:
        """One update on all rows; the loss and the norm of its gradient."""
        learnt = sum(sum(item["loss_mask"]) for item in items)
        loss = torch.stack([self.nll(item) for item in items]).sum() / learnt
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item(), norm.item()

    @torch.no_grad()
    def mean_loss(self, items: list[dict[str, Any]]) -> float:
        """Over all learnt tokens."""
        learnt = sum(sum(item["loss_mask"]) for item in items)
        return sum(self.nll(item).item() for item in items) / learnt
