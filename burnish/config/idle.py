"""Keys that were set beside a choice that does not read them: another loss, another estimator, a switch that is off."""

from collections.abc import Iterator

from burnish.config import names
from burnish.config.applied import clip_loss, needs_old_log_probs
from burnish.config.build import shown, value_of
from burnish.config.checkpoint_checks import unused_of_checkpoints
from burnish.config.checks import token_bounds_in_use
from burnish.config.dump_checks import unused_of_dumps
from burnish.config.idle_sections import (
    idle_sentences,
    unused_of_adapters,
    unused_of_layout,
    unused_of_optimizer,
    unused_of_run,
)
from burnish.config.profiler_checks import unused_of_profilers
from burnish.config.reward_manager_checks import unused_of_reward_services
from burnish.config.reward_model_checks import has_reward_pool, unused_of_reward_model
from burnish.config.schema import leaves
from burnish.config.trainer import PPOTrainerConfig
from burnish.config.validation_checks import unused_of_validation

_MODEL = "actor_rollout_ref.model"
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"
_CORRECTION = "algorithm.rollout_correction"
_OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"

_CLIPPING = ("vanilla", "gspo", "clip_cov", "geo_mean", "cispo", "dppo_tv", "dppo_kl")
# The losses that read a key; a loss of the user's own may read any.
READING_LOSSES = {
    f"{_ACTOR}.clip_ratio": _CLIPPING,
    f"{_ACTOR}.clip_ratio_low": _CLIPPING,
    f"{_ACTOR}.clip_ratio_high": _CLIPPING,
    f"{_ACTOR}.clip_ratio_c": ("vanilla", "dppo_tv", "dppo_kl"),
    f"{_ACTOR}.tau_pos": ("sapo",),
    f"{_ACTOR}.tau_neg": ("sapo",),
    f"{_ACTOR}.policy_loss.clip_cov_ratio": ("clip_cov",),
    f"{_ACTOR}.policy_loss.clip_cov_lb": ("clip_cov",),
    f"{_ACTOR}.policy_loss.clip_cov_ub": ("clip_cov",),
    f"{_ACTOR}.policy_loss.kl_cov_ratio": ("kl_cov",),
    f"{_ACTOR}.policy_loss.ppo_kl_coef": ("kl_cov",),
    f"{_ACTOR}.policy_loss.dro_beta": ("dro",),
}
# The estimators that read a key, likewise.
READING_ESTIMATORS = {
    "algorithm.gamma": ("gae", "reinforce_plus_plus"),
    "algorithm.lam": ("gae",),
    "algorithm.norm_adv_by_std_in_grpo": names.STD_ADV_ESTIMATORS,
    "algorithm.gdpo_reward_keys": ("gdpo",),
    "algorithm.gdpo_reward_weights": ("gdpo",),
}
# The built-in engines that read a key, likewise.
READING_ENGINES = {
    **{
        f"{_ROLLOUT}.{name}": ("native", "vllm")
        for name in (
            "gpu_memory_utilization",
            "max_num_batched_tokens",
            "enable_chunked_prefill",
            "enforce_eager",
            "cudagraph_capture_sizes",
        )
    },
    **{
        f"{_ROLLOUT}.{name}": ("vllm",)
        for name in (
            "mode",
            "load_format",
            "tensor_model_parallel_size",
            "data_parallel_size",
            "enable_prefix_caching",
            "scheduling_policy",
            "disable_log_stats",
            "engine_timeout",
            "engine_kwargs.vllm",
        )
    },
    f"{_ROLLOUT}.engine_kwargs.sglang": (),
}
# Keys of engines that the run starts itself.
_OWN_ENGINE_KEYS = (
    "load_format",
    "tensor_model_parallel_size",
    "data_parallel_size",
    "gpu_memory_utilization",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "scheduling_policy",
    "disable_log_stats",
    "enforce_eager",
    "cudagraph_capture_sizes",
    "free_cache_engine",
    "engine_timeout",
    "engine_kwargs.vllm",
)
# Keys that need another one, which is off while it is false or null.
SWITCHES = {
    f"{_ACTOR}.kl_loss_coef": f"{_ACTOR}.use_kl_loss",
    f"{_ACTOR}.kl_loss_type": f"{_ACTOR}.use_kl_loss",
    "algorithm.kl_penalty": "algorithm.use_kl_in_reward",
    "algorithm.kl_ctrl.type": "algorithm.use_kl_in_reward",
    "algorithm.kl_ctrl.kl_coef": "algorithm.use_kl_in_reward",
    "algorithm.kl_ctrl.horizon": "algorithm.use_kl_in_reward",
    "algorithm.kl_ctrl.target_kl": "algorithm.use_kl_in_reward",
    "algorithm.pf_ppo.reweight_method": "algorithm.use_pf_ppo",
    "algorithm.pf_ppo.weight_pow": "algorithm.use_pf_ppo",
    "algorithm.filter_groups.metric": "algorithm.filter_groups.enable",
    "algorithm.filter_groups.max_num_gen_batches": "algorithm.filter_groups.enable",
    f"{_CORRECTION}.rollout_is_threshold": f"{_CORRECTION}.rollout_is",
    f"{_CORRECTION}.rollout_is_batch_normalize": f"{_CORRECTION}.rollout_is",
    f"{_CORRECTION}.rollout_rs_threshold": f"{_CORRECTION}.rollout_rs",
    f"{_CORRECTION}.loss_type": f"{_CORRECTION}.bypass_mode",
    f"{_OVERLONG}.len": f"{_OVERLONG}.enable",
    f"{_OVERLONG}.penalty_factor": f"{_OVERLONG}.enable",
    f"{_OVERLONG}.log": f"{_OVERLONG}.enable",
    "reward.reward_kwargs.max_resp_len": f"{_OVERLONG}.enable",
    "reward.sandbox_fusion.max_concurrent": "reward.sandbox_fusion.url",
    "reward.sandbox_fusion.memory_limit_mb": "reward.sandbox_fusion.url",
}
# Keys of a model that is trained.
TRAINED_KEYS = ("defer_gradient_sync", "optimizer_offload")
_LAYOUTS = {
    "actor": f"{_ACTOR}.fsdp_config",
    "ref": "actor_rollout_ref.ref.fsdp_config",
    "critic": "critic.model.fsdp_config",
    "reward model": "reward.reward_model.model.fsdp_config",
}
# Coefficients that ask for nothing where they are 0, beside a switch that is off as well.
_COEFFICIENTS = (f"{_ACTOR}.kl_loss_coef", "algorithm.kl_ctrl.kl_coef")


def idle_keys(config: PPOTrainerConfig) -> dict[str, str]:
    """Keys that were set and that the other keys leave without effect, each with the reason."""
    return {key: reason for key, reason in _unused(config) if key in config.set_keys}


def wants_kl_in_reward(config: PPOTrainerConfig) -> bool:
    """Whether a coefficient of the KL in the reward was set, and nothing about whether there is any KL: older releases of verl
    had no such switch, and took the KL into the reward wherever it was not in the loss."""
    algorithm = config.algorithm
    return (
        "algorithm.kl_ctrl.kl_coef" in config.set_keys
        and algorithm.kl_ctrl.kl_coef > 0
        and "algorithm.use_kl_in_reward" not in config.set_keys
        and not algorithm.use_kl_in_reward
        and not config.actor_rollout_ref.actor.use_kl_loss
    )


def idle_notices(config: PPOTrainerConfig) -> Iterator[str]:
    """The same as sentences, one for each reason."""
    idle = idle_keys(config)
    for key in _COEFFICIENTS:
        if key in idle and value_of(config, key) == 0:
            del idle[key]
    if wants_kl_in_reward(config):
        # `burnish.config.advice` says more of it.
        idle.pop("algorithm.kl_ctrl.kl_coef", None)
    yield from idle_sentences(config, idle)


def _unused(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    loss, estimator = clip_loss(config), config.algorithm.adv_estimator
    for key, readers in READING_LOSSES.items():
        if loss not in readers and ":" not in loss:
            yield key, f"the policy loss in use is {loss}"
    for key, readers in READING_ESTIMATORS.items():
        if estimator not in readers and ":" not in estimator:
            yield key, f"the advantage estimator in use is {estimator}"
    yield from _unused_of_rollout(config)
    for model in (_ACTOR, "critic"):
        yield from unused_of_optimizer(config, f"{model}.optim")
    if config.algorithm.kl_ctrl.type != "adaptive":
        for name in ("horizon", "target_kl"):
            yield f"algorithm.kl_ctrl.{name}", shown(config, "algorithm.kl_ctrl.type")
    if config.algorithm.pf_ppo.reweight_method != "pow":
        yield "algorithm.pf_ppo.weight_pow", shown(config, "algorithm.pf_ppo.reweight_method")
    yield from _unused_of_own_parts(config)
    own_manager = _has_own_manager(config)
    for key, switch in SWITCHES.items():
        if (
            key in config.set_keys
            and not value_of(config, switch)
            and not (own_manager and key.startswith("reward.reward_kwargs."))
        ):
            yield key, shown(config, switch)
    for model in (_MODEL, "critic.model"):
        yield from _unused_of_adapters(config, model)
    yield from _unused_of_layouts(config)
    yield from _unused_of_data(config)
    yield from _unused_of_sampling(config)
    yield from _unused_of_passes(config)
    yield from unused_of_run(config)
    yield from unused_of_validation(config)
    yield from unused_of_checkpoints(config)
    yield from unused_of_dumps(config)
    yield from unused_of_profilers(config)
    yield from _unused_of_reward_pool(config)
    yield from _unused_of_sandbox(config)
    yield from unused_of_reward_services(config)
    yield from unused_of_reward_model(config)
    for section in (_ACTOR, "critic"):
        if value_of(config, f"{section}.loss_agg_mode") != "seq-mean-token-sum-norm":
            yield f"{section}.loss_scale_factor", "only loss_agg_mode=seq-mean-token-sum-norm divides by it"
        if not value_of(config, f"{section}.shuffle"):
            yield f"{section}.data_loader_seed", shown(config, f"{section}.shuffle")


def _has_own_manager(config: PPOTrainerConfig) -> bool:
    manager = config.reward.reward_manager
    return ":" in manager.name or manager.source == "importlib"


def _unused_of_own_parts(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    """Keys that parts of the user's own would read."""
    for key, part in (
        ("algorithm.custom", "algorithm.adv_estimator"),
        (f"{_ACTOR}.policy_loss.custom", f"{_ACTOR}.policy_loss.loss_mode"),
    ):
        if ":" not in value_of(config, part):
            yield key, f"{shown(config, part)} is not of your own"
    if not _has_own_manager(config):
        yield "reward.reward_kwargs.custom", f"{shown(config, 'reward.reward_manager.name')} is not of your own"
    if config.reward.custom_reward_function.path is None:
        yield "reward.custom_reward_function.name", "there is no reward.custom_reward_function.path"


def _unused_of_rollout(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    rollout = config.actor_rollout_ref.rollout
    engine = rollout.name
    if ":" in engine:
        return
    for key, readers in READING_ENGINES.items():
        if engine not in readers:
            yield key, f"the rollout engine in use is {engine}"
    elsewhere = engine == "vllm" and rollout.mode == "server"
    if elsewhere:
        for name in _OWN_ENGINE_KEYS:
            yield f"{_ROLLOUT}.{name}", f"the engine runs elsewhere ({shown(config, f'{_ROLLOUT}.mode')})"
    else:
        for key in leaves():
            if key.startswith(f"{_ROLLOUT}.server."):
                yield key, "no server is in use, which takes rollout.name=vllm and rollout.mode=server"
    if engine == "vllm" and rollout.mode == "sync":
        yield f"{_ROLLOUT}.engine_timeout", shown(config, f"{_ROLLOUT}.mode")
    if engine == "vllm" and not elsewhere:
        if rollout.scheduling_policy == "priority":
            yield f"{_ROLLOUT}.scheduling_policy", "all responses have the same priority"
        if not rollout.disable_log_stats:
            yield (
                f"{_ROLLOUT}.disable_log_stats",
                "lines of vLLM's show only with rollout.mode=sync and VLLM_LOGGING_LEVEL=INFO; perf/rollout/* has its throughput",
            )
    if rollout.enforce_eager and not elsewhere:
        yield f"{_ROLLOUT}.cudagraph_capture_sizes", shown(config, f"{_ROLLOUT}.enforce_eager")


def _unused_of_adapters(config: PPOTrainerConfig, model: str) -> Iterator[tuple[str, str]]:
    yield from unused_of_adapters(config, model)
    path, rank = f"{model}.lora_adapter_path", f"{model}.lora_rank"
    from_folder = value_of(config, path) is not None
    if model == _MODEL and (from_folder or value_of(config, rank)):
        for key in leaves():
            if key.startswith("actor_rollout_ref.ref.fsdp_config."):
                yield (
                    key,
                    f"{shown(config, path if from_folder else rank)}: the reference is the actor without its adapters",
                )


def _unused_of_sampling(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    """What responses are drawn from, where they are greedy or not sampled at all."""
    rollout = config.actor_rollout_ref.rollout
    if config.trainer.replay_rollouts is not None:
        for name in ("do_sample", "top_p", "top_k", "min_p", "repetition_penalty"):
            yield (
                f"{_ROLLOUT}.{name}",
                f"no responses are sampled to train on ({shown(config, 'trainer.replay_rollouts')})",
            )
    for section, sampling in ((_ROLLOUT, rollout), (f"{_ROLLOUT}.val_kwargs", rollout.val_kwargs)):
        if sampling.do_sample and sampling.temperature > 0:
            continue
        greedy = shown(config, f"{section}.{'temperature' if sampling.do_sample else 'do_sample'}")
        for name in ("top_p", "top_k", "min_p"):
            yield f"{section}.{name}", f"responses are greedy ({greedy})"
        if sampling.do_sample:
            yield f"{section}.do_sample", f"responses are greedy all the same ({greedy})"


def _unused_of_passes(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    """Of passes that are not made, and bounds in tokens where all micro-batches are cut by samples."""
    bounds = {f"{_ACTOR}.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"}
    bounds |= {"critic.forward_max_token_len_per_gpu"}
    bounds |= {f"{section}.log_prob_max_token_len_per_gpu" for section in (_ROLLOUT, _REF)}
    # An estimator of the user's own may read the old log-probs.
    needs_pass = needs_old_log_probs(config) or ":" in config.algorithm.adv_estimator
    in_use = {key for _, key in token_bounds_in_use(config) if needs_pass or not key.startswith(_ROLLOUT)}
    if config.reward.reward_model.enable:
        in_use.add("reward.reward_model.forward_max_token_len_per_gpu")
    for key in bounds - _with_followed(in_use, config):
        yield key, "all that it would bound is cut by samples (*_micro_batch_size_per_gpu) or not computed"
    if not (config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss):
        switches = ("algorithm.use_kl_in_reward", f"{_ACTOR}.use_kl_loss")
        reason = f"there is no reference: {' and '.join(shown(config, key) for key in switches)}"
        yield from ((key, reason) for key in leaves() if key.startswith(f"{_REF}."))
    if not needs_pass:
        bypass = "algorithm.rollout_correction.bypass_mode"
        reason = shown(config, bypass) if value_of(config, bypass) else "a step is one update, whose own log-probs do"
        for name in ("micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu"):
            yield f"{_ROLLOUT}.log_prob_{name}", f"no pass for old log-probs is made: {reason}"


def _with_followed(keys: set[str], config: PPOTrainerConfig) -> set[str]:
    """``keys`` and those that give them their values."""
    found = set()
    for start in keys:
        key: str | None = start
        while key is not None and key not in found:
            found.add(key)
            key = None if key in config.set_keys else leaves()[key].follows
    return found


def _unused_of_data(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    data, sampler = config.data, config.data.sampler
    in_order = sampler.class_path is None and not data.shuffle
    if in_order and not data.validation_shuffle and not data.dataloader_num_workers:
        yield "data.seed", f"rows come in the order of the files ({shown(config, 'data.shuffle')})"
    if data.custom_cls.path is None and sampler.class_path is None:
        yield "data.custom", "neither the dataset class nor the sampler is of your own"
    if sampler.class_path is not None:
        yield "data.sampler.name", shown(config, "data.sampler.class_path")
    elif sampler.name != "curriculum":
        yield "data.sampler.difficulty_key", "only data.sampler.name=curriculum reads it"


def _unused_of_layouts(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    for name in TRAINED_KEYS:
        yield f"{_LAYOUTS['ref']}.{name}", "a reference is not trained"
    workers = config.trainer.n_gpus_per_node
    one_worker = workers != "auto" and int(workers) * config.trainer.nnodes == 1
    own_pools = {"critic": config.critic.nnodes > 0, "reward model": has_reward_pool(config)}
    for model, layout in _LAYOUTS.items():
        if model == "reward model" and not config.reward.reward_model.enable:
            continue
        why = "one worker" if one_worker else shown(config, f"{layout}.fsdp_size")
        own_pool = own_pools.get(model, False)
        is_sharded = value_of(config, f"{layout}.fsdp_size") != 1 and (own_pool or not one_worker)
        yield from unused_of_layout(config, layout, is_sharded=is_sharded, why=why)
        if not is_sharded and model == "actor" and config.actor_rollout_ref.rollout.name in ("native", "hf"):
            # Nothing is gathered for the rollout.
            yield (
                f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
                f"each worker has a whole copy of the model ({why})",
            )


def _unused_of_reward_pool(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    """What bounds reward processes, where there are none."""
    name = config.reward.reward_manager.name
    if config.reward.num_workers == 0:
        for limit in ("timeout", "memory_limit_mb", "launch_reward_fn_async"):
            yield f"reward.{limit}", shown(config, "reward.num_workers")
    if not _has_own_manager(config) and name in ("rate_limited", "remote"):
        limits = ("timeout",) if name == "rate_limited" else ("timeout", "memory_limit_mb", "num_workers")
        for limit in limits:
            yield f"reward.{limit}", shown(config, "reward.reward_manager.name")
    if config.reward.functions:
        for name in ("name", "reward_kwargs"):
            yield f"reward.custom_reward_function.{name}", shown(config, "reward.functions")


def _unused_of_sandbox(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    """The built-in functions alone run code; a server has limits of its own."""
    for other in ("reward.custom_reward_function.path", "reward.functions", "reward.judge.url"):
        if value_of(config, other):
            for key in leaves():
                if key.startswith(("reward.sandbox.", "reward.sandbox_fusion.")):
                    yield key, f"{shown(config, other)}: only the built-in functions read it"
    if config.reward.sandbox_fusion.url:
        for name in ("memory_limit_mb", "max_processes", "disk_limit_mb", "allow_unsafe"):
            yield f"reward.sandbox.{name}", shown(config, "reward.sandbox_fusion.url")
