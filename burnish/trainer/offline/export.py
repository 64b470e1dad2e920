"""``burnish export``: a checkpoint as a folder that transformers, vLLM and others load.

The folder is written under a temporary name, read back by transformers and compared with what was to be written, weight by weight
and logit by logit; only then does it get its name.
"""

from __future__ import annotations

import gc
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from burnish.engine.checkpoint.model_files import VALUE_HEAD_FILE
from burnish.model import lora
from burnish.model.load import eos_token_ids
from burnish.trainer.ending import something_to_lose
from burnish.trainer.offline.models import DTYPES, load_model, load_value_head, merge_adapters, stored_dtype
from burnish.trainer.offline.proof import Proof, not_finite
from burnish.trainer.offline.source import ModelSource, Role, find_model
from burnish.utils import local_paths
from burnish.utils.durable import sync_folder, sync_tree
from burnish.utils.errors import ConfigError, ModelError, ResourceError

# Beside the weights: configuration, tokenizer, and what a file system needs.
_MARGIN_BYTES = 64 << 20
# Of files that make up a model, with what people write beside it to describe it; a name without an ending is none.
_MODEL_ENDS = (".json", ".safetensors", ".bin", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".md", ".gguf")
_SIZE = re.compile(r"(?i)\d+(\.\d+)?\s*[KMGT]i?B")
_PROBE_TEXT = "What is 12 + 34?\n  Größe: 1,5 €"


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What to export and how.

    Attributes:
        checkpoint: see `burnish.trainer.offline.source.find_model`.
        out: the folder to write.
        dtype: of the weights: auto (as the checkpoint has them), bf16, fp16 or fp32.
        lora: of a model with adapters: ``merged``, one model; or ``adapter``, the adapters alone in peft's format.
        max_shard_size: of one file of weights, as 5GB.
        role: actor or critic of a checkpoint; None: the actor.
        base: of adapters, instead of the one that their file names.
        overwrite: replace a model that is at ``out`` already.
        trust_remote_code: run Python code that comes with the model.
    """

    checkpoint: str
    out: str
    dtype: str = "auto"
    lora: str = "merged"
    max_shard_size: str = "5GB"
    role: Role | None = None
    base: str | None = None
    overwrite: bool = False
    trust_remote_code: bool = False


def export(options: ExportOptions) -> dict[str, Any]:
    """Exports a model, and proves that the folder holds it.

    Returns:
        what was written: ``out``, ``checkpoint``, ``step``, ``holds`` (model, adapter or critic), ``architecture``, ``dtype``,
        ``num_parameters``, ``num_bytes``, ``tied_head``, ``files``.

    Raises:
        ConfigError: an option that cannot be, no checkpoint, or a folder that would be overwritten.
        ModelError: the model cannot be loaded, does not fit the dtype, or what was written is not what was loaded.
        ResourceError: the disk has too little room.
    """
    _check_options(options)
    out = local_paths.named("--out", options.out).absolute()
    source = find_model(options.checkpoint, role=options.role, base=options.base)
    if options.lora == "adapter" and source.kind != "adapters":
        raise ConfigError(f"--lora=adapter: {source.shown} holds a whole model, no adapter.")
    _check_out(out, source, options.overwrite)
    loaded = _load(source, options)
    _check_room(out, sum(tensor.nbytes for tensor in (*loaded.weights.values(), *loaded.heads.values())))
    facts = {"out": str(out), "checkpoint": source.folder, "step": source.step, **loaded.facts()}
    with _becoming(out) as folder:
        _write(loaded, folder, options)
        proof = Proof.of(loaded.model, with_weights=not loaded.as_adapter)
        # One model at a time in memory.
        loaded.weights.clear()
        del loaded.model
        gc.collect()
        copy = _adapted(loaded, folder) if loaded.as_adapter else _read_back(loaded, folder, options)
        proof.check(copy, f"What was written for {out}")
        _check_rest(loaded, folder, options.trust_remote_code)
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return facts | {
        "num_bytes": sum(file.stat().st_size for file in files),
        "files": [str(file.relative_to(out)) for file in files],
    }


@dataclass
class _Loaded:
    """What is to be written.

    Attributes:
        stored: dtype of the model in its files.
        dtype: that it is loaded, and written, in.
        weights: what will be in the files of weights, by name.
        heads: the value head's; empty for an actor.
    """

    source: ModelSource
    model: PreTrainedModel
    tokenizer: Any
    as_adapter: bool
    stored: torch.dtype
    dtype: torch.dtype
    weights: dict[str, Tensor]
    heads: dict[str, Tensor]

    def facts(self) -> dict[str, Any]:
        """What there is to say about the model."""
        model, embedding = self.model, self.model.get_input_embeddings()
        head = model.get_output_embeddings()
        return {
            "holds": "adapter" if self.as_adapter else "critic" if self.source.role == "critic" else "model",
            "architecture": type(model).__name__,
            "dtype": str(next(iter(self.weights.values())).dtype).removeprefix("torch."),
            "num_parameters": sum(tensor.numel() for tensor in self.weights.values()),
            "tied_head": head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", object()),
        }


def _load(source: ModelSource, options: ExportOptions) -> _Loaded:
    as_adapter = options.lora == "adapter"
    trust = options.trust_remote_code
    stored = stored_dtype(source, trust_remote_code=trust)
    dtype = stored if options.dtype == "auto" or as_adapter else DTYPES[options.dtype]
    tokenizer = _tokenizer(source, trust)
    model = load_model(source, dtype, trust_remote_code=trust, attn=False)
    heads = load_value_head(source, dtype) if source.role == "critic" else {}
    if source.kind == "adapters" and not as_adapter:
        model = merge_adapters(model)
    weights: dict[str, Tensor] = dict(model.named_parameters())
    if as_adapter:
        weights = {}
        for name, parameter in lora.adapter_parameters(model):
            weights[name] = parameter.data if options.dtype == "auto" else parameter.data.to(DTYPES[options.dtype])
            # As peft computes with them: in the dtype of the layer beside which they are.
            parameter.data = weights[name].to(dtype)
    if wrong := not_finite(model):
        raise ModelError(_not_finite_words(wrong, dtype, stored))
    return _Loaded(source, model, tokenizer, as_adapter, stored, dtype, weights, heads)


def _write(loaded: _Loaded, folder: Path, options: ExportOptions) -> None:
    model, tokenizer = loaded.model, loaded.tokenizer
    if loaded.as_adapter:
        adapters = {lora.hf_name(name): tensor for name, tensor in loaded.weights.items()}
        lora.save_adapters(model, adapters, folder)
    else:
        _name_ends(model, tokenizer)
        model.save_pretrained(folder, max_shard_size=options.max_shard_size)
        _copy_code(loaded.source, folder, options.trust_remote_code)
    if loaded.heads:
        save_file(loaded.heads, folder / VALUE_HEAD_FILE)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _check_options(options: ExportOptions) -> None:
    if options.dtype != "auto" and options.dtype not in DTYPES:
        raise ConfigError(f"--dtype={options.dtype}: there is auto, bf16, fp16 and fp32.")
    if options.lora not in ("merged", "adapter"):
        raise ConfigError(f"--lora={options.lora}: there is merged and adapter.")
    if not _SIZE.fullmatch(options.max_shard_size.strip()):
        raise ConfigError(f"--max-shard-size={options.max_shard_size}: write a number and a unit, as 5GB or 500MB.")


def _check_out(out: Path, source: ModelSource, overwrite: bool) -> None:
    """That nothing is lost by writing to ``out``."""
    # Of adapters the base, too: they would be put onto a model that has them already.
    for folder in (local_paths.expanded(source.folder).resolve(), local_paths.expanded(source.model_path).resolve()):
        place = out.resolve()
        if folder.is_dir() and (place == folder or place in folder.parents or folder in place.parents):
            raise ConfigError(f"--out={out}: this is where the model is read from ({folder}). Name another folder.")
    if not local_paths.exists(out):
        return
    if not out.is_dir():
        raise ConfigError(f"--out={out}: there is a file of that name.")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise ConfigError(
            f"--out={out}: there is something in this folder. Name another, or replace a model by --overwrite."
        )
    if not any((out / name).is_file() for name in ("config.json", lora.CONFIG_FILE)):
        raise ConfigError(f"--out={out}: what is in this folder is no model, so --overwrite leaves it alone.")
    others = sorted(path.name for path in out.iterdir() if path.is_dir() or path.suffix not in _MODEL_ENDS)
    if others:
        raise ConfigError(
            f"--out={out}: beside a model this folder holds others ({', '.join(others[:5])}), so --overwrite leaves it alone."
        )


def _check_room(out: Path, num_bytes: int) -> None:
    place = next(folder for folder in out.parents if folder.exists())
    free = shutil.disk_usage(place).free
    if free < num_bytes + _MARGIN_BYTES:
        raise ResourceError(
            f"--out={out}: the model needs {num_bytes / 1e9:.2f} GB, and {place} has {free / 1e9:.2f} GB left. Free some, or "
            f"name another disk."
        )


def _tokenizer(source: ModelSource, trust_remote_code: bool) -> Any:
    """As it is, without the pad token that training gives one that has none."""
    if source.tokenizer is None:
        if source.role == "actor":
            raise ModelError(f"{source.shown} has no tokenizer beside it, without which nobody can use the model.")
        return None
    try:
        return AutoTokenizer.from_pretrained(source.tokenizer, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"The tokenizer of {source.tokenizer} cannot be loaded: {error}") from error


def _not_finite_words(wrong: list[str], dtype: torch.dtype, stored: torch.dtype) -> str:
    named = f"{len(wrong)} weights, {wrong[0]!r} first, hold numbers that are not finite"
    if dtype == torch.float16 and stored != torch.float16:
        return f"In float16, whose largest number is 65504, {named}. Export in bf16, which has the range of float32."
    return f"{named[0].upper()}{named[1:]}: the checkpoint is broken."


def _name_ends(model: PreTrainedModel, tokenizer: Any) -> None:
    """Every token that ended a response in training ends one for whoever loads the folder."""
    config = getattr(model, "generation_config", None)
    if config is None or not model.can_generate():
        return
    ends = eos_token_ids(model, tokenizer)
    if ends:
        config.eos_token_id = ends[0] if len(ends) == 1 else list(ends)
    if config.pad_token_id is None and tokenizer is not None:
        config.pad_token_id = tokenizer.pad_token_id


def _copy_code(source: ModelSource, folder: Path, trust_remote_code: bool) -> None:
    home = Path(source.base or source.folder)
    for file in home.glob("*.py") if trust_remote_code and home.is_dir() else ():
        if not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)


def _read_back(loaded: _Loaded, folder: Path, options: ExportOptions) -> PreTrainedModel:
    """As any user of transformers loads the folder, by the dtype that its configuration says."""
    auto: Any = AutoModel if loaded.source.role == "critic" else AutoModelForCausalLM
    copy, report = auto.from_pretrained(
        folder, dtype="auto", output_loading_info=True, trust_remote_code=options.trust_remote_code
    )
    if wrong := [*sorted(report["missing_keys"]), *sorted(report["unexpected_keys"])]:
        raise ModelError(f"What was written lacks a weight, or has one too many: {wrong[0]!r}. It was removed.")
    if copy.dtype != loaded.dtype:
        raise ModelError(f"What was written is loaded as {copy.dtype}, not {loaded.dtype}. It was removed.")
    return copy


def _adapted(loaded: _Loaded, folder: Path) -> Any:
    """As any user of peft loads the adapter."""
    from peft import PeftModel

    base = load_model(replace(loaded.source, kind="whole", folder=loaded.source.model_path), loaded.dtype, attn=False)
    with warnings.catch_warnings():
        # Of peft to transformers; nobody who reads it can mend it.
        warnings.simplefilter("ignore", FutureWarning)
        return PeftModel.from_pretrained(base, str(folder), autocast_adapter_dtype=False)


def _check_rest(loaded: _Loaded, folder: Path, trust_remote_code: bool) -> None:
    heads, tokenizer = loaded.heads, loaded.tokenizer
    if heads:
        read = load_file(folder / VALUE_HEAD_FILE)
        if set(read) != set(heads) or not all(torch.equal(read[name], tensor) for name, tensor in heads.items()):
            raise ModelError("The value head that was written is another one than was read. It was removed.")
    if tokenizer is not None:
        copy = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        said = [(one(_PROBE_TEXT).input_ids, one.chat_template) for one in (copy, tokenizer)]
        if said[0] != said[1]:
            raise ModelError(
                "The tokenizer that was written gives other tokens than the one that was read. It was removed."
            )


@contextmanager
def _becoming(out: Path) -> Iterator[Path]:
    """A folder to write into, which is ``out`` when the block ends without an error; on the disk, to the last file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder, old = (out.with_name(f".{out.name}.{end}") for end in ("part", "old"))
    if old.exists() and not out.exists():
        # An export was killed between the two renames below; what it was to replace is all there is.
        old.rename(out)
    for left_over in (folder, old):
        shutil.rmtree(left_over, ignore_errors=True)
    with something_to_lose():
        folder.mkdir()
        try:
            yield folder
            sync_tree(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if out.exists():
            out.rename(old)
        folder.rename(out)
        shutil.rmtree(old, ignore_errors=True)
        sync_folder(out.parent)
