"""How much memory an update needs, and how many blocks must recompute their activations for it to fit."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from burnish.model.activations import ActivationOffload, BlockActivations
from burnish.model.fused_layers import fused_blocks, recompute_mlp
from burnish.model.policy import PolicyModule, ValueModule, backbone_of, transformer_blocks
from burnish.utils import env, heap

logger = logging.getLogger("burnish.engine")

# Of what is free, since allocators leave gaps and kernels take workspaces.
_USABLE = 0.9
# Up to this part of that, what saves a percent of the time may be kept.
_SPARE = 0.8
_PROBE_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationCost:
    """Bytes that a forward keeps for its backward, per token.

    Attributes:
        block: a block that keeps everything, the mean of all blocks.
        block_without_mlp: a fused block that computes its gate and up projections again; as ``block`` where none does.
        block_input: a block that is recomputed whole.
        outside: what lies before, between and behind the blocks.
        product: what a fused block can keep beyond what it needs, to save a little time; 0 where it cannot.
    """

    block: float
    block_without_mlp: float
    block_input: float
    outside: float
    product: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """How an update fits into memory.

    Attributes:
        num_blocks: blocks of the model.
        num_recomputed: how many of them, from the first, keep their input alone and compute the rest again.
        num_without_mlp: how many, from the first, compute at least their gate and up projections again.
        num_with_product: how many, the last ones, keep more than they need.
        num_tokens: tokens of the largest micro-batch.
        needed_bytes: what an update with this plan takes beside what is allocated now.
        free_bytes: what there is for it.
    """

    num_blocks: int
    num_recomputed: int
    num_without_mlp: int
    num_with_product: int
    num_tokens: int
    needed_bytes: int
    free_bytes: int

    @property
    def fits(self) -> bool:
        """Whether there is enough."""
        return self.needed_bytes <= self.free_bytes

    def __str__(self) -> str:
        mlps = self.num_without_mlp - self.num_recomputed
        how = f"{self.num_recomputed} of {self.num_blocks} blocks recomputed" + (
            f", the MLP of {mlps} more" if mlps else ""
        )
        how += f", the activated product of {self.num_with_product} kept" if self.num_with_product else ""
        return (
            f"{how}; a micro-batch of {self.num_tokens:,} tokens then needs {self.needed_bytes / 2**30:.2f} GiB of the "
            f"{self.free_bytes / 2**30:.2f} GiB that are free"
        )


class ActivationPlanner:
    """Decides before each update which blocks compute their activations twice, and sets it on the model.

    It looks at what is free at that moment. Then everybody else on the device (a rollout with its cache, a reference, another
    model) has what it holds during updates, so nothing has to be known of them.

    Args:
        module: before it is sharded.
        mode: "auto"; or true, all blocks, or false, none.
        offload: keeps on the CPU what the blocks save.
        compiled: compiles the blocks' forwards.
    """

    def __init__(
        self,
        module: PolicyModule | ValueModule,
        dtype: torch.dtype,
        device_type: str,
        *,
        mode: bool | str,
        offload: ActivationOffload | None = None,
        compiled: bool = False,
    ) -> None:
        blocks = transformer_blocks(module.model)
        self._fused = fused_blocks(module.model)
        self._on_gpu = device_type == "cuda"
        # What lies on the CPU needs no plan.
        self.is_automatic = mode == "auto" and offload is None
        self.plan: MemoryPlan | None = None
        """The plan of the last update; None where nothing is planned."""
        if self.is_automatic:
            self._cost = activation_cost(module, blocks, dtype, device_type)
        self.activations = BlockActivations(blocks, offload=offload, compiled=compiled)
        if mode is True:
            self.activations.num_recomputed = len(blocks)

    @property
    def recomputes_all(self) -> bool:
        """Whether there is nothing left to recompute."""
        return self.activations.num_recomputed == self.activations.num_blocks

    def prepare(
        self, *, num_tokens: int, fixed_bytes: int, free_bytes: int, keys: str, num_micro_batches: int = 1
    ) -> None:
        """Plans an update whose largest micro-batch has ``num_tokens``; all ranks give the same numbers.

        Args:
            keys: what cuts micro-batches: to be turned where no plan fits, or where far more would fit.
        """
        plan = plan_memory(
            self._cost,
            num_blocks=self.activations.num_blocks,
            num_tokens=num_tokens,
            fixed_bytes=fixed_bytes,
            free_bytes=free_bytes,
        )
        before, self.plan = self.plan, plan
        self.activations.num_recomputed = plan.num_recomputed
        for index, block in enumerate(self._fused):
            block.recomputes_mlp = plan.num_recomputed <= index < plan.num_without_mlp
            block.keeps_product = index >= plan.num_blocks - plan.num_with_product
        if before is None or _counts(plan) != _counts(before):
            logger.info("Activations: %s.", plan)
            if not plan.fits:
                logger.warning("An update may run out of memory: %s. Lower %s.", plan, keys)
        if before is None and self._on_gpu and (times := larger_micro_batches(plan, num_micro_batches)) > 1:
            logger.info(
                "An update has %d micro-batches, and there is memory for %d times the tokens in each. On a GPU fewer and larger "
                "ones are faster, the more so the smaller the model: raise %s.",
                num_micro_batches,
                times,
                keys,
            )


def _counts(plan: MemoryPlan) -> tuple[int, ...]:
    return plan.num_recomputed, plan.num_without_mlp, plan.num_with_product, plan.fits


def larger_micro_batches(plan: MemoryPlan, num_micro_batches: int) -> int:
    """How many times as many tokens a micro-batch could have, with nothing computed twice and a part of the memory left free;
    not more than an update has."""
    if plan.num_recomputed or plan.num_without_mlp:
        return 1
    return max(1, min(num_micro_batches, int(_SPARE * plan.free_bytes / max(1, plan.needed_bytes))))


def plan_memory(
    cost: ActivationCost, *, num_blocks: int, num_tokens: int, fixed_bytes: int, free_bytes: int
) -> MemoryPlan:
    """The plan that fits with the least computed twice, or the smallest where none fits.

    An MLP's projections are much memory for little work, so they go first; whole blocks follow when all of them are gone.
    Of memory that nothing needs a part is kept free all the same.

    Args:
        fixed_bytes: what an update takes whatever the plan: gradients, the head's chunk, gathered weights.
        free_bytes: what there is.
    """
    plans = [(0, mlps) for mlps in range(num_blocks + 1)] if cost.block_without_mlp < cost.block else [(0, 0)]
    least = plans[-1][1]
    plans += [(whole, max(whole, least)) for whole in range(1, num_blocks + 1)]
    for num_recomputed, num_without_mlp in plans:
        needed = fixed_bytes + activation_bytes(cost, num_blocks, num_recomputed, num_without_mlp, num_tokens)
        if needed <= free_bytes:
            break
    num_with_product = 0
    if not num_without_mlp and cost.product:
        room = (_SPARE * free_bytes - needed) / (num_tokens * cost.product)
        num_with_product = min(num_blocks, max(0, int(room)))
        needed += int(num_with_product * num_tokens * cost.product)
    return MemoryPlan(
        num_blocks=num_blocks,
        num_recomputed=num_recomputed,
        num_without_mlp=num_without_mlp,
        num_with_product=num_with_product,
        num_tokens=num_tokens,
        needed_bytes=needed,
        free_bytes=free_bytes,
    )


def activation_bytes(
    cost: ActivationCost, num_blocks: int, num_recomputed: int, num_without_mlp: int, num_tokens: int
) -> int:
    """The most that activations take at once.

    That is at the start of the backward, when everything is still kept and the last block's gradients need about what a
    whole block saves; or, where that is more, when the last of the recomputed blocks has its activations again.
    """
    inputs = num_recomputed * cost.block_input
    kept = (num_without_mlp - num_recomputed) * cost.block_without_mlp + (num_blocks - num_without_mlp) * cost.block
    start = inputs + kept + cost.block
    again = inputs + 2 * cost.block if num_recomputed else 0.0
    return int(num_tokens * (cost.outside + max(start, again)))


def free_memory(device: torch.device, sharing: int = 1) -> int:
    """Bytes that an update may take on ``device`` beside what is allocated now.

    Args:
        sharing: processes that share a CPU's memory.
    """
    if device.type == "cuda":
        # What PyTorch holds without using it is free to us.
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        available = env.available_memory()
        # What this process holds without using it is free to us.
        free = (1 << 62) if available is None else available // sharing + heap.kept_bytes()
    return int(_USABLE * free)


def total_memory(device: torch.device, sharing: int = 1) -> int:
    """Bytes of the device's memory, or of a CPU's share of the computer's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return env.total_memory() // sharing


def activation_cost(
    module: PolicyModule | ValueModule, blocks: list[nn.Module], dtype: torch.dtype, device_type: str
) -> ActivationCost:
    """What ``module`` keeps per token on such a device, found by running its backbone on tensors without memory.

    Counted is each storage that autograd saves, once, without the parameters; attention as a kernel does that keeps its
    inputs, its output and one float32 per head. Where a model cannot run like that (a mixture of experts, whose shapes
    depend on values), the sum is made from its configuration.
    """
    text = module.model.config.get_text_config()
    without_mlp = 0.0
    try:
        if fused_blocks(module.model):
            recompute_mlp(module.model)
            without_mlp, _ = _run_on_meta(module, blocks, dtype, device_type)
            recompute_mlp(module.model, False)
        inside, outside = _run_on_meta(module, blocks, dtype, device_type)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as error:
        logger.debug("%s cannot be measured on meta tensors: %s", type(module.model).__name__, error)
        inside, outside = _from_shape(text, dtype), 4.0 * text.hidden_size * dtype.itemsize
    fused = fused_blocks(module.model)
    keeps = device_type == "cuda" and all(block.can_keep_product for block in fused)
    return ActivationCost(
        block=inside,
        block_without_mlp=without_mlp or inside,
        block_input=float(text.hidden_size * dtype.itemsize),
        outside=outside,
        product=float(fused[0].block.mlp.gate_proj.out_features * dtype.itemsize) if keeps and fused else 0.0,
    )


def _run_on_meta(
    module: PolicyModule | ValueModule, blocks: list[nn.Module], dtype: torch.dtype, device_type: str
) -> tuple[float, float]:
    backbone = backbone_of(module.model) if isinstance(module, PolicyModule) else module.model
    state: dict[str, Tensor] = {}
    for name, parameter in backbone.named_parameters():
        state[name] = torch.empty_like(parameter, device="meta", dtype=dtype).requires_grad_(parameter.requires_grad)
    for name, buffer in backbone.named_buffers():
        state[name] = torch.empty_like(buffer, device="meta")
    counted = {tensor.untyped_storage()._cdata for tensor in state.values()}
    saved: list[Tensor] = []  # Held, so that the address of a storage stays its name.
    totals = {"block": 0, "outside": 0}
    place = "outside"

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in counted:
            counted.add(storage._cdata)
            saved.append(tensor.detach())
            totals[place] += storage.nbytes()
        return tensor

    def enter(_module: nn.Module, _inputs: Any) -> None:
        nonlocal place
        place = "block"

    def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        nonlocal place
        place = "outside"

    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device="meta")
    # A CPU's attention has no half precision (see `burnish.model.attention`).
    attends_in = torch.promote_types(dtype, torch.float32) if device_type == "cpu" else dtype
    call = {"input_ids": ids, "position_ids": ids, "use_cache": False, "attention_context": _KernelOnMeta(attends_in)}
    handles = [h for b in blocks for h in (b.register_forward_pre_hook(enter), b.register_forward_hook(leave))]
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor), torch.enable_grad(), _training(backbone):
            functional_call(backbone, state, kwargs=call)
    finally:
        for handle in handles:
            handle.remove()
    return totals["block"] / len(blocks) / _PROBE_TOKENS, totals["outside"] / _PROBE_TOKENS


@contextmanager
def _training(module: nn.Module) -> Iterator[None]:
    before = module.training
    module.train()
    try:
        yield
    finally:
        module.train(before)


class _KernelOnMeta:
    """Attention of which only the shapes matter.

    Args:
        dtype: in which it computes, and keeps what its backward needs.
    """

    num_pairs = 0

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **_how: Any) -> Tensor:
        rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        return self.attend_tokens(*rows)[None]

    def attend_tokens(self, query: Tensor, key: Tensor, value: Tensor, **_how: Any) -> Tensor:
        return _Kernel.apply(*(tensor.to(self.dtype) for tensor in (query, key, value))).to(query.dtype)


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(*query.shape[:2], value.shape[2])
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:2], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> Any:  # type: ignore[override]
        raise NotImplementedError("only the shapes of a forward are wanted")


def _from_shape(text: Any, dtype: torch.dtype) -> float:
    """Bytes per token of a block of a plain transformer of this configuration, experts counted as often as they are used."""
    hidden, heads = text.hidden_size, text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    experts = getattr(text, "num_experts_per_tok", None) or 1
    width = (getattr(text, "moe_intermediate_size", None) if experts > 1 else None) or getattr(
        text, "intermediate_size", 4 * hidden
    )
    attention = head_dim * (3 * heads + 4 * kv_heads)
    # Gate, up, the activated gate and their product; and each expert's copy of the token, before and after.
    mlp = experts * (4 * width + (2 * hidden if experts > 1 else 0))
    # Two norms: input and normalised output in the compute type, and two tensors in float32.
    norms = 4 * hidden
    return float(dtype.itemsize * (attention + mlp + norms) + 4 * 4 * hidden)
