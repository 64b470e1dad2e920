"""Tests a program that nobody trusts, from a process that it cannot reach: sent into the sandbox as one file.

The job comes as JSON on stdin: {"code", "tests", "timeout", "output_bytes"}. A test is {"stdin", "expected"} (compare what
the program prints), {"function", "args", "expected"} (compare what its function returns) or {"script", "entry"} (Python
statements about the program's functions, which pass if nothing is raised). Each verdict is a line of JSON on stdout,
{"passed", "why"}.

The program runs in a process of its own. It gets inputs and arguments, never an expected answer, and what it returns
comes back as data; comparisons and assertions happen here. Exiting, printing, patching builtins or objects that equal
everything gain it nothing.
"""

import ast
import builtins
import contextlib
import ctypes
import importlib
import json
import math
import os
import resource
import select
import shutil
import signal
import subprocess
import sys

# What tests may use without an import, if neither they nor the program define it.
MODULES = (
    "math", "re", "collections", "itertools", "functools", "string", "random", "datetime", "heapq", "bisect", "operator",
    "statistics", "fractions", "decimal", "copy", "json",
)  # fmt: skip
TOLERANCE = 1e-6

# The program's side; the text of that file takes the place of its name when this one is sent.
CANDIDATE = "candidate.py"


class Overtime(BaseException):
    """A test took too long. No Exception, so that tests which catch those do not catch it."""


class Unreadable(Exception):
    """The program's process ended, or said what cannot be read."""


class Candidate:
    """The program in a process of its own, asked through pipes."""

    def __init__(self, code, folder, timeout, max_bytes):
        ask_read, self._ask = os.pipe()
        self._answers, tell_write = os.pipe()
        arguments = ["-c", CANDIDATE, str(ask_read), str(tell_write)]
        self._process = start(arguments, folder, timeout, stdout=subprocess.DEVNULL, pass_fds=(ask_read, tell_write))
        os.close(ask_read)
        os.close(tell_write)
        self._held, self._max_bytes = b"", max_bytes
        self.names = self.ask("load", code)

    def ask(self, what, *values):
        args = values[1] if what == "call" else ()
        content = (json.dumps([what, encode(values)]) + "\n").encode()
        try:
            while content:
                content = content[os.write(self._ask, content) :]
        except BrokenPipeError:
            raise Unreadable("the program ended") from None
        try:
            reply = json.loads(self._line())
            if "raised" in reply:
                kind, message = reply["raised"]
                raise exception_class(kind)(str(message))
            changed = decode(reply["args"], self) if "args" in reply else ()
            value = decode(reply["value"], self)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if "reply" in locals() and isinstance(reply, dict) and "raised" in reply:
                raise
            raise Unreadable("the program's answer cannot be read") from error
        for given, now in zip(args, changed, strict=False):
            change(given, now)
        return value

    def _line(self):
        while b"\n" not in self._held:
            content = os.read(self._answers, 1 << 16)
            if not content:
                raise Unreadable("the program ended")
            self._held += content
            if len(self._held) > self._max_bytes:
                raise Unreadable("the program returned too much")
        line, _, self._held = self._held.partition(b"\n")
        return line

    def close(self):
        stop(self._process)
        os.close(self._ask)
        os.close(self._answers)


class Remote:
    """An object that stays in the program's process. Two are equal only if they are the same."""

    def __init__(self, candidate, number):
        object.__setattr__(self, "_of", (candidate, number))

    def __call__(self, *args, **kwargs):
        return self._of[0].ask("call", self, list(args), kwargs)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._of[0].ask("getattr", self, name)

    def __setattr__(self, name, value):
        self._of[0].ask("setattr", self, name, value)

    def __getitem__(self, index):
        return self._of[0].ask("getitem", self, index)

    def __len__(self):
        return self._of[0].ask("len", self)

    def __iter__(self):
        return iter(self._of[0].ask("iter", self))

    def __contains__(self, item):
        return self._of[0].ask("contains", self, item)

    def __bool__(self):
        return self._of[0].ask("bool", self)

    def __str__(self):
        return self._of[0].ask("str", self)

    def __repr__(self):
        return self._of[0].ask("repr", self)


def encode(x):
    if x is None or type(x) in (bool, int, float, str):
        return x
    if isinstance(x, Remote):
        return {"h": x._of[1]}
    for kind, mark in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "f")):
        if isinstance(x, kind):
            return {mark: [encode(y) for y in x]}
    if isinstance(x, dict):
        return {"d": [[encode(k), encode(v)] for k, v in x.items()]}
    if isinstance(x, (bytes, bytearray)):
        return {"b": x.hex()}
    if isinstance(x, complex):
        return {"c": [x.real, x.imag]}
    raise Unreadable(f"a test gives the program a {type(x).__name__}, which cannot be sent to it")


def decode(x, candidate):
    if not isinstance(x, dict):
        return x
    ((mark, y),) = x.items()
    if mark in ("l", "t", "s", "f"):
        kind = {"l": list, "t": tuple, "s": set, "f": frozenset}[mark]
        return kind(decode(z, candidate) for z in y)
    if mark == "d":
        return {decode(k, candidate): decode(v, candidate) for k, v in y}
    if mark == "b":
        return bytes.fromhex(y)
    return complex(*y) if mark == "c" else Remote(candidate, int(y))


def change(given, now):
    """What the program did to a list, dict or set that it was given."""
    if isinstance(given, list) and isinstance(now, list):
        given[:] = now
    elif isinstance(given, (dict, set)) and type(given) is type(now):
        given.clear()
        given.update(now)


def exception_class(name):
    found = getattr(builtins, name, None) if isinstance(name, str) else None
    if (
        isinstance(found, type)
        and issubclass(found, Exception)
        # StopIteration would end the loop of a test, as if all its cases had passed.
        and found not in (UnicodeDecodeError, UnicodeEncodeError, StopIteration, StopAsyncIteration)
    ):
        return found
    return RuntimeError


def start(arguments, folder, timeout, **options):
    limit = math.ceil(timeout)
    return subprocess.Popen(
        [sys.executable, "-P", "-s", "-B", *arguments],
        cwd=folder,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit)),
        **{"stdin": subprocess.DEVNULL, **options},
    )


def stop(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def printed(folder, test, timeout, max_bytes):
    """What the program prints given the test's input, or None and why there is nothing to compare."""
    with open(os.path.join(folder, "stdin"), "w+", encoding="utf-8", errors="surrogatepass") as file:
        file.write(test["stdin"])
        file.seek(0)
        process = start(["solution.py"], folder, timeout, stdin=file, stdout=subprocess.PIPE)
    output, ended = b"", False
    descriptor = process.stdout.fileno()
    os.set_blocking(descriptor, False)
    pid = os.pidfd_open(process.pid)
    try:
        while True:
            # A process that it left behind may hold the pipe for ever.
            ended = ended or bool(select.select([descriptor, pid], [], [])[0] == [pid])
            try:
                content = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                if ended:
                    break
                continue
            output += content
            if len(output) > max_bytes:
                return None, "it printed too much"
            if not content:
                break
        status = process.wait()
    finally:
        os.close(pid)
        stop(process)
        process.stdout.close()
    if status != 0:
        return (
            None,
            "it took too much processor time" if status == -signal.SIGXCPU else f"it ended with status {status}",
        )
    return output.decode("utf-8", "replace"), ""


def same_text(seen, expected):
    """Line by line, blank lines at both ends and space at both ends of lines aside; see docs/sandbox.md."""
    lines, wanted = ([line.split() for line in text.strip().splitlines()] for text in (seen, expected))
    return len(lines) == len(wanted) and all(
        len(line) == len(other) and all(map(same_word, line, other)) for line, other in zip(lines, wanted, strict=True)
    )


def same_word(seen, expected):
    if seen == expected:
        return True
    # Whole numbers must be the same; decimals may differ in the last places.
    if "." not in seen + expected and "e" not in (seen + expected).lower():
        return False
    try:
        return len(seen) < 400 and close(float(seen), float(expected))
    except ValueError:
        return False


def close(a, b):
    return math.isfinite(a) and math.isfinite(b) and math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def same_value(seen, expected):
    """Equal as JSON: tuples are lists, keys are text, decimals may differ in the last places."""
    if isinstance(seen, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(seen) == len(expected) and all(map(same_value, seen, expected))
    if isinstance(seen, dict) and isinstance(expected, dict):
        seen, expected = ({str(k): v for k, v in x.items()} for x in (seen, expected))
        return seen.keys() == expected.keys() and all(same_value(seen[k], expected[k]) for k in seen)
    if isinstance(seen, float) or isinstance(expected, float):
        numbers = isinstance(seen, (int, float)) and isinstance(expected, (int, float))
        return numbers and (seen == expected or close(seen, expected))
    return type(seen) is not Remote and seen == expected


class Examiner:
    def __init__(self, job):
        self.job = job
        self._candidate = None
        self._folder = os.getcwd()

    def judge(self, number, test):
        folder = os.path.join(self._folder, f"test-{number}")
        os.mkdir(folder)
        signal.setitimer(signal.ITIMER_REAL, self.job["timeout"])
        try:
            return self._passes(test, folder)
        except Overtime:
            self.close()
            return False, "it took too long"
        except Unreadable as error:
            self.close()
            return False, str(error)
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a test raises, it has not passed
            return False, f"{type(error).__name__}: {error}"[:300]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            shutil.rmtree(folder, ignore_errors=True)

    def _passes(self, test, folder):
        if "stdin" in test:
            with open(os.path.join(folder, "solution.py"), "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(self.job["code"])
            output, why = printed(folder, test, self.job["timeout"], self.job["output_bytes"])
            passed = output is not None and same_text(output, test["expected"])
            return passed, why or ("" if passed else "it printed something else")
        names = self._load().names
        if "function" in test:
            value = self._function(names, test["function"])(*test["args"])
            expected = test["expected"]
            wrapped = isinstance(expected, list) and len(expected) == 1 and same_value(value, expected[0])
            passed = wrapped or same_value(value, expected)
            return passed, "" if passed else "it returned something else"
        self._run_script(test, names)
        return True, ""

    def _load(self):
        if self._candidate is None:
            self._candidate = Candidate(self.job["code"], self._folder, self.job["total"], self.job["output_bytes"])
        return self._candidate

    @staticmethod
    def _function(names, name):
        if name in names:
            return names[name]
        if "Solution" in names:
            return getattr(names["Solution"](), name)
        raise Unreadable(f"it does not define {name}")

    def _run_script(self, test, names):
        tree = ast.parse(test["script"])
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        space: dict = {"__name__": "tests", **{name: importlib.import_module(name) for name in MODULES if name in used}}
        # Names of builtins too: a program may define max, say, and the tests mean it only if they call the entry.
        # A name that a test takes something from (math.isclose) is the module; __builtins__ would be what the test is run with.
        modules = {x.value.id for x in ast.walk(tree) if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name)}
        kept = modules & set(MODULES)
        mine = {name for name in names if name in kept or name.startswith("__") or hasattr(builtins, name)}
        space |= {name: value for name, value in names.items() if name not in mine}
        exec(compile(tree, "tests", "exec"), space)
        if test.get("entry"):
            space["check"](self._function(names, test["entry"]))

    def close(self):
        if self._candidate is not None:
            self._candidate.close()
            self._candidate = None


def overtime(*_):
    raise Overtime


def main():
    sys.set_int_max_str_digits(0)
    job = json.loads(sys.stdin.read())
    # From here on the program, which runs as the same user, cannot look into this process.
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    signal.signal(signal.SIGALRM, overtime)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    verdicts = os.dup(1)
    # Tests print nothing among the verdicts.
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    examiner = Examiner(job)
    for number, test in enumerate(job["tests"]):
        passed, why = examiner.judge(number, test)
        os.write(verdicts, (json.dumps({"passed": passed, "why": why}) + "\n").encode())
    examiner.close()


main()
