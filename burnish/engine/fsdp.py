"""The engine: one Hugging Face model that is trained or only read; actor, critic and reference are the same class."""

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burnish.config import CriticModelConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from burnish.engine import checkpoint, ranks
from burnish.engine.base import LossFn, Outputs
from burnish.engine.layout import Layout, Replicated, Sharded, named_weights
from burnish.engine.micro_batches import split_rows
from burnish.engine.optimizer import MasterOptimizer
from burnish.model.load import load_backbone, load_causal_lm
from burnish.model.packing import Packed, pack
from burnish.model.policy import PolicyModule, ValueModule, checkpoint_activations
from burnish.protocol import DataProto
from burnish.utils.errors import CheckpointError, ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The compute dtype that ``fsdp_config.dtype`` names; ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in _DTYPES:
        raise ConfigError(f"fsdp_config.dtype={name}: known are auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _import_external(name: str) -> None:
    """Imports the module that registers a user's model classes with transformers."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"model.external_lib={name}: this module cannot be imported: {error}.") from error


class FSDPEngine:
    """Trains or reads one model, replicated or sharded; see `burnish.engine.base.BaseEngine` for what each method means.

    With more than one rank the default process group must exist before the engine is made. All ranks hold different
    rows (data parallel) and call every method together.

    Args:
        model_config: which model, and whether activations are recomputed in the backward.
        engine_config: layout and compute dtype.
        optim_config: AdamW and its schedule; None for a model that is only read.
        module: "policy" gives ``log_probs``, ``entropy``, ``sum_pi_squared``; "value" gives ``values``.
        device: where this rank computes.
        total_training_steps: trainer steps of the run, for the learning-rate schedule.
        model: a model from `burnish.model.load` to take over instead of loading ``model_config.path``.
    """

    def __init__(
        self,
        model_config: HFModelConfig | CriticModelConfig,
        engine_config: FSDPEngineConfig,
        optim_config: FSDPOptimizerConfig | None,
        *,
        module: Literal["policy", "value"] = "policy",
        device: torch.device | str = "cpu",
        total_training_steps: int = 1,
        model: PreTrainedModel | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.dp_rank, self.dp_size = ranks.rank(), ranks.world_size()
        self.model_config = model_config
        self.kind = module
        dtype = resolve_dtype(engine_config.dtype, self.device)
        trained = optim_config is not None
        # Masters have at least float32; a model that is only read needs none.
        self._load_dtype = torch.promote_types(dtype, torch.float32) if trained else dtype
        if model_config.external_lib:
            _import_external(model_config.external_lib)
        if model is None and model_config.path is None:
            raise ConfigError("A model path is needed: set actor_rollout_ref.model.path (or critic.model.path).")
        whole = self._build(model_config.path, model)
        if trained and model_config.enable_gradient_checkpointing:
            checkpoint_activations(whole.model)
        self._layout: Layout
        if self.dp_size == 1 or engine_config.fsdp_size == 1:
            self._layout = Replicated(whole, dtype, self.device, trained)
        else:
            self._layout = Sharded(
                whole,
                dtype,
                self.device,
                trained,
                fsdp_size=engine_config.fsdp_size,
                reshard_after_forward=engine_config.reshard_after_forward,
            )
        self._optimizer = (
            None if optim_config is None else MasterOptimizer(self._layout, optim_config, total_training_steps)
        )

    def _build(self, path: str | None, model: PreTrainedModel | None = None) -> PolicyModule | ValueModule:
        """The module at ``path``, or around ``model``, whole on the CPU in the master dtype."""
        how: dict[str, Any] = {
            "trust_remote_code": bool(self.model_config.trust_remote_code),
            "override_config": self.model_config.override_config,
        }
        if self.kind == "policy":
            return PolicyModule(load_causal_lm(str(path), self._load_dtype, **how) if model is None else model)
        value = ValueModule(load_backbone(str(path), self._load_dtype, **how) if model is None else model)
        if path is not None:
            checkpoint.load_value_head(value, path)
        return value

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
    def all_ranks(self) -> ranks.AllRanks:
        """Sums and values of all ranks' rows."""
        return ranks.AllRanks(self.device)

    def global_batch_info(self, batch: DataProto, loss_scale_factor: float | None = None) -> dict[str, Any]:
        """The denominators of one optimizer step whose rows on this rank are ``batch``, counted over all ranks.

        FSDP averages gradients over ranks; a rank's own token count as denominator would let ranks with few tokens weigh
        more. Counts are of ``loss_mask``, or ``response_mask`` where there is none yet.
        """
        mask = self._tensor(batch, "loss_mask", "response_mask").bool()
        tokens, rows = float(mask.sum()), float(mask.any(1).sum())
        tokens, rows = ranks.all_reduce_numbers([tokens, rows], "sum", self.device)
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
        self.module.eval()
        rows = _Rows(batch)
        result: dict[str, Tensor] = {}
        for indices in self._micro_batches(rows, micro_batch_size, max_token_len):
            values = self.module(rows.pack(indices, self.device), temperature, outputs)
            for name, value in values.items():
                if name not in result:
                    result[name] = value.new_zeros(len(rows), rows.response_width)
                if indices:
                    result[name][torch.tensor(indices, device=value.device)] = value
        self._layout.after_inference()
        return result

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
        rows = _Rows(batch)
        on_device = batch.to(self.device)
        shares: dict[str, Tensor] = {}
        for indices in self._micro_batches(rows, micro_batch_size, max_token_len):
            values = self.module(rows.pack(indices, self.device), temperature, outputs)
            if not indices:
                # Nothing of ours is left, but the other ranks wait in the collectives of this forward and backward.
                sum(value.sum() for value in values.values()).backward()  # type: ignore[union-attr]
                continue
            loss, metrics = loss_fn(values, on_device.select_idxs(indices), info)
            loss.backward()
            for name, share in metrics.items():
                share = torch.as_tensor(share).detach().double()
                shares[name] = _combine(name, shares[name], share) if name in shares else share
        self.module.eval()
        return ranks.merge_metrics(_to_floats(shares))

    def optimizer_step(self, step: int) -> dict[str, float]:
        """One AdamW update at trainer step ``step`` (from 1) with the gradient gathered so far, clipped; clears it.

        Returns:
            ``grad_norm`` before clipping, ``lr``, ``skipped_updates``: 1 when the gradient was not finite, and nothing
            was changed.
        """
        if self._optimizer is None:
            raise ConfigError("This engine only reads its model: it was made without an optimizer configuration.")
        return self._optimizer.step(step)

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole gradient of every trained parameter, averaged over the ranks, by the module's parameter names."""
        self._layout.reduce_grads()
        return {name: self._layout.gather(name, grad).clone() for name, grad in self._layout.local_grads().items()}

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name and whole tensor, in the compute dtype, of every weight; a tied pair comes once.

        Replicated: the weights themselves, not copies. Sharded: gathered one by one, so all ranks must go through it.
        """
        return named_weights(self._layout)

    def non_finite_weights(self) -> list[str]:
        """Names of the weights, masters and optimizer moments that hold NaN or infinity on any rank, the same on every rank."""
        return checkpoint.non_finite(self._layout, self._optimizer, self.device)

    def save_checkpoint(self, path: str | Path, contents: Sequence[str] = ("model", "optimizer")) -> None:
        """Writes the model in Hugging Face format and ``optimizer.pt`` to the folder ``path``.

        Raises:
            CheckpointError: something in it is not finite, on every rank and before anything is written: nobody could go
                on from such a checkpoint, and it would take the place of one that is sound.
        """
        broken = self.non_finite_weights()
        if broken:
            more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
            raise CheckpointError(
                f"{path} was not written: {broken[0]!r}{more} of the model or its optimizer holds NaN or infinity. "
                f"The checkpoint before is unharmed; resume from it with a lower learning rate."
            )
        checkpoint.save(self._layout, self._optimizer, Path(path), contents)

    def load_checkpoint(self, path: str | Path, contents: Sequence[str] = ("model", "optimizer")) -> None:
        """Continues from a folder written by `save_checkpoint`, in place, whatever layout and ranks wrote it.

        Raises:
            CheckpointError: there is no such folder, or its optimizer state is missing or of another model.
        """
        if not (Path(path) / "config.json").exists():
            raise CheckpointError(f"{path} is no checkpoint of a model: it has no config.json.")
        source = self._build(str(path)) if "model" in contents else None
        checkpoint.load(self._layout, self._optimizer, Path(path), contents, source)

    def _micro_batches(self, rows: "_Rows", micro_batch_size: int | None, max_token_len: int | None) -> list[list[int]]:
        """This rank's micro-batches, filled up with empty ones to the largest number that any rank has."""
        micro_batches = split_rows(rows.lengths, micro_batch_size=micro_batch_size, max_token_len=max_token_len)
        (most,) = ranks.all_reduce_numbers([float(len(micro_batches))], "max", self.device)
        return micro_batches + [[]] * (int(most) - len(micro_batches))

    @staticmethod
    def _tensor(batch: DataProto, *names: str) -> Tensor:
        assert batch.batch is not None
        present = set(batch.batch.keys())
        return next(batch.batch[name] for name in names if name in present)


class _Rows:
    """CPU copies of what packing needs of a batch, made once for all its micro-batches."""

    def __init__(self, batch: DataProto) -> None:
        assert batch.batch is not None
        self.input_ids = batch.batch["input_ids"].cpu()
        self.attention_mask = batch.batch["attention_mask"].cpu().bool()
        self.response_width = batch.batch["responses"].shape[1]
        if "response_mask" in set(batch.batch.keys()):
            self.label_mask = batch.batch["response_mask"].cpu().bool()
        else:
            self.label_mask = self.attention_mask[:, self.attention_mask.shape[1] - self.response_width :]
        self.lengths: list[int] = self.attention_mask.sum(1).tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def pack(self, indices: list[int], device: torch.device) -> Packed:
        """The rows ``indices`` as one packed row."""
        index = torch.tensor(indices, dtype=torch.int64)
        return pack(self.input_ids[index], self.attention_mask[index], self.label_mask[index], device)


def _combine(name: str, a: Tensor, b: Tensor) -> Tensor:
    """As `ranks.combine`, on tensors: a float would synchronise the device after every micro-batch."""
    if name.endswith("_max"):
        return torch.maximum(a, b)
    if name.endswith("_min"):
        return torch.minimum(a, b)
    return a + b


def _to_floats(shares: dict[str, Tensor]) -> dict[str, float]:
    if not shares:
        return {}
    return dict(zip(shares, torch.stack(list(shares.values())).tolist(), strict=True))
