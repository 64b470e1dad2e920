"""What to turn where a stage takes long: rules from metrics and configuration to keys and a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_ACTOR, _ROLLOUT, _CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "critic"
# Where the configuration of a model that is trained or asked lies, and the keys that bound its micro-batches.
_MICRO_BATCHES = {
    "update_actor": (f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ACTOR}.ppo_max_token_len_per_gpu"),
    "update_critic": (f"{_CRITIC}.ppo_micro_batch_size_per_gpu", f"{_CRITIC}.ppo_max_token_len_per_gpu"),
    "train": ("data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu"),
    "old_log_prob": (
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
    ),
    "ref": (
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    ),
    "values": (f"{_CRITIC}.forward_micro_batch_size_per_gpu", f"{_CRITIC}.forward_max_token_len_per_gpu"),
    "reward_model": (
        "reward.reward_model.micro_batch_size_per_gpu",
        "reward.reward_model.forward_max_token_len_per_gpu",
    ),
}
_SECTIONS = {
    "update_actor": (_ACTOR, f"{_ACTOR}.fsdp_config", "actor_rollout_ref.model"),
    "update_critic": (_CRITIC, "critic.model.fsdp_config", "critic.model"),
    "train": ("data", "engine", "model"),
    "old_log_prob": (_ACTOR, f"{_ACTOR}.fsdp_config", "actor_rollout_ref.model"),
    "ref": ("actor_rollout_ref.ref", "actor_rollout_ref.ref.fsdp_config", "actor_rollout_ref.model"),
    "values": (_CRITIC, "critic.model.fsdp_config", "critic.model"),
    "reward_model": (
        "reward.reward_model",
        "reward.reward_model.model.fsdp_config",
        "reward.reward_model.model",
    ),
}
# Ranks whose most loaded one has this much more than the mean wait for it.
_IMBALANCE = 1.1
# Of the rows that can run at once, the share that does in the mean; below it a few long responses keep the engine.
_FEW_RUNNING = 0.6
# A part of a stage that is worth a word.
_WORTH = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Keys to turn, the most promising first, and what to do with them."""

    keys: tuple[str, ...]
    sentence: str


class _Run:
    """Metrics and configuration with answers for what is missing."""

    def __init__(self, metrics: Mapping[str, float], config: Mapping[str, Any]) -> None:
        self.metrics = metrics
        self.config = config

    def key(self, path: str) -> Any:
        """The value of a key; None where the configuration has none."""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def metric(self, name: str) -> float:
        return self.metrics.get(name, 0.0)

    def part(self, name: str, stage: str) -> float:
        """The share of a stage's seconds that ``perf/rollout/<name>`` is."""
        seconds = self.metric(f"timing_s/{stage}")
        return self.metric(f"perf/rollout/{name}") / seconds if seconds > 0 else 0.0


_Rules = Iterator[tuple[tuple[str, ...], str]]


def advise(stage: str, metrics: Mapping[str, float], config: Mapping[str, Any]) -> Advice:
    """What to turn for ``stage``: at most two pieces of advice, the most promising first."""
    rules = {"gen": _rollout, "update_weights": _weights, "other": _driver}.get(stage)
    run = _Run(metrics, config)
    if rules is not None:
        found = list(rules(run))
    elif stage in _MICRO_BATCHES:
        found = [*_passes(run, stage), *_model(run, stage)]
    else:
        found = list(_PLAIN[stage](run)) if stage in _PLAIN else []
    chosen = found[:2]
    keys = tuple(dict.fromkeys(key for keys, _ in chosen for key in keys))
    return Advice(keys=keys, sentence=" ".join(sentence for _, sentence in chosen))


def _rollout(run: _Run) -> _Rules:
    if run.key(f"{_ROLLOUT}.name") == "hf":
        yield (f"{_ROLLOUT}.name",), "The engine hf is the plain reference: native samples the same much faster."
    if run.part("reward_wait_seconds", "gen") > _WORTH:
        yield (
            ("reward.num_workers",),
            f"{run.part('reward_wait_seconds', 'gen'):.0%} of it waits for rewards after the last response: let more "
            f"processes score, or make the reward function faster.",
        )
    if run.metric("perf/rollout/preemptions") > 0:
        yield (
            (f"{_ROLLOUT}.gpu_memory_utilization", f"{_ROLLOUT}.max_num_seqs"),
            f"{run.metric('perf/rollout/preemptions'):.0f} sequences lost their place in the cache and were computed "
            f"again: give the cache more memory, or let fewer run at once.",
        )
    if run.part("prefill_seconds", "gen") > 0.5:
        yield (
            (f"{_ROLLOUT}.max_num_batched_tokens", "data.max_prompt_length"),
            "More than half of it fills the cache with prompts: let more tokens go through at once, or shorten prompts.",
        )
    running, limit = run.metric("perf/rollout/max_running"), run.key(f"{_ROLLOUT}.max_num_seqs")
    occupied = run.metric("perf/rollout/rows_per_step") / running if running else 1.0
    if limit and running >= limit and occupied >= _FEW_RUNNING:
        yield (
            (f"{_ROLLOUT}.max_num_seqs",),
            f"As many sequences run at once as are allowed ({limit}): allow more if the memory holds them.",
        )
    if occupied < _FEW_RUNNING:
        yield (
            ("data.max_response_length", "data.train_batch_size", f"{_ROLLOUT}.n"),
            f"Of the rows that ran at most, {occupied:.0%} ran in the mean: a few long responses keep the engine. Bound "
            f"the length, punish what is overlong, or sample more responses at once.",
        )
    if run.key(f"{_ROLLOUT}.enforce_eager") and run.key("trainer.device") == "cuda":
        yield (f"{_ROLLOUT}.enforce_eager",), "Steps are launched one kernel at a time: false replays captured graphs."
    yield (
        ("data.train_batch_size", f"{_ROLLOUT}.n"),
        "More responses at once cost little more while the weights are what is read.",
    )


def _passes(run: _Run, stage: str) -> _Rules:
    """Passes that need not be."""
    if stage == "old_log_prob":
        small = run.key(f"{_ACTOR}.ppo_mini_batch_size"), run.key("data.train_batch_size")
        if None not in small and small[0] < small[1]:
            yield (
                (f"{_ACTOR}.ppo_mini_batch_size", "algorithm.rollout_correction.bypass_mode"),
                "The pass is left out with one update a batch (ppo_mini_batch_size = train_batch_size, ppo_epochs = 1), "
                "and in bypass mode, which takes the rollout's own log-probs.",
            )
        else:
            yield (
                ("algorithm.rollout_correction.bypass_mode",),
                "In bypass mode the rollout's own log-probs are taken instead.",
            )
    if stage == "ref":
        yield (
            (f"{_ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"),
            "The reference is asked for a KL term alone: without one the pass is left out.",
        )
    epochs = {"update_actor": f"{_ACTOR}.ppo_epochs", "update_critic": f"{_CRITIC}.ppo_epochs"}.get(stage)
    if epochs and (run.key(epochs) or 1) > 1:
        yield (epochs,), f"The batch is gone through {run.key(epochs)} times."


def _model(run: _Run, stage: str) -> _Rules:
    """What makes one pass of a model slow."""
    section, engine, model = _SECTIONS[stage]
    micro_batch, max_tokens = _MICRO_BATCHES[stage]
    on_gpu = run.key("trainer.device") == "cuda"
    if on_gpu and run.key(f"{engine}.dtype") in ("float32", "fp32"):
        yield (f"{engine}.dtype",), "It computes in float32: bfloat16 is many times as fast on this device."
    for offload in ("param_offload", "optimizer_offload", "offload_policy"):
        if on_gpu and run.key(f"{engine}.{offload}"):
            yield (
                (f"{engine}.{offload}",),
                f"{offload} moves its state over the bus: turn it off if the memory holds it.",
            )
            break
    mean, most = run.metric("global_seqlen/mean"), run.metric("global_seqlen/balanced_max")
    if stage in ("update_actor", "update_critic", "train") and mean and most > _IMBALANCE * mean:
        in_a_step = "data.train_batch_size" if stage == "train" else f"{section}.ppo_mini_batch_size"
        yield (
            ("trainer.balance_batch", in_a_step),
            f"The rank with the most tokens has {most / mean:.2f} times the mean, and the others wait for it: balance the "
            f"batch, or take larger mini-batches, which are easier to spread.",
        )
    name = {"update_actor": "actor", "update_critic": "critic", "train": "train"}.get(stage)
    if name and run.metric(f"perf/recomputed_blocks/{name}") > 0:
        yield (
            (max_tokens, f"{model}.enable_gradient_checkpointing"),
            f"{run.metric(f'perf/recomputed_blocks/{name}'):.0f} blocks compute their activations twice for want of "
            f"memory: smaller micro-batches, or memory that is taken from elsewhere, keep them.",
        )
    elif run.key(micro_batch) is not None:
        yield (
            (micro_batch,),
            f"Micro-batches of {run.key(micro_batch)} rows may be small: a bound of tokens (null, and {max_tokens}) packs "
            f"them full.",
        )
    else:
        yield (max_tokens,), "Small micro-batches leave the device waiting for its host: raise the bound of tokens."


def _weights(run: _Run) -> _Rules:
    if run.part("weight_check_seconds", "update_weights") > 0.5:
        yield (
            (),
            "Most of it checks the engine's copy of the weights against the trained ones; there is no key for that.",
        )
    yield (
        (f"{_ROLLOUT}.name", f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"),
        "The native engine on one rank reads the trained weights themselves; elsewhere larger buckets make fewer calls.",
    )


def _driver(run: _Run) -> _Rules:
    yield (
        ("data.dataloader_num_workers", "trainer.rollout_data_dir"),
        "It is the driver's own: reading and rendering prompts, writing dumps, and waiting between the stages.",
    )


def _reward(run: _Run) -> _Rules:
    failed = run.metric("reward/timeout_count")
    if failed:
        yield (
            ("reward.timeout",),
            f"{failed:.0f} responses ran into reward.timeout ({run.key('reward.timeout')} s): the function hangs on some.",
        )
    if run.key("reward.num_workers") == 0:
        yield ("reward.num_workers",), "The reward function runs in the driver, one response after the other."
    elif run.key("reward.launch_reward_fn_async") is False:
        yield (
            ("reward.launch_reward_fn_async", "reward.num_workers"),
            "Rewards are computed after the last response: true computes them while others are sampled.",
        )
    else:
        yield ("reward.num_workers",), "More processes score more responses at once, as far as there are cores."


def _filter(run: _Run) -> _Rules:
    yield ("algorithm.filter_groups.metric",), "Groups are compared on the driver."


def _advantages(run: _Run) -> _Rules:
    yield (
        ("algorithm.adv_estimator",),
        "It is computed on the driver's CPU; the page of performance says how long each estimator takes.",
    )


def _testing(run: _Run) -> _Rules:
    yield (
        ("trainer.test_freq", "data.val_max_samples", f"{_ROLLOUT}.val_kwargs.n"),
        "Validate less often, on fewer prompts, or with fewer samples.",
    )


def _saving(run: _Run) -> _Rules:
    if run.key(f"{_ACTOR}.checkpoint.async_save") is False:
        yield (f"{_ACTOR}.checkpoint.async_save",), "True writes while training goes on."
    yield (
        ("trainer.save_freq", f"{_ACTOR}.checkpoint.save_contents"),
        "Save less often, or less: the optimizer's state is the largest part.",
    )


_PLAIN = {
    "reward": _reward,
    "filter": _filter,
    "adv": _advantages,
    "testing": _testing,
    "save_checkpoint": _saving,
}
