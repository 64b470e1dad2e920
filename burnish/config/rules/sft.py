"""The rules of supervised fine-tuning: names of verl's two trainers for it, and of others', that are not in its tree.

What is said of a key of the model, the layout, the optimizer, checkpoints and the run in reinforcement learning holds here too.
"""

from collections.abc import Mapping
from typing import TypeVar

from burnish.config.rules import no_effect, refused, renamed
from burnish.config.rules.refused import Refusal

V = TypeVar("V")

# Where the sections that both trees have are in each.
_PLACES = {
    "actor_rollout_ref.actor.fsdp_config.": "engine.",
    "actor_rollout_ref.actor.optim.": "optim.",
    "actor_rollout_ref.actor.checkpoint.": "checkpoint.",
    "actor_rollout_ref.actor.profiler.": "profiler.",
    "actor_rollout_ref.model.": "model.",
    "global_profiler.": "global_profiler.",
    "trainer.": "trainer.",
    "ray_kwargs.": "ray_kwargs.",
    "hydra.": "hydra.",
}


def _moved(key: str) -> str | None:
    """The name of a key of the other tree here; None where there is no such section."""
    return next((new + key[len(old) :] for old, new in _PLACES.items() if key.startswith(old)), None)


def _shared(table: Mapping[str, V]) -> dict[str, V]:
    return {new: value for old, value in table.items() if (new := _moved(old)) is not None}


def _shared_names() -> dict[str, str]:
    names = {_moved(old): _moved(new) for old, new in renamed.RENAMED.items()}
    # Responses are shown in reinforcement learning alone.
    names.pop("trainer.val_generations_to_log_to_wandb")
    return {old: new for old, new in names.items() if old is not None and new is not None}


RENAMED = {
    # verl's older trainer.
    "model.partial_pretrain": "model.path",
    "model.fsdp_config.offload_params": "engine.param_offload",
    "model.fsdp_config.cpu_offload": "engine.offload_policy",
    "model.fsdp_config.*": "engine.*",
    "ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
    "data.multiturn.messages_key": "data.messages_key",
    "data.multiturn.tools_key": "data.tools_key",
    "data.multiturn.enable_thinking_key": "data.enable_thinking_key",
    "data.chat_template": "model.custom_chat_template",
    "data.tokenizer": "model.tokenizer_path",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "trainer.resume_path": "trainer.resume_from_path",
    # Its newer one.
    "data.balance_dp_token": "trainer.balance_batch",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    "trainer.checkpoint.*": "checkpoint.*",
    # Others'.
    "optimizer.*": "optim.*",
    "data.dataloader_num_workers": "data.num_workers",
    "data.max_seq_length": "data.max_length",
    "actor_rollout_ref.model.*": "model.*",
    "actor_rollout_ref.actor.fsdp_config.*": "engine.*",
    "actor_rollout_ref.actor.optim.*": "optim.*",
    "actor_rollout_ref.actor.checkpoint.*": "checkpoint.*",
    "actor_rollout_ref.actor.profiler.*": "profiler.*",
    "ray_init.*": "ray_kwargs.ray_init.*",
    **_shared_names(),
}

GLOBAL_MICRO_BATCHES = {"data.micro_batch_size": "data.micro_batch_size_per_gpu"}

NO_EFFECT = {
    **_shared(no_effect.NO_EFFECT),
    "use_remove_padding": "sequences are always packed, nothing is computed on padding",
    "data.pad_mode": "sequences are always packed, nothing is computed on padding",
    "data.multiturn.enable": "conversations and single answers are told apart by data.response_key",
    "data.use_shm": "files are read where they are",
    "model.strategy": "the layout is engine.fsdp_size",
    "engine.strategy": "FSDP2 is the one engine; the layout is engine.fsdp_size",
    "checkpoint.mbridge_config.*": "Megatron does not exist in burnish yet",
    "checkpoint.trust_remote_code": "model.trust_remote_code decides",
    "data.image_key": "images and videos do not exist here yet, conversations are text",
    "data.video_key": "images and videos do not exist here yet, conversations are text",
}

_DICT_KEYS = Refusal(
    harmless=(None, []),
    reason="what lies inside a column is named with a dot, as data.prompt_key=extra_info.question "
    "data.response_key=extra_info.answer",
)

# What stands in for a whole section is the engine that it is for.
_OTHER_ENGINES = Refusal(
    harmless=("fsdp", "fsdp2", None),
    reason="Megatron, VeOmni, torchtitan and AutoModel do not exist in burnish yet; FSDP2 is the one engine",
)

REFUSED: dict[str, Refusal] = {
    **_shared(refused.REFUSED),
    "engine": _OTHER_ENGINES,
    "optim": _OTHER_ENGINES,
    "data.prompt_dict_keys": _DICT_KEYS,
    "data.response_dict_keys": _DICT_KEYS,
    "data.enable_thinking_default": Refusal(
        harmless=(None, "none"),
        reason="what holds for every row is data.apply_chat_template_kwargs.enable_thinking=true or false",
    ),
    "trainer.profile_interval": Refusal(
        harmless=(None, [-1, -1]), reason="the steps that are recorded are listed, as global_profiler.steps=[2,3]"
    ),
    **{
        f"{section}.*": Refusal(
            harmless=(),
            reason="it belongs to reinforcement learning (burnish train), and this is supervised fine-tuning",
        )
        for section in (
            "algorithm",
            "critic",
            "reward",
            "reward_model",
            "reward_manager",
            "custom_reward_function",
            "actor_rollout_ref",
        )
    },
}
