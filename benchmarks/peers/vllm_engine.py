"""vLLM as a peer: on a GPU as it comes, with graphs up to the batch size; on a CPU in one process on all cores."""

import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.peers import protocol


def start(settings: dict[str, Any]) -> tuple[Callable[[protocol.Work], dict[str, Any]], dict[str, Any]]:
    """The engine.

    Args:
        settings: ``model`` (a folder), ``dtype``, ``device`` ("cuda" or "cpu"), ``max_num_seqs``, ``max_model_len``,
            ``memory`` (share of the GPU's, or GiB for the cache on a CPU).
    """
    begin = time.perf_counter()
    options: dict[str, Any] = {
        "model": settings["model"],
        "dtype": settings["dtype"],
        "max_num_seqs": settings["max_num_seqs"],
        "max_model_len": settings["max_model_len"],
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        # By default log-probs are those of the logits before the temperature.
        "logprobs_mode": "processed_logprobs",
    }
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if settings["device"] == "cuda":
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        options["gpu_memory_utilization"] = settings["memory"]
        options["compilation_config"] = {"cudagraph_capture_sizes": graph_sizes(settings["max_num_seqs"])}
    else:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores())
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(settings["memory"]))
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        options["distributed_executor_backend"] = "uni"
    import torch
    import vllm

    engine = vllm.LLM(**options)
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    return lambda work: run(engine, work), {"versions": versions, "start_seconds": time.perf_counter() - begin}


def run(engine: Any, work: protocol.Work) -> dict[str, Any]:
    """Seconds of one call of ``generate``."""
    import vllm

    if "eos_token_ids" in work:
        return draw(engine, work)
    n = work["n"]
    lengths = work["max_new_tokens"]
    prompts = [{"prompt_token_ids": ids} for ids in work["prompts"]]

    def sampling(max_tokens: int, samples: int) -> Any:
        # logprobs=0: of the drawn token alone. Flat: no dictionary for each token, which is vLLM's fastest way.
        return vllm.SamplingParams(
            n=samples,
            temperature=1.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )

    params: Any
    if len(set(lengths)) == 1:
        params = sampling(lengths[0], n)
    else:  # Lengths differ inside a group too: every response is a request of its own.
        prompts = [prompt for prompt in prompts for _ in range(n)]
        params = [sampling(length, 1) for length in lengths]
    begin = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    log_probs = [
        entry[token].logprob
        for output in outputs
        for response in output.outputs
        for token, entry in zip(response.token_ids, response.logprobs, strict=True)
    ]
    return {"seconds": seconds, "tokens": len(log_probs), "mean_log_prob": sum(log_probs) / len(log_probs)}


def draw(engine: Any, work: protocol.Work) -> dict[str, Any]:
    """Responses that end as the model has them end."""
    import vllm

    sampling = vllm.SamplingParams(
        n=work["n"],
        temperature=1.0,
        max_tokens=max(work["max_new_tokens"]),
        stop_token_ids=work["eos_token_ids"],
        ignore_eos=True,
        detokenize=False,
    )
    begin = time.perf_counter()
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in work["prompts"]], sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    responses = [list(response.token_ids) for output in outputs for response in output.outputs]
    return {"seconds": seconds, "tokens": sum(map(len, responses)), "responses": responses}


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes to capture: dense enough that little is padded, few enough to start in a minute."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 32), *range(256, largest, 64), largest]
    return sorted({size for size in sizes if size <= largest})


def cores() -> str:
    """The cores that this process may use, as vLLM names them; left to itself it leaves one of them idle."""
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))


if __name__ == "__main__":
    protocol.serve(start)
