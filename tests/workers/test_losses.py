"""What the losses log about the distance of rollout and trainer, and about values."""

import pytest
import torch

from burnish.config import FSDPActorConfig, FSDPCriticConfig
from burnish.config.actor_rollout_ref import PolicyLossConfig
from burnish.protocol import DataProto
from burnish.workers.losses import make_policy_loss, make_value_loss, rollout_difference


def rows_of(seed: int, rows: int = 6, width: int = 5) -> tuple[dict[str, torch.Tensor], DataProto]:
    """(log-probs and entropy of the policy, rows with the rollout's) with ragged masks."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(width)[None] < torch.randint(1, width + 1, (rows, 1), generator=generator)
    log_probs = -torch.rand(rows, width, generator=generator)
    tensors = {
        "loss_mask": mask,
        "response_mask": mask,
        "advantages": torch.randn(rows, width, generator=generator),
        "rollout_log_probs": log_probs + 0.1 * torch.randn(rows, width, generator=generator),
    }
    return {"log_probs": log_probs, "entropy": -log_probs}, DataProto.from_dict(tensors=tensors)


def info_of(mask: torch.Tensor) -> dict[str, object]:
    return {
        "dp_size": 1,
        "batch_num_tokens": int(mask.sum()),
        "global_batch_size": int(mask.any(-1).sum()),
        "loss_scale_factor": None,
    }


def test_the_difference_to_the_rollout_is_that_of_the_whole_batch_however_it_is_cut():
    outputs, rows = rows_of(0)
    mask = rows.tensors["loss_mask"]
    loss_fn, total = make_policy_loss(FSDPActorConfig()), {}
    for part in (slice(0, 2), slice(2, 3), slice(3, 6)):
        _, metrics = loss_fn({k: v[part] for k, v in outputs.items()}, rows[part], info_of(mask))
        for key, value in metrics.items():
            joined = (
                max(total.get(key, 0.0), float(value)) if key.endswith("_max") else total.get(key, 0.0) + float(value)
            )
            total[key] = joined
    found = rollout_difference(total)
    ours, theirs = (x[mask].double().exp() for x in (outputs["log_probs"], rows.tensors["rollout_log_probs"]))
    apart = (ours - theirs).abs()
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(apart.mean().item(), rel=1e-6)
    assert found["training/rollout_probs_diff_max"] == pytest.approx(apart.max().item(), rel=1e-6)
    assert found["training/rollout_probs_diff_std"] == pytest.approx(apart.std(correction=0).item(), rel=1e-6)
    correlation = torch.corrcoef(torch.stack([ours, theirs]))[0, 1].item()
    assert found["training/rollout_actor_probs_pearson_corr"] == pytest.approx(correlation, rel=1e-6)
    assert not [key for key in found if "moment" in key]


def test_only_what_no_pass_has_compared_is_measured_in_the_update():
    outputs, rows = rows_of(3)
    info, keys = info_of(rows.tensors["loss_mask"]), {}
    for loss_mode in ("vanilla", "bypass_mode"):
        for has_old in (False, True):
            batch = rows.select()
            if has_old:
                batch.tensors["old_log_probs"] = rows.tensors["rollout_log_probs"]
            config = FSDPActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss_mode))
            _, metrics = make_policy_loss(config)(outputs, batch, info)
            keys[loss_mode, has_old] = "training/rollout_probs_diff_max" in metrics
    # In bypass mode the old log-probs are the rollout's, and compare nothing.
    assert keys == {
        ("vanilla", False): True,
        ("vanilla", True): False,
        ("bypass_mode", False): True,
        ("bypass_mode", True): True,
    }


def test_engines_that_agree_have_no_difference_and_no_undefined_correlation():
    outputs, rows = rows_of(1)
    constant = {name: torch.full_like(value, -0.5) for name, value in outputs.items()}
    rows.tensors["rollout_log_probs"] = constant["log_probs"]
    _, metrics = make_policy_loss(FSDPActorConfig())(constant, rows, info_of(rows.tensors["loss_mask"]))
    found = rollout_difference({key: float(value) for key, value in metrics.items()})
    assert found["training/rollout_probs_diff_std"] == 0.0


def test_the_critic_logs_the_mean_of_its_values():
    outputs, rows = rows_of(2)
    mask = rows.tensors["loss_mask"]
    values = outputs["log_probs"]
    rows.tensors["values"], rows.tensors["returns"] = values, values + 1.0
    _, metrics = make_value_loss(FSDPCriticConfig(loss_agg_mode="token-mean"))({"values": values}, rows, info_of(mask))
    assert float(metrics["critic/vpred_mean"]) == pytest.approx(values[mask].mean().item())
    assert float(metrics["critic/vf_loss"]) == pytest.approx(0.5)


def test_top1_agreement_is_the_share_of_trained_tokens_that_are_the_most_likely_however_the_batch_is_cut():
    outputs, rows = rows_of(2)
    mask = rows.tensors["loss_mask"]
    is_top1 = torch.rand(mask.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    # Outside the mask both are zero, as the engine leaves them there, and so equal.
    outputs = {name: torch.where(mask, value, 0.0) for name, value in outputs.items()}
    outputs["top1_log_probs"] = torch.where(is_top1 | ~mask, outputs["log_probs"], outputs["log_probs"] / 2)
    shares = [
        make_policy_loss(FSDPActorConfig())({k: v[part] for k, v in outputs.items()}, rows[part], info_of(mask))[1]
        for part in (slice(0, 2), slice(2, 6))
    ]
    found = sum(float(share["actor/top1_agreement"]) for share in shares)
    assert found == pytest.approx(is_top1[mask].double().mean().item(), rel=1e-6)
