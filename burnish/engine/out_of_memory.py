"""Running out of memory as an error that says in which stage, by how much, and which keys to turn."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from burnish.utils import env
from burnish.utils.errors import MemoryExceededError

_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "cublas_status_alloc_failed")
_UNITS = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """The rows that are going through the model, for the message.

    Attributes:
        num_tokens, num_rows: how many.
        longest: tokens of the longest row, below which no bound can go.
        size_key, tokens_key: the keys that cut micro-batches by rows and by tokens.
        by_rows: whether rows are counted.
    """

    size_key: str
    tokens_key: str
    by_rows: bool = False
    num_tokens: int = 0
    num_rows: int = 0
    longest: int = 0

    @property
    def cut_key(self) -> str:
        """The key that cuts micro-batches."""
        return self.size_key if self.by_rows else self.tokens_key

    def smaller(self) -> list[str]:
        """What to set for a smaller one."""
        if self.by_rows and self.num_rows > 1:
            return [f"{self.size_key}={self.num_rows // 2}"]
        bound = max(self.longest, self.num_tokens // 2)
        return [f"{self.tokens_key}={bound}"] if bound < self.num_tokens else []


@contextmanager
def stage(name: str, device: torch.device, micro_batch: MicroBatch | None, keys: Sequence[str]) -> Iterator[None]:
    """Inside, running out of memory raises `MemoryExceededError`.

    Args:
        name: of the stage, as in "the update of the actor".
        micro_batch: what is in the model at the time; None where nothing is.
        keys: ``key=value`` of everything else that would take less memory, the cheapest first.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryExceededError(_message(error, name, device, micro_batch, keys)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch or Python says that memory could not be allocated, on a device or a CPU."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in text for sign in _SIGNS)


def asked_bytes(error: BaseException) -> int | None:
    """The size of the allocation that failed, where the error says it."""
    match = re.search(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]?i?B)", str(error), re.IGNORECASE)
    return None if match is None else int(float(match[1]) * _UNITS.get(match[2], 1))


def _message(
    error: BaseException, name: str, device: torch.device, micro_batch: MicroBatch | None, keys: Sequence[str]
) -> str:
    asked = asked_bytes(error)
    wanted = "more" if asked is None else f"{_size(asked)} more"
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        there = f"{_size(free)} of {_size(total)} are free beside {_size(torch.cuda.memory_allocated(device))} in use"
    else:
        available = env.available_memory()
        there = (
            f"of {_size(env.total_memory())} " + ("too little" if available is None else _size(available)) + " is free"
        )
    where = ""
    if micro_batch is not None and micro_batch.num_tokens:
        where = f", with {micro_batch.num_rows:,} rows of {micro_batch.num_tokens:,} tokens in the model"
    ways = [*([] if micro_batch is None else micro_batch.smaller()), *keys]
    advice = (
        f" Set {_either(ways)}." if ways else " Let more workers share the model, or lower data.max_response_length."
    )
    return f"Out of memory in {name}{where}: it asked for {wanted}, and on {device} {there}.{advice}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**27 else f"{num_bytes / 2**20:.1f} MiB"


def _either(ways: Sequence[str]) -> str:
    return ways[0] if len(ways) == 1 else f"{', '.join(ways[:-1])} or {ways[-1]}"
