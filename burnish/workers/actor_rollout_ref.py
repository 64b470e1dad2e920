"""Actor, rollout and reference policy in one process: the hybrid engine.

The actor trains, the rollout decodes (on the actor's own weights where the layout allows it), the reference is a frozen copy of
the model at the start, or the actor without its adapters where it trains those. This class only wires engines to calls; what
they compute lives in `burnish.engine` and `burnish.rollout`.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from burnish.config import ActorRolloutRefConfig
from burnish.config.actor_rollout_ref import CheckpointConfig
from burnish.config.profiler import ProfilerConfig
from burnish.config.usage import track_section
from burnish.engine import FSDPEngine
from burnish.model.load import eos_token_ids
from burnish.protocol import DataProto
from burnish.render import load_tokenizer
from burnish.reward.managers.base import OUTCOME_COLUMN
from burnish.reward.travel import unpack
from burnish.rollout import SamplingParams, build_rollout, requests_from_dataproto, responses_to_dataproto, sampling_of
from burnish.rollout.build import ranks_per_engine, rollout_dtype
from burnish.rollout.stats import RolloutStats
from burnish.single_controller import (
    NUM_PADDING,
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    make_nd_compute_metric_dispatch_fn,
    register,
)
from burnish.workers.checkpoints import SavesItsModel
from burnish.workers.early_scoring import EarlyScoring, shared_manager
from burnish.workers.losses import make_policy_loss, rollout_difference
from burnish.workers.preparation import make_preparation
from burnish.workers.profiling import ProfiledWorker, profiled
from burnish.workers.rollout_work import RolloutWork
from burnish.workers.updates import log_prob_kwargs, perf_metrics, run_mini_batches, update_kwargs
from burnish.workers.weight_sync import WeightSync


class ActorRolloutRefWorker(SavesItsModel, ProfiledWorker):
    """One rank of the policy.

    Args:
        config: the ``actor_rollout_ref`` section.
        role: "actor_rollout" or "actor_rollout_ref" (with a reference policy).
        device: "cpu" or "cuda".
        total_training_steps: trainer steps of the run, for the learning-rate schedule.
        pad_token_id: id that fills the tensors of a batch where there is no token.
        eos_token_id: the tokenizer's; it ends a response beside those that the model names.
        reward_manager: scores responses while others are sampled (`burnish.reward.managers.base.BaseRewardManager`), or what
            `burnish.reward.travel.pack` makes of it; None: who asked for the responses scores them.
        num_nodes: nodes of this group.
    """

    profile_name = "policy"

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        role: str,
        device: str,
        total_training_steps: int,
        pad_token_id: int,
        eos_token_id: int | None,
        reward_manager: Any = None,
        num_nodes: int = 1,
    ) -> None:
        track_section(config, "actor_rollout_ref")
        self.config = config
        self.has_reference = role.endswith("_ref")
        self.device = torch.device(device, self.device_index) if device == "cuda" else torch.device(device)
        self.total_training_steps = total_training_steps
        self.pad_token_id = pad_token_id
        self.eos_token_id = eos_token_id
        self.reward_manager = self._own_manager(reward_manager, num_nodes)
        self.policy_version = 0
        self.rollout_stats = RolloutStats()
        self.pass_metrics: dict[str, float] = {}
        """Pace of the last passes without gradient; the next update reports it."""

    def profilers(self) -> dict[str, ProfilerConfig]:
        """See `ProfiledWorker.profilers`."""
        policy = self.config
        return {"actor": policy.actor.profiler, "ref": policy.ref.profiler, "rollout": policy.rollout.profiler}

    def _own_manager(self, manager: Any, num_nodes: int) -> Any:
        """The reward manager of this rank, with its part of the reward processes; None where another rank answers."""
        ranks = ranks_per_engine(self.config.rollout)
        if manager is None or self.rank % ranks:
            return None
        if isinstance(manager, bytes):
            manager = unpack(manager)
        num_engines = max(1, self.world_size // ranks)
        manager = shared_manager(manager, per_node=max(1, num_engines // num_nodes), in_all=num_engines)
        track_section(manager.config, "reward")
        return manager

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model into the training engine, the rollout onto it, and the reference if there is one."""
        self.ensure_process_group(self.device.type)
        actor, model = self.config.actor, self.config.model
        self.engine = FSDPEngine(
            model,
            actor.fsdp_config,
            actor.optim,
            module="policy",
            device=self.device,
            total_training_steps=self.total_training_steps,
            share_prompts=actor.use_prefix_grouper,
        )
        self._register_dispatch_collect_info("actor", self.engine.dp_rank, self.engine.speaks)
        self.reference = None
        if self.has_reference and self.engine.has_adapters:
            # Without its adapters the actor is the reference: a second model would be the same once more.
            self._register_dispatch_collect_info("ref", self.engine.dp_rank, self.engine.speaks)
        elif self.has_reference:
            self.reference = FSDPEngine(
                model,
                self.config.ref.fsdp_config,
                None,
                module="policy",
                device=self.device,
                share_prompts=actor.use_prefix_grouper,
            )
            self._register_dispatch_collect_info("ref", self.reference.dp_rank, self.reference.speaks)
        # The rollout looks at what memory is left for its cache.
        self.engine.park()
        self.rollout = build_rollout(self.engine, self.config, self.device, self._tokenizer())
        ranks = ranks_per_engine(self.config.rollout)
        self._register_dispatch_collect_info("rollout", self.rank // ranks, self.rank % ranks == 0)
        of_tokenizer = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids = tuple(sorted({*eos_token_ids(self.engine.module.model), *of_tokenizer}))
        self.rollout_work = RolloutWork(
            self.engine.flops_counter,
            self.engine.module.model.config,
            rollout_dtype(self.engine, self.config.rollout),
            self.device,
            ranks,
        )
        self.weight_sync = WeightSync(self.engine, self.rollout, self.config.rollout)
        self._push_weights()
        if not self.rollout.shares_storage:
            # A critic beside this worker may be loaded next.
            self._let_rollout_sleep()
        self.rollout_stats = RolloutStats()  # What the start takes is no step's.

    def _tokenizer(self) -> Any:
        """Of the policy, where a stop string needs it."""
        rollout, model = self.config.rollout, self.config.model
        if not rollout.stop and not rollout.val_kwargs.stop:
            return None
        return load_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)

    def _push_weights(self) -> None:
        self.rollout_stats += self.weight_sync.push(self.policy_version)
        self.engine.park()

    def _let_rollout_sleep(self) -> None:
        if self.config.rollout.free_cache_engine:
            # A copy of trained weights is sent anew, so it may be forgotten; the frozen base of adapters is sent once.
            self.rollout.sleep(level=1 if self.engine.has_adapters else 2)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, version: int) -> None:
        """Hands the actor's weights to the rollout, as policy ``version``."""
        self.policy_version = version
        self._push_weights()

    sync_weights = update_weights

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rollout"))
    @profiled("rollout")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Samples a response for every row.

        ``meta_info["validate"]``: by ``rollout.val_kwargs``. ``meta_info["greedy"]``: the most likely token every time,
        whatever the temperature and the truncation, as ReMax's baseline needs it.

        With a reward manager that takes single responses each is scored as soon as it is finished, and what became of that
        comes back as ``reward_outcome``.
        """
        validate, greedy = prompts.meta_info.get("validate", False), prompts.meta_info.get("greedy", False)
        sampling = self._sampling_params(validate=validate, greedy=greedy)
        if getattr(self.rollout, "lost_weights", False):
            # It has slept since they were sent: responses were asked for twice between two updates.
            self._push_weights()
        self.rollout.wake_up()
        requests = requests_from_dataproto(prompts)
        scorer = None if self.reward_manager is None else self.reward_manager.scorer()
        num_padding = prompts.meta_info.get(NUM_PADDING, 0)
        scoring = None if scorer is None else EarlyScoring(self.reward_manager, scorer, prompts, requests, num_padding)
        responses = self.rollout.generate(requests, sampling, None if scoring is None else scoring.submit)
        if not validate:
            # An engine of somebody's own may keep none.
            stats = getattr(self.rollout, "stats", RolloutStats())
            self.rollout_stats += stats + self.rollout_work.of(requests, responses, stats)
        self._let_rollout_sleep()
        batch = responses_to_dataproto(prompts, responses, pad_token_id=self.pad_token_id)
        if scoring is not None:
            batch.non_tensor_batch[OUTCOME_COLUMN], seconds = scoring.collect(responses)
            if not validate:
                self.rollout_stats += RolloutStats(reward_wait_seconds=seconds)
        return batch

    def _sampling_params(self, *, validate: bool = False, greedy: bool = False) -> SamplingParams:
        rollout = self.config.rollout
        source = rollout.val_kwargs if validate else rollout
        return sampling_of(rollout, source, self.eos_token_ids, greedy=greedy)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_rollout_stats(self) -> RolloutStats:
        """What the rollout has done since the last call, for training."""
        stats, self.rollout_stats = self.rollout_stats, RolloutStats()
        return stats

    @property
    def _temperature(self) -> float:
        """Temperature of the policy that is trained: it is the one that the training responses are sampled from."""
        return self._sampling_params().policy_temperature

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    @profiled("actor")
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """``old_log_probs`` [batch, response]: the actor's log-probs of the responses.

        With ``actor.calculate_sum_pi_squared`` also ``sum_pi_squared`` [batch, response]: the sum over the vocabulary of the
        squared probabilities of each token's distribution.
        """
        names = {"log_probs": "old_log_probs"}
        if self.config.actor.calculate_sum_pi_squared:
            names["sum_pi_squared"] = "sum_pi_squared"
        return self._infer(self.engine, data, names, log_prob_kwargs(self.config.rollout), stage="old_log_prob")

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("ref"))
    @profiled("ref")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """``ref_log_prob`` [batch, response]: the reference's log-probs of the responses."""
        assert self.has_reference, "this worker was started without the reference role"
        names, batching = {"log_probs": "ref_log_prob"}, log_prob_kwargs(self.config.ref)
        if self.reference is not None:
            return self._infer(self.reference, data, names, batching, stage="ref")
        with self.engine.adapters_off():
            return self._infer(self.engine, data, names, batching, stage="ref")

    def _infer(
        self,
        engine: FSDPEngine,
        data: DataProto,
        names: dict[str, str],
        batching: dict[str, int | None],
        *,
        stage: str,
    ) -> DataProto:
        """The outputs of ``engine`` under their names in a batch; on the CPU, as everything that goes to the driver."""
        start = time.perf_counter()
        outputs = engine.infer_batch(data, temperature=self._temperature, outputs=tuple(names), **batching)
        on_cpu = {names[name]: value.cpu() for name, value in outputs.items()}
        self.pass_metrics |= perf_metrics(engine, name=stage, seconds=time.perf_counter() - start)
        engine.park()
        return DataProto.from_dict(tensors=on_cpu)

    @register(dispatch_mode=make_nd_compute_metric_dispatch_fn("actor"))
    @profiled("actor")
    def update_actor(self, data: DataProto) -> dict[str, float]:
        """One pass over the planned mini-batches; the metrics are those of all ranks together."""
        actor, batching = self.config.actor, update_kwargs(self.config.actor)
        start = time.perf_counter()
        metrics = run_mini_batches(
            self.engine,
            data,
            make_policy_loss(actor),
            name="actor",
            outputs=("log_probs", "entropy", "top1_log_probs"),
            temperature=self._temperature,
            loss_scale_factor=actor.loss_scale_factor or data.meta_info["max_response_length"],
            batching=batching,
            prepare=make_preparation(actor, self.engine, temperature=self._temperature, batching=batching),
        )
        perf = self.pass_metrics | perf_metrics(self.engine, name="actor", seconds=time.perf_counter() - start)
        self.pass_metrics = {}
        self.engine.park()
        return rollout_difference(metrics) | perf

    def close(self) -> None:
        """Ends what has processes of its own: a rollout engine, a reward manager."""
        for part in (getattr(self, "rollout", None), self.reward_manager):
            if close := getattr(part, "close", None):
                close()

    @property
    def checkpoint_config(self) -> CheckpointConfig:
        """Contents of the model's checkpoints."""
        return self.config.actor.checkpoint
