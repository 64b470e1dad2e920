"""Argument lists as scripts for verl have them, of several generations: keys and values, with paths made up."""

_DATA = """
data.train_files=['/data/gsm8k/train.parquet','/data/math/train.parquet']
data.val_files=['/data/gsm8k/test.parquet','/data/math/test.parquet']
data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=2048
data.filter_overlong_prompts=True data.truncation='error'
"""
_TODAY = f"""{_DATA}
actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576
actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24576
actor_rollout_ref.ref.fsdp_config.param_offload=True
trainer.balance_batch=True trainer.critic_warmup=0 trainer.logger='["console","wandb"]'
trainer.project_name=verl_grpo_gsm8k_math trainer.experiment_name=qwen3_8b
trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
"""
_KL = """
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl
"""
_OLDER = """
data.train_files=/data/gsm8k/train.parquet data.val_files=/data/gsm8k/test.parquet data.train_batch_size=1024
data.max_prompt_length=512 data.max_response_length=512
actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.6
trainer.critic_warmup=0 trainer.logger=['console','wandb'] trainer.project_name='verl_example'
trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=-1 trainer.total_epochs=15
"""
_DAPO = """
data.train_files="/data/dapo-math-17k.parquet" data.val_files="/data/aime-2024.parquet" data.prompt_key=prompt
data.truncation='left' data.max_prompt_length=2048 data.max_response_length=20480 data.gen_batch_size=1536
data.train_batch_size=512 actor_rollout_ref.rollout.n=16
algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0
actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.0
actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
actor_rollout_ref.actor.clip_ratio_c=10.0
algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc algorithm.filter_groups.max_num_gen_batches=10
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=22528 actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=22528
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=22528
actor_rollout_ref.model.path="/models/Qwen2.5-32B" +actor_rollout_ref.model.override_config.attention_dropout=0.
+actor_rollout_ref.model.override_config.embd_pdrop=0. +actor_rollout_ref.model.override_config.resid_pdrop=0.
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=10
actor_rollout_ref.actor.optim.weight_decay=0.1 actor_rollout_ref.actor.ppo_mini_batch_size=32
actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.grad_clip=1.0
actor_rollout_ref.actor.loss_agg_mode=token-mean actor_rollout_ref.actor.ulysses_sequence_parallel_size=8
actor_rollout_ref.ref.ulysses_sequence_parallel_size=8 actor_rollout_ref.actor.fsdp_config.fsdp_size=-1
actor_rollout_ref.rollout.gpu_memory_utilization=0.80 actor_rollout_ref.rollout.tensor_model_parallel_size=4
actor_rollout_ref.rollout.enable_chunked_prefill=True actor_rollout_ref.rollout.max_num_batched_tokens=22528
actor_rollout_ref.rollout.temperature=1.0 actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k="-1"
actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.top_p=0.7
actor_rollout_ref.rollout.val_kwargs.top_k=-1 actor_rollout_ref.rollout.val_kwargs.do_sample=True
actor_rollout_ref.rollout.val_kwargs.n=1 actor_rollout_ref.rollout.name=vllm
reward_model.reward_manager=dapo trainer.logger=["console","wandb"] trainer.project_name="DAPO"
trainer.n_gpus_per_node=8 trainer.nnodes="16" +trainer.val_before_train=True trainer.test_freq=5 trainer.save_freq=5
trainer.total_epochs=1 trainer.default_local_dir="/ckpts/dapo" trainer.resume_mode=auto
"""

SCRIPTS: dict[str, str] = {
    "grpo": f"{_TODAY} {_KL} algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False",
    "ppo with a critic": f"""{_TODAY} algorithm.adv_estimator=gae critic.model.path=Qwen/Qwen3-8B
        critic.model.use_remove_padding=True critic.model.enable_gradient_checkpointing=True critic.optim.lr=1e-5
        critic.use_dynamic_bsz=True critic.ppo_max_token_len_per_gpu=24576 critic.fsdp.param_offload=False
        critic.fsdp.optimizer_offload=False""",
    "cispo": f"""{_TODAY} {_KL} algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=cispo
        actor_rollout_ref.actor.clip_ratio_low=10 actor_rollout_ref.actor.clip_ratio_high=0.2""",
    "gmpo": f"""{_TODAY} {_KL} algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean
        actor_rollout_ref.actor.clip_ratio_low=0.4 actor_rollout_ref.actor.clip_ratio_high=0.4""",
    "gspo": f"""{_TODAY} algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=gspo
        actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean actor_rollout_ref.actor.clip_ratio_low=3e-4
        actor_rollout_ref.actor.clip_ratio_high=4e-4 actor_rollout_ref.actor.clip_ratio_c=10.0
        actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.use_torch_compile=False
        actor_rollout_ref.actor.fsdp_config.forward_prefetch=True actor_rollout_ref.actor.entropy_checkpointing=True
        actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=4
        actor_rollout_ref.actor.entropy_from_logits_with_chunking=True actor_rollout_ref.rollout.val_kwargs.n=1
        actor_rollout_ref.ref.strategy=fsdp2 actor_rollout_ref.ref.use_torch_compile=False
        actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size=4 trainer.val_before_train=False
        actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=4096""",
    "sapo": f"""{_TODAY} algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=sapo
        actor_rollout_ref.actor.tau_pos=1.0 actor_rollout_ref.actor.tau_neg=1.05""",
    "gpg": f"{_TODAY} algorithm.adv_estimator=gpg actor_rollout_ref.actor.policy_loss.loss_mode=gpg",
    "rloo": f"""{_TODAY} algorithm.adv_estimator=rloo algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl
        algorithm.kl_ctrl.kl_coef=0.001 actor_rollout_ref.actor.use_kl_loss=False""",
    "reinforce++": f"{_TODAY} algorithm.adv_estimator=reinforce_plus_plus algorithm.use_kl_in_reward=True",
    "optimal token baseline": f"""{_TODAY} algorithm.adv_estimator=optimal_token_baseline
        actor_rollout_ref.actor.calculate_sum_pi_squared=True""",
    "gdpo": f"""{_TODAY} algorithm.adv_estimator=gdpo +algorithm.gdpo_reward_keys='["accuracy_reward","format_reward"]'
        reward.custom_reward_function.path=/code/rlla.py reward.custom_reward_function.name=compute_score
        reward.reward_manager.name=gdpo""",
    "lora from an adapter": f"""{_TODAY} {_KL} algorithm.adv_estimator=grpo actor_rollout_ref.model.use_shm=True
        actor_rollout_ref.model.lora_adapter_path=/adapters/one actor_rollout_ref.rollout.load_format=safetensors
        actor_rollout_ref.rollout.layered_summon=True""",
    "a reward model": f"""{_TODAY} algorithm.adv_estimator=grpo data.return_raw_chat=True reward.num_workers=8
        reward.reward_model.enable=True reward.reward_model.model_path=Skywork/Skywork-Reward-Llama-3.1-8B
        reward.reward_model.rollout.name=vllm reward.reward_model.rollout.gpu_memory_utilization=0.8
        reward.reward_model.rollout.tensor_model_parallel_size=1 reward.reward_model.rollout.prompt_length=8192
        reward.reward_model.rollout.response_length=4096""",
    "a reward model, older": f"""{_OLDER} algorithm.adv_estimator=gae critic.model.path=Qwen/Qwen2-7B-Instruct
        critic.optim.lr=1e-5 critic.use_dynamic_bsz=True critic.ppo_max_token_len_per_gpu=98304
        critic.model.fsdp_config.param_offload=False actor_rollout_ref.actor.use_dynamic_bsz=True
        reward_model.enable=True reward_model.model_path=sfairXC/FsfairX-LLaMA3-RM-v0.1
        reward_model.use_reward_loop=True reward_model.inference.name=vllm reward_model.inference.gpu_memory_utilization=0.8
        reward_model.inference.tensor_model_parallel_size=1 reward_model.num_workers=8""",
    "the first grpo": f"""{_OLDER} data.val_batch_size=1312 algorithm.adv_estimator=grpo
        actor_rollout_ref.actor.ppo_micro_batch_size=128 actor_rollout_ref.actor.use_kl_loss=True
        actor_rollout_ref.actor.fsdp_config.grad_offload=False actor_rollout_ref.rollout.log_prob_micro_batch_size=128
        actor_rollout_ref.rollout.n=5 actor_rollout_ref.ref.log_prob_micro_batch_size=128
        actor_rollout_ref.ref.fsdp_config.param_offload=True algorithm.kl_ctrl.kl_coef=0.001""",
    "the first ppo with a reward model": f"""{_OLDER} data.val_batch_size=1312
        actor_rollout_ref.actor.ppo_micro_batch_size=64 actor_rollout_ref.rollout.log_prob_micro_batch_size=128
        actor_rollout_ref.ref.log_prob_micro_batch_size=128 critic.model.path=Qwen/Qwen2-7B-Instruct
        critic.ppo_micro_batch_size=64 critic.model.fsdp_config.grad_offload=False reward_model.enable=True
        reward_model.model.path=sfairXC/FsfairX-LLaMA3-RM-v0.1 reward_model.model.fsdp_config.min_num_params=0
        reward_model.micro_batch_size=16 algorithm.kl_ctrl.kl_coef=0.001 +trainer.val_before_train=False
        trainer.val_generations_to_log_to_wandb=5 trainer.default_hdfs_dir=null""",
    "a release in between": f"""{_OLDER} {_KL} algorithm.adv_estimator=grpo hydra.run.dir=/runs/x
        actor_rollout_ref.rollout.n=5 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
        actor_rollout_ref.actor.checkpoint.contents=['model','hf_model','optimizer','extra']
        actor_rollout_ref.actor.profiler.discrete=True actor_rollout_ref.rollout.use_fire_sampling=False
        actor_rollout_ref.rollout.update_weights_bucket_megabytes=512 trainer.max_actor_ckpt_to_keep=0
        +trainer.worker_nsight_options.kill=none reward_model.sandbox_fusion_url=https://sandbox/run_code
        ++actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2""",
    "lora": f"""{_OLDER} {_KL} algorithm.adv_estimator=grpo data.prompt_key=messages data.shuffle=False
        actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 actor_rollout_ref.rollout.n=5
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40
        actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40""",
    "dapo": f"""{_DAPO} actor_rollout_ref.actor.use_token_level_loss=True
        actor_rollout_ref.actor.ppo_micro_batch_size=null actor_rollout_ref.rollout.log_prob_micro_batch_size=null
        custom_reward_function.overlong_buffer.enable=True custom_reward_function.overlong_buffer.len=512
        custom_reward_function.overlong_buffer.penalty_factor=1.0""",
    "dapo with rollout correction": f"""{_DAPO} algorithm.rollout_correction.rollout_is=sequence
        algorithm.rollout_correction.rollout_is_threshold=2.0
        algorithm.rollout_correction.rollout_is_batch_normalize=true algorithm.rollout_correction.rollout_rs=seq_mean_k1
        algorithm.rollout_correction.rollout_rs_threshold=0.99_1.01 actor_rollout_ref.rollout.calculate_log_probs=True
        reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=4096
        reward_model.overlong_buffer.penalty_factor=1.0""",
}

# What asks for something that does not exist, with a word of the answer.
REFUSED = {
    "actor_rollout_ref.rollout.name=sglang": "sglang does not exist in burnish yet",
    "actor_rollout_ref.actor.strategy=megatron": "megatron does not exist in burnish yet",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4": "Megatron does not exist",
    "actor_rollout_ref.rollout.multi_turn.enable=True": "agents and tools do not exist",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path=/code/tools.yaml": "agents and tools do not exist",
    "trainer.v1.trainer_mode=separate_async": "asynchronous training does not exist",
    "distillation.enabled=True": "distillation does not exist",
    "model_engine=megatron": "Megatron, VeOmni and torchtitan do not exist",
    "actor_rollout_ref.actor.state_masking=true": "agents and tools do not exist",
    "async_training.staleness_threshold=0.1": "asynchronous training does not exist",
    "actor_rollout_ref.actor.qat.enable=True": "quantisation-aware training does not exist",
    "actor_rollout_ref.rollout.nnodes=2": "rollouts on nodes of their own do not exist",
    "actor_rollout_ref.actor.use_token_level_loss=False": "loss_agg_mode=seq-mean-token-mean",
    "actor_rollout_ref.model.lora.rank=16": "lora_rank",
    "skip.rollout.enable=True": "trainer.replay_rollouts",
}
