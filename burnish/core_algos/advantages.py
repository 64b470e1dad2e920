"""The advantage stage: which rows count, one call of the estimator, and what the batch gets from it.

The estimators themselves are in `burnish.core_algos.estimators`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from burnish.core_algos.estimators import AdvantageSettings, get_adv_estimator_fn
from burnish.protocol import DataProto
from burnish.utils.errors import TrainingError
from burnish.utils.torch_functional import as_mask


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float | int = 1.0,
    lam: float | int = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: AdvantageSettings | None = None,
) -> DataProto:
    """Adds ``advantages``, ``returns`` and ``loss_mask`` to the batch.

    A row counts if its reward is ``valid`` and it has a token in the loss mask. The estimator sees only rows that
    count; the others get zeros, and leave the loss mask whole: they are in no baseline and in no denominator.

    Args:
        data: holds ``response_mask``, ``token_level_rewards``, what the estimator names as its parameters, and, where
            there is any, ``valid`` (bool per row) and a ``loss_mask`` that rejection has thinned out already.
        adv_estimator: a registered name or ``package.module:attribute``.
        gamma: discount per token.
        lam: lambda of GAE.
        num_repeat: responses sampled per prompt (``rollout.n``).
        norm_adv_by_std_in_grpo: False for Dr.GRPO.
        config: the ``algorithm`` section.

    Returns:
        ``data`` itself.

    Raises:
        ConfigError: no such estimator.
        TrainingError: the batch lacks what the estimator needs, or the estimator returned something of another shape.
    """
    assert data.batch is not None, "A batch without tensors has no rewards."
    estimator = get_adv_estimator_fn(adv_estimator)
    loss_mask = _loss_mask(data)
    settings = {
        "gamma": gamma,
        "lam": lam,
        "num_repeat": num_repeat,
        "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo,
        "config": config,
    }
    entries = _entries(estimator, adv_estimator, data, settings)
    counts = loss_mask.any(dim=-1)
    if counts.all():
        advantages, returns = estimator(**entries)
        _check_shapes(adv_estimator, advantages, returns, loss_mask)
    else:
        advantages, returns = _zeros(loss_mask, data), _zeros(loss_mask, data)
        if counts.any():
            rows = {key: value if key in settings else _rows(value, counts) for key, value in entries.items()}
            kept_advantages, kept_returns = estimator(**rows)
            _check_shapes(adv_estimator, kept_advantages, kept_returns, loss_mask[counts])
            advantages[counts], returns[counts] = kept_advantages.to(advantages), kept_returns.to(returns)
    data.batch["advantages"] = advantages
    data.batch["returns"] = returns
    data.batch["loss_mask"] = loss_mask
    return data


def _loss_mask(data: DataProto) -> Tensor:
    """l = m without rejected tokens and without the rows whose reward abstained."""
    batch = data.batch
    assert batch is not None
    loss_mask = as_mask(batch["response_mask"], batch["token_level_rewards"], "response_mask")
    if "loss_mask" in batch:
        loss_mask = loss_mask & as_mask(batch["loss_mask"], loss_mask, "loss_mask")
    if "valid" in batch:
        loss_mask = loss_mask & as_mask(batch["valid"], loss_mask.any(dim=-1), "valid").unsqueeze(-1)
    # Never the response mask itself under a second name: that says what was sampled and must not change with this one.
    return loss_mask.clone() if loss_mask is batch["response_mask"] else loss_mask


def _entries(estimator: Callable, name: str, data: DataProto, settings: dict[str, Any]) -> dict[str, Any]:
    """The arguments that the estimator names; one that takes ``**kwargs`` gets all settings, and the index."""
    batch, non_tensors = data.batch, data.non_tensor_batch
    assert batch is not None
    entries: dict[str, Any] = {}
    for key, parameter in inspect.signature(estimator).parameters.items():
        source = "uid" if key == "index" else key
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            entries = settings | ({"index": non_tensors["uid"]} if "uid" in non_tensors else {}) | entries
        elif key in settings:
            entries[key] = settings[key]
        elif source in batch:
            entries[key] = batch[source]
        elif source in non_tensors:
            entries[key] = non_tensors[source]
        elif parameter.default is inspect.Parameter.empty:
            held = ", ".join(sorted([*batch.keys(), *non_tensors]))
            raise TrainingError(
                f"The advantage estimator {name} needs {source!r}, which is not in the batch (it holds {held})."
            )
    return entries


def _rows(entry: Any, counts: Tensor) -> Any:
    return entry[counts.to(entry.device)] if isinstance(entry, Tensor) else entry[counts.cpu().numpy()]


def _zeros(mask: Tensor, data: DataProto) -> Tensor:
    assert data.batch is not None
    dtype = torch.promote_types(data.batch["token_level_rewards"].dtype, torch.float32)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device)


def _check_shapes(name: str, advantages: Tensor, returns: Tensor, like: Tensor) -> None:
    for what, tensor in (("advantages", advantages), ("returns", returns)):
        if tensor.shape != like.shape:
            raise TrainingError(
                f"The advantage estimator {name} returned {what} of shape {tuple(tensor.shape)}; "
                f"they must have that of the response mask, {tuple(like.shape)}."
            )
