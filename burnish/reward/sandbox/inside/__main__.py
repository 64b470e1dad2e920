"""The sandbox's first process: makes it, starts the program in it, watches and reports.

``python -I -S <this folder> <descriptor of the job> <descriptor of the report>``. The job is JSON, see `local._job`; the
report is lines of JSON: {"refused": why}, {"ready": true}, {"killed": "memory"|"processes"}, {"exit": status}.

Three processes: the launcher (outside, dies with the one that started it), the watcher (process 1 of the sandbox, dies
with the launcher; when it ends the kernel kills all others in the sandbox), and the program (without any rights).
"""

import contextlib
import json
import os
import resource
import signal
import sys
import time

import kernel
import syscalls

_POLL_SECONDS = 0.02
# Of the range that systemd takes dynamic users from: nobody else's, and below 65536, which containers often end at.
_FIRST_UID, _NUM_UIDS = 61184, 4000
_PAGE = resource.getpagesize()


class Report:
    """What the one that started the sandbox is told."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, **fields: object) -> None:
        os.write(self._descriptor, (json.dumps(fields) + "\n").encode())


def main() -> None:
    kernel.die_with_parent()
    job_descriptor, report_descriptor = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(job_descriptor) as file:
        job = json.load(file)
    os.set_inheritable(report_descriptor, False)
    report = Report(report_descriptor)
    if job["parent"] != os.getppid():
        return
    try:
        owner = _separate(job)
    except OSError as error:
        report(refused=str(error.strerror or error))
        return
    # Opened now: the watcher gives this process another root too.
    null = os.open(os.devnull, os.O_RDWR)
    watcher = os.fork()
    if watcher == 0:
        try:
            _watch(job, owner, report, null)
        finally:
            os._exit(1)
    signal.signal(signal.SIGTERM, lambda *_: _kill(watcher))
    if os.getppid() != job["parent"]:
        _kill(watcher)
    _close_streams(null)
    # Of process 1 the kernel tells only when all others of the sandbox have ended.
    os.waitpid(watcher, 0)
    if not job["namespaces"]:
        # Not to be ended by what it was told to do already.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_children()


def _separate(job: dict) -> int:
    """Takes this process's children into new namespaces; returns the user that the program will run as there."""
    uid, gid = os.geteuid(), os.getegid()
    other = _FIRST_UID + os.getpid() % _NUM_UIDS
    if not job["namespaces"]:
        kernel.adopt_orphans()
        return other if uid == 0 and _anyone_can_run(job["argv"][0]) else uid
    if uid == 0:
        try:
            kernel.unshare(kernel.ALL_BUT_USER)
            return other
        except PermissionError:
            # Root of a container without the right to mount; a user namespace may still be allowed.
            pass
    kernel.unshare(kernel.ALL_BUT_USER | kernel.CLONE_NEWUSER)
    for name, content in (("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content)
    return 1000


def _anyone_can_run(program: str) -> bool:
    """Whether another user reaches ``program``: a Python in root's home is for root only."""
    folder = os.path.realpath(program)
    while folder != "/":
        if not os.stat(folder).st_mode & 0o001:
            return False
        folder = os.path.dirname(folder)
    return True


def _watch(job: dict, owner: int, report: Report, null: int) -> None:
    kernel.die_with_parent()
    separate = job["namespaces"]
    if separate:
        try:
            kernel.enter_root(job["read_only"], owner=owner, disk_bytes=job["disk_bytes"])
        except OSError as error:
            report(refused=str(error.strerror or error))
            os._exit(0)
    elif os.geteuid() == 0:
        os.chown(job["folder"], owner, owner)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    program = os.fork()
    if program == 0:
        try:
            _become_program(job, owner, report)
        except BaseException as error:  # noqa: BLE001  whatever it is, the program does not run
            report(refused=f"{type(error).__name__}: {error}")
        finally:
            os._exit(127)
    kernel.set_dumpable(False)
    _close_streams(null)
    status = _wait(program, job, report)
    report(exit=os.waitstatus_to_exitcode(status))
    os._exit(0)


def _become_program(job: dict, owner: int, report: Report) -> None:
    os.setsid()
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    if job["namespaces"]:
        job["folder"] = "/tmp"
    os.chdir(job["folder"])
    with open("main.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(job["code"])
    os.chmod("main.py", 0o644)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(owner, owner, owner)
        os.setresuid(owner, owner, owner)
    for name, limit in job["limits"].items():
        if name == "RLIMIT_NPROC" and _counts_others(job["namespaces"], owner):
            limit += _num_threads_of(owner)
        number = getattr(resource, name)
        # The process that scores may be limited itself, which is never undone.
        most = resource.getrlimit(number)[1]
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(number, (limit, limit))
    os.umask(0o077)
    if not job["namespaces"]:
        kernel.die_with_parent()
    kernel.no_new_privileges()
    syscalls.install_filter(kernel.prctl)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    report(ready=True)
    os.execve(job["argv"][0], job["argv"], job["environment"])


def _counts_others(namespaces: bool, owner: int) -> bool:
    """Whether the limit on processes counts those of the user outside the sandbox too."""
    if owner >= _FIRST_UID and owner < _FIRST_UID + _NUM_UIDS:
        return False
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    # Counted per user namespace since Linux 5.14.
    return not namespaces or release < (5, 14)


def _num_threads_of(uid: int) -> int:
    return sum(len(_listdir(f"/proc/{pid}/task")) for pid in _processes() if _owner(pid) == uid)


def _wait(program: int, job: dict, report: Report) -> int:
    """Reaps whatever ends until ``program`` does; returns its status. Too much memory or too many processes in the
    sandbox, all together, end everything."""
    while True:
        signal.sigtimedwait({signal.SIGCHLD}, _POLL_SECONDS)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == program:
                return status
            if pid == 0:
                break
        excess = _excess(job)
        if excess is not None:
            report(killed=excess)
            os.kill(program, signal.SIGKILL)
            _kill_all(job)
            return signal.SIGKILL


def _excess(job: dict) -> str | None:
    pids = [pid for pid in _processes() if pid != 1] if job["namespaces"] else list(_descendants())
    if len(pids) > job["max_processes"] + 1:
        return "processes"
    return "memory" if sum(map(_resident_bytes, pids)) > job["memory_bytes"] else None


def _kill_all(job: dict) -> None:
    if job["namespaces"]:
        # From process 1: every other process of the sandbox.
        os.kill(-1, signal.SIGKILL)
    else:
        _kill_children()


def _kill_children() -> None:
    """Kills all descendants: orphans become children, so that those who fled are found in the next round."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        pids = list(_descendants())
        for pid in pids:
            _kill(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _descendants(pid: int | None = None) -> list[int]:
    found = []
    for task in _listdir(f"/proc/{pid or 'self'}/task"):
        for child in _read(f"/proc/{pid or 'self'}/task/{task}/children").split():
            found += [int(child), *_descendants(int(child))]
    return found


def _processes() -> list[int]:
    return [int(name) for name in _listdir("/proc") if name.isdigit()]


def _owner(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except FileNotFoundError:
        return -1


def _resident_bytes(pid: int) -> int:
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except (FileNotFoundError, ProcessLookupError):
        return []


def _close_streams(null: int) -> None:
    """The program alone holds the pipes, so that they end with it."""
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


main()
