"""The advantage stage: which rows count, one call of the estimator, and what the batch gets from it.

The estimators themselves are in `burnish.core_algos.estimators`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from burnish.core_algos.estimators import AdvantageSettings, get_adv_estimator_fn
from burnish.core_algos.estimators.base import check_advantages, check_any_token, refuse_non_finite
from burnish.core_algos.masks import loss_mask_of
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
        TrainingError: the batch lacks what the estimator needs; an input is of another shape, holds NaN or inf in a row
            that counts, or names no groups; nothing was sampled; the estimator returned NaN, inf or another shape.
    """
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
        advantages, returns = _estimate(adv_estimator, estimator, entries, loss_mask)
    elif counts.any():
        rows = {key: value if key in settings else _rows(value, counts) for key, value in entries.items()}
        advantages, returns = _estimate(adv_estimator, estimator, rows, loss_mask[counts])
        del rows
        # One after the other, and each replacing what it is made from: a batch of long responses is large.
        advantages = _scattered(advantages, counts)
        returns = _scattered(returns, counts)
    else:
        dtype = torch.promote_types(data.tensors["token_level_rewards"].dtype, torch.float32)
        advantages = torch.zeros(loss_mask.shape, dtype=dtype, device=loss_mask.device)
        returns = advantages.clone()
    data.tensors["advantages"] = advantages
    data.tensors["returns"] = returns
    data.tensors["loss_mask"] = loss_mask
    return data


def reads_key(adv_estimator: str, key: str) -> bool:
    """Whether the estimator names ``key`` as one of its parameters.

    Args:
        adv_estimator: a registered name or ``package.module:attribute``.
        key: of the batch.

    Raises:
        ConfigError: no such estimator.
    """
    return key in inspect.signature(get_adv_estimator_fn(adv_estimator)).parameters


def _loss_mask(data: DataProto) -> Tensor:
    """l = m without rejected tokens and without the rows whose reward abstained."""
    batch = data.tensors
    for key in ("response_mask", "token_level_rewards"):
        if key not in batch:
            raise TrainingError(f"Advantages need {key!r}, which is not in the batch (it holds {_held(data)}).")
    check_any_token(as_mask(batch["response_mask"], batch["token_level_rewards"], "response_mask"))
    return loss_mask_of(batch, batch["token_level_rewards"])


def _entries(estimator: Callable, name: str, data: DataProto, settings: dict[str, Any]) -> dict[str, Any]:
    """The arguments that the estimator names; one that takes ``**kwargs`` gets all settings, and the index."""
    batch, non_tensors = data.tensors, data.non_tensor_batch
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
            raise TrainingError(
                f"The advantage estimator {name} needs {source!r}, which is not in the batch (it holds {_held(data)})."
            )
    return entries


def _held(data: DataProto) -> str:
    return ", ".join(sorted([*data.tensors.keys(), *data.non_tensor_batch]))


def _rows(entry: Any, counts: Tensor) -> Any:
    return entry[counts.to(entry.device)] if isinstance(entry, Tensor) else entry[counts.cpu().numpy()]


def _estimate(name: str, estimator: Callable, entries: dict[str, Any], mask: Tensor) -> tuple[Tensor, Tensor]:
    """What the estimator makes of the entries, if that can be trained on."""
    advantages, returns = check_advantages(name, estimator(**entries), mask.shape)
    refuse_non_finite(mask, advantages=advantages, returns=returns)
    return advantages, returns


def _scattered(kept: Tensor, counts: Tensor) -> Tensor:
    """A row of zeros for every row that does not count."""
    rows = torch.zeros(len(counts), kept.shape[1], dtype=kept.dtype, device=kept.device)
    rows[counts] = kept
    return rows
