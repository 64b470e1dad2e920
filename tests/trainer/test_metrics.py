"""Statistics of a batch, by hand and against plain torch."""

import math

import pytest
import torch

from burnish.core_algos import policy_difference
from burnish.protocol import DataProto, object_array
from burnish.trainer.ppo.metrics import compute_data_metrics, compute_rollout_difference
from burnish.trainer.ppo.pace import compute_timing_metrics
from burnish.trainer.ppo.token_statistics import TokenStatistics, kept_tokens

NUM_PROMPT, NUM_RESPONSE = 3, 5


def batch_of(num_rows: int = 6, seed: int = 0) -> DataProto:
    """Rows of random lengths, with numbers of all kinds and NaN where nobody is to look."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, NUM_RESPONSE + 1, (num_rows, 1), generator=generator)
    mask = torch.arange(NUM_RESPONSE) < lengths
    prompt_mask = torch.arange(NUM_PROMPT).flip(0) < torch.randint(
        1, NUM_PROMPT + 1, (num_rows, 1), generator=generator
    )

    def numbers(key_mask: torch.Tensor) -> torch.Tensor:
        return torch.randn(key_mask.shape, generator=generator).masked_fill(~key_mask, math.nan)

    loss_mask = mask & (torch.arange(num_rows) % 3 > 0)[:, None]
    tensors = {
        "attention_mask": torch.cat([prompt_mask, mask], dim=-1),
        "response_mask": mask,
        "loss_mask": loss_mask,
        "valid": torch.arange(num_rows) % 3 > 0,
        "token_level_scores": torch.ones(num_rows, NUM_RESPONSE),
        "token_level_rewards": torch.ones(num_rows, NUM_RESPONSE),
        "advantages": numbers(loss_mask),
        "returns": numbers(loss_mask),
        "values": numbers(loss_mask),
        "old_log_probs": -numbers(mask).abs(),
        "rollout_log_probs": -numbers(mask).abs(),
    }
    reasons = object_array(["abort" if row == 1 else "stop" for row in range(num_rows)])
    return DataProto.from_dict(tensors=tensors, non_tensors={"finish_reason": reasons})


@pytest.fixture(params=[1, 7, 1 << 20], ids=["a-row-each", "few-rows-each", "all-at-once"])
def blocks(request, monkeypatch):
    """How many elements are looked at at once; at least a row."""
    monkeypatch.setattr(policy_difference, "_ELEMENTS", request.param)


@pytest.mark.usefixtures("blocks")
def test_tokens_that_are_trained_on_make_the_statistics_and_no_others():
    batch = batch_of()
    metrics = compute_data_metrics(batch, True, NUM_PROMPT, NUM_RESPONSE)
    kept = {key: batch.tensors[key][batch.tensors["loss_mask"]].double() for key in ("advantages", "returns", "values")}
    for key, values in kept.items():
        expected = {"mean": values.mean(), "max": values.max(), "min": values.min()}
        for name, number in expected.items():
            assert metrics[f"critic/{key}/{name}"] == pytest.approx(number.item()), (key, name)
    explained = 1 - (kept["returns"] - kept["values"]).var() / (kept["returns"].var() + 1e-5)
    assert metrics["critic/vf_explained_var"] == pytest.approx(explained.item())


def test_lengths_count_tokens_of_prompt_and_response():
    batch = batch_of()
    metrics = compute_data_metrics(batch, False, NUM_PROMPT, NUM_RESPONSE)
    prompts = batch.tensors["attention_mask"][:, :NUM_PROMPT].sum(-1).float()
    responses = batch.tensors["response_mask"].sum(-1).float()
    assert metrics["prompt_length/mean"] == pytest.approx(prompts.mean().item())
    assert metrics["prompt_length/clip_ratio"] == pytest.approx((prompts == NUM_PROMPT).float().mean().item())
    assert metrics["response_length/max"] == responses.max()
    assert metrics["response_length_non_aborted/mean"] == pytest.approx(responses[[0, 2, 3, 4, 5]].mean().item())
    assert metrics["response/aborted_ratio"] == pytest.approx(1 / 6)
    assert metrics["training/num_valid_rows"] == 4
    assert not any(key.startswith(("critic/values", "critic/vf")) for key in metrics)


def test_a_batch_without_a_token_to_train_on_has_no_statistics_of_tokens():
    batch = batch_of()
    batch.tensors["loss_mask"] = torch.zeros_like(batch.tensors["loss_mask"])
    metrics = compute_data_metrics(batch, True, NUM_PROMPT, NUM_RESPONSE)
    assert not any(key.startswith(("critic/advantages", "critic/returns", "critic/v")) for key in metrics)
    assert metrics["critic/score/mean"] == NUM_RESPONSE


@pytest.mark.usefixtures("blocks")
def test_the_difference_to_the_rollout_is_that_of_the_probabilities():
    batch = batch_of()
    mask = batch.tensors["response_mask"]
    ours, theirs = (batch.tensors[key][mask].double().exp() for key in ("old_log_probs", "rollout_log_probs"))
    assert compute_rollout_difference(batch) == pytest.approx(
        {
            "training/rollout_probs_diff_mean": (ours - theirs).abs().mean().item(),
            "training/rollout_probs_diff_max": (ours - theirs).abs().max().item(),
            "training/rollout_probs_diff_std": (ours - theirs).abs().std(correction=0).item(),
            "training/rollout_actor_probs_pearson_corr": torch.corrcoef(torch.stack([ours, theirs]))[0, 1].item(),
        }
    )


def test_policies_that_agree_have_no_difference_and_correlate_fully():
    batch = batch_of()
    batch.tensors["rollout_log_probs"] = batch.tensors["old_log_probs"]
    metrics = compute_rollout_difference(batch)
    assert metrics["training/rollout_probs_diff_max"] == 0
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1, abs=1e-12)
    del batch.tensors["old_log_probs"]
    assert compute_rollout_difference(batch) == {}


def test_a_log_prob_of_nan_shows_in_every_number():
    batch = batch_of()
    batch.tensors["old_log_probs"][2, 0] = math.nan
    metrics = compute_rollout_difference(batch)
    assert len(metrics) == 3
    assert all(math.isnan(value) for value in metrics.values())


def test_equal_values_far_from_zero_have_no_variance_and_no_values_no_statistics():
    statistics = TokenStatistics(torch.zeros(0, dtype=torch.float64))
    assert (statistics.summary("none"), statistics.variance()) == ({}, 0.0)
    for size in (3, 0, 5):
        statistics.merge(TokenStatistics(torch.full((size,), 1e8, dtype=torch.float64)))
    assert (statistics.count, statistics.mean.item(), statistics.variance()) == (8, 1e8, 0.0)


def test_kept_tokens_come_in_the_order_of_the_rows_and_the_batch_stays_as_it_is():
    values = torch.arange(6.0, dtype=torch.float64).view(3, 2)
    mask = torch.tensor([[True, True], [False, False], [False, True]])
    kept = kept_tokens(values, mask, slice(0, 3))
    assert kept.tolist() == [0.0, 1.0, 5.0]
    kept.zero_()
    assert values[0].tolist() == [0.0, 1.0]


def test_threads_change_no_digit(monkeypatch):
    monkeypatch.setattr(policy_difference, "_ELEMENTS", 7)
    before, found = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            found.append(compute_data_metrics(batch_of(40), True, NUM_PROMPT, NUM_RESPONSE))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


def test_milliseconds_per_token_are_of_the_tokens_that_a_stage_works_on():
    batch = batch_of()
    num_tokens = int(batch.tensors["attention_mask"].sum())
    metrics = compute_timing_metrics(batch, {"gen": 2.0, "adv": 1.0, "step": 3.0}, num_gen_tokens=50)
    assert metrics == pytest.approx(
        {
            "timing_s/gen": 2.0,
            "timing_s/adv": 1.0,
            "timing_s/step": 3.0,
            "timing_per_token_ms/gen": 40.0,
            "timing_per_token_ms/adv": 1000 / num_tokens,
        }
    )
