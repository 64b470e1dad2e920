"""What TRL's GRPOTrainer minimises, on a model: its `_compute_loss` and the gradient of every weight against the engine's."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.config import FSDPActorConfig
from burnish.config.actor_rollout_ref import PolicyLossConfig
from burnish.protocol import DataProto
from burnish.workers.losses import make_policy_loss
from tests.engine.engine_program import make_engine

PROMPT, RESPONSE, ROWS = 5, 7, 6
MAX_COMPLETION = 16
# TRL has no second clip for A < 0 unless `delta` is set.
NO_SECOND_CLIP = {"clip_ratio_c": 1e6}


@dataclass
class Case:
    """TRL's settings, and those of burnish that mean the same; ``fresh``: on samples of the policy itself."""

    trl: dict[str, Any]
    mode: str
    loss: str = "vanilla"
    keys: dict[str, Any] = field(default_factory=dict)
    weighted: bool = False
    fresh: bool = False


CASES = {
    "grpo": Case({"loss_type": "grpo"}, "seq-mean-token-mean", keys=NO_SECOND_CLIP),
    "bnpo": Case({"loss_type": "bnpo"}, "token-mean", keys=NO_SECOND_CLIP),
    "dr_grpo": Case({"loss_type": "dr_grpo"}, "seq-mean-token-sum-norm", keys=NO_SECOND_CLIP),
    "dapo, clip higher": Case(
        {"loss_type": "dapo", "epsilon_high": 0.28}, "token-mean", keys={**NO_SECOND_CLIP, "clip_ratio_high": 0.28}
    ),
    "delta is clip_ratio_c": Case({"loss_type": "bnpo", "delta": 1.5}, "token-mean", keys={"clip_ratio_c": 1.5}),
    "sequence level is gspo": Case(
        {"loss_type": "grpo", "importance_sampling_level": "sequence"}, "seq-mean-token-mean", "gspo"
    ),
    "cispo": Case(
        {"loss_type": "cispo", "epsilon_high": 1.2},
        "token-mean",
        "cispo",
        {"clip_ratio_low": 10.0, "clip_ratio_high": 1.2 - 1.0},
    ),
    "sapo": Case({"loss_type": "sapo"}, "seq-mean-token-mean", "sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "beta is a k3 in the loss": Case(
        {"loss_type": "dapo", "beta": 0.3},
        "token-mean",
        keys={**NO_SECOND_CLIP, "use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3"},
    ),
    "beta in a mean over responses": Case(
        {"loss_type": "grpo", "beta": 0.3},
        "seq-mean-token-mean",
        keys={**NO_SECOND_CLIP, "use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "low_var_kl"},
    ),
    # TRL multiplies the KL by the ratio unless told otherwise. Where that is 1, its gradient is that of k2, as with a "+".
    "beta with TRL's correction is k3+ on fresh samples": Case(
        {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True},
        "token-mean",
        keys={**NO_SECOND_CLIP, "use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3+"},
        fresh=True,
    ),
    "entropy bonus": Case(
        {"loss_type": "bnpo", "entropy_coef": 0.05}, "token-mean", keys={**NO_SECOND_CLIP, "entropy_coeff": 0.05}
    ),
    "importance weights of vLLM": Case(
        {"loss_type": "bnpo", "use_vllm": True}, "token-mean", keys=NO_SECOND_CLIP, weighted=True
    ),
}
TRL_DEFAULTS = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "beta": 0.0,
    "entropy_coef": 0.0,
    "use_vllm": False,
}


@pytest.fixture(scope="module")
def trainer(trl, tiny_model_path, tmp_path_factory):
    """TRL's trainer around the demo's model, which is never run: only its loss is asked for."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        report_to=[],
        use_cpu=True,
        bf16=False,
        max_completion_length=MAX_COMPLETION,
        per_device_train_batch_size=ROWS,
        num_generations=2,
        gradient_checkpointing=False,
        vllm_importance_sampling_correction=True,
    )
    made = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "1+1="}] * ROWS),
        processing_class=AutoTokenizer.from_pretrained(tiny_model_path),
    )
    made.current_gradient_accumulation_steps = 1
    return made


@pytest.fixture(scope="module")
def rows(tiny_model_path) -> DataProto:
    """Ragged rows, whose old and reference policies are not far off: the clip and the KL have something to do."""
    generator = torch.Generator().manual_seed(0)
    engine = make_engine(path=tiny_model_path)
    prompts = torch.randint(4, 60, (ROWS, PROMPT), generator=generator)
    responses = torch.randint(4, 60, (ROWS, RESPONSE), generator=generator)
    prompt_mask = torch.arange(PROMPT) >= torch.tensor([[0], [2], [1], [4], [0], [3]])
    mask = torch.arange(RESPONSE) < torch.tensor([[7], [3], [5], [1], [6], [7]])
    attention = torch.cat([prompt_mask, mask], dim=1)
    ids = torch.cat([prompts, responses], dim=1) * attention

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(ROWS, RESPONSE, generator=generator)

    batch = DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": attention,
            "responses": ids[:, PROMPT:],
            "response_mask": mask,
            "loss_mask": mask,
            "advantages": torch.tensor([[1.2], [-0.7], [0.4], [-1.5], [0.9], [-0.2]]).expand(-1, RESPONSE).clone(),
        }
    )
    log_probs = engine.infer_batch(batch)["log_probs"]
    batch.tensors["old_log_probs"] = log_probs + noise(0.3)
    batch.tensors["ref_log_prob"] = log_probs + noise(0.5)
    batch.tensors["rollout_is_weights"] = noise(0.3).exp()
    return batch


def theirs(trainer: Any, case: Case, batch: DataProto) -> tuple[float, dict[str, Tensor]]:
    for name, value in {**TRL_DEFAULTS, **case.trl}.items():
        setattr(trainer, name, value)
    trainer.args.delta = case.trl.get("delta")
    trainer.args.use_bias_correction_kl = case.trl.get("use_bias_correction_kl", False)
    trainer._entropy_bonus_enabled = trainer.entropy_coef != 0
    tensors = batch.tensors
    inputs = {
        "prompt_ids": tensors["input_ids"][:, :PROMPT],
        "prompt_mask": tensors["attention_mask"][:, :PROMPT].long(),
        "completion_ids": tensors["responses"],
        "completion_mask": tensors["response_mask"].long(),
        "advantages": tensors["advantages"][:, 0],
        "old_per_token_logps": None if case.fresh else tensors["old_log_probs"],
        "ref_per_token_logps": tensors["ref_log_prob"],
        "importance_sampling_ratio": tensors["rollout_is_weights"],
        "num_items_in_batch": tensors["response_mask"].sum(),
    }
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}


def ours(path: str, case: Case, batch: DataProto, micro_batch_size: int) -> tuple[float, dict[str, Tensor]]:
    engine = make_engine(path=path)
    config = FSDPActorConfig(policy_loss=PolicyLossConfig(loss_mode=case.loss), loss_agg_mode=case.mode, **case.keys)
    unread = ([] if case.weighted else ["rollout_is_weights"]) + (["old_log_probs"] if case.fresh else [])
    held = [key for key in batch.tensors.keys() if key not in unread]  # noqa: SIM118
    metrics = engine.train_batch(
        batch.select(held),
        make_policy_loss(config),
        outputs=("log_probs", "entropy"),
        micro_batch_size=micro_batch_size,
        global_batch_info=engine.global_batch_info(batch, loss_scale_factor=MAX_COMPLETION),
    )
    return metrics["actor/loss"], engine.full_gradients()


@pytest.mark.parametrize("micro_batch_size", [ROWS, 2])
@pytest.mark.parametrize("name", CASES)
def test_the_loss_and_the_gradient_of_every_weight_are_trls(trainer, tiny_model_path, rows, name, micro_batch_size):
    expected, gradients = theirs(trainer, CASES[name], rows)
    loss, got = ours(tiny_model_path, CASES[name], rows, micro_batch_size)
    assert loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
    assert norm > 1e-3
    for key, gradient in gradients.items():
        # The engine's module holds the model as `model`.
        assert float((got[f"model.{key}"] - gradient).norm() / norm) < 1e-5, key


# ---- where they differ on purpose --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "bnpo"])
def test_a_step_cut_in_two_is_the_same_step_and_another_there(trainer, tiny_model_path, rows, name):
    """TRL averages the means of micro-batches: right where these have as many rows (grpo), and not for tokens (bnpo)."""
    rows = rows.select_idxs([1, 2, 3, 0, 4, 5])  # 9 tokens, then 20
    whole, _ = theirs(trainer, CASES[name], rows)
    halves = [theirs(trainer, CASES[name], rows.select_idxs(half))[0] for half in ([0, 1, 2], [3, 4, 5])]
    mine = [ours(tiny_model_path, CASES[name], rows, size)[0] for size in (ROWS, 3)]
    assert mine[0] == pytest.approx(mine[1], rel=1e-5, abs=1e-6)
    if name == "grpo":
        assert sum(halves) / 2 == pytest.approx(whole, rel=1e-5, abs=1e-6)
    else:
        assert sum(halves) / 2 != pytest.approx(whole, rel=0.05)


def test_advantages_divide_by_the_deviation_and_more_there(trl):
    """TRL adds 1e-4 to the deviation and burnish 1e-6, as verl: 2e-4 of the advantage of a group of 0s and 1s."""
    from burnish.core_algos.estimators import compute_grpo_outcome_advantage

    scores = torch.tensor([0.0, 1.0, 0.0, 0.0])
    got, _ = compute_grpo_outcome_advantage(scores[:, None], torch.ones(4, 1), ["a"] * 4)
    there = (scores - scores.mean()) / (scores.std() + 1e-4)
    torch.testing.assert_close(got[:, 0], there, rtol=3e-4, atol=0)
    assert (got[:, 0] / there - 1).max().item() == pytest.approx(1e-4 / 0.5, rel=0.02)
