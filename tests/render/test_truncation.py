import pytest

from burnish.render import truncate
from burnish.utils.errors import ConfigError, DataError

IDS = [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [("left", [3, 4, 5, 6, 7]), ("right", [1, 2, 3, 4, 5]), ("middle", [1, 2, 5, 6, 7]), ("drop", None)],
)
def test_each_policy_keeps_what_it_says(policy, kept):
    assert truncate(IDS, 5, policy) == kept


@pytest.mark.parametrize("policy", ["error", "left", "right", "middle", "drop"])
def test_a_prompt_that_fits_is_left_alone(policy):
    assert truncate(IDS, 7, policy) == IDS


@pytest.mark.parametrize("policy", ["left", "right", "middle"])
@pytest.mark.parametrize("max_length", range(1, 7))
def test_what_is_kept_has_exactly_the_limits_length(policy, max_length):
    assert len(truncate(IDS, max_length, policy)) == max_length


def test_error_names_both_lengths_and_the_ways_out():
    with pytest.raises(DataError, match="7 tokens.*max_prompt_length=5.*filter_overlong_prompts=true"):
        truncate(IDS, 5, "error")


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="truncation=cut: must be one of error, left"):
        truncate(IDS, 5, "cut")
