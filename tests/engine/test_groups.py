"""The groups in which ranks meet: who is in them, and how long they wait for each other."""

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from burnish.engine import ranks
from tests.engine.engine_program import run_ranks
from tests.engine.groups_program import PROGRAM, SECONDS


@pytest.mark.slow
def test_groups_of_some_ranks_wait_as_long_as_the_group_of_all(tmp_path: Path) -> None:
    for rank, said in enumerate(run_ranks(tmp_path, [], world=4, program=PROGRAM)):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert said["mesh"] == [[0, 1], [2, 3]]
        assert said["sum"] == rank + (rank + 2) % 4
        assert said["groups"] == {
            "replicate": {"ranks": [rank % 2, rank % 2 + 2], "seconds": SECONDS},
            "shard": {"ranks": pair, "seconds": SECONDS},
            "flat": {"ranks": [0, 1, 2, 3], "seconds": SECONDS},
            "parallel": {"ranks": pair, "seconds": SECONDS},
        }


def test_a_new_group_gets_the_time_limit_of_the_default_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = datetime.timedelta(seconds=SECONDS)
    asked: list[dict[str, Any]] = []

    def subgroups(lists: list[list[int]], **how: Any) -> tuple[str, list[str]]:
        asked.append({"lists": lists, **how})
        return "mine", ["mine"]

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1, timeout=limit)
    try:
        monkeypatch.setattr(dist, "new_subgroups_by_enumeration", subgroups)
        assert ranks.groups([range(2), range(2, 4)], "cpu") == "mine"
        assert asked == [{"lists": [[0, 1], [2, 3]], "timeout": limit}]
        assert ranks.groups([[0]], "cpu") is dist.group.WORLD
    finally:
        dist.destroy_process_group()
