r"""What a response gives as its answer, and the numbers in it. Shared by all score functions.

A number may have a sign (also the Unicode minus), a currency sign, commas or LaTeX's ``{,}`` between its thousands,
decimals, an exponent (``1e3``, ``2 \times 10^{3}``), a denominator (``1/2``, ``\frac{1}{2}``, ``1 1/2``), and a full
stop after it. What follows it, a percent sign too, is a unit and has no say: "50%" is 50. What is written with more than
a thousand characters, or with an exponent beyond 400, is no number.

The whole text is searched. All patterns take time linear in the text.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from burnish.reward.functions.reference import unusable_truth

_CURRENCY = "$€£¥₹"
# Minus signs and full-width forms that stand for ASCII ones, narrow spaces; the dashes of running text are left alone.
_ASCII_FORMS = str.maketrans("−﹣－‐‑０１２３４５６７８９，．＄％／×\u00a0\u2009\u202f", "-----0123456789,.$%/*   ")
_LATEX_FORMS = (("{,}", ","), (r"\,", ""), (r"\!", ""), (r"\$", "$"), (r"\%", "%"))
_LONGEST_NUMBER = 1000
_NEEDED = "a number (an int, a float, a text with a number), or a list of those,"
_LARGEST_EXPONENT = 400

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]++)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]++)?|(?<![0-9])\.[0-9]++)"
# A minus after a digit, a letter or a bracket is an operator ("7-2"), not a sign.
_SIGN = rf"(?:[{_CURRENCY}]-|(?:(?<![0-9A-Za-z)\]])-)?[{_CURRENCY}]?)"
_FRACTION = (
    rf"(?:(?P<whole>[0-9]++)[ ]?)?\\[dt]?frac(?:\{{(?P<over>-?{_DECIMAL})\}}\{{(?P<under>{_DECIMAL})\}}"
    rf"|(?P<digit_over>[0-9])(?P<digit_under>[0-9]))"
)
_MIXED = r"(?P<mixed>[0-9]++)[ ](?P<part>[0-9]++)/(?P<parts>[0-9]++)(?![0-9/.,])"
_POWER = r"[eE](?P<exponent>[+-]?[0-9]++)(?![A-Za-z])|[ ]?(?:\\times|\\cdot|\*)[ ]?10\^\{?(?P<power>-?[0-9]++)\}?"
_PLAIN = rf"(?P<plain>{_DECIMAL})(?:{_POWER})?(?P<under_all>(?:[ ]?/[ ]?{_DECIMAL})*)"
_NUMBER = re.compile(rf"(?P<sign>{_SIGN})(?:{_FRACTION}|{_MIXED}|{_PLAIN})")

# Thousands with spaces between them: only where a number is expected, in running text these are several numbers.
_SPACED_THOUSANDS = re.compile(rf"{_SIGN}[0-9]{{1,3}}(?: [0-9]{{3}})+(?![0-9])")
_OPENING = re.compile(r"[ \t]*(?:\*\*|[*_`]|\\\(|\$?\\boxed\{)?[ \t]*")
# What makes a number the beginning of something longer: an operator or another number behind it.
_GOES_ON = re.compile(
    r"%?[ \t]*(?:(?:[-+*^/:,;|&–—]|\\times|\\cdot|\\div|x(?![a-z])"
    r"|(?:[A-Za-z]+[ \t]+)?(?<![A-Za-z])(?:or|and)(?![a-z])|to(?![a-z]))"
    rf"[ \t]*[-{_CURRENCY}]?(?:[.0-9({{]|\\[dt]?frac|\\sqrt)|[.0-9]*[0-9]|(?<![ \t])\([-0-9]|\\[dt]?frac|\\sqrt)"
)
# Words behind a number that make another one of it: what they follow is not the value.
_NO_UNIT = (
    "and|hundred|thousand|million|billion|trillion|dozen|half|halves|thirds?|quarters?|squared|cubed|factorial|choose|mod|"
    "plus|minus|times|over|divided|root|sqrt"
)
_UNIT = re.compile(
    rf"%?(?:[ ]+(?:(?:[kcm]m|mi|ft|in|kg|lb|oz|hr|[md]?l|m|g|s|h)\b|(?!(?:{_NO_UNIT})\b)[a-z]{{3,}})(?:\^\{{?[0-9]\}}?)?)*",
    re.IGNORECASE,
)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]*")
_BRACE_OR_ESCAPE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_CONTENT = re.compile(r"[^\s$]+")
_STATED = re.compile(r"\banswer\b[ \t*]*(?:is\b|:|=)[\s*:]*(?:(?:\\\[|\$\$)[ \t]*\n\s*)?([^\n]*)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.。](?:\s|$)")
# A reason in brackets behind an answer: "34 (since 17 * 2 = 34)". Blanks without one are looked through once.
_REASON = re.compile(
    r"(?<![ \t])[ \t]+\((?:since|because|as|so|from|by|using|where|which|i\.e\.)(?![A-Za-z]).*", re.IGNORECASE
)
# A digit, mathematics or a lone letter: what an answer has that is no remark.
_SAYS_SOMETHING = re.compile(r"[0-9$\\=]|^\W*\w\W*$")


def to_ascii(text: str) -> str:
    """``text`` with other forms of minus, digits, commas and points, and LaTeX's spellings of them, as ASCII."""
    text = text.translate(_ASCII_FORMS)
    for latex, plain in _LATEX_FORMS:
        text = text.replace(latex, plain)
    return text


def last_number(text: str) -> Fraction | None:
    """The last number of a text, None if it has none."""
    found = None
    for found in _NUMBER.finditer(to_ascii(text)):  # noqa: B007  the last one is wanted
        pass
    return _value(found) if found else None


def only_number(text: str) -> Fraction | None:
    """The number of a text that has exactly one, else None (a list, a root or a power is no number)."""
    text = to_ascii(text)
    found = list(_NUMBER.finditer(text))
    if len(found) != 1:
        return None
    around = (text[: found[0].start()] + " " + text[found[0].end() :]).replace(r"^\circ", "").replace(r"^{\circ}", "")
    return None if re.search(r"\\sqrt|\\frac|\\pi|[\^_]", around) else _value(found[0])


def leading_number(text: str) -> Fraction | None:
    """The number that a text begins with (markup may stand before it, words and units after it), None if it begins
    otherwise or goes on as a longer expression or a choice: "1/2/3", "5 + 3", "12 or 13", "1,2"."""
    text = to_ascii(text)
    text = text[_after_markup(text) :]
    if spaced := _SPACED_THOUSANDS.match(text):
        text = spaced.group().replace(" ", "") + text[spaced.end() :]
    found = _NUMBER.match(text)
    if found is None or _GOES_ON.match(text, found.end()):
        return None
    return _value(found)


def whole_number(text: str) -> Fraction | None:
    """The number that a text is, but for a unit of words behind it; None if it is anything else, as "2x" or "3 pm"."""
    text = to_ascii(text).strip().rstrip(".")
    if spaced := _SPACED_THOUSANDS.match(text):
        text = spaced.group().replace(" ", "") + text[spaced.end() :]
    found = _NUMBER.match(text)
    if found is None or not _UNIT.fullmatch(text, found.end()):
        return None
    return _value(found)


def begins_with_number(text: str) -> bool:
    """Whether a text begins with a number, markup aside, whatever follows it."""
    text = to_ascii(text)
    return _NUMBER.match(text, _after_markup(text)) is not None


def _after_markup(text: str) -> int:
    opening = _OPENING.match(text)
    return opening.end() if opening else 0


def _value(found: re.Match[str]) -> Fraction | None:
    """The value of a match of `_NUMBER`; None where that is too long, or divides by zero."""
    if found.end() - found.start() > _LONGEST_NUMBER:
        return None
    sign = -1 if "-" in found["sign"] else 1
    try:
        if found["plain"] is not None:
            exponent = int(found["exponent"] or found["power"] or 0)
            if abs(exponent) > _LARGEST_EXPONENT:
                return None
            under = [entry for entry in found["under_all"].replace(" ", "").split("/") if entry]
            if len(under) > 1:
                # A date or a path: no fraction, and its last number is a number of its own.
                return _decimal(under[-1])
            value = _decimal(found["plain"]) * Fraction(10) ** exponent
            return sign * (value / _decimal(under[0]) if under else value)
        if found["mixed"] is not None:
            return sign * (int(found["mixed"]) + Fraction(int(found["part"]), int(found["parts"])))
        over, under_one = found["over"] or found["digit_over"], found["under"] or found["digit_under"]
        return sign * (int(found["whole"] or 0) + _decimal(over) / _decimal(under_one))
    except ZeroDivisionError:
        return None


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


def number_text(number: Fraction) -> str:
    """A number as text: an integer or a decimal where it is one, else ``a/b``."""
    if number.denominator == 1:
        return str(number.numerator)
    rest, num_decimals = number.denominator, 0
    for factor in (2, 5):
        count = 0
        while rest % factor == 0:
            rest, count = rest // factor, count + 1
        num_decimals = max(num_decimals, count)
    if rest != 1:
        return f"{number.numerator}/{number.denominator}"
    digits = str(abs(number.numerator) * 10**num_decimals // number.denominator).rjust(num_decimals + 1, "0")
    return f"{'-' if number < 0 else ''}{digits[:-num_decimals]}.{digits[-num_decimals:]}"


def last_boxed(text: str) -> tuple[int, str] | None:
    r"""Where the last complete ``\boxed{...}`` or ``\fbox{...}`` starts and what is in it (braces are matched, ``\{``
    is none), or the word after a ``\boxed`` without braces; None if there is none."""
    end = len(text)
    for found in reversed(list(_BOX.finditer(text))):
        start, inside = found.span()
        content = _braced(text, inside, end) if text[inside : inside + 1] == "{" else _bare(text, inside, end)
        if content is not None:
            return start, content
        end = start
    return None


def _braced(text: str, start: int, end: int) -> str | None:
    depth = 0
    for token in _BRACE_OR_ESCAPE.finditer(text, start, end):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0 and token.group() == "}":
            return text[start + 1 : token.start()]
    return None


def _bare(text: str, start: int, end: int) -> str | None:
    found = _BARE_CONTENT.match(text, start, end)
    return found.group().rstrip(".,;") if found else None


def last_tag(text: str, tag: str = "answer") -> tuple[int, str] | None:
    """Where the last complete ``<tag>...</tag>`` starts and what is in it, None if there is none."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return None if start < 0 else (start, text[start + len(tag) + 2 : end])


def last_stated(text: str) -> tuple[int, str] | None:
    """Where the last "Answer: ..." or "answer is ..." starts and what it says, to the end of its line or sentence (of the
    next line that has one, where its own ends there) and without a reason in brackets; None if there is none."""
    found = None
    for found in _STATED.finditer(text):  # noqa: B007  the last one is wanted
        pass
    if found is None:
        return None
    said = _REASON.split(_SENTENCE_END.split(found.group(1), maxsplit=1)[0], maxsplit=1)[0]
    return found.start(), said.strip().strip("*`").strip()


def last_answer(text: str) -> str | None:
    """What the last box or the last "Answer: ..." says, whichever comes later; a box within a statement is its answer, and
    words alone behind a box ("my answer is final") are none. None if the text has neither."""
    boxed, stated = last_boxed(text), last_stated(text)
    if boxed and stated and not _SAYS_SOMETHING.search(stated[1]):
        stated = None
    later = max((found for found in (boxed, stated) if found), key=lambda found: found[0], default=None)
    if later is None:
        return None
    return later[1]


def truth_numbers(ground_truth: Any) -> list[Fraction]:
    """The right answers as numbers: of an int, a float, a text with one number (after "####" where it has that), or a
    list of those (any is right).

    Raises:
        RewardError: it is of another type, or a text without a number, or with several.
    """
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, (int, float, str, list)):
        raise unusable_truth(ground_truth, f"is {type(ground_truth).__name__}", _NEEDED)
    if isinstance(ground_truth, list):
        if not ground_truth:
            raise unusable_truth(ground_truth, "is an empty list: no answer would be right", _NEEDED)
        return [number for entry in ground_truth for number in truth_numbers(entry)]
    if isinstance(ground_truth, str):
        text = ground_truth.rpartition("####")[2].strip()
        spaced = _SPACED_THOUSANDS.fullmatch(to_ascii(text))
        number = leading_number(text) if spaced else only_number(text)
        if number is None and len(found := _NUMBER.findall(to_ascii(text))) > 1:
            raise unusable_truth(ground_truth, f"holds {len(found)} numbers", "one, or a list of the right ones,")
    else:
        exact = Decimal(str(ground_truth))
        number = Fraction(exact) if exact.is_finite() else None
    if number is None:
        raise unusable_truth(ground_truth, "holds no number", _NEEDED)
    return [number]


def is_any(number: Fraction | None, truths: Sequence[Fraction]) -> bool:
    """Whether ``number`` equals one of ``truths`` exactly (1234 and 1234.00 are equal)."""
    return number is not None and any(number == truth for truth in truths)
