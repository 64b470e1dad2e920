"""burnish's side of the GRPO benchmark: its own trainer on the work, one callback a step."""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.grpo_work import GRPOWork, measured_run, prompt_texts, score
from benchmarks.peers.trl_engine import fingerprint
from burnish.config import load_config
from burnish.single_controller import Dispatch, register
from burnish.trainer.main_ppo import Parts, TaskRunner, run_ppo
from burnish.workers import ActorRolloutRefWorker

STAGES = (
    *(
        "gen",
        "reward_model",
        "reward",
        "old_log_prob",
        "ref",
        "values",
        "adv",
        "update_critic",
        "update_actor",
        "update_weights",
    ),
)


class FingerprintedWorker(ActorRolloutRefWorker):
    """The policy's worker, with a look at its weights."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fingerprint(self) -> float:
        """A number that changes when the weights do."""
        return fingerprint(tensor for _, tensor in self.engine.named_weights())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def computes_in(self) -> str:
        """The compute dtype that ``auto`` came to."""
        return str(self.engine.dtype).removeprefix("torch.")


class _Runner(TaskRunner):
    """Keeps the trainer at hand for the callback."""

    trainer: Any = None

    def add_actor_rollout_worker(self, config: Any) -> None:
        super().add_actor_rollout_worker(config)
        for role in self.role_worker_mapping:
            self.role_worker_mapping[role] = FingerprintedWorker

    def build_trainer(self, config: Any, parts: Parts) -> Any:
        self.trainer = super().build_trainer(config, parts)
        return self.trainer


def run_steps(
    work: GRPOWork,
    *,
    model: str,
    tokenizer: str,
    vocab_size: int,
    device: str,
    gpus: int,
    lr: float,
    steps: int,
    overrides: dict[str, Any],
    after_step: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """``steps`` steps of burnish's trainer, after one that warms up.

    Args:
        overrides: configuration by dotted key, over what the work says.
        after_step: called when a step has ended; its seconds are nobody's.

    Returns:
        of each step, the first left out: ``seconds`` from the end of the step before, ``cpu_seconds`` of this process,
        ``stages``, ``tokens``, ``mean_score``, ``fingerprint`` of the weights after it, ``memory_gib`` (on a GPU), ``dtype``.
    """
    runner = _Runner()
    steps_seen: list[dict[str, Any]] = []
    begin = cpu_begin = 0.0

    def callback(report: Any) -> None:
        nonlocal begin, cpu_begin
        if device == "cuda":
            torch.cuda.synchronize()
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        metrics, workers = report.metrics, runner.trainer.actor_rollout_wg
        steps_seen.append(
            {
                "seconds": seconds,
                "cpu_seconds": cpu_seconds,
                "stages": {name: metrics[f"timing_s/{name}"] for name in STAGES if f"timing_s/{name}" in metrics},
                "tokens": round(metrics["response_length/mean"] * metrics["training/num_rows"]),
                "mean_score": metrics["critic/score/mean"],
                "skipped_updates": metrics["actor/skipped_updates"],
                "fingerprint": workers.fingerprint()[0],
                "dtype": workers.computes_in()[0],
                "memory_gib": metrics.get("perf/max_memory_allocated_gb"),
            }
        )
        after_step()
        begin, cpu_begin = time.perf_counter(), time.process_time()

    with tempfile.TemporaryDirectory() as folder:
        texts = prompt_texts(work, vocab_size, (steps + 1) * work.prompts)
        config = load_config(
            [
                {
                    "algorithm.adv_estimator": "grpo",
                    "actor_rollout_ref.model.path": model,
                    "actor_rollout_ref.model.tokenizer_path": tokenizer,
                    "actor_rollout_ref.rollout.n": work.samples,
                    "actor_rollout_ref.rollout.ignore_eos": True,
                    "actor_rollout_ref.actor.ppo_mini_batch_size": work.prompts,
                    "actor_rollout_ref.actor.optim.lr": lr,
                    **measured_run(
                        prompts=work.prompts,
                        prompt_length=work.prompt_length,
                        response_length=work.response_length,
                        steps=steps + 1,
                        device=device,
                        folder=folder,
                        gpus=gpus,
                    ),
                },
                overrides,
            ],
            train_rows_given=True,
        )
        parts = Parts(
            train_rows=[{"prompt": text, "data_source": "numbers"} for text in texts],
            reward_fn=lambda solution_str, **_: score(solution_str),
            callbacks=(callback,),
        )
        begin = time.perf_counter()
        run_ppo(config, lambda: runner, parts=parts, quiet=True)
    return steps_seen[1:]
