"""What reward managers have in common: rows of a batch, what failed, and the result."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from burnish.config.reward import RewardConfig
from burnish.protocol import DataProto
from burnish.reward.compute_score import ScoreFunction, check_score_function, default_compute_score
from burnish.reward.outcome import Outcome
from burnish.reward.placement import last_tokens, to_result, turn_ends
from burnish.reward.result import RewardResult
from burnish.reward.score import Score, read_score
from burnish.reward.scorers import Scorer, check_can_travel, make_scorer
from burnish.reward.shaping import check_overlong_buffer, punish_overlong
from burnish.utils.console import console
from burnish.utils.errors import RewardError
from burnish.utils.registry import Registry

logger = logging.getLogger("burnish.reward")

OUTCOME_COLUMN = "reward_outcome"
"""Object array of `Outcome`: what the reward function said while generation was still running."""
_LOST = ("error", "timeout", "non_finite")


class RewardManager(Protocol):
    """Scores a batch that holds ``responses`` and ``response_mask`` [batch, response] and, of the dataset,
    ``data_source``, ``reward_model`` and ``extra_info``."""

    def __call__(self, data: DataProto) -> RewardResult: ...


RewardManagerFactory = Callable[..., RewardManager]

REWARD_MANAGERS: Registry[RewardManagerFactory] = Registry("reward manager", "reward.reward_manager.name")


def register_reward_manager(name: str) -> Callable[[RewardManagerFactory], RewardManagerFactory]:
    """Decorator that makes a manager class known as ``reward.reward_manager.name=<name>``."""
    return REWARD_MANAGERS.register(name)


class BaseRewardManager:
    """Calls ``compute_score(data_source=, solution_str=, ground_truth=, extra_info=)`` for each response, where
    ``reward.num_workers`` says, and makes scores of what it returns.

    Returned is what `read_score` reads. What the function raises, what it returns that is no score, a row that took longer
    than ``reward.timeout`` and one that ended its process count as failures of that row, as do NaN and infinities:
    ``reward.on_error`` says what becomes of them. When every row of a batch fails, that is an error under any setting.

    With ``reward.reward_kwargs.overlong_buffer_cfg.enable`` long responses are punished, see `punish_overlong`.

    A manager may travel to another process as long as its function may; it starts processes of its own there.

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
        self._scorer: Scorer | None = None
        self._told_of_none = False
        self._check_function()
        if self.config.reward_kwargs.overlong_buffer_cfg.enable:
            check_overlong_buffer(self.config.reward_kwargs)

    def __call__(self, data: DataProto) -> RewardResult:
        """Scores every row of ``data``; where it has the column ``reward_outcome``, by what that says.

        Raises:
            RewardError: a row failed under ``reward.on_error=raise``, every row failed, or no reward process can start.
        """
        if data.batch is None:
            raise RewardError("The batch has no tensors, so no responses to score.")
        mask = data.batch["response_mask"]
        early = data.non_tensor_batch.get(OUTCOME_COLUMN)
        outcomes = self.score_rows(self.rows_of(data)) if early is None else list(early)
        scores = self.to_scores(outcomes, data)
        self._examine(data, scores)
        return to_result(self._shape(scores, last_tokens(mask) + 1), mask)

    def row_of(
        self, response_ids: list[int], data_source: Any, reward_model: Any, extra_info: Any, prompt: Any = None
    ) -> dict[str, Any]:
        """The keyword arguments of the reward function for one response.

        Args:
            response_ids: the response up to and including the last token that the policy sampled.
            data_source, reward_model, extra_info: the dataset's columns; None where it has none.
            prompt: the prompt as the dataset has it (``raw_prompt``), for functions with ``takes_prompt``.
        """
        row = {
            "data_source": data_source or "unknown",
            "solution_str": self.tokenizer.decode(response_ids, skip_special_tokens=True),
            "ground_truth": _as_json((reward_model or {}).get("ground_truth")),
            "extra_info": _as_json(extra_info or {}),
        }
        return row | {"prompt": _as_json(prompt)} if getattr(self.compute_score, "takes_prompt", False) else row

    def rows_of(self, data: DataProto) -> list[dict[str, Any]]:
        """`row_of` every response of a batch."""
        return [self._row(data, i, last) for i, last in enumerate(last_tokens(data.tensors["response_mask"]).tolist())]

    def scorer(self) -> Scorer | None:
        """What calls the function for single rows, while generation runs or after; it starts now if it is processes. None
        where a manager needs whole batches."""
        if self._scorer is None:
            self._scorer = make_scorer(self.compute_score, self.config)
        return self._scorer

    def score_rows(self, rows: Sequence[dict[str, Any]]) -> list[Outcome]:
        """What became of the reward function's calls, in the order of ``rows``."""
        scorer = self.scorer()
        assert scorer is not None
        return scorer.score(rows)

    def close(self) -> None:
        """Ends the reward processes, if there are any."""
        if self._scorer is not None:
            self._scorer.close()
            self._scorer = None

    def to_scores(self, outcomes: Sequence[Outcome], data: DataProto) -> list[Score]:
        """Outcomes as scores, with what ``reward.on_error`` makes of failures.

        Raises:
            RewardError: a row failed under ``reward.on_error=raise``, or every row failed.
        """
        mask = data.tensors["response_mask"]
        num_tokens, num_turns = mask.bool().sum(-1).tolist(), turn_ends(mask).sum(-1).tolist()
        scores = [
            _to_score(outcome, tokens, turns)
            for outcome, tokens, turns in zip(outcomes, num_tokens, num_turns, strict=True)
        ]
        self._check_failures(scores, data)
        if not self._told_of_none and all(score.reason == "abstain" for score in scores):
            self._told_of_none = True
            logger.warning(
                "The reward function returned None, which is no score, for all %d responses: none is trained on. Does it lack a "
                "return?",
                len(scores),
            )
        if self.config.on_error == "zero":
            return [_zero(score) if score.reason in _LOST else score for score in scores]
        return scores

    def _check_function(self) -> None:
        """That ``compute_score`` can be called as this manager calls it, where it calls it."""
        check_score_function(self.compute_score)
        check_can_travel(self.compute_score, self.config)

    def _shape(self, scores: list[Score], lengths: torch.Tensor) -> list[Score]:
        """What is made of the function's scores, given each response's length [batch]."""
        kwargs = self.config.reward_kwargs
        return punish_overlong(scores, lengths, kwargs) if kwargs.overlong_buffer_cfg.enable else scores

    def _row(self, data: DataProto, i: int, last: int) -> dict[str, Any]:
        columns = data.non_tensor_batch
        response = data.tensors["responses"][i, : last + 1].tolist()
        source, reward_model, extra_info, prompt = (
            columns[name][i] if name in columns else None
            for name in ("data_source", "reward_model", "extra_info", "raw_prompt")
        )
        return self.row_of(response, source, reward_model, extra_info, prompt)

    def _check_failures(self, scores: list[Score], data: DataProto) -> None:
        lost = [i for i, score in enumerate(scores) if score.reason in _LOST]
        if not lost:
            return
        first = scores[lost[0]]
        said = f"{_place(data, lost[0])}: {first.error}".rstrip(".")
        trace = f"\n{first.traceback.rstrip()}" if first.traceback else ""
        if self.config.on_error == "raise":
            raise RewardError(f"The reward function failed on {said} (reward.on_error=raise).{trace}")
        if len(lost) == len(scores):
            raise RewardError(f"The reward function failed on all {len(scores)} rows. First {said}.{trace}")
        become = "which are not trained on" if self.config.on_error == "abstain" else "which are scored 0"
        logger.warning(
            "The reward function failed on %d of %d rows, %s (reward.on_error=%s). The first is %s.%s",
            *(len(lost), len(scores), become, self.config.on_error, said, trace),
        )

    def _examine(self, data: DataProto, scores: list[Score]) -> None:
        if self.num_examine == 0:
            return
        last = last_tokens(data.tensors["response_mask"]).tolist()
        sources = data.non_tensor_batch.get("data_source", ["unknown"] * len(scores))
        for i, (source, score) in enumerate(zip(sources, scores, strict=True)):
            if self._examined.get(source, 0) < self.num_examine:
                self._examined[source] = self._examined.get(source, 0) + 1
                row = self._row(data, i, last[i])
                console.print(f"[{source}] score {score.value}, truth {row['ground_truth']!r}\n{row['solution_str']}")

    def __getstate__(self) -> dict[str, Any]:
        # Processes do not travel.
        return self.__dict__ | {"_scorer": None}


def _to_score(outcome: Outcome, num_tokens: int, num_turns: int) -> Score:
    if outcome.error is not None:
        reason = "timeout" if outcome.kind == "timeout" else "error"
        return Score(value=None, reason=reason, error=outcome.error, traceback=outcome.traceback)
    try:
        score = read_score(outcome.value)
        # A response without a token of the policy has no place for a score, whatever its length.
        if num_tokens:
            score.check_length(num_tokens, num_turns)
    except RewardError as error:
        return Score(value=None, reason="error", error=str(error))
    return score


def _zero(score: Score) -> Score:
    return Score(value=0.0, extras=score.extras, reason=score.reason, error=score.error, traceback=score.traceback)


def _place(data: DataProto, i: int) -> str:
    """Which row this is, in words."""
    columns = data.non_tensor_batch
    known = [f"{name} {columns[name][i]}" for name in ("uid", "data_source") if name in columns]
    return f"row {i} of the batch" + (f" ({', '.join(known)})" if known else "")


def _as_json(value: Any) -> Any:
    """``value`` of JSON's types where it is NumPy's, with dicts and lists of its own: the responses to a prompt share the
    row, and a function may write into what it gets."""
    if isinstance(value, dict):
        return {key: _as_json(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    return [_as_json(entry) for entry in value] if isinstance(value, list | tuple) else value
