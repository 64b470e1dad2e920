"""``burnish serve MODEL``: an OpenAI-compatible HTTP server over the native rollout engine (docs/serve.md)."""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from burnish.utils import env
from burnish.utils.console import error_console
from burnish.utils.errors import ConfigError, ResourceError, RolloutError

if TYPE_CHECKING:
    import torch

    from burnish.rollout.server.driver import EngineDriver
    from burnish.rollout.server.prompts import ServedModel

logger = logging.getLogger("burnish.serve")

API_KEY_VARIABLE = "BURNISH_API_KEY"
DTYPES = ("auto", "float32", "bfloat16")
# Of the device's memory, where --gpu-memory-utilization is not given: a GPU serves nothing else, a computer does.
_MEMORY_SHARES = {"cuda": 0.9, "cpu": 0.5}


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of the command; see its help."""

    model: str
    host: str
    port: int
    api_key: str | None
    served_model_name: str | None
    device: str | None
    dtype: str
    max_num_seqs: int | None
    max_model_len: int | None
    gpu_memory_utilization: float | None
    chat_template: str | None
    trust_remote_code: bool


def run_serve(options: ServeOptions) -> int:
    """Loads the model and serves it until a signal ends it; returns the exit status.

    Raises:
        ConfigError: an option that cannot be, or the extra is not installed.
        ResourceError: the address is taken.
        ModelError: no model, or one that cannot be served.
        RolloutError: the engine cannot start, for want of memory for instance.
    """
    _check_installed()
    api_key = _api_key(options)
    _check_options(options)
    # Bound before the model is loaded: a port that is taken is said at once. It listens only once all is ready.
    with _bind(options.host, options.port) as listener:
        host, port = listener.getsockname()[:2]
        if api_key is None and not _is_loopback(host):
            logger.warning(
                "Anyone who reaches %s may use the model: --host=%s and no API key. Set one as %s or --api-key.",
                *(host, options.host, API_KEY_VARIABLE),
            )
        _serve(options, api_key, listener, f"http://{f'[{host}]' if ':' in host else host}:{port}/v1")
    return 0


def _serve(options: ServeOptions, api_key: str | None, listener: socket.socket, url: str) -> None:
    from burnish.rollout.server.app import build_app
    from burnish.rollout.server.listen import HttpServer

    driver, model = _load(options)
    with ExitStack() as stack:
        try:
            stack.enter_context(driver)
        except RolloutError as error:
            raise ResourceError(
                f"{error} (Options of burnish serve: --gpu-memory-utilization, --max-model-len, --max-num-seqs.)"
            ) from error
        ready = f"Serving {model.name} at {url}: {model.max_length} tokens of prompt and response. Ctrl-C ends it."
        app = build_app(driver, model, api_key=api_key)
        server = HttpServer(app, driver, when_ready=lambda: error_console.print(ready, soft_wrap=True))
        server.run(sockets=[listener])


def _load(options: ServeOptions) -> tuple[EngineDriver, ServedModel]:
    from burnish.config import RolloutConfig
    from burnish.engine.compute_dtype import resolve_dtype
    from burnish.model.load import eos_token_ids, load_causal_lm, load_config
    from burnish.render import load_tokenizer
    from burnish.rollout.base import max_sequence_length
    from burnish.rollout.native.engine import NativeRollout
    from burnish.rollout.server.driver import EngineDriver
    from burnish.rollout.server.prompts import ServedModel

    device = _device(options.device)
    tokenizer = load_tokenizer(options.model, options.trust_remote_code, options.chat_template)
    trusted = options.trust_remote_code
    dtype = resolve_dtype(options.dtype, device, lambda: load_config(options.model, trust_remote_code=trusted))
    model = load_causal_lm(options.model, dtype, trust_remote_code=trusted)
    max_length = _max_length(options, max_sequence_length(model.config, None))
    utilization = options.gpu_memory_utilization or _MEMORY_SHARES[device.type]
    config = RolloutConfig(gpu_memory_utilization=utilization, max_model_len=max_length)
    if options.max_num_seqs is not None:
        config.max_num_seqs = options.max_num_seqs
    model.to(device)  # type: ignore[arg-type]  # transformers declares it for its own wrapper
    engine = NativeRollout(model, config, shares_storage=False, device=device, tokenizer=tokenizer)
    served = ServedModel(
        name=options.served_model_name or options.model,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids(model, tokenizer),
        max_length=max_length,
        vocab_size=model.get_input_embeddings().weight.shape[0],  # type: ignore[union-attr, index, arg-type]
    )
    return EngineDriver(engine), served


def _max_length(options: ServeOptions, bound: int | None) -> int:
    """Tokens of prompt and response together, given the most that the model has positions for."""
    wanted = options.max_model_len
    if bound is None and wanted is None:
        raise ConfigError(f"Nothing bounds the length of a sequence of {options.model}; set --max-model-len.")
    if bound is not None and wanted is not None and wanted > bound:
        raise ConfigError(f"--max-model-len={wanted} is more than the {bound} positions that {options.model} has.")
    return wanted or bound or 0


def _check_installed() -> None:
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"burnish serve needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            f"pip install 'burnish[serve]'"
        )


def _api_key(options: ServeOptions) -> str | None:
    key = options.api_key if options.api_key is not None else env.get(API_KEY_VARIABLE)
    if key is None:
        return None
    if not key.strip():
        raise ConfigError(f"The API key (--api-key or {API_KEY_VARIABLE}) is empty; leave it out to serve without one.")
    return key.strip()


def _check_options(options: ServeOptions) -> None:
    if options.dtype not in DTYPES:
        raise ConfigError(f"--dtype={options.dtype}: there is {', '.join(DTYPES)}.")
    for name, value in (("max-num-seqs", options.max_num_seqs), ("max-model-len", options.max_model_len)):
        if value is not None and value < (2 if name == "max-model-len" else 1):
            raise ConfigError(f"--{name}={value} is too small.")
    if options.gpu_memory_utilization is not None and not 0 < options.gpu_memory_utilization <= 1:
        raise ConfigError(f"--gpu-memory-utilization={options.gpu_memory_utilization} must be above 0 and at most 1.")


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        why = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise ResourceError(f"Nothing can listen at {host}:{port}: {why}. Choose another --host or --port.") from error
    return listener


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _device(name: str | None) -> torch.device:
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device={name} is no device; there is cpu and, with a GPU, cuda.") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device={name}: the engine runs on cpu and cuda.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device={name}: torch {torch.__version__} finds no GPU here.")
    return device
