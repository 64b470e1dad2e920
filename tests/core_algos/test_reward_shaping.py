import pytest
import torch

from burnish.core_algos.reward_shaping import overlong_penalty
from burnish.utils.errors import ConfigError


def test_the_penalty_grows_along_a_line_over_the_buffer_and_is_nothing_before_it():
    # A limit of 10 and a buffer of 4: nothing up to 6 tokens.
    lengths = torch.tensor([0, 5, 6, 7, 8, 10])
    assert overlong_penalty(lengths, 10, 4, 1.0).tolist() == [0, 0, 0, -0.25, -0.5, -1]


def test_the_factor_is_the_penalty_at_the_limit():
    assert overlong_penalty(torch.tensor([9, 10]), 10, 2, 0.5).tolist() == [-0.25, -0.5]
    assert overlong_penalty(torch.tensor([9, 10]), 10, 2, 0).tolist() == [0, 0]


def test_a_response_past_the_limit_is_punished_further_along_the_line():
    assert overlong_penalty(torch.tensor([12]), 10, 2, 1.0).tolist() == [-2]


def test_a_buffer_as_long_as_the_limit_punishes_every_token():
    assert overlong_penalty(torch.tensor([0, 1, 4]), 4, 4, 1.0).tolist() == [0, -0.25, -1]


@pytest.mark.parametrize("buffer_len", [0, 11])
def test_a_buffer_outside_the_limit_is_refused_with_both_keys(buffer_len):
    with pytest.raises(ConfigError, match=rf"overlong_buffer_cfg.len={buffer_len}.*max_resp_len=10"):
        overlong_penalty(torch.tensor([3]), 10, buffer_len, 1.0)
