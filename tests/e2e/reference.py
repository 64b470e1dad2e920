"""GRPO and PPO once more, from the definitions alone: plain transformers, plain torch, one row at a time.

Nothing here imports burnish, so that an error there cannot hide by being in both.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Row:
    """One response: what was sampled, how it was scored, and what the stages add to it."""

    group: str
    prompt: list[int]
    response: list[int]
    score: float | None
    old: Tensor = field(default_factory=Tensor)
    ref: Tensor = field(default_factory=Tensor)
    values: Tensor = field(default_factory=Tensor)
    rewards: Tensor = field(default_factory=Tensor)
    advantages: Tensor = field(default_factory=Tensor)
    returns: Tensor = field(default_factory=Tensor)


def log_probs_and_entropy(model: nn.Module, row: Row, temperature: float) -> tuple[Tensor, Tensor]:
    """Of each response token under softmax(logits / temperature): [response] each."""
    logits = model(input_ids=torch.tensor([row.prompt + row.response])).logits[0]
    # The state of the last prompt token predicts the first response token.
    distributions = (logits[len(row.prompt) - 1 : -1] / temperature).log_softmax(-1)
    log_probs = distributions[torch.arange(len(row.response)), row.response]
    return log_probs, -(distributions.exp() * distributions).sum(-1)


def values_of(critic: nn.Module, row: Row) -> Tensor:
    """V of the state before each response token: [response]."""
    hidden = critic.backbone(input_ids=torch.tensor([row.prompt + row.response])).last_hidden_state[0]
    return critic.head(hidden[len(row.prompt) - 1 : -1])[:, 0]


def k3(log_prob: Tensor, reference: Tensor) -> Tensor:
    """The low-variance estimate of the KL, per token."""
    negated = torch.clamp(reference - log_prob, -20, 20)
    return torch.clamp(torch.exp(negated) - negated - 1, -10, 10)


def set_group_advantages(rows: list[Row]) -> None:
    """GRPO: (s - mean) / (std + 1e-6) in each group of scored rows, 0 where all scores are equal."""
    for group in {row.group for row in rows}:
        scored = [row for row in rows if row.group == group and row.score is not None]
        scores = [row.score for row in scored]
        for row in scored:
            if max(scores) == min(scores):
                advantage = 0.0
            else:
                mean = sum(scores) / len(scores)
                std = math.sqrt(sum((s - mean) ** 2 for s in scores) / (len(scores) - 1))
                advantage = (row.score - mean) / (std + 1e-6)
            row.advantages = torch.full((len(row.response),), advantage, dtype=torch.float64)


def set_kl_rewards(rows: list[Row], beta: float) -> float:
    """Rewards per token: -beta k3(old, ref), and the score on the last token; returns the mean KL over scored rows."""
    means = []
    for row in rows:
        kl = k3(row.old, row.ref)
        row.rewards = -beta * kl
        if row.score is not None:
            row.rewards[-1] += row.score
            means.append(float(kl.mean()))
    return sum(means) / len(means)


def set_gae_advantages(rows: list[Row], gamma: float, lam: float) -> None:
    """GAE, whitened over all tokens of scored rows."""
    scored = [row for row in rows if row.score is not None]
    for row in scored:
        advantage, next_value, advantages = 0.0, 0.0, []
        for t in reversed(range(len(row.response))):
            delta = float(row.rewards[t]) + gamma * next_value - float(row.values[t])
            advantage = delta + gamma * lam * advantage
            next_value = float(row.values[t])
            advantages.insert(0, advantage)
        row.advantages = torch.tensor(advantages, dtype=torch.float64)
        row.returns = row.advantages + row.values.double()
    every = torch.cat([row.advantages for row in scored])
    mean, variance = every.mean(), every.var(correction=1)
    for row in scored:
        row.advantages = (row.advantages - mean) / torch.sqrt(variance + 1e-8)


def aggregate(terms: list[Tensor], mode: str) -> Tensor:
    """Losses per token of each row -> one number."""
    if mode == "token-mean":
        return sum(term.sum() for term in terms) / sum(len(term) for term in terms)
    assert mode == "seq-mean-token-mean"
    return sum(term.mean() for term in terms) / len(terms)


@dataclass
class PolicySettings:
    """Of the policy's update."""

    temperature: float
    clip_low: float
    clip_high: float
    dual_clip: float
    entropy_coeff: float
    kl_coef: float
    mode: str


def policy_update(model: nn.Module, rows: list[Row], settings: PolicySettings) -> dict[str, float]:
    """Gradient of one update's loss, and its metrics."""
    policy_terms, entropy_terms, kl_terms, clipped, lower = [], [], [], [], []
    for row in rows:
        log_prob, entropy = log_probs_and_entropy(model, row, settings.temperature)
        ratio = torch.exp(log_prob - row.old)
        plain = -row.advantages * ratio
        bounded = -row.advantages * torch.clamp(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
        worse = torch.where(bounded > plain, bounded, plain)
        most = -row.advantages * settings.dual_clip
        beyond = (row.advantages < 0) & (worse > most)
        policy_terms.append(torch.where(beyond, most, worse))
        entropy_terms.append(entropy)
        kl_terms.append(k3(log_prob, row.ref))
        clipped += (bounded > plain).tolist()
        lower += beyond.tolist()
    policy_loss = aggregate(policy_terms, settings.mode)
    entropy = aggregate(entropy_terms, settings.mode)
    kl = aggregate(kl_terms, settings.mode)
    loss = policy_loss - settings.entropy_coeff * entropy + settings.kl_coef * kl
    loss.backward()
    return {
        "actor/pg_loss": policy_loss.item(),
        "actor/entropy": entropy.item(),
        "actor/kl_loss": kl.item(),
        "actor/loss": loss.item(),
        "actor/pg_clipfrac": sum(clipped) / len(clipped),
        "actor/pg_clipfrac_lower": sum(lower) / len(lower),
    }


def value_update(critic: nn.Module, rows: list[Row], clip: float, mode: str) -> dict[str, float]:
    """Gradient of the critic's clipped loss, and its metrics."""
    terms, clipped, predicted = [], [], []
    for row in rows:
        now = values_of(critic, row)
        plain = (now - row.returns) ** 2
        near = (torch.clamp(now, row.values - clip, row.values + clip) - row.returns) ** 2
        terms.append(torch.where(near > plain, near, plain))
        clipped += (near > plain).tolist()
        predicted += now.tolist()
    loss = 0.5 * aggregate(terms, mode)
    loss.backward()
    return {
        "critic/vf_loss": loss.item(),
        "critic/vf_clipfrac": sum(clipped) / len(clipped),
        "critic/vpred_mean": sum(predicted) / len(predicted),
    }


@dataclass
class HandAdamW:
    """AdamW after its paper, with linear warm-up and clipping by the global norm."""

    parameters: list[nn.Parameter]
    lr: float
    warmup: int
    weight_decay: float
    clip: float
    betas: tuple[float, float] = (0.9, 0.999)
    updates: int = 0
    moments: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def rate(self, step: int) -> float:
        return self.lr * min(1.0, step / self.warmup)

    def step(self, step: int) -> float:
        """One update at trainer step ``step``; returns the norm before clipping."""
        norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in self.parameters if p.grad is not None))
        scale = self.clip / norm if norm > self.clip else 1.0
        self.updates += 1
        first, second = self.betas
        with torch.no_grad():
            for parameter in self.parameters:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad * scale
                m, v = self.moments.get(id(parameter), (torch.zeros_like(grad), torch.zeros_like(grad)))
                m, v = first * m + (1 - first) * grad, second * v + (1 - second) * grad**2
                self.moments[id(parameter)] = (m, v)
                parameter *= 1 - self.rate(step) * self.weight_decay
                m_hat, v_hat = m / (1 - first**self.updates), v / (1 - second**self.updates)
                parameter -= self.rate(step) * m_hat / (v_hat.sqrt() + 1e-8)
                parameter.grad = None
        return norm


def epochs_of_updates(
    name: str,
    rows: list[Row],
    optimizer: HandAdamW,
    update: Callable[[list[Row]], dict[str, float]],
    *,
    step: int,
    epochs: int,
    prompts_per_update: int,
) -> dict[str, float]:
    """All updates of one trainer step, in the order of the batch; metrics are means over the updates."""
    groups = list(dict.fromkeys(row.group for row in rows))
    logs: list[dict[str, Any]] = []
    for _ in range(epochs):
        for start in range(0, len(groups), prompts_per_update):
            chosen = groups[start : start + prompts_per_update]
            metrics = update([row for row in rows if row.group in chosen and row.score is not None])
            logs.append(metrics | {f"{name}/grad_norm": optimizer.step(step)})
    means = {key: sum(log[key] for log in logs) / len(logs) for key in logs[0]}
    return means | {f"{name}/lr": optimizer.rate(step), f"{name}/skipped_updates": 0.0}
