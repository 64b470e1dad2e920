import math

import numpy as np
import pytest
import torch

from burnish.trainer.ppo.baselines import add_reward_baselines, drop_rows_without_baseline, one_row_per_prompt
from burnish.trainer.ppo.scoring import add_reward_components, as_numbers, merge_rounds, reward_number, score_batch
from burnish.utils.errors import RewardError
from tests.trainer.scored_batches import scored

NAMES = ["score", "style"]


def test_counts_of_rounds_add_up_and_means_are_averaged_over_the_rounds_that_have_them():
    rounds = [
        {"reward/abstain_count": 1.0, "reward/acc/mean": 0.5},
        {"reward/abstain_count": 2.0, "reward/acc/mean": 0.0, "reward/style/mean": 3.0},
    ]
    assert merge_rounds(rounds) == {"reward/abstain_count": 3, "reward/acc/mean": 0.25, "reward/style/mean": 3}


def test_components_are_columns_in_the_order_of_the_keys():
    batch = scored("aa", [1.0, 0.5], style=[True, 0.25])
    metrics = add_reward_components(batch, ["style", "score"], "abstain")
    assert batch.tensors["reward_components"].tolist() == [[1.0, 1.0], [0.25, 0.5]]
    assert metrics == {"reward/gdpo_incomplete_count": 0}


@pytest.mark.parametrize("missing", [None, math.nan, math.inf, 10**400])
def test_a_row_without_a_component_is_not_trained_on_and_counted(missing):
    batch = scored("aa", [1.0, 0.5], style=[0.5, missing])
    metrics = add_reward_components(batch, NAMES, "abstain")
    assert batch.tensors["valid"].tolist() == [True, False]
    assert batch.tensors["reward_components"].tolist() == [[1.0, 0.5], [0.0, 0.0]]
    assert metrics == {"reward/gdpo_incomplete_count": 1}


def test_a_row_that_had_no_score_anyway_is_not_counted_again():
    batch = scored("aa", [1.0, 0.0], valid=[True, False], style=[0.5, None])
    assert add_reward_components(batch, NAMES, "raise") == {"reward/gdpo_incomplete_count": 0}
    assert batch.tensors["valid"].tolist() == [True, False]


def test_an_incomplete_row_stops_the_run_if_asked_to():
    batch = scored("aa", [1.0, 0.5], style=[0.5, None])
    with pytest.raises(RewardError, match=r"1 of 2 responses lack.*'score': 0.5, 'style': nan"):
        add_reward_components(batch, NAMES, "raise")


@pytest.mark.parametrize("extras", [{"acc": [1, 0]}, {"acc": [1, 0], "style": ["good", "bad"]}])
def test_a_component_that_no_row_has_as_a_number_is_named_with_those_there_are(extras):
    with pytest.raises(RewardError, match=r"number style\. .* are: score, acc\."):
        add_reward_components(scored("aa", [1, 0], **extras), NAMES, "abstain")


def test_a_batch_in_which_every_response_abstained_lacks_nothing():
    batch = scored("aa", [0, 0], valid=[False, False])
    assert add_reward_components(batch, NAMES, "raise") == {"reward/gdpo_incomplete_count": 0}
    assert batch.tensors["reward_components"].shape == (2, 2)


def test_numbers_bools_and_nones_are_numbers_and_text_is_not():
    assert as_numbers(np.array([1, True, None], dtype=object)).tolist()[:2] == [1, 1]
    assert as_numbers(np.array([10**400, -(10**400)], dtype=object)).tolist() == [math.inf, -math.inf]
    assert as_numbers(np.array([1, "2"], dtype=object)) is None
    assert reward_number(scored("aa", [0.25, 1]), "score").tolist() == [0.25, 1]


def greedy_rows(*scores_and_validity):
    scores, valid = zip(*scores_and_validity, strict=True)
    return scored(["a", "b"], list(scores), valid=list(valid))


def test_every_row_gets_the_greedy_score_of_its_own_prompt():
    batch = add_reward_baselines(scored("abab", [0] * 4), greedy_rows((0.5, True), (0.25, True)))
    assert batch.tensors["reward_baselines"].tolist() == [0.5, 0.25, 0.5, 0.25]
    assert drop_rows_without_baseline(batch) == {"reward/baseline_abstain_count": 0, "reward/baseline_mean": 0.375}
    assert batch.tensors["valid"].all()


def test_rows_whose_prompt_has_no_baseline_are_not_trained_on_and_their_prompts_are_counted():
    batch = add_reward_baselines(scored("abab", [0] * 4), greedy_rows((0.5, True), (0.0, False)))
    assert drop_rows_without_baseline(batch) == {"reward/baseline_abstain_count": 1, "reward/baseline_mean": 0.5}
    assert batch.tensors["valid"].tolist() == [True, False, True, False]
    assert torch.isnan(batch.tensors["reward_baselines"]).tolist() == [False, True, False, True]


def test_the_greedy_rows_are_one_a_prompt_under_a_sample_number_of_their_own():
    batch = scored("bbaa", [0] * 4, sample_index=[0, 1, 0, 1])
    rows = one_row_per_prompt(batch, sample_index=2)
    assert list(rows.non_tensor_batch["uid"]) == ["b", "a"]
    assert list(rows.non_tensor_batch["sample_index"]) == [2, 2]
    assert list(batch.non_tensor_batch["sample_index"]) == [0, 1, 0, 1]


def test_a_manager_that_returns_a_tensor_is_told_what_is_wanted():
    with pytest.raises(
        RewardError, match="manager function returned Tensor, and a burnish.reward.RewardResult is wanted"
    ):
        score_batch(lambda batch: torch.zeros(2, 3), scored("aa", [1, 0]))
