"""Tasks of reasoning-gym as rows of training, made here: a question in a row of training is in no held-out row.

    python -m examples.reasoning.data                               # every task, into examples/reasoning/data/<task>/
    python -m examples.reasoning.data --task chain_sum --train 500 --test 100 --set max_digits=2 --out /tmp/chain_sum

Writes ``train.jsonl``, ``test.jsonl`` (held out) and ``sft.jsonl``: conversations with right answers to questions of the
training rows, for a supervised start. reasoning-gym comes with ``pip install 'burnish[reasoning-gym]'``.
"""

import argparse
import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

from burnish.cli.data import read_parameters
from burnish.reward.functions.reasoning_gym import INSTALL
from burnish.utils import local_paths
from burnish.utils.errors import BurnishError, ConfigError, DataError
from burnish.utils.json_lines import write_atomically
from examples.data.common import Row, make_row

HERE = Path(__file__).parent / "data"
TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "basic_arithmetic": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "countdown": {
        "min_numbers": 3, "max_numbers": 3, "min_value": 1, "max_value": 12, "min_target": 1, "max_target": 40,
    },
}  # fmt: skip
"""Parameters of reasoning-gym at which SmolLM2-135M is right now and then, so that there is something to learn from."""
INSTRUCTIONS = {"chain_sum": "\nAnswer with only the number.", "basic_arithmetic": "\nAnswer with only the number."}
"""What is put behind the question; countdown's says what an answer looks like itself."""
_PATIENCE = 40
_SIGNED = re.compile(r"[-+]?\d+")


def draw(task: str, count: int, seed: int, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """So many entries of a task, no two of them the same problem.

    Raises:
        ConfigError: reasoning-gym is not installed, or the task has no such parameter.
        DataError: the task has fewer different problems.
    """
    entries: dict[Hashable, dict[str, Any]] = {}
    for entry in _entries(task, count * _PATIENCE, seed, parameters):
        entries.setdefault(problem(task, entry), entry)
        if len(entries) == count:
            return list(entries.values())
    raise DataError(
        f"{task} with {parameters}: {len(entries)} different problems were found in {count * _PATIENCE} draws, {count} are "
        f"wanted. Give smaller --train and --test, or parameters that allow more (--set max_digits=2)."
    )


def _entries(task: str, size: int, seed: int, parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(INSTALL) from error
    try:
        dataset = reasoning_gym.create_dataset(task, seed=seed, size=size, **parameters)
    except (TypeError, AssertionError) as error:
        raise ConfigError(f"{task} with {parameters}: {error}") from error
    # A task knows its length; iterating over it would never end for some.
    return (dataset[index] for index in range(size))


def problem(task: str, entry: dict[str, Any]) -> Hashable:
    """What makes two entries the same problem, however they are worded: the summands with their signs in any order, else the
    numbers in any order with what they make (5 - -4, 4 + 5 and ( 5 + 4 ) are one)."""
    metadata = entry["metadata"]
    if task == "countdown":
        return (*sorted(metadata["numbers"]), "makes", metadata["target"])
    if task == "chain_sum":
        return tuple(sorted(int(term) for term in _SIGNED.findall(metadata["expression"].replace(" ", ""))))
    return (*sorted(int(number) for number in re.findall(r"\d+", metadata["expression"])), "makes", entry["answer"])


def to_row(task: str, entry: dict[str, Any], split: str, index: int) -> Row:
    """An entry as a row of training: `examples/reasoning/reward.py` reads ``ground_truth`` and, of countdown, ``extra_info``."""
    metadata = entry["metadata"]
    countdown = task == "countdown"
    extra = {"numbers": metadata["numbers"], "target": metadata["target"]} if countdown else {}
    return make_row(
        data_source=f"reasoning/{task}",
        prompt=entry["question"].strip() + INSTRUCTIONS.get(task, ""),
        ability="reasoning",
        ground_truth=str(metadata["target"] if countdown else entry["answer"]),
        split=split,
        index=index,
        **extra,
    )


def to_conversation(row: Row, answer: str) -> Row:
    """The row's question and a right answer to it, as supervised training reads it."""
    return {
        "data_source": row["data_source"],
        "messages": [*row["prompt"], {"role": "assistant", "content": answer}],
    }


def make_task(task: str, *, train: int, test: int, seed: int, parameters: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the three files of a task; returns their paths.

    Raises:
        ConfigError, DataError: as of `draw`.
    """
    entries = draw(task, train + test, seed, TASKS[task] | parameters)
    rows: dict[str, list[Row]] = {"train": [], "test": [], "sft": []}
    for split, part in (("train", entries[:train]), ("test", entries[train:])):
        rows[split] = [to_row(task, entry, split, index) for index, entry in enumerate(part)]
    rows["sft"] = [
        to_conversation(row, str(entry["answer"])) for row, entry in zip(rows["train"], entries, strict=False)
    ]
    paths = []
    for split, made in rows.items():
        write_atomically(folder / f"{split}.jsonl", made)
        paths.append(folder / f"{split}.jsonl")
    return paths


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, action="append", help="default: every one")
    parser.add_argument("--train", type=int, default=2048, help="rows of training of each task")
    parser.add_argument("--test", type=int, default=256, help="held-out rows of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a parameter of reasoning-gym's task, instead of TASKS",
    )
    parser.add_argument("--out", help="folder of a single task; default examples/reasoning/data/<task>")
    options = parser.parse_args()
    tasks = options.task or list(TASKS)
    if options.train < 1 or options.test < 1:
        parser.exit(2, "--train and --test must be at least 1.\n")
    if options.out is not None and len(tasks) != 1:
        parser.exit(2, "--out is for one task: name it with --task.\n")
    try:
        for task in tasks:
            folder = HERE / task if options.out is None else local_paths.named("--out", options.out)
            paths = make_task(
                task,
                train=options.train,
                test=options.test,
                seed=options.seed,
                parameters=read_parameters(options.set),
                folder=folder,
            )
            for path in paths:
                print(f"{path}: {sum(1 for _ in path.open())} rows")
    except BurnishError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
