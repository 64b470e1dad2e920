"""The benchmark of training does the work that it names, on any number of ranks; its ratios are those of its figures."""

import json
import math
import sys

import pytest
import torch

from benchmarks import train_ranks, train_step
from benchmarks.peers import hf_train_engine
from benchmarks.train_work import CAP, SIGMA, TrainWork
from burnish.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from burnish.engine import FSDPEngine
from burnish.model.flops import FlopsCounter
from burnish.model.load import load_causal_lm
from burnish.protocol import DataProto
from burnish.workers.losses import make_policy_loss

SMALL = ["--tokens", "48", "--row", "8", "--prompt", "3", "--repeats", "1", "--dtype", "float32"]


@pytest.fixture
def run(monkeypatch, capfd, tiny_model_path, tmp_path):
    """Runs the benchmark on the tiny model and gives the printed lines."""

    def call(*arguments: str) -> list[str]:
        fixed = ["--model", tiny_model_path, "--device", "cpu", "--logs", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["train_step", *SMALL, *fixed, *arguments])
        train_step.main()
        return capfd.readouterr().out.splitlines()

    return call


@pytest.mark.slow
def test_beside_the_plain_loop_the_last_line_is_json_and_a_profile_is_written(run, tiny_model_path, tmp_path):
    peer = ("--peer", "hf", "--peer-repeats", "1", "--peer-precision", "float32")
    lines = run(*peer, "--profile", str(tmp_path / "profile.txt"), "--json")
    result = json.loads(lines[-1])
    assert result["ratio"] == pytest.approx(result["tokens_per_s"] / result["peer_tokens_per_s"])
    assert "torch" in result["device"]
    (figures,) = result["results"].values()
    assert figures["tokens_per_s"] == pytest.approx(48 / figures["seconds"])
    assert sum(figures["parts"].values()) == pytest.approx(figures["seconds"], rel=0.2)
    # Six rows of 3 + 5 tokens; the last one of each predicts nothing.
    counter = FlopsCounter(load_causal_lm(tiny_model_path))
    flops = counter.flops(6 * 7, 6 * 7 * 8 / 2, 6 * 5, backward=True)
    assert figures["tera_operations"] == pytest.approx(flops / 1e12)
    assert figures["mfu"] == pytest.approx(flops / figures["seconds"] / figures["peak_tera_flops"] / 1e12)
    assert (tmp_path / "profile.txt").read_text().startswith("One update: 48 tokens in rows of 3 + 5\n")


@pytest.mark.slow
def test_two_ranks_do_the_same_work_also_while_one_is_profiled(run, tmp_path):
    result = json.loads(run("--gpus", "2", "--profile", str(tmp_path / "profile.txt"), "--json")[-1])
    (one,) = result["results"].values()
    two = one["several_ranks"]
    assert two["ranks"] == 2
    assert result["scaling"] == pytest.approx(one["seconds"] / two["seconds"])
    assert two["tera_operations"] == pytest.approx(one["tera_operations"])
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


def test_a_shared_prompt_counts_once_as_work(tiny_model_path):
    def operations(shared: bool) -> float:
        settings = {
            "model": tiny_model_path,
            "device": "cpu",
            "work": {"tokens": 48, "row": 8, "prompt": 3, "samples": 3},
            "overrides": {"actor_rollout_ref.actor.use_prefix_grouper": shared},
            "repeats": 1,
            "profile": None,
        }
        return train_ranks.Rank(0, 1, settings).figures()["update_flops"]

    assert operations(True) < 0.9 * operations(False)


@pytest.mark.parametrize("log_normal", [False, True])
def test_rows_have_all_tokens_and_groups_share_their_prompt(log_normal):
    work = TrainWork(tokens=4000, row=40, prompt=10, samples=4, log_normal=log_normal)
    tensors = work.tensors(100)
    mask = tensors["attention_mask"].bool()
    assert int(mask.sum()) == 4000
    prompts = tensors["input_ids"][:, :10]
    groups = torch.arange(len(prompts)) // 4
    assert all(len(prompts[groups == group].unique(dim=0)) == 1 for group in groups.unique())
    assert len(prompts.unique(dim=0)) == len(groups.unique())
    assert bool((tensors["responses"][~tensors["response_mask"]] == 0).all())
    lengths = tensors["response_mask"].sum(1)
    if not log_normal:
        assert set(lengths[:-1].tolist()) == {30}
        return
    assert len(lengths.unique()) > 20
    assert float(lengths.float().mean()) == pytest.approx(30, rel=0.15)
    median = 30 / math.exp(SIGMA**2 / 2)
    assert int(lengths[:-1].max()) <= round(CAP * median)


def test_the_plain_loop_computes_the_loss_that_burnish_computes(tiny_model_path):
    work = TrainWork(tokens=60, row=10, prompt=4, log_normal=True)
    fields = {"tokens": 60, "row": 10, "prompt": 4, "log_normal": True}
    loop = hf_train_engine.Loop(
        {
            "model": tiny_model_path,
            "device": "cpu",
            "precision": "float32",
            "work": fields,
            "micro_batch_size": 4,
            "gradient_checkpointing": True,
            "lr": 0.0,
        }
    )
    engine = FSDPEngine(HFModelConfig(path=tiny_model_path), FSDPEngineConfig(dtype="float32"), FSDPOptimizerConfig())
    rows = DataProto.from_dict(tensors=work.tensors(loop.model.config.vocab_size))
    metrics = engine.train_batch(rows, make_policy_loss(FSDPActorConfig()), outputs=("log_probs", "entropy"))
    num_labels = int(rows.tensors["loss_mask"].sum())
    loss = loop._loss(dict(rows.tensors.items())) / num_labels
    assert float(loss.detach()) == pytest.approx(metrics["actor/pg_loss"], abs=1e-6)
    loss.backward()
    ours, theirs = engine.full_gradients(), dict(loop.model.named_parameters())
    for name, gradient in ours.items():
        expected = theirs[name.removeprefix("model.")].grad
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    assert loop.update()["tokens"] == 60
