"""PF-PPO: which rows are drawn, how often, and from what."""

import math

import numpy as np
import pytest
import torch

from burnish.core_algos.resampling import compute_pf_ppo_reweight_data
from burnish.protocol import DataProto
from burnish.utils.errors import ConfigError, TrainingError


def batch_of(scores: list[float], dropped: tuple[int, ...] = ()) -> DataProto:
    rows = len(scores)
    token_level_scores = torch.zeros(rows, 3)
    token_level_scores[:, 1] = torch.tensor(scores)
    loss_mask = torch.tensor([[True, True, False]]).repeat(rows, 1)
    loss_mask[list(dropped)] = False
    return DataProto.from_dict(
        tensors={"token_level_scores": token_level_scores, "loss_mask": loss_mask, "row": torch.arange(rows)},
        non_tensors={"uid": np.array([f"0-{row}" for row in range(rows)], dtype=object)},
        meta_info={"step": 3},
    )


def shares(scores: list[float], dropped: tuple[int, ...] = (), **settings) -> list[float]:
    """How often each of the rows is drawn, when every row is there 1,000 times."""
    copies = 1000
    rows = len(scores)
    data = batch_of(scores * copies, tuple(row + rows * copy for copy in range(copies) for row in dropped))
    drawn = compute_pf_ppo_reweight_data(data, generator=torch.Generator().manual_seed(0), **settings)
    assert len(drawn) == len(data)
    counts = torch.bincount(drawn.tensors["row"] % rows, minlength=rows)
    return (counts / len(data)).tolist()


def about(*weights: float):
    return pytest.approx([weight / sum(weights) for weight in weights], abs=0.02)


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, (4, 1, 0, 1)),
        ({"weight_pow": 1.0}, (2, 1, 0, 1)),
        ({"weight_pow": 0.0}, (1, 1, 1, 1)),
        ({"reweight_method": "max_min"}, (1, 0, 0, 1)),
        ({"reweight_method": "max_random"}, (0.4, 0.1, 0.1, 0.1)),
    ],
)
def test_rows_are_drawn_by_the_weight_of_their_score(settings, weights):
    drawn = shares([2.0, 1.0, 0.0, -1.0], **settings)
    assert drawn == about(*weights)
    assert all((share > 0) == (weight > 0) for share, weight in zip(drawn, weights, strict=True))


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_rows_without_a_token_in_the_loss_mask_are_not_drawn_and_no_extreme(method):
    drawn = shares([9.0, 2.0, 1.0, 1.5, -9.0], dropped=(0, 4), reweight_method=method)
    weights = {"pow": (4, 1, 2.25), "max_min": (1, 1, 0), "max_random": (0.4, 0.1, 0.1)}[method]
    assert drawn == about(0, *weights, 0)
    assert drawn[0] == drawn[4] == 0


def test_where_all_weights_are_zero_rows_are_drawn_alike():
    assert shares([0.0, 0.0, 0.0, 0.0], dropped=(1,)) == about(1, 0, 1, 1)


def test_large_scores_do_not_overflow():
    assert shares([1e30, 0.5e30], weight_pow=20.0) == about(1, 0.5**20)


def test_the_draw_depends_on_the_generator_alone():
    data = batch_of([1.0, 2.0, 3.0, 4.0] * 8)

    def rows(seed: int) -> list[int]:
        return compute_pf_ppo_reweight_data(data, generator=torch.Generator().manual_seed(seed)).tensors["row"].tolist()

    assert rows(0) == rows(0)
    assert rows(0) != rows(1)


def test_rows_stay_whole_and_the_batch_that_was_given_stays_as_it_was():
    data = batch_of([1.0, 2.0, 3.0])
    drawn = compute_pf_ppo_reweight_data(data, generator=torch.Generator().manual_seed(0))
    assert drawn.non_tensor_batch["uid"].tolist() == [f"0-{row}" for row in drawn.tensors["row"].tolist()]
    assert torch.equal(drawn.tensors["token_level_scores"].sum(-1), drawn.tensors["row"] + 1.0)
    assert drawn.meta_info == {"step": 3}
    assert data.tensors["row"].tolist() == [0, 1, 2]


def test_with_nothing_to_train_on_nothing_is_drawn():
    data = batch_of([1.0, 2.0], dropped=(0, 1))
    assert compute_pf_ppo_reweight_data(data) is data


def test_bad_input_is_named():
    with pytest.raises(ConfigError, match=r"algorithm\.pf_ppo\.reweight_method=best.*max_min, max_random, pow"):
        compute_pf_ppo_reweight_data(batch_of([1.0]), "best")
    with pytest.raises(TrainingError, match="PF-PPO needs loss_mask"):
        compute_pf_ppo_reweight_data(batch_of([1.0]).select(batch_keys=["token_level_scores"]))
    with pytest.raises(TrainingError, match="token_level_scores holds NaN or inf in 1 of the 2"):
        compute_pf_ppo_reweight_data(batch_of([1.0, math.nan], dropped=(0,)))
    unscored = compute_pf_ppo_reweight_data(batch_of([1.0, math.nan], dropped=(1,)))
    assert unscored.tensors["row"].tolist() == [0, 0]
