"""What the scripts of this folder share: rows in, rows of training out."""

import argparse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from burnish.data.files import read_source, sound, sources_of
from burnish.utils import local_paths
from burnish.utils.errors import BurnishError, DataError

Row = dict[str, Any]
Convert = Callable[[Row, str, int], Row]
"""`convert(row, split, index)` makes a row of training from a row of the source."""


def read(names: list[str], split: str) -> Iterator[tuple[str, Row]]:
    """The rows of files, patterns, folders or data sets of the hub, each with its place in words."""
    for source in sources_of(names, f"--{split}"):
        for place, row in sound(read_source(source, "train" if split == "train" else "val")):
            yield str(place), row


def field(row: Row, *names: str) -> Any:
    """The first of these columns that a row has.

    Raises:
        DataError: it has none of them.
    """
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise DataError(f"there is no column {' or '.join(names)}; there is: {', '.join(row) or 'none'}.")


def make_row(
    *, data_source: str, prompt: str, ability: str, ground_truth: Any, split: str, index: int, **extra_info: Any
) -> Row:
    """A row with the columns that training reads."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **extra_info},
    }


def write(rows: Iterable[Row], path: Path) -> int:
    """Writes rows as parquet; returns how many.

    Raises:
        DataError: there is no row.
    """
    rows = list(rows)
    if not rows:
        raise DataError(f"{path}: there is no row to write.")
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return len(rows)


def run(description: str, convert: Convert, *, train: list[str], test: list[str], out: str) -> None:
    """A script that converts the rows of a training and a test set, one to one."""
    parser = argparse.ArgumentParser(description=description)
    what = "file, pattern, folder or data set of the hub (org/name:configuration:split)"
    parser.add_argument("--train", nargs="+", default=train, help=f"{what}; default {' '.join(train)}")
    parser.add_argument("--test", nargs="+", default=test, help=f"likewise; default {' '.join(test)}")
    parser.add_argument("--out", default=out, help=f"folder for train.parquet and test.parquet; default {out}")
    options = parser.parse_args()
    try:
        folder = local_paths.named("--out", options.out)
        # Both are read before either is written: a wrong name leaves nothing half done.
        converted = {
            split: list(_converted(names, split, convert))
            for split, names in (("train", options.train), ("test", options.test))
        }
        for split, rows in converted.items():
            num_rows = write(rows, folder / f"{split}.parquet")
            print(f"{folder / split}.parquet: {num_rows} rows")
    except BurnishError as error:
        parser.exit(2, f"{error}\n")


def _converted(names: list[str], split: str, convert: Convert) -> Iterator[Row]:
    for index, (place, row) in enumerate(read(names, split)):
        try:
            yield convert(row, split, index)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
