"""The process groups of an engine on four ranks; run on each of them as `engine_program` is."""

import datetime
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from burnish.engine import ranks
from burnish.engine.mesh import make_mesh

PROGRAM = Path(__file__)
SECONDS = 1234


def describe(group: dist.ProcessGroup) -> dict[str, Any]:
    """Who is in it, and its time limit."""
    limit = ranks.time_limit(group, "cpu")
    return {"ranks": dist.get_process_group_ranks(group), "seconds": None if limit is None else limit.total_seconds()}


def main() -> None:
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    store, out = dist.FileStore(sys.argv[3], world), Path(sys.argv[4])
    limit = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    hybrid = ranks.make_device_mesh("cpu", (2, 2), ("replicate", "shard"))
    flat = ranks.make_device_mesh("cpu", (4,), ("shard",))
    parallel = make_mesh(2, "cpu").sequence_parallel
    assert parallel is not None
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=hybrid.get_group("replicate"))
    found = {name: describe(hybrid.get_group(name)) for name in ("replicate", "shard")}
    found |= {"flat": describe(flat.get_group("shard")), "parallel": describe(parallel.group)}
    torch.save({"groups": found, "sum": total.item(), "mesh": hybrid.mesh.tolist()}, out / f"rank{rank}.pt")


if __name__ == "__main__":
    main()
