"""What some ranks have saved others go on from, however many they are; and what verl's ranks have written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from burnish.engine.checkpoint import read_optimizer
from burnish.engine.checkpoint.verl import load_verl_model
from burnish.utils.errors import CheckpointError
from tests.engine.checkpoint_program import EVERYTHING, HOW, PROGRAM
from tests.engine.engine_program import make_engine, run_ranks, train

VERL = "verl/global_step_3/actor"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    """One rank saves; two ranks save, and go on from what the one has saved."""
    out = tmp_path_factory.mktemp("ranks")
    engine = make_engine(dtype="bfloat16")
    train(engine, **HOW)
    engine.save_checkpoint(out / "one", EVERYTHING)
    one = {"drawn": torch.rand(3), **train(engine, **HOW)}
    bf16: dict[str, Any] = {"dtype": "bfloat16"}
    cases = [
        {"name": "two", "what": "save", "folder": "two"} | bf16,
        {"name": "copies", "what": "save", "folder": "copies", "fsdp_size": 1} | bf16,
        {"name": "two from one", "what": "load", "folder": str(out / "one")} | bf16,
        {"name": "two from two", "what": "load", "folder": str(out / "two")} | bf16,
        {"name": "copies from two", "what": "load", "folder": str(out / "two"), "fsdp_size": 1} | bf16,
        {"name": "two from copies", "what": "load", "folder": str(out / "copies")} | bf16,
        {"name": "broken", "what": "broken"},
        {"name": "verl", "what": "verl", "folder": VERL},
        {"name": "verl copies", "what": "verl", "folder": "verl copies", "replicas": True},
    ]
    return out, one, run_ranks(out, cases, program=PROGRAM)


def test_two_ranks_go_on_to_the_bit_from_what_they_saved_in_the_background(results: Any) -> None:
    _, _, two = results
    for rank in two:
        assert rank["two from two"]["updates"] == rank["two"]["updates"]
        assert all(torch.equal(rank["two from two"]["weights"][n], w) for n, w in rank["two"]["weights"].items())
        assert torch.equal(rank["two from two"]["drawn"], rank["two"]["drawn"])


@pytest.mark.parametrize("case", ["two from one", "copies from two", "two from copies"])
def test_ranks_go_on_from_what_another_number_of_ranks_saved(results: Any, case: str) -> None:
    _, one, two = results
    for rank in two:
        for name, weight in one["weights"].items():
            torch.testing.assert_close(rank[case]["weights"][name], weight, atol=2e-2, rtol=2e-2)
        assert rank[case]["updates"][0]["grad_norm"] == pytest.approx(one["updates"][0]["grad_norm"], rel=1e-2)


@pytest.mark.parametrize("folder", ["two", "copies"])
def test_one_rank_goes_on_from_what_two_saved(results: Any, folder: str) -> None:
    out, one, _ = results
    engine = make_engine(dtype="bfloat16", seed=4)
    engine.load_checkpoint(out / folder)
    after = train(engine, **HOW)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(after["weights"][name], weight, atol=2e-2, rtol=2e-2)


def test_the_rows_of_two_ranks_make_the_state_of_one(results: Any) -> None:
    out, _, _ = results
    whole, halves = read_optimizer(out / "one"), read_optimizer(out / "two")
    assert whole.keys() == halves.keys()
    for name, entry in whole.items():
        assert entry.keys() == halves[name].keys() == {"master weight", "step", "exp_avg", "exp_avg_sq"}
        for key, value in entry.items():
            torch.testing.assert_close(halves[name][key], value, atol=1e-3, rtol=2e-2)


def test_each_rank_writes_its_rows_alone_and_copies_write_once(results: Any) -> None:
    out, _, _ = results
    files = sorted((out / "two" / "optimizer").iterdir())
    assert [file.name for file in files] == ["shard_00000_of_00002.safetensors", "shard_00001_of_00002.safetensors"]
    sizes = []
    for file in files:
        with safe_open(file, "pt") as opened:
            sizes.append(tuple(opened.get_slice("model.model.embed_tokens.weight/exp_avg").get_shape()))
    assert sizes == [(24, 32), (24, 32)]
    assert [file.name for file in (out / "copies" / "optimizer").iterdir()] == ["shard_00000_of_00001.safetensors"]
    assert len(list((out / "copies" / "extra").iterdir())) == 2


def test_a_part_that_is_missing_is_named(results: Any, tmp_path: Path) -> None:
    out, _, _ = results
    copy = tmp_path / "optimizer"
    copy.mkdir()
    first, second = sorted((out / "two" / "optimizer").iterdir())
    (copy / first.name).symlink_to(first)
    with pytest.raises(CheckpointError, match="incomplete: shard_00001_of_00002"):
        make_engine(dtype="bfloat16").load_checkpoint(tmp_path, ("optimizer",))
    (copy / first.name).unlink()
    (copy / second.name).symlink_to(second)
    with pytest.raises(CheckpointError, match="incomplete or mixed"):
        make_engine(dtype="bfloat16").load_checkpoint(tmp_path, ("optimizer",))


def test_a_disk_that_one_rank_finds_full_is_every_ranks_error_and_they_go_on_together(results: Any) -> None:
    _, _, two = results
    assert two[0]["broken"]["said"] == two[1]["broken"]["said"]
    assert "the disk is full" in two[0]["broken"]["said"]


@pytest.mark.parametrize("folder", ["verl", "verl copies"])
def test_shards_of_verl_are_put_together(results: Any, folder: str) -> None:
    out, _, two = results
    weights = load_verl_model(out / (VERL if folder == "verl" else folder))
    for name, weight in two[0][folder]["weights"].items():
        assert torch.equal(weights[name], weight)


def test_a_run_goes_on_with_weights_and_moments_of_verls_ranks(results: Any) -> None:
    out, _, two = results
    engine = make_engine(seed=3)
    engine.load_checkpoint(out / VERL, EVERYTHING)
    weights = dict(engine.named_weights())
    for name, weight in two[0]["verl"]["weights"].items():
        assert torch.equal(weights[name], weight), name
    assert engine._optimizer is not None
    for name, moment in two[0]["verl"]["moments"].items():
        state = engine._optimizer.states()[f"model.{name}"]
        assert torch.equal(state["exp_avg"], moment), name
        assert float(state["step"]) == 1.0


def test_a_model_starts_from_verls_folder(results: Any) -> None:
    out, _, two = results
    engine = make_engine(path=str(out / VERL), trained=False)
    weights = dict(engine.named_weights())
    assert all(torch.equal(weights[name], weight) for name, weight in two[0]["verl"]["weights"].items())


def test_what_of_verls_state_cannot_be_taken_over_is_said(
    results: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, _, _ = results
    for file in (out / VERL).glob("model_*"):
        (tmp_path / file.name).symlink_to(file)
    engine = make_engine(seed=3)
    engine.load_checkpoint(tmp_path, ("model", "optimizer"))
    assert "there is no optim_world_size_*_rank_*.pt" in caplog.text
    assert engine._optimizer is not None
    assert not any(engine._optimizer.states().values())
    (tmp_path / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(CheckpointError, match="incomplete: model_world_size_2_rank_1"):
        engine.load_checkpoint(tmp_path, ("model",))


class Call:
    """What runs when it is unpickled by a reader that lets it."""

    def __reduce__(self) -> Any:
        return (print, ("run",))


def test_a_file_that_would_run_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": Call()}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(CheckpointError, match="without running code"):
        load_verl_model(tmp_path)
    assert capsys.readouterr().out == ""


def test_shards_of_fsdp1_are_refused_with_the_way_out(tmp_path: Path) -> None:
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    class Old:
        def __reduce__(self) -> Any:
            return (ShardedTensor, ())

    torch.save({"weight": Old()}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(CheckpointError, match=r"ShardedTensors, as FSDP1 .*model_merger"):
        load_verl_model(tmp_path)


def test_the_saved_folders_load_in_transformers(results: Any) -> None:
    out, _, _ = results
    for folder in (out / "one", out / "two", out / "two" / "huggingface", out / "copies"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.bfloat16
