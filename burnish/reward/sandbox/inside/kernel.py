"""The kernel's calls that a sandbox is made of, and the file system that is seen in it."""

import ctypes
import os
import stat
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
ALL_BUT_USER = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_RELATIME = 4096, 16384, 1 << 18, 1 << 21
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_CHILD_SUBREAPER = 1, 4, 38, 36
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_MOUNT_SETATTR, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 442, 0x8000, 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
prctl = _libc.prctl
prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)

DEVICES = ("null", "zero", "full", "random", "urandom")
OLD_ROOT = "/.old"


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """New namespaces for this process, or for its children (pids)."""
    _check(_libc.unshare(flags), "unshare")


def die_with_parent() -> None:
    """This process is killed when the one that started it ends, however it does."""
    _check(prctl(_PR_SET_PDEATHSIG, 9, None, 0, 0), "PR_SET_PDEATHSIG")


def set_dumpable(dumpable: bool) -> None:
    """Whether processes of the same user may look into this one (ptrace, /proc/PID/mem, /proc/PID/fd)."""
    _check(prctl(_PR_SET_DUMPABLE, int(dumpable), None, 0, 0), "PR_SET_DUMPABLE")


def no_new_privileges() -> None:
    """No set-user-ID program gives this process, or any that it starts, more rights."""
    _check(prctl(_PR_SET_NO_NEW_PRIVS, 1, None, 0, 0), "PR_SET_NO_NEW_PRIVS")


def adopt_orphans() -> None:
    """Descendants whose parent has ended become this process's children."""
    _check(prctl(_PR_SET_CHILD_SUBREAPER, 1, None, 0, 0), "PR_SET_CHILD_SUBREAPER")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    done = _libc.mount(source.encode(), target.encode(), kind and kind.encode(), flags, options.encode())
    _check(done, f"mount {kind or source} on {target}")


def enter_root(read_only: list[str], *, owner: int, disk_bytes: int) -> None:
    """A root of its own for this process and its children: ``read_only`` paths of the host as they are there, five
    devices, /proc, and a writable /tmp of ``disk_bytes`` that belongs to ``owner`` and is empty but for such paths in it.
    Nothing else is there.

    To be called in new mount and pid namespaces.

    Raises:
        OSError: the kernel refuses one of the mounts.
    """
    mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=0755")
    os.mkdir("/tmp" + OLD_ROOT)
    pivot = _SYS_PIVOT_ROOT.get(os.uname().machine)
    if pivot is None:
        raise OSError(f"the number of pivot_root on {os.uname().machine} is not known")
    _check(_libc.syscall(pivot, b"/tmp", ("/tmp" + OLD_ROOT).encode()), "pivot_root")
    os.chdir("/")
    # First, since what is shown may lie in the host's /tmp.
    os.mkdir("/tmp")
    options = f"size={disk_bytes},nr_inodes=4096,mode=0700,uid={owner},gid={owner}"
    mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for path in read_only:
        _show(path)
    os.mkdir("/dev")
    for name in DEVICES:
        _touch(f"/dev/{name}")
        mount(f"{OLD_ROOT}/dev/{name}", f"/dev/{name}", None, _MS_BIND)
    for name, target in {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1"}.items():
        os.symlink(target, f"/dev/{name}")
    os.symlink("/tmp", "/dev/shm")
    os.mkdir("/proc")
    mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _check(_libc.umount2(OLD_ROOT.encode(), _MNT_DETACH), "umount of the old root")
    os.rmdir(OLD_ROOT)
    mount("none", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _show(path: str) -> None:
    """``path`` of the old root in the new one, where it is there and not shown yet; it cannot be written to."""
    source = OLD_ROOT + path
    if os.path.lexists(path) or not os.path.lexists(source):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    mode = os.lstat(source).st_mode
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink(source), path)
        return
    if stat.S_ISDIR(mode):
        os.mkdir(path)
    else:
        _touch(path)
    mount(source, path, None, _MS_BIND | _MS_REC)
    _forbid_writing(path)


def _forbid_writing(path: str) -> None:
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    if _libc.syscall(_SYS_MOUNT_SETATTR, -100, path.encode(), _AT_RECURSIVE, attributes, len(attributes)) == 0:
        return
    # Kernels before 5.12. What is set already must be set again, or the kernel refuses; the values are the same.
    kept = os.statvfs(path).f_flag & (_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    mount("none", path, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_RELATIME | kept)


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
