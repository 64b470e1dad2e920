"""Bytes of weights, masters, gradients and moments, from shapes: by these an engine plans an update and a check a run."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, dtype, nn

from burnish.config import FSDPEngineConfig, FSDPOptimizerConfig
from burnish.model.head_chunks import chunk_rows
from burnish.model.policy import PolicyModule, ValueModule, transformer_blocks

BUCKET_BYTES = 256 << 20
"""Of the pieces in which state comes from the CPU for a step."""

# Blocks share a unit of FSDP2 up to so many parameters: 256 MB in bf16, which NVLink gathers in about a millisecond.
_UNIT_PARAMETERS = 128_000_000
# Bytes that an optimizer keeps for each weight, by the first letters of its class; of a library's own quantised ones the codes
# and a scale for every block. Names that are not here keep two moments in the master's dtype, as Adam does.
_STATE_BYTES = {
    "AdamW8bit": 2.06,
    "Adam8bit": 2.06,
    "AdamW4bit": 1.06,
    "Adam4bit": 1.06,
    "AdamWFp8": 2.03,
    "AdamFp8": 2.03,
    "Lion8bit": 1.03,
    "PagedAdamW8bit": 0.0,
    "PagedAdam8bit": 0.0,
    "PagedAdamW": 0.0,
    "PagedLion8bit": 0.0,
}
_ONE_STATE = ("Lion", "Adagrad", "RMSprop")


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """What one rank holds of one model.

    Attributes:
        weights: what forward and backward read; sharded, of a trained model, the float32 shards.
        masters: float32 copies beside the weights; 0 where the weights are the masters.
        gradients: that last until the step.
        keeps_gradients: their memory stays allocated after the step.
        moments: the optimizer's state.
        passing: gradients and gathered weights that are there for a moment of an update.
        gathered: whole weights that are there for a moment of a pass without gradient.
    """

    weights: int
    masters: int
    gradients: int
    keeps_gradients: bool
    moments: int
    passing: int
    gathered: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The shape of a language-model head, and how its weight is kept."""

    vocab: int
    hidden: int
    itemsize: int
    is_trained: bool

    @classmethod
    def of(cls, weight: Tensor, compute: dtype | None = None) -> "Head":
        """That of ``weight``, which computes in ``compute``, or in its own dtype."""
        itemsize = weight.element_size() if compute is None else compute.itemsize
        return cls(vocab=weight.shape[0], hidden=weight.shape[1], itemsize=itemsize, is_trained=weight.requires_grad)


def optimizer_bytes(config: FSDPOptimizerConfig, num_weights: int, itemsize: int = 4) -> int:
    """What the optimizer keeps for ``num_weights`` masters of ``itemsize`` bytes each, on their device."""
    name = config.optimizer.rpartition(":")[2]
    more = config.override_optimizer_config or {}
    if name in _STATE_BYTES:
        return int(_STATE_BYTES[name] * num_weights)
    if name == "SGD":
        return num_weights * itemsize if more.get("momentum") else 0
    if name == "Adafactor":
        return 0  # A row and a column for each matrix.
    states = 1 if name in _ONE_STATE else 2
    return num_weights * itemsize * (states + bool(more.get("amsgrad")))


def head_bytes(num_tokens: int, head: Head, *, on_gpu: bool, backward: bool = True) -> int:
    """What a head over ``num_tokens`` states takes at once beside what it is given, at most.

    The float32 logits of a chunk, over which their gradient is written (on a CPU without compiled kernels beside them), and
    the gradient of the weight in float32 and in its own dtype.
    """
    rows = min(num_tokens, chunk_rows(num_tokens, head.vocab, on_gpu=on_gpu, itemsize=head.itemsize))
    per_logit = 4 if on_gpu else 12
    trained = backward and head.is_trained
    gradient = head.vocab * head.hidden * (4 + head.itemsize) if trained else 0
    return rows * head.vocab * per_logit + gradient


def update_bytes(*, missing_gradients: int, passing: int, missing_moments: int, head: int) -> int:
    """What an update takes whatever becomes of the activations."""
    return missing_gradients + passing + missing_moments + head


def replicated_bytes(
    module: PolicyModule | ValueModule, compute: dtype, optim: FSDPOptimizerConfig | None
) -> StateBytes:
    """Of a rank that holds the whole model, as `burnish.engine.layout.Replicated` keeps it."""
    trained = [p for p in module.parameters() if p.requires_grad]
    num_trained = sum(p.numel() for p in trained)
    own_masters = any(p.dtype != compute for p in trained)
    master = max((p.dtype.itemsize for p in trained), default=4)
    return StateBytes(
        weights=sum(p.numel() for p in module.parameters()) * compute.itemsize,
        masters=num_trained * master if own_masters else 0,
        gradients=num_trained * master,
        keeps_gradients=own_masters,
        moments=0 if optim is None else optimizer_bytes(optim, num_trained, master),
        passing=max((p.numel() for p in trained), default=0) * compute.itemsize if own_masters else 0,
        gathered=0,
    )


def sharded_bytes(
    module: PolicyModule | ValueModule,
    compute: dtype,
    optim: FSDPOptimizerConfig | None,
    config: FSDPEngineConfig,
    *,
    num_shards: int,
    total_memory: int,
) -> StateBytes:
    """Of each of ``num_shards`` ranks that share one copy, as `burnish.engine.layout.Sharded` keeps it."""
    parameters = list(module.parameters())
    trained = [p for p in parameters if p.requires_grad]
    num_trained, master = sum(p.numel() for p in trained), max((p.dtype.itemsize for p in trained), default=4)
    # FSDP2 splits the first axis, and pads it.
    own = [(p, -(-p.shape[0] // num_shards) * (p.numel() // p.shape[0])) for p in parameters if p.numel()]
    own_trained = sum(size for p, size in own if p.requires_grad)
    sizes = [sum(num_parameters(block) for block in unit) for unit in units(transformer_blocks(module.model))]
    whole = sum(p.numel() for p in parameters)
    root = whole - sum(sizes)
    gradients = own_trained * master
    if optim is not None and defers_sync(config, num_trained, total_memory):
        gradients += 4 * num_trained
    passing = passing_bytes(sizes, root, compute, is_trained=bool(trained))
    gathered = passing_bytes(sizes, root, compute, is_trained=False)
    if not config.reshard_after_forward:
        passing += sum(sizes) * compute.itemsize
        gathered = whole * compute.itemsize
    return StateBytes(
        weights=own_trained * master + sum(size for p, size in own if not p.requires_grad) * compute.itemsize,
        masters=0,
        gradients=gradients,
        keeps_gradients=False,
        moments=0 if optim is None else optimizer_bytes(optim, own_trained, master),
        passing=passing,
        gathered=gathered,
    )


def passing_bytes(unit_sizes: Iterable[int], root: int, compute: dtype, *, is_trained: bool) -> int:
    """Sharded: the root's weights and those of two units whole, and one unit's gradients."""
    sizes = list(unit_sizes)
    gradients = max(*sizes, root) * (compute.itemsize + 4) if is_trained else 0
    return (root + 2 * max(sizes)) * compute.itemsize + gradients


def defers_sync(config: FSDPEngineConfig, num_trained: int, total_memory: int) -> bool:
    """Whether whole gradients add up until the last micro-batch: where nobody says, if they take little of the memory."""
    if config.defer_gradient_sync != "auto":
        return bool(config.defer_gradient_sync)
    return 4 * num_trained <= total_memory // 10


def num_parameters(module: nn.Module) -> int:
    """Entries of all parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def units(blocks: list[nn.Module]) -> list[list[nn.Module]]:
    """Blocks that are gathered and reduced together, in their order.

    Each unit costs the host a few milliseconds in every pass, however small it is, so blocks of small models share one.
    """
    found: list[list[nn.Module]] = []
    for block in blocks:
        if found and sum(map(num_parameters, found[-1])) + num_parameters(block) <= _UNIT_PARAMETERS:
            found[-1].append(block)
        else:
            found.append([block])
    return found
