"""A whole run of TRL's GRPOTrainer: ``python -m benchmarks.peers.trl_learning WORK FOLDER``, WORK being `LearningWork` in JSON.

It writes ``steps.jsonl`` (seconds, mean score, tokens of each step), ``step_N/``, the model after each step that is measured,
and ``facts.json``.
"""

import json
import sys
import tempfile
import time
from functools import wraps
from pathlib import Path
from typing import Any

from benchmarks.learning.work import LearningWork, merged, read_rows, reward_function, score_of
from benchmarks.peers.trl_engine import STAGES, synchronize, time_stages, vllm_environment


def build(work: LearningWork, folder: Path, scratch: str) -> Any:
    """The trainer; ``scratch`` is for what it writes of its own."""
    sampling: dict[str, Any] = {}
    with_vllm = work.device == "cuda" and work.peer_engine == "vllm"
    if with_vllm:
        vllm_environment()
        sampling = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": work.engine_memory,
            "vllm_max_model_length": work.prompt_length + work.response_length,
        }
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    rows = read_rows(work.train_file)
    config = GRPOConfig(
        output_dir=scratch,
        use_cpu=work.device == "cpu",
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=work.device != "cpu",
        **merged(work, "trl"),
        **sampling,
    )
    reward, step = reward_function(work.reward), {"scores": 0.0, "tokens": 0, "prompt_tokens": 0}

    def score(completions: list[Any], completion_ids: list[list[int]], row: list[int], **_: Any) -> list[float]:
        texts = [done if isinstance(done, str) else done[0]["content"] for done in completions]
        scores = [score_of(reward, rows[number], text) for number, text in zip(row, texts, strict=True)]
        step["scores"] += sum(scores)
        step["tokens"] += sum(len(ids) for ids in completion_ids)
        return scores

    trainer = GRPOTrainer(
        model=work.model,
        args=config,
        reward_funcs=score,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "row": n} for n, row in enumerate(rows)]),
        processing_class=AutoTokenizer.from_pretrained(work.model, padding_side="left"),
    )
    _count_prompts(trainer, step)
    trainer.add_callback(_recorder(trainer, work, folder, step, time_stages(trainer)))
    return trainer


def _count_prompts(trainer: Any, step: dict[str, Any]) -> None:
    """Adds the tokens of the prompts that are sampled for to ``step``."""
    generate = trainer._generate

    @wraps(generate)
    def counted(*args: Any, **kwargs: Any) -> Any:
        found = generate(*args, **kwargs)
        step["prompt_tokens"] += sum(len(ids) for ids in found[0])
        return found

    trainer._generate = counted


def _recorder(trainer: Any, work: LearningWork, folder: Path, step: dict[str, Any], seconds: dict[str, float]) -> Any:
    """The callback that writes a line for each step and saves the models."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        begin = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step % work.updates:
                return
            synchronize()
            number, whole = state.global_step // work.updates, time.perf_counter() - self.begin
            line = {
                "step": number,
                "mean_score": step["scores"] / work.num_rows,
                "tokens": step["tokens"],
                "prompt_tokens": step["prompt_tokens"],
                "seconds": {"step": whole, "gen": seconds["gen"], "update_actor": whole - seconds["gen_and_score"]},
            }
            with (folder / "steps.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            if number in work.measured_steps:
                trainer.save_model(str(folder / f"step_{number}"))
            step.update(scores=0.0, tokens=0, prompt_tokens=0)
            seconds.update(dict.fromkeys(STAGES.values(), 0.0))
            self.begin = time.perf_counter()

    return Recorder()


def main() -> None:
    """Trains to the end."""
    work, folder = LearningWork(**json.loads(sys.argv[1])), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as scratch:
        trainer = build(work, folder, scratch)
        import torch
        import transformers
        import trl

        names = {"trl": trl, "transformers": transformers, "torch": torch}
        if work.device == "cuda" and work.peer_engine == "vllm":
            import vllm

            names["vllm"] = vllm
        (folder / "facts.json").write_text(json.dumps({name: module.__version__ for name, module in names.items()}))
        trainer.train()


if __name__ == "__main__":
    main()
