"""What no advantage estimator takes, and that the message names it."""

import inspect
import math

import numpy as np
import pytest
import torch

from burnish.conformance.batches import advantage_batch
from burnish.core_algos.estimators import ADV_ESTIMATORS
from burnish.utils.errors import TrainingError
from tests.core_algos.estimator_calls import GROUPED, NAMES, estimate, scored

_PER_TOKEN = ("token_level_rewards", "values", "old_log_probs", "sum_pi_squared", "rollout_is_weights")
_PER_ROW = ("reward_baselines", "reward_components")


def takes(keys: tuple[str, ...]) -> list[tuple[str, str]]:
    return [
        (name, key) for name in NAMES for key in keys if key in inspect.signature(ADV_ESTIMATORS.get(name)).parameters
    ]


@pytest.fixture
def entries() -> dict:
    return advantage_batch(0).keyed()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("name", "key"), takes(_PER_TOKEN))
def test_a_number_that_is_none_inside_the_mask_is_refused(name, key, wrong, entries):
    row, token = entries["response_mask"].nonzero()[-1].tolist()
    entries[key] = entries[key].clone()
    entries[key][row, token] = wrong
    with pytest.raises(TrainingError, match=rf"{key} holds NaN or inf in 1 of .* row {row}, token {token}"):
        estimate(name, entries)


@pytest.mark.parametrize(("name", "key"), takes(_PER_ROW))
def test_a_number_that_is_none_in_a_row_that_counts_is_refused(name, key, entries):
    rows = entries[key].clone()
    rows[2] = math.nan
    with pytest.raises(TrainingError, match=rf"{key}.* holds NaN or inf in 1 of .* row 2"):
        estimate(name, entries | {key: rows})
    mask = entries["response_mask"].clone()
    mask[2] = False
    for tensor in estimate(name, entries | {key: rows, "response_mask": mask}):
        assert tensor.isfinite().all()


@pytest.mark.parametrize(("name", "key"), takes((*_PER_TOKEN, "response_mask")))
def test_another_shape_is_refused(name, key, entries):
    named = "response_mask" if key == "token_level_rewards" else key
    for tensor in (entries[key][:, :-1], entries[key][:-1]):
        with pytest.raises(TrainingError, match=rf"{named} has shape"):
            estimate(name, entries | {key: tensor})


@pytest.mark.parametrize(("name", "key"), takes(_PER_ROW))
def test_another_number_of_rows_is_refused(name, key, entries):
    with pytest.raises(TrainingError, match=rf"{key}.* has 17 rows for a batch of 18"):
        estimate(name, entries | {key: entries[key][:-1]})


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_of_other_values_is_refused(name, entries):
    with pytest.raises(TrainingError, match="response_mask holds values other than 0 and 1"):
        estimate(name, entries | {"response_mask": entries["response_mask"] * 0.5})
    as_integers = estimate(name, entries | {"response_mask": entries["response_mask"].long()})
    assert torch.equal(as_integers[0], estimate(name, entries)[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_without_a_single_token_is_refused(name, entries):
    with pytest.raises(TrainingError, match="response_mask holds no 1 in 18 rows of 9 tokens"):
        estimate(name, entries | {"response_mask": torch.zeros_like(entries["response_mask"])})


@pytest.mark.parametrize(
    "index",
    [torch.tensor([0.0, 1.0]), np.array([0.5, 1.0]), np.array(["a", None], dtype=object), ["a", "b", "c"], ["a"]],
)
@pytest.mark.parametrize("name", GROUPED)
def test_an_index_that_names_no_groups_is_refused(name, index):
    with pytest.raises(TrainingError, match="index"):
        estimate(name, scored([1, 0]) | {"index": index})


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0, 1.0], []])
def test_gdpo_takes_one_weight_per_component(weights, entries):
    with pytest.raises(TrainingError, match=f"reward_components holds 2 rewards .* gdpo_reward_weights {len(weights)}"):
        estimate("gdpo", entries, gdpo_reward_weights=weights)
