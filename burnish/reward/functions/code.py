"""Programs: the share of its tests that the Python code of a response passes, run in the sandbox (docs/sandbox.md)."""

import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from burnish.reward import sandbox as sandboxes
from burnish.reward.functions.reference import unusable_truth
from burnish.reward.sandbox import SandboxSettings
from burnish.utils.errors import ConfigError, RewardError

# Possessive: where nothing closes a fence, all that follows is looked through once.
_FENCE = re.compile(r"^[ \t]*+```[ \t]*+(\w*+)[^\n]*+\n(.*?)^[ \t]*+```", re.MULTILINE | re.DOTALL)
_LANGUAGES = ("", "python", "python3", "py")
_METHODS = ("fraction", "all")
# All tests of a response together, in time limits of one: so that it ends before `reward.timeout` does.
_TOTAL = 4
_INSIDE = Path(sandboxes.__file__).parent / "inside"


def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    data_source: str = "",
    sandbox: SandboxSettings | None = None,
    method: str = "fraction",
) -> dict[str, Any]:
    """Runs the last fenced block of Python in ``solution_str`` against the tests in ``ground_truth``.

    Args:
        ground_truth: the tests, as JSON text or as what it stands for; see `read_tests`.
        sandbox: limits, and where it runs.
        method: "fraction": the share of tests that pass; "all": 1.0 if all do, else 0.0.

    Returns:
        ``score``, and the extras ``num_passed``, ``num_tests`` and ``failure`` (why the first test that failed did; "" if
        none).

    Raises:
        RewardError: tests that cannot be read, or a sandbox that does not work: the response is not to blame.
    """
    if method not in _METHODS:
        raise RewardError(f"method={method!r}: there are {', '.join(_METHODS)}.")
    tests = read_tests(ground_truth)
    settings = sandbox or SandboxSettings()
    try:
        sandboxes.check(settings)
    except ConfigError as error:
        raise RewardError(str(error)) from error
    code = extract_code(solution_str)
    if code is None:
        return _result([], tests, method, "there is no fenced block of Python")
    verdicts, why = _examine(code, tests, settings)
    failures = [verdict["why"] for verdict in verdicts if not verdict["passed"]]
    return _result(verdicts, tests, method, failures[0] if failures else why)


def extract_code(text: str) -> str | None:
    """The last fenced block of Python, or without a language; None if there is none, or only one that never ends."""
    blocks = [code for language, code in _FENCE.findall(text) if language.lower() in _LANGUAGES]
    return blocks[-1] if blocks else None


def read_tests(ground_truth: Any) -> list[dict[str, Any]]:
    """Tests, as `burnish.reward.sandbox.inside.examiner` takes them, of one of these forms, which may also be JSON text:

    - ``{"inputs": [...], "outputs": [...]}``: what the program reads and prints, texts or lists of lines (APPS, TACO).
    - the same with ``"fn_name"``: each input is a list of arguments, or text with one JSON value a line; each output is
      the value that is returned, JSON text where the input is text.
    - ``["assert f(1) == 2", ...]``, also as ``{"test_list": [...], "test_setup_code": ""}`` (MBPP) or ``"assert_case"``.
    - ``{"test": "def check(candidate): ...", "entry_point": "f"}`` (HumanEval).

    Raises:
        RewardError: it is none of these, or there are no tests.
    """
    truth = ground_truth
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError:
            raise _unreadable(ground_truth) from None
    tests: list[dict[str, Any]] = []
    if isinstance(truth, list):
        tests = _assertions(truth, "", ground_truth)
    elif isinstance(truth, dict):
        asserted = truth.get("assert_case") or truth.get("test_list")
        if asserted:
            tests = _assertions(asserted, truth.get("test_setup_code") or "", ground_truth)
        elif "test" in truth and "entry_point" in truth:
            tests = [{"script": str(truth["test"]), "entry": str(truth["entry_point"])}]
        elif isinstance(truth.get("inputs"), list) and isinstance(truth.get("outputs"), list):
            tests = _pairs(truth["inputs"], truth["outputs"], truth.get("fn_name"), ground_truth)
    if not tests:
        raise _unreadable(ground_truth)
    return tests


def _assertions(sources: Any, setup: str, ground_truth: Any) -> list[dict[str, Any]]:
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        raise _unreadable(ground_truth)
    return [{"script": f"{setup}\n{source}"} for source in sources]


def _pairs(inputs: list[Any], outputs: list[Any], function: str | None, ground_truth: Any) -> list[dict[str, Any]]:
    if len(inputs) != len(outputs):
        raise RewardError(f"The ground truth has {len(inputs)} inputs, but {len(outputs)} outputs.")
    if function is None:
        pairs = zip(map(_text, inputs), map(_text, outputs), strict=True)
        return [{"stdin": given, "expected": expected} for given, expected in pairs]
    tests = []
    for given, expected in zip(inputs, outputs, strict=True):
        try:
            args = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else list(given)
            value = json.loads(expected) if isinstance(given, str) and isinstance(expected, str) else expected
        except (ValueError, TypeError):
            raise _unreadable(ground_truth) from None
        tests.append({"function": function, "args": args, "expected": value})
    return tests


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _unreadable(ground_truth: Any) -> RewardError:
    needed = (
        "inputs and outputs (with fn_name for functions), a list of assertions, or test and entry_point, as JSON text or as "
        "they are,"
    )
    return unusable_truth(ground_truth, "holds no tests of a program", needed)


def _examine(code: str, tests: list[dict[str, Any]], settings: SandboxSettings) -> tuple[list[dict[str, Any]], str]:
    """The verdicts of the tests that were reached, and why the others were not."""
    total = min(len(tests), _TOTAL) * settings.timeout
    job = {
        "code": code,
        "tests": tests,
        "timeout": settings.timeout,
        "total": total,
        "output_bytes": settings.output_limit_kb * 1024,
    }
    result = sandboxes.run(
        _examiner(), stdin=json.dumps(job), settings=dataclasses.replace(settings, timeout=total + 1.0)
    )
    lines = result.stdout.splitlines()
    # The last line may be cut where the sandbox was stopped.
    if lines and not result.stdout.endswith("\n"):
        lines.pop()
    verdicts = [json.loads(line) for line in lines]
    # A program that kills its examiner fails; an examiner that fails by itself is no verdict.
    killed = result.exit_code is not None and result.exit_code < 0
    if result.kind == "refused" or (result.kind in ("ok", "error") and not lines and not killed):
        raise RewardError(f"The sandbox did not run the tests: {result.kind}. {result.stderr.strip()[-500:]}")
    if result.kind == "ok":
        return verdicts, ""
    return verdicts, "it killed the process that tests it" if killed else f"it was stopped: {result.kind}"


@cache
def _examiner() -> str:
    """What tests a program, as one file."""
    examiner, candidate = ((_INSIDE / name).read_text(encoding="utf-8") for name in ("examiner.py", "candidate.py"))
    return examiner.replace('"candidate.py"', repr(candidate), 1)


def _result(verdicts: list[dict[str, Any]], tests: list[dict[str, Any]], method: str, failure: str) -> dict[str, Any]:
    num_passed = sum(verdict["passed"] for verdict in verdicts)
    share = num_passed / len(tests)
    score = share if method == "fraction" else float(num_passed == len(tests))
    return {"score": score, "num_passed": num_passed, "num_tests": len(tests), "failure": failure}
