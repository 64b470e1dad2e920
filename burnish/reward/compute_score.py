"""Which function scores a response: by data source, or the user's own."""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from burnish.config.reward import RewardConfig
from burnish.reward.travel import FileFunction
from burnish.utils.errors import ConfigError, RewardError
from burnish.utils.extern import load_attribute

ScoreFunction = Callable[..., Any]

SCORE_FUNCTIONS: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    "burnish/arithmetic": "arithmetic",
    "lighteval/MATH": "hendrycks_math",
    "DigitalLearningGmbH/MATH-lighteval": "hendrycks_math",
    "HuggingFaceH4/MATH-500": "hendrycks_math",
    "hendrycks/competition_math": "hendrycks_math",
    "numina_*": "hendrycks_math",
    "math": "dapo_math",
    "math_dapo*": "dapo_math",
    "aime*": "dapo_math",
    "multiple_choice*": "choice",
    "countdown*": "countdown",
    "searchR1_*": "search_qa",
    "reasoning_gym/*": "reasoning_gym",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
}
"""Data source -> the file of `burnish.reward.functions` whose ``compute_score`` scores it. A name that ends in * stands
for all that begin so."""
# Data sources of verl's that need what there is not.
_UNSUPPORTED = {"hiyouga/geometry3k": "its questions are pictures, which burnish does not read"}


class Rows(Protocol):
    """What `check_data_sources` needs of a dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> dict[str, Any]: ...


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    sandbox: Any = None,
) -> float | dict[str, Any]:
    """The score of a response by the built-in function of its data source.

    Args:
        sandbox: settings of the sandbox, for the functions that run code.

    Raises:
        RewardError: no function for ``data_source``, or a ground truth that it cannot use.
    """
    function = score_function(data_source)
    if _takes_sandbox(function):
        return function(solution_str, ground_truth, extra_info, sandbox=sandbox)
    return function(solution_str, ground_truth, extra_info)


@functools.lru_cache(maxsize=1024)
def score_function(data_source: str) -> ScoreFunction:
    """The built-in function of a data source, ``function(solution_str, ground_truth, extra_info)``: that of its very
    name, else that of the longest beginning.

    Raises:
        RewardError: there is none; names those that are known.
    """
    name = SCORE_FUNCTIONS.get(data_source)
    if name is None:
        beginnings = [key for key in SCORE_FUNCTIONS if key.endswith("*") and data_source.startswith(key[:-1])]
        if not beginnings:
            raise RewardError(_unknown_source(data_source))
        name = SCORE_FUNCTIONS[max(beginnings, key=len)]
    # Loaded when asked for: a process that scores sums needs no computer algebra.
    return importlib.import_module(f"burnish.reward.functions.{name}").compute_score


@functools.cache
def _takes_sandbox(function: ScoreFunction) -> bool:
    return "sandbox" in inspect.signature(function).parameters


def reference_solution(data_source: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> str | None:
    """A response that the built-in function of ``data_source`` gives its full score, written from the ground truth;
    None where that cannot be done (the tests of a program do not tell the program).

    Raises:
        RewardError: no function for ``data_source``, or a ground truth that it cannot use.
    """
    write = getattr(score_function(data_source), "reference_solution", None)
    return None if write is None else write(ground_truth, extra_info)


def check_data_sources(dataset: Rows, reward_fn: Any = default_compute_score) -> None:
    """Scores an empty response to every row, so that an unknown data source or a ground truth that is of no use is
    found before training; see `unscorable_rows`.

    Raises:
        RewardError: names the first such row (its file and number where the dataset has a ``location`` method) and what is
            known.
    """
    for _, error in unscorable_rows(dataset, reward_fn):
        raise error


def unscorable_rows(dataset: Rows, reward_fn: Any = default_compute_score) -> Iterator[tuple[int, RewardError]]:
    """Position and error of each row whose data source is unknown or whose ground truth is of no use. Built-in functions
    only: there are none where ``reward_fn``, a reward manager or a function, scores by a function of the user's own."""
    function = getattr(reward_fn, "compute_score", reward_fn)
    while isinstance(function, functools.partial):
        function = function.func
    if function is not default_compute_score:
        return
    location = getattr(dataset, "location", lambda position: f"row {position} of the dataset")
    for position in range(len(dataset)):
        row = dataset[position]
        try:
            default_compute_score(
                row.get("data_source") or "unknown",
                "",
                (row.get("reward_model") or {}).get("ground_truth"),
                row.get("extra_info"),
            )
        except RewardError as error:
            named = RewardError(f"{location(position)}: {error}")
            named.__cause__ = error
            yield position, named


def get_custom_reward_fn(
    config: RewardConfig, check: Callable[[ScoreFunction, str, Mapping[str, Any]], None] | None = None
) -> ScoreFunction | None:
    """The function that ``reward.custom_reward_function`` names, its ``reward_kwargs`` bound; None if it names none.

    Args:
        check: raises where the manager in use cannot call it; None: `check_score_function`.

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
    of_file = FileFunction(custom.path, custom.name, custom.reward_kwargs, key=f"{key}.path")
    found = load_attribute(custom.path, custom.name, key=f"{key}.path")
    if inspect.isclass(found):
        _check_constructor(found, f"{key}.name={custom.name}")
    (check or check_score_function)(of_file.function, f"{key}.name={custom.name}", custom.reward_kwargs)
    return of_file


def _check_constructor(cls: type, name: str) -> None:
    """A class with ``__call__`` is made once in each process, without arguments."""
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise ConfigError(
            f"{name}: this class is made without arguments, but its constructor is {inspect.signature(cls)}: {error}. "
            f"Give them defaults; reward_kwargs go to each call."
        ) from error


def check_score_function(
    function: ScoreFunction, name: str = "reward_fn", reward_kwargs: Mapping[str, Any] | None = None
) -> None:
    """Checks that ``function`` takes the keywords that reward functions are called with, and ``reward_kwargs`` besides.

    Raises:
        ConfigError: it is not callable or takes other arguments.
    """
    keywords: dict[str, Any] = {"data_source": "", "solution_str": "", "ground_truth": None, "extra_info": {}}
    check_takes(
        function,
        keywords,
        reward_kwargs,
        name,
        f"a reward function is called with the keywords data_source, solution_str, ground_truth and extra_info"
        f"{' and those of reward_kwargs' if reward_kwargs else ''}",
        "take the rest as **kwargs",
    )


def check_takes(
    function: Any,
    keywords: Mapping[str, Any],
    reward_kwargs: Mapping[str, Any] | None,
    name: str,
    how_called: str,
    way_out: str,
) -> None:
    """Checks that ``function`` can be called with ``keywords`` and ``reward_kwargs``, which may not be the same.

    Args:
        name: of the function, for messages.
        how_called: in words.
        way_out: what can be done beside giving its parameters these names.

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
        signature.bind(**keywords, **(reward_kwargs or {}))
    except TypeError as error:
        raise ConfigError(
            f"{name}: {how_called}, but this one is {signature}: {error}. Name its parameters so, or {way_out}."
        ) from error


def _unknown_source(data_source: str) -> str:
    if data_source in _UNSUPPORTED:
        what = f"The data source {data_source!r} has no built-in reward function: {_UNSUPPORTED[data_source]}."
    else:
        what = f"There is no built-in reward function for the data source {data_source!r} (column data.reward_fn_key)."
    return (
        f"{what} Known: {', '.join(sorted(SCORE_FUNCTIONS))}. Use your own: "
        f"reward.custom_reward_function.path=my_reward.py with a function compute_score(data_source, solution_str, "
        f"ground_truth, extra_info), or reward_fn= in burnish.train."
    )
