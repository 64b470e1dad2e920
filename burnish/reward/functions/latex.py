r"""Mathematical answers as text: brought to one form, and compared.

The form follows the rules published with MATH (Hendrycks et al., arXiv:2103.03874, `math_equivalence`) and with Minerva
(Lewkowycz et al., arXiv:2206.14858, appendix D): ``\dfrac`` is ``\frac``, ``\frac12`` is ``\frac{1}{2}``, ``a/b`` of
integers is a fraction, ``\sqrt3`` is ``\sqrt{3}``; ``\left``, ``\right``, spaces, degrees, percent and dollar signs and
units at the end go, as does ``x=`` before the answer. Beyond those rules two answers are also equal where both are
numbers of the same value: 1,234 and 1234.0, ``\frac{1}{2}`` and 0.5.
"""

import functools
import importlib.util
import re
import threading
from fractions import Fraction
from typing import Any

from burnish.reward.functions.answer import to_ascii, whole_number
from burnish.utils.foreign_code import Caught

# Longer answers are compared as text only: computer algebra may take for ever on them.
_LONGEST_ALGEBRA = 200
_ALGEBRA_SECONDS = 5

_DROPPED = (
    "\n",
    r"\left",
    r"\right",
    r"\!",
    r"\,",
    r"\;",
    r"\:",
    r"^{\circ}",
    r"^\circ",
    r"\circ",
    r"\%",
    "%",
    r"\$",
    "$",
)
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\{([^{}]*)\}")
_UNIT = re.compile(r"(?<=[0-9})])\s*\\(?:text|textrm|mathrm|mbox)\{[^{}]*\}(?:\^\{?[0-9]\}?)?\s*\Z")
_ASSIGNMENT = re.compile(r"\A\s*[A-Za-z](?:_?[A-Za-z0-9])?\s*=(?!=)")
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([0-9A-Za-z]))\s*(?:\{([^{}]*)\}|([0-9A-Za-z]))")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9A-Za-z])")
_PLAIN_FRACTION = re.compile(r"(-?[0-9]++)/([0-9]++)")
_MIXED = re.compile(r"(-?[0-9]++)\s+([0-9]++/[0-9]++)")
_SHORT_SCRIPT = re.compile(r"([\^_])\{([0-9A-Za-z])\}")
_LONE_LETTER = re.compile(r"\(([A-Z])\)")
_LONE_POINT = re.compile(r"(?<![0-9])\.(?=[0-9])")


def normalise(answer: str) -> str:
    """The one form of an answer, see above."""
    text = to_ascii(answer).strip().rstrip(".,;").strip("`*").strip()
    for opening, closing in (("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing):
            text = text[len(opening) : -len(closing)].strip()
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    text = _UNIT.sub("", text)
    for dropped in _DROPPED:
        text = text.replace(dropped, "")
    text = _WRAPPER.sub(r"\1", text)
    text = _ASSIGNMENT.sub("", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = _SHORT_FRACTION.sub(_full_fraction, text)
    text = _LONE_POINT.sub("0.", text)
    text = _SHORT_SCRIPT.sub(r"\1\2", text)
    text = text.strip()
    if mixed := _MIXED.fullmatch(text):
        over, under = mixed[2].split("/")
        return rf"{mixed[1]}\frac{{{over}}}{{{under}}}"
    # Digits stay apart, unless they are the thousands of one number: "1 2" is not 12.
    text = re.sub(r"(?<=[0-9])\s+(?=[0-9]{3}(?![0-9]))", "", text)
    text = re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text)
    if letter := _LONE_LETTER.fullmatch(text):
        return letter[1]
    if plain := _PLAIN_FRACTION.fullmatch(text):
        sign = "-" if plain[1].startswith("-") else ""
        text = rf"{sign}\frac{{{plain[1].removeprefix('-')}}}{{{plain[2]}}}"
    return text.rstrip(".")


def _full_fraction(found: re.Match[str]) -> str:
    over, under = (found[1] if found[1] is not None else found[2]), (found[3] if found[3] is not None else found[4])
    return rf"\frac{{{over}}}{{{under}}}"


def same_answer(answer: str, truth: str) -> bool:
    """Whether two answers have the same form, or are numbers of the same value."""
    mine, right = normalise(answer), normalise(truth)
    if mine == right:
        return mine != ""
    number = _number(answer, mine)
    return number is not None and number == _number(truth, right)


def _number(answer: str, form: str) -> Fraction | None:
    """The value of an answer that is a number, in its one form or, where a unit of words follows, as written."""
    number = whole_number(form)
    return whole_number(answer) if number is None else number


@functools.lru_cache(maxsize=4096)
def same_by_algebra(answer: str, truth: str) -> bool:
    """Whether two answers are equal as `math_verify <https://github.com/huggingface/Math-Verify>`_ sees them. False where
    both are plain numbers (`same_answer` has compared those), where one is too long for computer algebra or cannot be
    read, and where it takes more than 5 seconds."""
    from math_verify import verify
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout

    if max(len(answer), len(truth)) > _LONGEST_ALGEBRA:
        return False
    if _number(answer, normalise(answer)) is not None and _number(truth, normalise(truth)) is not None:
        return False
    seconds = _seconds()
    gold, mine = _parsed(truth), _parsed(answer)
    if not gold or not mine:
        return False
    with Caught() as caught:
        if timeout(seconds)(_differ_in_value)(gold[0], mine[0]):
            return False
    if isinstance(caught.error, TimeoutException):
        return False
    return verify(gold, mine, timeout_seconds=seconds)


def _seconds() -> int | None:
    # math_verify's limits of time are signals, which only the main thread may set; elsewhere the limit is the caller's.
    return _ALGEBRA_SECONDS if threading.current_thread() is threading.main_thread() else None


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Any]:
    """What math_verify reads in an answer: expressions of sympy and texts, none where it cannot read it."""
    from math_verify import parse

    return parse(rf"\boxed{{{text}}}", parsing_timeout=_seconds())


def _differ_in_value(first: Any, second: Any) -> bool:
    """Whether two expressions surely differ: they have other values where their variables are given fixed numbers. It
    spares wrong answers the simplification that would find the same, a hundred times as slow."""
    import sympy

    if not (isinstance(first, sympy.Expr) and isinstance(second, sympy.Expr)):
        return False
    for shift in (0.137, 1.618):
        variables = sorted(first.free_symbols | second.free_symbols, key=str)
        numbers = {variable: shift + 0.731 * i for i, variable in enumerate(variables)}
        one, other = (expression.evalf(15, subs=numbers) for expression in (first, second))
        if not (one.is_Number and other.is_Number and one.is_finite and other.is_finite):
            return False
        if abs(one - other) > 1e-6 * max(1.0, abs(one), abs(other)):
            return True
    return False


@functools.cache
def has_algebra() -> bool:
    """Whether math_verify is installed."""
    return importlib.util.find_spec("math_verify") is not None
