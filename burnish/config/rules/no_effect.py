"""Keys that are accepted and have no effect here, with the reason that the user is told."""

_MODEL = "actor_rollout_ref.model"
_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_FSDP = (f"{_ACTOR}.fsdp_config", f"{_REF}.fsdp_config", "critic.model.fsdp_config")

_PACKED = "sequences are always packed, nothing is computed on padding"
_FUSED = "log-probs and entropy are always computed in chunks, without the logits of a whole batch"
_MEMORY = "it saves memory only, and does not exist yet"
_FSDP2 = "FSDP2 has no such setting"
_FP32 = "masters, gradients and reductions are always float32; `dtype` sets the compute type"
_ONE_SEED = "trainer.seed decides everything random"
_PARENT = "the model it belongs to sets it"
_MULTIMODAL = "images and videos do not exist here yet, prompts are text"
_DATA = "prompts are always kept as messages and as ids"
_NSIGHT = "Nsight Systems and NPUs are not among the profilers (global_profiler.tool)"
_PROFILERS = (
    f"{_ACTOR}.profiler",
    f"{_REF}.profiler",
    f"{_ROLLOUT}.profiler",
    "critic.profiler",
    "reward.reward_model.profiler",
)
_AGENT = "it belongs to agents and tools, which do not exist yet"
_ENGINE_REWARDS = (
    "a reward model is a sequence classifier, computed by its own workers and not by a rollout engine; a generative one is a "
    "judge behind a server (reward.judge.url)"
)
_QUANTISED_TRAINING = "it belongs to quantisation-aware training, which does not exist yet"
_ASYNC = "it belongs to asynchronous training, which does not exist yet"
_MTP = "it belongs to multi-token prediction, which does not exist yet"
_TRACES = "traces stay in the folder global_profiler.save_path, and nothing is run after them"
_ALL_PROFILERS = (*_PROFILERS, "global_profiler")


def _table(*groups: tuple[str, tuple[str, ...] | str, str]) -> dict[str, str]:
    """(reason, sections, names) groups as one mapping from key to reason."""
    table = {}
    for reason, prefixes, names in groups:
        for prefix in (prefixes,) if isinstance(prefixes, str) else prefixes:
            table.update({f"{prefix}.{name}".lstrip("."): reason for name in names.split()})
    return table


NO_EFFECT = _table(
    # Model and training engine.
    (_PACKED, (_MODEL, _ACTOR, "critic.model", "reward.reward_model.model"), "use_remove_padding"),
    (_FUSED, (_MODEL, _ACTOR, "reward.reward_model.model"), "use_fused_kernels"),
    (_FUSED, _MODEL, "fused_kernel_options.* use_liger"),
    (
        _FUSED,
        (_ACTOR, _REF, *_FSDP),
        "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing",
    ),
    (_FUSED, "critic.model", "use_liger use_fused_kernels fused_kernel_options.*"),
    (_PACKED, (_ACTOR, _REF, *_FSDP), "pad_to_length pad_to_length_bucket"),
    (_QUANTISED_TRAINING, (_ACTOR, *_FSDP), "qat.*"),
    ("FSDP2 is the engine", _FSDP, "turbo_config.*"),
    (
        "LoRA is set by model.lora_rank, lora_alpha, target_modules, exclude_modules and lora_adapter_path",
        (_MODEL, "critic.model"),
        "lora.*",
    ),
    (
        "the learning rate is that of the step's number, counted from 1",
        (f"{_ACTOR}.optim", "critic.optim"),
        "zero_indexed_step",
    ),
    ("a checkpoint that lacks something is an error", (f"{_ACTOR}.checkpoint", "critic.checkpoint"), "strict"),
    (
        "Megatron does not exist in burnish yet",
        (f"{_ACTOR}.checkpoint", "critic.checkpoint"),
        "mbridge_config mbridge_config.*",
    ),
    ("a critic has no chat template of its own", "critic.model", "custom_chat_template"),
    (
        "attention is computed by burnish itself",
        (_MODEL, "critic.model", "reward.reward_model.model"),
        "override_config.attn_implementation override_config._attn_implementation",
    ),
    (_FUSED, _ACTOR, "sum_pi_squared_checkpointing"),
    (_MEMORY, (_MODEL, "critic.model"), "tiled_mlp.*"),
    (_MEMORY, _REF, "tiled_mlp.*"),
    (_FSDP2, _FSDP, "use_orig_params wrap_policy.*"),
    (_FP32, _FSDP, "model_dtype mixed_precision mixed_precision.*"),
    (_ONE_SEED, _FSDP, "seed"),
    ("gradients do not outlast an update", _FSDP, "grad_offload"),
    (_PARENT, _FSDP, "strategy forward_only"),
    ("files are read where they are", (_MODEL, "critic.model", "data"), "use_shm"),
    ("text models have no vision tower", _ACTOR, "freeze_vision_tower"),
    ("log-probs are cut by rollout.log_prob_use_dynamic_bsz", _ACTOR, "ppo_infer_use_dynamic_bsz"),
    ("the entropy is always reported", _ACTOR, "calculate_entropy"),
    # Rollout.
    (
        "no engine in use needs it",
        _ROLLOUT,
        "sglang_engine_mode layer_name_map engine_kwargs.trtllm engine_kwargs.trtllm.*",
    ),
    ("weights are always gathered in buckets", _ROLLOUT, "layered_summon"),
    ("rollout.free_cache_engine decides whether an engine sleeps", _ROLLOUT, "enable_sleep_mode"),
    ("weights are always woken first, then the cache", _ROLLOUT, "multi_stage_wake_up"),
    ("engines take and give token ids", _ROLLOUT, "skip_tokenizer_init"),
    (
        "how weights travel follows from where the engine is",
        _ROLLOUT,
        "checkpoint_engine.backend checkpoint_engine.engine_kwargs checkpoint_engine.engine_kwargs.* "
        "checkpoint_engine.custom_backend_module",
    ),
    ("quantised rollouts do not exist yet", _ROLLOUT, "quantization_config_file"),
    ("trainer.replay_rollouts names the folder of responses that are replayed", _ROLLOUT, "skip_dump_dir"),
    (_MULTIMODAL, _ROLLOUT, "limit_images engine_kwargs.vllm.disable_mm_preprocessor_cache"),
    ("the log-probs of sampled tokens are always kept", _ROLLOUT, "calculate_log_probs"),
    (
        _AGENT,
        _ROLLOUT,
        "multi_turn.max_assistant_turns multi_turn.max_user_turns multi_turn.max_parallel_calls "
        "multi_turn.max_tool_response_length multi_turn.tool_response_truncate_side "
        "multi_turn.use_inference_chat_template multi_turn.tokenization_sanity_check_mode multi_turn.format "
        "agent.num_workers agent.max_concurrent_requests",
    ),
    (
        "tracing does not exist yet",
        _ROLLOUT,
        "trace.token2text trace.max_samples_per_step_per_worker trace.project_name trace.experiment_name",
    ),
    ("rollout.nnodes=0: the rollout is on the workers of the policy", _ROLLOUT, "n_gpus_per_node"),
    ("no part of a rollout is routed over HTTP", _ROLLOUT, "router_config_path"),
    ("it is measured in no engine", _ROLLOUT, "moe_load_balance_metrics_interval"),
    (
        "it belongs to prefill and decoding on different workers, which does not exist yet",
        _ROLLOUT,
        "disaggregation.*",
    ),
    (_QUANTISED_TRAINING, _ROLLOUT, "qat qat.*"),
    ("a metrics server does not exist yet", _ROLLOUT, "prometheus.port prometheus.file prometheus.served_model_name"),
    (
        _MTP,
        (f"{_MODEL}.mtp", "critic.model.mtp"),
        "detach_encoder mtp_loss_scaling_factor speculative_algorithm speculative_num_steps speculative_eagle_topk "
        "speculative_num_draft_tokens method num_speculative_tokens",
    ),
    ("it belongs to router replay, which does not exist yet", (_ACTOR, _REF), "router_replay.record_file"),
    ("it belongs to router replay, which does not exist yet", (_ACTOR, _REF), "router_replay.replay_file"),
    # Data.
    (_MULTIMODAL, "data", "image_key video_key audio_key image_patch_size return_multi_modal_inputs"),
    (_MULTIMODAL, "data", "mm_processor_kwargs mm_processor_kwargs.*"),
    (_DATA, "data", "return_raw_chat return_raw_input_ids return_full_prompt"),
    ("actor_rollout_ref.model.trust_remote_code decides", "data", "trust_remote_code"),
    (
        "a generation batch of dynamic sampling has data.train_batch_size prompts, and so have those that "
        "algorithm.filter_groups.max_num_gen_batches counts",
        "data",
        "gen_batch_size",
    ),
    # Rewards.
    ("a manager's class is named by reward.reward_manager.name", "reward.reward_manager", "module.name"),
    ("rewards are computed by the reward manager", "reward.reward_model", "use_reward_loop"),
    (_ENGINE_REWARDS, "reward.reward_model", "rollout.*"),
    ("files are read where they are", "reward.reward_model.model", "use_shm"),
    (_FSDP2, "reward.reward_model.model.fsdp_config", "use_orig_params wrap_policy.* min_num_params"),
    (_FP32, "reward.reward_model.model.fsdp_config", "model_dtype mixed_precision mixed_precision.*"),
    (_ONE_SEED, "reward.reward_model.model.fsdp_config", "seed"),
    (_PARENT, "reward.reward_model.model.fsdp_config", "strategy forward_only"),
    # Algorithm and trainer.
    ("batches of prompts are answered one after the other", "algorithm", "filter_groups.max_inflight_gen_batches"),
    ("it belongs to distillation, which does not exist yet", "distillation", "*"),
    ("it belongs to a transfer queue, which does not exist yet", "transfer_queue", "*"),
    (_ASYNC, "trainer.v1", "sync sync.* colocate_async.* separate_async.* sampler.*"),
    ("there is one trainer", "trainer", "use_v1"),
    (
        "trainer.rollout_data_dir writes responses, and trainer.replay_rollouts names a folder of them",
        ("skip.rollout", "skip.rollout_tq", "skip.async_rollout"),
        "dump_dir steps action",
    ),
    ("metrics of every step are logged", "trainer", "logging_freq"),
    ("it follows from the mini-batch and the micro-batch size", "trainer", "gradient_accumulation_steps"),
    ("there is one worker implementation", "trainer", "use_legacy_worker_impl"),
    ("workers find each other without a register", "trainer", "ray_wait_register_center_timeout"),
    ("Hydra writes nothing here: a run's files are in trainer.default_local_dir", "hydra", "*"),
    (_NSIGHT, _PROFILERS, "tool_config.nsys.* tool_config.npu.*"),
    (_NSIGHT, "global_profiler", "global_tool_config.nsys.* global_tool_config.npu.*"),
    (_NSIGHT, "trainer", "controller_nsight_options.* worker_nsight_options.* npu_profile.*"),
    (
        "each role has a profiler of its own, as actor_rollout_ref.actor.profiler",
        "actor_rollout_ref",
        "profiler.*",
    ),
    (_NSIGHT, _PROFILERS, "tool_config.precision_debugger.*"),
    (_NSIGHT, "global_profiler", "global_tool_config.precision_debugger.*"),
    (_TRACES, _ALL_PROFILERS, "relocate_results finish_hook_all_ranks finish_hook_ranks"),
    (
        "a snapshot of the memory is written for each recorded step",
        _PROFILERS,
        "tool_config.torch_memory.memory_snapshot_num_steps",
    ),
    (
        "a snapshot of the memory is written for each recorded step",
        "global_profiler",
        "global_tool_config.torch_memory.memory_snapshot_num_steps",
    ),
    ("torch keeps whole stacks", _PROFILERS, "tool_config.torch_memory.stack_depth tool_config.torch_memory.kw_args.*"),
    (
        "torch keeps whole stacks",
        "global_profiler",
        "global_tool_config.torch_memory.stack_depth global_tool_config.torch_memory.kw_args "
        "global_tool_config.torch_memory.kw_args.*",
    ),
    (
        "global_profiler.steps says which steps are recorded",
        _PROFILERS,
        "tool_config.torch.step_start tool_config.torch.step_end tool_config.torch.schedule.* "
        "tool_config.torch.profile_token_start tool_config.torch.profile_token_end",
    ),
)
