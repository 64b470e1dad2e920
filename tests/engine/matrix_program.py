"""One gradient, computed in every way that an engine can be told to; run on several ranks as `engine_program` is."""

import os
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from burnish.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from burnish.engine import FSDPEngine, offload, prepare
from burnish.model import policy
from burnish.model.fused_layers import fuse_layers
from burnish.model.load import build_causal_lm
from burnish.protocol import DataProto
from tests.engine.engine_program import VOCAB, main, my_share, policy_loss

PROGRAM = Path(__file__)
TEMPERATURE = 0.7
OUTPUTS = ("log_probs", "entropy")
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large weights, so that a wrong mask or position shows.
    "initializer_range": 0.2,
}

# Each way with its values; the first of each is the plainest.
FACTORS: dict[str, tuple[str, ...]] = {
    "ranks": ("1", "2 sharded", "2 replicated", "2 ulysses", "4 sharded", "4 hybrid", "4 ulysses"),
    "split": ("whole", "three rows", "one row", "tokens"),
    "family": ("llama", "qwen2", "qwen3"),
    "head": ("one chunk", "many chunks", "full logits"),
    "dtype": ("float64", "float32"),
    "prompts": ("apart", "shared"),
    "layers": ("of transformers", "fused"),
    "activations": ("kept", "recomputed"),
    "state": ("stays", "offloaded"),
    "trained": ("weights", "adapters"),
}
_RANKS: dict[str, dict[str, Any]] = {
    "1": {},
    "sharded": {"fsdp_size": -1},
    "replicated": {"fsdp_size": 1},
    "hybrid": {"fsdp_size": 2},
    "ulysses": {"ulysses_sequence_parallel_size": 2},
}
_SPLITS: dict[str, dict[str, Any]] = {
    "whole": {},
    "three rows": {"micro_batch_size": 3},
    "one row": {"micro_batch_size": 1},
    "tokens": {"max_token_len": 31},
}


def pairwise_cases() -> list[dict[str, str]]:
    """Few cases in which every value of a factor meets every value of every other one."""
    open_pairs = {
        frozenset({(a, value), (b, other)})
        for a, b in combinations(FACTORS, 2)
        for value in FACTORS[a]
        for other in FACTORS[b]
    }
    cases = [{name: values[0] for name, values in FACTORS.items()}]
    open_pairs -= pairs_of(cases[0])
    while open_pairs:
        case = dict(min(sorted(pair) for pair in open_pairs))
        for name, values in FACTORS.items():
            if name not in case:
                case[name] = max(values, key=lambda value: len(pairs_of(case | {name: value}) & open_pairs))
        cases.append({name: case[name] for name in FACTORS})
        open_pairs -= pairs_of(case)
    return cases


def pairs_of(case: dict[str, str]) -> set[frozenset[tuple[str, str]]]:
    """The pairs of values that meet in ``case``."""
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def name_of(case: dict[str, str]) -> str:
    return ", ".join(case.values())


def model_config(family: str) -> PreTrainedConfig:
    """Tied without biases; with biases; with norms of the heads and a head size of its own."""
    if family == "llama":
        return LlamaConfig(**_SIZES, tie_word_embeddings=True)
    if family == "qwen2":
        return Qwen2Config(**_SIZES, tie_word_embeddings=False)
    return Qwen3Config(**_SIZES, head_dim=12, tie_word_embeddings=False)


def group_batch(dtype: torch.dtype) -> DataProto:
    """Three prompts with four responses each, ragged, in mixed order; one row trains nothing."""
    generator = torch.Generator().manual_seed(0)
    prompt_lengths, response_lengths = [7, 1, 9], torch.randint(1, 9, (12,), generator=generator).tolist()
    order = torch.randperm(12, generator=generator).tolist()
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator) for length in prompt_lengths]
    ids, attention, sampled = [], [], []
    for row in order:
        prompt = prompts[row // 4]
        response = torch.randint(3, VOCAB, (response_lengths[row],), generator=generator)
        left, right = 9 - len(prompt), 8 - len(response)
        ids.append(F.pad(torch.cat([prompt, response]), (left, right)))
        attention.append(F.pad(torch.ones(len(prompt) + len(response)), (left, right)).bool())
        sampled.append(F.pad(torch.ones(len(response)), (0, right)).bool())
    input_ids, response_mask = torch.stack(ids), torch.stack(sampled)
    loss_mask = response_mask.clone()
    loss_mask[5] = False

    def normal() -> Tensor:
        # Numbers that float32 holds, for every dtype the same.
        return torch.where(response_mask, torch.randn(12, 8, generator=generator), 0).to(dtype)

    return DataProto.from_dict(
        tensors={
            "input_ids": input_ids,
            "attention_mask": torch.stack(attention),
            "responses": input_ids[:, 9:],
            "response_mask": response_mask,
            "loss_mask": loss_mask,
            "advantages": normal(),
            "old_log_probs": normal() * 0.25 - 3.875,
        }
    )


def adapter_weights(family: str) -> dict[str, Tensor]:
    """Adapters of the attention's inputs and the MLP's output, all of them at work."""
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, parameter in build_causal_lm(model_config(family), torch.float32).named_parameters():
        if name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight")):
            rows, columns = parameter.shape
            layer = name.removesuffix(".weight")
            weights[f"{layer}.lora_A.weight"] = torch.randn(3, columns, generator=generator) * 0.2
            weights[f"{layer}.lora_B.weight"] = torch.randn(rows, 3, generator=generator) * 0.2
    return weights


def save_adapter(family: str, folder: Path) -> Path:
    """A folder of `adapter_weights` as peft writes it."""
    import peft

    folder.mkdir(exist_ok=True)
    targets = ["q_proj", "v_proj", "down_proj"]
    peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM").save_pretrained(folder)
    weights = {f"base_model.model.{name}": weight for name, weight in adapter_weights(family).items()}
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def widen_norms(patch: pytest.MonkeyPatch) -> None:
    """Lets transformers' norms compute in float64 where the model does.

    They round to float32 in any model, and a gradient that is added up before it is rounded is then not the sum of rounded
    ones.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)

    for norm in (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
        patch.setattr(norm, "forward", forward)


def full_logits_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Any,
    transform: Any,
    temperature: float,
    outputs: Any,
) -> dict[str, Tensor]:
    """The head by torch's own operations, all logits at once."""
    log_probs = (transform(F.linear(hidden, weight, bias)) / temperature).log_softmax(-1)
    return {
        "log_probs": log_probs.gather(1, labels[:, None])[:, 0],
        "entropy": -(log_probs.exp() * log_probs).sum(-1),
    }


def gradient(case: dict[str, str], folder: Path) -> dict[str, Tensor]:
    """The whole gradient of `group_batch` as ``case`` computes it, by the names of the Hugging Face model."""
    dtype = getattr(torch, case["dtype"])
    layout = case["ranks"].split()[-1]
    with pytest.MonkeyPatch.context() as patch:
        widen_norms(patch)
        fuse = fuse_layers if case["layers"] == "fused" else lambda model: False
        patch.setattr(prepare, "fuse_where_it_pays", lambda model, *_: fuse(model))
        if case["head"] == "many chunks":
            patch.setattr(policy, "fused_head", partial(policy.fused_head, chunk_size=5))
        if case["head"] == "full logits":
            patch.setattr(policy, "fused_head", full_logits_head)
        offloads = case["state"] == "offloaded"
        if offloads:
            patch.setattr(offload, "_DEVICES", {"cpu"})
        adapter = None
        if case["trained"] == "adapters":
            # Each rank has a folder of its own: they write at the same time.
            adapter = str(save_adapter(case["family"], folder / f"{case['family']} {os.getpid()}"))
        engine = FSDPEngine(
            HFModelConfig(
                enable_gradient_checkpointing=case["activations"] == "recomputed",
                enable_activation_offload=offloads,
                lora_adapter_path=adapter,
            ),
            FSDPEngineConfig(dtype=case["dtype"], param_offload=offloads, optimizer_offload=offloads, **_RANKS[layout]),
            FSDPOptimizerConfig(),
            model=build_causal_lm(model_config(case["family"]), dtype),
            share_prompts=case["prompts"] == "shared",
        )
        rows = my_share(group_batch(dtype), engine)
        split = _SPLITS[case["split"]]
        # A pass in between changes nothing.
        engine.infer_batch(rows, temperature=TEMPERATURE, **split)
        engine.park()
        engine.train_batch(rows, policy_loss(), temperature=TEMPERATURE, outputs=OUTPUTS, **split)
        found = engine.full_gradients()
    return {name.removeprefix("model.").replace(".default", ""): grad.double() for name, grad in found.items()}


def run_matrix_case(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """On this rank; the names of the results are the cases'."""
    return gradient({name: case[name] for name in FACTORS}, out)


if __name__ == "__main__":
    main(run_matrix_case)
