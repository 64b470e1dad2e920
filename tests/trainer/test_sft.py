"""What a run of supervised fine-tuning says and refuses before it starts, and the datasets of a user's own."""

import json

import pytest
import torch

from burnish.config import load_sft_config
from burnish.core_algos.aggregation import agg_loss
from burnish.data.loader import create_dataloader
from burnish.protocol import DataProto
from burnish.render import load_tokenizer
from burnish.trainer.preflight import Findings
from burnish.trainer.preflight.memory import GIB
from burnish.trainer.sft.datasets import collate, create_sft_dataset
from burnish.trainer.sft.main import main
from burnish.trainer.sft.plan import describe_run, describe_step, estimate_sft_memory, micro_batch_tokens
from burnish.trainer.sft.preflight import check_sft_memory, preflight_sft
from burnish.utils.device_table import find_device
from burnish.utils.errors import DataError
from burnish.workers.sft import sft_loss

CLASS = """
from torch.utils.data import Dataset

class Mine(Dataset):
    def __init__(self, data_files, tokenizer, config, max_samples):
        self.made_of = (list(data_files), config.max_length, max_samples)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"input_ids": [1, 2, 3 + index], "loss_mask": [False, False, True]}
"""


def config_of(*overrides, model="m"):
    return load_sft_config(["data.train_files=a.jsonl", f"model.path={model}", *overrides])


def test_a_dataset_class_of_the_users_own_gives_the_rows(tmp_path):
    (tmp_path / "mine.py").write_text(CLASS)
    keys = [f"data.custom_cls.path={tmp_path / 'mine.py'}", "data.custom_cls.name=Mine", "data.train_max_samples=7"]
    config = config_of(*keys, "data.max_length=64")
    dataset = create_sft_dataset(config, None, split="train")
    assert dataset.made_of == (["a.jsonl"], 64, 7)
    assert create_sft_dataset(config, None, split="val") is None
    batch = collate([dataset[0], dataset[1]], pad_token_id=9)
    assert batch.tensors["responses"].tolist() == [[3], [4]]


def test_a_row_without_what_is_needed_is_told_with_what_it_has():
    with pytest.raises(DataError, match=r"a row has no loss_mask\. .* it has input_ids, labels"):
        collate([{"input_ids": [1, 2], "labels": [1, 2]}])


def test_the_loss_is_the_mean_over_the_learnt_tokens_of_the_step_whatever_micro_batches_hold():
    mask = torch.tensor([[True, False, True], [True, True, True]])
    log_probs = -torch.arange(6.0).reshape(2, 3)
    info = {"dp_size": 2, "batch_num_tokens": 10, "global_batch_size": 4, "loss_scale_factor": 1.0}
    outputs = {"log_probs": log_probs, "top1_log_probs": torch.tensor([[-0.0, 5, -2], [1, -4, 1]])}
    loss, metrics = sft_loss(outputs, DataProto.from_dict(tensors={"loss_mask": mask}), info)
    # 0 + 2 + 3 + 4 + 5 of ten tokens; two ranks, whose gradients are averaged.
    assert loss.item() == pytest.approx(2 * 14 / 10)
    assert metrics["train/loss"].item() == pytest.approx(1.4)
    assert metrics["train/token_accuracy"].item() == pytest.approx(0.3)
    assert agg_loss(-log_probs, mask, "token-mean", **info).item() == pytest.approx(loss.item())


def test_a_step_and_a_run_are_described_in_numbers():
    text = describe_step(config_of("data.train_batch_size=64", "data.micro_batch_size_per_gpu=4"), workers=4)
    assert "64 conversations" in text
    assert "16 per worker, in micro-batches of 4 conversations" in text
    shared = config_of("engine.ulysses_sequence_parallel_size=2", "model.lora_rank=8", "recipe=lora")
    assert "adapters (LoRA) (128 per 2 workers that share their tokens" in describe_step(shared, workers=4)
    assert "(6 conversations, others in every epoch, are left over)" in describe_run(
        config_of("data.train_batch_size=10"), 26, 0, 8
    )
    said = describe_run(config_of("data.train_batch_size=10"), 26, 0, 8)
    assert "is not saved (trainer.save_freq=-1): any number above 0 saves that of the last step" in said
    assert "is not saved" not in describe_run(config_of("data.train_batch_size=10", "trainer.save_freq=4"), 26, 0, 8)
    assert "(the last 6 conversations are left over), and 5 conversations to validate on." in describe_run(
        config_of("data.train_batch_size=10", "data.shuffle=false"), 26, 5, 8
    )


@pytest.mark.parametrize(
    ("overrides", "lengths", "tokens"),
    [
        (["data.max_token_len_per_gpu=2048"], None, 2048),
        (["data.max_token_len_per_gpu=2048"], [10, 4], 2048),
        (["data.micro_batch_size_per_gpu=4"], None, 4096),
        (["data.micro_batch_size_per_gpu=4"], [10, 4], 40),
        (["data.micro_batch_size_per_gpu=4", "engine.ulysses_sequence_parallel_size=2"], None, 2048),
    ],
)
def test_the_memory_is_planned_for_the_tokens_that_go_through_the_model_at_once(overrides, lengths, tokens):
    assert micro_batch_tokens(config_of(*overrides), lengths) == tokens


def test_memory_that_does_not_suffice_is_an_error_with_the_keys_to_turn(tiny_model_path):
    config = config_of("trainer.n_gpus_per_node=1", model=tiny_model_path)
    report = estimate_sft_memory(config, workers=1, device="cuda", total_bytes=80 * GIB)
    (stage,) = report.stages
    assert stage.key == "data.max_token_len_per_gpu=8192"
    # float32 gradients and two moments beside the masters, at least.
    assert report.needed(stage) > 12 * report.models["actor"].num_parameters
    found, small = Findings(), find_device("H100 80GB")
    assert check_sft_memory(config, None, found, device=small) is not None
    assert found.ok
    found = Findings()
    tight = type(small)(**{name: getattr(small, name) for name in small.__dataclass_fields__} | {"memory_gib": 0.5})
    check_sft_memory(config, None, found, device=tight)
    (error,) = found.of("error")
    assert "engine.optimizer_offload=true" in error.message
    assert "model.lora_rank=32" in error.message


def test_all_that_is_wrong_is_told_at_once_and_what_is_learnt_is_shown(tmp_path, tiny_model_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}] * 3
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"model.path={tiny_model_path}", f"data.train_files={file}", "data.max_length=64"]
    found, config = preflight_sft([*words, "data.trian_files=x", "optim.betas=[1,2,3]", "data.train_batch_size=8"])
    told = [error.message for error in found.of("error")]
    assert len(told) == 3
    assert any("data.train_batch_size=3" in text for text in told)
    found, config = preflight_sft([*words, "data.train_batch_size=2"])
    assert found.ok, found.of("error")
    notes = " ".join(note.message for note in found.of("note"))
    assert "2<|end|>»" in notes
    assert "3 conversations give 1 step an epoch; the run has 4 steps" in notes
    assert config.data.train_batch_size == 2


def test_the_command_line_prints_its_configuration_and_its_help(capsys):
    assert main(["--cfg", "job", "data.train_files=a.jsonl", "recipe=lora"]) == 0
    assert "lora_rank: 32" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "supervised fine-tuning" in capsys.readouterr().out
    assert main(["model.path=m"]) == 2
    assert "data.train_files is not set" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("item", "what"),
    [
        ([1, 2], "a row is list, not a dict with input_ids"),
        (None, "a row is NoneType"),
        ({"input_ids": [1, 99], "loss_mask": [0, 1]}, "token id 99; the tokenizer's are 0 to 49"),
        ({"input_ids": [1, -1], "loss_mask": [0, 1]}, "token id -1; the tokenizer's are 0 to 49"),
    ],
)
def test_rows_of_a_class_of_the_users_own_that_no_model_takes_are_refused(item, what):
    with pytest.raises(DataError, match=what):
        collate([{"input_ids": [1, 49], "loss_mask": [0, 1]}, item], vocab_size=50)


@pytest.mark.parametrize(
    ("base", "body", "what"),
    [
        ("Dataset", "def __len__(self):\n        return 0", "Mine of data.custom_cls has no row"),
        ("IterableDataset", "def __iter__(self):\n        yield {}", "Mine .data.custom_cls. has no length"),
    ],
)
def test_a_class_of_the_users_own_has_rows_and_a_length(tmp_path, base, body, what):
    (tmp_path / "mine.py").write_text(
        f"from torch.utils.data import {base}\n\nclass Mine({base}):\n"
        f"    def __init__(self, *given):\n        pass\n\n    {body}\n"
    )
    config = config_of(f"data.custom_cls.path={tmp_path / 'mine.py'}", "data.custom_cls.name=Mine")
    with pytest.raises(DataError, match=what):
        create_dataloader(
            create_sft_dataset(config, None, split="train"),
            1,
            collate_fn=collate,
            shuffle=False,
            seed=0,
            drop_last=True,
        )


def test_the_tokenizer_of_the_model_pads_what_the_batch_lacks(tiny_model_path):
    tokenizer = load_tokenizer(tiny_model_path)
    rows = [
        {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2" * n}]} for n in (1, 5)
    ]
    dataset = create_sft_dataset(config_of("data.max_length=64"), tokenizer, split="train", rows=rows)
    batch = collate([dataset[0], dataset[1]], pad_token_id=tokenizer.pad_token_id)
    assert batch.tensors["responses"][0, -1] == tokenizer.pad_token_id
    assert batch.tensors["loss_mask"].sum(1).tolist() == [2, 6]
