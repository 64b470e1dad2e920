"""The names that keys may take, known without loading what they name; tests compare them with the registries."""

ADV_ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "gdpo",
)
# These compare the samples of one prompt with each other: one sample has nothing to be compared with.
GROUP_ADV_ESTIMATORS = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "gdpo",
)
# These divide by the deviation of a group, unless algorithm.norm_adv_by_std_in_grpo says otherwise.
STD_ADV_ESTIMATORS = ("grpo", "grpo_vectorized", "grpo_passk", "gdpo")
# These read the sum of squared probabilities, which the pass for the old log-probs computes.
TOKEN_BASELINE_ADV_ESTIMATORS = ("optimal_token_baseline", "tir_optimal_token_baseline")

POLICY_LOSSES = (
    "vanilla",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "cispo",
    "dppo_tv",
    "dppo_kl",
    "dro",
    "bypass_mode",
)
# These weigh every sequence alike, whatever actor.loss_agg_mode says.
SEQUENCE_MEAN_POLICY_LOSSES = ("gspo", "sapo", "geo_mean")

# By `optim.optimizer_impl`; a test compares them with the classes. Their updates are elementwise (but for the blocks of 8-bit
# states), so sharding a parameter changes nothing.
OPTIMIZERS = {
    "torch.optim": ("AdamW", "Adam", "NAdam", "RAdam", "Adamax", "SGD", "RMSprop", "Adagrad", "Adadelta"),
    "torchao.optim": ("AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit", "Adam4bit", "AdamFp8"),
    "bitsandbytes.optim": tuple(
        f"{paged}{name}{bits}"
        for name in ("AdamW", "Adam", "Lion")
        for paged in ("", "Paged")
        for bits in ("", "8bit", "32bit")
    ),
}
OPTIMIZERS_WITHOUT_BETAS = ("SGD", "RMSprop", "Adagrad", "Adadelta")
# Of torch.optim, with the reason why they cannot train here.
IMPOSSIBLE_OPTIMIZERS = {
    "LBFGS": "it evaluates the loss several times in one step",
    "SparseAdam": "gradients are dense here",
    "Muon": "it needs whole matrices, and a rank may hold a part",
    "Adafactor": "its factored moments would depend on how a parameter is split over the ranks",
}

ROLLOUT_CORRECTION_PRESETS = (
    "decoupled_token_is",
    "decoupled_token_icepop",
    "decoupled_seq_is",
    "decoupled_seq_is_rs",
    "decoupled_geo_rs",
    "decoupled_geo_rs_token_tis",
    "decoupled_geo_rs_seq_tis",
    "decoupled_k3_rs",
    "decoupled_k3_rs_token_tis",
    "decoupled_k3_rs_seq_tis",
    "bypass_ppo_clip",
    "bypass_ppo_clip_geo_rs",
    "bypass_ppo_clip_k3_rs",
    "bypass_pg_is",
    "bypass_pg_token_icepop",
    "bypass_pg_geo_rs",
    "bypass_pg_geo_rs_token_tis",
    "bypass_pg_geo_rs_seq_tis",
)

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum")

_KL_BASES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
IMPOSSIBLE_KL_PENALTIES = {
    "full": "it needs the logits of the whole vocabulary, which are never kept: log-probs are computed in chunks. "
    "k3 (low_var_kl) estimates the same KL"
}
KL_PENALTIES = (*_KL_BASES, *(f"{base}+" for base in _KL_BASES))

ROLLOUTS = ("native", "vllm", "hf")
PLANNED_ROLLOUTS = ("sglang", "trtllm")

REWARD_MANAGERS = ("naive", "dapo", "gdpo", "prime", "batch", "rate_limited", "remote")

# Of `trainer.test_freq` and `trainer.save_freq`.
IMPOSSIBLE_FREQUENCIES = {
    "after_each_epoch": "it is a number of steps, and an epoch has as many as data.train_batch_size goes into the rows"
}

LOGGERS = ("console", "file", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")
PLANNED_LOGGERS = ("vemlp_wandb", "clearml")

PROFILERS = ("torch", "torch_memory")
IMPOSSIBLE_PROFILERS = {
    "nsys": "Nsight Systems wraps a process from outside: start `nsys profile burnish train trainer.controller=local ...`",
    "npu": "it records the NPUs of one maker, on which burnish does not run",
}
PROFILER_CONTENTS = ("cpu", "cuda", "memory", "shapes", "stack")

STRATEGIES = ("fsdp", "fsdp2")
PLANNED_STRATEGIES = ("megatron", "veomni", "torchtitan")
