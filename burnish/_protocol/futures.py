"""Waiting for batches that are still being computed."""

from typing import Any

from burnish._protocol.rows import AnyRows


def fetch(futures: list[Any]) -> list[Any]:
    """Values of futures: those that are values already, concurrent futures, and Ray's object references."""
    futures = [future.future() if hasattr(future, "future") else future for future in futures]
    return [future.result() if hasattr(future, "result") else future for future in futures]


def take_chunk(data: AnyRows, index: int, chunks: int) -> AnyRows:
    """Chunk ``index`` of ``chunks`` equal ones; a function with a name, so that it can be pickled."""
    return data.chunk(chunks)[index]
