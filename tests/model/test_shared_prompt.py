"""A prompt that is computed once for all its responses gives what it gives when each row computes its own."""

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from burnish.model import attention
from burnish.model.activations import checkpoint_activations
from burnish.model.attention import PackedContext
from burnish.model.gathering import Gathering
from burnish.model.packing import Packed, pack, row_sizes
from burnish.model.policy import PolicyModule, ValueModule
from tests.model.tiny_models import FAMILIES, build, padded_rows, random_rows

SHARING_FAMILIES = ["llama", "qwen3", "mistral_sliding", "gemma2_softcaps"]

# Prompt lengths with the lengths of their responses: ragged, of one token, a prompt of one row, two prompts of one length.
GROUPS = [(6, [3, 1, 7]), (1, [2, 2]), (6, [5, 1]), (9, [4]), (17, [1, 1]), (3, [6, 12, 2, 1])]


@pytest.fixture(autouse=True)
def wide_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' norms round to float32 even in a float64 model: the sum of gradients is not that of rounded ones."""

    def normed(x: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * normed(x, self.variance_epsilon)

    def gemma(self: Any, x: Tensor) -> Tensor:
        return normed(x, self.eps) * (1 + self.weight)

    for norm in (LlamaRMSNorm, MistralRMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(norm, "forward", forward)
    monkeypatch.setattr(Gemma2RMSNorm, "forward", gemma)


def grouped_rows(groups: list[tuple[int, list[int]]] = GROUPS, side: str = "left") -> dict[str, Tensor]:
    prompts, responses = [], []
    for number, (prompt, lengths) in enumerate(groups):
        (ids,), _ = random_rows([(prompt, 1)], seed=100 + number)
        _, own = random_rows([(1, length) for length in lengths], seed=number)
        prompts += [ids] * len(lengths)
        responses += own
    return padded_rows(prompts, responses, side)


def prompts_of(rows: dict[str, Tensor]) -> list[int]:
    return row_sizes(**rows).prompts


def select(rows: dict[str, Tensor], indices: list[int]) -> dict[str, Tensor]:
    return {name: tensor[indices] for name, tensor in rows.items()}


def both(rows: dict[str, Tensor]) -> Iterator[Packed]:
    """Each row with its own prompt, and with prompts shared."""
    yield pack(**rows)
    yield pack(**rows, prompts=prompts_of(rows))


def outputs_and_gradient(
    model: PreTrainedModel, packed: Packed, scale: Tensor, module: type[torch.nn.Module] = PolicyModule
) -> tuple[Tensor, Tensor]:
    policy = module(model)
    if isinstance(policy, ValueModule):
        torch.nn.init.normal_(policy.value_head.weight, generator=torch.Generator().manual_seed(1))
    (values,) = policy(packed).values()
    (values * scale[:, : values.shape[1]]).sum().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in policy.parameters() if parameter.grad is not None])
    policy.zero_grad()
    return values.detach(), gradient


def some_scale(rows: dict[str, Tensor]) -> Tensor:
    return torch.randn(rows["label_mask"].shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def assert_same(model: PreTrainedModel, rows: dict[str, Tensor]) -> None:
    (alone, alone_grad), (shared, shared_grad) = (
        outputs_and_gradient(model, packed, some_scale(rows)) for packed in both(rows)
    )
    assert float(alone_grad.norm()) > 0
    assert float((shared - alone).abs().max()) < 1e-10
    assert float((shared_grad - alone_grad).norm() / alone_grad.norm()) < 1e-10


@pytest.mark.parametrize("family", SHARING_FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_log_probs_and_gradient_are_those_of_rows_with_their_own_prompts(family: str, side: str) -> None:
    assert_same(build(family, torch.float64), grouped_rows(side=side))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(SHARING_FAMILIES)))
def test_every_family_can_share(family: str) -> None:
    rows = grouped_rows()
    with torch.no_grad():
        policy = PolicyModule(build(family))
        alone, shared = (policy(packed)["log_probs"] for packed in both(rows))
    assert float((shared - alone).abs().max()) < 1e-4


def test_values_and_their_gradient_are_the_same() -> None:
    model = build("llama", torch.float64)
    rows = grouped_rows()
    results = [
        outputs_and_gradient(model.get_decoder(), packed, some_scale(rows), ValueModule) for packed in both(rows)
    ]
    for alone, shared in zip(*results, strict=True):
        torch.testing.assert_close(shared, alone, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("family", ["llama", "gemma2_softcaps"])
def test_the_gradient_is_the_same_for_any_cut_of_groups(family: str) -> None:
    model, rows = build(family, torch.float64), grouped_rows()
    scale, num = some_scale(rows), len(rows["label_mask"])
    _, whole = outputs_and_gradient(model, pack(**rows), scale)
    for size in (1, 2, 5):
        total = torch.zeros_like(whole)
        for start in range(0, num, size):
            indices = list(range(start, min(start + size, num)))
            part = select(rows, indices)
            packed = pack(**part, prompts=prompts_of(part))
            total += outputs_and_gradient(model, packed, scale[indices])[1]
        assert float((total - whole).norm() / whole.norm()) < 1e-10


def test_rows_of_a_group_need_not_be_neighbours() -> None:
    rows = grouped_rows()
    order = torch.randperm(len(rows["label_mask"]), generator=torch.Generator().manual_seed(3)).tolist()
    assert_same(build("mistral_sliding", torch.float64), select(rows, order))


def test_gaps_in_the_labels_and_rows_without_any_change_nothing() -> None:
    rows = grouped_rows()
    rows["label_mask"][0] = False  # The first of its group, which would compute the prompt.
    rows["label_mask"][2, 1:4] = False
    rows["label_mask"][5, 0] = False
    rows["label_mask"][-4:] = False  # A whole group.
    assert_same(build("llama", torch.float64), rows)
    packed = pack(**rows, prompts=prompts_of(rows))
    assert packed.labels.numel() == int(rows["label_mask"].sum())


def test_recomputed_activations_share_as_well() -> None:
    rows = grouped_rows()
    gradients = []
    for recompute in (False, True):
        model = build("gemma2_softcaps", torch.float64)
        if recompute:
            checkpoint_activations(model)
        model.train()
        gradients.append(outputs_and_gradient(model, pack(**rows, prompts=prompts_of(rows)), some_scale(rows))[1])
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)


def test_a_prompt_comes_once_and_its_responses_go_on_from_it() -> None:
    rows = padded_rows([[5, 6, 7], [8], [5, 6, 7]], [[9, 10, 11], [12, 13], [14, 15]])
    packed = pack(**rows, prompts=[0, 1, 0])
    assert packed.input_ids.tolist() == [[5, 6, 7, 9, 10, 14, 8, 12]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1]]
    assert packed.context.lengths == [3, 2, 1, 2]
    assert packed.context.prefixes == [(0, 0), (0, 3), (0, 3), (0, 0)]
    # 9 and 14 are predicted by the last token of one prompt.
    assert packed.labels.tolist() == [9, 10, 11, 14, 15, 12, 13]
    assert packed.label_positions.tolist() == [2, 3, 4, 2, 5, 6, 7]
    assert packed.rows.tolist() == [0, 0, 0, 2, 2, 1, 1]
    assert packed.num_tokens == 8
    # The prompt 6, two own tokens 2 x 3 + 3, one 3 + 1, and the row by itself 3.
    assert packed.context.num_pairs == 6 + 9 + 4 + 3


def test_responses_of_one_token_cost_nothing_but_their_prompt() -> None:
    rows = padded_rows([[5, 6, 7]] * 4, [[9], [10], [11], [12]])
    packed = pack(**rows, prompts=[0] * 4)
    assert packed.input_ids.tolist() == [[5, 6, 7]]
    assert packed.label_positions.tolist() == [2] * 4


def test_nothing_to_share_is_packed_as_without_sharing() -> None:
    rows = padded_rows(*random_rows([(3, 4), (3, 2), (5, 1)]))
    alone, shared = both(rows)
    assert torch.equal(alone.input_ids, shared.input_ids)
    assert torch.equal(alone.label_positions, shared.label_positions)
    assert alone.context.lengths == shared.context.lengths
    assert not shared.context.has_prefixes


def test_sizes_are_the_tokens_that_packing_computes() -> None:
    rows = grouped_rows()
    rows["label_mask"][0] = False
    rows["label_mask"][2, 1:4] = False
    sizes = row_sizes(**rows)
    assert sum(sizes.lengths) == pack(**rows).num_tokens
    assert sizes.shared_tokens == pack(**rows, prompts=sizes.prompts).num_tokens
    for row, length in enumerate(sizes.lengths):
        if length:
            assert pack(**select(rows, [row])).num_tokens == length


def test_prompts_of_equal_length_and_other_tokens_are_others() -> None:
    rows = padded_rows([[5, 6], [6, 5], [5, 6], [6]], [[9], [9], [8], [9]])
    assert row_sizes(**rows).prompts == [0, 1, 0, 2]


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attention_after_a_prefix_equals_a_masked_softmax(window: int | None, softcap: float | None) -> None:
    lengths = [7, 3, 30, 1, 2, 2, 11, 12]
    prefixes = [(0, 0), (0, 7), (0, 7), (0, 7), (0, 0), (41, 2), (41, 2), (0, 0)]
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    q = torch.randn(total, 4, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(total, 2, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    context = PackedContext(lengths, prefixes=prefixes)
    ours = context.attend_tokens(q, k, v, scaling=0.3, sliding_window=window, softcap=softcap)
    start, num_pairs = 0, 0
    for length, (first, prefix) in zip(lengths, prefixes, strict=True):
        own = slice(start, start + length)
        keys, values = (torch.cat([x[first : first + prefix], x[own]]).repeat_interleave(2, 1) for x in (k, v))
        distance = prefix + torch.arange(length)[:, None] - torch.arange(prefix + length)
        visible = (distance >= 0) & (distance < (window or total))
        scores = torch.einsum("qhd,khd->hqk", q[own], keys) * 0.3
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, values)
        torch.testing.assert_close(ours[own], expected, atol=1e-10, rtol=0)
        start, num_pairs = start + length, num_pairs + int((distance >= 0).sum())
    assert context.num_pairs == num_pairs


def test_soft_caps_go_to_flash_attn_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, max_q: int, max_k: int, **how: Any
    ) -> Tensor:
        """The documented meaning, with the package's names: causal from the bottom right, a window to the left."""
        assert (max_q, max_k, how["causal"]) == (4, 6, True)
        outputs = []
        for i in range(len(q_ends) - 1):
            queries, keys = slice(q_ends[i], q_ends[i + 1]), slice(k_ends[i], k_ends[i + 1])
            scores = torch.einsum("qhd,khd->hqk", q[queries], k[keys].repeat_interleave(2, 1)) * how["softmax_scale"]
            scores = how["softcap"] * torch.tanh(scores / how["softcap"])
            num_q, num_k = scores.shape[1:]
            distance = num_k - num_q + torch.arange(num_q)[:, None] - torch.arange(num_k)
            seen = (distance >= 0) & (distance <= how["window_size"][0])
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v[keys].repeat_interleave(2, 1)))
        return torch.cat(outputs)

    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    context = PackedContext([4, 2, 3], prefixes=[(0, 0), (0, 4), (0, 0)])
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(9, 4, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(9, 2, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    how: dict[str, Any] = {"scaling": 0.3, "sliding_window": 3, "softcap": 1.5}
    padded = context.attend_tokens(q, k, v, **how)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(attention, "has_flash_attn", lambda: True)
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda query, value, softcap: softcap is None)
    torch.testing.assert_close(context.attend_tokens(q, k, v, **how), padded, atol=1e-12, rtol=0)


@pytest.mark.parametrize("index", [[0, 1, 2], [2, 2, 0, 2, 1, 1], [1], []])
def test_gathering_adds_up_what_it_has_copied(index: list[int]) -> None:
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    grad = torch.randn(len(index), 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gathering = Gathering(torch.tensor(index, dtype=torch.int64), 3)
    ours = gathering(x)
    expected = x[torch.tensor(index, dtype=torch.int64)]
    assert torch.equal(ours, expected)
    (ours_grad,) = torch.autograd.grad(ours, x, grad)
    (expected_grad,) = torch.autograd.grad(expected, x, grad)
    torch.testing.assert_close(ours_grad, expected_grad, atol=1e-14, rtol=0)


def test_copies_in_bfloat16_are_added_up_in_float32() -> None:
    # In bfloat16, 256 + 1 is 256 again, as often as it is added.
    grad = torch.tensor([[256.0]] + [[1.0]] * 256, dtype=torch.bfloat16)
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    Gathering(torch.zeros(257, dtype=torch.int64), 1)(x).backward(grad)
    assert x.grad is not None
    assert float(x.grad) == 512.0


def test_a_flash_attn_that_cannot_be_loaded_is_as_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is built for one release of torch; another one then lacks its symbols."""
    attention.has_flash_attn.cache_clear()
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level("WARNING", "burnish.model"):
        assert not attention.has_flash_attn()
    assert "undefined symbol" in caplog.text
    attention.has_flash_attn.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    sys.modules["flash_attn"].__spec__ = ModuleSpec("flash_attn", None)
    assert not attention.has_flash_attn()
    attention.has_flash_attn.cache_clear()
