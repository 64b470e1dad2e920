"""The batch plan: what one step is, in every unit."""

from dataclasses import dataclass

from burnish.config.actor_rollout_ref import FSDPActorConfig
from burnish.config.critic import FSDPCriticConfig
from burnish.config.trainer import PPOTrainerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatePlan:
    """How one model is updated in a step.

    Attributes:
        updates: optimizer steps of one step, over all passes.
        prompts: prompts of one update.
        samples: samples of one update, over all workers.
        workers: workers that share them.
        micro_batch_samples: samples that go through the model at once, per worker; None where tokens bound them.
        micro_batch_tokens: tokens that go through the model at once, per worker; None where samples bound them.
    """

    updates: int
    prompts: int
    samples: int
    workers: int
    micro_batch_samples: int | None
    micro_batch_tokens: int | None

    @property
    def samples_per_worker(self) -> int:
        """Samples of one update for one worker, at most."""
        return -(-self.samples // self.workers)

    def render(self, name: str) -> str:
        """One line of text."""
        bound = (
            f"{self.micro_batch_samples:,} samples"
            if self.micro_batch_samples is not None
            else f"at most {self.micro_batch_tokens:,} tokens"
        )
        return (
            f"{name:<8} {_count(self.updates, 'update')} of {_count(self.prompts, 'prompt')} = "
            f"{_count(self.samples, 'sample')} ({self.samples_per_worker:,} per worker, in micro-batches of {bound})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """What one step is.

    Attributes:
        prompts: prompts of one step.
        samples_per_prompt: responses to each.
        workers: workers that generate.
        prompt_tokens, response_tokens: tokens of one sample, at most.
        actor: the policy's updates.
        critic: the critic's updates; None without a critic.
        kl: where the KL to the reference goes.
    """

    prompts: int
    samples_per_prompt: int
    workers: int
    prompt_tokens: int
    response_tokens: int
    actor: UpdatePlan
    critic: UpdatePlan | None
    kl: str

    @property
    def samples(self) -> int:
        """Samples of one step."""
        return self.prompts * self.samples_per_prompt

    @property
    def max_tokens(self) -> int:
        """Tokens of one step, at most."""
        return self.samples * (self.prompt_tokens + self.response_tokens)

    def render(self) -> str:
        """The plan as text, one line for each part of a step."""
        longest = self.prompt_tokens + self.response_tokens
        lines = [
            f"rollout  {_count(self.prompts, 'prompt')} x {_count(self.samples_per_prompt, 'response')} = "
            f"{_count(self.samples, 'sample')} on {_count(self.workers, 'worker')}",
            f"tokens   at most {self.prompt_tokens:,} + {self.response_tokens:,} = {longest:,} a sample, "
            f"{self.max_tokens:,} a step",
        ]
        if self.critic is not None:
            lines.append(self.critic.render("critic"))
        lines.append(self.actor.render("actor"))
        lines.append(f"KL       {self.kl}")
        return "\n".join(["One step:", *(f"  {line}" for line in lines)])


def batch_plan(config: PPOTrainerConfig, world_size: int) -> BatchPlan:
    """The plan of a run on ``world_size`` workers."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    rollout, prompts = config.actor_rollout_ref.rollout, config.data.train_batch_size
    critic_workers = critic.n_gpus_per_node * critic.nnodes or world_size

    def update_plan(model: FSDPActorConfig | FSDPCriticConfig, workers: int) -> UpdatePlan:
        mini = model.ppo_mini_batch_size
        return UpdatePlan(
            updates=-(-prompts // mini) * model.ppo_epochs,
            prompts=min(mini, prompts),
            samples=min(mini, prompts) * rollout.n,
            workers=workers,
            micro_batch_samples=None if model.use_dynamic_bsz else model.ppo_micro_batch_size_per_gpu,
            micro_batch_tokens=model.ppo_max_token_len_per_gpu if model.use_dynamic_bsz else None,
        )

    return BatchPlan(
        prompts=prompts,
        samples_per_prompt=rollout.n,
        workers=world_size,
        prompt_tokens=rollout.prompt_length,
        response_tokens=rollout.response_length,
        actor=update_plan(actor, world_size),
        critic=update_plan(critic, critic_workers) if critic.enable else None,
        kl=_kl_path(config),
    )


def _kl_path(config: PPOTrainerConfig) -> str:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    parts = []
    if algorithm.use_kl_in_reward:
        parts.append(f"in the reward ({algorithm.kl_penalty}, {algorithm.kl_ctrl.type} {algorithm.kl_ctrl.kl_coef:g})")
    if actor.use_kl_loss:
        parts.append(f"in the loss ({actor.kl_loss_type}, {actor.kl_loss_coef:g})")
    return " and ".join(parts) if parts else "none, so there is no reference policy"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
