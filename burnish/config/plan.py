"""The batch plan: what one step is, in every unit, and which algorithm it follows."""

from dataclasses import dataclass

from burnish.config import applied, names
from burnish.config.actor_rollout_ref import FSDPActorConfig, FSDPEngineConfig
from burnish.config.algorithm import AlgoConfig
from burnish.config.critic import FSDPCriticConfig
from burnish.config.rejection import weight_bounds
from burnish.config.trainer import PPOTrainerConfig, TrainerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatePlan:
    """How one model is updated in a step.

    Attributes:
        updates: optimizer steps of one step, over all passes.
        prompts: prompts of one update.
        samples: samples of one update, over all workers.
        workers: workers that share them.
        sequence_parallel: workers that share the tokens of each sample.
        micro_batch_samples: samples that go through the model at once, per worker; None where tokens bound them.
        micro_batch_tokens: tokens that go through the model at once, per worker; None where samples bound them.
    """

    updates: int
    prompts: int
    samples: int
    workers: int
    sequence_parallel: int
    micro_batch_samples: int | None
    micro_batch_tokens: int | None

    @property
    def samples_per_worker(self) -> int:
        """Samples of one update for one worker, or one group of workers that share their tokens, at most."""
        return -(-self.samples * self.sequence_parallel // self.workers)

    def render(self, name: str) -> str:
        """One line of text."""
        size = self.sequence_parallel
        if self.micro_batch_samples is not None:
            bound = f"{self.micro_batch_samples:,} samples"
        else:
            bound = f"at most {f'{size} x ' if size > 1 else ''}{self.micro_batch_tokens:,} tokens"
        each = "worker" if size == 1 else f"{size} workers that share their tokens"
        return (
            f"{name:<8} {_count(self.updates, 'update')} of {_count(self.prompts, 'prompt')} = "
            f"{_count(self.samples, 'sample')} ({self.samples_per_worker:,} per {each}, in micro-batches of {bound})"
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
        baselines: greedy responses that a step generates beside its samples, to be their baselines.
        filter: what dynamic sampling does; empty without it.
        reward: what is done to the scores; empty if nothing.
        log_prob: where the old log-probs come from, and how they are corrected.
        loss: the policy loss with its advantages and its aggregation, as they really apply.
        unsaved: that no checkpoint is written; empty where one is, or where nothing is trained.
    """

    prompts: int
    samples_per_prompt: int
    workers: int
    prompt_tokens: int
    response_tokens: int
    actor: UpdatePlan
    critic: UpdatePlan | None
    kl: str
    baselines: int
    filter: str
    reward: str
    log_prob: str
    loss: str
    unsaved: str

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
        if self.baselines:
            lines.insert(1, f"baseline {_count(self.baselines, 'greedy response')}, one to each prompt")
        if self.filter:
            lines.append(f"filter   {self.filter}")
        if self.reward:
            lines.append(f"reward   {self.reward}")
        lines.append(f"log-prob {self.log_prob}")
        if self.critic is not None:
            lines.append(self.critic.render("critic"))
        lines.append(self.actor.render("actor"))
        lines.append(f"loss     {self.loss}")
        lines.append(f"KL       {self.kl}")
        if self.unsaved:
            lines.append(f"saved    {self.unsaved}")
        return "\n".join(["One step:", *(f"  {line}" for line in lines)])


def batch_plan(config: PPOTrainerConfig, world_size: int) -> BatchPlan:
    """The plan of a run on ``world_size`` workers."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    rollout, prompts = config.actor_rollout_ref.rollout, config.data.train_batch_size
    critic_workers = critic.n_gpus_per_node * critic.nnodes or world_size

    def update_plan(model: FSDPActorConfig | FSDPCriticConfig, engine: FSDPEngineConfig, workers: int) -> UpdatePlan:
        mini = model.ppo_mini_batch_size
        return UpdatePlan(
            updates=-(-prompts // mini) * model.ppo_epochs,
            prompts=min(mini, prompts),
            samples=min(mini, prompts) * rollout.n,
            workers=workers,
            sequence_parallel=engine.ulysses_sequence_parallel_size,
            micro_batch_samples=None if model.use_dynamic_bsz else model.ppo_micro_batch_size_per_gpu,
            micro_batch_tokens=model.ppo_max_token_len_per_gpu if model.use_dynamic_bsz else None,
        )

    return BatchPlan(
        prompts=prompts,
        samples_per_prompt=rollout.n,
        workers=world_size,
        prompt_tokens=rollout.prompt_length,
        response_tokens=rollout.response_length,
        actor=update_plan(actor, actor.fsdp_config, world_size),
        critic=update_plan(critic, critic.model.fsdp_config, critic_workers) if critic.enable else None,
        kl=_kl_path(config),
        baselines=prompts if config.algorithm.adv_estimator == "remax" else 0,
        filter=_filter(config),
        reward=_reward(config),
        log_prob=_log_prob(config),
        loss=_loss(config),
        unsaved=_unsaved(config.trainer),
    )


def _kl_path(config: PPOTrainerConfig) -> str:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    parts = []
    if algorithm.use_kl_in_reward:
        parts.append(f"in the reward ({algorithm.kl_penalty}, {algorithm.kl_ctrl.type} {algorithm.kl_ctrl.kl_coef:g})")
    if actor.use_kl_loss:
        parts.append(f"in the loss ({actor.kl_loss_type}, {actor.kl_loss_coef:g})")
    return " and ".join(parts) if parts else "none, so there is no reference policy"


def _unsaved(trainer: TrainerConfig) -> str:
    if trainer.save_freq > 0 or trainer.val_only:
        return ""
    return f"no checkpoint, so the policy ends with the run (trainer.save_freq={trainer.save_freq})"


def _filter(config: PPOTrainerConfig) -> str:
    groups, prompts = config.algorithm.filter_groups, config.data.train_batch_size
    if not groups.enable:
        return ""
    most = groups.max_num_gen_batches
    batches = f"at most {_count(most, 'batch')}" if most else "as many batches as it takes,"
    return f"groups whose {groups.metric} varies, out of {batches} of {_count(prompts, 'prompt')}"


def _reward(config: PPOTrainerConfig) -> str:
    kwargs = config.reward.reward_kwargs
    buffer = kwargs.overlong_buffer_cfg
    if not buffer.enable:
        return ""
    return f"less up to {buffer.penalty_factor:g} over the last {buffer.len:,} of {kwargs.max_resp_len:,} tokens"


def _log_prob(config: PPOTrainerConfig) -> str:
    if config.algorithm.rollout_correction.bypass_mode:
        source = "the rollout's, without a pass of the trainer (bypass)"
    elif applied.needs_old_log_probs(config):
        source = "computed by the trainer before the updates (decoupled)"
    else:
        source = "the update's own: one update per batch, so no pass before it"
        if ":" in config.algorithm.adv_estimator:
            # Code of the user's own is not loaded here.
            source += ", unless your estimator takes old_log_probs"
    return "; ".join([source, *_corrections(config)])


def _corrections(config: PPOTrainerConfig) -> list[str]:
    correction = config.algorithm.rollout_correction
    parts = []
    if correction.rollout_is is not None:
        normalized = ", over their mean" if correction.rollout_is_batch_normalize else ""
        lower, upper = weight_bounds(correction.rollout_is_threshold)
        bounds = f"up to {upper:g}" if lower is None else f"from {lower:g} to {upper:g} and else 0"
        parts.append(f"{correction.rollout_is} weights {bounds}{normalized}")
    if correction.rollout_rs is not None:
        parts.append(f"rejection by {correction.rollout_rs} ({correction.rollout_rs_threshold})")
    return parts


def _loss(config: PPOTrainerConfig) -> str:
    algorithm, name = config.algorithm, applied.policy_loss(config)
    if name == "bypass_mode":
        name += f" ({algorithm.rollout_correction.loss_type})"
    resampled = f", rows resampled by score ({algorithm.pf_ppo.reweight_method})" if algorithm.use_pf_ppo else ""
    return f"{name} on {_advantages(config)}, {applied.loss_agg_mode(config)}{resampled}"


def _advantages(config: PPOTrainerConfig) -> str:
    algorithm, name = config.algorithm, f"{config.algorithm.adv_estimator} advantages"
    if algorithm.adv_estimator == "gdpo":
        return f"{name} of {' + '.join(_components(algorithm))}"
    divides = algorithm.norm_adv_by_std_in_grpo or algorithm.adv_estimator not in names.STD_ADV_ESTIMATORS
    return name if divides else f"{name} that no deviation divides"


def _components(algorithm: AlgoConfig) -> list[str]:
    """GDPO's components with their weights, where these are not 1."""
    keys = algorithm.gdpo_reward_keys or []
    weights = algorithm.gdpo_reward_weights or [1.0] * len(keys)
    return [key if weight == 1 else f"{weight:g} {key}" for key, weight in zip(keys, weights, strict=True)]


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"
