"""An optimizer on the masters of a layout, with clipping by the global norm and a guard against non-finite gradients."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from burnish.config import FSDPOptimizerConfig
from burnish.engine import optimizers, ranks
from burnish.engine.layout import Layout
from burnish.engine.offload import StepOffload
from burnish.engine.schedule import lr_at
from burnish.utils.errors import CheckpointError

# An entry without a name is one of this optimizer.
_DEFAULT = "torch.optim.adamw.AdamW"
_PARTS = "parts"


class MasterOptimizer:
    """The optimizer that ``config`` names, AdamW (arXiv:1711.05101) if nothing is said, over the masters of ``layout``.

    Args:
        total_steps: trainer steps of the run, for the learning-rate schedule.
    """

    def __init__(self, layout: Layout, config: FSDPOptimizerConfig, total_steps: int) -> None:
        self.layout = layout
        self.config = config
        self.total_steps = total_steps
        # A Parameter around the master's own storage, so that torch updates it in place.
        self._parameters = {name: nn.Parameter(master) for name, master in layout.masters().items()}
        self._optimizer = optimizers.build_optimizer(list(self._parameters.values()), config)
        self._library = optimizers.library_of(self._optimizer)
        self._kind = f"{type(self._optimizer).__module__}.{type(self._optimizer).__qualname__}"
        self.offload: StepOffload | None = None
        """Where masters or states lie on the CPU between steps: brings them, some parameters at a time."""

    @torch.no_grad()
    def step(self, step: int) -> dict[str, float]:
        """One update at the learning rate of trainer step ``step`` (from 1); clears the gradient.

        A gradient that is not finite (or whose norm is beyond float32) changes nothing, neither weights nor moments nor
        the optimizer's count of steps: the update is skipped and counted.

        After a finite one nothing is looked at: it is clipped, and Adam moves a weight by a small multiple of the rate, so
        only a rate near the largest float32 can overflow. If that happens the next gradient is not finite, and
        `burnish.engine.checkpoint.non_finite` keeps the result out of every checkpoint.

        Returns:
            ``grad_norm`` before clipping, ``lr``, and ``skipped_updates`` (0 or 1).
        """
        self.layout.reduce_grads()
        grads = self.layout.local_grads()
        norm = self._global_norm(list(grads.values()))
        lr = lr_at(step, self.config, self.total_steps)
        skipped = not math.isfinite(norm)
        if not skipped:
            self._clip(list(grads.values()), norm)
            optimizers.set_rate(self._optimizer, lr)
            for names in [list(self._parameters)] if self.offload is None else self.offload.visit():
                self._update(names, grads)
                self.layout.publish_masters(names)
        self.layout.clear_grads()
        return {"grad_norm": norm, "lr": lr, "skipped_updates": float(skipped)}

    def _update(self, names: Iterable[str], grads: dict[str, Tensor]) -> None:
        """Moves the masters ``names``; an optimizer leaves parameters without a gradient alone."""
        moved = [(self._parameters[name], grads[name]) for name in names]
        for parameter, grad in moved:
            # A rank may hold no row of a small matrix, which kernels for quantised states are not made for.
            if grad.numel() or self._library == "torch":
                parameter.grad = grad
        optimizers.take_step(self._optimizer)
        for parameter, _ in moved:
            parameter.grad = None

    def _global_norm(self, grads: list[Tensor]) -> float:
        """L2 norm over all parameters and shards; the sum of squares is in float64 (one number per parameter)."""
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(grads)])
        return math.sqrt(float(self.layout.sum_over_shards(norms.square().sum())))

    def _clip(self, grads: list[Tensor], norm: float) -> None:
        if norm > self.config.clip_grad:
            torch._foreach_mul_(grads, self.config.clip_grad / norm)

    def state_tensors(self, name: str) -> list[Tensor]:
        """The plain tensors that the optimizer keeps for the parameter ``name``; none before its first step."""
        entry = self._optimizer.state.get(self._parameters[name], {})
        return [tensor for value in entry.values() for tensor in optimizers.plain_tensors(value)]

    def moments(self) -> dict[str, Tensor]:
        """What tells whether the state is finite, by names that are the same on every rank.

        Of torch's optimizers each state itself, as ``exp_avg of <parameter>``. Of others, whose states may be quantised on
        one rank and not on another, ``state of <parameter>``: the largest entry of each of its scales and states.
        """
        found: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            entry = self._optimizer.state.get(parameter, {})
            if self._library == "torch":
                tensors = {key: value for key, value in entry.items() if isinstance(value, Tensor) and value.ndim > 0}
                found |= {f"{key} of {name}": value for key, value in tensors.items()}
            else:
                # Codes of one byte say nothing; what they are multiplied with does.
                floats = [x for x in self.state_tensors(name) if x.is_floating_point() and x.element_size() > 1]
                largest = [x.abs().max().to(parameter) for x in floats if x.numel()]
                found[f"state of {name}"] = torch.stack(largest) if largest else parameter.new_zeros(1)
        return found

    def state_dict(self, keep: bool = True) -> dict[str, Any]:
        """The state of every parameter by name, on the CPU, and masters where the model is saved in less precision.

        A state of floating-point tensors in the parameter's shape is stored whole, and any layout reads it. Any other (8-bit
        codes with a scale for every block, say) is stored as the parts that the ranks hold.

        All ranks call it, since the parts are gathered; a rank that does not write passes ``keep=False`` and gets nothing.
        """
        entries = {name: self._optimizer.state.get(p, {}) for name, p in self._parameters.items()}
        in_parts = self._in_parts(entries)
        state: dict[str, Any] = {}
        for name, parameter in self._parameters.items():
            entry = entries[name]
            whole: dict[str, Any] = {}
            if parameter.dtype != self.layout.dtype:
                whole["master"] = self._gathered(name, parameter.detach(), keep)
            if in_parts[name]:
                whole[_PARTS] = self.layout.gather_objects(optimizers.take_out(entry))
            for key, value in {} if in_parts[name] else entry.items():
                if isinstance(value, Tensor):
                    whole[key] = value.to("cpu") if value.ndim == 0 else self._gathered(name, value, keep)
                else:
                    whole[key] = value
            if self._kind != _DEFAULT:
                whole["optimizer"] = self._kind
            state[name] = whole
        return state if keep else {}

    def _in_parts(self, entries: dict[str, dict[str, Any]]) -> dict[str, bool]:
        """Which parameters' states cannot be put together, on any rank: all ranks gather alike."""
        elementwise = [
            not entry or optimizers.is_elementwise(entry, self._parameters[n]) for n, entry in entries.items()
        ]
        flags = [float(not whole) for whole in elementwise]
        if self._library != "torch":
            # A rank without a row of a parameter has no state of it.
            held = ranks.all_reduce_numbers([float(bool(entry)) for entry in entries.values()], "max", self._device)
            flags = [max(f, h - bool(entry)) for f, h, entry in zip(flags, held, entries.values(), strict=True)]
        flags = ranks.all_reduce_numbers(flags, "max", self._device)
        return {name: bool(flag) for name, flag in zip(entries, flags, strict=True)}

    @property
    def _device(self) -> torch.device:
        # Where the ranks meet: masters may lie on the CPU.
        return self.layout.device

    def _gathered(self, name: str, local: Tensor, keep: bool) -> Tensor | None:
        whole = self.layout.gather(name, local)
        return whole.to("cpu") if keep else None

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict`; of any layout and number of ranks where the state is stored whole.

        Raises:
            CheckpointError: the state belongs to another model or optimizer, or is in parts of another layout.
        """
        differing = sorted(set(state) ^ set(self._parameters))
        if differing:
            raise CheckpointError(
                f"The optimizer state is of another model: parameter {differing[0]!r} is in one only."
            )
        for name, parameter in self._parameters.items():
            entry = dict(state[name])
            if "master" in entry:
                parameter.copy_(self.layout.scatter(name, entry.pop("master")))
            kind = entry.pop("optimizer", _DEFAULT)
            # An AdamW that has not stepped says nothing.
            if kind != self._kind and (entry or kind != _DEFAULT):
                raise CheckpointError(
                    f"The optimizer state is of {kind}, and this run trains with {self._kind}. Set optim.optimizer and "
                    "optim.optimizer_impl as they were, or take 'optimizer' out of checkpoint.load_contents to go on with "
                    "fresh moments."
                )
            if _PARTS in entry:
                optimizers.put_back(self._optimizer, parameter, self._my_part(name, entry[_PARTS]))
            else:
                optimizers.put_back(self._optimizer, parameter, self._my_share(name, entry))
        self.layout.publish_masters()

    def _my_share(self, name: str, entry: dict[str, Any]) -> dict[str, Any]:
        """This rank's shard of every whole tensor."""
        return {
            key: self.layout.scatter(name, value) if isinstance(value, Tensor) and value.ndim else value
            for key, value in entry.items()
        }

    def _my_part(self, name: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        index, count = self.layout.shard_index, self.layout.num_shards
        if len(parts) != count:
            raise CheckpointError(
                f"The state of {self._kind} was saved in {len(parts)} parts, one for each rank that shared the model, and "
                f"here {count} share it: it is quantised in blocks of a rank's part and cannot be cut anew. Resume on as many "
                "ranks (with the same fsdp_size), or take 'optimizer' out of checkpoint.load_contents to go on with fresh "
                "moments."
            )
        return parts[index]
