"""Why vLLM did not start, or died: the cause in its own words, and which of burnish's keys may help.

vLLM's processes log a traceback each, and most of them only say that another process has failed. What is wanted is the error that
no other one explains.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from burnish.utils.errors import RolloutError

# "(EngineCore pid=12) ERROR 11-28 12:00:00 [core.py:99] " stands in front of each line; any part of it may be missing.
_PREFIX = re.compile(
    r"^(?:\x1b\[[\d;]*m)*(?:\([^()]*pid=\d+\)(?:\x1b\[[\d;]*m)*\s*)?"
    r"(?:(?:ERROR|WARNING|INFO|CRITICAL|DEBUG) \S+ \S+ \[[^\]]*\]\s?)?"
)
_TRACEBACK = "Traceback (most recent call last)"
# The last line of a traceback: the class, with or without what it says.
_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:: .*|:)?$")
# Errors that only say that something else went wrong.
_FOLLOWING = re.compile(
    r"root cause|stack trace|EngineDeadError|Engine core initialization failed|initialization failed due to an exception"
    r"|cancelled|CancelledError|KeyboardInterrupt|SystemExit|BrokenPipeError|resource_tracker",
    re.IGNORECASE,
)
# What a process prints that ends without an exception of Python's.
_FATAL = re.compile(
    r"^(?:Fatal Python error: |terminate called|Segmentation fault|Bus error|Aborted|Killed)"
    r"|error while loading shared libraries"
    r"|NCCL WARN .*(?:error|fail)",
    re.IGNORECASE,
)
_ROLLOUT = "actor_rollout_ref.rollout"
# What vLLM says, and the keys that decide about it.
_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"is less than desired \w+ memory utilization",
        f"Lower {_ROLLOUT}.gpu_memory_utilization, or free memory that others hold.",
    ),
    (
        r"Error in memory profiling|release GPU memory while vLLM is profiling",
        f"Start again when the GPU is yours alone, or state the cache's size, and nothing is measured: "
        f"+{_ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes=8589934592.",
    ),
    (
        r"No available memory for the cache blocks|larger than the available KV cache",
        f"Raise {_ROLLOUT}.gpu_memory_utilization, or lower max_model_len or max_num_seqs.",
    ),
    (
        r"out of memory|OutOfMemoryError|DefaultCPUAllocator: can't allocate",
        f"Lower {_ROLLOUT}.gpu_memory_utilization, max_num_seqs or max_num_batched_tokens, or spread the model over more GPUs "
        f"(tensor_model_parallel_size).",
    ),
    (r"max_model_len .*greater than|max_position_embeddings", f"Lower {_ROLLOUT}.max_model_len."),
    (
        r"divisible by tensor parallel size|divisible by tensor_parallel_size|is not divisible",
        f"Choose a {_ROLLOUT}.tensor_model_parallel_size that divides the model's heads.",
    ),
    (r"[Bb]float16 is (?:only )?(?:not )?supported", f"Set {_ROLLOUT}.dtype=float32."),
    (
        r"Bus error|No space left on device",
        "Shared memory (/dev/shm) or the disk is full; a container has more of the first with --shm-size.",
    ),
    (
        r"undefined symbol|cannot open shared object file|No module named 'vllm\._",
        "This vLLM is built for another torch: `burnish doctor` says which one it wants.",
    ),
)


def cause_in(lines: Sequence[str]) -> str | None:
    """The error that a log ends with, in one line; None where it holds none.

    Of several the last one that is not merely the consequence of another; and where there is no such, what the system said.
    """
    texts = [_PREFIX.sub("", line, count=1).rstrip() for line in lines]
    errors = [text for text in _errors(texts) if not _FOLLOWING.search(text)]
    if errors:
        return errors[-1]
    fatal = [text.strip() for text in texts if _FATAL.search(text.strip())]
    return fatal[-1] if fatal else None


def _errors(texts: Sequence[str]) -> list[str]:
    """The last line of each traceback, with the lines of its message behind it."""
    errors: list[str] = []
    in_traceback = False
    for number, text in enumerate(texts):
        if text.startswith(_TRACEBACK):
            in_traceback = True
        elif in_traceback and text and not text.startswith((" ", "\t")):
            if _ERROR.match(text):
                errors.append(_with_rest(text, texts[number + 1 : number + 4]))
            in_traceback = False
    return errors


def _with_rest(text: str, behind: Sequence[str]) -> str:
    """A message that begins on the line after its class, or ends in a colon, goes on there."""
    for more in behind:
        if not text.endswith(":") and not text.endswith(": "):
            break
        if more.startswith(_TRACEBACK):
            break
        text = f"{text} {more.strip()}".rstrip()
    return text


def start_failure(model: str, error: BaseException, log: Sequence[str] = ()) -> RolloutError:
    """vLLM did not start: the error to raise from ``error``.

    Args:
        model: what it was started with.
        error: what this process was told, which may only be that another one has failed.
        log: the lines that the engine's processes printed.
    """
    cause = cause_in(log) or _of_chain(error)
    return RolloutError(_sentence(f"vLLM did not start with {model!r}: {cause}"))


def death(how: str, log: Sequence[str] = ()) -> str:
    """How an engine ended and why, as a part of a sentence without its full stop.

    Args:
        how: what is known from outside, as "its process 12 ended with signal SIGKILL".
        log: the lines that the engine's processes printed.
    """
    cause = cause_in(log)
    if cause is None:
        return f"{how}; its log holds no error"
    return _sentence(f"{how}; the last error in its log is: {cause}").rstrip(".")


def _of_chain(error: BaseException) -> str:
    """The first of the errors that led to this one which says something of its own."""
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    told = [f"{type(each).__name__}: {each}" if str(each) else type(each).__name__ for each in chain]
    return next((text for text in told if not _FOLLOWING.search(text)), told[0])


def _sentence(text: str) -> str:
    """With a full stop, and with the keys that may help."""
    hint = next((hint for pattern, hint in _HINTS if re.search(pattern, text)), "")
    ended = text.rstrip().rstrip(".")
    return f"{ended}. {hint}".rstrip()
