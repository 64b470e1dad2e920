"""What the C library keeps of freed memory; each claim in a process of its own, since it is about the whole process."""

import os
import subprocess
import sys

import pytest

from burnish.utils import heap

has_glibc = pytest.mark.skipif(heap._libc() is None, reason="another C library than glibc")

# Minor page faults of the second of two blocks of 96 MB that are written, one after the other, where the first was freed.
FAULTS = """
import resource
from burnish.utils import heap
{before}

def use():
    block = bytearray(96 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

first = use()
{between}
print(use() - first, heap.kept_bytes() >> 20)
"""


def run(before: str = "", between: str = "", **variables: str) -> list[int]:
    code = FAULTS.format(before=before, between=between)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | variables
    )
    return [int(number) for number in result.stdout.split()]


@has_glibc
def test_memory_that_is_kept_is_not_taken_from_the_system_again():
    pages = (96 << 20) // os.sysconf("SC_PAGE_SIZE")
    faults, kept = run()
    assert faults > 0.9 * pages
    assert kept < 20
    # bytearray zeroes by calloc, which knows no fresh pages in kept memory: it writes them without a fault.
    faults, kept = run(before="assert heap.keep_freed_memory()")
    assert faults < 0.1 * pages
    assert kept >= 96


@has_glibc
def test_what_is_kept_goes_back_when_it_is_too_much():
    keep = "heap.keep_freed_memory()"
    enough = run(before=keep, between="heap.give_back(above=200 << 20)")
    assert enough[0] < 1000
    too_much = run(before=keep, between="heap.give_back(above=50 << 20)\nassert heap.kept_bytes() < 20 << 20")
    assert too_much[0] > 20_000


@has_glibc
def test_holes_that_were_given_back_and_are_filled_again_count_as_kept_once_more():
    code = """
from burnish.utils import heap

heap.keep_freed_memory()
pins = []

def use():
    # What stays between the blocks keeps the heap's end up.
    blocks = []
    for _ in range(4):
        blocks.append(bytearray(24 << 20))
        pins.append(bytearray(2000))

for _ in range(2):
    use()
    print(heap.kept_bytes() >> 20)
    heap.give_back(above=60 << 20)
    print(heap.kept_bytes() >> 20)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kept, left, kept_again, left_again = (int(number) for number in result.stdout.split())
    assert min(kept, kept_again) >= 90
    assert max(left, left_again) < 20


@has_glibc
@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_user_has_set_stays(name):
    value = {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1000000"}.get(name, "1000000")
    faults, _ = run(before="assert not heap.keep_freed_memory()", **{name: value})
    assert faults > 20_000


def test_another_library_keeps_nothing(monkeypatch):
    monkeypatch.setattr(heap, "_libc", lambda: None)
    assert not heap.keep_freed_memory()
    assert heap.kept_bytes() == 0
    heap.give_back(above=0)
