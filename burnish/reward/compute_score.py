"""Which function scores a response: by data source, or the user's own."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from burnish.config.reward import RewardConfig
from burnish.reward.functions import arithmetic, gsm8k
from burnish.utils.errors import ConfigError, RewardError
from burnish.utils.extern import load_attribute

ScoreFunction = Callable[..., Any]

# Data source -> function(solution_str, ground_truth). A function for another kind of answer gets its line here.
SCORE_FUNCTIONS: dict[str, ScoreFunction] = {
    "openai/gsm8k": gsm8k.compute_score,
    "burnish/arithmetic": arithmetic.compute_score,
}


class Rows(Protocol):
    """What `check_data_sources` needs of a dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> dict[str, Any]: ...


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float | dict[str, Any]:
    """The score of a response by the built-in function of its data source.

    Raises:
        RewardError: no function for ``data_source``, or a ground truth that it cannot use.
    """
    if data_source not in SCORE_FUNCTIONS:
        raise RewardError(_unknown_source(data_source))
    return SCORE_FUNCTIONS[data_source](solution_str, ground_truth)


def check_data_sources(dataset: Rows, reward_fn: Any = default_compute_score) -> None:
    """Scores an empty response to every row, so that an unknown data source or a ground truth that is of no use is
    found before training. Built-in functions only: nothing is done where ``reward_fn``, a reward manager or a function,
    scores by a function of the user's own.

    Raises:
        RewardError: names the row (its file and number where the dataset has a ``location`` method) and what is known.
    """
    if getattr(reward_fn, "compute_score", reward_fn) is not default_compute_score:
        return
    location = getattr(dataset, "location", lambda position: f"row {position} of the dataset")
    for position in range(len(dataset)):
        row = dataset[position]
        try:
            default_compute_score(
                row.get("data_source") or "unknown", "", (row.get("reward_model") or {}).get("ground_truth")
            )
        except RewardError as error:
            raise RewardError(f"{location(position)}: {error}") from error


def get_custom_reward_fn(config: RewardConfig) -> ScoreFunction | None:
    """The function that ``reward.custom_reward_function`` names, its ``reward_kwargs`` bound; None if it names none.

    Raises:
        ConfigError: the file or the function is not there, or it cannot be called as reward functions are.
    """
    custom = config.custom_reward_function
    if custom.path is None:
        if custom.reward_kwargs:
            raise ConfigError(
                "reward.custom_reward_function.reward_kwargs is set, but no reward.custom_reward_function.path."
            )
        return None
    key = "reward.custom_reward_function"
    function = load_attribute(custom.path, custom.name, key=f"{key}.path")
    if inspect.isclass(function):
        function = _instance(function, f"{key}.name={custom.name}")
    check_score_function(function, f"{key}.name={custom.name}", custom.reward_kwargs)
    return functools.partial(function, **custom.reward_kwargs) if custom.reward_kwargs else function


def _instance(cls: type, name: str) -> Any:
    """A class with ``__call__`` is made once, without arguments."""
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise ConfigError(
            f"{name}: this class is made without arguments, but its constructor is {inspect.signature(cls)}: {error}. "
            f"Give them defaults; reward_kwargs go to each call."
        ) from error
    return cls()


def check_score_function(
    function: ScoreFunction, name: str = "reward_fn", reward_kwargs: Mapping[str, Any] | None = None
) -> None:
    """Checks that ``function`` takes the keywords that reward functions are called with, and ``reward_kwargs`` besides.

    Raises:
        ConfigError: it is not callable or takes other arguments.
    """
    if not callable(function):
        raise ConfigError(f"{name}: this is {type(function).__name__}, not a function.")
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Some builtins do not say what they take.
        return
    try:
        signature.bind(data_source="", solution_str="", ground_truth=None, extra_info={}, **(reward_kwargs or {}))
    except TypeError as error:
        raise ConfigError(
            f"{name}: a reward function is called with the keywords data_source, solution_str, ground_truth and "
            f"extra_info{' and those of reward_kwargs' if reward_kwargs else ''}, but this one is {signature}: "
            f"{error}. Name its parameters so, or take the rest as **kwargs."
        ) from error


def _unknown_source(data_source: str) -> str:
    return (
        f"There is no built-in reward function for the data source {data_source!r} (column data.reward_fn_key). Known: "
        f"{', '.join(sorted(SCORE_FUNCTIONS))}. Use your own: reward.custom_reward_function.path=my_reward.py with a "
        f"function compute_score(data_source, solution_str, ground_truth, extra_info), or reward_fn= in burnish.train."
    )
