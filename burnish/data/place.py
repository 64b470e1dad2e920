"""The place of a loader with some reading processes, for one with others.

torchdata keeps it in one form where the loader's own process reads, and in another where others do, bound to their number. What
it says is the same where a dataset has no state of its own: how many rows were given, and the sampler's place.
"""

from typing import Any

from burnish.utils.errors import DataError

_SAMPLER = (
    "_index_sampler_state",
    "_sampler_iter_state",
    "_sampler_iter_yielded",
    "_IterableDataset_len_called",
    "_shared_seed",
)


def for_workers(state: dict[str, Any], num_workers: int, seed: int) -> dict[str, Any]:
    """``state`` of a `StatefulDataLoader` as one with ``num_workers`` processes has it.

    Args:
        seed: of processes that did not exist when the state was taken.

    Raises:
        DataError: the dataset keeps a state in the processes that read it, which is bound to their number.
    """
    main, step = _main_of(state)
    if (main["num_workers"] or 0) == num_workers:
        return state
    if main["has_dataset_state"]:
        raise DataError(
            f"data.dataloader_num_workers={num_workers}: the checkpoint was saved with {main['num_workers'] or 0}, and the "
            f"dataset keeps a state in each process that reads it. Set the number as it was."
        )
    sampler = {name: main["state"].get(name) for name in _SAMPLER}
    finished = state["_iterator_finished"]
    if num_workers == 0:
        return {
            **sampler,
            "_num_yielded": step,
            "fetcher_state": None,
            "dataset_state": None,
            "_iterator_finished": finished,
        }
    snapshot = {
        "_snapshot_step": step,
        # The next batch comes from the first.
        "_last_yielded_worker_id": num_workers - 1,
        "_main_snapshot": {**sampler, "_num_workers": num_workers, "_base_seed": main["state"].get("_base_seed", seed)},
        "_worker_snapshots": {
            f"worker_{number}": {"worker_id": number, "dataset_state": None, "fetcher_state": None}
            for number in range(num_workers)
        },
    }
    return {"_snapshot": snapshot, "_steps_since_snapshot": 0, "_iterator_finished": finished}


def _main_of(state: dict[str, Any]) -> tuple[dict[str, Any], int]:
    if "_snapshot" not in state:
        has_state = state.get("dataset_state") is not None or state.get("fetcher_state") is not None
        return {"state": state, "num_workers": 0, "has_dataset_state": has_state}, state["_num_yielded"]
    snapshot = state["_snapshot"]
    main, workers = snapshot["_main_snapshot"], snapshot["_worker_snapshots"].values()
    has_state = any(
        worker.get("dataset_state") is not None or worker.get("fetcher_state") is not None for worker in workers
    )
    return {"state": main, "num_workers": main["_num_workers"], "has_dataset_state": has_state}, snapshot[
        "_snapshot_step"
    ]
