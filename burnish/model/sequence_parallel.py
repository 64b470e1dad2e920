"""Ulysses sequence parallelism (arXiv:2309.14509): the ranks of a group share the tokens of each packed row.

Every rank runs the whole model on its slice of the tokens. Only attention needs the others: before it an all-to-all turns
"all heads of my tokens" into "my heads of all tokens", the context attends as on one rank, and a second all-to-all turns
the result back. Activations, the fused head and the attention are each split evenly, the weights are not.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedConfig

from burnish.model.attention import Gathering, to_device
from burnish.model.packing import Packed
from burnish.utils.errors import ConfigError


def check_can_share(config: PreTrainedConfig, size: int) -> None:
    """Whether ``size`` ranks can share the tokens of a row of this model.

    Every rank gets equally many query heads; key and value heads may be fewer than ranks.

    Raises:
        ConfigError: the query heads of the model do not divide by ``size``, or its positions hang on tokens that another
            rank has.
    """
    if size == 1:
        return
    text = config.get_text_config()
    changing = _rope_types(text) & {"dynamic", "longrope"}
    if changing:
        raise ConfigError(
            f"ulysses_sequence_parallel_size={size}: this model's rotary embedding (rope_type={changing.pop()}) changes with "
            f"the longest row, of which each worker would see its own part only. Set ulysses_sequence_parallel_size=1."
        )
    num_heads = text.num_attention_heads
    if num_heads % size:
        sizes = [str(divisor) for divisor in range(1, num_heads + 1) if num_heads % divisor == 0]
        raise ConfigError(
            f"ulysses_sequence_parallel_size={size}: the {num_heads} attention heads of this model do not divide among "
            f"{size} workers. Sizes that work: {', '.join(sizes)}."
        )


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """The kinds of rotary embedding of the model's layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    each = (
        [parameters] if "rope_type" in parameters else [kind for kind in parameters.values() if isinstance(kind, dict)]
    )
    return {str(kind.get("rope_type")) for kind in each}


class SequenceParallel:
    """One rank's part in a group that shares the tokens of a packed row.

    Args:
        group: the process group; all its ranks pack the same rows and call every method together.
        size, rank: of the group, and of this process in it.
    """

    def __init__(self, group: dist.ProcessGroup, size: int, rank: int) -> None:
        self.group = group
        self.size = size
        self.rank = rank

    def slice(self, packed: Packed) -> Packed:
        """This rank's tokens of ``packed`` and the labels that they predict.

        The row is filled up to a multiple of the size by tokens that attend to nothing, that nothing attends to and that
        predict nothing, so every rank has equally many, and at least one.
        """
        num_tokens = packed.num_tokens
        share = -(-num_tokens // self.size)
        begin, fill = self.rank * share, self.size * share - num_tokens
        own = slice(begin, begin + share)
        # On the host, which need not wait for the device to know how many labels are its own.
        on_host = packed.label_gathering
        positions = packed.label_positions.cpu() if on_host is None else on_host.index_on_host
        # Anywhere in the row: with shared prompts the places neither ascend nor differ.
        chosen = ((positions >= begin) & (positions < begin + share)).nonzero()[:, 0]
        device = packed.input_ids.device
        gathering = Gathering(positions[chosen] - begin, share, device=device)
        (mine,) = to_device([chosen], device)
        return replace(
            packed,
            input_ids=F.pad(packed.input_ids, (0, fill))[:, own],
            position_ids=F.pad(packed.position_ids, (0, fill))[:, own],
            context=SequenceParallelContext(packed.context, num_tokens, self),  # type: ignore[arg-type]
            label_positions=gathering.index,
            label_gathering=gathering,
            labels=packed.labels[mine],
            rows=packed.rows[mine],
            columns=packed.columns[mine],
        )

    def gather(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Outputs [batch, response] of all labels from each rank's own, the same on every rank; differentiable.

        Every rank must compute the same loss from them, and the gradients must be averaged over all ranks of the run.
        """
        return dict(zip(outputs, _SumOverGroup.apply(self, *outputs.values()), strict=True))


class SequenceParallelContext:
    """Attention of a whole packed row on the heads of this rank, between two exchanges of heads and tokens.

    Args:
        inner: attends as on one rank, where the whole row lies.
        num_tokens: of the row, without what fills up the ranks' slices.
    """

    def __init__(self, inner: Any, num_tokens: int, parallel: SequenceParallel) -> None:
        self.inner = inner
        self.num_tokens = num_tokens
        self.parallel = parallel

    @property
    def num_pairs(self) -> int:
        """This rank's share of the (query, key) pairs: it computes its part of the heads for all of them."""
        return (self.inner.num_pairs + self.parallel.rank) // self.parallel.size

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attention of the slice: query [1, query_heads, tokens, head_dim] -> [1, tokens, query_heads, value_dim]."""
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        return self.attend_tokens(
            query, key, value, scaling=scaling, sliding_window=sliding_window, softcap=softcap
        ).unsqueeze(0)

    def attend_tokens(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """query [tokens, query_heads, head_dim], key and value with key_value_heads -> [tokens, query_heads, value_dim]."""
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        # The fewest heads that both divide among the ranks and keep each query head on the rank of its key: size of them
        # where there are fewer key heads than ranks. The gradient of a head is the sum over its copies.
        copies = math.lcm(num_kv_heads, self.parallel.size) // num_kv_heads
        if num_heads % (copies * num_kv_heads):
            raise ConfigError(
                f"ulysses_sequence_parallel_size={self.parallel.size}: a layer with {num_heads} query and {num_kv_heads} "
                f"key heads does not divide among so many workers."
            )
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        query, key, value = _TokensToHeads.apply(self.parallel, self.num_tokens, query, key, value)
        output = self.inner.attend_tokens(
            query, key, value, scaling=scaling, sliding_window=sliding_window, softcap=softcap
        )
        return _HeadsToTokens.apply(self.parallel, output)


def _scatter_heads(parallel: SequenceParallel, num_tokens: int, parts: Sequence[Tensor]) -> list[Tensor]:
    """All heads of this rank's tokens, [share, heads, dim] -> its heads of all tokens, [tokens, heads / size, dim]."""
    size = parallel.size
    # One exchange for all parts: they are laid side by side.
    by_rank = [part.unflatten(1, (size, -1)).transpose(0, 1).flatten(2) for part in parts]
    sent = torch.cat(by_rank, -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=parallel.group)
    # Slices lie in the order of the ranks, so joined they are the row.
    whole = received.flatten(0, 1)[:num_tokens]
    pieces = whole.split([piece.shape[-1] for piece in by_rank], -1)
    return [piece.unflatten(-1, (-1, part.shape[-1])) for piece, part in zip(pieces, parts, strict=True)]


def _gather_heads(parallel: SequenceParallel, parts: Sequence[Tensor]) -> list[Tensor]:
    """The inverse, and so the adjoint, of `_scatter_heads`: what fills up the slices comes back as zero."""
    size, num_tokens = parallel.size, parts[0].shape[0]
    share = -(-num_tokens // size)
    flat = [part.flatten(1) for part in parts]
    sent = flat[0].new_empty(size * share, sum(part.shape[1] for part in flat))
    torch.cat(flat, -1, out=sent[:num_tokens])
    sent[num_tokens:].zero_()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=parallel.group)
    pieces = received.unflatten(0, (size, share)).split([part.shape[1] for part in flat], -1)
    return [
        piece.unflatten(-1, part.shape[1:]).transpose(0, 1).flatten(1, 2)
        for piece, part in zip(pieces, parts, strict=True)
    ]


# The backward of an exchange is an exchange. It runs on autograd's thread, but in the same order on every rank: a group's
# ranks hold the same graph, and within it a layer's exchanges hang on each other.
class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parallel: SequenceParallel, num_tokens: int, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.parallel = parallel
        return tuple(_scatter_heads(parallel, num_tokens, parts))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_gather_heads(ctx.parallel, grads)


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parallel: SequenceParallel, whole: Tensor) -> Tensor:
        ctx.parallel, ctx.num_tokens = parallel, whole.shape[0]
        return _gather_heads(parallel, [whole])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, _scatter_heads(ctx.parallel, ctx.num_tokens, [grad])[0]


class _SumOverGroup(torch.autograd.Function):
    """Sums over the group; the backward needs no communication.

    The ranks compute the same loss L from the sum, which together is size * L, and the average of the gradients over all
    ranks of the run divides by the size again. The derivative of size * L by a rank's own part is size times the gradient
    that every rank has of the sum.
    """

    @staticmethod
    def forward(ctx: Any, parallel: SequenceParallel, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.size = parallel.size
        # An output that is only logged, as the entropy mostly is, costs nothing in the backward.
        ctx.set_materialize_grads(False)
        total = torch.stack(parts)
        dist.all_reduce(total, group=parallel.group)
        # No views: a loss may change an output in place.
        return tuple(part.clone() for part in total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *(None if grad is None else grad * ctx.size for grad in grads)
