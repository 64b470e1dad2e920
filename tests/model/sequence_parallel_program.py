"""Packed rows through models and attention on ranks that share the tokens; run as `tests.engine.engine_program` is."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from burnish.model.activations import checkpoint_activations
from burnish.model.attention import PackedContext
from burnish.model.load import build_causal_lm
from burnish.model.packing import Packed, pack
from burnish.model.policy import PolicyModule, ValueModule
from burnish.model.sequence_parallel import SequenceParallel, SequenceParallelContext
from tests.engine.engine_program import main
from tests.model.tiny_models import _COMMON, FAMILIES, padded_rows, random_rows

CONFIGS = FAMILIES | {
    "llama_4q_1kv": LlamaConfig(**(_COMMON | {"num_key_value_heads": 1})),
    "llama_12q_6kv": LlamaConfig(
        **(_COMMON | {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6})
    ),
}
# The first row has one token before its label, and with it alone most ranks have none.
LENGTHS = [(1, 1), (5, 9), (20, 7), (3, 1), (9, 12), (2, 2)]


def group() -> SequenceParallel | None:
    """All ranks of this program as one group."""
    if not dist.is_initialized():
        return None
    assert dist.group.WORLD is not None
    return SequenceParallel(dist.group.WORLD, dist.get_world_size(), dist.get_rank())


def packed_rows(num_rows: int, shared_prompts: bool) -> Packed:
    """The first rows of `LENGTHS`, packed; with shared prompts all but the first have that of the third."""
    prompts, responses = random_rows(LENGTHS[:num_rows])
    if not shared_prompts:
        return pack(**padded_rows(prompts, responses))
    prompts = [prompts[0], *[prompts[2]] * (num_rows - 1)]
    return pack(**padded_rows(prompts, responses), prompts=[0, *[1] * (num_rows - 1)])


def module_of(name: str, kind: str, dtype: torch.dtype) -> PolicyModule | ValueModule:
    """A tiny model, the same on every rank; a value head that is not zero, so that a gradient reaches the backbone."""
    model: PreTrainedModel = build_causal_lm(CONFIGS[name], dtype)
    if kind == "policy":
        return PolicyModule(model)
    value = ValueModule(model.model)
    generator = torch.Generator().manual_seed(1)
    torch.nn.init.normal_(value.value_head.weight, generator=generator)
    return value


def through_a_model(case: dict[str, Any]) -> dict[str, Any]:
    """Outputs of all labels and the gradient of a function of them, as the average over the ranks."""
    parallel, packed = group(), packed_rows(case.get("num_rows", len(LENGTHS)), case.get("shared_prompts", False))
    module = module_of(case["model"], case["kind"], getattr(torch, case["dtype"]))
    if case.get("recompute"):
        checkpoint_activations(module.model)
        module.train()
    outputs = ("log_probs", "entropy") if case["kind"] == "policy" else ("values",)
    mine = packed if parallel is None else parallel.slice(packed)
    values = module(mine, 0.7, outputs)
    values = values if parallel is None else parallel.gather(values)
    generator = torch.Generator().manual_seed(0)
    loss = torch.zeros((), dtype=torch.float64)
    for value in values.values():
        # Of the row as a whole, so that a rank that saw its own labels only would have another gradient.
        weights = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        loss = loss + (value.double() * weights).sum().square()
    loss.backward()
    gradients = {}
    for name, parameter in module.named_parameters():
        gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if parallel is not None:
            dist.all_reduce(gradients[name])
            gradients[name] /= parallel.size
    return {
        "outputs": {name: value.detach() for name, value in values.items()},
        "gradients": gradients,
        "num_tokens": mine.num_tokens,
        "num_labels": mine.labels.numel(),
        "num_pairs": mine.context.num_pairs,
    }


def through_attention(case: dict[str, Any]) -> dict[str, Any]:
    """Attention of random heads with its gradient, each of the whole row."""
    parallel, lengths = group(), [7, 1, 5, 6]
    num_tokens = sum(lengths)
    generator = torch.Generator().manual_seed(2)

    def draw(heads: int, dim: int) -> Tensor:
        return torch.randn(num_tokens, heads, dim, generator=generator, dtype=torch.float64)

    heads, kv_heads = case["heads"]
    query, key, value, weights = draw(heads, 8), draw(kv_heads, 8), draw(kv_heads, 6), draw(heads, 6)
    size, rank = (1, 0) if parallel is None else (parallel.size, parallel.rank)
    share = -(-num_tokens // size)
    mine = slice(rank * share, (rank + 1) * share)

    def slice_of(x: Tensor) -> Tensor:
        filled = torch.cat([x, x.new_full((size * share - num_tokens, *x.shape[1:]), 7.0)])
        return filled[mine].clone().requires_grad_()

    context: Any = PackedContext(lengths)
    if parallel is not None:
        context = SequenceParallelContext(context, num_tokens, parallel)
    leaves = [slice_of(x) for x in (query, key, value)]
    output = context.attend_tokens(*leaves, scaling=0.3, sliding_window=case["window"], softcap=case["softcap"])
    (output * slice_of(weights).detach()).sum().backward()
    parts = [output.detach(), *(leaf.grad for leaf in leaves)]
    if parallel is not None:
        whole = [[torch.empty_like(part) for _ in range(size)] for part in parts]
        for part, pieces in zip(parts, whole, strict=True):
            dist.all_gather(pieces, part.contiguous())
        parts = [torch.cat(pieces)[:num_tokens] for pieces in whole]
    return dict(zip(("output", "query", "key", "value"), parts, strict=True))


def run_case(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """One case on this rank."""
    return through_attention(case) if "heads" in case else through_a_model(case)


if __name__ == "__main__":
    main(run_case)
