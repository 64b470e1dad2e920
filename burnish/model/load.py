"""Hugging Face causal LMs with our attention: from a folder, or random from a configuration."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

from burnish.model.attention import ATTENTION_NAME, PackedContext
from burnish.model.head import head_logits, logit_transform
from burnish.model.hub_progress import hub_progress
from burnish.model.verl_shards import load_verl_model
from burnish.utils import hub, local_paths, storage
from burnish.utils.errors import CheckpointError, ModelError
from burnish.utils.model_folder import config_folder, is_verl_folder

logger = logging.getLogger("burnish.model")

# burnish has its own console; transformers' bars would tear its live view.
disable_progress_bar()

# Not ours to override: burnish computes attention itself, and the engine's own key says the precision.
_RESERVED = ("attn_implementation", "_attn_implementation", "torch_dtype", "dtype")


def load_config(
    path: str, *, trust_remote_code: bool = False, override_config: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """The Hugging Face configuration at ``path`` with the keys of ``override_config`` replaced.

    Args:
        path: of the model: a folder, a URL (`burnish.utils.storage`), or a name of the hub.

    Raises:
        ModelError: there is no configuration, neither the hub nor the cache has it, or a key that it does not have is overridden.
        StorageError: what a URL names cannot be fetched.
    """
    path = storage.localize(path)
    folder = local_paths.expanded(path)
    if path.startswith(("/", "./", "../", "~")) and not folder.is_dir():
        raise ModelError(f"Model path {path!r} does not exist. Give a folder in Hugging Face format or a hub name.")
    # A worker may be on another machine than the driver that asked before.
    hub.check_model(path, weights=False)
    try:
        config = AutoConfig.from_pretrained(config_folder(str(folder)), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"No Hugging Face configuration can be read from model path {path!r}: {error}") from error
    for key, value in (override_config or {}).items():
        if key in _RESERVED:
            raise ModelError(
                f"override_config.{key} cannot be set: attention is burnish's own, and the precision is fsdp_config.dtype. "
                f"Leave it out."
            )
        if not hasattr(config, key):
            # Scripts for several models switch off every dropout that one of them may have.
            if key.endswith(("drop", "dropout")) and not value:
                continue
            raise ModelError(f"override_config.{key}: {type(config).__name__} at {path!r} has no such key.")
        setattr(config, key, value)
    return config


def load_causal_lm(
    path: str,
    dtype: torch.dtype = torch.float32,
    *,
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
    attn: bool = True,
) -> PreTrainedModel:
    """The causal LM at ``path`` on the CPU, in ``dtype``, attending through `burnish.model.attention`.

    Dropout is switched off: a policy whose log-probs are random has no ratio.

    Args:
        path: a folder in Hugging Face format, a URL of one, or a hub name that is in the local cache or can be fetched.
        override_config: keys of the Hugging Face configuration to replace.
        attn: False leaves transformers' own attention in place (for references and tests).

    Raises:
        ModelError: nothing loadable at ``path``, or the architecture cannot use our attention.
    """
    return _load(AutoModelForCausalLM, path, dtype, trust_remote_code, override_config, attn)


def load_backbone(
    path: str,
    dtype: torch.dtype = torch.float32,
    *,
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
    attn: bool = True,
) -> PreTrainedModel:
    """As `load_causal_lm`, without the language-model head; a folder saved with one is fine."""
    return _load(AutoModel, path, dtype, trust_remote_code, override_config, attn)


def load_classifier(
    path: str,
    dtype: torch.dtype = torch.float32,
    *,
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """The sequence classifier with one label at ``path``, on the CPU, its backbone attending through
    `burnish.model.attention`.

    Raises:
        ModelError: nothing loadable at ``path``, more labels than one, or a backbone that cannot use our attention.
    """
    config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
    if config.num_labels != 1:
        raise ModelError(
            f"The model at {path!r} has {config.num_labels} labels; a reward model has one score (num_labels=1 in its "
            f"config.json). A causal language model is none: it can be a judge, behind reward.judge.url."
        )
    return _load(AutoModelForSequenceClassification, path, dtype, trust_remote_code, override_config, True)


def causal_lm_skeleton(
    path: str,
    dtype: torch.dtype = torch.float32,
    *,
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """The modules of `load_causal_lm` on the meta device: parameters and buffers without memory, to be filled by the caller."""
    return _skeleton(AutoModelForCausalLM, path, dtype, trust_remote_code, override_config)


def backbone_skeleton(
    path: str,
    dtype: torch.dtype = torch.float32,
    *,
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """The modules of `load_backbone` on the meta device."""
    return _skeleton(AutoModel, path, dtype, trust_remote_code, override_config)


def build_causal_lm(
    config: PreTrainedConfig,
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    attn: bool = True,
    device: torch.device | str | None = None,
    check: bool = True,
) -> PreTrainedModel:
    """A causal LM with random weights that depend only on ``config``, ``seed`` and the kind of device.

    Args:
        device: where it is made at once; None: where torch makes tensors.
        check: whether `check_model` calls it; not for a second model of a class that was checked.
    """
    place = nullcontext() if device is None else torch.device(device)
    on_gpu = [place] if isinstance(place, torch.device) and place.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu), place:
        torch.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=ATTENTION_NAME if attn else None
            )
        except ValueError as error:
            raise ModelError(f"{type(config).__name__} cannot be built: {error}") from error
    return _prepare(model, attn and check)


def eos_token_ids(model_or_path: PreTrainedModel | str, tokenizer: Any = None) -> tuple[int, ...]:
    """Every token that ends a response: those of the generation configuration and the tokenizer's, ascending.

    A chat model often ends turns with another token than its tokenizer's EOS; missing one, it talks on after its answer.
    """
    found: set[int] = set()
    configs: list[Any] = []
    if isinstance(model_or_path, str):
        model_or_path = config_folder(storage.localize(model_or_path))
        if (Path(model_or_path) / "generation_config.json").exists():
            configs.append(GenerationConfig.from_pretrained(model_or_path))
        configs.append(load_config(model_or_path))
    else:
        configs += [getattr(model_or_path, "generation_config", None), model_or_path.config]
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(found))


def _load(
    auto_class: Any,
    path: str,
    dtype: torch.dtype,
    trust_remote_code: bool,
    override_config: Mapping[str, Any] | None,
    attn: bool,
) -> PreTrainedModel:
    path = storage.localize(path)
    config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
    try:
        # A backbone is loaded from a folder with a head on purpose; transformers would print a table about it.
        with _errors_only() if auto_class is AutoModel else nullcontext(), hub_progress(path):
            model, report = _loader(auto_class, path, config)(
                config=config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                attn_implementation=ATTENTION_NAME if attn else None,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        said = f"No {type(config).__name__} model can be loaded from {path!r}: {str(error).rstrip('.')}."
        if isinstance(error, OSError | SafetensorError):
            said += " Where a file of weights is missing or cut short, copy or download the model again."
        raise ModelError(said) from error
    except IndexError as error:
        # The padding id is looked up in the embedding while that is made.
        raise ModelError(
            f"The config.json at {path!r} does not fit its own ids (vocab_size too small?): {error}"
        ) from error
    # transformers would start missing weights at random and go on.
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"The weights at {path!r} lack {len(missing)} tensors of {type(model).__name__}: {missing[:5]}."
        )
    unexpected = sorted(report["unexpected_keys"])
    if unexpected and auto_class is not AutoModel:
        logger.warning(
            "The weights at %s hold %d tensors that %s has no place for, and that are left out: %s. Is its config.json "
            "that of another model?",
            *(path, len(unexpected), type(model).__name__, unexpected[:5]),
        )
    if is_verl_folder(path) and model.can_generate():
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(config_folder(path))
    _mend_generation_config(model)
    return _prepare(model, attn)


def _loader(auto_class: Any, path: str, config: PreTrainedConfig) -> Callable[..., Any]:
    """What reads the weights at ``path``: files of transformers, or shards of verl's."""
    if not is_verl_folder(path):
        return partial(auto_class.from_pretrained, str(local_paths.expanded(path)))
    try:
        weights = load_verl_model(path)
    except CheckpointError as error:
        raise ModelError(f"The model at {path!r} cannot be loaded: {error}") from error
    return partial(auto_class._model_mapping[type(config)].from_pretrained, None, state_dict=weights)


def _skeleton(
    auto_class: Any,
    path: str,
    dtype: torch.dtype,
    trust_remote_code: bool,
    override_config: Mapping[str, Any] | None,
) -> PreTrainedModel:
    path = storage.localize(path)
    config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
    folder = config_folder(str(local_paths.expanded(path)))
    with torch.device("meta"):
        model: PreTrainedModel = auto_class.from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation=ATTENTION_NAME
        )
    if model.can_generate():
        # A folder may have none; what the configuration says holds then, as when the model is loaded.
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(folder)
    # As when it is loaded: where the configuration came from is part of it.
    model.name_or_path = model.config._name_or_path = folder
    _mend_generation_config(model)
    return _switch_off_dropout(model)


def _mend_generation_config(model: PreTrainedModel) -> None:
    """Published folders set a temperature without do_sample; transformers may refuse to save that, hours into a run.

    Where nothing is said of do_sample the temperature says that it is meant; where it is off, the temperature means nothing.
    """
    config = getattr(model, "generation_config", None)
    if config is None or config.do_sample:
        return
    defaults: dict[str, tuple[Any, ...]] = {"temperature": (None, 1.0), "top_p": (None, 1.0), "top_k": (None, 0, 50)}
    if any(getattr(config, name, None) not in values for name, values in defaults.items()):
        if config.do_sample is None:
            config.do_sample = True
            return
        for name in defaults:
            setattr(config, name, None)


@contextmanager
def _errors_only() -> Iterator[None]:
    before = get_verbosity()
    set_verbosity_error()
    try:
        yield
    finally:
        set_verbosity(before)


def _prepare(model: PreTrainedModel, check: bool) -> PreTrainedModel:
    _switch_off_dropout(model)
    if check:
        # Of a classifier the backbone is called, and its head by us.
        check_model(cast(PreTrainedModel, model.base_model) if hasattr(model, "score") else model)
    return model


def _switch_off_dropout(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.eval()


class _Probe(PackedContext):
    """A packed context that remembers which layers asked it."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        super().__init__(lengths, device)
        self.layers: set[int] = set()

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        self.layers.add(int(module.layer_idx))  # type: ignore[arg-type]
        return super().attend(module, query, key, value, **how)


def check_model(model: PreTrainedModel) -> None:
    """Makes sure, by three calls on six tokens, that burnish computes what the model means.

    Every layer must attend through the context and mix tokens in no other way: two segments of three tokens are packed
    behind each other, and when one of them changes, a layer that mixes differently (state space, convolution, attention
    code of its own) gives the other one another result. The other one stays in its place, so that without such a layer its
    result is the same but for rounding in a mixture of experts. And our head must give the model's logits.

    Raises:
        ModelError: naming the class and what it does instead.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    if getattr(config, "attention_chunk_size", None):
        raise ModelError(f"{name} attends in chunks (attention_chunk_size), which burnish does not compute.")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder; burnish trains decoder-only models.")
    probe = _Probe([3, 3], model.device)
    output, hidden = _probe_outputs(model, probe, [1, 2, 3, 4, 5, 6])
    missing = sorted(set(range(config.num_hidden_layers)) - probe.layers)
    if missing:
        raise ModelError(
            f"{name} cannot be used: layers {missing} of {config.num_hidden_layers} do not call transformers' attention "
            "interface, so burnish cannot replace their attention."
        )
    other_first, other_second = (
        _probe_outputs(model, probe, ids)[0] for ids in ([3, 1, 2, 4, 5, 6], [1, 2, 3, 6, 4, 5])
    )
    if not (_close(output[3:], other_first[3:], 1e-5) and _close(output[:3], other_second[:3], 1e-5)):
        raise ModelError(f"{name} cannot be used: its layers mix tokens of different packed sequences.")
    head = model.get_output_embeddings()
    if head is not None:
        with torch.no_grad():
            ours = head_logits(hidden, head.weight, getattr(head, "bias", None), logit_transform(config))
        if not _close(ours, output, 1e-3):
            raise ModelError(
                f"{name} cannot be used: it computes its logits in a way that burnish's head does not know."
            )


def _probe_outputs(model: PreTrainedModel, probe: _Probe, token_ids: list[int]) -> tuple[Tensor, Tensor]:
    """The model's output and its backbone's, [6, vocab or hidden] and [6, hidden], of two segments of three tokens."""
    # Any ids do, except that the padding id may have a zero embedding.
    ids = torch.tensor(token_ids, device=model.device) % model.config.get_text_config().vocab_size
    seen: list[Tensor] = []
    hook = model.get_decoder().register_forward_hook(lambda _module, _inputs, output: seen.append(output[0][0]))
    try:
        with torch.no_grad():
            output = model(
                input_ids=ids[None],
                position_ids=torch.arange(3, device=model.device).repeat(2)[None],
                use_cache=False,
                attention_context=probe,
            )
    finally:
        hook.remove()
    return output[0][0], seen[0]


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Equal up to ``tolerance`` of the largest entry, or to rounding where one of them is in half precision."""
    if {a.dtype, b.dtype} & {torch.bfloat16, torch.float16}:
        tolerance = 5e-2
    limit = tolerance * max(float(a.abs().max()), 1e-6)
    return bool(((a.double() - b.double()).abs() <= limit).all())
