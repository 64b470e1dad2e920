"""A process may have less memory than its computer has."""

import os
from pathlib import Path

import pytest

from burnish.utils import env
from burnish.utils.cgroup import MemoryGroup, memory_groups

GIB = 2**30


def write_group(folder: Path, limit: str, used: int, inactive: int, *, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    prefix = "" if version == 2 else "total_"
    # The other version's line of that name counts something else.
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {inactive}\ninactive_anon 7\n")


def said(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "cgroup"
    file.write_text(text)
    return file


def test_every_level_of_a_job_counts(tmp_path):
    # As SLURM makes them: the limit stands two levels above the process.
    job = tmp_path / "sys" / "system.slice" / "slurmstepd.scope" / "job_7"
    write_group(job, str(64 * GIB), 50 * GIB, 6 * GIB)
    write_group(job / "step_0", "max", 40 * GIB, 0)
    write_group(job / "step_0" / "user", str(60 * GIB), 40 * GIB, GIB)
    proc = said(tmp_path, "0::/system.slice/slurmstepd.scope/job_7/step_0/user\n")
    assert memory_groups(proc, tmp_path / "sys") == [
        MemoryGroup(60 * GIB, 21 * GIB),
        MemoryGroup(64 * GIB, 20 * GIB),
    ]


@pytest.mark.parametrize("path", ["/", "/../../kubepods/pod9/box", "/docker/0123abc"])
def test_a_container_sees_its_own_group_as_the_top(tmp_path, path):
    write_group(tmp_path / "sys", str(8 * GIB), 3 * GIB, 0)
    assert memory_groups(said(tmp_path, f"0::{path}\n"), tmp_path / "sys") == [MemoryGroup(8 * GIB, 5 * GIB)]


def test_version_1_and_a_group_that_is_over_its_limit(tmp_path):
    write_group(tmp_path / "sys" / "memory", str(2**63 - 4096), GIB, 0, version=1)
    write_group(tmp_path / "sys" / "memory" / "docker" / "a", str(4 * GIB), 5 * GIB, 100, version=1)
    proc = said(tmp_path, "9:name=systemd:/\n4:memory:/docker/a\n0::/\n")
    assert memory_groups(proc, tmp_path / "sys") == [MemoryGroup(4 * GIB, 0)]


def test_a_limit_counts_where_nothing_is_told_of_files(tmp_path):
    write_group(tmp_path / "sys", str(8 * GIB), 3 * GIB, GIB)
    (tmp_path / "sys" / "memory.stat").unlink()
    assert memory_groups(said(tmp_path, "0::/\n"), tmp_path / "sys") == [MemoryGroup(8 * GIB, 5 * GIB)]


@pytest.mark.parametrize("broken", ["no group", "no number", "no file"])
def test_what_cannot_be_read_limits_nothing(tmp_path, broken):
    write_group(tmp_path / "sys", "lots" if broken == "no number" else str(GIB), 1, 1)
    proc = said(tmp_path, "" if broken == "no group" else "0::/\n")
    if broken == "no file":
        proc.unlink()
    assert memory_groups(proc, tmp_path / "sys") == []


def test_memory_is_that_of_the_tightest_group(monkeypatch):
    whole, available = env.total_memory(), env.available_memory()
    assert whole <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(env, "memory_groups", lambda: [MemoryGroup(3000, 200), MemoryGroup(2000, 900)])
    assert env.total_memory() == 2000
    if available is not None:
        assert env.available_memory() == 200
    monkeypatch.setattr(env, "memory_groups", lambda: [MemoryGroup(2**60, 2**60)])
    assert env.total_memory() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_the_native_engines_budget_is_that_of_the_group(monkeypatch):
    import torch

    from burnish.rollout.native.memory import MemoryBudget

    monkeypatch.setattr(env, "memory_groups", lambda: [MemoryGroup(4000, 900)])
    assert MemoryBudget(torch.device("cpu"), 0.5, 100).cache_bytes(0) == 1900
