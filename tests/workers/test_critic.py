"""What the critic's worker hands to its update."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from burnish.config import load_config
from burnish.protocol import DataProto
from burnish.workers import critic
from burnish.workers.critic import CriticWorker


@pytest.mark.parametrize(("own", "divisor"), [("critic.loss_scale_factor=32", 32), ("trainer.seed=1", 9)])
def test_the_divisor_of_a_sum_is_its_own_key_or_the_longest_response(
    monkeypatch: pytest.MonkeyPatch, own: str, divisor: int
) -> None:
    config = load_config(["critic.loss_agg_mode=seq-mean-token-sum-norm", "algorithm.adv_estimator=gae", own]).critic
    given: dict[str, Any] = {}

    def run(*_: Any, **kwargs: Any) -> dict[str, float]:
        given.update(kwargs)
        return {}

    monkeypatch.setattr(critic, "run_mini_batches", run)
    monkeypatch.setattr(critic, "perf_metrics", lambda *_, **__: {})
    worker = CriticWorker(config, "cpu", 1)
    worker.engine = SimpleNamespace(park=lambda: None)  # type: ignore[assignment]
    worker.update_critic(
        DataProto.from_dict(tensors={"values": torch.zeros(1, 1)}, meta_info={"max_response_length": 9})
    )
    assert given["loss_scale_factor"] == divisor
