"""`actor_rollout_ref`: the policy's model, its training, its generation and its reference."""
# ruff: noqa: RUF009  `key` and `section` declare dataclass fields.

from dataclasses import dataclass
from typing import Any

from burnish.config import names
from burnish.config.algorithm import RolloutCorrectionConfig
from burnish.config.profiler import ProfilerConfig
from burnish.config.rollout import RolloutConfig
from burnish.config.section import Section, key, not_a_key, section


@dataclass(kw_only=True, slots=True)
class FSDPOptimizerConfig(Section):
    """The optimizer and its learning-rate schedule, which is a pure function of the trainer's step."""

    optimizer: str = key("AdamW")
    """The optimizer's class in `optimizer_impl`; your own is named as `package.module:Class`."""
    optimizer_impl: str = key("torch.optim")
    """The module that has it: `torch.optim`, `torchao.optim` (AdamW8bit, AdamW4bit, AdamWFp8, ...), `bitsandbytes.optim`
    (AdamW8bit, PagedAdamW8bit, Lion8bit, ...), or a module of your own."""
    override_optimizer_config: dict[str, Any] | None = key(None)
    """More arguments of that class, as `{eps:1e-6,amsgrad:true}`."""
    lr: float = key(1e-6, ge=0)
    """Learning rate after the warm-up."""
    lr_warmup_steps: int = key(-1, ge=-1)
    """Steps of linear warm-up; -1: `lr_warmup_steps_ratio` counts."""
    lr_warmup_steps_ratio: float = key(0.0, ge=0, le=1)
    """Share of all steps that warm up, when `lr_warmup_steps` is -1."""
    total_training_steps: int = key(-1, ge=-1)
    """Steps over which the schedule runs; -1: the run's."""
    lr_scheduler_type: str = key("constant", choices=("constant", "linear", "cosine", "wsd"))
    """Shape after the warm-up: `linear` falls over all steps, `cosine` in waves, `wsd` (warm-up, stable, decay) stays and
    falls linearly at the end."""
    min_lr_ratio: float = key(0.0, ge=0, le=1)
    """linear, cosine, wsd: the lowest rate, as a share of `lr`."""
    num_cycles: float = key(0.5, gt=0)
    """cosine: number of waves; 0.5 falls once."""
    lr_decay_steps: int = key(-1, ge=-1)
    """wsd: the last steps, over which the rate falls; -1: `lr_decay_steps_ratio` counts."""
    lr_decay_steps_ratio: float = key(0.2, ge=0, le=1)
    """wsd: share of all steps over which the rate falls, when `lr_decay_steps` is -1."""
    weight_decay: float = key(0.01, ge=0)
    """Weight decay, of every trained parameter; decoupled from the gradient in AdamW."""
    betas: list[float] = key([0.9, 0.999], ge=0, lt=1)
    """Decay of the first and second moment."""
    clip_grad: float = key(1.0, gt=0)
    """Norm to which the gradient is clipped, over all parameters and ranks."""


@dataclass(kw_only=True, slots=True)
class FSDPEngineConfig(Section):
    """How one model lies on its workers."""

    fsdp_size: int = key(-1, ge=-1)
    """Workers that share one copy: -1 all of them (sharded), 1 each its own copy (replicated)."""
    dtype: str = key("auto", choices=("auto", "float32", "bfloat16", "float64"))
    """Compute type of the weights; auto: bfloat16 on a GPU, and on a CPU that multiplies bfloat16 (AVX-512 BF16, AMX) for a
    model of 4 million parameters or more, else float32. Masters and gradients are float32 (float64 with float64)."""
    reshard_after_forward: bool = key(True)
    """Sharded: free the gathered weights between forward and backward; false is faster and needs more memory."""
    forward_prefetch: bool = key(False)
    """Sharded: gather the weights of the next block while one computes, also in the forward. In the backward that is always
    so."""
    defer_gradient_sync: bool | str = key("auto", choices=("auto",))
    """Sharded: reduce gradients over the workers once per update instead of once per micro-batch. Each worker then holds
    the whole float32 gradient until the last micro-batch. auto: where that is at most a tenth of the device's memory."""
    param_offload: bool = key(False)
    """Keep what updates need of the weights on the CPU between uses: sharded weights, float32 masters, or the whole of a
    model that is only read. Weights that the rollout reads stay."""
    optimizer_offload: bool = key(False)
    """Keep the optimizer's moments on the CPU; an update fetches them piece by piece."""
    offload_policy: bool = key(False)
    """Sharded: weights, gradients and moments live on the CPU, blocks are fetched as they compute and the CPU does the
    update. The least memory and the slowest."""
    use_torch_compile: bool = key(False)
    """Compile the blocks of a model whose layers burnish has not fused itself."""
    ulysses_sequence_parallel_size: int = key(1, ge=1)
    """Workers that share the tokens of each sample, for sequences too long for one; it divides the number of workers and
    the model's attention heads. Such a group counts as one where samples are spread over workers, and its micro-batches
    hold as many times the tokens that a `*_max_token_len_per_gpu` allows each worker."""


@dataclass(kw_only=True, slots=True)
class PolicyLossConfig(Section):
    """Which policy loss."""

    loss_mode: str = key("vanilla", choices=names.POLICY_LOSSES, plug_in=True)
    """`vanilla` is PPO's clipped loss with dual clip; docs/algorithms.md has them all."""
    clip_cov_ratio: float = key(0.0002, ge=0, le=1)
    """clip_cov: share of the tokens that are left out, at random among those of high covariance."""
    clip_cov_lb: float = key(1.0)
    """clip_cov: covariance above which a token may be left out."""
    clip_cov_ub: float = key(5.0)
    """clip_cov: covariance below which a token may be left out."""
    kl_cov_ratio: float = key(0.0002, ge=0, le=1)
    """kl_cov: share of the tokens, those of the highest covariance, that get the KL term."""
    ppo_kl_coef: float = key(0.1, ge=0)
    """kl_cov: coefficient of that term."""
    dro_beta: float = key(0.1, ge=0)
    """dro: coefficient of the squared log-ratio."""
    custom: dict[str, Any] = key({})
    """Keys of your own loss (`actor_rollout_ref.actor.policy_loss.custom.tau=0.3`); it reads them as
    `config.policy_loss.custom["tau"]`."""
    rollout_correction: RolloutCorrectionConfig | None = not_a_key(lambda: None, same_as="algorithm.rollout_correction")
    """`algorithm.rollout_correction`, for the loss of the bypass mode; set from there."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig(Section):
    """What a checkpoint of one model holds."""

    save_contents: list[str] = key(["model", "optimizer", "extra"], choices=("model", "optimizer", "extra", "hf_model"))
    """What is saved: the model in Hugging Face format (or its adapters in peft's); the optimizer's state; in `extra` the states
    of all random number generators and the place in the schedule; with `hf_model` the folder `huggingface/` too, which holds a
    model with adapters as one."""
    load_contents: list[str] = key(None, follows=".save_contents", choices=("model", "optimizer", "extra", "hf_model"))
    """What is loaded on resume; all of it must be there. `hf_model` without `model` takes the weights from `huggingface/`."""
    async_save: bool = key(False)
    """Copy what is saved to CPU memory, which training waits for, and let a thread of each worker write it meanwhile. The copy
    takes as much memory as the worker's part of the checkpoint."""


@dataclass(kw_only=True, slots=True)
class FSDPActorConfig(Section):
    """Training the policy."""

    strategy: str = key("fsdp", choices=names.STRATEGIES, planned=names.PLANNED_STRATEGIES)
    """Both names mean FSDP2."""
    ppo_mini_batch_size: int = key(256, ge=1)
    """Prompts of one optimizer step; each counts with all its samples."""
    ppo_micro_batch_size_per_gpu: int | None = key(None, ge=1)
    """Samples that go through the model at once, per worker; null: `use_dynamic_bsz` becomes true."""
    use_dynamic_bsz: bool = key(False)
    """Cut micro-batches by `ppo_max_token_len_per_gpu` instead of samples. The gradient is the same however they are cut."""
    ppo_max_token_len_per_gpu: int = key(16384, ge=1)
    """Tokens that go through the model at once, per worker, where micro-batches are cut by tokens: a hard bound."""
    use_prefix_grouper: bool | None = key(None)
    """Compute the prompt of a group once for all its samples in a micro-batch, in updates and log-prob passes, the
    reference's too; the gradient is the same. null: where that saves 5 % of the tokens or more."""
    ppo_epochs: int = key(1, ge=1)
    """Passes over a batch."""
    shuffle: bool = key(False)
    """Draw the mini-batches in a new order in every pass."""
    data_loader_seed: int = key(None, follows="trainer.seed", ge=0, le=2**32 - 1)
    """Seed of that order."""
    policy_loss: PolicyLossConfig = section(PolicyLossConfig)
    """Which policy loss."""
    clip_ratio: float = key(0.2, ge=0)
    """PPO's clip range, as an offset: the ratio is clipped to [1 - 0.2, 1 + 0.2]."""
    clip_ratio_low: float = key(None, follows=".clip_ratio", ge=0)
    """Offset below 1."""
    clip_ratio_high: float = key(None, follows=".clip_ratio", ge=0)
    """Offset above 1."""
    clip_ratio_c: float = key(3.0, gt=1)
    """Dual clip (arXiv:1912.09729): the bound of the ratio where the advantage is negative."""
    tau_pos: float = key(1.0, gt=0)
    """sapo: temperature of the gate where the advantage is positive."""
    tau_neg: float = key(1.05, gt=0)
    """sapo: temperature of the gate where it is not."""
    allow_wide_clip: bool = key(False)
    """Accept clip offsets that look like bounds (0.8 and 1.2)."""
    loss_agg_mode: str = key("token-mean", choices=names.LOSS_AGG_MODES)
    """How token losses become one number; counts are of the whole optimizer step over all workers."""
    loss_scale_factor: float | None = key(None, gt=0)
    """Divisor of seq-mean-token-sum-norm; null: the longest response allowed."""
    calculate_sum_pi_squared: bool = key(False)
    """Compute the sum of squared probabilities with the old log-probs; on where the advantage estimator reads it."""
    entropy_coeff: float = key(0.0)
    """Weight of the entropy bonus."""
    use_kl_loss: bool = key(False)
    """Add the KL to the reference policy to the loss."""
    kl_loss_coef: float = key(0.001, ge=0)
    """Weight of that KL."""
    kl_loss_type: str = key("low_var_kl", choices=names.KL_PENALTIES, impossible=names.IMPOSSIBLE_KL_PENALTIES)
    """KL estimator in the loss."""
    optim: FSDPOptimizerConfig = section(FSDPOptimizerConfig)
    """Optimizer."""
    fsdp_config: FSDPEngineConfig = section(FSDPEngineConfig)
    """Layout on the workers."""
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    """Contents of checkpoints."""
    profiler: ProfilerConfig = section(ProfilerConfig)
    """Recording updates and passes for log-probs."""
    global_batch_info: dict[str, Any] = not_a_key(dict)
    """Counts of the optimizer step that is being computed (dp_size, batch_num_tokens, global_batch_size,
    loss_scale_factor); the engine sets it for each call."""


@dataclass(kw_only=True, slots=True)
class FSDPRefEngineConfig(FSDPEngineConfig):
    """How the reference lies on its workers."""

    ulysses_sequence_parallel_size: int = key(
        None, follows="actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size", ge=1
    )
    """As the actor's."""


@dataclass(kw_only=True, slots=True)
class RefConfig(Section):
    """The reference policy, which exists only when a KL needs it."""

    strategy: str = key(
        None, follows="actor_rollout_ref.actor.strategy", choices=names.STRATEGIES, planned=names.PLANNED_STRATEGIES
    )
    """Both names mean FSDP2."""
    log_prob_micro_batch_size_per_gpu: int | None = key(None, ge=1)
    """Samples of one forward pass, per worker; null: `log_prob_use_dynamic_bsz` becomes true."""
    log_prob_use_dynamic_bsz: bool = key(None, follows="actor_rollout_ref.actor.use_dynamic_bsz")
    """Cut by `log_prob_max_token_len_per_gpu` instead of samples."""
    log_prob_max_token_len_per_gpu: int = key(None, follows="actor_rollout_ref.actor.ppo_max_token_len_per_gpu", ge=1)
    """Tokens of one forward pass, per worker."""
    fsdp_config: FSDPRefEngineConfig = section(FSDPRefEngineConfig)
    """Layout on the workers."""
    profiler: ProfilerConfig = section(ProfilerConfig)
    """Recording its passes."""


@dataclass(kw_only=True, slots=True)
class HFModelConfig(Section):
    """The policy's model: a Hugging Face causal LM."""

    path: str = key(None, is_path=True)
    """Folder or hub name of the model. There is no default: a run says what it trains."""
    tokenizer_path: str = key(None, follows=".path", is_path=True)
    """Folder of the tokenizer."""
    trust_remote_code: bool = key(False)
    """Run Python code that comes with the model or its tokenizer."""
    custom_chat_template: str | None = key(None)
    """Chat template (Jinja) instead of the tokenizer's."""
    external_lib: str | None = key(None)
    """Module that is imported before the model is loaded, to register things."""
    override_config: dict[str, Any] = key({})
    """Entries of the model's own configuration to replace."""
    enable_gradient_checkpointing: bool | str = key("auto", choices=("auto",))
    """Recompute activations in the backward pass: less memory, about a third more time. auto: in as many blocks as the free
    memory asks for, often none."""
    enable_activation_offload: bool = key(False)
    """Keep the activations of the blocks on the CPU between forward and backward."""
    lora_rank: int = key(0, ge=0)
    """Rank of the adapters that are trained instead of the model (LoRA, arXiv:2106.09685); 0: the model itself is trained."""
    lora_alpha: int = key(16, ge=1)
    """What an adapter computes is multiplied by `lora_alpha / lora_rank`."""
    target_modules: list[str] = key(["all-linear"])
    """Linear layers that get an adapter: `all-linear` (all but the head), the last parts of their names (`[q_proj,v_proj]`),
    or regular expressions of whole names."""
    exclude_modules: list[str] = key([])
    """Layers that get none, likewise."""
    lora_adapter_path: str | None = key(None, is_path=True)
    """Folder of an adapter in peft's format to start from; it decides rank, alpha and layers."""
    lora_seed: int = key(None, follows="trainer.seed", ge=0, le=2**32 - 1)
    """Seed of the adapters' first values."""


@dataclass(kw_only=True, slots=True)
class ActorRolloutRefConfig(Section):
    """The policy."""

    model: HFModelConfig = section(HFModelConfig)
    """The model."""
    actor: FSDPActorConfig = section(FSDPActorConfig)
    """Training."""
    rollout: RolloutConfig = section(RolloutConfig)
    """Generation."""
    ref: RefConfig = section(RefConfig)
    """The reference policy."""
    nccl_timeout: int = key(600, ge=1)
    """Seconds after which a collective operation between workers that does not end is an error."""
