"""Where the weights, masters and gradients of one model live.

Replicated (one rank, or ``fsdp_size=1``): every rank holds the whole model in the compute dtype, at addresses that never
change, so a rollout on the same rank reads these very tensors. Below float32, masters and gradients are separate float32
tensors. Sharded (FSDP2): each rank holds float32 shards; compute weights exist between unshard and reshard only.

Both show the optimizer the same thing: for each trained parameter a plain tensor with the master, and one with the
gradient averaged over the ranks.
"""

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from burnish.engine import ranks
from burnish.model.policy import PolicyModule, ValueModule, set_dtype, transformer_blocks
from burnish.model.projections import pack_projections
from burnish.utils.errors import ConfigError

Module = PolicyModule | ValueModule


class Replicated:
    """The whole model on every rank."""

    shares_storage = True

    def __init__(self, module: Module, dtype: torch.dtype, device: torch.device, trained: bool) -> None:
        """Takes ``module`` in its master dtype and leaves it in ``dtype`` on ``device``."""
        self.module: Module = module.to(device)
        self.dtype = dtype
        self._masters: dict[str, Tensor] = {}
        self._main_grads: dict[str, Tensor] = {}
        parameters = dict(module.named_parameters())
        for parameter in parameters.values():
            parameter.requires_grad_(trained)
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._has_own_masters = any(p.dtype != dtype for p in self._parameters.values())
        if self._has_own_masters:
            self._masters = {name: p.detach().clone() for name, p in self._parameters.items()}
        set_dtype(module, dtype)
        # Before any address is kept, here as a master or by a rollout.
        pack_projections(module)
        for name, parameter in self._parameters.items():
            if self._has_own_masters:
                parameter.register_post_accumulate_grad_hook(self._accumulate_into(name))
            else:
                self._masters[name] = parameter.data

    def _accumulate_into(self, name: str) -> Callable[[Tensor], None]:
        def accumulate(parameter: Tensor) -> None:
            # In bf16 a sum over micro-batches would lose what is 256 times smaller than itself.
            if name not in self._main_grads:
                self._main_grads[name] = torch.zeros_like(self._masters[name])
            assert parameter.grad is not None
            self._main_grads[name].add_(parameter.grad)
            parameter.grad = None

        return accumulate

    def masters(self) -> dict[str, Tensor]:
        """Master of every trained parameter; the parameter itself where it has the master's dtype."""
        return self._masters

    def local_grads(self) -> dict[str, Tensor]:
        """Gradient of every trained parameter, in the master's dtype; zero where nothing flowed."""
        grads = {}
        for name, parameter in self._parameters.items():
            grad = self._main_grads.get(name) if self._has_own_masters else parameter.grad
            if grad is None:
                grad = torch.zeros_like(self._masters[name])
                if self._has_own_masters:
                    self._main_grads[name] = grad
                else:
                    parameter.grad = grad
            grads[name] = grad
        return grads

    def reduce_grads(self) -> None:
        """Averages gradients over the ranks, in place."""
        ranks.average_(self.local_grads().values())

    def clear_grads(self) -> None:
        """Sets every gradient to nothing."""
        for grad in self._main_grads.values():
            grad.zero_()
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def publish_masters(self) -> None:
        """Writes changed masters to the compute weights, in place."""
        if self._has_own_masters:
            torch._foreach_copy_(
                [p.data for p in self._parameters.values()], [self._masters[name] for name in self._parameters]
            )

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """``value`` summed over the ranks that hold parts of one copy: here each holds all."""
        return value

    def gather(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor of which ``local`` is this rank's part."""
        return local

    def scatter(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of ``whole``."""
        return whole

    def after_inference(self) -> None:
        """Nothing to free."""


class Sharded:
    """FSDP2: parameters, masters, gradients and moments are split over the ranks."""

    shares_storage = False

    def __init__(
        self,
        module: Module,
        dtype: torch.dtype,
        device: torch.device,
        trained: bool,
        *,
        fsdp_size: int,
        reshard_after_forward: bool,
    ) -> None:
        """Takes ``module`` in its master dtype, whole on the CPU, and shards it over ``fsdp_size`` ranks (-1: all)."""
        world = ranks.world_size()
        size = world if fsdp_size == -1 else fsdp_size
        if size > world or world % size:
            raise ConfigError(f"fsdp_size={fsdp_size} must divide the number of workers, which is {world}.")
        shape, names = ((world,), ("shard",)) if size == world else ((world // size, size), ("replicate", "shard"))
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        self._shard_group = mesh.get_group("shard")
        master_dtype = next(module.parameters()).dtype
        policy = MixedPrecisionPolicy()
        if dtype != master_dtype:
            if trained:
                policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=master_dtype)
            else:
                set_dtype(module, dtype)
        for parameter in module.parameters():
            parameter.requires_grad_(trained)
        for block in transformer_blocks(module.model):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.to(device)  # buffers; parameters are there already
        self.module: Module = module
        self.dtype = dtype
        self._parameters: dict[str, DTensor] = {n: p for n, p in module.named_parameters() if p.requires_grad}  # type: ignore[misc]
        self._masters: dict[str, Tensor] = {name: _local(p.detach()) for name, p in self._parameters.items()}

    def masters(self) -> dict[str, Tensor]:
        """This rank's shard of every trained parameter."""
        return self._masters

    def local_grads(self) -> dict[str, Tensor]:
        """This rank's shard of every gradient, already averaged by FSDP; zero where nothing flowed."""
        return {
            name: torch.zeros_like(self._masters[name]) if p.grad is None else _local(p.grad)
            for name, p in self._parameters.items()
        }

    def reduce_grads(self) -> None:
        """FSDP reduced them in the backward."""

    def clear_grads(self) -> None:
        """Sets every gradient to nothing."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def publish_masters(self) -> None:
        """The shards are the masters."""

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """``value`` summed over the ranks that hold parts of one copy."""
        torch.distributed.all_reduce(value, group=self._shard_group)
        return value

    def gather(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor of which ``local`` is this rank's part; all ranks call it."""
        like = self._parameters[name]
        part = DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return part.full_tensor()

    def scatter(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of ``whole``, without communication."""
        like = self._parameters[name]
        return _part_of(whole, like)

    def after_inference(self) -> None:
        """Frees what the root keeps gathered, which an update would leave stale."""
        assert isinstance(self.module, FSDPModule)
        self.module.reshard()


Layout = Replicated | Sharded


def named_weights(layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face name and whole tensor, in the compute dtype, of every parameter and stored buffer; a tied pair comes once.

    Replicated: the compute weights themselves, not copies. Sharded: one gathered parameter at a time; all ranks call.
    """
    for name, parameter in layout.module.named_parameters():
        tensor: Tensor = parameter.detach()
        if isinstance(tensor, DTensor):
            tensor = cast(DTensor, tensor.to(layout.dtype)).full_tensor()
        yield name.removeprefix("model."), tensor
    for name, buffer in _persistent_buffers(layout.module):
        yield name.removeprefix("model."), buffer


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that belong to a model's weights, as the selection biases of some mixtures of experts; whole on every rank."""
    stored = module.state_dict().keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in stored)


def local_parts(layout: Layout) -> dict[str, Tensor]:
    """What this rank holds of the model, by Hugging Face name: parameters, stored buffers, and masters of their own."""
    masters = layout.masters()
    parts: dict[str, Tensor] = {}
    for name, parameter in layout.module.named_parameters():
        label, part = name.removeprefix("model."), _local(parameter.detach())
        parts[label] = part
        if name in masters and masters[name].data_ptr() != part.data_ptr():
            parts[f"master of {label}"] = masters[name]
    parts |= {name.removeprefix("model."): buffer for name, buffer in _persistent_buffers(layout.module)}
    return parts


def copy_into_parameters(layout: Layout, source: nn.Module) -> None:
    """Copies the weights of ``source``, the same architecture whole on the CPU, into masters and compute weights."""
    weights = dict(source.named_parameters())
    masters = layout.masters()
    with torch.no_grad():
        for name, parameter in layout.module.named_parameters():
            whole = weights[name].detach()
            if name in masters:
                masters[name].copy_(layout.scatter(name, whole))
            else:
                _local(parameter).copy_(_part_of(whole, parameter))
        buffers = dict(source.named_buffers())
        for name, buffer in _persistent_buffers(layout.module):
            buffer.copy_(buffers[name])
    layout.publish_masters()


def _local(tensor: Tensor) -> Tensor:
    """This rank's storage of a tensor, as a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _part_of(whole: Tensor, like: Tensor) -> Tensor:
    """The part of ``whole`` that this rank holds of ``like``; every rank has ``whole``, so nothing is sent."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(
        whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    ).to_local()  # fmt: skip
