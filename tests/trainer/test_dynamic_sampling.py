import math

import numpy as np
import pytest

from burnish.config import FilterGroupsConfig
from burnish.trainer.ppo.dynamic_sampling import DynamicSampling, judge_groups
from burnish.utils.errors import TrainingError
from tests.trainer.scored_batches import scored

NAN = math.nan


def judged(uids, values):
    return judge_groups(np.array(list(uids), dtype=object), np.array(values, dtype=float))


def sampling(num_prompts=2, *, metric="score", batches_per_epoch=3, bound=10, enable=True):
    config = FilterGroupsConfig(enable=enable, metric=metric, max_num_gen_batches=bound)
    return DynamicSampling(config, num_prompts=num_prompts, batches_per_epoch=batches_per_epoch)


def rounds(collected: DynamicSampling, *batches):
    for batch in batches:
        collected.add(collected.filter(batch))
    return collected


def test_groups_that_vary_are_kept_wherever_their_rows_lie():
    assert judged("abab", [1, 0, 0, 0]).keep.tolist() == [True, False, True, False]
    assert judged("aabb", [0.2, 0.2, 0.2, 0.3]).keep.tolist() == [False, False, True, True]


def test_equal_values_are_constant_whatever_their_rounding():
    assert judged("a" * 5, [0.1 + 0.2] * 5).constant_values.tolist() == [0.1 + 0.2]


def test_a_row_without_a_value_neither_makes_a_group_vary_nor_loses_its_row():
    verdict = judged("aaabbb", [1, NAN, 1, 1, NAN, 0])
    assert verdict.keep.tolist() == [False] * 3 + [True] * 3
    assert verdict.constant_values.tolist() == [1]


def test_a_single_value_is_kept_and_a_group_without_one_is_counted_apart():
    verdict = judged("aabb", [NAN, 0, NAN, NAN])
    assert verdict.keep.tolist() == [True, True, False, False]
    assert (verdict.constant_values.tolist(), verdict.num_unscored) == ([], 1)


def test_infinities_are_values():
    assert judged("aabb", [-math.inf, -math.inf, math.inf, -math.inf]).keep.tolist() == [False, False, True, True]


def test_rounds_go_on_until_there_are_enough_prompts_and_the_surplus_is_left_out():
    collected = sampling(num_prompts=3)
    rounds(collected, scored("aabb", [1, 0, 1, 1]))
    assert not collected.is_complete
    rounds(collected, scored(["c", "c", "d", "d", "e", "e"], [0, 1, 2, 1, 0, 3]))
    assert collected.is_complete
    assert list(collected.take().non_tensor_batch["uid"]) == ["a", "a", "c", "c", "d", "d"]
    assert collected.metrics() == {
        "train/num_gen_batches": 2,
        "filter_groups/kept_prompts": 3,
        "filter_groups/constant_prompts": 1,
        "filter_groups/unscored_prompts": 0,
        "filter_groups/surplus_prompts": 1,
        "filter_groups/filled": 1,
    }


def test_rows_without_a_score_do_not_count_whatever_number_they_carry():
    collected = rounds(sampling(), scored("aabb", [1, 0, 1, 0], valid=[True, True, True, False]))
    # Of b one score is left, and a single score is kept; a row without a score would have made 0 of it.
    assert set(collected.take().non_tensor_batch["uid"]) == {"a", "b"}
    collected = rounds(sampling(), scored("aabbb", [1, 0, 1, 1, 0], valid=[True, True, True, True, False]))
    assert set(collected.take().non_tensor_batch["uid"]) == {"a"}


def test_after_the_bound_the_step_takes_what_there_is():
    collected = sampling(num_prompts=8, bound=2)
    rounds(collected, scored("aa", [1, 0]), scored("bb", [1, 1]))
    assert collected.is_complete
    assert list(collected.take().non_tensor_batch["uid"]) == ["a", "a"]
    assert collected.metrics()["filter_groups/filled"] == 0


def test_without_a_bound_a_pass_over_the_data_that_gives_nothing_is_the_last():
    collected = sampling(num_prompts=8, bound=0, batches_per_epoch=2)
    nothing = scored("aa", [1, 1])
    rounds(collected, nothing, scored("bb", [1, 0]), nothing)
    assert not collected.is_complete
    rounds(collected, nothing)
    assert collected.is_complete
    assert len(collected.take()) == 2


def test_when_nothing_varies_the_error_says_what_was_constant_and_what_to_do():
    collected = rounds(sampling(metric="acc", bound=2), *[scored("aabb", [0.5] * 4, acc=[0.5] * 4)] * 2)
    with pytest.raises(TrainingError) as caught:
        collected.take()
    message = str(caught.value)
    for words in (
        "filter_groups.metric=acc varies in no group of 2 generation batches",
        "max_num_gen_batches=2",
        "equal within each of 4 groups (0.5 everywhere)",
        "rollout.n",
        "filter_groups.enable=false",
    ):
        assert words in message


def test_groups_that_are_constant_at_different_values_are_told_apart():
    collected = rounds(sampling(bound=1), scored("aabb", [0, 0, 1, 1]))
    with pytest.raises(TrainingError, match="from 0 in one group to 1 in another"):
        collected.take()


def test_when_nothing_has_a_score_the_error_says_that():
    collected = rounds(sampling(bound=1), scored("aabb", [0] * 4, valid=[False] * 4))
    with pytest.raises(TrainingError, match="none of the 2 groups has a response with a score"):
        collected.take()


def test_a_metric_that_the_reward_function_does_not_return_is_named_with_those_that_it_does():
    batch = scored("aa", [1, 0], acc=[True, False], note=["x", "y"])
    with pytest.raises(TrainingError, match=r"metric=accuracy: .* are: score, acc\."):
        sampling(metric="accuracy").filter(batch)


@pytest.mark.parametrize("metric", ["score", "seq_reward", "seq_final_reward"])
def test_the_score_goes_by_three_names_and_is_the_sum_over_tokens(metric):
    batch = scored("aabb", [1, 0, 1, 1])
    # The same sum in both rows of a, from other tokens.
    batch.tensors["token_level_scores"][1, 0] = 1.0
    kept = sampling(metric=metric).filter(batch)
    assert len(kept) == 0


def test_an_extra_decides_whatever_the_score_does():
    batch = scored("aabb", [1, 1, 1, 0], acc=[True, False, True, True])
    assert list(sampling(metric="acc").filter(batch).non_tensor_batch["uid"]) == ["a", "a"]


def test_an_extra_whose_name_was_taken_is_found_by_its_own():
    batch = scored("aa", [1, 1], **{"reward_extra/loss": [1, 2]})
    assert len(sampling(metric="loss").filter(batch)) == 2


def test_with_the_filter_off_one_round_is_all():
    collected = sampling(enable=False)
    collected.add(scored("aabb", [1, 1, 1, 1]))
    assert collected.is_complete
    assert len(collected.take()) == 4
    assert collected.metrics() == {}


def test_an_extra_that_only_one_round_has_is_none_in_the_other():
    collected = sampling(num_prompts=2)
    rounds(collected, scored("aa", [1, 0], why=["x", "y"]), scored("bb", [1, 0]))
    assert collected.take().non_tensor_batch["why"].tolist() == ["x", "y", None, None]


def test_a_new_step_starts_from_nothing():
    collected = rounds(sampling(), scored("aabb", [1, 1, 0, 1]))
    collected.start()
    rounds(collected, scored("cc", [1, 0]))
    assert list(collected.take().non_tensor_batch["uid"]) == ["c", "c"]
    assert collected.metrics()["filter_groups/constant_prompts"] == 0


def test_the_rounds_of_a_step_give_a_prompt_that_comes_twice_two_uids():
    collected = sampling()
    first = collected.uid_prefix(3)
    rounds(collected, scored("aa", [1, 1]))
    assert (first, collected.uid_prefix(3)) == ("epoch3", "epoch3-round1")
