"""Easy rows first: by a column, or by the scores so far; and a resumed run goes on in the same order."""

import io
import logging

import pytest
import torch

from burnish.config import DataConfig, SamplerConfig
from burnish.data import RLHFDataset, create_dataloader, create_rl_sampler, takes_feedback
from burnish.protocol import DataProto, object_array
from burnish.trainer.ppo.prompts import PromptStream, repeat_prompts
from burnish.utils.errors import DataError
from tests.render.fake_tokenizers import byte_tokenizer

RAW = byte_tokenizer(None)
HARDNESS = [3, 1, 2, 0.5, 1]


def config_of(**sampler):
    return DataConfig(seed=3, sampler=SamplerConfig(name="curriculum", **sampler))


def dataset_of(rows=HARDNESS):
    return RLHFDataset.from_rows([{"prompt": "x", "extra_info": {"hard": value}} for value in rows], RAW, DataConfig())


def stream_of(config, dataset):
    sampler = create_rl_sampler(config, dataset)
    return PromptStream(create_dataloader(dataset, 1, shuffle=True, seed=3, drop_last=True, sampler=sampler))


def scored(uids, scores, valid=None):
    return DataProto.from_dict(
        tensors={
            "token_level_scores": torch.tensor([[0.0, score] for score in scores]),
            "valid": torch.tensor(valid or [True] * len(uids)),
        },
        non_tensors={"uid": object_array(uids)},
    )


def test_the_least_of_the_named_number_comes_first_and_equals_are_shuffled():
    sampler = create_rl_sampler(config_of(difficulty_key="hard"), dataset_of())
    orders = [sampler.order(epoch) for epoch in range(8)]
    for order in orders:
        assert [HARDNESS[i] for i in order] == sorted(HARDNESS)
    assert len(set(map(tuple, orders))) == 2


@pytest.mark.parametrize("value", ["3", None, True])
def test_a_difficulty_that_is_no_number_is_named(value):
    with pytest.raises(DataError, match="dataset, row 1: data.sampler.difficulty_key=hard needs a number"):
        create_rl_sampler(config_of(difficulty_key="hard"), dataset_of([1, value]))


def test_rows_that_scored_well_come_first_in_the_next_epoch():
    sampler = create_rl_sampler(config_of(), dataset_of())
    first = sampler.order(0)
    sampler.update(scored([f"epoch0-{i}" for i in (0, 0, 1, 2, 4)], [0.0, 0.2, 1.0, 0.5, 0.0], [True] * 4 + [False]))
    assert sampler.order(0) == first
    order = sampler.order(1)
    assert order[0] == 1
    assert order[-1] == 0
    # Rows without a score stand at the mean, (0.1 + 1 + 0.5) / 3, which is above row 2.
    assert order.index(2) == 3
    sampler.update(scored(["epoch1-round2-0#1"], [2.0]))
    # 0.1 and 2.0 -> 1.05
    assert sampler.order(2)[:2] == [0, 1]


def test_a_resumed_run_goes_on_in_the_order_of_its_epoch():
    def run(stream, number):
        uids = []
        for _ in range(number):
            batch = repeat_prompts(next(stream), n=2, uid_prefix=f"epoch{stream.epoch}", pad_token_id=0)
            uids.append(batch.non_tensor_batch["uid"][0])
            row = int(uids[-1].rpartition("-")[2])
            batch.batch["token_level_scores"] = torch.tensor([[HARDNESS[row]]] * 2)
            batch.batch["valid"] = torch.tensor([True, True])
            stream.take_scores(batch)
        return uids

    whole = run(stream_of(config_of(), dataset_of()), 14)
    assert whole[5:10] != [uid.replace("epoch0", "epoch1") for uid in whole[:5]]
    for taken in range(13):
        stream = stream_of(config_of(), dataset_of())
        assert run(stream, taken) == whole[:taken]
        saved = io.BytesIO()
        torch.save(stream.state_dict(), saved)
        saved.seek(0)
        restored = stream_of(config_of(), dataset_of())
        restored.load_state_dict(torch.load(saved, weights_only=True))
        assert run(restored, 14 - taken) == whole[taken:]


def test_scores_of_other_data_and_another_order_are_refused():
    state = stream_of(config_of(), dataset_of()).state_dict()
    with pytest.raises(DataError, match=r"num_rows 5 -> 4"):
        stream_of(config_of(), dataset_of(HARDNESS[:4])).load_state_dict(state)
    stream = stream_of(config_of(), dataset_of())
    next(stream)
    other = stream_of(config_of(difficulty_key="hard"), dataset_of())
    other.load_state_dict(stream.state_dict())
    with pytest.raises(DataError, match=r"curriculum scores -> hard.*data.sampler"):
        next(other)


def test_the_dataset_hears_of_every_step_and_a_plain_sampler_of_nothing():
    dataset, heard = dataset_of(), []
    stream = stream_of(DataConfig(seed=3), dataset)
    assert not takes_feedback(stream.dataloader.sampler)
    stream.take_scores(None)
    stream.end_step("no method")
    dataset.on_batch_end = lambda batch: heard.append(batch)
    stream.end_step("batch")
    assert heard == ["batch"]


SAMPLER = """
from torch.utils.data import Sampler
class Own(Sampler):
    def __init__(self, data_source, data_config): self.n = len(data_source)
    def __iter__(self): return iter(range(self.n))
    def __len__(self): return self.n
class Stateful(Own):
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
"""


@pytest.mark.parametrize(("name", "is_told"), [("Own", True), ("Stateful", False)])
def test_a_sampler_that_cannot_save_its_place_is_told_of(tmp_path, name, is_told, caplog):
    (tmp_path / "own.py").write_text(SAMPLER)
    sampler = SamplerConfig(class_path=str(tmp_path / "own.py"), class_name=name)
    with caplog.at_level(logging.WARNING):
        create_rl_sampler(DataConfig(sampler=sampler), dataset_of())
    assert ("a run that is resumed skips" in caplog.text) == is_told
