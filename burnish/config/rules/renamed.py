"""Other names of keys: older ones, and those that guides use."""

from collections.abc import Mapping

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_SEQUENCE_PARALLEL = "ulysses_sequence_parallel_size"

# Tried from the top, again and again until nothing matches.
RENAMED = {
    # Sections.
    "custom_reward_function.*": "reward.custom_reward_function.*",
    "reward_manager.*": "reward.reward_manager.*",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_kwargs.*": "reward.reward_kwargs.*",
    "reward_model.sandbox_fusion.*": "reward.sandbox_fusion.*",
    "reward_model.sandbox_fusion_url": "reward.sandbox_fusion.url",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.*": "reward.reward_model.*",
    "reward.profiler.*": "reward.reward_model.profiler.*",
    "trainer.profile_steps": "global_profiler.steps",
    **{
        f"{profiler}.discrete": f"{profiler}.tool_config.torch.discrete"
        for profiler in (
            f"{_ACTOR}.profiler",
            "actor_rollout_ref.ref.profiler",
            f"{_ROLLOUT}.profiler",
            "critic.profiler",
            "reward.reward_model.profiler",
        )
    },
    "reward.custom_reward_function.overlong_buffer.*": "reward.reward_kwargs.overlong_buffer_cfg.*",
    "reward.reward_model.overlong_buffer.*": "reward.reward_kwargs.overlong_buffer_cfg.*",
    "reward.reward_model.inference.*": "reward.reward_model.rollout.*",
    **{
        f"reward.reward_model.{name}": f"reward.rate_limit.{name}"
        for name in ("max_concurrent", "max_rpm", "max_tpm", "estimated_tokens_per_request", "timeout")
    },
    "reward.reward_model.reward_loop_source": "reward.reward_manager.source",
    "reward.reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
    "reward.reward_model.reward_loop_class_name": "reward.reward_manager.name",
    "reward.reward_model.launch_reward_fn_async": "reward.launch_reward_fn_async",
    "reward.reward_model.model.path": "reward.reward_model.model_path",
    f"reward.reward_model.{_SEQUENCE_PARALLEL}": f"reward.reward_model.model.fsdp_config.{_SEQUENCE_PARALLEL}",
    "ray_init.*": "ray_kwargs.ray_init.*",
    "critic.fsdp.*": "critic.model.fsdp_config.*",
    "critic.fsdp_config.*": "critic.model.fsdp_config.*",
    f"{_ACTOR}.fsdp.*": f"{_ACTOR}.fsdp_config.*",
    "actor_rollout_ref.ref.fsdp.*": "actor_rollout_ref.ref.fsdp_config.*",
    # Sequence parallelism.
    **{
        f"{model}.{_SEQUENCE_PARALLEL}": f"{fsdp}.{_SEQUENCE_PARALLEL}"
        for model, fsdp in (
            (_ACTOR, f"{_ACTOR}.fsdp_config"),
            ("actor_rollout_ref.ref", "actor_rollout_ref.ref.fsdp_config"),
            ("critic", "critic.model.fsdp_config"),
        )
    },
    **{
        f"{fsdp}.use_no_sync_for_gradient_accumulation": f"{fsdp}.defer_gradient_sync"
        for fsdp in (f"{_ACTOR}.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.model.fsdp_config")
    },
    "sandbox_fusion.*": "reward.sandbox_fusion.*",
    # Gradient clipping.
    "max_grad_norm": f"{_ACTOR}.optim.clip_grad",
    "trainer.max_grad_norm": f"{_ACTOR}.optim.clip_grad",
    f"{_ACTOR}.grad_clip": f"{_ACTOR}.optim.clip_grad",
    f"{_ACTOR}.max_grad_norm": f"{_ACTOR}.optim.clip_grad",
    "critic.grad_clip": "critic.optim.clip_grad",
    "critic.max_grad_norm": "critic.optim.clip_grad",
    **{
        f"{model}.optim.{old}": f"{model}.optim.{new}"
        for model in (_ACTOR, "critic")
        for old, new in (
            ("grad_clip", "clip_grad"),
            ("max_grad_norm", "clip_grad"),
            ("warmup_steps", "lr_warmup_steps"),
            ("warmup_steps_ratio", "lr_warmup_steps_ratio"),
            ("warmup_style", "lr_scheduler_type"),
        )
    },
    # Single keys.
    f"{_ACTOR}.rollout_n": f"{_ROLLOUT}.n",
    "actor_rollout_ref.ref.rollout_n": f"{_ROLLOUT}.n",
    "critic.rollout_n": f"{_ROLLOUT}.n",
    f"{_ACTOR}.checkpoint.contents": f"{_ACTOR}.checkpoint.save_contents",
    "critic.checkpoint.contents": "critic.checkpoint.save_contents",
    f"{_ROLLOUT}.max_new_tokens": f"{_ROLLOUT}.response_length",
    f"{_ROLLOUT}.update_weights_bucket_megabytes": f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
    f"{_ACTOR}.use_torch_compile": f"{_ACTOR}.fsdp_config.use_torch_compile",
    "actor_rollout_ref.ref.use_torch_compile": "actor_rollout_ref.ref.fsdp_config.use_torch_compile",
    f"{_ACTOR}.ppo_infer_micro_batch_size_per_gpu": f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    f"{_ACTOR}.ppo_infer_max_token_len_per_gpu": f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
    "data.tokenizer": "actor_rollout_ref.model.tokenizer_path",
    "algorithm.rollout_correction.bypass_old_logprob_for_rollout": "algorithm.rollout_correction.bypass_mode",
    "trainer.val_freq": "trainer.test_freq",
    "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
    "trainer.micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
}

# Keys that files for verl have at null, which stands for the default here.
ONCE_NULL = frozenset(
    (f"{_ACTOR}.optim.min_lr_ratio", "critic.optim.min_lr_ratio", f"{_ACTOR}.policy_loss.dro_beta"),
)

# Counted over all workers in older scripts; here they count for each worker.
GLOBAL_MICRO_BATCHES = {
    f"{_ACTOR}.ppo_micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.log_prob_micro_batch_size": f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size": "critic.forward_micro_batch_size_per_gpu",
    "reward.reward_model.micro_batch_size": "reward.reward_model.micro_batch_size_per_gpu",
}


def rename(key: str, table: Mapping[str, str] = RENAMED) -> str:
    """The name that ``key`` has in the tree (its own, where it has no other)."""
    for old, new in table.items():
        if key == old:
            return rename(new, table)
        if old.endswith(".*") and (key.startswith(old[:-1]) or key == old[:-2]):
            return rename(new[:-2] + key[len(old) - 2 :], table)
    return key
