"""The benchmark of switches: off is really off, it computes the same, and its ratios are those of its figures."""

import json
import sys

import pytest
import torch

from benchmarks.switches import __main__ as switches
from benchmarks.switches import run as switches_run
from benchmarks.switches.off import CountedRows, PaddedRows, model_passes, plain_head
from benchmarks.switches.work import CAP, GPU_WORK, SwitchesWork, slow_score
from burnish.config import FSDPEngineConfig, HFModelConfig
from burnish.engine import FSDPEngine
from burnish.model.head import fused_head
from burnish.model.kernels.head import LogitTransform
from burnish.protocol import DataProto

SMALL = ["--prompts", "2", "--samples", "2", "--prompt-length", "6", "--response-length", "4", "--max-token-len", "40"]
FAST = ["--reward-seconds", "0.001", "--repeats", "1", "--set", "actor_rollout_ref.actor.fsdp_config.dtype=float32"]
PROMPTS, RESPONSES = [2, 4, 2, 4], [3, 1, 5, 5]


def batch() -> DataProto:
    """Two prompts with two responses each: prompts padded on the left to 4 tokens, responses on the right to 5."""
    generator = torch.Generator().manual_seed(0)
    column = torch.arange(4)
    lengths, responses = torch.tensor(PROMPTS)[:, None], torch.tensor(RESPONSES)[:, None]
    prompt_mask, response_mask = column >= 4 - lengths, torch.arange(5) < responses
    prompts = torch.randint(3, 100, (2, 4), generator=generator)[[0, 1, 0, 1]]
    mask = torch.cat([prompt_mask, response_mask], 1)
    ids = torch.cat([prompts, torch.randint(3, 100, (4, 5), generator=generator)], 1)
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.where(mask, ids, 0),
            "attention_mask": mask.long(),
            "responses": torch.where(response_mask, ids[:, 4:], 0),
            "response_mask": response_mask,
            "loss_mask": response_mask,
        }
    )


@pytest.fixture(scope="module")
def engine(tiny_model_path):
    from burnish.config import FSDPOptimizerConfig

    config = FSDPEngineConfig(dtype="float32")
    return FSDPEngine(HFModelConfig(path=tiny_model_path), config, FSDPOptimizerConfig(), share_prompts=None)


def test_padded_rows_compute_padding_and_packed_rows_none():
    def computed(kind: type[CountedRows], share: bool) -> tuple[int, int]:
        CountedRows.computed.clear()
        rows = kind(batch(), share)
        assert rows.num_tokens([0, 1, 2, 3]) == rows.pack([0, 1, 2, 3], torch.device("cpu")).num_tokens
        return CountedRows.computed[-1]

    # The last token of each row predicts nothing.
    assert computed(CountedRows, False) == (sum(PROMPTS) + sum(RESPONSES) - 4, sum(RESPONSES))
    tokens, labels = computed(PaddedRows, False)
    assert tokens == 4 * (4 + 5) - 4
    # A label in every column; a row whose padding is of its prompt alone needs one to be computed to its end.
    assert 4 * 5 <= labels <= 4 * 5 + 1
    assert computed(CountedRows, True) == (2 + 4 + sum(RESPONSES) - 4, sum(RESPONSES))
    assert computed(PaddedRows, True) == (2 + 4 + 4 * 5 - 4, 4 * 5)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("how", [{"max_token_len": 20}, {"micro_batch_size": 2}])
@pytest.mark.parametrize("off", ["remove_padding", "fused_head"])
def test_without_a_switch_log_probs_entropy_and_gradients_are_the_same(engine, share, how, off):
    def passes(**on: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
        def loss(values, rows, info):
            weights = torch.arange(1.0, 6.0) * rows.tensors["loss_mask"]
            return (values["log_probs"] * weights).sum() / info["batch_num_tokens"], {}

        engine._share_prompts = share
        with model_passes(**({"remove_padding": True, "fused_head": True} | on)):
            outputs = engine.infer_batch(
                batch(), temperature=0.7, outputs=("log_probs", "entropy", "top1_log_probs"), **how
            )
            engine.train_batch(batch(), loss, temperature=0.7, outputs=("log_probs",), **how)
        gradients = engine.full_gradients()
        return outputs, gradients, engine.optimizer_step(1)["grad_norm"]

    weights = {name: weight.clone() for name, weight in engine.module.named_parameters()}
    try:
        outputs, gradients, norm = passes()
        with torch.no_grad():
            for name, weight in engine.module.named_parameters():
                weight.copy_(weights[name])
        others, other_gradients, other_norm = passes(**{off: False})
    finally:
        with torch.no_grad():
            for name, weight in engine.module.named_parameters():
                weight.copy_(weights[name])
    assert norm > 0
    assert other_norm == pytest.approx(norm, rel=1e-5)
    for name, value in outputs.items():
        torch.testing.assert_close(others[name], value, rtol=1e-4, atol=1e-5)
        assert not others[name][~batch().tensors["response_mask"]].any()
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, rtol=1e-3, atol=1e-6)


def test_the_plain_head_is_the_fused_one_and_refuses_what_it_does_not_compute():
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(7, 8), torch.randn(20, 8), torch.randint(0, 20, (7,))
    outputs = ("log_probs", "entropy", "top1_log_probs")
    expected = fused_head(hidden, weight, labels, temperature=0.5, outputs=outputs)
    found = plain_head(hidden, weight, labels, temperature=0.5, outputs=outputs)
    assert list(found) == list(outputs)
    for name in outputs:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="sum_pi_squared"):
        plain_head(hidden, weight, labels, outputs=("sum_pi_squared",))
    with pytest.raises(ValueError, match="plain logits"):
        plain_head(hidden, weight, labels, transform=LogitTransform(softcap=30.0))


def test_lengths_are_log_normal_capped_and_the_same_every_time():
    work = SwitchesWork(
        prompts=200, samples=8, prompt_length=100, response_length=50, max_token_len=1000, reward_seconds=0.0
    )
    lengths = work.response_lengths()
    assert lengths == work.response_lengths()
    assert len(lengths) == 1600
    assert max(lengths) == CAP * 50
    assert sorted(lengths)[800] == pytest.approx(50, rel=0.1)
    assert [len(text.split()) for text in work.texts(1000)] == work.prompt_lengths()
    assert work.rows_that_always_fit == 2
    assert (
        GPU_WORK.rows_that_always_fit * (GPU_WORK.longest_prompt + GPU_WORK.longest_response) <= GPU_WORK.max_token_len
    )


def test_a_reward_takes_its_time_and_is_the_same_in_both_kinds():
    for kind in ("wait", "compute"):
        assert slow_score("12 34", seconds=0.0, kind=kind, extra_info=None) == 0.5


@pytest.mark.slow
def test_every_variant_does_the_same_step_and_the_ratios_are_of_its_seconds(
    monkeypatch, capfd, tiny_model_path, tmp_path
):
    monkeypatch.setenv("BURNISH_BENCHMARK_MODELS", str(tmp_path / "models"))
    out = tmp_path / "results" / "switches.json"
    fixed = ["--model", tiny_model_path, "--device", "cpu", "--commit", "abc", "--json", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["switches", *fixed, *SMALL, *FAST])
    switches.main()
    lines = capfd.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert json.loads(out.read_text()) == result
    assert result["commit"] == "abc"
    (figures,) = result["results"].values()
    of = figures["variants"]
    assert list(of) == ["all on", *(f"without {name}" for name in switches_run.SWITCHES), "all off"]
    assert figures["same_tokens"] == 1.0
    assert max(figures["differences"].values()) < 1e-4
    assert result["gains"]["fused_head"] == pytest.approx(
        of["without fused_head"]["seconds"][0] / of["all on"]["seconds"][0], rel=1e-3
    )
    assert result["together"] == pytest.approx(of["all off"]["seconds"][0] / of["all on"]["seconds"][0], rel=1e-3)
    assert of["without remove_padding"]["computed_tokens"] > of["all on"]["computed_tokens"]
    assert of["without shared_prompt"]["computed_tokens"] > of["all on"]["computed_tokens"]
    assert of["without dynamic_batch"]["micro_batches"] > of["all on"]["micro_batches"]
    assert of["without fused_head"]["computed_labels"] == of["all on"]["computed_labels"] == figures["response_tokens"]
    assert of["all off"]["computed_tokens"] >= of["without remove_padding"]["computed_tokens"]
    assert any(line.strip().startswith("all together") for line in lines)
    monkeypatch.setattr(sys, "argv", ["switches", "--table", str(out)])
    switches.main()
    printed = capfd.readouterr().out.splitlines()
    assert "commit abc" in printed[0]
    (row,) = [line for line in printed if line.startswith("| all together")]
    assert f"| {result['together']:.2f} (" in row
    assert len({line.count("|") for line in printed if line.startswith("|")}) == 1


@pytest.mark.slow
def test_steps_that_do_not_train_on_the_same_are_no_result(monkeypatch, tiny_model_path, tmp_path):
    monkeypatch.setenv("BURNISH_BENCHMARK_MODELS", str(tmp_path / "models"))
    # Weights that move: other tokens are sampled, which are replaced, and the gradient is another one, which is told.
    moving = ["actor_rollout_ref.actor.optim.lr=0.05"]
    monkeypatch.setattr(
        sys, "argv", ["switches", "--model", tiny_model_path, "--device", "cpu", *SMALL, *FAST, *moving]
    )
    with pytest.raises(RuntimeError, match="they do not compute the same"):
        switches.main()


def test_a_variant_that_computes_something_else_is_no_result():
    turns = [{"loss": 0.0, "entropy": 2.0, "grad_norm": 1.0}, {"loss": 0.00005, "entropy": 2.0, "grad_norm": 1.02}]
    assert switches.check_same(turns, ["all on", "all off"], 0.03) == pytest.approx(
        {"loss": 0.005, "entropy": 0.0, "grad_norm": 0.02}
    )
    with pytest.raises(RuntimeError, match="'all off' has grad_norm=1.02 where all on has 1:"):
        switches.check_same(turns, ["all on", "all off"], 0.01)
    with pytest.raises(RuntimeError, match="entropy"):
        switches.check_same([turns[0], turns[1] | {"entropy": float("nan")}], ["all on", "all off"], 0.03)


def test_the_run_begins_with_all_switches_on():
    with pytest.raises(ValueError, match="first turn"):
        switches_run.run_turns(
            GPU_WORK, [frozenset()], model="", tokenizer="", vocab_size=9, device="cpu", overrides={}
        )
