"""One run of burnish's trainer whose steps do the same work again and again, each with other switches on."""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from benchmarks.grpo_work import measured_run
from benchmarks.switches.off import CountedRows, model_passes
from benchmarks.switches.work import SwitchesWork, slow_score
from burnish.config import load_config
from burnish.protocol import DataProto
from burnish.reward.managers.base import OUTCOME_COLUMN
from burnish.rollout import SamplingParams
from burnish.rollout.base import RolloutRequest
from burnish.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from burnish.trainer.main_ppo import Parts, TaskRunner, run_ppo
from burnish.trainer.ppo.ray_trainer import RayPPOTrainer
from burnish.workers import ActorRolloutRefWorker

SWITCHES = ("remove_padding", "async_rewards", "dynamic_batch", "shared_prompt", "fused_head")
ALL = frozenset(SWITCHES)
STAGES = ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "update_weights")


class DrawnLengths:
    """A rollout whose responses have the lengths that they are given, in the order of the requests."""

    def __init__(self, rollout: Any, lengths: Sequence[int], sampling: Callable[[int], SamplingParams]) -> None:
        self._rollout = rollout
        self._sampling = [sampling(length) for length in lengths]

    def generate(self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_finished: Any = None) -> Any:
        """See `BaseRollout.generate`."""
        drawn = [
            RolloutRequest(r.request_id, r.prompt_ids, r.uid, r.sample_index, how)
            for r, how in zip(requests, self._sampling, strict=True)
        ]
        return self._rollout.generate(drawn, sampling, on_finished)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollout, name)


class SwitchedWorker(ActorRolloutRefWorker):
    """The policy's worker, with switches that are turned between steps.

    Attributes:
        work: what the steps do; set on a subclass.
    """

    work: SwitchesWork

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """See `ActorRolloutRefWorker.init_model`."""
        super().init_model()
        one = partial(SamplingParams, temperature=1.0, ignore_eos=True, seed=self.config.rollout.seed)
        self.rollout = DrawnLengths(self.rollout, self.work.response_lengths(), lambda n: one(max_new_tokens=n))
        self._manager = self.reward_manager
        self._first: DataProto | None = None
        self._same_tokens = 1.0
        self._passes = ExitStack()
        self.turn_switches(ALL)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Responses as ever; what goes on is the first step's, should they differ by rounding, so that all steps train on the
        same tokens."""
        batch = super().generate_sequences(prompts)
        if self._first is None:
            self._first = batch.select()
        first, now = self._first.tensors, batch.tensors
        mask = first["response_mask"]
        self._same_tokens = float((first["responses"] == now["responses"])[mask].float().mean())
        if self._same_tokens < 1.0:
            batch = self._first.select()
            if self.reward_manager is None:
                batch.non_tensor_batch.pop(OUTCOME_COLUMN, None)
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def turn_switches(self, on: frozenset[str]) -> None:
        """What the next step does."""
        self._passes.close()
        self._passes.enter_context(model_passes(remove_padding="remove_padding" in on, fused_head="fused_head" in on))
        self.reward_manager = self._manager if "async_rewards" in on else None
        turn_config(self.config, self.work, on)
        self.engine._share_prompts = self.config.actor.use_prefix_grouper
        if self.reference is not None:
            self.reference._share_prompts = self.config.actor.use_prefix_grouper
        CountedRows.computed.clear()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def look(self) -> dict[str, Any]:
        """What the last step computed."""
        computed = CountedRows.computed
        return {
            "dtype": str(self.engine.dtype).removeprefix("torch."),
            "same_tokens": self._same_tokens,
            "micro_batches": len(computed),
            "computed_tokens": sum(tokens for tokens, _ in computed),
            "computed_labels": sum(labels for _, labels in computed),
        }

    def close(self) -> None:
        """See `ActorRolloutRefWorker.close`."""
        self._passes.close()
        super().close()


def turn_config(config: Any, work: SwitchesWork, on: frozenset[str]) -> None:
    """The ``actor_rollout_ref`` section with these switches: how micro-batches are cut and whether prompts are shared."""
    dynamic, rows = "dynamic_batch" in on, work.rows_that_always_fit
    config.actor.use_dynamic_bsz, config.actor.ppo_micro_batch_size_per_gpu = dynamic, rows
    for part in (config.rollout, config.ref):
        part.log_prob_use_dynamic_bsz, part.log_prob_micro_batch_size_per_gpu = dynamic, rows
    config.actor.use_prefix_grouper = "shared_prompt" in on


class SwitchedTrainer(RayPPOTrainer):
    """Steps that all draw the same responses, since their rows have the same names and the learning rate is 0."""

    def _get_gen_batch(
        self, batch_dict: dict[str, Any], *, n: int | None = None, uid_prefix: str | None = None
    ) -> DataProto:
        return super()._get_gen_batch(batch_dict, n=n, uid_prefix="again")

    def turn_switches(self, on: frozenset[str]) -> None:
        """What the next step does; the driver scores where the rollout does not."""
        self.early_manager = self.reward_fn if "async_rewards" in on else None
        self.actor_rollout_wg.turn_switches(on)


class _Runner(TaskRunner):
    trainer: Any = None

    def __init__(self, work: SwitchesWork) -> None:
        super().__init__()
        self._worker = type("SwitchedWorker", (SwitchedWorker,), {"work": work})

    def trainer_class(self) -> type[RayPPOTrainer]:
        return SwitchedTrainer

    def add_actor_rollout_worker(self, config: Any) -> None:
        super().add_actor_rollout_worker(config)
        for role in self.role_worker_mapping:
            self.role_worker_mapping[role] = self._worker

    def build_trainer(self, config: Any, parts: Parts) -> Any:
        self.trainer = super().build_trainer(config, parts)
        return self.trainer


def run_turns(
    work: SwitchesWork,
    turns: Sequence[frozenset[str]],
    *,
    model: str,
    tokenizer: str,
    vocab_size: int,
    device: str,
    overrides: dict[str, Any],
    on_turn: Callable[[int, dict[str, Any]], None] = lambda *_: None,
) -> list[dict[str, Any]]:
    """One step for each of ``turns``, the switches that are on in it. The first turn must have all of them on.

    Args:
        overrides: configuration by dotted key, over what the work says.
        on_turn: told each turn's number and figures as it ends.

    Returns:
        of each turn ``seconds`` from the end of the turn before, ``cpu_seconds`` of this process, ``stages``, ``loss``,
        ``grad_norm``, ``entropy``, ``mean_score``, ``memory_gib`` (on a GPU), and what `SwitchedWorker.look` tells.
    """
    if turns[0] != ALL:
        raise ValueError("The first turn has all switches on: it is how the run begins.")
    runner = _Runner(work)
    seen: list[dict[str, Any]] = []
    begin = cpu_begin = 0.0

    def callback(report: Any) -> None:
        nonlocal begin, cpu_begin
        if device == "cuda":
            torch.cuda.synchronize()
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        metrics = report.metrics
        seen.append(
            {
                "seconds": seconds,
                "cpu_seconds": cpu_seconds,
                "stages": {name: metrics[f"timing_s/{name}"] for name in STAGES if f"timing_s/{name}" in metrics},
                "loss": metrics["actor/pg_loss"],
                "grad_norm": metrics["actor/grad_norm"],
                "entropy": metrics["actor/entropy"],
                "mean_score": metrics["critic/score/mean"],
                "response_tokens": round(metrics["response_length/mean"] * metrics["training/num_rows"]),
                "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
                **runner.trainer.actor_rollout_wg.look()[0],
            }
        )
        on_turn(len(seen) - 1, seen[-1])
        if len(seen) < len(turns):
            runner.trainer.turn_switches(turns[len(seen)])
        begin, cpu_begin = time.perf_counter(), time.process_time()

    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            [_settings(work, len(turns), folder, model, tokenizer, device), overrides], train_rows_given=True
        )
        parts = Parts(
            train_rows=[{"prompt": text, "data_source": "numbers"} for text in work.texts(vocab_size)],
            reward_fn=partial(slow_score, seconds=work.reward_seconds, kind=work.reward_kind),
            callbacks=(callback,),
        )
        begin = time.perf_counter()
        run_ppo(config, lambda: runner, parts=parts, quiet=True)
    return seen


def _settings(work: SwitchesWork, steps: int, folder: str, model: str, tokenizer: str, device: str) -> dict[str, Any]:
    """Configuration by dotted key."""
    return {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.tokenizer_path": tokenizer,
        "actor_rollout_ref.rollout.n": work.samples,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": work.prompts,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": work.max_token_len,
        # Weights that stay, so that every turn samples the same tokens; an update of them costs what any costs.
        "actor_rollout_ref.actor.optim.lr": 0.0,
        "data.shuffle": False,
        "trainer.controller": "local",
        **measured_run(
            prompts=work.prompts,
            prompt_length=work.longest_prompt,
            response_length=work.longest_response,
            steps=steps,
            device=device,
            folder=folder,
        ),
    }
