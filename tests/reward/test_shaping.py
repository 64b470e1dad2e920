"""What a manager makes of the scores: the punishment of long responses, and the score before it."""

import pytest

from burnish.config import OverlongBufferConfig, RewardConfig, RewardKwargsConfig, RewardManagerConfig
from burnish.reward import DAPORewardManager, NaiveRewardManager, load_reward_manager
from burnish.utils.errors import ConfigError
from tests.reward.test_manager import TOKENIZER, batch_of, returning

MANAGERS = (NaiveRewardManager, DAPORewardManager)
# Three, six and nine tokens, with the end of sequence.
TEXTS = ["ab", "abcde", "abcdefgh"]


def shaped(*values, manager=NaiveRewardManager, max_resp_len=9, **buffer):
    kwargs = RewardKwargsConfig(
        overlong_buffer_cfg=OverlongBufferConfig(**{"enable": True, "len": 4, **buffer}), max_resp_len=max_resp_len
    )
    return manager(TOKENIZER, returning(*values), RewardConfig(reward_kwargs=kwargs, num_workers=0))(batch_of(TEXTS))


@pytest.mark.parametrize("manager", MANAGERS)
def test_a_long_response_loses_score_and_the_score_before_stays_visible(manager):
    result = shaped(1.0, 1.0, 0.0, manager=manager, penalty_factor=2.0)
    # Punished from 5 tokens on: 1 of 4 and 4 of 4.
    assert result.token_level_scores.sum(-1).tolist() == [1.0, 0.5, -2.0]
    assert result.extras["acc"].tolist() == [1.0, 1.0, 0.0]
    assert set(result.extras) == {"acc"}


def test_the_penalty_sits_with_the_score_on_the_last_sampled_token():
    result = shaped(1.0, 1.0, 0.0)
    assert result.token_level_scores.nonzero().tolist() == [[0, 2], [1, 5], [2, 8]]


def test_an_acc_of_the_functions_own_is_kept():
    result = shaped({"score": 0.5, "acc": True}, {"score": 0.5, "acc": False}, 1.0)
    assert result.extras["acc"].tolist() == [True, False, 1.0]


def test_rows_without_a_score_get_no_penalty_and_no_acc():
    result = shaped(None, float("nan"), 1.0, log=True)
    assert result.valid.tolist() == [False, False, True]
    assert result.token_level_scores.sum(-1).tolist() == [0, 0, 0]
    assert result.extras["acc"].tolist() == [None, None, 1.0]
    assert result.extras["overlong"].tolist() == [None, None, True]


def test_with_log_every_row_says_what_it_got():
    result = shaped(1.0, 1.0, 1.0, log=True)
    assert result.extras["overlong_reward"].tolist() == [0.0, -0.25, -1.0]
    assert result.extras["overlong"].tolist() == [False, True, True]


def test_without_the_switch_only_dapo_tells_the_score_twice():
    naive, dapo = (shaped(1.0, 0.5, {"score": 0.2, "acc": 0}, manager=m, enable=False) for m in MANAGERS)
    assert naive.extras["acc"].tolist() == [None, None, 0]
    assert dapo.extras["acc"].tolist() == [1.0, 0.5, 0]
    assert naive.token_level_scores.equal(dapo.token_level_scores)


def test_dapo_is_chosen_by_its_name():
    config = RewardConfig(reward_manager=RewardManagerConfig(name="dapo"))
    assert isinstance(load_reward_manager(config, TOKENIZER, compute_score=returning(1)), DAPORewardManager)


@pytest.mark.parametrize(("limit", "words"), [(None, "max_resp_len"), (3, "overlong_buffer_cfg.len=4")])
def test_a_buffer_without_room_is_refused_when_the_manager_is_made(limit, words):
    with pytest.raises(ConfigError, match=words):
        shaped(1.0, 1.0, 1.0, max_resp_len=limit)
