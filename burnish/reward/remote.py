"""Rows scored by a server: what is posted to it, and what it must answer.

Posted, as JSON::

    {"rows": [{"id": "17", "data_source": "...", "solution_str": "...", "ground_truth": ..., "extra_info": {...},
               "prompt": [{"role": "user", "content": "..."}]}, ...]}

Answered, in any order, each id once::

    {"results": [{"id": "17", "score": 0.5, "acc": true}, {"id": "18", "error": "no such unit test"}]}

A ``score`` is what a reward function may return: a number, true or false, null (no score), or a list. Further names are
extras. ``error`` in place of a score is that row's failure (``reward.on_error``).
"""

import itertools
import time
from typing import Any

from burnish.config.reward_services import RemoteRewardConfig
from burnish.reward.http import JsonClient, RequestError, to_json
from burnish.reward.outcome import Outcome, one_line
from burnish.utils.errors import ConfigError, RewardError

Row = dict[str, Any]
_SHOWN = 5  # Ids that an error names.


class RemoteRewards:
    """Asks the server of ``reward.remote`` for scores.

    Raises:
        ConfigError: no address, none that is one, or a variable for the key that is not set.
    """

    takes_prompt = True
    """The manager gives it the conversation as ``prompt`` too."""

    def __init__(self, config: RemoteRewardConfig) -> None:
        if config.url is None:
            raise ConfigError(
                "reward.reward_manager.name=remote needs reward.remote.url: where the rows are posted to."
            )
        self._client = JsonClient(
            config.url,
            key="reward.remote.url",
            api_key_env=config.api_key_env,
            timeout=config.timeout,
            max_attempts=config.max_attempts,
            retry_delay=config.retry_delay,
        )
        self._numbers = itertools.count()

    async def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, prompt: Any = None
    ) -> dict[str, Any]:
        """What the server says of one response.

        Raises:
            RewardError: no score.
        """
        row = {"data_source": data_source, "solution_str": solution_str, "ground_truth": ground_truth}
        (outcome,) = await self.score([row | {"extra_info": extra_info, "prompt": prompt}])
        if outcome.error is not None:
            raise RewardError(outcome.error)
        return outcome.value

    async def score(self, rows: list[Row]) -> list[Outcome]:
        """The outcomes of ``rows``, in their order, by one request."""
        started = time.perf_counter()
        outcomes: list[Outcome | None] = [None] * len(rows)
        ids: dict[str, int] = {}
        sent = []
        for i, row in enumerate(rows):
            identity = str(next(self._numbers))
            try:
                sent.append(to_json({"id": identity, **row}))
            except RequestError as error:
                outcomes[i] = _failed(error)
            else:
                ids[identity] = i
        try:
            answer = await self._client.post(b'{"rows":[' + b",".join(sent) + b"]}") if sent else {"results": []}
            results = read_results(answer, ids, self._client.url)
        except RewardError as error:
            results = {identity: _failed(error) for identity in ids}
        hide = self._client.hide
        seconds = time.perf_counter() - started
        for identity, outcome in results.items():
            outcomes[ids[identity]] = Outcome(
                outcome.value, outcome.error and hide(outcome.error), "", outcome.kind, seconds
            )
        return [outcome for outcome in outcomes if outcome is not None]


def read_results(answer: Any, ids: Any, url: str) -> dict[str, Outcome]:
    """The outcome of each id.

    Raises:
        RewardError: the answer is not made as it must be, or an id is missing, unknown or there twice.
    """
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list) or not all(isinstance(result, dict) and "id" in result for result in results):
        raise RewardError(
            f'The reward server must answer {{"results": [{{"id": ..., "score": ...}}, ...]}}, but it answered '
            f"{str(answer)[:200]!r}."
        )
    outcomes: dict[str, Outcome] = {}
    twice, unknown = [], []
    for result in results:
        identity = str(result["id"])
        if identity in outcomes:
            twice.append(identity)
        elif identity not in ids:
            unknown.append(identity)
        outcomes[identity] = _outcome(result)
    missing = [identity for identity in ids if identity not in outcomes]
    wrong = {"not answered": missing, "answered twice": twice, "never sent": unknown}
    if any(wrong.values()):
        said = "; ".join(
            f"{what}: {', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}"
            for what, names in wrong.items()
            if names
        )
        raise RewardError(
            f"The reward server's answer to {len(ids)} rows cannot be told apart by id ({said}). None of its scores is "
            f"used: each row's id must come back once."
        )
    return outcomes


def _outcome(result: dict[str, Any]) -> Outcome:
    value = {name: entry for name, entry in result.items() if name != "id"}
    if "score" not in value and value.get("error") is not None:
        return Outcome(kind="raised", error=f"RewardError: the reward server says: {str(value['error'])[:500]}")
    return Outcome(value=value)


def _failed(error: RewardError) -> Outcome:
    is_timeout = isinstance(error, RequestError) and error.is_timeout
    return Outcome(kind="timeout" if is_timeout else "raised", error=one_line(error))
