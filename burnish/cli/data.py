"""``burnish data``: makes files of training data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from burnish.reward.functions.reasoning_gym import INSTALL, encode_entry
from burnish.utils import local_paths
from burnish.utils.console import console
from burnish.utils.errors import ConfigError, DataError
from burnish.utils.foreign_code import Caught, told
from burnish.utils.json_lines import replacing

INSTRUCTION = "Think first, and give the final answer in <answer> </answer> tags."
# Draws from a task for each row of testing that is wanted, before too many are found among the rows of training.
_PATIENCE = 20


def list_tasks() -> list[str]:
    """The tasks of reasoning-gym that a data set can be made of.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(INSTALL) from error
    return sorted(set(DATASETS) - {"composite"})


def run_reasoning_gym(
    tasks: Sequence[str],
    *,
    size: int,
    test_size: int,
    seed: int,
    out: str,
    parameters: Sequence[str],
    instruction: str | None = None,
) -> int:
    """Writes ``train.parquet`` and ``test.parquet`` into ``out``: ``size`` and ``test_size`` rows of each task.

    No question of the test rows is among the training rows of its task.

    Raises:
        ConfigError: reasoning-gym is not installed, it has no such task, the task takes no such parameter, or there
            can be no such folder.
        DataError: a task has too few different questions.
    """
    folder = local_paths.named("--out", out)
    known = list_tasks()
    unknown = [task for task in tasks if task not in known]
    if unknown or not tasks:
        what = f"reasoning_gym has no task {unknown[0]!r}." if unknown else "--task names what to make rows of."
        raise ConfigError(f"{what} Tasks: {', '.join(known)}.")
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for task in tasks:
        train, test = draw_entries(task, size, test_size, seed, read_parameters(parameters))
        for split, entries in (("train", train), ("test", test)):
            rows[split] += [
                to_row(task, entry, split, index, INSTRUCTION if instruction is None else instruction)
                for index, entry in enumerate(entries)
            ]
    for split, made in rows.items():
        _write(made, folder / f"{split}.parquet")
        console.print(f"{folder / split}.parquet: {len(made)} rows", soft_wrap=True)
    return 0


def read_parameters(parameters: Sequence[str]) -> dict[str, Any]:
    """``key=value`` texts as a dict of values, read as YAML.

    Raises:
        ConfigError: one has no ``=``.
    """
    read = {}
    for parameter in parameters:
        name, sign, value = parameter.partition("=")
        if not sign or not name:
            raise ConfigError(f"--set {parameter}: a parameter of the task is set as key=value.")
        try:
            read[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {parameter}: {value!r} is no value as YAML writes it.") from error
    return read


def draw_entries(
    task: str, size: int, test_size: int, seed: int, parameters: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Entries of a task, ``size`` to train on and ``test_size`` to test on, whose questions are not among the first.

    Entry i of a task's data set is drawn with the seed ``seed + i``, so both parts come of one set, one behind the other:
    sets of two neighbouring seeds would be the same but for one entry.
    """
    import reasoning_gym

    with Caught() as caught:
        dataset = reasoning_gym.create_dataset(task, seed=seed, size=size + _PATIENCE * test_size, **parameters)
        entries = _entries(dataset)
        train = list(islice(entries, size))
    if caught.error is not None:
        raise ConfigError(f"reasoning_gym/{task} with {parameters or 'its defaults'}: {told(caught.error)}.")
    seen = {entry["question"] for entry in train}
    test: list[dict[str, Any]] = []
    while len(test) < test_size:
        with Caught() as caught:
            entry = next(entries, None)
        if caught.error is not None:
            raise DataError(f"reasoning_gym/{task}: {told(caught.error)}.")
        if entry is None:
            raise DataError(
                f"reasoning_gym/{task}: of {size + _PATIENCE * test_size} questions only {len(test)} are not among the "
                f"{size} to train on; {test_size} are wanted to test on. Give a smaller --size or --test-size, or set "
                f"parameters of the task that give more questions (--set key=value)."
            )
        if entry["question"] not in seen:
            seen.add(entry["question"])
            test.append(entry)
    return train, test


def _entries(dataset: Any) -> Iterator[dict[str, Any]]:
    for index in range(len(dataset)):
        yield dataset[index]


def to_row(task: str, entry: dict[str, Any], split: str, index: int, instruction: str = INSTRUCTION) -> dict[str, Any]:
    """An entry as a row of training, scored by the task's own verifier.

    Raises:
        DataError: the entry holds what JSON cannot.
    """
    try:
        encoded = encode_entry(entry)
    except TypeError as error:
        raise DataError(f"reasoning_gym/{task}, entry {index}: it cannot be written as JSON: {error}.") from error
    answer = entry.get("answer")
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [
            {"role": "user", "content": f"{entry['question']}\n\n{instruction}" if instruction else entry["question"]}
        ],
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": "" if answer is None else str(answer)},
        "extra_info": {"split": split, "index": index, "entry": encoded},
    }


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with replacing(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows), temporary)
