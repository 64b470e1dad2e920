import pytest
import torch

from burnish.config import DataConfig
from burnish.trainer.ppo.dataloaders import create_dataloaders
from burnish.trainer.ppo.prompts import PromptStream, repeat_prompts
from burnish.utils.errors import TrainingError


class Loader:
    """Gives the batches of one epoch each time that it is iterated."""

    def __init__(self, *epochs):
        self.epochs = list(epochs)
        self.place = None

    def __iter__(self):
        return iter(self.epochs.pop(0))

    def __len__(self):
        return 2

    def state_dict(self):
        return {"left": len(self.epochs)}

    def load_state_dict(self, state):
        self.place = state


def test_epochs_follow_each_other_without_a_gap():
    stream = PromptStream(Loader(["a", "b"], ["c"], ["d"]))
    drawn = [(next(stream), stream.epoch) for _ in range(4)]
    assert drawn == [("a", 0), ("b", 0), ("c", 1), ("d", 2)]


def test_what_is_left_of_a_checkpoints_epoch_may_be_nothing():
    stream = PromptStream(Loader([], ["c"]))
    stream.load_state_dict({"epoch": 4, "dataloader": "place", "global_steps": 9})
    assert (next(stream), stream.epoch, stream.dataloader.place) == ("c", 5, "place")


def test_a_loader_that_never_gives_a_batch_is_an_error():
    with pytest.raises(TrainingError, match=r"gave no batch.*data\.sampler"):
        next(PromptStream(Loader([], [], [], [])))


def test_the_state_is_epoch_and_place():
    stream = PromptStream(Loader(["a"], ["b"]))
    next(stream)
    next(stream)
    assert stream.state_dict() == {"epoch": 1, "dataloader": {"left": 0}}


def test_each_prompt_is_repeated_in_a_row_under_one_uid():
    batch_dict = {"input_ids": torch.tensor([[1, 2], [3, 4]]), "uid": ["7", "9"]}
    batch = repeat_prompts(batch_dict, n=2, uid_prefix="epoch3", pad_token_id=0)
    assert batch.tensors["input_ids"].tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert list(batch.non_tensor_batch["uid"]) == ["epoch3-7", "epoch3-7", "epoch3-9", "epoch3-9"]
    assert list(batch.non_tensor_batch["sample_index"]) == [0, 1, 0, 1]
    assert batch_dict["uid"] == ["7", "9"]


class Learning:
    """A dataset that hears of steps."""

    def __len__(self):
        return 8

    def __getitem__(self, position):
        return {"input_ids": torch.tensor([1]), "index": position}

    def on_batch_end(self, batch):
        pass


@pytest.mark.parametrize(
    ("num_workers", "says"), [(0, ""), (2, "data.dataloader_num_workers=2: Learning hears of steps")]
)
def test_a_dataset_that_hears_of_steps_is_warned_of_copies_that_do_not(num_workers, says, caplog):
    config = DataConfig(train_batch_size=4, seed=1, dataloader_num_workers=num_workers)
    create_dataloaders(config, Learning(), None, collate_fn=None, train_sampler=None, pad_token_id=0)
    assert says in caplog.text
    assert bool(caplog.text) == bool(says)
