"""Data sets of the ``datasets`` library: of the hub by name, or a folder that its ``save_to_disk`` wrote."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from burnish.config.data_names import HubName
from burnish.data.problems import Place
from burnish.data.readers import ReadRow, clean_row, drop_null_keys
from burnish.utils.errors import DataError
from burnish.utils.foreign_code import Caught, told
from burnish.utils.hub import offline_where_out_of_reach

# Of a data set with several splits, where none is named: the first that is there.
_SPLITS = {"train": ("train",), "val": ("validation", "val", "test")}
SAVED_MARKS = ("dataset_dict.json", "state.json")
"""One of these is in every folder that ``save_to_disk`` wrote."""


def is_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote the folder."""
    return any((folder / name).is_file() for name in SAVED_MARKS)


def read_dataset(source: HubName | Path, split: str) -> Iterator[ReadRow]:
    """The rows, as of a parquet file; images, sounds and other cells that are no JSON are errors of their rows."""
    dataset = open_dataset(source, split)
    number = 0
    with Caught() as caught:
        for batch in dataset.with_format("arrow").iter(batch_size=1024):
            for row in batch.to_pylist(maps_as_pydicts="lossy"):
                place = Place(str(source), number)
                number += 1
                yield place, clean_row({name: drop_null_keys(value) for name, value in row.items()}, place)
    if caught.error is not None:
        raise DataError(f"{source}, row {number}: the data set cannot be read: {told(caught.error)}.")


def fingerprint(source: HubName | Path, split: str) -> str:
    """What stands for the content of a data set, as the ``datasets`` library counts it."""
    return str(open_dataset(source, split)._fingerprint)


def open_dataset(source: HubName | Path, split: str) -> Any:
    """One split of a data set.

    Raises:
        DataError: ``datasets`` is not installed, the data set cannot be loaded, or it has no such split.
    """
    if importlib.util.find_spec("datasets") is None:
        missing = " No file of that name is on this machine, so it was taken for" if isinstance(source, HubName) else ""
        what = f"{missing} a data set of the hub." if missing else " This folder is a saved data set."
        raise DataError(
            f"{source}:{what} It is read by the package datasets, which is not installed: "
            f"pip install 'burnish[datasets]'"
        )
    import datasets

    with Caught() as caught:
        if isinstance(source, HubName):
            with offline_where_out_of_reach(source.name, "dataset"):
                loaded = datasets.load_dataset(source.name, source.configuration)
        else:
            loaded = datasets.load_from_disk(str(source))
    if caught.error is not None:
        raise DataError(
            f"{source}: the data set cannot be loaded: {told(caught.error)}. On a machine without the hub, name a file, or "
            f"a folder that save_to_disk wrote."
        ) from caught.error
    if not hasattr(loaded, "keys"):
        return loaded
    asked = source.split if isinstance(source, HubName) else None
    wanted = (asked,) if asked else _SPLITS[split]
    found = next((name for name in wanted if name in loaded), None)
    if found is None and asked is None and len(loaded) == 1:
        found = next(iter(loaded))
    if found is None:
        how = f"{source.name}:{source.configuration or ''}:{next(iter(loaded))}" if isinstance(source, HubName) else ""
        advice = f"Name one, as {how}." if how else "Save the split that is meant in a folder of its own."
        raise DataError(
            f"{source}: there is no split {' or '.join(wanted)}; there is: {', '.join(map(str, loaded))}. {advice}"
        )
    return loaded[found]
