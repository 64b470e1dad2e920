"""The manager that calls the reward function once for all responses."""

from collections.abc import Mapping, Sequence
from typing import Any

from burnish.reward.compute_score import ScoreFunction, check_takes
from burnish.reward.managers.base import BaseRewardManager, register_reward_manager
from burnish.reward.outcome import Outcome
from burnish.reward.scorers import InDriver, Scorer, check_can_travel, is_built_in, make_pool
from burnish.utils.errors import ConfigError

_SIGNATURE = "data_sources, solution_strs, ground_truths and extra_infos"


@register_reward_manager("batch")
class BatchRewardManager(BaseRewardManager):
    """Calls ``compute_score(data_sources=, solution_strs=, ground_truths=, extra_infos=)`` once for a batch, with lists of
    one entry a response; it returns a list of what reward functions return, in that order.

    The call runs in a process of its own, and ``reward.timeout`` is for all of it. Where it fails, every row failed, which
    stops the run. It begins when all responses are there.
    """

    def scorer(self) -> Scorer | None:
        """None: the function needs the whole batch."""
        return None

    def score_rows(self, rows: Sequence[dict[str, Any]]) -> list[Outcome]:
        """What the function says of each of ``rows``, in their order."""
        if not rows:
            return []
        if self._scorer is None:
            in_driver = self.config.num_workers == 0
            self._scorer = (
                InDriver(self.compute_score) if in_driver else make_pool(self.compute_score, self.config, num_workers=1)
            )
        (outcome,) = self._scorer.score([_as_lists(rows)])
        return _of_each_row(outcome, len(rows))

    def _check_function(self) -> None:
        check_batch_function(self.compute_score)
        check_can_travel(self.compute_score, self.config)


def check_batch_function(
    function: ScoreFunction, name: str = "reward_fn", reward_kwargs: Mapping[str, Any] | None = None
) -> None:
    """Checks that ``function`` takes the lists that the batch manager calls it with, and ``reward_kwargs`` besides.

    Raises:
        ConfigError: it is not callable or takes other arguments.
    """
    if is_built_in(function):
        raise ConfigError(
            "reward.reward_manager.name=batch needs a function of your own that takes all responses at once: "
            f"reward.custom_reward_function.path=my_reward.py with compute_score({_SIGNATURE})."
        )
    keywords: dict[str, Any] = {"data_sources": [], "solution_strs": [], "ground_truths": [], "extra_infos": []}
    check_takes(
        function,
        keywords,
        reward_kwargs,
        name,
        f"reward.reward_manager.name=batch calls a reward function with the keywords {_SIGNATURE}, lists of one entry a response",
        "take another manager, which calls it for each response",
    )


def _as_lists(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "data_sources": [row["data_source"] for row in rows],
        "solution_strs": [row["solution_str"] for row in rows],
        "ground_truths": [row["ground_truth"] for row in rows],
        "extra_infos": [row["extra_info"] for row in rows],
    }


def _of_each_row(outcome: Outcome, num_rows: int) -> list[Outcome]:
    """The outcome of the one call as those of its rows."""
    values = outcome.value
    if outcome.error is not None:
        return [outcome] * num_rows
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple) or len(values) != num_rows:
        found = (
            f"{len(values)} scores" if isinstance(values, list | tuple) else f"{type(values).__name__} ({values!r:.80})"
        )
        error = f"RewardError: the reward function returned {found} for {num_rows} responses; a list of one each is expected"
        return [Outcome(error=error, kind="raised", seconds=outcome.seconds)] * num_rows
    return [Outcome(value, seconds=outcome.seconds / num_rows) for value in values]
