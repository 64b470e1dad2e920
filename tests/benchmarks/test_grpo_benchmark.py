"""The benchmark of a GRPO step: both sides do the work that it names, and its ratios are those of its figures."""

import json
import sys
from types import SimpleNamespace

import pytest
from transformers import AutoConfig, AutoTokenizer

from benchmarks import grpo_step, models
from benchmarks.grpo_work import CPU_WORK, GRPOWork, prompt_texts, score

SMALL = ["--prompts", "2", "--samples", "2", "--prompt-length", "5", "--response-length", "3", "--repeats", "2"]
ROWS, RESPONSE_TOKENS = 4, 12


class FakePeer:
    """Answers as ``trl_engine`` does, and counts its turns."""

    name = "trl"
    facts = {"versions": {"trl": "0"}, "start_seconds": 1.0}  # noqa: RUF012

    def __init__(self, tokens: int = RESPONSE_TOKENS, learns: bool = True) -> None:
        self.turns, self.tokens, self.learns = 0, tokens, learns

    def run(self, work: dict) -> dict:
        self.turns += 1
        return {
            "seconds": 100.0 + self.turns,
            "cpu_seconds": 200.0,
            "stages": {"gen": 1.0, "reward": 0.0, "update_actor": 2.0},
            "tokens": self.tokens,
            "mean_score": 0.5,
            "fingerprint": float(self.turns * self.learns),
            "memory_gib": None,
        }

    def __enter__(self) -> "FakePeer":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def run(monkeypatch, capfd, tiny_model_path, tmp_path):
    """Runs the benchmark on the tiny model, beside a peer if one is given, and gives the printed lines."""
    monkeypatch.setenv("BURNISH_BENCHMARK_MODELS", str(tmp_path / "models"))

    def call(*arguments: str, peer: FakePeer | None = None) -> list[str]:
        monkeypatch.setattr(grpo_step, "start_peer", lambda *_: peer)
        fixed = ["--model", tiny_model_path, "--device", "cpu", "--logs", str(tmp_path)]
        monkeypatch.setattr(
            sys, "argv", ["grpo_step", *SMALL, *fixed, *([] if peer is None else ["--peer", "trl"]), *arguments]
        )
        grpo_step.main()
        return capfd.readouterr().out.splitlines()

    return call


@pytest.mark.slow
def test_every_variant_is_measured_with_its_stages_and_the_last_line_is_json(run):
    result = json.loads(run("--json")[-1])
    assert result["ratio"] is None
    assert result["peer_seconds"] is None
    assert "torch" in result["device"]
    defaults, plain = result["results"].values()
    assert (defaults["variant"], plain["variant"]) == ("defaults", "plain")
    assert result["seconds"] == defaults["seconds"]
    assert plain["dtype"] == "float32"
    for figures in (defaults, plain):
        assert figures["seconds_min"] <= figures["seconds"] <= figures["seconds_max"]
        assert set(figures["stages"]) == {"gen", "reward", "adv", "update_actor", "update_weights"}
        assert 0.5 * figures["seconds_max"] < sum(figures["stages"].values()) < 1.5 * figures["seconds_max"]
        assert 0 < figures["mean_score"] < 1
        assert figures["response_tokens_per_s"] == pytest.approx(RESPONSE_TOKENS / figures["seconds"])


def test_both_sides_take_turns_and_the_ratio_is_that_of_the_medians(run):
    peer = FakePeer()
    lines = run("--variant", "plain", "--peer-repeats", "3", "--json", peer=peer)
    # Two with burnish's two steps and the one that warms up.
    assert peer.turns == 3
    result = json.loads(lines[-1])
    assert result["peer_seconds"] == 102.0
    assert result["ratio"] == pytest.approx(result["peer_seconds"] / result["seconds"])
    (figures,) = result["results"].values()
    assert figures["cpu_ratio"] == pytest.approx(200.0 / figures["cpu_seconds"])
    assert any("trl over burnish" in line for line in lines)


def test_the_memory_of_a_peer_that_tells_none_is_what_it_takes_of_the_card(monkeypatch, tmp_path):
    figures = {"model": "tiny", "variant": "plain", "seconds": 1.0, "cpu_seconds": 1.0, "memory_gib": 2.0}
    monkeypatch.setattr(grpo_step, "measure", lambda *_: dict(figures))
    monkeypatch.setattr(grpo_step, "start_peer", lambda *_: FakePeer())
    monkeypatch.setattr(grpo_step, "table", str)
    monkeypatch.setattr(grpo_step, "GPUMemory", lambda: SimpleNamespace(stop=lambda: 41.5))
    args = grpo_step.parse(["--device", "cpu", "--peer", "trl", "--variant", "plain", "--logs", str(tmp_path)])
    # On a card the peer comes second.
    args.device = "cuda"
    (result,) = grpo_step.measure_model("tiny", GRPOWork(**_small()), args)
    assert (result["memory_gib"], result["peer_memory_gib"]) == (2.0, 41.5)


def test_the_peer_stops_after_its_seconds_but_counts_once(run):
    peer = FakePeer()
    result = json.loads(run("--variant", "plain", "--peer-seconds", "1", "--json", peer=peer)[-1])
    assert peer.turns == 1
    assert result["peer_seconds"] == 101.0


def test_a_side_that_does_less_than_the_work_or_does_not_learn_is_no_result(run):
    with pytest.raises(Exception, match="trl trained on 11 response tokens where 12 were asked for"):
        run("--variant", "plain", peer=FakePeer(tokens=RESPONSE_TOKENS - 1))
    with pytest.raises(RuntimeError, match="trl left its weights as they were"):
        run("--variant", "plain", peer=FakePeer(learns=False))
    with pytest.raises(RuntimeError, match="rewards were not computed"):
        grpo_step.check_step({"tokens": 12, "mean_score": 0.0}, GRPOWork(**_small()), "burnish")


def test_configuration_of_burnish_is_taken_from_the_command_line(run):
    with pytest.raises(Exception, match="burnish left its weights as they were"):
        run("--variant", "plain", "--set", "actor_rollout_ref.actor.optim.lr=0.0", "trainer.seed=3")


def test_prompts_have_their_length_in_ids_of_the_word_tokenizer(monkeypatch, tmp_path):
    monkeypatch.setenv("BURNISH_BENCHMARK_MODELS", str(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(models.word_tokenizer_path(1000))
    texts = prompt_texts(CPU_WORK, 1000, 6)
    assert texts == prompt_texts(CPU_WORK, 1000, 6)
    assert len(set(texts)) == 6
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert ids == [int(word) for word in text.split()]
        assert len(ids) == CPU_WORK.prompt_length
        assert tokenizer.decode(ids) == text
    assert tokenizer.chat_template is None


def test_the_tiny_model_has_the_shape_that_its_figures_are_of(monkeypatch, tmp_path):
    monkeypatch.setenv("BURNISH_BENCHMARK_MODELS", str(tmp_path))
    folder = models.model_path("tiny")
    config = AutoConfig.from_pretrained(folder)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (4, 128, 49152)
    assert len(AutoTokenizer.from_pretrained(folder)) == 49152


def test_the_score_is_the_share_of_even_digits():
    assert score("12 34") == 0.5
    assert score("2468") == 1.0
    assert score("no digit") == 0.0


def _small() -> dict[str, int]:
    return {"prompts": 2, "samples": 2, "prompt_length": 5, "response_length": 3}
