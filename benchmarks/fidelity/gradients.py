"""The gradient of one GRPO update as burnish computes it, beside the one that autograd gives in plain float32."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.fidelity.sampling import Questions, Responses, read
from burnish.config import load_config
from burnish.engine import FSDPEngine
from burnish.protocol import DataProto
from burnish.workers.losses import make_policy_loss
from burnish.workers.updates import update_kwargs

Gradient = dict[str, Tensor]
"""By the names of transformers' model; float32, on the CPU."""

_ROWS = 64


def advantages(scores: Tensor) -> Tensor:
    """(score - mean of the group) / (standard deviation of the group + 1e-6), [prompts, samples] (arXiv:2402.03300)."""
    return (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)


def plain(
    model: str, dtype: str, device: str, *, autocast: bool = False
) -> Callable[[Questions, Responses, Tensor], Gradient]:
    """transformers' model and autograd: -mean over all tokens of advantage x log-prob.

    Args:
        dtype: of the weights; with ``autocast`` they are float32, and it is what products are computed in.
    """

    def gradient(questions: Questions, responses: Responses, weights: Tensor) -> Gradient:
        stored = torch.float32 if autocast else getattr(torch, dtype)
        own: Any = AutoModelForCausalLM.from_pretrained(model, dtype=stored).to(device)
        own.eval()
        total = sum(map(len, responses))
        summed = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in own.named_parameters()}
        for first in range(0, len(responses), _ROWS):
            rows = range(first, min(first + _ROWS, len(responses)))
            prompts = [questions.prompts[row // questions.samples] for row in rows]
            context = torch.autocast(device, dtype=getattr(torch, dtype)) if autocast else nullcontext()
            with context:
                log_probs, _, mask = read(own, prompts, [responses[row] for row in rows])
            weight = weights.flatten()[list(rows)].to(device=device, dtype=torch.float32)
            (-(log_probs * weight[:, None] * mask).sum() / total).backward()
            # What a bfloat16 gradient adds up to is not to be rounded to bfloat16 as well.
            for name, parameter in own.named_parameters():
                summed[name] += parameter.grad.float()
                parameter.grad = None
        return {name: grad.cpu() for name, grad in summed.items()}

    return gradient


def ours(model: str, dtype: str, device: str) -> Callable[[Questions, Responses, Tensor], Gradient]:
    """burnish's engine and loss, as the actor calls them."""

    def gradient(questions: Questions, responses: Responses, weights: Tensor) -> Gradient:
        config = load_config(
            [
                {
                    "actor_rollout_ref.model.path": model,
                    "algorithm.adv_estimator": "grpo",
                    "actor_rollout_ref.rollout.n": questions.samples,
                    "data.train_files": None,
                    "data.val_files": None,
                    "trainer.device": device,
                    "trainer.n_gpus_per_node": 1,
                    "actor_rollout_ref.actor.fsdp_config.dtype": dtype,
                },
            ],
            train_rows_given=True,
        ).actor_rollout_ref
        engine = FSDPEngine(
            config.model,
            config.actor.fsdp_config,
            config.actor.optim,
            device=torch.device(device),
            share_prompts=config.actor.use_prefix_grouper,
        )
        rows = batch(questions, responses, weights)
        loss = make_policy_loss(config.actor)
        engine.train_batch(rows, loss, outputs=("log_probs", "entropy"), **update_kwargs(config.actor))
        return {name.removeprefix("model."): grad.float().cpu() for name, grad in engine.full_gradients().items()}

    return gradient


def batch(questions: Questions, responses: Responses, weights: Tensor) -> DataProto:
    """As the trainer makes it: prompts padded on the left, responses on the right."""
    prompts = [ids for ids in questions.prompts for _ in range(questions.samples)]
    before, most = max(map(len, prompts)), max(map(len, responses))
    whole = [
        [0] * (before - len(prompt)) + prompt + response + [0] * (most - len(response))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    there = [
        [0] * (before - len(prompt)) + [1] * (len(prompt) + len(response)) + [0] * (most - len(response))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    input_ids, attention_mask = torch.tensor(whole), torch.tensor(there)
    mask = attention_mask[:, before:].bool()
    return DataProto.from_dict(
        tensors={
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "responses": input_ids[:, before:],
            "response_mask": mask,
            "loss_mask": mask,
            "advantages": weights.flatten().float()[:, None].expand(-1, most).contiguous(),
        }
    )


def compare(found: Gradient, exact: Gradient) -> dict[str, Any]:
    """Cosine to ``exact``, length over its length, and the parameter whose own cosine is the smallest.

    Raises:
        ValueError: they are not of the same parameters.
    """
    if found.keys() != exact.keys():
        raise ValueError(f"gradients of different parameters: {sorted(found.keys() ^ exact.keys())}")
    product = {name: _product(found[name], exact[name]) for name in exact}
    own = {name: _product(found[name], found[name]) for name in exact}
    square = {name: _product(exact[name], exact[name]) for name in exact}
    cosines = {name: product[name] / max((own[name] * square[name]) ** 0.5, 1e-300) for name in exact}
    worst = min(cosines, key=lambda name: cosines[name])
    of_all, length, right = sum(product.values()), sum(own.values()) ** 0.5, sum(square.values()) ** 0.5
    return {
        "cosine": of_all / (length * right),
        "length": length / right,
        # 1 where the error does not lean to the gradient's direction: what it moves along that, over what it should.
        "along": of_all / right**2,
        "worst": worst,
        "worst_cosine": cosines[worst],
    }


def _product(one: Tensor, other: Tensor) -> float:
    return float((one.double() * other.double()).sum())
