"""Whole steps of the trainer equal those of `tests.e2e.reference`, which computes them by hand from the same responses."""

import copy
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from burnish.trainer.main_ppo import Parts, TaskRunner
from tests.e2e import reference as ref
from tests.e2e.runs import TINY, logged, tiny_run

COMMON = [
    "trainer.save_freq=1",
    # Drawn from all rows, each batch has responses whose score is None.
    "data.train_max_samples=-1",
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=3",
    "actor_rollout_ref.rollout.temperature=0.8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=7",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5",
    "actor_rollout_ref.actor.clip_ratio_low=0.02",
    "actor_rollout_ref.actor.clip_ratio_high=0.05",
    "actor_rollout_ref.actor.clip_ratio_c=1.01",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
    "actor_rollout_ref.actor.optim.lr=0.0003",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
    "actor_rollout_ref.actor.optim.weight_decay=0.1",
    "actor_rollout_ref.actor.optim.clip_grad=0.5",
]
GRPO = [
    *COMMON,
    "trainer.total_training_steps=2",
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.05",
]
# The critic alone in the first step, both in the second; only in the third is the policy away from its reference.
PPO = [
    *COMMON,
    "trainer.total_training_steps=3",
    "trainer.critic_warmup=1",
    "algorithm.adv_estimator=gae",
    "algorithm.gamma=0.95",
    "algorithm.lam=0.9",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_penalty=low_var_kl",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.2",
    "algorithm.kl_ctrl.target_kl=0.01",
    "algorithm.kl_ctrl.horizon=100",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.05",
    "critic.cliprange_value=0.1",
    "critic.optim.lr=0.0005",
    "critic.optim.lr_warmup_steps=4",
    "critic.optim.weight_decay=0.02",
    "critic.optim.clip_grad=0.4",
]
SETTINGS = ref.PolicySettings(
    temperature=0.8, clip_low=0.02, clip_high=0.05, dual_clip=1.01, entropy_coeff=0.01, kl_coef=0.05, mode="token-mean"
)


def graded(data_source, solution_str, ground_truth, extra_info=None):
    """Scores that differ within groups; some rows have none."""
    number = sum((i + 1) * ord(character) for i, character in enumerate(solution_str))
    return None if number % 9 == 0 else (number % 7) / 3


class Recorder(TaskRunner):
    """Runs as usual and keeps the scored responses of every step."""

    batches: list

    def build_trainer(self, config, parts):
        trainer = super().build_trainer(config, parts)
        type(self).batches = []
        scored = trainer._compute_reward

        def recorded(batch):
            batch = scored(batch)
            self.batches.append(copy.deepcopy(batch))
            return batch

        trainer._compute_reward = recorded
        return trainer


def rows_of(batch) -> list[ref.Row]:
    """The recorded batch as plain lists."""
    tensors = batch.tensors
    rows = []
    for i, group in enumerate(batch.non_tensor_batch["uid"]):
        mask = tensors["response_mask"][i]
        prompt_width = tensors["prompts"].shape[1]
        prompt = tensors["prompts"][i][tensors["attention_mask"][i, :prompt_width].bool()].tolist()
        score = float(tensors["token_level_scores"][i].sum()) if tensors["valid"][i] else None
        rows.append(ref.Row(group, prompt, tensors["responses"][i][mask].tolist(), score))
    return rows


@dataclass
class Hand:
    """The run once more, by hand."""

    dtype: torch.dtype
    beta: float = 0.2
    metrics: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Many small operations: threads would only wait for each other.
        torch.set_num_threads(1)
        path = TINY / "model"
        how = {"dtype": self.dtype, "attn_implementation": "eager"}
        self.policy = AutoModelForCausalLM.from_pretrained(path, **how).eval()
        self.frozen = AutoModelForCausalLM.from_pretrained(path, **how).eval()
        self.critic = nn.Module()
        self.critic.backbone = AutoModel.from_pretrained(path, **how).eval()
        self.critic.head = nn.Linear(128, 1).to(self.dtype)
        for parameter in self.critic.head.parameters():
            nn.init.zeros_(parameter)
        self.policy_optimizer = ref.HandAdamW(list(self.policy.parameters()), 0.0003, 3, 0.1, 0.5)
        self.critic_optimizer = ref.HandAdamW(list(self.critic.parameters()), 0.0005, 4, 0.02, 0.4)

    @torch.no_grad()
    def read(self, rows: list[ref.Row]) -> None:
        for row in rows:
            row.old = ref.log_probs_and_entropy(self.policy, row, 0.8)[0]
            row.ref = ref.log_probs_and_entropy(self.frozen, row, 0.8)[0]
            row.values = ref.values_of(self.critic, row)

    def update_policy(self, rows: list[ref.Row], step: int, settings: ref.PolicySettings) -> dict[str, float]:
        return ref.epochs_of_updates(
            "actor",
            rows,
            self.policy_optimizer,
            lambda chosen: ref.policy_update(self.policy, chosen, settings),
            step=step,
            epochs=2,
            prompts_per_update=2,
        )

    def grpo_step(self, rows: list[ref.Row], step: int) -> dict[str, float]:
        self.read(rows)
        ref.set_group_advantages(rows)
        settings = copy.copy(SETTINGS)
        settings.mode = "seq-mean-token-mean"
        return self.update_policy(rows, step, settings)

    def ppo_step(self, rows: list[ref.Row], step: int) -> dict[str, float]:
        self.read(rows)
        kl = ref.set_kl_rewards(rows, self.beta)
        metrics = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": self.beta}
        self.beta *= 1 + min(max(kl / 0.01 - 1, -0.2), 0.2) * sum(row.score is not None for row in rows) / 100
        ref.set_gae_advantages(rows, 0.95, 0.9)
        metrics |= ref.epochs_of_updates(
            "critic",
            rows,
            self.critic_optimizer,
            lambda chosen: ref.value_update(self.critic, chosen, 0.1, "token-mean"),
            step=step,
            epochs=2,
            prompts_per_update=2,
        )
        if step > 1:
            metrics |= self.update_policy(rows, step, SETTINGS)
        return metrics


def assert_moved_alike(start: Path, end: Path, expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """The way that the weights went equals the expected one, as a share of its length."""
    before, after = load_file(start), load_file(end)
    before = {name: before.get(name, before.get(f"model.{name}")) for name in after}
    moved = sum(float((after[n].double() - before[n].double()).square().sum()) for n in after)
    apart = sum(float((after[n].double() - expected[n].double()).square().sum()) for n in after)
    assert moved > 0
    assert (apart / moved) ** 0.5 < tolerance


# Adam divides by the size of the gradient, so where it is rounding noise in float32 the update is noise too.
# Old log-probs, rewards and advantages are float32 in both.
TOLERANCES = {"float32": (1e-3, 1e-2), "float64": (1e-5, 1e-3)}
# Of the same code the sharper one is run on every change.
DTYPES = [pytest.param("float32", marks=pytest.mark.slow), "float64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_grpo_steps_equal_those_by_hand(tmp_path, dtype):
    overrides = [*GRPO, f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}"]
    overrides += [f"actor_rollout_ref.ref.fsdp_config.dtype={dtype}"]
    tiny_run(tmp_path, *overrides, parts=Parts(reward_fn=graded), task_runner_class=Recorder)
    hand = Hand(getattr(torch, dtype))
    rel, tolerance = TOLERANCES[dtype]
    for step, (batch, metrics) in enumerate(zip(Recorder.batches, logged(tmp_path), strict=True), 1):
        rows = rows_of(batch)
        assert any(row.score is None for row in rows)
        for key, value in hand.grpo_step(rows, step).items():
            assert metrics[key] == pytest.approx(value, rel=rel, abs=rel / 10), (step, key)
        saved = tmp_path / f"global_step_{step}" / "actor" / "model.safetensors"
        assert_moved_alike(TINY / "model" / "model.safetensors", saved, hand.policy.state_dict(), tolerance)
    assert metrics["actor/pg_clipfrac"] > 0
    assert metrics["actor/pg_clipfrac_lower"] > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_ppo_steps_equal_those_by_hand(tmp_path, dtype):
    sections = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic.model")
    dtypes = [f"{section}.fsdp_config.dtype={dtype}" for section in sections]
    tiny_run(tmp_path, *PPO, *dtypes, parts=Parts(reward_fn=graded), task_runner_class=Recorder)
    hand = Hand(getattr(torch, dtype))
    rel, tolerance = TOLERANCES[dtype]
    for step, (batch, metrics) in enumerate(zip(Recorder.batches, logged(tmp_path), strict=True), 1):
        rows = rows_of(batch)
        expected = hand.ppo_step(rows, step)
        assert {key for key in metrics if key.startswith("actor/")} >= {k for k in expected if k.startswith("actor/")}
        for key, value in expected.items():
            assert metrics[key] == pytest.approx(value, rel=rel, abs=rel / 10), (step, key)
        folder = tmp_path / f"global_step_{step}"
        start = TINY / "model" / "model.safetensors"
        backbone = hand.critic.backbone.state_dict()
        assert_moved_alike(start, folder / "critic" / "model.safetensors", backbone, tolerance)
        head = load_file(folder / "critic" / "value_head.safetensors")["value_head.weight"]
        torch.testing.assert_close(head, hand.critic.head.weight.detach(), rtol=10 * rel, atol=10 * tolerance * 2e-3)
        if step > 1:
            policy = hand.policy.state_dict()
            assert_moved_alike(start, folder / "actor" / "model.safetensors", policy, tolerance)
    assert metrics["critic/vf_clipfrac"] > 0
    assert metrics["actor/reward_kl_penalty"] > 0
