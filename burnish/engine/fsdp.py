"""The engine: one Hugging Face model that is trained or only read; actor, critic and reference are the same class."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burnish.config import CriticModelConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from burnish.engine import out_of_memory, ranks
from burnish.engine.base import LossFn, Outputs
from burnish.engine.building import ModuleBuilder, make_layout
from burnish.engine.checkpoint import EngineCheckpoint
from burnish.engine.compute_dtype import resolve_dtype
from burnish.engine.keys import Keys
from burnish.engine.layout import Module, Sharded
from burnish.engine.memory import ActivationPlanner, MemoryPlan, free_memory, total_memory
from burnish.engine.mesh import make_mesh
from burnish.engine.offload import can_offload
from burnish.engine.optimizer import MasterOptimizer
from burnish.engine.prepare import prepare_module
from burnish.engine.residence import Residence
from burnish.engine.rows import Rows
from burnish.engine.shares import combine_shares, to_floats
from burnish.engine.state_bytes import Head, head_bytes, optimizer_bytes, update_bytes
from burnish.engine.weights_out import BUCKET_BYTES, named_weights
from burnish.model import lora
from burnish.model.activations import ActivationOffload
from burnish.model.flops import FlopsCounter
from burnish.model.fused_layers import fused_blocks
from burnish.model.packing import Packed
from burnish.model.policy import PolicyModule, ValueModule
from burnish.model.sequence_parallel import check_can_share
from burnish.protocol import DataProto
from burnish.utils import heap, progress
from burnish.utils.errors import ConfigError, ModelError
from burnish.utils.transfers import Transfers

logger = logging.getLogger("burnish.engine")

# Of a CPU's memory: what its processes may keep of freed memory between two uses, together.
_KEPT_SHARE = 1 / 8


class FSDPEngine:
    """Trains or reads one model, replicated or sharded; see `burnish.engine.base.BaseEngine` for what each method means.

    With more than one rank the default process group must exist before the engine is made. Ranks hold different rows
    (data parallel), or share the tokens of the same rows (sequence parallel), and call every method together.

    Args:
        model_config: which model, and whether activations are recomputed in the backward.
        engine_config: layout and compute dtype.
        optim_config: the optimizer and its schedule; None for a model that is only read.
        module: "policy" gives ``log_probs``, ``entropy``, ``sum_pi_squared``, ``top1_log_probs``; "value" gives ``values``;
            "reward" as well, by the head of a sequence classifier.
        device: where this rank computes.
        total_training_steps: trainer steps of the run, for the learning-rate schedule.
        model: a model from `burnish.model.load` to take over instead of loading ``model_config.path``.
        share_prompts: whether rows with the same prompt compute it once in a micro-batch; None: where it saves enough.
        keys: what its configuration keys are called in messages; None: as ``module`` says.
    """

    def __init__(
        self,
        model_config: HFModelConfig | CriticModelConfig,
        engine_config: FSDPEngineConfig,
        optim_config: FSDPOptimizerConfig | None,
        *,
        module: Literal["policy", "value", "reward"] = "policy",
        device: torch.device | str = "cpu",
        total_training_steps: int = 1,
        model: PreTrainedModel | None = None,
        share_prompts: bool | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.device = torch.device(device)
        self._share_prompts = share_prompts
        self._mesh = make_mesh(engine_config.ulysses_sequence_parallel_size, self.device.type)
        self.dp_rank, self.dp_size, self.sp_size = self._mesh.dp_rank, self._mesh.dp_size, self._mesh.sp_size
        self.model_config = model_config
        self.engine_config = engine_config
        self.kind = module
        self._builder = builder = ModuleBuilder(model_config, module)
        if model is None and model_config.path is None:
            raise ConfigError("A model path is needed: set actor_rollout_ref.model.path (or critic.model.path).")
        dtype = resolve_dtype(engine_config.dtype, self.device, lambda: builder.config_of(model))
        trained = optim_config is not None
        if trained and self.device.type == "cpu":
            heap.keep_freed_memory()
        # Masters have at least float32; a model that is only read needs none, nor does one beside its adapters.
        master_dtype = torch.promote_types(dtype, torch.float32)
        self.has_adapters = lora.wants_adapters(model_config)
        """Whether adapters (LoRA) are trained instead of the model."""
        builder.dtype = master_dtype if trained and not self.has_adapters else dtype
        whole, from_rank_zero = builder.build_everywhere(model)
        check_can_share(whole.model.config, self.sp_size)
        prepare_module(
            whole, model_config, trained=trained, has_adapters=self.has_adapters, dtype=dtype, device=self.device
        )
        self._keys = keys or Keys.of(module, trained=trained)
        self._transfers = Transfers(self.device)
        self._planner = self._make_planner(whole, dtype, trained)
        self._layout = make_layout(whole, dtype, self.device, engine_config, from_rank_zero=from_rank_zero)
        self._flops_counter, self._flops = FlopsCounter(whole.model, getattr(whole, "value_head", None)), 0.0
        self._optimizer = (
            None if optim_config is None else MasterOptimizer(self._layout, optim_config, total_training_steps)
        )
        if not can_offload(self.device):
            self._keys.say_what_has_no_effect(engine_config, model_config, trained=trained)
        self._residence = Residence(self._layout, self._optimizer, engine_config, self._transfers)
        self._checkpoint = EngineCheckpoint(
            self._layout, self._optimizer, self._residence, self._builder.build, self.device
        )

    def _make_planner(self, whole: Module, dtype: torch.dtype, trained: bool) -> ActivationPlanner | None:
        """What decides about the activations of the blocks; None where the model names none, or nothing is to be decided."""
        mode, config = self.model_config.enable_gradient_checkpointing, self.engine_config
        offload = None
        if trained and self.model_config.enable_activation_offload and can_offload(self.device):
            offload = ActivationOffload(self._transfers)
        compiled = config.use_torch_compile
        if compiled and fused_blocks(whole.model):
            logger.warning(
                "%s has no effect: the layers of this model are fused.", self._keys.fsdp("use_torch_compile=true")
            )
            compiled = False
        if not compiled and not (trained and (mode or offload)):
            return None
        try:
            return ActivationPlanner(
                whole, dtype, self.device.type, mode=trained and mode, offload=offload, compiled=compiled
            )
        except ModelError:
            if mode == "auto" and offload is None and not compiled:
                return None
            raise

    @property
    def module(self) -> PolicyModule | ValueModule:
        """The module in its layout; ``module.model`` is the Hugging Face model."""
        return self._layout.module

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self._layout.dtype

    @property
    def shares_storage(self) -> bool:
        """Whether ``module.model``'s parameters are whole and stay at their addresses, so that a rollout can read them."""
        return self._layout.shares_storage

    @property
    def speaks(self) -> bool:
        """Whether this rank's results stand for its group, whose ranks all have the same."""
        return self._mesh.speaks

    @property
    def flops_counter(self) -> FlopsCounter:
        """Counts the operations of the whole model."""
        return self._flops_counter

    def take_flops(self) -> float:
        """Operations of this rank's passes since the last call: of the tokens really computed, each once."""
        flops, self._flops = self._flops, 0.0
        return flops

    @property
    def all_ranks(self) -> ranks.AllRanks:
        """Sums and values of all ranks' rows."""
        return ranks.AllRanks(self.device, speaks=self._mesh.speaks)

    def global_batch_info(self, batch: DataProto, loss_scale_factor: float | None = None) -> dict[str, Any]:
        """The denominators of one optimizer step whose rows on this rank are ``batch``, counted over all ranks.

        FSDP averages gradients over ranks; a rank's own token count as denominator would let ranks with few tokens weigh
        more. Counts are of ``loss_mask``, or ``response_mask`` where there is none yet.
        """
        mask = self._tensor(batch, "loss_mask", "response_mask").bool()
        tokens, rows = float(mask.sum()), float(mask.any(1).sum())
        counted = [tokens, rows] if self._mesh.speaks else [0.0, 0.0]
        tokens, rows = ranks.all_reduce_numbers(counted, "sum", self.device)
        return {
            "dp_size": self.dp_size,
            "batch_num_tokens": int(tokens),
            "global_batch_size": int(rows),
            "loss_scale_factor": loss_scale_factor,
        }

    @torch.no_grad()
    def infer_batch(
        self,
        batch: DataProto,
        *,
        temperature: float = 1.0,
        outputs: Sequence[str] = ("log_probs",),
        micro_batch_size: int | None = None,
        max_token_len: int | None = None,
    ) -> Outputs:
        """``outputs`` of the rows in their order: [batch, response] float32, zero where ``response_mask`` is false."""
        if self.module.training:
            self.module.eval()
        self._residence.fetch()
        rows = Rows(batch, self._share_prompts)
        found: dict[str, list[Tensor]] = {}
        order: list[int] = []
        # Without its adapters the actor is the reference, whose passes have keys of their own.
        is_reference = self.has_adapters and not lora.adapters_enabled(self.module)
        keys = Keys.of(self.kind, trained=False) if is_reference else self._keys
        current = keys.micro_batch(update=False, by_rows=max_token_len is None)
        with out_of_memory.stage(keys.infer_stage, self.device, current, self._step_keys()):
            for indices in self._micro_batches(rows, micro_batch_size, max_token_len):
                rows.describe(indices, current, self.sp_size)
                values = self._forward(rows.pack(indices, self.device), temperature, outputs)
                progress.tick()
                order += indices
                for name, value in values.items():
                    found.setdefault(name, []).append(value[: len(indices)])
        self._layout.after_inference()
        # At once: putting every micro-batch in its place would let the host wait for each.
        places = torch.tensor(order, dtype=torch.int64).argsort().to(self.device)
        return {name: torch.cat(parts)[places] for name, parts in found.items()}

    def train_batch(
        self,
        batch: DataProto,
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        outputs: Sequence[str] = ("log_probs",),
        micro_batch_size: int | None = None,
        max_token_len: int | None = None,
        global_batch_info: dict[str, Any] | None = None,
    ) -> dict[str, float]:
        """Adds the gradient of ``loss_fn`` over ``batch``, micro-batch by micro-batch; the weights stay.

        Args:
            loss_fn: gets the outputs of a micro-batch, its rows on this device, and ``global_batch_info``; see `LossFn`.
            global_batch_info: denominators; `global_batch_info` of ``batch`` when None.

        Returns:
            the metrics of ``loss_fn`` over all micro-batches and ranks, the same on every rank.
        """
        info = self.global_batch_info(batch) if global_batch_info is None else global_batch_info
        self.module.train()
        self._residence.fetch()
        rows = Rows(batch, self._share_prompts)
        shares: dict[str, Tensor] = {}
        current = self._keys.micro_batch(update=True, by_rows=max_token_len is None)
        with out_of_memory.stage(self._keys.update_stage, self.device, current, self._update_keys()):
            micro_batches = self._micro_batches(rows, micro_batch_size, max_token_len, plans=True)
            # Rows that one micro-batch after the other takes as views: choosing them anew would let the host wait for each.
            on_device, begin = batch.select_idxs(list(chain(*micro_batches))).to(self.device), 0
            for number, indices in enumerate(micro_batches, 1):
                rows.describe(indices, current, self.sp_size)
                self._layout.start_micro_batch(is_last=number == len(micro_batches))
                progress.tick()
                values = self._forward(rows.pack(indices, self.device), temperature, outputs)
                if not indices:
                    # Nothing of ours is left, but the other ranks wait in the collectives of this forward and backward.
                    sum(value.sum() for value in values.values()).backward()  # type: ignore[union-attr]
                    continue
                loss, metrics = loss_fn(values, on_device.slice(begin, begin + len(indices)), info)
                begin += len(indices)
                loss.backward()
                for name, share in metrics.items():
                    share = torch.as_tensor(share).detach().double()
                    shares[name] = combine_shares(name, shares[name], share) if name in shares else share
        self.module.eval()
        return ranks.merge_metrics(to_floats(shares), speaks=self._mesh.speaks)

    def optimizer_step(self, step: int) -> dict[str, float]:
        """One update of the optimizer at trainer step ``step`` (from 1) with the gradient gathered so far, clipped; clears it.

        Returns:
            ``grad_norm`` before clipping, ``lr``, ``skipped_updates``: 1 when the gradient was not finite, and nothing
            was changed.
        """
        if self._optimizer is None:
            raise ConfigError("This engine only reads its model: it was made without an optimizer configuration.")
        self._residence.fetch()
        self._residence.note_change()
        with out_of_memory.stage(self._keys.step_stage, self.device, None, self._step_keys()):
            return self._optimizer.step(step)

    def park(self) -> None:
        """Sends to the CPU what `param_offload` keeps there between uses; the next use brings it back.

        Call it when the stage is over: after the last update of a step, after a log-prob pass.
        """
        self._residence.park()
        if self.device.type == "cpu":
            heap.give_back(above=int(_KEPT_SHARE * total_memory(self.device, ranks.world_size())))

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """How the last update fitted into memory, where `enable_gradient_checkpointing` is auto."""
        return None if self._planner is None else self._planner.plan

    def _step_keys(self) -> list[str]:
        """Keys that would leave more memory to anything but an update; a model that is only read has no such state."""
        return [] if self._optimizer is None or not self._can_move_state else self._keys.for_step(self.engine_config)

    @property
    def _can_move_state(self) -> bool:
        """Whether weights and optimizer state lie on a device, from where keys move them to the CPU."""
        on_cpu_anyway = self.engine_config.offload_policy and isinstance(self._layout, Sharded)
        return can_offload(self.device) and not on_cpu_anyway

    def _update_keys(self) -> list[str]:
        """Keys that would leave an update more memory."""
        recomputes_all = self._planner is not None and self._planner.recomputes_all
        return [
            *self._keys.for_update(self.model_config, recomputes_all=recomputes_all, can_move=can_offload(self.device)),
            *self._step_keys(),
        ]

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole gradient of every trained parameter, averaged over the ranks, by the module's parameter names."""
        self._layout.reduce_grads()
        return {name: self._layout.gather(name, grad).clone() for name, grad in self._layout.local_grads().items()}

    def named_weights(
        self, *, bucket_bytes: int = BUCKET_BYTES, adapters_only: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name and whole tensor, in the compute dtype, of every weight; a tied pair comes once.

        A model with adapters gives its base and after it the adapters, unmerged. Replicated: the weights themselves, not
        copies. Sharded: gathered in buckets, so all ranks must go through it.

        Args:
            bucket_bytes: of the whole tensors that are gathered at a time.
            adapters_only: leaves out the base, which never changes.
        """
        self._residence.fetch(wait=True)
        yield from named_weights(self._layout, bucket_bytes=bucket_bytes, adapters_only=adapters_only)

    def adapters_off(self) -> AbstractContextManager[None]:
        """Inside, the model is its base: what it was before the first update, as the reference of a policy with adapters."""
        return lora.adapters_off(self.module)

    def export_merged(self, path: str | Path) -> None:
        """Writes the model with its adapters added to its weights, in float32, in Hugging Face format; it stays as it is."""
        self._checkpoint.export_merged(Path(path))

    def non_finite_weights(self) -> list[str]:
        """Names of the weights, masters and optimizer moments that hold NaN or infinity on any rank, the same on every rank."""
        return self._checkpoint.non_finite()

    def save_checkpoint(
        self, path: str | Path, contents: Sequence[str] = ("model", "optimizer"), *, blocking: bool = True
    ) -> None:
        """Writes what ``contents`` names (of model, optimizer, extra, hf_model) to the folder ``path``.

        Args:
            blocking: False copies it to the CPU and leaves the writing to a thread; `checkpoint_written` tells when it is done.

        Raises:
            CheckpointError: something in it is not finite, on every rank and before anything is written: nobody could go
                on from such a checkpoint, and it would take the place of one that is sound. Or the disk does not take it.
        """
        self._checkpoint.save(Path(path), contents, blocking=blocking)

    def checkpoint_written(self, *, wait: bool) -> bool:
        """Whether this rank has nothing left to write of a checkpoint that was saved without blocking.

        Raises:
            CheckpointError: a file of it could not be written by this rank.
        """
        return self._checkpoint.written(wait=wait)

    def load_checkpoint(self, path: str | Path, contents: Sequence[str] = ("model", "optimizer")) -> None:
        """Continues from a folder written by `save_checkpoint`, in place, whatever layout and ranks wrote it.

        Raises:
            CheckpointError: there is no such folder, or something in it is missing or of another model; on every rank.
        """
        self._checkpoint.load(Path(path), contents)

    def _forward(self, packed: Packed, temperature: float, outputs: Sequence[str]) -> Outputs:
        """The module's outputs of all labels, also where the ranks of a group share the tokens."""
        parallel = self._mesh.sequence_parallel
        if parallel is not None:
            packed = parallel.slice(packed)
        self._flops += self._flops_counter.flops(
            packed.num_tokens, packed.context.num_pairs, packed.labels.numel(), backward=torch.is_grad_enabled()
        )
        values = self.module(packed, temperature, outputs)
        if self._planner is not None:
            self._planner.activations.end_forward()
        return values if parallel is None else parallel.gather(values)

    def _micro_batches(
        self, rows: "Rows", micro_batch_size: int | None, max_token_len: int | None, *, plans: bool = False
    ) -> list[list[int]]:
        """This rank's micro-batches, filled up with empty ones to the largest number that any rank has.

        Args:
            plans: decides how activations are kept, for the largest micro-batch and the least free memory of all ranks.
        """
        # A bound is of the tokens of one rank, of which a group holds sp_size times as many.
        cut: dict[str, Any] = {
            "micro_batch_size": micro_batch_size,
            "max_token_len": max_token_len,
            "num_sharing": self.sp_size,
        }
        micro_batches = rows.split(**cut)
        plans = plans and self._planner is not None and self._planner.is_automatic
        numbers = [float(len(micro_batches))]
        if plans:
            largest = max((rows.num_tokens(indices) for indices in micro_batches), default=1)
            numbers += [-(-largest // self.sp_size), -free_memory(self.device, ranks.world_size())]
        most, *memory = ranks.all_reduce_numbers(numbers, "max", self.device)
        if plans:
            assert self._planner is not None
            # Shards may be uneven. Ranks that share tokens must plan alike: a block that is recomputed exchanges them again.
            (fixed,) = ranks.all_reduce_numbers([float(self._fixed_bytes(int(memory[0])))], "max", self.device)
            self._planner.prepare(
                num_tokens=int(memory[0]),
                fixed_bytes=int(fixed),
                free_bytes=int(-memory[1]),
                keys=self._keys.micro_batch(update=True, by_rows=max_token_len is None).cut_key,
                num_micro_batches=int(most),
            )
        if max_token_len is not None and len(micro_batches) < most:
            # The others' number anyway: the same rows in more micro-batches, not in the same ones beside empty ones.
            micro_batches = rows.split(**cut, num_micro_batches=int(most))
        return micro_batches + [[]] * (int(most) - len(micro_batches))

    def _fixed_bytes(self, num_tokens: int) -> int:
        """Memory that an update still takes beside activations: gradients, moments, the head, gathered weights."""
        layout, optimizer, moments, head = self._layout, self._optimizer, 0, 0
        if optimizer is not None and not self.engine_config.optimizer_offload:
            masters = layout.masters()
            # Before the first step there are none.
            if not any(optimizer.state_tensors(name) for name in masters):
                moments = sum(optimizer_bytes(optimizer.config, m.numel(), m.itemsize) for m in masters.values())
        if isinstance(self.module, PolicyModule):
            weight = self.module.model.get_output_embeddings().weight
            head = head_bytes(num_tokens, Head.of(weight), on_gpu=self.device.type == "cuda")
        return update_bytes(
            missing_gradients=layout.missing_grad_bytes,
            passing=layout.passing_bytes,
            missing_moments=moments,
            head=head,
        )

    @staticmethod
    def _tensor(batch: DataProto, *names: str) -> Tensor:
        assert batch.batch is not None
        present = set(batch.batch.keys())
        return next(batch.batch[name] for name in names if name in present)
