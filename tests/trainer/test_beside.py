"""A critic on devices of its own works while the policy does; what comes out is what comes out where they take turns."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from burnish.protocol import DataProto
from burnish.trainer.ppo.beside import Beside
from burnish.trainer.ppo.ray_trainer import RayPPOTrainer
from burnish.trainer.ppo.updates import Passes

SECONDS = 20
"""After which a stage that waits for another one gives up, so that a test fails where it would hang."""


class Stages(RayPPOTrainer):
    """The stages alone, on groups of workers that are made up."""

    use_critic, critic_is_warm = True, True  # type: ignore[assignment]
    needs_old_log_probs, use_reference_policy = True, False

    def __init__(self, *, is_apart: bool) -> None:
        self.critic_is_apart = is_apart
        self.critic_values = self.critic_passes = None
        self.global_steps, self.current_stage = 3, "start"
        self.metrics, self.timing_raw = {}, {}
        self.checkpoints = SimpleNamespace(stop=SimpleNamespace(enter=lambda stage: None))  # type: ignore[assignment]
        self.watched: list[str] = []
        self.skipped_updates = SimpleNamespace(watch=lambda name, *_: self.watched.append(name))  # type: ignore[assignment]
        algorithm = SimpleNamespace(rollout_correction=SimpleNamespace(bypass_mode=False))
        self.config = SimpleNamespace(  # type: ignore[assignment]
            algorithm=algorithm, actor_rollout_ref=SimpleNamespace(actor=None), critic=None
        )
        self.actor_rollout_wg = SimpleNamespace(update_actor=None)
        self.critic_wg = SimpleNamespace(update_critic=None)
        self.order: list[str] = []
        self.has_begun = {"actor": threading.Event(), "critic": threading.Event()}

    def _passes(self, name: str, group: Any, update: Any, batch: DataProto, config: Any) -> Passes:
        self.order.append(name)
        self.has_begun[name].set()
        if self.critic_is_apart and self.critic_is_warm:
            other = {"actor": "critic", "critic": "actor"}[name]
            assert self.has_begun[other].wait(SECONDS), f"{name} was updated and {other} not at the same time"
        return Passes({f"{name}/grad_norm": 1.0, "global_seqlen/max": {"actor": 7.0, "critic": 5.0}[name]}, 1, batch)

    def _forward(self, name: str, group: Any, method: str, batch: DataProto) -> DataProto:
        self.order.append(method)
        self.has_begun[name].set()
        if name == "actor" and self.critic_is_apart:
            assert self.has_begun["critic"].wait(SECONDS), "the critic waits for the policy's pass"
        key = {"compute_values": "values", "compute_log_prob": "old_log_probs"}[method]
        assert set(batch.tensors.keys()) == {"responses", "rollout_log_probs", "response_mask"}
        return DataProto.from_dict({key: torch.full((2, 3), 0.5)})


def batch_of_two() -> DataProto:
    tensors = {
        "responses": torch.zeros(2, 3, dtype=torch.int64),
        "rollout_log_probs": torch.full((2, 3), 0.5),
        "response_mask": torch.ones(2, 3, dtype=torch.bool),
    }
    return DataProto.from_dict(tensors, {"uid": np.array(["a", "b"], dtype=object)})


@pytest.mark.parametrize("is_apart", [True, False])
def test_both_updates_run_at_once_where_the_critic_is_apart_and_tell_the_same(is_apart: bool) -> None:
    trainer = Stages(is_apart=is_apart)
    trainer._update_models(batch_of_two())
    assert trainer.metrics == {"actor/grad_norm": 1.0, "critic/grad_norm": 1.0, "global_seqlen/max": 7.0}
    assert sorted(trainer.watched) == ["actor", "critic"]
    assert ("update_critic_beside" in trainer.timing_raw) == is_apart
    if not is_apart:
        assert trainer.order == ["critic", "actor"]


@pytest.mark.parametrize("is_apart", [True, False])
def test_values_are_computed_beside_the_policys_pass_of_the_same_rows(is_apart: bool) -> None:
    trainer = Stages(is_apart=is_apart)
    batch = batch_of_two()
    trainer._begin_values(batch)
    batch = trainer._compute_old_log_prob(batch) if is_apart else batch
    batch = trainer._compute_values(batch)
    assert torch.equal(batch.tensors["values"], torch.full((2, 3), 0.5))
    assert ("values_beside" in trainer.timing_raw) == is_apart


def test_while_the_critic_warms_up_alone_the_step_waits_for_it() -> None:
    trainer = Stages(is_apart=True)
    trainer.critic_is_warm = False  # type: ignore[misc]
    trainer._update_models(batch_of_two())
    assert trainer.order == trainer.watched == ["critic"]
    assert trainer.metrics["global_seqlen/max"] == 5.0


def test_stages_of_somebodys_own_take_turns_and_what_they_do_with_the_batch_counts() -> None:
    seen = []

    class Own(Stages):
        def _compute_old_log_prob(self, batch: DataProto) -> DataProto:
            return batch.select_idxs([1, 0])

        def _update_critic(self, batch: DataProto) -> None:
            super()._update_critic(batch.select_idxs([0]))

        def _forward(self, name: str, group: Any, method: str, batch: DataProto) -> DataProto:
            seen.append(batch.non_tensor_batch["uid"].tolist())
            return super()._forward(name, group, method, batch)

        def _passes(self, name: str, group: Any, update: Any, batch: DataProto, config: Any) -> Passes:
            seen.append(batch.non_tensor_batch["uid"].tolist())
            self.order.append(name)
            return Passes({}, 1, batch)

    trainer = Own(is_apart=True)
    batch = batch_of_two()
    trainer._begin_values(batch)
    batch = trainer._compute_values(trainer._compute_old_log_prob(batch))
    trainer._update_models(batch)
    assert seen == [["b", "a"], ["b"], ["b", "a"]]
    assert trainer.order == ["compute_values", "critic", "actor"]


def test_an_error_of_the_critic_is_raised_in_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Stages(is_apart=True)

    def breaks(batch: DataProto) -> Passes:
        trainer.has_begun["critic"].set()
        raise ArithmeticError("of the critic")

    monkeypatch.setattr(trainer, "_critic_passes", breaks)
    with pytest.raises(ArithmeticError, match="of the critic"):
        trainer._update_models(batch_of_two())
    assert trainer.current_stage == "update_critic"
    assert trainer.watched == ["actor"]


def test_work_that_nobody_waits_for_holds_up_nothing() -> None:
    goes_on = threading.Event()
    beside = Beside(goes_on.wait, "waits")
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "waits")
    assert thread.daemon
    goes_on.set()
    assert beside.result()
    assert beside.seconds > 0
