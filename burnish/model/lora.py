"""LoRA (arXiv:2106.09685): beside chosen linear layers a product of two thin matrices is trained, the model itself is frozen.

    y = W x + (alpha / rank) B A x,    A [rank, in], B [out, rank]

B starts at zero, so the model starts as the base. The layers are peft's, put into the Hugging Face model in place; its class,
and whatever reads its other modules, stay as they were. The model without its adapters is the base, bit for bit: nothing here
ever merges into it.
"""

import copy
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from burnish.utils import local_paths, storage
from burnish.utils.errors import ConfigError, ModelError

ALL_LINEAR = "all-linear"
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# One adapter to a model, under peft's usual name.
_ADAPTER = "default"
_ADAPTER_PARTS = (".lora_A.", ".lora_B.")
# How peft names the model's own parameters in an adapter's file.
FILE_PREFIX = "base_model.model."
# What an adapter's file may ask for beyond two matrices to a layer.
_UNSUPPORTED = {
    "use_dora": False,
    "bias": "none",
    "lora_bias": False,
    "modules_to_save": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "layer_replication": None,
}


class LoraSettings(Protocol):
    """The keys of ``actor_rollout_ref.model`` or ``critic.model`` that decide about adapters."""

    lora_rank: int
    lora_alpha: int
    target_modules: list[str]
    exclude_modules: list[str]
    lora_adapter_path: str | None
    lora_seed: int


def wants_adapters(settings: LoraSettings) -> bool:
    """Whether adapters are trained instead of the model."""
    return settings.lora_rank > 0 or settings.lora_adapter_path is not None


def add_adapters(model: PreTrainedModel, settings: LoraSettings, base_path: str | None = None) -> None:
    """Puts adapters beside the linear layers of ``model`` that are asked for, or those of ``lora_adapter_path``.

    Args:
        base_path: where ``model`` came from; it goes into the adapters' file.

    Raises:
        ConfigError: peft is not installed; a target matches nothing; rank and file contradict each other.
        ModelError: there is no adapter of this model at ``lora_adapter_path``.
    """
    peft = _import_peft()
    if settings.lora_adapter_path is not None:
        folder = local_paths.expanded(storage.localize(settings.lora_adapter_path))
        _add_from_folder(model, folder, settings.lora_rank, base_path)
        return
    targets = target_layers(model, settings.target_modules, settings.exclude_modules)
    layers = dict(_linear_layers(model))
    config = peft.LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules=_shortest(targets, list(layers)),
        fan_in_fan_out=all(type(layers[name]) is Conv1D for name in targets),
        task_type="CAUSAL_LM" if model.get_output_embeddings() is not None else None,
        base_model_name_or_path=base_path,
    )
    _inject(model, config)
    differing = sorted({name for name, _ in adapter_layers(model)} ^ set(targets))
    if differing:
        raise ModelError(
            f"peft does not put adapters of {type(model).__name__} where they are asked for: {differing[0]!r} differs."
        )
    _initialise(model, settings.lora_seed or 0)


def add_same_adapters(model: PreTrainedModel, like: PreTrainedModel) -> None:
    """Gives ``model`` adapters in the places where ``like`` has them; their values are those of no policy yet."""
    if not has_adapters(like):
        return
    dtype = model.dtype
    _inject(model, copy.deepcopy(_config_of(like)))
    for _, parameter in adapter_parameters(model):
        parameter.data = parameter.data.to(dtype)


def target_layers(model: PreTrainedModel, targets: Sequence[str], excluded: Sequence[str] = ()) -> list[str]:
    """Names of the linear layers that ``targets`` select, without those that ``excluded`` selects.

    An item selects the layers of that name, those whose name ends so after a dot (``q_proj``), and those whose whole name it
    matches as a regular expression; ``all-linear`` is every linear layer but the head. The experts of a mixture that are one
    tensor, and its router, are no linear layers.

    Raises:
        ConfigError: an item selects nothing, the head is among them, or nothing is left.
    """
    layers = [name for name, _ in _linear_layers(model)]
    there = f"Its linear layers are: {', '.join(_kinds(layers))}."
    head = _head_name(model)
    chosen: set[str] = set()
    for target in targets:
        if head is not None and _selects(target, head) and target.lower() != ALL_LINEAR:
            raise ConfigError(
                f"target_modules={target}: the head {head!r} takes no adapter, since log-probs are computed from its weight "
                f"alone. {there}"
            )
        found = layers if target.lower() == ALL_LINEAR else [name for name in layers if _selects(target, name)]
        if not found:
            raise ConfigError(f"target_modules={target} matches no linear layer of {type(model).__name__}. {there}")
        chosen.update(found)
    for name in excluded:
        if not any(_selects(name, layer) for layer in layers):
            raise ConfigError(f"exclude_modules={name} matches no linear layer of {type(model).__name__}. {there}")
    kept = [name for name in layers if name in chosen and not any(_selects(item, name) for item in excluded)]
    if not kept:
        raise ConfigError(
            f"target_modules={list(targets)} without exclude_modules={list(excluded)} leaves no layer of "
            f"{type(model).__name__} to put an adapter beside. {there}"
        )
    return kept


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of each layer with an adapter."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


def is_plain_adapter(module: Any) -> bool:
    """Whether ``module`` is a linear layer with an adapter and computes ``W x + b + scaling B A x``, no more."""
    return (
        hasattr(module, "lora_A")
        and (type(module).__module__, type(module).__name__) == ("peft.tuners.lora.layer", "Linear")
        and type(module.base_layer) is nn.Linear
        and list(module.lora_A) == [_ADAPTER]
        and isinstance(module.lora_dropout[_ADAPTER], nn.Identity)
        and not (module.fan_in_fan_out or module.merged or module.lora_variant or module.lora_bias[_ADAPTER])
    )


def base_layer(module: Any) -> Any:
    """The layer beside which there is a plain adapter; any other module is its own."""
    return module.base_layer if is_plain_adapter(module) else module


def low_rank(layer: Any) -> tuple[Tensor, Tensor, float]:
    """A [rank, in], B [out, rank] and the scaling of a plain adapter."""
    return layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight, layer.scaling[_ADAPTER]


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and parameter of every adapter's matrices."""
    return ((name, parameter) for name, parameter in model.named_parameters() if is_adapter_name(name))


def has_adapters(model: nn.Module) -> bool:
    """Whether any layer of ``model`` has an adapter."""
    return any(True for _ in adapter_layers(model))


def is_adapter_name(name: str) -> bool:
    """Whether ``name``, in a module or in a stream of weights, is of an adapter's matrix."""
    return any(part in name for part in _ADAPTER_PARTS)


def hf_name(name: str) -> str:
    """The name that a parameter of a model with adapters has elsewhere.

    A layer's own weights are called as without an adapter, and the adapter's as in peft's files without their prefix:
    ``q_proj.base_layer.weight`` is ``q_proj.weight``, and ``q_proj.lora_A.default.weight`` is ``q_proj.lora_A.weight``.
    """
    for part in _ADAPTER_PARTS:
        name = name.replace(f"{part}{_ADAPTER}.", part)
    return name.replace(".base_layer.", ".")


def adapters_enabled(model: nn.Module) -> bool:
    """Whether a call of ``model`` adds its adapters; False where there are none."""
    return any(not layer.disable_adapters for _, layer in adapter_layers(model))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` is its base.

    Gradient flags stay: peft's own switch clears them, and parameters that are sharded or have hooks must keep theirs.
    """
    before = [(layer, layer.disable_adapters) for _, layer in adapter_layers(model)]
    for layer, _ in before:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, disabled in before:
            layer._disable_adapters = disabled


def merged_weight(layer: Any, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``W + scaling B A`` of a layer with an adapter, in at least float32, from whole tensors; none of them is changed."""
    dtype = torch.promote_types(torch.promote_types(base.dtype, b.dtype), torch.float32)
    delta = b.to(dtype) @ a.to(dtype) * layer.scaling[_ADAPTER]
    return base.to(dtype) + (delta.T if layer.fan_in_fan_out else delta)


def save_adapters(model: PreTrainedModel, weights: dict[str, Tensor], folder: Path) -> None:
    """Writes ``weights``, by their `hf_name`, to ``folder`` in peft's format."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(model, folder)
    save_file(
        {FILE_PREFIX + name: tensor.contiguous() for name, tensor in weights.items()},
        folder / WEIGHTS_FILE,
        metadata={"format": "pt"},
    )


def write_config(model: PreTrainedModel, folder: Path) -> None:
    """Writes what says in peft's format which adapters ``model`` has."""
    config = copy.copy(_config_of(model))
    config.inference_mode = True  # As peft writes it: whoever loads the file to train says so.
    config.save_pretrained(str(folder))


def read_adapters(folder: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """Whole tensors of the adapters in ``folder`` by their `hf_name`; exactly those that ``model`` has places for.

    Raises:
        ModelError: the file is missing or unreadable, or of other layers, another rank or another model.
    """
    file = folder / WEIGHTS_FILE
    try:
        read = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read: {error}. An adapter is a folder that peft has written.") from error
    found = {name.removeprefix(FILE_PREFIX): tensor for name, tensor in read.items()}
    places = {hf_name(name): parameter for name, parameter in adapter_parameters(model)}
    differing = sorted(set(found) ^ set(places))
    if differing:
        who = "only the file has" if differing[0] in found else "the file lacks"
        raise ModelError(f"{file} is of other layers than the model's adapters: {who} {differing[0]!r}.")
    for name, tensor in found.items():
        if tensor.shape != places[name].shape:
            raise ModelError(
                f"{file}: {name!r} has shape {list(tensor.shape)}, the model's is {list(places[name].shape)}: another "
                f"rank, or an adapter of another model."
            )
    return found


def check_same_scaling(folder: Path, model: PreTrainedModel) -> None:
    """Makes sure that the adapters in ``folder`` mean in ``model`` what they meant where they were trained.

    Raises:
        ModelError: their rank or alpha is another one, of all layers or of one.
    """
    saved, own = _read_config(folder), _config_of(model)
    for ours, theirs in (("r", "rank"), ("lora_alpha", "alpha"), ("use_rslora", "use_rslora")):
        if saved.get(ours, False) != getattr(own, ours):
            raise ModelError(
                f"{folder / CONFIG_FILE} says {theirs}={saved.get(ours)}, and this run has {getattr(own, ours)}: its adapters "
                f"would mean something else here. Go on with the same lora_rank and lora_alpha."
            )
    for name, layer in adapter_layers(model):
        of_file, of_run = _saved_scaling(saved, name), layer.scaling[_ADAPTER]
        if not math.isclose(of_file, of_run, rel_tol=1e-9):
            raise ModelError(
                f"{folder / CONFIG_FILE} scales the adapter of {name} by {of_file:g} (its rank_pattern and alpha_pattern), and "
                f"this run by {of_run:g}: it would mean something else here. Go on with the same patterns, as "
                f"lora_adapter_path={folder} has them."
            )


def _saved_scaling(saved: dict[str, Any], name: str) -> float:
    """By what an adapter's product is multiplied in the layer ``name``, as peft reads it out of its configuration."""

    def of_layer(patterns: str, default: str) -> float:
        found = saved.get(patterns) or {}
        key = next((key for key in found if re.match(rf"(.*\.)?({key})$", name)), None)
        return float(saved[default] if key is None else found[key])

    rank = of_layer("rank_pattern", "r")
    return of_layer("alpha_pattern", "lora_alpha") / (math.sqrt(rank) if saved.get("use_rslora") else rank)


def _add_from_folder(model: PreTrainedModel, folder: Path, rank: int, base_path: str | None) -> None:
    saved = _read_config(folder)
    kind = saved.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{folder / CONFIG_FILE} is of a {kind} adapter; burnish trains LORA.")
    for name, plain in _UNSUPPORTED.items():
        if (saved.get(name) or plain) != plain:
            raise ModelError(
                f"{folder / CONFIG_FILE} has {name}={saved[name]}; burnish trains adapters of two matrices to a linear layer."
            )
    if rank and rank != saved.get("r"):
        raise ConfigError(
            f"lora_rank={rank}, but the adapter at lora_adapter_path={folder} has rank {saved.get('r')}. Leave lora_rank out."
        )
    config = _import_peft().LoraConfig.from_pretrained(str(folder))
    # A policy whose log-probs are random has no ratio.
    config.lora_dropout, config.inference_mode, config.init_lora_weights = 0.0, False, True
    config.base_model_name_or_path = base_path
    try:
        _inject(model, config)
    except ValueError as error:
        layers = [name for name, _ in _linear_layers(model)]
        raise ModelError(
            f"The adapter at {folder} does not fit {type(model).__name__}: {error} Its linear layers are: "
            f"{', '.join(_kinds(layers))}."
        ) from error
    read = read_adapters(folder, model)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model):
            parameter.data = read[hf_name(name)].to(parameter.device)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    try:
        read: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}. An adapter is a folder that peft has written.") from error
    return read


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"LoRA (lora_rank, lora_adapter_path) needs the package peft, which cannot be imported: {error}. "
            f"pip install burnish[lora]"
        ) from error
    return peft


def _inject(model: PreTrainedModel, config: Any) -> None:
    # peft draws the first values from the global generator, which is the run's.
    with torch.random.fork_rng(devices=[]):
        _import_peft().inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    for name, layer in adapter_layers(model):
        if layer is model.get_output_embeddings():
            raise ModelError(
                f"The adapter is beside the head {name!r} too, which takes none: log-probs are computed from its weight alone. "
                f"Train or choose an adapter of other layers."
            )
        if type(layer.get_base_layer()) not in (nn.Linear, Conv1D):
            raise ModelError(f"The adapter is beside {name!r}, which is no linear layer; burnish trains those alone.")
    model.eval()


@torch.no_grad()
def _initialise(model: PreTrainedModel, seed: int) -> None:
    """A by Kaiming's uniform rule as in the paper's code, B zero; the values depend on the seed and the layers alone."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapter_parameters(model):
        values = torch.zeros(parameter.shape)
        if _ADAPTER_PARTS[0] in name:
            bound = parameter.shape[1] ** -0.5
            values.uniform_(-bound, bound, generator=generator)
        parameter.copy_(values)


def adapter_config(model: PreTrainedModel) -> dict[str, Any] | None:
    """What peft's ``adapter_config.json`` says of the adapters of ``model``, in plain values; None where there are none."""
    if not has_adapters(model):
        return None
    plain = {
        name: sorted(value) if isinstance(value, set) else value for name, value in _config_of(model).to_dict().items()
    }
    config: dict[str, Any] = json.loads(json.dumps(plain, default=str))
    return config


def _config_of(model: PreTrainedModel) -> Any:
    return model.peft_config[_ADAPTER]  # type: ignore[index]


def _head_name(model: PreTrainedModel) -> str | None:
    head = model.get_output_embeddings()
    return None if head is None else next(name for name, module in model.named_modules() if module is head)


def _linear_layers(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Every linear layer but the head, and nothing inside of adapters that are there already."""
    head = model.get_output_embeddings()
    layers = []
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, Conv1D) and module is not head and not is_adapter_name(f".{name}."):
            layers.append((name.removesuffix(".base_layer"), module))
    return layers


def _selects(item: str, name: str) -> bool:
    if name == item or name.endswith(f".{item}"):
        return True
    try:
        return re.fullmatch(item, name) is not None
    except re.error:
        return False


def _shortest(chosen: Sequence[str], layers: Sequence[str]) -> list[str]:
    """The last parts of the names where they select the same layers, as q_proj, and else the whole names."""
    last = sorted({name.rpartition(".")[2] for name in chosen})
    same = {name for name in layers if name.rpartition(".")[2] in last}
    return last if same == set(chosen) else list(chosen)


def _kinds(layers: Sequence[str]) -> list[str]:
    """The names with every layer number as ``*``, each once."""
    return sorted({re.sub(r"\.\d+\.", ".*.", name) for name in layers})
