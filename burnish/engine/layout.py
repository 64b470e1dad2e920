"""Where the weights, masters and gradients of one model live.

Replicated (one rank, or ``fsdp_size=1``): every rank holds the whole model in the compute dtype, at addresses that never
change, so a rollout on the same rank reads these very tensors. Below float32, masters and gradients are separate float32
tensors. Sharded (FSDP2): each rank holds float32 shards; compute weights exist between unshard and reshard only.

Both show the optimizer the same thing: for each trained parameter a plain tensor with the master, and one with the
gradient averaged over the ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from burnish.engine import ranks
from burnish.engine.loading import from_rank_zero, receive_buffers, receive_parameters
from burnish.engine.state_bytes import num_parameters, passing_bytes
from burnish.engine.state_bytes import units as fsdp_units
from burnish.model.lora import hf_name
from burnish.model.policy import PolicyModule, ValueModule, set_dtype, transformer_blocks
from burnish.model.projections import pack_projections
from burnish.utils.errors import ConfigError

Module = PolicyModule | ValueModule


class Replicated:
    """The whole model on every rank."""

    shares_storage = True

    def __init__(
        self,
        module: Module,
        dtype: torch.dtype,
        device: torch.device,
        *,
        from_rank_zero: bool = False,
        frees_grads: bool = False,
    ) -> None:
        """Takes ``module`` with its trained parameters in their master dtype, and leaves it in ``dtype`` on ``device``.

        Args:
            from_rank_zero: rank 0 has the weights and sends them; see `burnish.engine.loading`.
            frees_grads: gives the memory of main gradients back after each step.
        """
        if from_rank_zero:
            receive_parameters(module, module, device)
            receive_buffers(module, device)
        self.module: Module = module.to(device)
        self.dtype = dtype
        self.device = device
        self._frees_grads = frees_grads
        self._masters: dict[str, Tensor] = {}
        self._main_grads: dict[str, Tensor] = {}
        # Those that hold an earlier update's gradient.
        self._stale_grads: set[str] = set()
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
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
                self._main_grads[name] = torch.empty_like(self._masters[name])
                self._stale_grads.add(name)
            assert parameter.grad is not None
            if name in self._stale_grads:
                # The first of an update: a copy is half of the traffic of zeroing and adding.
                self._main_grads[name].copy_(parameter.grad)
                self._stale_grads.remove(name)
            else:
                self._main_grads[name].add_(parameter.grad)
            parameter.grad = None

        return accumulate

    def masters(self) -> dict[str, Tensor]:
        """Master of every trained parameter; the parameter itself where it has the master's dtype."""
        return self._masters

    def local_grads(self) -> dict[str, Tensor]:
        """Gradient of every trained parameter, in the master's dtype; zero where nothing flowed."""
        for name in self._stale_grads:
            self._main_grads[name].zero_()
        self._stale_grads.clear()
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
        if self._frees_grads:
            self._main_grads.clear()
        self._stale_grads = set(self._main_grads)
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def publish_masters(self, names: Iterable[str] | None = None) -> None:
        """Writes changed masters (all, or those of ``names``) to the compute weights, in place."""
        changed = list(self._parameters if names is None else names)
        if self._has_own_masters and changed:
            torch._foreach_copy_(
                [self._parameters[name].data for name in changed], [self._masters[name] for name in changed]
            )

    @property
    def missing_grad_bytes(self) -> int:
        """Memory that the next backward takes for gradients that last until the step."""
        if self._has_own_masters:
            return sum(m.nbytes for name, m in self._masters.items() if name not in self._main_grads)
        return sum(p.nbytes for p in self._parameters.values() if p.grad is None)

    @property
    def passing_bytes(self) -> int:
        """Memory that gradients take only until they are added to their main gradient: the largest one."""
        return max((p.nbytes for p in self._parameters.values()), default=0) if self._has_own_masters else 0

    def step_masters(self) -> dict[str, Tensor]:
        """Masters that only a step reads; none where the compute weights are the masters."""
        return self._masters if self._has_own_masters else {}

    def weight_parts(self) -> list[tuple[nn.Module, list[Tensor]]]:
        """The weights, module by module in the order of their use, where nobody else reads them: in a model that is not
        trained, which no rollout shares."""
        return [] if self._parameters else _by_module(self.module)

    def start_micro_batch(self, *, is_last: bool) -> None:
        """Gradients are reduced once, before the step."""

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """``value`` summed over the ranks that hold parts of one copy: here each holds all."""
        return value

    # One rank holds all of a copy.
    num_shards, shard_index = 1, 0

    @property
    def copy_index(self) -> int:
        """Which of the copies of the model this rank holds, or a part of."""
        return ranks.rank()

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Of a parameter."""
        return tuple(self.module.get_parameter(name).shape)

    def rows(self, name: str) -> tuple[int, int]:
        """First row of a parameter that this rank holds, and the row behind its last."""
        return 0, (self.whole_shape(name) or (1,))[0]

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
        *,
        fsdp_size: int,
        reshard_after_forward: bool,
        forward_prefetch: bool = False,
        defers_sync: bool = False,
        on_cpu: bool = False,
        from_rank_zero: bool = False,
    ) -> None:
        """Takes ``module``, whole on the CPU, its trained parameters in their master dtype, and shards it.

        Args:
            fsdp_size: ranks that share one copy; -1 is all.
            forward_prefetch: gathers the next block before one computes; in the backward FSDP2 does so by itself.
            defers_sync: reduces gradients after the last micro-batch only. They add up in float32 and whole until then.
            on_cpu: shards, gradients and masters live on the CPU, from where each block is fetched.
            from_rank_zero: rank 0 has the weights and sends them, block by block; see `burnish.engine.loading`.
        """
        world = ranks.world_size()
        size = world if fsdp_size == -1 else fsdp_size
        if size < 1 or size > world or world % size:
            sizes = ", ".join(str(number) for number in range(1, world + 1) if world % number == 0)
            raise ConfigError(
                f"fsdp_config.fsdp_size={fsdp_size}: {world} workers cannot be divided into groups of {fsdp_size} that hold "
                f"one copy of the model each. Set -1 (all of them) or one of {sizes}."
            )
        shape, names = ((world,), ("shard",)) if size == world else ((world // size, size), ("replicate", "shard"))
        mesh = ranks.make_device_mesh(device.type, shape, names)
        self._shard_group = mesh.get_group("shard")
        master_dtypes = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad} - {dtype}
        policy = MixedPrecisionPolicy()
        if master_dtypes:
            (master_dtype,) = master_dtypes
            # What blocks are given is in the compute dtype already, and looking for what is not takes the host as long as a
            # few launches, block by block.
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=master_dtype, cast_forward_inputs=False)
        # What is not trained needs no master; a group may mix dtypes as long as its trained parameters have one.
        set_dtype(module, dtype, trained=False)
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_cpu else OffloadPolicy()
        how: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
        units = fsdp_units(transformer_blocks(module.model))
        for unit in units:
            if from_rank_zero:
                for block in unit:
                    receive_parameters(module, block, device)
            # A lone block is given as such: a list of modules has hooks of its own, which cost each block a little.
            fully_shard(unit if len(unit) > 1 else unit[0], reshard_after_forward=reshard_after_forward, **how)
        if from_rank_zero:
            receive_parameters(module, module, device)
            receive_buffers(module, device)
        fully_shard(module, **how)
        if forward_prefetch:
            for one, following in pairwise([cast(FSDPModule, each) for each in (module, *(unit[0] for unit in units))]):
                one.set_modules_to_forward_prefetch([following])
        _move_buffers(module, device)
        self.module: Module = module
        self.dtype = dtype
        self.device = device
        self._defers_sync = defers_sync
        self.passing_bytes = self._passing_bytes(units)
        self._parameters: dict[str, DTensor] = {n: p for n, p in module.named_parameters() if p.requires_grad}  # type: ignore[misc]
        self._masters: dict[str, Tensor] = {name: local_part(p.detach()) for name, p in self._parameters.items()}

    def masters(self) -> dict[str, Tensor]:
        """This rank's shard of every trained parameter."""
        return self._masters

    def local_grads(self) -> dict[str, Tensor]:
        """This rank's shard of every gradient, already averaged by FSDP; zero where nothing flowed."""
        return {
            name: torch.zeros_like(self._masters[name]) if p.grad is None else local_part(p.grad)
            for name, p in self._parameters.items()
        }

    def reduce_grads(self) -> None:
        """FSDP reduced them in the backward."""

    def clear_grads(self) -> None:
        """Sets every gradient to nothing."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def publish_masters(self, names: Iterable[str] | None = None) -> None:
        """The shards are the masters."""

    @property
    def missing_grad_bytes(self) -> int:
        """Memory that the next backward takes for gradients that last until the step, or until they are reduced."""
        whole = sum(4 * p.numel() for p in self._parameters.values()) if self._defers_sync else 0
        return whole + sum(self._masters[name].nbytes for name, p in self._parameters.items() if p.grad is None)

    def _passing_bytes(self, units: list[list[nn.Module]]) -> int:
        """Memory of what is whole for a while: the root's weights, those of two units, and one unit's gradients."""
        sizes = [sum(num_parameters(block) for block in unit) for unit in units]
        root = sum(parameter.numel() for parameter in self.module.parameters()) - sum(sizes)
        trained = any(parameter.requires_grad for parameter in self.module.parameters())
        return passing_bytes(sizes, root, self.dtype, is_trained=trained)

    def step_masters(self) -> dict[str, Tensor]:
        """None: the masters are the weights, which forward and backward read too."""
        return {}

    def weight_parts(self) -> list[tuple[nn.Module, list[Tensor]]]:
        """This rank's shards, all at once: FSDP2 reads those of a block before the block is called."""
        return [(self.module, [local_part(parameter.detach()) for parameter in self.module.parameters()])]

    def start_micro_batch(self, *, is_last: bool) -> None:
        """Says whether gradients are reduced after this micro-batch; all ranks call it alike."""
        if self._defers_sync:
            root = cast(FSDPModule, self.module)
            root.set_requires_gradient_sync(is_last)
            root.set_is_last_backward(is_last)

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """``value`` summed over the ranks that hold parts of one copy."""
        value = value.to(self.device)
        torch.distributed.all_reduce(value, group=self._shard_group)
        return value

    @property
    def num_shards(self) -> int:
        """Ranks that hold parts of one copy."""
        return torch.distributed.get_world_size(self._shard_group)

    @property
    def shard_index(self) -> int:
        """This rank's place among them."""
        return torch.distributed.get_rank(self._shard_group)

    @property
    def copy_index(self) -> int:
        """Which of the copies of the model this rank holds a part of."""
        return ranks.rank() // self.num_shards

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Of a parameter."""
        return tuple(self.module.get_parameter(name).shape)

    def rows(self, name: str) -> tuple[int, int]:
        """First row of a parameter that this rank holds, and the row behind its last: FSDP2 gives every rank as many,
        and the last ones what is left."""
        num_rows = self.whole_shape(name)[0]
        each = -(-num_rows // self.num_shards)
        start = min(num_rows, self.shard_index * each)
        return start, min(num_rows, start + each)

    def gather(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor of which ``local`` is this rank's part; all ranks call it."""
        like = self._parameters[name]
        part = DTensor.from_local(
            local.to(self.device),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
        return part.full_tensor()

    def scatter(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of ``whole``, without communication."""
        like = self._parameters[name]
        return _part_of(whole, like)

    def after_inference(self) -> None:
        """Frees what is still gathered, of the root and of blocks that are not resharded after a forward: it is no weight that
        can be saved or loaded, and an update would leave it stale."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


Layout = Replicated | Sharded


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that belong to a model's weights, as the selection biases of some mixtures of experts; whole on every rank."""
    stored = module.state_dict().keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in stored)


def local_parts(layout: Layout) -> dict[str, Tensor]:
    """What this rank holds of the model, by Hugging Face name: parameters, stored buffers, and masters of their own."""
    masters = layout.masters()
    parts: dict[str, Tensor] = {}
    for name, parameter in layout.module.named_parameters():
        label, part = hf_name(name).removeprefix("model."), local_part(parameter.detach())
        parts[label] = part
        if name in masters and masters[name].data_ptr() != part.data_ptr():
            parts[f"master of {label}"] = masters[name]
    parts |= {name.removeprefix("model."): buffer for name, buffer in persistent_buffers(layout.module)}
    return parts


@torch.no_grad()
def copy_into_parameters(layout: Layout, source: nn.Module | None) -> None:
    """Copies the weights of ``source`` into masters and compute weights; all ranks call it.

    Args:
        source: the same architecture, whole on the CPU. With several ranks only rank 0 has it, and sends it.
    """
    weights: dict[str, Tensor] = {} if source is None else dict(source.named_parameters())
    masters = layout.masters()
    for name, parameter in layout.module.named_parameters():
        part = masters[name] if name in masters else local_part(parameter.detach())
        whole = from_rank_zero(weights.get(name), parameter.shape, part.dtype, layout.device)
        part.copy_(_part_of(whole, parameter))
    buffers: dict[str, Tensor] = {} if source is None else dict(source.named_buffers())
    for name, buffer in persistent_buffers(layout.module):
        buffer.copy_(from_rank_zero(buffers.get(name), buffer.shape, buffer.dtype, layout.device))
    layout.publish_masters()


def _by_module(module: Module) -> list[tuple[nn.Module, list[Tensor]]]:
    """The parameters of ``module`` that lie in no block, then those of each block."""
    blocks = transformer_blocks(module.model)
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    outside = [parameter.detach() for parameter in module.parameters() if id(parameter) not in inside]
    return [(module, outside), *((block, [p.detach() for p in block.parameters()]) for block in blocks)]


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Moves buffers alone: parameters are where they belong already, which may be the CPU."""
    for each in module.modules():
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = buffer.to(device)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's storage of a tensor, as a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _part_of(whole: Tensor, like: Tensor) -> Tensor:
    """The part of ``whole`` that this rank holds of ``like``; every rank has ``whole``, so nothing is sent."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(
        whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    ).to_local()  # fmt: skip
