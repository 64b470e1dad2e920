"""What `burnish export` writes loads in vLLM as in transformers, and `burnish generate` by vLLM answers as by its own engine."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from burnish.config.actor_rollout_ref import HFModelConfig
from burnish.model import lora
from burnish.model.load import load_causal_lm
from burnish.trainer.offline.export import ExportOptions, export
from burnish.trainer.offline.generate import Asking, prepare, rows_of
from burnish.trainer.offline.settings import AskOptions

pytest.importorskip("vllm")

PROMPTS = ["12+7=", "3+3=", "95-67="]


@pytest.fixture
def adapter(tmp_path: Path, tiny_model_path: str) -> Path:
    """Adapters that change what the tiny model answers."""
    model = load_causal_lm(tiny_model_path, attn=False)
    settings = HFModelConfig(lora_rank=4, lora_alpha=8, target_modules=["all-linear"])
    lora.add_adapters(model, settings, tiny_model_path)
    torch.manual_seed(0)
    weights = {lora.hf_name(name): torch.randn(part.shape) * 0.15 for name, part in lora.adapter_parameters(model)}
    lora.save_adapters(model, weights, tmp_path / "adapter")
    return tmp_path / "adapter"


def greedy(model: str, engine: str) -> list[str]:
    """burnish's responses, by one of its engines."""
    options = AskOptions(
        prompts=PROMPTS,
        max_tokens=8,
        temperature=0.0,
        engine=engine,
        device="cpu",
        dtype="float32",
        overrides=["actor_rollout_ref.rollout.gpu_memory_utilization=0.1", "actor_rollout_ref.rollout.mode=sync"],
    )
    asked = prepare(model, options)
    with Asking(asked) as asking:
        return [row["response"] for batch in asking.batches() for row in rows_of(batch, asked.tokenizer, asked.config)]


def greedy_of_vllm(folder: str) -> list[str]:
    """vLLM's own responses to the chat, its own way of loading and sampling."""
    import vllm

    engine = vllm.LLM(folder, dtype="float32", max_model_len=64, enforce_eager=True, gpu_memory_utilization=0.1)
    try:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=8)
        chats = [[{"role": "user", "content": text}] for text in PROMPTS]
        return [output.outputs[0].text for output in engine.chat(chats, params, use_tqdm=False)]
    finally:
        engine.llm_engine.engine_core.shutdown()


def test_merged_adapters_answer_alike_in_vllm_transformers_and_burnish(
    adapter: Path, tmp_path: Path, tiny_model_path: str
) -> None:
    out = str(tmp_path / "out")
    export(ExportOptions(checkpoint=str(adapter), out=out))
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    expected = []
    for text in PROMPTS:
        chat = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        generated = model.generate(**ids, max_new_tokens=8, do_sample=False)
        expected.append(tokenizer.decode(generated[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    assert greedy_of_vllm(out) == expected
    assert greedy(out, "native") == expected
    # Base and adapters apart, as in training.
    assert greedy(str(adapter), "vllm") == expected
    assert greedy(tiny_model_path, "native") != expected
