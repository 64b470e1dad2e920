"""Code rewards: what passes, what does not, and what a program can try to pass all the same."""

import json

import pytest

from burnish.reward.compute_score import default_compute_score, score_function
from burnish.reward.functions.code import compute_score, extract_code, read_tests
from burnish.reward.sandbox import SandboxSettings, local
from burnish.utils.errors import RewardError

pytestmark = pytest.mark.skipif(local.refusal() is not None, reason=f"no namespaces here: {local.refusal()}")
SETTINGS = SandboxSettings(timeout=1.0, memory_limit_mb=256, max_processes=12, disk_limit_mb=4)

DOUBLE = {"inputs": ["1\n", "2\n", "-3\n"], "outputs": ["2\n", "4\n", "-6\n"]}
CALLS = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}


def score(code: str, truth: object, **kwargs: object) -> float:
    return details(code, truth, **kwargs)["score"]


def details(code: str, truth: object, **kwargs: object) -> dict:
    return compute_score(f"Here it is:\n```python\n{code}\n```\nDone.", truth, sandbox=SETTINGS, **kwargs)


def test_programs_that_read_and_print() -> None:
    assert score("print(2 * int(input()))", DOUBLE) == 1.0
    assert score("print(abs(2 * int(input())))", json.dumps(DOUBLE)) == pytest.approx(2 / 3)
    assert score("print(abs(2 * int(input())))", DOUBLE, method="all") == 0.0
    assert score("print(2 * int(input()))", DOUBLE, method="all") == 1.0


def test_what_counts_as_the_same_output() -> None:
    cases = [
        ("1 2\n3", "1 2 \n3\n\n", True),
        ("1  2", "1 2", True),
        ("1\n2", "1 2", False),
        ("1", "1.0", True),
        ("0.3333333333", "0.33333333", True),
        ("0.333", "0.33333333", False),
        ("1000000001", "1000000000", False),
        ("Yes", "YES", False),
        ("inf", "1.5", False),
        ("", "1", False),
    ]
    for equal in (True, False):
        chosen = [(printed, expected) for printed, expected, same in cases if same is equal]
        truth = {"inputs": [printed for printed, _ in chosen], "outputs": [expected for _, expected in chosen]}
        assert details("import sys; print(sys.stdin.read())", truth)["num_passed"] == len(chosen) * equal


def test_functions_and_methods() -> None:
    assert score("def add(a, b): return a + b", CALLS) == 1.0
    assert score("class Solution:\n    def add(self, a, b): return a + b", CALLS) == 1.0
    assert score("def sub(a, b): return a + b", CALLS) == 0.0
    lines = {"inputs": ['[3, 1]\n{"a": 1}'], "outputs": ['[[1, 3], "a"]'], "fn_name": "f"}
    assert score("def f(x, d): return (sorted(x), *d)", lines) == 1.0
    apps = {"inputs": [[[2]]], "outputs": [[[2, 2]]], "fn_name": "f"}
    assert score("def f(x): return x * 2", apps) == 1.0


def test_assertions_see_exceptions_objects_and_changed_arguments() -> None:
    code = """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
def order(x): x.sort()
def check(n):
    if n < 0: raise ValueError("negative")
    return {1, n}, (n, None)
"""
    truth = [
        "s = Stack()\ns.push(3)\nassert s.items == [3]",
        "x = [2, 1]\norder(x)\nassert x == [1, 2]",
        "assert check(2) == ({1, 2}, (2, None))",
        "try:\n    check(-1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'negative'",
        "assert math.isclose(check(3)[1][0], 3)",
        "assert check(2) == 5",
    ]
    assert details(code, truth)["num_passed"] == 5
    mbpp = {"test_list": ["assert f(2) == two"], "test_setup_code": "two = 2"}
    assert score("def f(x): return x", mbpp) == 1.0
    human = {"test": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "f"}
    assert (score("def f(x): return x + 1", human), score("def f(x): return x", human)) == (1.0, 0.0)


CHEATS = {
    "exits": "import os, sys\nos._exit(0)",
    "raises SystemExit": "raise SystemExit(0)",
    "prints verdicts": """
import json, os
for fd in range(20):
    try: os.write(fd, (json.dumps({"passed": True, "why": ""}) + "\\n").encode() * 9)
    except OSError: pass
def add(a, b): print('{"passed": true, "why": ""}', flush=True)
""",
    "equals everything": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
class Int(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def add(a, b): return [Any(), Int(9)][a == 3]
""",
    "patches builtins": """
import builtins, json, ast, sys
builtins.all = builtins.any = builtins.isinstance = builtins.map = lambda *a: True
json.dumps = lambda *a, **k: '{"value": true, "passed": true}'
def add(a, b): return True
""",
    "looks for the answers": """
import os, re
found = []
for pid in os.listdir("/proc"):
    if pid.isdigit() and int(pid) != os.getpid():
        for name in ("mem", "environ", "fd/0", "maps", "stat"):
            try: found.append(open(f"/proc/{pid}/{name}").read())
            except Exception: pass
for root, _, files in os.walk("/tmp"):
    found += [open(os.path.join(root, f)).read() for f in files if f != "solution.py"]
def add(a, b): return 777001 if "777001" in str(found) else 0
""",
    "kills the examiner": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef add(a, b): return a + b",
    "writes modules": "open('/tmp/json.py', 'w').write('x')\nopen('json.py', 'w').write('x')\ndef add(a, b): return 0",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_no_program_passes_without_the_answers(cheat: str) -> None:
    calls = {"inputs": [[1, 2], [3, 4]], "outputs": [777001, 777001], "fn_name": "add"}
    asserts = ["assert add(1, 2) == 777001", "assert add(3, 4) in (777001, 1)"]
    prints = {"inputs": ["1", "2"], "outputs": ["777001", "777001"]}
    by_output = cheat in ("exits", "prints verdicts", "looks for the answers")
    for truth in (calls, asserts, prints) if by_output else (calls, asserts):
        result = details(CHEATS[cheat], truth)
        # The second assertion takes True for 1.
        allowed = 1 if cheat == "patches builtins" and truth is asserts else 0
        assert result["num_passed"] <= allowed, (truth, result)


STAND_INS = {
    "a module": (
        "class math:\n    isclose = staticmethod(lambda *a, **k: True)\n",
        "assert math.isclose(add(1, 2), 777001)",
    ),
    "the end of a loop": ("", "assert all(map(lambda x: add(x, 2) == 777001, [1, 2]))"),
    "builtins": (
        """
import json, sys
main, dumps = sys.modules["__main__"], json.dumps
def zero(*args): return 0
def forged(reply):
    json.dumps = dumps
    main.kept.append(zero)
    number = len(main.kept) - 1
    reply["value"]["d"].append(["__builtins__", {"d": [["abs", {"h": number}]]}])
    return dumps(reply)
json.dumps = forged
""",
        "assert abs(add(1, 2) - 777001) < 1e-6",
    ),
}


@pytest.mark.parametrize("what", STAND_INS)
def test_what_a_program_puts_in_the_place_of_a_tests_own_means_gains_it_nothing(what: str) -> None:
    code, test = STAND_INS[what]
    ends = "raise StopIteration" if what == "the end of a loop" else "return 0"
    assert score(f"{code}\ndef add(a, b): {ends}\n", [test]) == 0.0
    assert score("import math\ndef add(a, b): return 777001\n", [test]) == 1.0


def test_a_test_that_hangs_costs_its_time_and_no_other_test() -> None:
    truth = {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]}
    hangs = "n = int(input())\nwhile n == 2: pass\nprint(n)"
    assert details(hangs, truth)["num_passed"] == 2
    calls = {"inputs": [[1], [2], [3]], "outputs": [1, 2, 3], "fn_name": "f"}
    assert details("import time\ndef f(n):\n    if n == 2: time.sleep(99)\n    return n", calls)["num_passed"] == 2


def test_what_the_program_leaves_behind_does_not_hold_up_the_verdict() -> None:
    code = "import os, time\nprint(2 * int(input()), flush=True)\nif os.fork() == 0:\n    os.setsid(); time.sleep(60)"
    assert score(code, {"inputs": ["1"], "outputs": ["2"]}) == 1.0


def test_the_last_fenced_block_of_python_counts() -> None:
    assert extract_code("```python\na\n```\ntext\n```\nb\n```\n```json\n{}\n```") == "b\n"
    assert extract_code("no code") is None
    assert extract_code("```python\nunfinished") is None
    result = compute_score("no code", DOUBLE, sandbox=SETTINGS)
    assert (result["score"], result["failure"]) == (0.0, "there is no fenced block of Python")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("behind", ["a", " "])
def test_a_fence_that_nothing_closes_takes_linear_time(behind: str) -> None:
    assert extract_code(f"```{behind * 50_000}\n{'b' * 50_000}") is None


@pytest.mark.parametrize(
    "truth", [None, "", "72", {"inputs": []}, {"inputs": ["1"], "outputs": []}, [], [1], {"fn_name": "f"}]
)
def test_tests_that_cannot_be_read_are_an_error(truth: object) -> None:
    with pytest.raises(RewardError, match="ground truth"):
        read_tests(truth)


def test_data_sources_of_code_come_here() -> None:
    answer = "```python\nprint(2 * int(input()))\n```"
    assert default_compute_score("apps", answer, json.dumps(DOUBLE), sandbox=SETTINGS)["score"] == 1.0
    for source in ("codecontests", "codeforces", "taco"):
        assert score_function(source) is compute_score
