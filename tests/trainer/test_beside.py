"""Critic and reward model on devices of their own work while the policy does; what comes out is what comes out in turns."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from burnish.protocol import DataProto
from burnish.trainer.ppo import ray_trainer
from burnish.trainer.ppo.beside import Beside
from burnish.trainer.ppo.dynamic_sampling import DynamicSampling
from burnish.trainer.ppo.model_rewards import ModelRewards
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
        told = {"actor": (7.0, 20.0), "critic": (5.0, 42.0)}[name]
        metrics = {"global_seqlen/max": told[0], "perf/max_memory_allocated_gb": told[1]}
        return Passes({f"{name}/grad_norm": 1.0, **metrics}, 1, batch)

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
    assert trainer.metrics == {
        "actor/grad_norm": 1.0,
        "critic/grad_norm": 1.0,
        "global_seqlen/max": 7.0,
        # The GPU with the most, whoever has it.
        "perf/max_memory_allocated_gb": 42.0,
    }
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


class ScoredStages(Stages):
    """With a reward model, whose scores a made-up reward manager takes over."""

    use_critic, filters_groups, use_greedy_baseline, early_manager = False, False, False, None  # type: ignore[assignment]
    use_reward_model, _pad_token_id = True, 0

    def __init__(self, *, is_apart: bool) -> None:
        super().__init__(is_apart=False)
        self.reward_model_is_apart = is_apart
        self.model_scores = None
        self.num_gen_tokens, self.reward_metrics, self.replay = 0, [], None
        self.checkpoints.stop.pass_by = lambda: None
        self.prompts = SimpleNamespace(take_scores=lambda batch: self.order.append("take_scores"))  # type: ignore[assignment]
        rounds = SimpleNamespace(take_round=lambda batch, metrics: self.order.append("take_round"))
        self.run_log = SimpleNamespace(dumps=rounds)  # type: ignore[assignment]
        filter_groups = SimpleNamespace(enable=False)
        self.sampling = DynamicSampling(filter_groups, num_prompts=2, batches_per_epoch=1)  # type: ignore[arg-type]
        self.config.algorithm.adv_estimator = "grpo"
        self.config.reward = SimpleNamespace(reward_model=SimpleNamespace(function_weight=0.0), on_error="raise")
        self.reward_fn = ModelRewards(self.config.reward)  # type: ignore[arg-type]
        self.has_begun["actor"].clear()
        self.reward_model_wg = SimpleNamespace(compute_rm_score=self._rm_scores)
        self.actor_rollout_wg.generate_sequences = lambda prompts: DataProto.from_dict(dict(batch_of_two().tensors))

    def _get_gen_batch(self, batch_dict: Any, **_: Any) -> DataProto:
        zeros = torch.zeros(2, 4, dtype=torch.int64)
        prompts = {"input_ids": zeros, "attention_mask": zeros, "position_ids": zeros}
        return DataProto.from_dict(prompts, {"uid": np.array(["a", "b"], dtype=object)})

    def _rm_scores(self, rows: DataProto) -> DataProto:
        if self.reward_model_is_apart and self._scores_may_be_late and self.current_stage != "testing":
            assert self.has_begun["actor"].wait(SECONDS), "the policy waits for the reward model"
        self.order.append("compute_rm_score")
        return DataProto.from_dict({"rm_scores": torch.tensor([[0.0, 0.0, 1.5], [0.0, 0.0, -0.5]])})

    def _forward(self, name: str, group: Any, method: str, batch: DataProto) -> DataProto:
        self.order.append(method)
        self.has_begun[name].set()
        return DataProto.from_dict({"old_log_probs": torch.full((2, 3), 0.5)})

    def scored(self) -> DataProto:
        """The stages until the advantages."""
        batch = self._collect({})
        assert ("token_level_scores" in batch.tensors) == (self.model_scores is None)
        return self._take_late_scores(self._compute_old_log_prob(batch))


@pytest.mark.parametrize("is_apart", [True, False])
def test_a_reward_model_apart_reads_beside_the_policys_pass_and_the_scores_are_the_same(
    is_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_trainer, "take_prompts", lambda batch, **_: batch.select())
    monkeypatch.setattr(ray_trainer, "compute_rollout_difference", lambda batch: {})
    trainer = ScoredStages(is_apart=is_apart)
    batch = trainer.scored()
    assert batch.tensors["token_level_scores"].sum(-1).tolist() == [1.5, -0.5]
    assert "old_log_probs" in batch.tensors
    late = ["compute_log_prob", "compute_rm_score", "take_scores", "take_round"]
    assert trainer.order == (late if is_apart else [*late[1:], late[0]])
    assert ("reward_model_beside" in trainer.timing_raw) == is_apart
    assert trainer.metrics["reward/rm_score/mean"] == 0.5
    # A validation behind it has scores of its own.
    trainer.current_stage = "testing"
    trainer._sample(trainer._get_gen_batch({}), validate=True)
    assert trainer.order.count("compute_rm_score") == 2


@pytest.mark.parametrize("stage", ["filters_groups", "use_greedy_baseline", "own stage", "own method", "no pass"])
def test_where_scores_are_needed_at_once_the_reward_model_takes_its_turn(stage: str) -> None:
    class Own(ScoredStages):
        def _compute_reward(self, batch: DataProto) -> DataProto:
            return super()._compute_reward(batch)

    trainer = (Own if stage == "own stage" else ScoredStages)(is_apart=True)
    if stage == "own stage":
        pass
    elif stage == "own method":
        trainer._old_log_prob_pass = lambda batch: batch  # type: ignore[method-assign]
    elif stage == "no pass":
        trainer.needs_old_log_probs = False
    else:
        setattr(trainer, stage, True)
    assert not trainer._scores_may_be_late
    assert ScoredStages(is_apart=True)._scores_may_be_late
