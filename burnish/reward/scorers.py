"""Where a reward function is called: here, or in processes."""

import asyncio
import inspect
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from burnish.config.reward import RewardConfig
from burnish.reward.background import run_in_background
from burnish.reward.compute_score import default_compute_score, score_function
from burnish.reward.outcome import Outcome, one_line
from burnish.reward.pool import RewardPool
from burnish.reward.travel import pack
from burnish.utils import env, progress
from burnish.utils.errors import RewardError

_MOST_WORKERS = 8
_IN_THE_DRIVER = frozenset({"gsm8k", "arithmetic", "choice", "search_qa"})
"""Built-in functions that read a response once, in microseconds: none of them can hang."""


class Scorer(Protocol):
    """Calls a reward function for rows, which are its keyword arguments; `RewardPool` is one."""

    def submit(self, key: Hashable, row: dict[str, Any]) -> None:
        """Takes on a row, under a key of the caller's."""

    def collect(self, keys: Iterable[Hashable]) -> dict[Hashable, Outcome]:
        """The outcomes of rows that were submitted; waits for them."""

    def score(self, rows: Sequence[dict[str, Any]]) -> list[Outcome]:
        """The outcomes of rows, in their order."""

    def close(self) -> None:
        """Gives back what it holds."""


class InDriver:
    """Calls the function in this process when outcomes are asked for: one row after the other, asynchronous ones at
    once. There is no time limit, and a crash is the driver's."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._rows: dict[Hashable, dict[str, Any]] = {}

    def submit(self, key: Hashable, row: dict[str, Any]) -> None:
        """Keeps the row until its outcome is asked for."""
        if key in self._rows:
            raise RewardError(f"The reward of {key!r} is being computed already; keys must differ.")
        self._rows[key] = row

    def collect(self, keys: Iterable[Hashable]) -> dict[Hashable, Outcome]:
        """Calls the function for these rows."""
        keys = list(keys)
        missing = [key for key in keys if key not in self._rows]
        if missing:
            raise RewardError(f"No row was submitted under {missing[0]!r}, or its outcome was collected already.")
        return dict(zip(keys, self.score([self._rows.pop(key) for key in keys]), strict=True))

    def score(self, rows: Sequence[dict[str, Any]]) -> list[Outcome]:
        """Calls the function for each of ``rows``."""
        started = [self._start(row) for row in rows]
        waiting = [i for i, entry in enumerate(started) if not isinstance(entry, Outcome)]
        if waiting:
            for i, outcome in zip(waiting, run_in_background(_gather([started[i] for i in waiting])), strict=True):
                started[i] = outcome
        return started

    def close(self) -> None:
        """Nothing is held."""

    def _start(self, row: dict[str, Any]) -> Any:
        """The outcome, or what to await for the value."""
        begun = time.perf_counter()
        try:
            # Copies: the responses to a prompt share the row, and a function may write into what it gets.
            value = self.function(**own_containers(row))
        except Exception as error:  # noqa: BLE001  the user's function may raise anything
            return _raised(error, begun)
        progress.tick()
        return value if inspect.isawaitable(value) else Outcome(value, seconds=time.perf_counter() - begun)


class ByDataSource:
    """The built-in functions: those that cannot hang are called here, the others in processes, which start when a row
    needs them."""

    def __init__(self, function: Callable[..., Any], make_pool: Callable[[], RewardPool]) -> None:
        self._here = InDriver(function)
        self._make_pool = make_pool
        self._pool: RewardPool | None = None
        self._of: dict[Hashable, Scorer] = {}

    def submit(self, key: Hashable, row: dict[str, Any]) -> None:
        """Begins with a row that a process scores; keeps one that is scored here."""
        scorer = self._scorer(row)
        scorer.submit(key, row)
        self._of[key] = scorer

    def collect(self, keys: Iterable[Hashable]) -> dict[Hashable, Outcome]:
        """The outcomes of rows, of whichever kind."""
        by_scorer: dict[Scorer, list[Hashable]] = {}
        for key in keys:
            by_scorer.setdefault(self._of.pop(key, self._here), []).append(key)
        outcomes: dict[Hashable, Outcome] = {}
        for scorer, theirs in by_scorer.items():
            outcomes |= scorer.collect(theirs)
        return outcomes

    def score(self, rows: Sequence[dict[str, Any]]) -> list[Outcome]:
        """The outcomes of rows, in their order."""
        keys = [object() for _ in rows]
        for key, row in zip(keys, rows, strict=True):
            self.submit(key, row)
        outcomes = self.collect(keys)
        return [outcomes[key] for key in keys]

    def close(self) -> None:
        """Ends the processes, if any started."""
        if self._pool is not None:
            self._pool.close()

    def _scorer(self, row: dict[str, Any]) -> Scorer:
        if _file_of(row["data_source"]) in _IN_THE_DRIVER:
            return self._here
        if self._pool is None:
            self._pool = self._make_pool()
        return self._pool


def make_scorer(function: Callable[..., Any], config: RewardConfig) -> Scorer:
    """What calls ``function``, by ``reward.num_workers``.

    Raises:
        ConfigError: the function cannot travel into a process.
    """
    workers = config.num_workers
    if workers == 0:
        return InDriver(function)

    if workers == "auto" and is_built_in(function):
        return ByDataSource(function, lambda: make_pool(function, config))
    return make_pool(function, config)


def make_pool(function: Callable[..., Any], config: RewardConfig, *, num_workers: int | None = None) -> RewardPool:
    """Processes for ``function``, as many as `num_processes` says, or ``num_workers``.

    Raises:
        ConfigError: the function cannot travel into a process.
    """
    return RewardPool(
        function,
        num_workers=num_workers or num_processes(config, function),
        timeout=config.timeout,
        memory_limit_mb=config.memory_limit_mb,
    )


def num_processes(config: RewardConfig, function: Callable[..., Any]) -> int:
    """Processes of a pool for ``function``; one that waits for others, in an event loop, may say that it needs fewer than
    there are CPUs (``most_workers``)."""
    if config.num_workers != "auto":
        return int(config.num_workers)
    return min(_MOST_WORKERS, env.num_cpus(), getattr(function, "most_workers", _MOST_WORKERS))


def check_can_travel(function: Callable[..., Any], config: RewardConfig) -> None:
    """Checks that ``function`` can be called where ``reward.num_workers`` wants it, without starting anything.

    Raises:
        ConfigError: it cannot travel into a process; says what to do.
    """
    if config.num_workers != 0 and not is_built_in(function):
        pack(function)


def is_built_in(function: Any) -> bool:
    """Whether this is `default_compute_score`, with arguments bound or not."""
    while isinstance(function, partial):
        function = function.func
    return function is default_compute_score


def _file_of(data_source: str) -> str:
    """The file of the built-in function; for an unknown source one of those that are called here, where it says so."""
    try:
        return score_function(data_source).__module__.rpartition(".")[2]
    except RewardError:
        return "gsm8k"


def own_containers(value: Any) -> Any:
    """``value`` with dicts and lists of its own, at any depth."""
    if isinstance(value, dict):
        return {key: own_containers(entry) for key, entry in value.items()}
    return [own_containers(entry) for entry in value] if isinstance(value, list) else value


async def _gather(calls: list[Any]) -> list[Outcome]:
    async def one(call: Any) -> Outcome:
        begun = time.perf_counter()
        try:
            outcome = Outcome(await call, seconds=time.perf_counter() - begun)
            progress.tick()
            return outcome
        except Exception as error:  # noqa: BLE001  the user's function may raise anything
            return _raised(error, begun)

    return list(await asyncio.gather(*map(one, calls)))


def _raised(error: Exception, begun: float) -> Outcome:
    trace = "".join(traceback.format_exception(error))
    return Outcome(error=one_line(error), traceback=trace, kind="raised", seconds=time.perf_counter() - begun)
