"""PF-PPO: rows are drawn again by their score before they are trained on (arXiv:2409.06957)."""

import torch
from jaxtyping import Float
from torch import Tensor

from burnish.core_algos.estimators.base import outcome_scores, refuse_non_finite
from burnish.protocol import DataProto
from burnish.utils.errors import ConfigError, TrainingError
from burnish.utils.torch_functional import as_mask


@torch.no_grad()
def compute_pf_ppo_reweight_data(
    data: DataProto,
    reweight_method: str = "pow",
    weight_pow: float | int = 2.0,
    generator: torch.Generator | None = None,
) -> DataProto:
    """As many rows as ``data`` has, drawn from it with replacement, each in proportion to the weight of its score s.

    | method | weight |
    |---|---|
    | `pow` | abs(s)^weight_pow |
    | `max_min` | 1 for the greatest and the least score, else 0 |
    | `max_random` | 0.4 for the greatest score, else 0.1 |

    Rows without a token in the loss mask are not drawn. Where all weights are 0, the rows are drawn alike.

    Args:
        data: holds ``token_level_scores`` (s is their sum over the row) and ``loss_mask``.
        reweight_method: a name of the table.
        weight_pow: exponent of ``pow``.
        generator: of the CPU; the draw depends on it alone. None: torch's own.

    Returns:
        a new batch; ``data`` itself where no row has a token in the loss mask.

    Raises:
        ConfigError: no such method.
        TrainingError: ``token_level_scores`` or ``loss_mask`` are missing or do not fit, or hold NaN or inf, other than 0/1.
    """
    batch = data.tensors
    missing = [key for key in ("token_level_scores", "loss_mask") if key not in batch]
    if missing:
        held = sorted(map(str, batch.keys()))
        raise TrainingError(f"PF-PPO needs {' and '.join(missing)}, not in the batch (it holds {', '.join(held)}).")
    mask = as_mask(batch["loss_mask"], batch["token_level_scores"], "loss_mask")
    counts = mask.any(dim=-1)
    if not counts.any():
        return data
    refuse_non_finite(mask, token_level_scores=batch["token_level_scores"])
    scores = outcome_scores(batch["token_level_scores"], mask)
    weights = torch.zeros_like(scores)
    weights[counts] = _weights(scores[counts], reweight_method, weight_pow)
    if not weights.any():
        weights = counts.double()
    # On the CPU: the same rows whatever the device.
    rows = torch.multinomial(weights.cpu(), len(data), replacement=True, generator=generator)
    return data.select_idxs(rows)


def _weights(scores: Float[Tensor, " row"], method: str, weight_pow: float | int) -> Float[Tensor, " row"]:
    best = scores == scores.max()
    if method == "pow":
        # Only proportions count: relative to the greatest score no power overflows.
        size = scores.abs()
        return (size / size.max()).pow(weight_pow) if size.any() else size
    if method == "max_min":
        return (best | (scores == scores.min())).double()
    if method == "max_random":
        return torch.where(best, 0.4, 0.1).double()
    raise ConfigError(
        f"algorithm.pf_ppo.reweight_method={method}: there is no such method. Known: max_min, max_random, pow."
    )
