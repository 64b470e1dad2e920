import pytest
import torch

from burnish.config import AlgoConfig, FilterGroupsConfig, RewardConfig
from burnish.data import collate_fn
from burnish.reward import DAPORewardManager, NaiveRewardManager
from burnish.trainer.ppo.reward_probe import check_reward_numbers
from burnish.utils.errors import ConfigError
from tests.render.fake_tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()
ROWS = [{"input_ids": torch.tensor([5, 6]), "index": 0, "data_source": "s", "reward_model": {"ground_truth": "72"}}]


def probe(function, *, metric=None, gdpo=None, manager=NaiveRewardManager):
    config = AlgoConfig(
        adv_estimator="gdpo" if gdpo else "grpo",
        gdpo_reward_keys=gdpo,
        filter_groups=FilterGroupsConfig(enable=metric is not None, metric=metric),
    )
    # In this process, where a function may note what it was asked.
    scores = manager(TOKENIZER, function, RewardConfig(num_workers=0))
    check_reward_numbers(config, scores, ROWS, collate_fn, eos=TOKENIZER.eos_token_id)


def returning(value):
    return lambda data_source, solution_str, ground_truth, extra_info: value


def test_the_function_is_asked_with_an_empty_response_to_the_first_row():
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        seen.append((data_source, solution_str, ground_truth))
        return {"score": 0, "style": 0.5}

    probe(compute_score, metric="style", gdpo=["score", "style"])
    assert seen == [("s", "", "72")]


def test_nothing_is_asked_where_no_number_is_named():
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        raise AssertionError("asked")

    probe(compute_score)
    probe(compute_score, metric="seq_reward", gdpo=["score"])


@pytest.mark.parametrize("returned", [0.5, {"score": 0.5, "other": 1}, {"score": 0.5, "style": "good"}])
def test_a_number_that_is_not_returned_is_refused_by_the_key_that_names_it(returned):
    with pytest.raises(ConfigError, match=r"^algorithm\.filter_groups\.metric=style: .* no number style .* are: score"):
        probe(returning(returned), metric="style")
    with pytest.raises(ConfigError, match=r"^algorithm\.gdpo_reward_keys=\[score,style\]: "):
        probe(returning(returned), gdpo=["score", "style"])


@pytest.mark.parametrize("returned", [None, {"score": 0.5, "style": None}, "no score"])
def test_an_empty_response_that_is_worth_nothing_decides_nothing(returned):
    probe(returning(returned), metric="style")


def test_what_the_manager_adds_counts():
    with pytest.raises(ConfigError, match="acc"):
        probe(returning(1.0), metric="acc")
    probe(returning(1.0), metric="acc", manager=DAPORewardManager)


def test_a_name_that_the_framework_uses_itself_is_found():
    probe(returning({"score": 1.0, "loss": 0.5}), metric="loss")
