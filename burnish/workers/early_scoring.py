"""Rewards that are computed while generation still runs."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from burnish.protocol import DataProto, object_array
from burnish.reward.scorers import Scorer, num_processes
from burnish.rollout import RolloutRequest, RolloutResponse

PROMPT_COLUMNS = ("data_source", "reward_model", "extra_info", "raw_prompt")
"""Columns of the dataset that a reward manager makes the function's arguments of."""
_calls = itertools.count()


def shared_manager(manager: Any, *, per_node: int, in_all: int) -> Any:
    """A manager as one of several processes that sample has it, with its part of the reward processes and of the limits.

    Args:
        per_node: processes of one node that score.
        in_all: those of all nodes.
    """
    if in_all == 1:
        return manager
    manager = copy.copy(manager)
    manager.num_sharing = in_all
    if per_node > 1 and manager.config.num_workers != 0:
        manager.config = copy.copy(manager.config)
        manager.config.num_workers = max(1, num_processes(manager.config, manager.compute_score) // per_node)
    return manager


class EarlyScoring:
    """Scores the responses to one batch of prompts, each as soon as it is finished.

    Args:
        manager: makes the function's arguments of a response (``row_of``).
        scorer: of that manager; calls the function.
        prompts: the batch, with `PROMPT_COLUMNS` as far as the dataset has them.
        requests: its rows, as the rollout got them.
        num_padding: of the last rows, which only make a batch divisible: nobody reads their scores, and a judge's cost money.
    """

    def __init__(
        self,
        manager: Any,
        scorer: Scorer,
        prompts: DataProto,
        requests: Sequence[RolloutRequest],
        num_padding: int = 0,
    ) -> None:
        self._manager, self._scorer = manager, scorer
        self._columns = prompts.non_tensor_batch
        self._row = {request.request_id: row for row, request in enumerate(requests)}
        self._num_scored = len(requests) - num_padding
        self._call = next(_calls)
        self._submitted: set[int] = set()

    def submit(self, response: RolloutResponse) -> None:
        """Begins to score a response that is finished, cut short or not; a second time it does nothing."""
        row = self._row[response.request_id]
        if row in self._submitted or row >= self._num_scored:
            return
        self._submitted.add(row)
        source, reward_model, extra_info, prompt = (
            self._columns[name][row] if name in self._columns else None for name in PROMPT_COLUMNS
        )
        arguments = self._manager.row_of(response.token_ids, source, reward_model, extra_info, prompt=prompt)
        self._scorer.submit((self._call, row), arguments)

    def collect(self, responses: Sequence[RolloutResponse]) -> tuple[np.ndarray, float]:
        """The outcome of every response, an object array in the order of the rows (None for padding), and the seconds that
        were waited for it.

        An engine of somebody's own may have told of no response: what was not submitted is scored now.
        """
        start = time.perf_counter()
        for response in responses:
            self.submit(response)
        keys = [(self._call, self._row[response.request_id]) for response in responses]
        outcomes = self._scorer.collect([key for key in keys if key[1] < self._num_scored])
        return object_array([outcomes.get(key) for key in keys]), time.perf_counter() - start
