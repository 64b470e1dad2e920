import io
import itertools
import os
import signal

import numpy as np
import pytest
import torch

from burnish.config import DataConfig, SamplerConfig
from burnish.data import EpochSampler, RLHFDataset, collate_fn, create_dataloader, create_rl_sampler
from burnish.protocol import DataProto
from burnish.utils.errors import ConfigError, DataError
from tests.render.fake_tokenizers import byte_tokenizer

RAW = byte_tokenizer(None)


def dataset_of(num_rows):
    rows = [{"prompt": "x" * (i + 1), "ground_truth": [i, i]} for i in range(num_rows)]
    return RLHFDataset.from_rows(rows, RAW, DataConfig())


def loader_of(num_rows=7, **options):
    return create_dataloader(
        dataset_of(num_rows), **{"batch_size": 2, "shuffle": True, "seed": 3, "drop_last": True, **options}
    )


def epochs(loader, number):
    return [[batch["uid"].tolist() for batch in loader] for _ in range(number)]


def test_prompts_are_padded_on_the_left_to_the_longest_of_the_batch():
    dataset = dataset_of(3)
    batch = collate_fn([dataset[0], dataset[2]], pad_token_id=9)
    x = RAW("x")["input_ids"][0]
    assert batch["input_ids"].tolist() == [[9, 9, x], [x, x, x]]
    assert batch["attention_mask"].tolist() == [[False, False, True], [True, True, True]]
    assert batch["position_ids"].tolist() == [[0, 0, 0], [0, 1, 2]]
    assert batch["attention_mask"].dtype == torch.bool
    assert batch["uid"].tolist() == ["0", "2"]


def test_other_columns_are_object_arrays_also_where_lists_are_of_one_length():
    dataset = dataset_of(2)
    batch = collate_fn([{**dataset[0], "list": [1, 2]}, {**dataset[1], "list": [3, 4], "rare": 1}])
    for name in ("raw_prompt", "reward_model", "extra_info", "data_source", "list", "rare"):
        assert isinstance(batch[name], np.ndarray)
        assert (batch[name].dtype, batch[name].shape) == (object, (2,))
    assert batch["list"].tolist() == [[1, 2], [3, 4]]
    assert batch["rare"].tolist() == [None, 1]
    assert batch["reward_model"][1] == {"ground_truth": [1, 1]}


def test_a_batch_makes_a_data_proto_with_the_keys_of_the_prompts_stage():
    data = DataProto.from_single_dict(collate_fn([dataset_of(1)[0]]))
    assert set(data.batch.keys()) == {"input_ids", "attention_mask", "position_ids"}
    assert set(data.non_tensor_batch) == {"uid", "raw_prompt", "data_source", "reward_model", "extra_info"}


def test_padding_that_a_dataset_class_brings_is_taken_off():
    rows = [
        {"index": 0, "input_ids": torch.tensor([0, 0, 5]), "attention_mask": torch.tensor([0, 0, 1])},
        {"index": 1, "input_ids": torch.tensor([0, 6, 7]), "attention_mask": torch.tensor([0, 1, 1])},
    ]
    assert collate_fn(rows)["input_ids"].tolist() == [[0, 5], [6, 7]]


def test_rows_of_one_index_in_a_batch_are_groups_of_their_own():
    # A sampler that draws a row twice, or a dataset class that numbers the rows of each file.
    rows = [{"index": index, "input_ids": [5 + i]} for i, index in enumerate([3, 0, 3, 3])]
    assert collate_fn(rows)["uid"].tolist() == ["3", "0", "3#1", "3#2"]


def test_what_a_row_lacks_is_named():
    with pytest.raises(DataError, match="lacks input_ids and index; it has: a"):
        collate_fn([{"a": 1}])
    rows = [{"index": i, "input_ids": [1], "t": torch.zeros(i + 1)} for i in range(2)]
    with pytest.raises(DataError, match="column 't' differ in shape"):
        collate_fn(rows)


def test_the_order_is_a_function_of_seed_and_epoch():
    orders = {
        (seed, epoch): tuple(EpochSampler(range(20), shuffle=True, seed=seed).order(epoch))
        for seed, epoch in itertools.product(range(3), range(3))
    }
    assert len(set(orders.values())) == 9
    assert all(sorted(order) == list(range(20)) for order in orders.values())
    assert orders[1, 2] == tuple(EpochSampler(range(20), shuffle=True, seed=1).order(2))
    assert list(EpochSampler(range(4), shuffle=False, seed=1)) == [0, 1, 2, 3]


def test_each_iteration_is_the_next_epoch_and_one_given_up_is_begun_anew():
    loader = loader_of()
    first, second = epochs(loader, 2)
    assert first != second
    assert all(len(batches) == 3 for batches in (first, second))
    again = loader_of()
    next(iter(again))
    assert epochs(again, 2) == [first, second]
    again.sampler.set_epoch(1)
    assert epochs(again, 1) == [second]


def test_a_validation_loader_gives_every_row_once():
    (batches,) = epochs(loader_of(shuffle=False, drop_last=False, batch_size=4), 1)
    assert batches == [["0", "1", "2", "3"], ["4", "5", "6"]]


def test_loading_leaves_torchs_global_generator_alone():
    before = torch.get_rng_state()
    epochs(loader_of(), 2)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_rows", [6, 7])
def test_a_restored_loader_goes_on_exactly_where_it_was(num_rows, num_workers):
    def stream(loader):
        while True:
            for batch in loader:
                yield batch["uid"].tolist()

    whole = list(itertools.islice(stream(loader_of(num_rows)), 9))
    for taken in range(8):
        loader = loader_of(num_rows, num_workers=num_workers)
        batches = stream(loader)
        assert list(itertools.islice(batches, taken)) == whole[:taken]
        saved = io.BytesIO()
        torch.save(loader.state_dict(), saved)
        saved.seek(0)
        restored = loader_of(num_rows, num_workers=num_workers)
        restored.load_state_dict(torch.load(saved, weights_only=True))
        assert list(itertools.islice(stream(restored), 9 - taken)) == whole[taken:]


def test_a_state_saved_after_the_last_batch_was_asked_for_is_the_start_of_the_next_epoch():
    loader = loader_of()
    _, second = epochs(loader_of(), 2)
    epochs(loader, 1)
    restored = loader_of()
    restored.load_state_dict(loader.state_dict())
    assert epochs(restored, 1) == [second]


def test_a_place_in_other_data_is_refused():
    loader = loader_of(7)
    next(iter(loader))
    other = loader_of(8)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match=r"num_rows 7 -> 8.*resume_mode=disable"):
        iter(other)


class WhereItIsRead(torch.utils.data.Dataset):
    """Rows that say which process read them, of which process group, and what it does at Ctrl-C."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        ignores = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        return {"process": os.getpid(), "group": os.getpgrp(), "ignores_ctrl_c": ignores}


def test_signals_for_the_group_of_the_run_pass_its_readers_by():
    loader = create_dataloader(
        WhereItIsRead(), 2, shuffle=False, seed=0, num_workers=1, drop_last=True, collate_fn=lambda rows: rows
    )
    read = [row for batch in loader for row in batch]
    assert len(read) == 4
    for row in read:
        assert row["process"] != os.getpid()
        assert row["group"] == row["process"]
        assert row["ignores_ctrl_c"]


def test_a_batch_larger_than_the_dataset_is_an_error_with_both_numbers():
    with pytest.raises(DataError, match="3 rows, fewer than one batch of 4"):
        loader_of(3, batch_size=4)
    assert len(loader_of(3, batch_size=4, drop_last=False)) == 1


def test_prompts_are_padded_with_the_given_id():
    loader = loader_of(2, pad_token_id=77, shuffle=False)
    assert next(iter(loader))["input_ids"][0, 0] == 77


def test_a_sampler_of_ones_own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from torch.utils.data import Sampler\n"
        "class Backwards(Sampler):\n"
        "    def __init__(self, data_source, data_config):\n"
        "        self.n = len(data_source)\n"
        "    def __iter__(self):\n"
        "        return iter(range(self.n - 1, -1, -1))\n"
        "    def __len__(self):\n"
        "        return self.n\n"
    )
    dataset = dataset_of(4)

    def create(**names):
        return create_rl_sampler(DataConfig(sampler=SamplerConfig(class_path=str(path), **names)), dataset)

    sampler = create(class_name="Backwards")
    loader = create_dataloader(dataset, 2, shuffle=True, seed=0, drop_last=True, sampler=sampler)
    assert epochs(loader, 1) == [[["3", "2"], ["1", "0"]]]
    with pytest.raises(ConfigError, match="data.sampler.class_name must name the class"):
        create()
    with pytest.raises(ConfigError, match=r"there is no 'Forwards' in it. It defines: Backwards, Sampler"):
        create(class_name="Forwards")
    assert isinstance(create_rl_sampler(DataConfig(seed=5), dataset), EpochSampler)
