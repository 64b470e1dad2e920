"""The rollout benchmark measures what it says: both engines do the same work, and the last line holds its figures."""

import json
import sys

import numpy as np
import pytest
import torch

from benchmarks import models, rollout, rollout_work
from benchmarks.peers import client, hf_engine, vllm_engine
from burnish.model.load import load_causal_lm

SMALL = ["--prompts", "3", "--samples", "2", "--prompt-length", "5", "--response-length", "4", "--repeats", "1"]


@pytest.fixture
def run(monkeypatch, capfd, tiny_model_path, tmp_path):
    """Runs the benchmark on the tiny model, and gives the printed lines."""

    def call(*arguments: str) -> list[str]:
        fixed = ["--model", tiny_model_path, "--device", "cpu", "--logs", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["rollout", *SMALL, *fixed, *arguments])
        rollout.main()
        return capfd.readouterr().out.splitlines()

    return call


@pytest.mark.slow
def test_the_last_line_is_json_whose_ratio_is_that_of_its_rates(run):
    how = ("--dtype", "float32", "--peer", "hf", "--peer-batch-sizes", "2", "6", "--json")
    lines = run("--scenario", "cpu", "lognormal", *how)
    result = json.loads(lines[-1])
    assert result["ratio"] == pytest.approx(result["tokens_per_s"] / result["peer_tokens_per_s"])
    assert "torch" in result["device"]
    assert list(result["scenarios"]) == ["cpu/float32", "lognormal/float32"]
    for figures in result["scenarios"].values():
        assert figures["tokens_per_s_min"] <= figures["tokens_per_s"] <= figures["tokens_per_s_max"]
        assert figures["peer_tokens_per_s"] == max(figures["peer_tokens_per_s_by_batch_size"].values())
        assert figures["log_prob_max_difference"] < 1e-4
        assert figures["floor_share"] > 0
        assert figures["peer_versions"].keys() == {"transformers", "torch"}
    drawn = result["scenarios"]["lognormal/float32"]
    assert drawn["over_equal_length"] == pytest.approx(drawn["tokens_per_s"] / drawn["equal_length_tokens_per_s"])
    assert any(line.startswith("lognormal") for line in lines)


def test_without_a_peer_there_is_no_ratio_and_a_profile_is_written(run, tmp_path):
    profile = ("--profile", str(tmp_path / "profile.txt"), "--profile-windows", "1")
    result = json.loads(run("--scenario", "cpu", "--dtype", "bfloat16", *profile, "--json")[-1])
    assert result["ratio"] is None
    figures = result["scenarios"]["cpu/bfloat16"]
    assert 0 < figures["trainer_mean_difference_to_float32"] < 0.1
    assert 0 < figures["log_prob_mean_difference_to_float32"] < 0.1
    written = (tmp_path / "profile.txt").read_text()
    assert written.startswith("1 windows of decode steps of 6 sequences")
    assert "aten::" in written


def test_drawn_lengths_are_log_normal_capped_and_the_equal_ones_have_as_many_tokens():
    scenario = rollout_work.SCENARIOS["lognormal"]
    drawn, equal = scenario.lengths(), scenario.equal_lengths()
    assert drawn == scenario.lengths()
    assert max(drawn) == rollout_work.CAP * scenario.response_length
    assert np.median(drawn) == pytest.approx(scenario.response_length, rel=0.05)
    below_cap = [length for length in drawn if length < max(drawn)]
    assert np.std(np.log(below_cap)) == pytest.approx(rollout_work.SIGMA, rel=0.1)
    assert sum(equal) == sum(drawn)
    assert max(equal) - min(equal) <= 1


def test_every_turn_has_new_prompts_that_both_engines_get_with_the_same_lengths():
    scenario = rollout_work.SCENARIOS["lognormal"]
    prompts = rollout_work.random_prompts(scenario, 100, 1)
    assert prompts == rollout_work.random_prompts(scenario, 100, 1)
    assert prompts != rollout_work.random_prompts(scenario, 100, 2)
    requests, _ = rollout_work.native_requests(scenario, prompts, scenario.lengths(), 1)
    work = rollout_work.peer_work(scenario, prompts, scenario.lengths(), 1)
    assert [request.sampling.max_new_tokens for request in requests] == work["max_new_tokens"]
    assert [list(request.prompt_ids) for request in requests] == work["prompts"]


def test_the_peer_generates_every_token_that_was_asked_for_with_its_log_prob(tiny_model_path):
    model = hf_engine.load(tiny_model_path, "float32", "cpu")
    prompts = torch.randint(3, 100, (3, 5)).tolist()
    seen = []
    generate = model.generate
    model.generate = lambda *args, **kwargs: seen.append(generate(*args, **kwargs)) or seen[-1]
    lengths = [4, 2, 4]
    total = hf_engine.generate(model, prompts, lengths)
    with torch.no_grad():
        log_probs = model(seen[0]).logits[:, 4:-1].log_softmax(-1).gather(-1, seen[0][:, 5:, None]).squeeze(-1)
    expected = sum(float(row[:length].sum()) for row, length in zip(log_probs, lengths, strict=True))
    assert total == pytest.approx(expected, abs=1e-3)


def test_a_peer_that_fails_is_named_with_its_log(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_PEER_PYTHON", sys.executable)
    settings = {"model": str(tmp_path / "nothing"), "dtype": "float32", "device": "cpu"}
    with pytest.raises(client.PeerError, match=r"(?s)peer hf failed: .*Its log is .*hf\.log"):
        client.Peer("hf", settings, tmp_path / "hf.log")


def test_without_vllm_the_error_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.delenv("BURNISH_PEER_PYTHON", raising=False)
    monkeypatch.setattr(client, "ROOT", tmp_path)
    monkeypatch.setattr(client, "find_spec", lambda name: None)
    with pytest.raises(client.PeerError, match="make bench-peers"):
        client.interpreter("vllm")


def test_a_random_model_is_made_once_in_its_shape(monkeypatch, tmp_path):
    monkeypatch.setenv("BURNISH_BENCHMARK_MODELS", str(tmp_path))
    small = models.SHAPES["qwen2.5-0.5b"]()
    assert (small.hidden_size, small.num_hidden_layers, small.num_key_value_heads) == (896, 24, 2)
    small.num_hidden_layers, small.hidden_size, small.vocab_size, small.intermediate_size = 1, 28, 50, 32
    small.layer_types = small.layer_types[:1]
    monkeypatch.setitem(models.SHAPES, "small", lambda: small)
    folder = models.model_path("small")
    assert folder == str(tmp_path / "small")
    assert load_causal_lm(folder).config.tie_word_embeddings
    monkeypatch.setitem(models.SHAPES, "small", lambda: pytest.fail("made twice"))
    assert models.model_path("small") == folder


def test_graph_sizes_reach_the_batch_size():
    assert vllm_engine.graph_sizes(1024)[-1] == 1024
    assert vllm_engine.graph_sizes(4) == [1, 2, 4]
