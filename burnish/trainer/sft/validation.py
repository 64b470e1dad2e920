"""The loss on rows that are not trained on."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from burnish.trainer.ppo.balance import on_balanced_ranks

if TYPE_CHECKING:
    from burnish.trainer.sft.trainer import SFTTrainer

_LARGEST_EXPONENT = math.log(1e30)


def run_validation(trainer: SFTTrainer) -> dict[str, float]:
    """``val/loss``: mean over all learnt tokens of the set, each weighing the same; ``val/perplexity``, its exponential; and
    ``val/num_tokens``. Where rows come from several sources, ``val/loss/<data_source>`` too.

    Rows are summed up in the order of the set, in float64: neither ranks nor batches change the result, but for the rounding
    of a row's own forward pass.
    """
    nll: dict[str, float] = defaultdict(float)
    tokens: dict[str, int] = defaultdict(int)
    assert trainer.val_dataloader is not None
    for rows in trainer.val_dataloader:
        trainer.checkpoints.stop.pass_by()
        batch = trainer.learnt_rows(rows)
        got = on_balanced_ranks(
            trainer.actor_rollout_wg.compute_nll,
            batch,
            trainer.actor_rollout_wg.dp_size("actor"),
            balance=trainer.config.trainer.balance_batch,
            share_prompts=None,
        )
        counts = batch.tensors["loss_mask"].sum(dim=1).tolist()
        sources = batch.non_tensor_batch.get("data_source", ["unknown"] * len(batch))
        for source, value, count in zip(sources, got.tensors["nll"].tolist(), counts, strict=True):
            nll[str(source)] += value
            tokens[str(source)] += int(count)
    total = sum(tokens.values())
    if not total:
        return {"val/num_tokens": 0.0}
    loss = math.fsum(nll.values()) / total
    metrics = {
        "val/loss": loss,
        # A model that is far off may have a perplexity that no number holds.
        "val/perplexity": math.exp(min(loss, _LARGEST_EXPONENT)),
        "val/num_tokens": float(total),
    }
    if len(tokens) > 1:
        metrics |= {f"val/loss/{source}": nll[source] / count for source, count in tokens.items() if count}
    return metrics
