"""AdamW on the masters of a layout, with clipping by the global norm and a guard against non-finite gradients."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from burnish.config import FSDPOptimizerConfig
from burnish.engine.layout import Layout
from burnish.engine.schedule import lr_at
from burnish.utils.errors import CheckpointError


class MasterOptimizer:
    """AdamW (arXiv:1711.05101) over the masters of ``layout``.

    Args:
        total_steps: trainer steps of the run, for the learning-rate schedule.
    """

    def __init__(self, layout: Layout, config: FSDPOptimizerConfig, total_steps: int) -> None:
        self.layout = layout
        self.config = config
        self.total_steps = total_steps
        # A Parameter around the master's own storage, so that torch updates it in place.
        self._parameters = {name: nn.Parameter(master) for name, master in layout.masters().items()}
        self._adamw = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            weight_decay=config.weight_decay,
            fused=True,
        )

    @torch.no_grad()
    def step(self, step: int) -> dict[str, float]:
        """One update at the learning rate of trainer step ``step`` (from 1); clears the gradient.

        A gradient that is not finite (or whose norm is beyond float32) changes nothing, neither weights nor moments nor
        Adam's count of steps: the update is skipped and counted.

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
            for name, parameter in self._parameters.items():
                parameter.grad = grads[name]
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            for parameter in self._parameters.values():
                parameter.grad = None
            self.layout.publish_masters()
        self.layout.clear_grads()
        return {"grad_norm": norm, "lr": lr, "skipped_updates": float(skipped)}

    def _global_norm(self, grads: list[Tensor]) -> float:
        """L2 norm over all parameters and shards; the sum of squares is in float64 (one number per parameter)."""
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(grads)])
        return math.sqrt(float(self.layout.sum_over_shards(norms.square().sum())))

    def _clip(self, grads: list[Tensor], norm: float) -> None:
        if norm > self.config.clip_grad:
            torch._foreach_mul_(grads, self.config.clip_grad / norm)

    def moments(self) -> dict[str, Tensor]:
        """This rank's part of every moment, named as ``exp_avg of <parameter>``; the same names on every rank."""
        return {
            f"{key} of {name}": entry[key]
            for name, parameter in self._parameters.items()
            if (entry := self._adamw.state.get(parameter))
            for key in ("exp_avg", "exp_avg_sq")
        }

    def state_dict(self, keep: bool = True) -> dict[str, Any]:
        """Whole moments of every parameter by name, on the CPU, and masters where the model is saved in less precision.

        All ranks call it, since the parts are gathered; a rank that does not write passes ``keep=False`` and gets nothing.
        """
        state: dict[str, Any] = {}
        for name, parameter in self._parameters.items():
            entry = self._adamw.state.get(parameter, {})
            local = {key: entry[key] for key in ("exp_avg", "exp_avg_sq") if key in entry}
            if parameter.dtype != self.layout.dtype:
                local["master"] = parameter.detach()
            whole = {}
            for key, tensor in local.items():
                gathered = self.layout.gather(name, tensor)
                if keep:
                    whole[key] = gathered.to("cpu")
            if "step" in entry:
                whole["step"] = entry["step"].to("cpu")
            state[name] = whole
        return state if keep else {}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict` of any layout and number of ranks.

        Raises:
            CheckpointError: the state belongs to another model.
        """
        differing = sorted(set(state) ^ set(self._parameters))
        if differing:
            raise CheckpointError(
                f"The optimizer state is of another model: parameter {differing[0]!r} is in one only."
            )
        for name, parameter in self._parameters.items():
            entry = state[name]
            if "master" in entry:
                parameter.copy_(self.layout.scatter(name, entry["master"]))
            if "step" not in entry:
                self._adamw.state.pop(parameter, None)
                continue
            self._adamw.state[parameter] = {
                "step": entry["step"].clone().to(parameter.device),
                **{key: self._own(name, entry[key], parameter) for key in ("exp_avg", "exp_avg_sq")},
            }
        self.layout.publish_masters()

    def _own(self, name: str, whole: Tensor, like: Tensor) -> Tensor:
        """This rank's part of a moment, in storage of its own."""
        return self.layout.scatter(name, whole).to(device=like.device, dtype=like.dtype, copy=True)
