"""Keys that ask for what does not exist: refused, unless they are set to the value that asks for nothing."""

from dataclasses import dataclass
from typing import Any

_MODEL = "actor_rollout_ref.model"
_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_FSDP = (f"{_ACTOR}.fsdp_config", f"{_REF}.fsdp_config", "critic.model.fsdp_config")


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why a key is refused.

    Attributes:
        harmless: the values that ask for nothing; they are accepted.
        reason: a clause that ends the sentence "... is refused: ".
    """

    harmless: tuple[Any, ...]
    reason: str

    def allows(self, value: Any) -> bool:
        """Whether ``value`` asks for nothing; "False" in quotes is false, "none" is null."""
        return _plain(value) in [_plain(harmless) for harmless in self.harmless]

    def nearest(self, value: Any) -> Any:
        """The harmless value of the kind of ``value``, if there is one."""
        same_kind = [harmless for harmless in self.harmless if type(harmless) is type(value)]
        return (same_kind or list(self.harmless))[0]


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        word = value.lower()
        return {"false": False, "true": True, "none": None, "null": None}.get(word, word)
    return value


def _yet(what: str, *harmless: Any) -> Refusal:
    return Refusal(harmless=harmless or (None, False), reason=f"{what} not exist in burnish yet")


_TOOLS = _yet("agents and tools do")
_MULTI_TURN = _yet("agents and tools do", False)
_MTP = _yet("multi-token prediction does", False)
_QAT = _yet("quantisation-aware training does")
_LORA = Refusal(
    harmless=(0, None, False),
    reason="LoRA is set by model.lora_rank, lora_alpha, target_modules, exclude_modules and lora_adapter_path",
)
_REPLAY = Refusal(
    harmless=(False, None),
    reason="responses are replayed from a folder that a run has written with trainer.rollout_data_dir: "
    "trainer.replay_rollouts=<that folder>",
)

_CORRECTION = "algorithm.rollout_correction"
_IS_PER_TOKEN = (
    f"importance weights are {_CORRECTION}.rollout_is=token (or sequence) with {_CORRECTION}.rollout_is_threshold=2.0"
)
_VETO = Refusal(
    harmless=(None,), reason=f"rows are rejected by {_CORRECTION}.rollout_rs, as seq_max_k1 with rollout_rs_threshold"
)

REFUSED: dict[str, Refusal] = {
    # Where the others come from.
    "hydra.searchpath": Refusal(harmless=(None, []), reason="a folder of YAML files is named by --config-path"),
    "model_engine": Refusal(
        harmless=("dp", "fsdp", "fsdp2", None),
        reason="Megatron, VeOmni and torchtitan do not exist in burnish yet; FSDP2 is the one engine",
    ),
    # Model.
    "actor_rollout_ref.hybrid_engine": Refusal(
        harmless=(True, None), reason="the policy is trained and generates in the same workers"
    ),
    **{
        f"{model}.hf_config_path": Refusal(
            harmless=(None,), reason="a model's configuration lies beside it; model.override_config replaces entries"
        )
        for model in (_MODEL, "critic.model")
    },
    **{
        f"{model}.override_config.{name}": Refusal(harmless=(None,), reason="the precision is fsdp_config.dtype")
        for model in (_MODEL, "critic.model")
        for name in ("torch_dtype", "dtype")
    },
    **{f"{model}.lora.{name}": _LORA for model in (_MODEL, "critic.model") for name in ("rank", "adapter_path")},
    **{
        f"{model}.mtp.{name}": _MTP
        for model in (_MODEL, "critic.model")
        for name in ("enable", "enable_train", "enable_rollout")
    },
    # Actor, reference, critic.
    **{
        f"{fsdp}.full_determinism": Refusal(
            harmless=(False, None),
            reason="runs on a CPU are deterministic without it, and for a GPU it does not exist yet",
        )
        for fsdp in _FSDP
    },
    f"{_ACTOR}.use_token_level_loss": Refusal(
        harmless=(True, None),
        reason="the mean over responses of their means over tokens is loss_agg_mode=seq-mean-token-mean",
    ),
    f"{_ACTOR}.use_rollout_log_probs": Refusal(
        harmless=(False, None), reason="algorithm.rollout_correction.bypass_mode=true takes the rollout's log-probs"
    ),
    f"{_ACTOR}.qat.enable": _QAT,
    **{f"{fsdp}.qat.enable": _QAT for fsdp in _FSDP},
    f"{_ACTOR}.micro_batch": Refusal(
        harmless=(None,),
        reason="finding the micro-batch from the memory does not exist yet; set ppo_micro_batch_size_per_gpu",
    ),
    f"{_REF}.model": _yet("a reference of another model does"),
    f"{_REF}.model.path": _yet("a reference of another model does"),
    **{f"{model}.router_replay.mode": _yet("router replay does", "disabled", None) for model in (_ACTOR, _REF)},
    f"{_ACTOR}.megatron.*": _yet("Megatron does"),
    f"{_REF}.megatron.*": _yet("Megatron does"),
    "critic.megatron.*": _yet("Megatron does"),
    # Corrections of the rollout, as they were called before.
    f"{_ACTOR}.tis_imp_ratio_cap": Refusal(harmless=(-1, 0, None), reason=_IS_PER_TOKEN),
    "algorithm.rollout_is": Refusal(harmless=(False, None), reason=_IS_PER_TOKEN),
    **{
        f"algorithm.{name}": Refusal(harmless=(None,), reason=_IS_PER_TOKEN)
        for name in ("rollout_is_threshold", "rollout_is_threshold_lower", "rollout_is_level", "rollout_is_mode")
    },
    "algorithm.rollout_is_veto_threshold": _VETO,
    f"{_CORRECTION}.rollout_token_veto_threshold": _VETO,
    f"{_CORRECTION}.rollout_rs_threshold_lower": Refusal(
        harmless=(None,), reason="one key holds both bounds: rollout_rs_threshold=0.5_2.0"
    ),
    **{
        f"{_CORRECTION}.{name}": Refusal(
            harmless=(False, None), reason="the policy gradient itself is bypass_mode=true with loss_type=reinforce"
        )
        for name in ("use_pure_rollout_correction", "use_policy_gradient")
    },
    # Rollout.
    f"{_ROLLOUT}.logprobs_mode": Refusal(
        harmless=("processed_logprobs", None), reason="log-probs are always those of softmax(logits / temperature)"
    ),
    f"{_ROLLOUT}.pipeline_model_parallel_size": _yet("pipeline-parallel rollouts do", 1, None),
    f"{_ROLLOUT}.expert_parallel_size": Refusal(
        harmless=(1, None),
        reason="vLLM spreads experts over all workers of an engine: rollout.engine_kwargs.vllm.enable_expert_parallel=true",
    ),
    f"{_ROLLOUT}.over_sample_rate": _yet("over-sampling does", 0, None),
    f"{_ROLLOUT}.use_fire_sampling": _yet("a first token sampled at another temperature does", False, None),
    f"{_ROLLOUT}.skip_rollout": _REPLAY,
    **{f"skip.{name}.enable": _REPLAY for name in ("rollout", "rollout_tq", "async_rollout")},
    f"{_ROLLOUT}.nnodes": _yet("rollouts on nodes of their own do", 0, None),
    f"{_ROLLOUT}.full_determinism": Refusal(
        harmless=(False, None), reason="a response is drawn from the seed, its prompt and its number, whatever is set"
    ),
    f"{_ROLLOUT}.disaggregation.enabled": _yet("prefill and decoding on different workers do"),
    f"{_ROLLOUT}.multi_turn.function_tool_path": _TOOLS,
    f"{_ROLLOUT}.enable_rollout_routing_replay": _yet("router replay does"),
    f"{_ROLLOUT}.quantization": _yet("quantised rollouts do"),
    f"{_ROLLOUT}.mtp": _yet("multi-token prediction does"),
    f"{_ROLLOUT}.custom": _yet("custom rollout settings do", None, {}),
    f"{_ROLLOUT}.multi_turn.enable": _MULTI_TURN,
    f"{_ROLLOUT}.multi_turn.tool_config_path": _TOOLS,
    f"{_ROLLOUT}.multi_turn.interaction_config_path": _TOOLS,
    f"{_ROLLOUT}.multi_turn.num_repeat_rollouts": _TOOLS,
    f"{_ROLLOUT}.multi_turn.completion_callback": _TOOLS,
    # As an older agent, whose turns search, calls them.
    f"{_ROLLOUT}.n_agent": _yet("agents and tools do", 1, None),
    f"{_ACTOR}.state_masking": _MULTI_TURN,
    "data.max_start_length": _TOOLS,
    "data.max_obs_length": _TOOLS,
    "do_search": _MULTI_TURN,
    "max_turns": _yet("agents and tools do", 1, None),
    "retriever.*": _TOOLS,
    f"{_ROLLOUT}.agent.default_agent_loop": _yet("agents and tools do", "single_turn_agent", None),
    f"{_ROLLOUT}.agent.agent_loop_config_path": _TOOLS,
    f"{_ROLLOUT}.agent.agent_loop_manager_class": _TOOLS,
    f"{_ROLLOUT}.agent.custom_async_server.path": _TOOLS,
    f"{_ROLLOUT}.agent.custom_async_server.name": _TOOLS,
    f"{_ROLLOUT}.trace.backend": _yet("tracing does"),
    f"{_ROLLOUT}.prometheus.enable": _yet("a metrics server does"),
    # Data.
    "data.need_tools_kwargs": _TOOLS,
    "data.function_tool_path": _TOOLS,
    "data.chat_template_func": Refusal(
        harmless=(None,), reason="a chat template is given by actor_rollout_ref.model.custom_chat_template"
    ),
    "data.filter_prompts": Refusal(
        harmless=(None, True, False), reason="over-long prompts are filtered by data.filter_overlong_prompts"
    ),
    "data.datagen.path": _yet("generating data in the run does"),
    "data.datagen.name": _yet("generating data in the run does"),
    # Rewards.
    "reward.reward_model.rollout.name": Refusal(
        harmless=(None, "hf", "vllm", "sglang", "???"),
        reason="a reward model is a sequence classifier, computed by its own workers. A generative one is a judge behind a "
        "server: reward.judge.url and reward.judge.model",
    ),
    "reward.reward_model.model.fsdp_config.full_determinism": Refusal(
        harmless=(False, None), reason="for a GPU it does not exist yet, and runs on a CPU are deterministic without it"
    ),
    # Trainer.
    "trainer.remove_previous_ckpt_in_save": Refusal(
        harmless=(False, None), reason="trainer.max_actor_ckpt_to_keep=1 keeps the newest checkpoint only"
    ),
    "trainer.wandb_proxy": Refusal(harmless=(None,), reason="a proxy is set by the environment variable HTTPS_PROXY"),
    "ray_kwargs.timeline_json_file": _yet("writing Ray's timeline does"),
    "trainer.checkpoint_callback_class": _yet("callbacks of checkpoints do"),
    "trainer.v1.trainer_mode": Refusal(
        harmless=("sync", None), reason="asynchronous training does not exist in burnish yet"
    ),
    **{
        name: Refusal(harmless=(None,), reason="asynchronous training does not exist in burnish yet")
        for name in ("async_training.*", "rollout.nnodes", "rollout.n_gpus_per_node", "rollout.total_rollout_steps")
    },
    "trainer.v1.sampler.custom_sampler.path": Refusal(
        harmless=(None,), reason="a sampler of prompts is named by data.sampler.class_path"
    ),
    "trainer.v1.sampler.custom_sampler.name": Refusal(
        harmless=(None,), reason="a sampler of prompts is named by data.sampler.class_name"
    ),
    **{
        f"{profiler}.finish_hook_cmd": _yet("commands after a trace do")
        for profiler in (f"{_ACTOR}.profiler", f"{_REF}.profiler", f"{_ROLLOUT}.profiler", "critic.profiler")
    },
    "global_profiler.finish_hook_cmd": _yet("commands after a trace do"),
    "distillation.enabled": _yet("distillation does"),
    "transfer_queue.enable": _yet("a transfer queue does"),
    "transfer_queue.metrics.enabled": _yet("a transfer queue does"),
}
