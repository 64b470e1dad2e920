"""What other trainers, and people who guess, call a setting that has its home in a section here: for did-you-mean."""

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"

# The keys of both trees; those that a tree does not have are left out there.
BARE_NAMES: dict[str, tuple[str, ...]] = {
    "model": ("actor_rollout_ref.model.path", "model.path"),
    "model_name_or_path": ("actor_rollout_ref.model.path", "model.path"),
    "dataset": ("data.train_files",),
    "dataset_name": ("data.train_files",),
    "train_dataset": ("data.train_files",),
    "eval_dataset": ("data.val_files",),
    "reward_fn": ("reward.custom_reward_function.path",),
    "reward_funcs": ("reward.custom_reward_function.path",),
    "lr": (f"{_ACTOR}.optim.lr", "optim.lr"),
    "learning_rate": (f"{_ACTOR}.optim.lr", "optim.lr"),
    "batch_size": ("data.train_batch_size",),
    "per_device_train_batch_size": ("data.train_batch_size", f"{_ACTOR}.ppo_micro_batch_size_per_gpu"),
    "gradient_accumulation_steps": (f"{_ACTOR}.ppo_mini_batch_size", "data.train_batch_size"),
    "num_generations": (f"{_ROLLOUT}.n",),
    "max_completion_length": ("data.max_response_length",),
    "max_new_tokens": ("data.max_response_length",),
    "max_seq_length": ("data.max_length",),
    "temperature": (f"{_ROLLOUT}.temperature",),
    "use_vllm": (f"{_ROLLOUT}.name",),
    "beta": (f"{_ACTOR}.kl_loss_coef",),
    "epsilon": (f"{_ACTOR}.clip_ratio",),
    "loss_type": (f"{_ACTOR}.loss_agg_mode",),
    "epochs": ("trainer.total_epochs",),
    "num_train_epochs": ("trainer.total_epochs",),
    "max_steps": ("trainer.total_training_steps",),
    "save_steps": ("trainer.save_freq",),
    "eval_steps": ("trainer.test_freq",),
    "output_dir": ("trainer.default_local_dir",),
    "report_to": ("trainer.logger",),
}
