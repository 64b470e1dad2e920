"""A filter of system calls (seccomp): what a program in the sandbox may not ask of the kernel.

Names and numbers: Linux, arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
"""

import ctypes
import errno
import os
import platform
import struct

_X86_64 = {
    # Other processes.
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_getfd": 438,
    # Memory that no limit counts.
    "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240,
    # Namespaces and file systems.
    "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "fsopen": 430,
    "move_mount": 429, "open_tree": 428, "fsmount": 432, "mount_setattr": 442, "name_to_handle_at": 303,
    "open_by_handle_at": 304,
    # Wide doors into the kernel.
    "bpf": 321, "perf_event_open": 298, "add_key": 248, "request_key": 249, "keyctl": 250, "io_uring_setup": 425,
    "userfaultfd": 323, "kexec_load": 246, "init_module": 175, "finit_module": 313, "delete_module": 176,
    "reboot": 169,
}  # fmt: skip
_AARCH64 = {
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "pidfd_getfd": 438,
    "memfd_create": 279, "memfd_secret": 447, "shmget": 194, "msgget": 186, "semget": 190, "mq_open": 180,
    "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "fsopen": 430,
    "move_mount": 429, "open_tree": 428, "fsmount": 432, "mount_setattr": 442, "name_to_handle_at": 264,
    "open_by_handle_at": 265,
    "bpf": 280, "perf_event_open": 241, "add_key": 217, "request_key": 218, "keyctl": 219, "io_uring_setup": 425,
    "userfaultfd": 282, "kexec_load": 104, "init_module": 105, "finit_module": 273, "delete_module": 106,
    "reboot": 142,
}  # fmt: skip
# machine: (AUDIT_ARCH, socket, clone, denied)
_MACHINES = {
    "x86_64": (0xC000003E, 41, 56, _X86_64),
    "aarch64": (0xC00000B7, 198, 220, _AARCH64),
}
_CLONE3 = 435
_AF_UNIX = 1
# CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_CLONE_NAMESPACES = 0x80 | 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
_X32_BIT = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


def _statement(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, k)


def filter_program(machine: str) -> bytes | None:
    """The filter as BPF for ``machine`` (of `platform.machine`): the calls above fail with EPERM, so does a socket of
    any family but AF_UNIX and a clone into new namespaces; None where the numbers are not known."""
    if machine not in _MACHINES:
        return None
    arch, socket, clone, denied = _MACHINES[machine]
    deny = _statement(_RETURN, _ERRNO | errno.EPERM)
    allow = _statement(_RETURN, _ALLOW)
    program = [
        _statement(_LOAD, _ARCH),
        # Calls by another table of numbers (32 bits) would pass every comparison below.
        _statement(_EQUAL, arch, 1, 0),
        _statement(_RETURN, _KILL),
        _statement(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        program += [_statement(_AT_LEAST, _X32_BIT, 0, 1), deny]
    for number in sorted(denied.values()):
        program += [_statement(_EQUAL, number, 0, 1), deny]
    # The C library falls back to clone, whose flags can be seen.
    program += [_statement(_EQUAL, _CLONE3, 0, 1), _statement(_RETURN, _ERRNO | errno.ENOSYS)]
    program += [
        _statement(_EQUAL, socket, 0, 4),
        _statement(_LOAD, _ARGUMENT),
        _statement(_EQUAL, _AF_UNIX, 1, 0),
        deny,
        allow,
        _statement(_EQUAL, clone, 0, 3),
        _statement(_LOAD, _ARGUMENT),
        _statement(_ANY_BIT, _CLONE_NAMESPACES, 0, 1),
        deny,
        allow,
    ]
    return b"".join(program)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install_filter(prctl: object) -> bool:
    """Puts this process and all that it starts under the filter, for ever; False where there is none for the machine.

    Raises:
        OSError: the kernel refuses.
    """
    program = filter_program(platform.machine())
    if program is None:
        return False
    wanted = _Program(len(program) // 8, program)
    if prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(wanted), 0, 0) != 0:  # type: ignore[operator]
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")
    return True
