"""What the C library does with memory that was freed, where training computes on a CPU.

glibc gives every freed block above 32 MB back to the system, and the end of its heap when more than twice that is free there.
So the activations of an update, and a step later those of the next one, are taken from the system again: it zeroes each page of
4 KB at its first touch, a tenth of an update's processor time for a model of 135 million parameters and more where other
processes take the memory in between. A GPU's memory is kept by PyTorch for the same reason.
"""

import ctypes
import functools
import platform
from typing import Any

from burnish.utils import env

# Numbers of mallopt's parameters (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Blocks of at least this size still come from the system and go back there: a hole of that size is seldom filled again.
_LARGEST_KEPT = 1 << 30


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


@functools.cache
def _libc() -> Any:
    """glibc, from 2.33 on, which can tell what is free; None where there is another library."""
    if platform.libc_ver()[0] != "glibc":
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return None
    library.mallinfo2.restype = _Mallinfo2
    return library


def keep_freed_memory() -> bool:
    """From now on this process keeps memory that it frees for its next use, until `give_back`; what the user has set for
    glibc's allocator (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES``) stays.

    Returns:
        whether it does.
    """
    library = _libc()
    set_by_user = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if library is None or any(env.get(name) for name in set_by_user):
        return False
    # -1 is the largest number there is: the heap's end is never given back by itself.
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT) and library.mallopt(_TRIM_THRESHOLD, -1))


def kept_bytes() -> int:
    """Memory that this process has freed and still holds: of the free blocks what has pages, since those that were given back
    stay in the library's lists. Too little where blocks in use were never written to."""
    library, own = _libc(), env.own_memory()
    if library is None or own is None:
        return 0
    info = library.mallinfo2()
    return max(0, min(int(info.fordblks), own - int(info.uordblks) - int(info.hblkhd)))


def give_back(above: int) -> None:
    """Gives what is kept back to the system if it may be more than ``above`` bytes."""
    library = _libc()
    # All free blocks count, also those that may have no pages any more: then there is little to give, and it takes little.
    if library is not None and int(library.mallinfo2().fordblks) > above:
        library.malloc_trim(0)
