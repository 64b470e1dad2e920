"""Streams the weights of an engine in buckets of several sizes, on several ranks (run as `engine_program`)."""

from pathlib import Path
from typing import Any

import torch

from burnish.engine import weights_out
from tests.engine.engine_program import main, make_engine

SIZES = (1, 500, 4000, 1 << 20)


def run_case(case: dict[str, Any], _out: Path) -> dict[str, Any]:
    """The stream in buckets of each size, and the bytes of the buckets."""
    case = {key: value for key, value in case.items() if key != "name"}
    engine = make_engine(**case)
    streams, buckets = [], []
    start = weights_out._Bucket.start
    for size in SIZES:
        gathered: list[int] = []

        def counted(bucket: Any, gathered: list[int] = gathered) -> None:
            if bucket.group is not None:
                gathered.append(sum(tensor.numel() * bucket.dtype.itemsize for _, tensor in bucket.entries))
            start(bucket)

        weights_out._Bucket.start = counted  # type: ignore[method-assign]
        streams.append({name: tensor.clone() for name, tensor in engine.named_weights(bucket_bytes=size)})
        buckets.append((size, gathered))
    weights_out._Bucket.start = start  # type: ignore[method-assign]
    return {"streams": streams, "buckets": buckets}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(run_case)
