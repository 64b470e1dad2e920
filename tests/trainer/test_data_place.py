"""A resumed run begins with the first row that was not seen, however many processes read."""

import json

import pytest
from torch.utils.data import Dataset

from burnish.data import create_dataloader
from burnish.data.place import for_workers
from burnish.trainer.ppo.prompts import PromptStream
from burnish.utils.errors import DataError


class Rows(Dataset):
    """Sixteen rows, each its own number."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict:
        return {"row": index}


def rows_of(batch):
    return {"rows": [row["row"] for row in batch]}


def stream_of(num_workers: int) -> PromptStream:
    loader = create_dataloader(
        Rows(), 4, shuffle=True, seed=1, num_workers=num_workers, drop_last=True, collate_fn=rows_of
    )
    return PromptStream(loader)


# Four batches an epoch: 4 is the very end of one.
@pytest.mark.parametrize("seen", [1, 4, 6])
@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 1), (2, 2), (0, 2), (2, 0), (1, 2)])
def test_the_next_row_is_the_first_that_was_not_seen(before, after, seen):
    stream = stream_of(before)
    for _ in range(seen):
        next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    rest = [next(stream)["rows"] for _ in range(4)]
    resumed = stream_of(after)
    resumed.load_state_dict(state)
    assert [next(resumed)["rows"] for _ in range(4)] == rest
    assert resumed.epoch == stream.epoch
    if before == after:
        assert resumed.state_dict() == stream.state_dict()


def test_a_dataset_that_keeps_a_state_in_its_readers_is_bound_to_their_number():
    stream = stream_of(1)
    next(stream)
    state = stream.state_dict()["dataloader"]
    state["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"] = {"place": 3}
    assert for_workers(state, 1, seed=0) is state
    with pytest.raises(DataError, match="dataloader_num_workers=2: the checkpoint was saved with 1"):
        for_workers(state, 2, seed=0)
