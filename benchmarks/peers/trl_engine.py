"""TRL's GRPOTrainer as a peer: one whole step a turn. On a GPU it samples with vLLM in the same process.

Its ``train()`` does not return between steps, so this peer answers from inside it: after each step a callback tells what the
step took and waits for the next line.
"""

import json
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any, TextIO

from benchmarks.grpo_work import GRPOWork, prompt_texts, score
from benchmarks.peers.protocol import own_stdout

# Methods of the trainer whose seconds are told; the update is the rest of a step.
STAGES = {"_generate": "gen", "_calculate_rewards": "reward", "_generate_and_score_completions": "gen_and_score"}


def build(settings: dict[str, Any], folder: str, answers: TextIO) -> Any:
    """The trainer.

    Args:
        settings: ``model`` and ``tokenizer`` (folders), ``device``, ``dtype`` (of the computation; weights and moments are
            float32), ``work`` (`GRPOWork`), ``micro_batch_size``, ``gradient_checkpointing``, ``lr``, ``vllm_memory`` (share
            of the GPU's; None: transformers' generate samples).
        folder: for what the trainer writes.
        answers: where the turns are answered.
    """
    vllm_memory = settings["vllm_memory"]
    if vllm_memory is not None:
        vllm_environment()
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    work = GRPOWork(**settings["work"])
    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"], padding_side="left")
    if vllm_memory is None:
        sampling: dict[str, Any] = {"generation_kwargs": {"min_new_tokens": work.response_length}}
    else:
        sampling = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": vllm_memory,
            "vllm_max_model_length": work.prompt_length + work.response_length,
            "generation_kwargs": {"ignore_eos": True},
        }
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=settings["device"] == "cpu",
        bf16=settings["dtype"] == "bfloat16",
        beta=0.0,
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        num_generations=work.samples,
        max_completion_length=work.response_length,
        per_device_train_batch_size=settings["micro_batch_size"],
        gradient_accumulation_steps=work.num_rows // settings["micro_batch_size"],
        gradient_checkpointing=settings["gradient_checkpointing"],
        max_steps=1_000_000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=settings["device"] != "cpu",
        **sampling,
    )
    counts = {"tokens": 0, "score": 0.0}

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        scores = [score(text) for text in completions]
        counts["tokens"] += sum(len(ids) for ids in completion_ids)
        counts["score"] += sum(scores)
        return scores

    texts = prompt_texts(work, settings["vocab_size"], 32 * work.prompts)
    trainer = GRPOTrainer(
        model=settings["model"],
        args=config,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=tokenizer,
    )
    seconds = time_stages(trainer)
    trainer.add_callback(_turns(trainer, answers, seconds, counts))
    return trainer


def time_stages(trainer: Any) -> dict[str, float]:
    """Wraps the methods named in `STAGES`; the seconds of each add up in the dictionary that is returned."""
    seconds = dict.fromkeys(STAGES.values(), 0.0)

    def timed(method: Callable, stage: str) -> Callable:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            synchronize()
            begin = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                synchronize()
                seconds[stage] += time.perf_counter() - begin

        return run

    for name, stage in STAGES.items():
        setattr(trainer, name, timed(getattr(trainer, name), stage))
    return seconds


def _turns(trainer: Any, answers: TextIO, seconds: dict[str, float], counts: dict[str, Any]) -> Any:
    """The callback: each line on stdin is a step, each step an answer; the end of stdin ends the training."""
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        begin = cpu_begin = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            return self.wait(control)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            synchronize()
            whole = time.perf_counter() - self.begin
            answer = {
                "seconds": whole,
                "cpu_seconds": time.process_time() - self.cpu_begin,
                "stages": {
                    "gen": seconds["gen"],
                    "reward": seconds["reward"],
                    "update_actor": whole - seconds["gen_and_score"],
                },
                "tokens": counts["tokens"],
                "mean_score": counts["score"] / (args.train_batch_size * args.gradient_accumulation_steps),
                "fingerprint": fingerprint(trainer.model.parameters()),
                "memory_gib": _peak_memory(),
            }
            print(json.dumps(answer), file=answers, flush=True)
            return self.wait(control)

        def wait(self, control: Any) -> Any:
            if not sys.stdin.readline():
                control.should_training_stop = True
            seconds.update(dict.fromkeys(seconds, 0.0))
            counts.update(tokens=0, score=0.0)
            self.begin, self.cpu_begin = time.perf_counter(), time.process_time()
            return control

    return Turns()


def fingerprint(tensors: Any) -> float:
    """A number that differs where some of the first weights of any tensor do."""
    return float(sum(tensor.detach().flatten()[:65536].double().abs().sum() for tensor in tensors))


def _peak_memory() -> float | None:
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def vllm_environment() -> None:
    """What vLLM needs in this process: a rendezvous of its own, and nothing of FlashInfer's binaries."""
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    rendezvous = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**rendezvous, "MASTER_PORT": str(_free_port())}.items():
        os.environ.setdefault(name, value)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Trains until stdin ends."""
    answers = own_stdout()
    begin = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = build(json.loads(sys.argv[1]), folder, answers)
            import torch
            import transformers
            import trl

            versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
            if json.loads(sys.argv[1])["vllm_memory"] is not None:
                import vllm

                versions["vllm"] = vllm.__version__
            facts = {"ready": True, "versions": versions, "start_seconds": time.perf_counter() - begin}
            print(json.dumps(facts), file=answers, flush=True)
            trainer.train()
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
