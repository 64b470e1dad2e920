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
        self.last_step, self.last_rate = 0, 0.0
        """The trainer's step of the last call of `step`, and its learning rate."""
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
        lr = self.rate_at(step)
        self.last_step, self.last_rate = step, lr
        skipped = not math.isfinite(norm)
        if not skipped:
            self._clip(list(grads.values()), norm)
            optimizers.set_rate(self._optimizer, lr)
            for names in [list(self._parameters)] if self.offload is None else self.offload.visit():
                self._update(names, grads)
                self.layout.publish_masters(names)
        self.layout.clear_grads()
        return {"grad_norm": norm, "lr": lr, "skipped_updates": float(skipped)}

    def rate_at(self, step: int) -> float:
        """The learning rate of trainer step ``step``, from 1."""
        return lr_at(step, self.config, self.total_steps)

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
        norms = torch._foreach_norm(grads)
        # All at once where they are alike: hundreds of casts of one number are milliseconds on a GPU.
        alike = len({norm.dtype for norm in norms}) == 1
        stacked = torch.stack(norms if alike else [norm.double() for norm in norms]).double()
        return math.sqrt(float(self.layout.sum_over_shards(stacked.square().sum())))

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

    @property
    def kind(self) -> str:
        """The optimizer's class, as a checkpoint calls it."""
        return f"{type(self._optimizer).__module__}.{type(self._optimizer).__qualname__}"

    def states(self) -> dict[str, dict[str, Any]]:
        """What the optimizer keeps of every parameter, by name; nothing before its first step."""
        return {name: self._optimizer.state.get(parameter, {}) for name, parameter in self._parameters.items()}

    def master(self, name: str) -> Tensor:
        """This rank's rows of a parameter's master."""
        return self._parameters[name].detach()

    @torch.no_grad()
    def set_master(self, name: str, rows: Tensor) -> None:
        """Writes them. `Layout.publish_masters` follows when all are written."""
        self._parameters[name].copy_(rows)

    def parts(self, name: str) -> dict[str, Any]:
        """A parameter's state as plain tensors on the CPU, where it cannot be cut into rows."""
        return optimizers.take_out(self._optimizer.state.get(self._parameters[name], {}))

    def restore(self, name: str, state: dict[str, Any]) -> None:
        """Makes ``state``, of this rank's rows or what `parts` gave, the state of a parameter."""
        optimizers.put_back(self._optimizer, self._parameters[name], state)

    def in_parts(self) -> dict[str, bool]:
        """Which parameters' states cannot be cut into rows, on any rank; all ranks call it and get the same."""
        entries = self.states()
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
