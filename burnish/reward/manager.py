"""Reward managers: a batch of responses to scores."""

import asyncio
import functools
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from burnish.config.reward import RewardConfig
from burnish.protocol import DataProto
from burnish.reward.compute_score import (
    ScoreFunction,
    check_score_function,
    default_compute_score,
    get_custom_reward_fn,
)
from burnish.reward.result import RewardResult, Score, read_score
from burnish.reward.shaping import check_overlong_buffer, punish_overlong, with_acc
from burnish.utils.console import console
from burnish.utils.errors import RewardError
from burnish.utils.foreign_code import Caught
from burnish.utils.registry import Registry

logger = logging.getLogger(__name__)


class RewardManager(Protocol):
    """Scores a batch that holds ``responses`` and ``response_mask`` [batch, response] and, of the dataset,
    ``data_source``, ``reward_model`` and ``extra_info``."""

    def __call__(self, data: DataProto) -> RewardResult: ...


RewardManagerFactory = Callable[..., RewardManager]

REWARD_MANAGERS: Registry[RewardManagerFactory] = Registry("reward manager", "reward.reward_manager.name")


def register_reward_manager(name: str) -> Callable[[RewardManagerFactory], RewardManagerFactory]:
    """Decorator that makes a manager class known as ``reward.reward_manager.name=<name>``."""
    return REWARD_MANAGERS.register(name)


def get_reward_manager_cls(name: str) -> RewardManagerFactory:
    """The manager class called ``name``, or named as ``package.module:attribute``.

    Raises:
        ConfigError: there is none.
    """
    return REWARD_MANAGERS.get(name)


def load_reward_manager(
    config: RewardConfig,
    tokenizer: PreTrainedTokenizerBase,
    num_examine: int = 0,
    compute_score: ScoreFunction | None = None,
) -> RewardManager:
    """The manager that the ``reward`` section names, with ``compute_score``, else the custom function of the section,
    else the built-in functions.

    Raises:
        ConfigError: the manager or the custom function cannot be loaded.
    """
    function = compute_score or get_custom_reward_fn(config) or default_compute_score
    manager_cls = get_reward_manager_cls(config.reward_manager.name)
    return manager_cls(tokenizer=tokenizer, compute_score=function, config=config, num_examine=num_examine)


@register_reward_manager("naive")
class NaiveRewardManager:
    """Calls ``compute_score(data_source=, solution_str=, ground_truth=, extra_info=)`` for each response, one after the
    other; where it is asynchronous, for all of them at once.

    The function returns a number, a bool, None (no score: the row is not trained on), or a dict with one of these under
    "score" and further values to be logged. What it raises, and what it returns that is no score, counts as a failure
    of that row (``reward.on_error``): ``abstain`` gives the row no score, counts it and logs the first traceback of
    each call; ``raise`` stops. NaN and infinities are no score either, and are counted.

    With ``reward.reward_kwargs.overlong_buffer_cfg.enable`` long responses are punished, see `punish_overlong`.

    Args:
        num_examine: responses of each data source that are printed, over the manager's life.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        compute_score: ScoreFunction | None = None,
        config: RewardConfig | None = None,
        num_examine: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.compute_score = compute_score or default_compute_score
        self.config = config or RewardConfig()
        self.num_examine = num_examine
        self._examined: dict[str, int] = {}
        check_score_function(self.compute_score)
        if self.config.reward_kwargs.overlong_buffer_cfg.enable:
            check_overlong_buffer(self.config.reward_kwargs)

    def __call__(self, data: DataProto) -> RewardResult:
        """Scores every row of ``data``.

        Raises:
            RewardError: a row failed under ``reward.on_error=raise``, or every row failed.
        """
        if data.batch is None:
            raise RewardError("The batch has no tensors, so no responses to score.")
        rows = self._read_rows(data.batch, data.non_tensor_batch)
        scores = self._score_all(rows)
        self._check_failures(scores)
        self._examine(rows, scores)
        last_token = _last_token(data.batch["response_mask"])
        return _to_result(self._shape(scores, last_token + 1), last_token, data.batch["response_mask"].shape)

    def _shape(self, scores: list[Score], lengths: torch.Tensor) -> list[Score]:
        """What is made of the function's scores, given each response's length [batch]."""
        kwargs = self.config.reward_kwargs
        return punish_overlong(scores, lengths, kwargs) if kwargs.overlong_buffer_cfg.enable else scores

    def _read_rows(self, batch: TensorDict, columns: dict[str, np.ndarray]) -> list[dict[str, Any]]:
        """The arguments of the reward function, row by row."""
        last_token = _last_token(batch["response_mask"]).tolist()
        texts = [
            self.tokenizer.decode(response[: last + 1], skip_special_tokens=True)
            for response, last in zip(batch["responses"].tolist(), last_token, strict=True)
        ]
        none = np.full(len(texts), None, dtype=object)
        return [
            {
                "data_source": source or "unknown",
                "solution_str": text,
                # Copies: the n responses to a prompt share the row, and a function may write into what it gets.
                "ground_truth": _own_containers((reward_model or {}).get("ground_truth")),
                "extra_info": _own_containers(extra_info or {}),
            }
            for text, source, reward_model, extra_info in zip(
                texts,
                columns.get("data_source", none),
                columns.get("reward_model", none),
                columns.get("extra_info", none),
                strict=True,
            )
        ]

    def _score_all(self, rows: list[dict[str, Any]]) -> list[Score]:
        returned = [self._call(row) for row in rows]
        waiting = [i for i, value in enumerate(returned) if inspect.isawaitable(value)]
        if waiting:
            outcomes = _await_all([returned[i] for i in waiting])
            for i, outcome in zip(waiting, outcomes, strict=True):
                returned[i] = outcome
        return [self._to_score(value) for value in returned]

    def _call(self, row: dict[str, Any]) -> Any:
        """What the function returns for a row, or the exception that it raised."""
        with Caught() as caught:
            return self.compute_score(**row)
        return caught.error

    def _to_score(self, returned: Any) -> Score:
        error = returned if isinstance(returned, BaseException) else None
        if error is None:
            try:
                return read_score(returned)
            except RewardError as unreadable:
                error = unreadable
        if self.config.on_error == "raise" or not isinstance(error, Exception):
            raise RewardError(f"The reward function failed: {_in_words(error)} (reward.on_error=raise).") from error
        return Score(value=None, reason="error", error=error)

    def _check_failures(self, scores: list[Score]) -> None:
        errors = [score.error for score in scores if score.error is not None]
        if errors:
            logger.warning(
                "The reward function failed on %d of %d rows, which are not trained on (reward.on_error=abstain). The "
                "first:",
                *(len(errors), len(scores)),
                exc_info=errors[0],
            )
        num_lost = sum(score.reason in ("error", "non_finite") for score in scores)
        if scores and num_lost == len(scores):
            what = f"first {_in_words(errors[0])}" if errors else "it returned NaN or an infinity each time"
            raise RewardError(f"The reward function failed on all {num_lost} rows: {what}.") from (
                errors[0] if errors else None
            )

    def _examine(self, rows: list[dict[str, Any]], scores: list[Score]) -> None:
        for row, score in zip(rows, scores, strict=True):
            source = row["data_source"]
            if self._examined.get(source, 0) >= self.num_examine:
                continue
            self._examined[source] = self._examined.get(source, 0) + 1
            console.print(f"[{source}] score {score.value}, truth {row['ground_truth']!r}\n{row['solution_str']}")


@register_reward_manager("dapo")
class DAPORewardManager(NaiveRewardManager):
    """As `NaiveRewardManager`, and every score is also the extra ``acc``, as it was before any punishment of length:
    what dynamic sampling compares, and what validation reports (DAPO, arXiv:2503.14476)."""

    def _shape(self, scores: list[Score], lengths: torch.Tensor) -> list[Score]:
        return super()._shape(with_acc(scores), lengths)


def _own_containers(value: Any) -> Any:
    """``value`` with dicts and lists of its own, at any depth."""
    if isinstance(value, dict):
        return {key: _own_containers(entry) for key, entry in value.items()}
    return [_own_containers(entry) for entry in value] if isinstance(value, list) else value


def _last_token(response_mask: torch.Tensor) -> torch.Tensor:
    """Index of the last token that the policy sampled [batch], -1 where there is none; tool output lies before it."""
    numbered = response_mask.bool().cpu() * torch.arange(1, response_mask.shape[1] + 1)
    # The column of zeros in front keeps the maximum defined for responses of width 0.
    return torch.nn.functional.pad(numbered, (1, 0)).amax(-1) - 1


def _to_result(scores: list[Score], last_token: torch.Tensor, shape: torch.Size) -> RewardResult:
    """Scores as tensors. A row without a token of the policy has no place for a score: it is not valid."""
    valid = torch.tensor([score.value is not None for score in scores], dtype=torch.bool) & (last_token >= 0)
    values = torch.tensor([score.value or 0.0 for score in scores], dtype=torch.float32)
    token_level_scores = torch.zeros(shape, dtype=torch.float32)
    rows = valid.nonzero().squeeze(-1)
    token_level_scores[rows, last_token[rows]] = values[rows]
    extras: dict[str, np.ndarray] = {}
    for i, score in enumerate(scores):
        for name, value in score.extras.items():
            extras.setdefault(name, np.full(len(scores), None, dtype=object))[i] = value
    counts = {reason: sum(score.reason == reason for score in scores) for reason in ("abstain", "error", "non_finite")}
    metrics = {f"reward/{reason}_count": float(count) for reason, count in counts.items()}
    return RewardResult(token_level_scores=token_level_scores, valid=valid, extras=extras, metrics=metrics)


def _await_all(calls: list[Awaitable[Any]]) -> list[Any]:
    """What the calls return, exceptions among it; they run at once."""

    async def gather() -> list[Any]:
        return list(await asyncio.gather(*calls, return_exceptions=True))

    return asyncio.run_coroutine_threadsafe(gather(), _event_loop()).result()


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for the life of the process, since a client that a reward function keeps from call to call belongs to
    the loop it was first used in; in a thread of its own, since the caller may run in a loop itself."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="asynchronous reward functions", daemon=True).start()
    return loop


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
