"""The sandbox: what programs in it can and cannot do. Each of these programs tries to get out, or to take too much."""

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from burnish.reward import sandbox
from burnish.reward.sandbox import SandboxSettings, local
from burnish.reward.sandbox.inside import syscalls
from burnish.utils.errors import ConfigError

SMALL = SandboxSettings(timeout=5.0, memory_limit_mb=256, max_processes=8, disk_limit_mb=4, output_limit_kb=64)

shut_off = pytest.mark.skipif(local.refusal() is not None, reason=f"no namespaces here: {local.refusal()}")


def run(code: str, settings: SandboxSettings = SMALL, stdin: str = "", **limits: float) -> sandbox.SandboxResult:
    return sandbox.run(textwrap.dedent(code), stdin=stdin, settings=dataclasses.replace(settings, **limits))


def alive(mark: str) -> list[int]:
    """Processes of this machine whose command line holds ``mark``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@shut_off
def test_a_program_reads_stdin_and_prints() -> None:
    result = run("import sys\nprint(input()[::-1])\nprint('oops', file=sys.stderr)", stdin="abc ü\n")
    assert (result.stdout, result.stderr, result.exit_code, result.kind) == ("ü cba\n", "oops\n", 0, "ok")


@shut_off
def test_a_failing_program_is_an_error_with_its_exit_status() -> None:
    result = run("import sys; sys.exit(3)")
    assert (result.exit_code, result.kind) == (3, "error")
    result = run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert (result.exit_code, result.kind) == (-11, "error")


@shut_off
def test_there_is_no_network() -> None:
    code = """
    import socket
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_PACKET, socket.AF_NETLINK):
        try:
            socket.socket(family, socket.SOCK_DGRAM)
            print("open")
        except PermissionError:
            print("shut")
    print(open("/proc/net/dev").read().count(":"))
    """
    # One interface: the loopback, which is down.
    assert run(code).stdout.split() == ["shut"] * 4 + ["1"]


@shut_off
def test_a_fork_bomb_meets_the_limit_on_processes() -> None:
    begun = time.monotonic()
    result = run(
        """
        import os
        made = 0
        for _ in range(40):
            try:
                if os.fork() == 0:
                    import time; time.sleep(60)
            except BlockingIOError:
                break
            made += 1
        print(made)
        """
    )
    assert result.kind == "ok"
    assert int(result.stdout) <= 8
    assert time.monotonic() - begun < 5


@shut_off
@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(10**9)",
        "x = [0]\nwhile True: x += x",
        # No process passes the limit, but all together do.
        "import os, time\nfor _ in range(4):\n    if os.fork() == 0: break\nx = bytearray(130 * 2**20)\ntime.sleep(4)",
    ],
)
def test_a_memory_bomb_is_stopped(code: str) -> None:
    result = run(code)
    assert result.kind == "memory"
    assert result.seconds < 4


@shut_off
def test_the_disk_cannot_be_filled() -> None:
    code = """
    import os
    try:
        for i in range(20):
            with open(f"/tmp/{i}", "wb") as file:
                file.write(bytes(2**20))
    except OSError as error:
        print(error.errno)
    print(sum(os.stat(f"/tmp/{i}").st_blocks * 512 for i in range(20) if os.path.exists(f"/tmp/{i}")) <= 4 * 2**20)
    """
    assert run(code).stdout.split() == ["28", "True"]


@shut_off
def test_nothing_is_written_outside_and_the_host_is_not_seen(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    code = f"""
    import os, sys
    print(os.path.exists({str(secret)!r}), os.path.exists("/etc/passwd"), os.path.exists("/home"))
    for place in ("/", "/usr", "/etc", "/dev", os.path.dirname(sys.executable), sys.base_prefix, {str(tmp_path)!r}):
        try:
            open(place + "/mine", "w")
            print("written", place)
        except OSError:
            pass
    """
    assert run(code).stdout == "False False False\n"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@shut_off
def test_secrets_of_the_environment_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    code = """
    import glob
    for path in ["/proc/self/environ", *glob.glob("/proc/*/environ"), *glob.glob("/proc/*/cmdline")]:
        try:
            print(open(path).read())
        except OSError:
            pass
    """
    result = run(code)
    assert result.kind == "ok"
    assert "PYTHONHASHSEED" in result.stdout
    assert "s3cret" not in result.stdout


@shut_off
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut(stream: str) -> None:
    result = run(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
    assert result.kind == "output"
    assert len(getattr(result, stream)) == 64 * 1024
    assert result.seconds < 4


@shut_off
@pytest.mark.parametrize(
    "code", ["import time; time.sleep(1000)", "while True: pass", "input()\nimport time; time.sleep(99)"]
)
def test_a_program_that_does_not_end_is_stopped(code: str) -> None:
    begun = time.monotonic()
    assert run(code, timeout=0.5, stdin="\n").kind == "timeout"
    assert time.monotonic() - begun < 3


@shut_off
def test_neither_its_watcher_nor_others_can_be_killed_or_looked_into() -> None:
    code = """
    import ctypes, os, signal
    libc = ctypes.CDLL(None, use_errno=True)
    print(os.getppid(), sorted(int(name) for name in os.listdir("/proc") if name.isdigit()))
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
        try:
            os.kill(1, number)
        except PermissionError:
            pass
    print(libc.ptrace(16, 1, 0, 0), ctypes.get_errno())
    for name in ("mem", "environ"):
        try:
            open(f"/proc/1/{name}", "rb").read(1)
            print("read")
        except PermissionError:
            print("denied")
    print("still here")
    """
    lines = run(code).stdout.splitlines()
    assert lines == ["1 [1, 2]", "-1 1", "denied", "denied", "still here"]


@shut_off
def test_no_rights_are_left_and_none_can_be_had() -> None:
    code = """
    import ctypes, os
    status = open("/proc/self/status").read()
    print([line.split()[1] for line in status.splitlines() if line.startswith(("CapEff", "NoNewPrivs", "Seccomp:"))])
    libc = ctypes.CDLL(None, use_errno=True)
    for flags in (0x10000000, 0x20000, 0x40000000):
        print(libc.unshare(flags), ctypes.get_errno())
    print(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.syscall(319, b"x", 0))
    print(os.getuid() != 0)
    """
    lines = run(code).stdout.splitlines()
    assert lines == ["['0000000000000000', '1', '2']", "-1 1", "-1 1", "-1 1", "-1 -1", "True"]


@shut_off
def test_a_daemon_ends_with_the_sandbox() -> None:
    mark = f"daemon-{os.getpid()}"
    code = f"""
    import os, subprocess, sys, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(1); os.close(2)
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", "{mark}"])
        os._exit(0)
    time.sleep(0.3)
    print("started")
    """
    assert run(code).stdout == "started\n"
    assert alive(mark) == []


@shut_off
def test_all_processes_end_with_the_one_that_called() -> None:
    mark = f"orphan-{os.getpid()}"
    program = (
        f"import os,sys; os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', '{mark}'])"
    )
    call = f"from burnish.reward import sandbox; sandbox.run({program!r}, settings=sandbox.SandboxSettings(timeout=60))"
    caller = subprocess.Popen([sys.executable, "-c", call])
    deadline = time.monotonic() + 20
    # The caller's own command line holds the mark too.
    while len(alive(mark)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(alive(mark)) == 2
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    deadline = time.monotonic() + 5
    while alive(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert alive(mark) == []


@shut_off
def test_runs_leave_no_descriptors_and_no_processes() -> None:
    run("print(1)")
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = sorted(os.listdir("/proc/self/fd")), set(children.read_text().split())
    for code in ("print(1)", "1/0", "while True: print('x' * 1000)"):
        run(code)
    assert sorted(os.listdir("/proc/self/fd")) == before[0]
    assert set(children.read_text().split()) <= before[1]


def test_without_namespaces_nothing_is_run_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = local._job
    broken = lambda *args: {**real(*args), "read_only": ["/proc/\0"]} if args[2] is None else real(*args)  # noqa: E731
    monkeypatch.setattr(local, "_job", broken)
    local.refusal.cache_clear()
    try:
        refused = run("print('run')")
        assert (refused.kind, refused.stdout) == ("refused", "")
        with pytest.raises(ConfigError, match="allow_unsafe"):
            sandbox.check(SMALL)
        assert sandbox.capability().startswith("none")
        sandbox.check(dataclasses.replace(SMALL, allow_unsafe=True))
        assert run("print('run')", allow_unsafe=True).stdout == "run\n"
    finally:
        local.refusal.cache_clear()


def unsafe(code: str, **limits: float) -> sandbox.SandboxResult:
    settings = dataclasses.replace(SMALL, allow_unsafe=True, **limits)
    return local._run(textwrap.dedent(code), "", settings, namespaces=False)


def test_without_namespaces_the_limits_hold_and_daemons_are_found() -> None:
    mark = f"unsafe-{os.getpid()}"
    code = f"""
    import os, socket, sys, time
    try:
        socket.socket()
    except PermissionError:
        print("shut")
    if os.fork() == 0:
        os.setsid()
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", "{mark}"])
    time.sleep(0.3)
    print(os.getcwd())
    """
    result = unsafe(code)
    first, folder = result.stdout.split()
    assert first == "shut"
    assert not os.path.exists(folder)
    assert alive(mark) == []
    assert unsafe("x = bytearray(10**9)").kind == "memory"
    assert unsafe("import time; time.sleep(60)", timeout=0.5).kind == "timeout"


@shut_off
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_it_works_for_a_user_without_rights() -> None:
    # A Python that every user can read, which that of a virtual environment need not be.
    python = "/usr/bin/python3"
    if not os.path.exists(python):
        pytest.skip(f"there is no {python}")
    # Where this Python lies in /tmp, so it does in the sandbox.
    code = "import os; print(os.getuid(), 'main.py' in os.listdir('/tmp')); os.kill(1, 9); print('still here')"
    job = local._job(code, SMALL, None) | {"argv": [python, "main.py"]}
    inside = Path(local.__file__).parent / "inside"
    start = f"""
import ctypes, json, os, subprocess, sys, shutil, tempfile
folder = tempfile.mkdtemp()
inside = shutil.copytree({str(inside)!r}, folder + "/inside")
os.chmod(folder, 0o755)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
read, write = os.pipe()
os.write(write, json.dumps({job!r} | {{"parent": os.getpid()}}).encode()); os.close(write)
done = subprocess.run([{python!r}, "-I", "-S", inside, str(read), "2"], pass_fds=(read,), capture_output=True, text=True)
print(done.stdout, done.stderr)
"""
    done = subprocess.run([python, "-c", start], capture_output=True, text=True, timeout=60)
    assert "1000 True" in done.stdout, done
    assert "still here" in done.stdout or "Operation not permitted" in done.stdout


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_denies_what_it_names(machine: str) -> None:
    program = syscalls.filter_program(machine)
    assert program is not None
    assert len(program) % 8 == 0
    assert syscalls.filter_program("riscv64") is None


@shut_off
def test_a_python_in_the_machines_tmp_is_shown_and_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "seen.txt").write_text("shown")
    (tmp_path / "hidden.txt").write_text("secret")
    shown = [*local._read_only(), str(tmp_path / "lib")]
    monkeypatch.setattr(local, "_read_only", lambda: shown)
    done = run(
        f"""
        import os
        print(open({str(tmp_path / "lib" / "seen.txt")!r}).read(), os.path.exists({str(tmp_path / "hidden.txt")!r}))
        open("/tmp/own.txt", "w").write("mine")
        open({str(tmp_path / "lib" / "new.txt")!r}, "w")
        """
    )
    assert done.stdout == "shown False\n"
    assert "Read-only file system" in done.stderr
