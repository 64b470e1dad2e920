"""The names that keys may take, known without loading what they name; tests compare them with the registries."""

ADV_ESTIMATORS = ("gae", "grpo", "rloo", "reinforce_plus_plus")
PLANNED_ADV_ESTIMATORS = (
    "grpo_passk",
    "grpo_vectorized",
    "rloo_vectorized",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "gdpo",
)
# These compare the samples of one prompt with each other: one sample has nothing to be compared with.
GROUP_ADV_ESTIMATORS = ("grpo", "rloo")

POLICY_LOSSES = ("vanilla",)
PLANNED_POLICY_LOSSES = (
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

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum")

_KL_BASES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
# Needs the logits of the whole vocabulary, which the head never keeps.
PLANNED_KL_PENALTIES = ("full",)
KL_PENALTIES = (*_KL_BASES, *(f"{base}+" for base in _KL_BASES))

ROLLOUTS = ("native", "hf")
PLANNED_ROLLOUTS = ("vllm", "sglang", "trtllm")

REWARD_MANAGERS = ("naive",)
PLANNED_REWARD_MANAGERS = ("dapo", "batch", "prime", "rate_limited", "remote")

LOGGERS = ("console", "file", "tensorboard", "wandb")
PLANNED_LOGGERS = ("mlflow", "swanlab", "trackio", "vemlp_wandb", "clearml")

STRATEGIES = ("fsdp", "fsdp2")
PLANNED_STRATEGIES = ("megatron", "veomni", "torchtitan")
