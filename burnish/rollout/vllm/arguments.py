"""From ``actor_rollout_ref`` to vLLM's engine arguments and environment, and what can be checked before an engine starts."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig

from burnish.config import RolloutConfig
from burnish.rollout.base import max_sequence_length
from burnish.rollout.vllm.installed import engine_argument_names
from burnish.rollout.vllm.placement import place
from burnish.utils import env
from burnish.utils.errors import ConfigError

EXTENSION = "burnish.rollout.vllm.extension.WorkerExtension"
SCHEDULER = "burnish.rollout.vllm.scheduler.UpdatableScheduler"
_ROLLOUT = "actor_rollout_ref.rollout"
# vLLM takes only these ranks as the largest of an adapter.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# The block of a CPU's cache; on a GPU vLLM chooses and is told a share of the memory instead.
_CPU_BLOCK = 128
# What the engine must be for burnish to draw its tokens and fill its weights, and the key or reason that stands for it.
_RESERVED = {
    "model": "it is actor_rollout_ref.model.path",
    "dtype": f"it is {_ROLLOUT}.dtype",
    "enable_sleep_mode": f"it is {_ROLLOUT}.free_cache_engine",
    "worker_cls": "burnish's own worker extension sits on vLLM's worker",
    "worker_extension_cls": "burnish's own draws the tokens and takes the weights",
    "tensor_parallel_size": f"it is {_ROLLOUT}.tensor_model_parallel_size",
    "data_parallel_size": f"it is {_ROLLOUT}.data_parallel_size",
    "max_model_len": f"it is {_ROLLOUT}.max_model_len, by which requests are checked too",
    "distributed_executor_backend": f"it follows from {_ROLLOUT}.mode",
    "pipeline_parallel_size": "burnish fills and checks engines that hold every layer",
    "speculative_config": "drafted tokens are not drawn from their own random numbers, as a response's must be",
    "logits_processors": "they would change the distribution that log-probs are reported of",
    "generation_config": "sampling follows the keys of the rollout, not the model's folder",
    "override_generation_config": "sampling follows the keys of the rollout",
}

# vLLM has given it up, scripts still set it, and the configuration says that it has no effect.
_WITHOUT_EFFECT = ("disable_mm_preprocessor_cache",)


@dataclass(frozen=True, kw_only=True)
class VLLMModel:
    """What vLLM must know of the policy's model."""

    path: str
    """Folder or hub name."""
    config: PreTrainedConfig
    """The Hugging Face configuration, with overrides in place."""
    dtype: torch.dtype
    """Of the engine's weights."""
    trust_remote_code: bool = False
    override_config: Mapping[str, Any] = field(default_factory=dict)
    """What differs in ``config`` from the folder's."""
    lora_rank: int = 0
    """The largest rank of the policy's adapters; 0: it has none."""


def engine_environment(*, in_process: bool, on_cpu: bool = False) -> dict[str, str]:
    """Environment variables that vLLM must find; what the user has set stays, except for what burnish builds on.

    Args:
        in_process: the engine runs in this process.
        on_cpu: the engine computes on a CPU, where vLLM warns of what nobody can change at each start.
    """
    variables = {
        # burnish's sampler and weights sit on this one; the newer one is another class.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
    }
    calm = {
        "VLLM_LOGGING_LEVEL": "ERROR" if on_cpu else "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        # Collective calls name methods and carry tensors of this same computer; nothing comes from outside.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    return variables | {name: value for name, value in calm.items() if env.get(name) is None}


def engine_arguments(
    model: VLLMModel, config: RolloutConfig, device: torch.device, *, in_process: bool
) -> dict[str, Any]:
    """Keywords of vLLM's ``EngineArgs``.

    Args:
        device: where the engine runs.
        in_process: it runs in this process, beside the other tensor-parallel ranks, which are processes of the same group.

    Raises:
        ConfigError: a key of ``engine_kwargs.vllm`` that vLLM does not have or burnish does not leave to it; heads that do
            not divide.
    """
    check_parallel(model.config, config.tensor_model_parallel_size)
    check_capture_sizes(config)
    if in_process and config.data_parallel_size > 1:
        raise ConfigError(
            f"{_ROLLOUT}.data_parallel_size={config.data_parallel_size} joins copies of the model that run in processes of their "
            f"own. Set {_ROLLOUT}.mode=async."
        )
    on_cpu = device.type == "cpu"
    max_len = sequence_length(model.config, config)
    arguments: dict[str, Any] = {
        "model": model.path,
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": dict(model.override_config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "load_format": "dummy" if config.load_format.startswith("dummy") else config.load_format,
        # Tokens in, tokens out: stop strings are looked for by burnish.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "seed": config.seed or 0,
        "max_model_len": max_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": _batched_tokens(config, max_len),
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": config.enable_prefix_caching,
        "scheduling_policy": config.scheduling_policy,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        # On a CPU there are no graphs, and compiling takes longer than a short run.
        "enforce_eager": config.enforce_eager or on_cpu,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "disable_log_stats": config.disable_log_stats,
        "use_tqdm_on_load": False,
        # On a GPU the next step is prepared while the last one is computed; burnish's sampler knows its tokens on the device.
        "async_scheduling": not on_cpu,
        "worker_extension_cls": EXTENSION,
    }
    if in_process:
        # Only the launcher's way lets vLLM know which of several visible GPUs is this process's.
        is_alone = config.tensor_model_parallel_size == 1 and (on_cpu or place()[1] == 1)
        arguments["distributed_executor_backend"] = "uni" if is_alone else "external_launcher"
        if not on_cpu and torch.cuda.device_count() <= 1:
            # Each rank sees its own GPU alone, and cannot reach into the memory of another one's.
            arguments["disable_custom_all_reduce"] = True
    if config.data_parallel_size > 1:
        arguments["data_parallel_size"] = config.data_parallel_size
    if config.cudagraph_capture_sizes is not None and not on_cpu:
        arguments["cudagraph_capture_sizes"] = list(config.cudagraph_capture_sizes)
    if config.free_cache_engine and not on_cpu:
        arguments["enable_sleep_mode"] = True
    if on_cpu:
        arguments["block_size"] = _CPU_BLOCK
        arguments["kv_cache_memory_bytes"] = cpu_cache_bytes(model, config, max_len)
    if model.lora_rank:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _lora_rank(model.lora_rank)}
    own = own_arguments(config.engine_kwargs.vllm)
    if isinstance(overrides := own.get("hf_overrides"), Mapping):
        # The policy is trained with what model.override_config says: theirs comes on top of it.
        own["hf_overrides"] = arguments["hf_overrides"] | dict(overrides)
    arguments |= own
    if arguments["async_scheduling"]:
        arguments.setdefault("scheduler_cls", SCHEDULER)
    return arguments


def own_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """``engine_kwargs.vllm`` as it was given.

    Raises:
        ConfigError: a name that vLLM does not have, or one that burnish does not leave to the user.
    """
    given = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
    if not given:
        return {}
    known = engine_argument_names()
    for name, value in given.items():
        shown = f"{_ROLLOUT}.engine_kwargs.vllm.{name}={value!r}"
        if name in _RESERVED:
            raise ConfigError(f"{shown} cannot be set: {_RESERVED[name]}.")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"{shown}: the installed vLLM has no such engine argument."
                + (f" Did you mean {near[0]!r}?" if near else "")
            )
    return dict(given)


def check_parallel(config: PreTrainedConfig, size: int) -> None:
    """A model's attention divides over ``size`` workers.

    Raises:
        ConfigError: it does not; the message names the sizes that would do.
    """
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0):
        return
    legal = [
        number
        for number in range(1, heads + 1)
        if heads % number == 0 and (kv_heads % number == 0 or number % kv_heads == 0)
    ]
    raise ConfigError(
        f"{_ROLLOUT}.tensor_model_parallel_size={size} does not divide the {heads} attention heads and {kv_heads} key-value "
        f"heads of {type(config).__name__}. It can be one of {', '.join(map(str, legal))}."
    )


def check_capture_sizes(config: RolloutConfig) -> None:
    """An empty list would leave it to vLLM whether there are CUDA graphs.

    Raises:
        ConfigError: it is empty.
    """
    if config.cudagraph_capture_sizes == []:
        raise ConfigError(
            f"{_ROLLOUT}.cudagraph_capture_sizes=[] names no size. Leave it out for those that vLLM chooses, or set "
            f"{_ROLLOUT}.enforce_eager=true for decoding without CUDA graphs."
        )


def sequence_length(model_config: PreTrainedConfig, config: RolloutConfig) -> int:
    """Tokens of prompt and response together that one sequence of the engine may have.

    Raises:
        ConfigError: nothing bounds it.
    """
    asked = config.max_model_len
    if asked is None and config.prompt_length and config.response_length:
        asked = config.prompt_length + config.response_length
    length = max_sequence_length(model_config, asked)
    if length is None:
        raise ConfigError(
            f"{type(model_config).__name__} does not say how long its sequences may be. Set {_ROLLOUT}.max_model_len."
        )
    return length


def cpu_cache_bytes(model: VLLMModel, config: RolloutConfig, max_len: int) -> int:
    """Memory of the key-value cache on a CPU: what all sequences may need, within ``gpu_memory_utilization``.

    vLLM would take the whole share, and touch it.

    Raises:
        ConfigError: one sequence does not fit.
    """
    block = _CPU_BLOCK * cache_token_bytes(model.config, model.dtype, config.tensor_model_parallel_size)
    blocks_each = -(-max_len // _CPU_BLOCK)
    # One block is vLLM's own, for padding.
    need = (1 + config.max_num_seqs * blocks_each) * block
    share = int(config.gpu_memory_utilization * env.total_memory())
    available = env.available_memory()
    room = share if available is None else min(share, int(0.8 * available))
    least = (1 + blocks_each) * block
    if room < least:
        raise ConfigError(
            f"One sequence of {max_len} tokens needs {least / 2**20:,.0f} MiB of key-value cache, but "
            f"{_ROLLOUT}.gpu_memory_utilization={config.gpu_memory_utilization:g} and what the computer has left allow "
            f"{room / 2**20:,.0f} MiB. Raise it, or shorten prompt_length or response_length."
        )
    return min(need, room)


def cache_token_bytes(config: PreTrainedConfig, dtype: torch.dtype, num_ranks: int = 1) -> int:
    """Bytes of one token's keys and values in all layers, on each of ``num_ranks`` tensor-parallel ranks."""
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    # Where there are fewer heads than ranks, neighbouring ranks have the same one.
    kv_heads_each = -(-kv_heads // num_ranks)
    return 2 * text.num_hidden_layers * kv_heads_each * head_dim * dtype.itemsize


def _batched_tokens(config: RolloutConfig, max_len: int) -> int:
    """vLLM counts each running sequence's token too, and takes no prompt in parts that it was told not to cut."""
    least = config.max_num_seqs if config.enable_chunked_prefill else max(config.max_num_seqs, max_len)
    return max(config.max_num_batched_tokens, least)


def _lora_rank(rank: int) -> int:
    for allowed in _LORA_RANKS:
        if rank <= allowed:
            return allowed
    raise ConfigError(
        f"actor_rollout_ref.model.lora_rank={rank} is more than vLLM holds in an adapter, {_LORA_RANKS[-1]}. Lower it, or set "
        f"{_ROLLOUT}.name=native."
    )
