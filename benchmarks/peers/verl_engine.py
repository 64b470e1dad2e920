"""verl's trainer as a peer: one whole step a turn, on one GPU with vLLM.

It is a command line that runs to its end, so it does not wait for turns: each turn answers with the next step that it
logged. It runs alone, after burnish. It tells no fingerprint of its weights (a gradient of norm 0 is an error), no seconds of
CPU, and no memory: what it logs is that of one of its processes (`benchmarks.grpo_step` looks at the card instead).
"""

import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.grpo_work import GRPOWork, prompt_texts
from benchmarks.peers import verl_reward
from benchmarks.peers.protocol import Work, serve
from benchmarks.peers.verl_run import (
    TRAINERS,
    package_versions,
    read_steps,
    run_settings,
    step_figures,
    write_parquet,
)
from benchmarks.peers.verl_run import start as start_verl

MOST_STEPS = 64
"""Steps there is data for; it is ended when enough of them were answered."""


def overrides(settings: dict[str, Any], work: GRPOWork, folder: Path) -> dict[str, Any]:
    """Its configuration for the work: one update of the whole batch, no reference, every response of its full length."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    common = run_settings(
        folder,
        model=settings["model"],
        tokenizer=str(folder / "tokenizer"),
        micro_batch_rows=settings["micro_batch_size"],
        engine_memory=settings["vllm_memory"],
    )
    return common | {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "data.train_batch_size": work.prompts,
        "data.max_prompt_length": work.prompt_length,
        "data.max_response_length": work.response_length,
        "data.shuffle": False,
        f"{actor}.ppo_mini_batch_size": work.prompts,
        f"{actor}.use_kl_loss": False,
        f"{actor}.optim.lr": settings["lr"],
        f"{rollout}.n": work.samples,
        f"{rollout}.ignore_eos": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": settings["gradient_checkpointing"],
        "reward.custom_reward_function.path": verl_reward.__file__,
        "trainer.use_v1": TRAINERS[settings["trainer"]],
        "trainer.total_training_steps": MOST_STEPS,
        "trainer.total_epochs": 1,
        "trainer.save_freq": -1,
    }


def write_data(settings: dict[str, Any], work: GRPOWork, folder: Path) -> None:
    """Prompts of random tokens, and the tokenizer that reads them, with a chat template that adds nothing."""
    texts = prompt_texts(work, settings["vocab_size"], MOST_STEPS * work.prompts)
    rows = [
        {
            "prompt": [{"role": "user", "content": text}],
            "data_source": "numbers",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, text in enumerate(texts)
    ]
    write_parquet(rows, folder / "train.parquet")
    write_parquet(rows[:1], folder / "val.parquet")
    shutil.copytree(settings["tokenizer"], folder / "tokenizer", dirs_exist_ok=True)
    write_tokenizer(folder / "tokenizer")


def write_tokenizer(folder: Path) -> None:
    """Gives the tokenizer there a chat template that adds nothing, and the two tokens without which verl takes no Qwen's."""
    from transformers import AddedToken, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("\n", normalized=False), AddedToken("<|im_end|>", normalized=False, special=True)])
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)


def answer(metrics: dict[str, Any], work: GRPOWork) -> dict[str, Any]:
    """A step's figures as the other peers tell them.

    Raises:
        RuntimeError: it had no gradient.
    """
    figures = step_figures(metrics, work.num_rows)
    if not figures["grad_norm"]:
        raise RuntimeError(f"verl's step {figures['step']} has a gradient of norm {figures['grad_norm']}.")
    seconds = dict(figures["seconds"])
    return {
        "seconds": seconds.pop("step"),
        "cpu_seconds": None,
        "stages": seconds,
        "tokens": figures["tokens"],
        "mean_score": figures["mean_score"],
        "fingerprint": None,
        "memory_gib": None,
    }


def begin(settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Starts it; the function that answers a turn, and what to tell of it."""
    work, folder = GRPOWork(**settings["work"]), Path(settings["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    write_data(settings, work, folder)
    process = start_verl(overrides(settings, work, folder), folder, log=folder / "verl.log")
    told = 0

    def turn(_: Work) -> dict[str, Any]:
        nonlocal told
        while len(steps := read_steps(folder)) <= told:
            if process.poll() is not None:
                end = "\n".join((folder / "verl.log").read_text(errors="replace").splitlines()[-20:])
                raise RuntimeError(f"verl ended with code {process.returncode} after {told} steps:\n{end}")
            time.sleep(0.2)
        found = answer(steps[told], work)
        told += 1
        return found

    turn.process = process  # type: ignore[attr-defined]
    return turn, {"versions": package_versions(), "start_seconds": None}


def main() -> None:
    """Answers until stdin ends, then ends verl."""
    processes = []

    def start(settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        turn, facts = begin(settings)
        processes.append(turn.process)
        return turn, facts

    try:
        serve(start)
    finally:
        for process in processes:
            process.terminate()
            process.wait(timeout=60)


if __name__ == "__main__":
    sys.exit(main())
