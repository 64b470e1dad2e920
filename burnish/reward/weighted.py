"""Several reward functions as one: the weighted sum of their scores."""

import asyncio
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from burnish.config.reward import RewardConfig
from burnish.reward.compute_score import check_score_function
from burnish.reward.outcome import one_line
from burnish.reward.score import Score, read_score
from burnish.reward.travel import FileFunction, is_async
from burnish.utils.errors import ConfigError, RewardError

_KEY = "reward.functions"
_FIELDS = ("path", "name", "weight", "reward_kwargs")


@dataclasses.dataclass(frozen=True)
class Part:
    """One of several functions."""

    function: Callable[..., Any]
    weight: float


class WeightedSum:
    """A reward function: sum of weight x score over ``parts``, by name. Each score is also the extra of that name, and what
    a function returns besides is ``<name>/<extra>``.

    A row of which one function says None has no score; one that raises fails the row. Asynchronous functions of a row run at
    once.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.parts = dict(parts)
        self.is_async = any(is_async(part.function) for part in self.parts.values())
        self.takes_prompt = any(_takes_prompt(part.function) for part in self.parts.values())

    def __call__(self, **row: Any) -> Any:
        """The dict for a row, or where a function is asynchronous what to await for it."""
        started = {name: self._start(name, part, row) for name, part in self.parts.items()}
        if any(inspect.isawaitable(value) for value in started.values()):
            return self._finish(started)
        return self._sum({name: _read(name, value) for name, value in started.items()})

    def _start(self, name: str, part: Part, row: dict[str, Any]) -> Any:
        if not _takes_prompt(part.function):
            row = {key: value for key, value in row.items() if key != "prompt"}
        try:
            return part.function(**row)
        except Exception as error:
            raise _failed(name, error) from error

    async def _finish(self, started: dict[str, Any]) -> dict[str, Any]:
        async def one(name: str, value: Any) -> Score:
            if inspect.isawaitable(value):
                try:
                    value = await value
                except Exception as error:
                    raise _failed(name, error) from error
            return _read(name, value)

        scores = await asyncio.gather(*(one(name, value) for name, value in started.items()))
        return self._sum(dict(zip(started, scores, strict=True)))

    def _sum(self, scores: dict[str, Score]) -> dict[str, Any]:
        returned: dict[str, Any] = {}
        total: float | None = 0.0
        for name, score in scores.items():
            returned[name] = score.value if score.reason != "non_finite" else math.nan
            returned |= {f"{name}/{extra}": value for extra, value in score.extras.items()}
            if score.reason == "abstain":
                total = None
            elif total is not None:
                total += self.parts[name].weight * returned[name]
        return returned | {"score": total}


def get_weighted_reward_fn(config: RewardConfig) -> WeightedSum | None:
    """The functions that ``reward.functions`` names, as one; None if it names none.

    Raises:
        ConfigError: a function cannot be loaded, or what is said of it is of no use; names the key.
    """
    if not config.functions:
        return None
    if config.custom_reward_function.path is not None:
        raise ConfigError(
            f"{_KEY} and reward.custom_reward_function.path={config.custom_reward_function.path} are both set, and each "
            f"says what the score is. Move the custom function under {_KEY}.<name>.path."
        )
    return WeightedSum({name: _part(name, entry) for name, entry in config.functions.items()})


def _part(name: str, entry: Any) -> Part:
    key = f"{_KEY}.{name}"
    if name == "score" or "/" in name:
        raise ConfigError(
            f"{key}: this name is not free, since the scores are logged under it. Choose another, without '/'."
        )
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"{key}={entry!r}: this is no function. Set {key}.path=my_reward.py, and {key}.weight if it is not 1."
        )
    unknown = [field for field in entry if field not in _FIELDS]
    if unknown:
        known = ", ".join(f"{key}.{field}" for field in _FIELDS)
        raise ConfigError(f"{key}.{unknown[0]}: there is no such key. There is: {known}.")
    path, weight, kwargs = entry.get("path"), entry.get("weight", 1.0), entry.get("reward_kwargs") or {}
    if not isinstance(path, str):
        raise ConfigError(f"{key}.path={path!r}: the Python file of the function is needed, or pkg://package.module.")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
        raise ConfigError(f"{key}.weight={weight!r}: a finite number is needed.")
    if not isinstance(kwargs, Mapping):
        raise ConfigError(f"{key}.reward_kwargs={kwargs!r}: a dict of arguments is needed.")
    function = FileFunction(path, str(entry.get("name") or "compute_score"), dict(kwargs), key=f"{key}.path")
    check_score_function(function, f"{key}.name={function.name}")
    return Part(function, float(weight))


def _takes_prompt(function: Any) -> bool:
    return bool(getattr(function, "takes_prompt", False))


def _read(name: str, returned: Any) -> Score:
    try:
        score = read_score(returned)
    except RewardError as error:
        raise _failed(name, error) from error
    if score.parts:
        raise RewardError(
            f"{_KEY}.{name} returned a list of numbers. Of several functions each gives one number a response; a list per token "
            f"or turn is for a function alone, reward.custom_reward_function."
        )
    return score


def _failed(name: str, error: Exception) -> RewardError:
    return RewardError(f"{_KEY}.{name}: {one_line(error)}")
