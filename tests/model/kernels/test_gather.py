"""Copies are added up as an exact sum would, rounded once."""

import pytest
import torch

from burnish.model.gathering import Gathering
from tests.rollout.kernels.cases import normal, on_every_backend

INDICES = [[0, 1, 2], [2, 2, 0, 2, 4, 4, 4, 4, 4], [1]]


@on_every_backend
@pytest.mark.parametrize("index", INDICES, ids=["once", "often", "rarely"])
@pytest.mark.parametrize("shape", [(2, 8), (1030,)], ids=["heads", "wide"])
def test_the_sum_over_copies_is_rounded_once(device, dtype, index, shape):
    from burnish.model.kernels.gpu.gather import add_up

    grad = normal(len(index), *shape, dtype=dtype, device=device)
    gathering = Gathering(torch.tensor(index), 5)
    ours = add_up(grad, *(part.to(device) for part in (gathering.places, gathering.ends)))
    expected = torch.zeros(5, *shape, dtype=torch.float64).index_add_(0, torch.tensor(index), grad.cpu().double())
    assert ours.dtype == dtype
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(ours.cpu().double(), expected, atol=tolerance, rtol=tolerance)
