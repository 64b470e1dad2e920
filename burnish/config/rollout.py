"""`actor_rollout_ref.rollout`: the engine that generates responses, and how they are sampled."""
# ruff: noqa: RUF009  `key` and `section` declare dataclass fields.

from dataclasses import dataclass
from typing import Any

from burnish.config import names
from burnish.config.profiler import ProfilerConfig
from burnish.config.section import Section, key, section


@dataclass(kw_only=True, slots=True)
class SamplingConfig(Section):
    """Sampling in validation."""

    temperature: float = key(0.0, ge=0)
    """0 is greedy."""
    top_p: float = key(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this probability."""
    top_k: int = key(-1, ge=-1)
    """Sample from this many most probable tokens; -1: all."""
    n: int = key(1, ge=1)
    """Responses to each prompt."""
    do_sample: bool = key(False)
    """False is greedy, whatever the temperature."""
    min_p: float = key(0.0, ge=0, le=1)
    """Sample from the tokens that are at least this many times as probable as the most probable one; 0: all."""
    repetition_penalty: float = key(1.0, gt=0)
    """Above 1, tokens that the prompt or the response holds already become less probable."""
    min_new_tokens: int = key(None, follows="actor_rollout_ref.rollout.min_new_tokens", ge=0)
    """No token that ends a response comes before it has this many."""
    stop: list[str] = key(None, follows="actor_rollout_ref.rollout.stop", blank=True)
    """Strings that end a response."""
    stop_token_ids: list[int] = key(None, follows="actor_rollout_ref.rollout.stop_token_ids", ge=0)
    """Tokens that end a response."""


@dataclass(kw_only=True, slots=True)
class CheckpointEngineConfig(Section):
    """Bringing the trained weights to a rollout that keeps a copy of them."""

    update_weights_bucket_megabytes: int = key(256, ge=1)
    """Sharded weights are gathered, and weights travel to an engine in another process, in parts of about this size: larger is
    faster, and two parts are in memory at a time."""


@dataclass(kw_only=True, slots=True)
class EngineKwargsConfig(Section):
    """An engine's own arguments, by the engine's name."""

    vllm: dict[str, Any] = key({})
    """Fields of vLLM's `EngineArgs`, passed on as they are (`engine_kwargs.vllm.kv_cache_dtype=fp8`); they win over what burnish
    sets, and names that vLLM does not have are refused, as are those that another key stands for or burnish builds on."""
    sglang: dict[str, Any] = key({})
    """Likewise of SGLang."""


@dataclass(kw_only=True, slots=True)
class ServerConfig(Section):
    """`mode=server`: engines that run elsewhere, as `vllm serve` starts them."""

    url: list[str] = key([])
    """Addresses of the servers (`http://host:8000`); responses are spread over them."""
    model: str | None = key(None)
    """The model's name there; null: that of `model.path`, by its last part."""
    api_key_env: str | None = key(None)
    """Environment variable that holds the key which the servers ask for."""
    timeout: float = key(600.0, gt=0)
    """Seconds that one response may take."""
    max_attempts: int = key(3, ge=1)
    """Times that a response is asked for, where a connection breaks or the server is too busy."""
    retry_delay: float = key(2.0, ge=0)
    """Seconds between two attempts."""
    max_connections: int = key(1000, ge=1)
    """Responses that are asked for at once, per worker."""
    max_start_wait_time: float = key(300.0, ge=0)
    """Seconds to wait for a server that is still starting."""
    weights_dir: str | None = key(None, is_path=True)
    """Folder that burnish and the servers see under one name (`/dev/shm/burnish` on one machine), in which trained weights are
    handed to them; null: they keep their own, which is for validation alone."""


@dataclass(kw_only=True, slots=True)
class RolloutConfig(Section):
    """Generating responses."""

    name: str = key("native", choices=names.ROLLOUTS, planned=names.PLANNED_ROLLOUTS, plug_in=True)
    """The engine: `native` decodes many sequences at once on the actor's own weights; `vllm` is vLLM, which can spread a model
    over several workers (docs/vllm.md); `hf` is the plain reference."""
    mode: str = key("async", choices=("async", "sync", "server"))
    """Where vLLM runs. async: in processes of its own, and each response is passed on as it ends. sync: in the workers
    themselves, which starts sooner and copies weights fastest. server: elsewhere, at `server.url`."""
    n: int = key(1, ge=1)
    """Responses to each prompt in training: the size of a group."""
    temperature: float = key(1.0, ge=0)
    """Divides the logits, in sampling and in every log-prob; 0 is greedy."""
    top_p: float = key(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this probability."""
    top_k: int = key(-1, ge=-1)
    """Sample from this many most probable tokens; -1: all."""
    do_sample: bool = key(True)
    """False is greedy."""
    min_p: float = key(0.0, ge=0, le=1)
    """Sample from the tokens that are at least this many times as probable as the most probable one; 0: all."""
    repetition_penalty: float = key(1.0, gt=0)
    """Above 1, tokens that the prompt or the response holds already become less probable: their logits are divided by it
    where positive and multiplied where negative."""
    min_new_tokens: int = key(0, ge=0)
    """No token that ends a response comes before it has this many."""
    stop: list[str] = key([], blank=True)
    """Strings that end a response with the token that completes one of them, as `["</answer>","Question:"]`; a line break
    is written in a YAML file. The model's end-of-sequence tokens end it as well."""
    stop_token_ids: list[int] = key([], ge=0)
    """Tokens that end a response beside the end-of-sequence tokens, also with `ignore_eos`."""
    seed: int = key(None, follows="trainer.seed", ge=0, le=2**32 - 1)
    """Seed of sampling; a response depends on it, its prompt and its number, not on what else is in the batch."""
    prompt_length: int = key(None, follows="data.max_prompt_length", ge=1)
    """Tokens of a prompt, at most."""
    response_length: int = key(None, follows="data.max_response_length", ge=1)
    """Tokens of a response, at most."""
    max_model_len: int | None = key(None, ge=1)
    """Tokens of prompt and response together, at most; null: the sum of both."""
    ignore_eos: bool = key(False)
    """Go on to the full length."""
    dtype: str = key("auto", choices=("auto", "float32", "bfloat16"))
    """Type of the engine's weights where it keeps its own copy; auto: as the actor's."""
    load_format: str = key(
        "dummy", choices=("dummy", "auto", "safetensors", "dummy_dtensor", "dummy_hf", "dummy_megatron")
    )
    """Where vLLM takes its first weights from: dummy (or an older script's `dummy_...`): nowhere, the trained ones are sent
    before the first response; auto and safetensors: the files of `model.path`, and the trained ones are sent all the same."""
    tensor_model_parallel_size: int = key(1, ge=1)
    """Workers that share one copy of vLLM's model; it divides the number of workers and the model's attention heads."""
    data_parallel_size: int = key(1, ge=1)
    """Copies of vLLM's model that work as one engine, each on `tensor_model_parallel_size` workers, as a mixture of experts
    that is split over all of them needs it (`engine_kwargs.vllm.enable_expert_parallel=true`). Other models need none: workers
    that are left over hold engines of their own."""
    gpu_memory_utilization: float = key(0.5, gt=0, le=1)
    """Share of the device's memory (on a CPU the computer's) that the model's weights and the KV cache may take together, per
    worker; sequences whose cache does not fit wait."""
    max_num_seqs: int = key(1024, ge=1)
    """Sequences decoded at once, per worker; a finished one makes room for a waiting one. A step of many sequences costs
    little more than one of few, so only memory is a reason to lower it."""
    max_num_batched_tokens: int = key(8192, ge=1)
    """Prompt tokens taken in at once, per worker: many prompts together, or a part of a long one."""
    enable_chunked_prefill: bool = key(True)
    """Take in a prompt that is longer than `max_num_batched_tokens` in parts; false: it goes at once and alone."""
    enable_prefix_caching: bool = key(True)
    """Compute what prompts begin with in common once. vLLM forgets it with every update of the weights."""
    scheduling_policy: str = key("fcfs", choices=("fcfs", "priority"))
    """vLLM's order of waiting sequences. burnish gives all of them one priority, so that `priority` is `fcfs` too."""
    disable_log_stats: bool = key(True)
    """No log lines of vLLM's about its throughput, which show only with `mode=sync` and `VLLM_LOGGING_LEVEL=INFO` in the
    environment; the metrics `perf/rollout/*` have it in any case."""
    enforce_eager: bool = key(False)
    """Decode without CUDA graphs: slower, and ready sooner. There are none on a CPU."""
    cudagraph_capture_sizes: list[int] | None = key(None, ge=1)
    """Numbers of sequences for which the decode step is captured as a CUDA graph; fewer are padded to the next. null:
    burnish chooses."""
    free_cache_engine: bool = key(True)
    """Give the memory of the KV cache back between rollouts, and that of an engine's own copy of the weights until the next
    ones are sent; false keeps both."""
    engine_timeout: int = key(600, ge=1)
    """Seconds without any sign of life after which an engine in other processes is given up, with an error: at its start, in an
    update of its weights and while it generates."""
    log_prob_micro_batch_size_per_gpu: int | None = key(None, ge=1)
    """Samples of one forward pass for the old log-probs, per worker; null: `log_prob_use_dynamic_bsz` becomes true."""
    log_prob_use_dynamic_bsz: bool = key(None, follows="actor_rollout_ref.actor.use_dynamic_bsz")
    """Cut by `log_prob_max_token_len_per_gpu` instead of samples."""
    log_prob_max_token_len_per_gpu: int = key(None, follows="actor_rollout_ref.actor.ppo_max_token_len_per_gpu", ge=1)
    """Tokens of one forward pass, per worker."""
    val_kwargs: SamplingConfig = section(SamplingConfig)
    """Sampling in validation."""
    checkpoint_engine: CheckpointEngineConfig = section(CheckpointEngineConfig)
    """Bringing the trained weights to a rollout that keeps a copy of them."""
    engine_kwargs: EngineKwargsConfig = section(EngineKwargsConfig)
    """The engine's own arguments."""
    server: ServerConfig = section(ServerConfig)
    """`mode=server`: engines that run elsewhere."""
    profiler: ProfilerConfig = section(ProfilerConfig)
    """Recording generation, as far as it happens in the workers' own processes."""
