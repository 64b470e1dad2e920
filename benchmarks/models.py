"""The models that benchmarks run: true shapes with random weights, and SmolLM2-135M-Instruct with its own.

    python -m benchmarks.models qwen2.5-0.5b        # prints the folder

Each is a folder in Hugging Face format that is made once, in ``BURNISH_BENCHMARK_MODELS`` or ``~/.cache/burnish/models``.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from burnish.cli.model import run_smollm2

SMOLLM2 = "smollm2-135m-instruct"
# What a command line may say instead.
_SHORT = {"smollm2": SMOLLM2}
_QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}


def _qwen(hidden: int, layers: int, heads: int, kv_heads: int, mlp: int) -> PreTrainedConfig:
    return Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=mlp,
        tie_word_embeddings=True,
        **_QWEN,
    )


def _tiny() -> PreTrainedConfig:
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=512,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )


SHAPES = {
    "tiny": _tiny,
    "qwen2.5-0.5b": lambda: _qwen(896, 24, 14, 2, 4864),
    "qwen2.5-1.5b": lambda: _qwen(1536, 28, 12, 2, 8960),
}
"""Weights are random, bf16 in the file. Draws are close to uniform over the vocabulary, which costs an engine what any costs."""


def cache_folder() -> Path:
    """Where the models are kept."""
    return Path(os.environ.get("BURNISH_BENCHMARK_MODELS", "~/.cache/burnish/models")).expanduser()


def model_path(name: str) -> str:
    """The folder of the model called ``name``, made first if it is not there; any other name is a path and returned as it is."""
    name = _SHORT.get(name, name)
    if name != SMOLLM2 and name not in SHAPES:
        return name
    folder = cache_folder() / name
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside its place and then renamed: a run that is interrupted leaves no half of a model.
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            (_make_smollm2 if name == SMOLLM2 else _make_random)(name, Path(work) / "model")
            shutil.rmtree(folder, ignore_errors=True)
            (Path(work) / "model").rename(folder)
    return str(folder)


def word_tokenizer_path(vocab_size: int) -> str:
    """The folder of a tokenizer whose tokens are the numbers below ``vocab_size``, separated by spaces; made where it is missing.

    With it a text of so many numbers is a prompt of exactly those ids, whatever model reads it. There is no chat template.
    """
    folder = cache_folder() / f"words-{vocab_size}"
    if not (folder / "tokenizer_config.json").exists():
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import WhitespaceSplit

        # Words of their own: a special token is found inside other words too.
        special = {"<unk>": 0, "<bos>": 1, "<eos>": 2}
        vocabulary = special | {str(token): token for token in range(len(special), vocab_size)}
        words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
        words.pre_tokenizer = WhitespaceSplit()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=words, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
            )
            tokenizer.save_pretrained(Path(work) / "words")
            shutil.rmtree(folder, ignore_errors=True)
            (Path(work) / "words").rename(folder)
    return str(folder)


def _make_random(name: str, folder: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(SHAPES[name](), dtype=torch.bfloat16)
    model.to("cpu").save_pretrained(folder)
    # Engines of others load one with the model, whether they need it or not.
    PreTrainedTokenizerFast.from_pretrained(word_tokenizer_path(model.config.vocab_size)).save_pretrained(folder)


def _make_smollm2(name: str, folder: Path) -> None:
    run_smollm2(str(folder))


def main() -> None:
    """Makes a model and prints its folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=[SMOLLM2, *_SHORT, *SHAPES])
    args = parser.parse_args()
    if args.name is None:
        parser.error(f"name one of {', '.join([SMOLLM2, *SHAPES])}")
    else:
        print(model_path(args.name))


if __name__ == "__main__":
    main()
