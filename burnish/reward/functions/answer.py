"""Numbers in texts: found, normalised, compared. Shared by the score functions whose answer is a number.

A number may have a sign (also the Unicode minus), a currency sign, commas or LaTeX's ``{,}`` between its thousands,
decimals, and a full stop after it: "1,234", "$1234", "1234.", "1234.00", "−5" are 1234 and -5. All patterns take time
linear in the text.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from burnish.utils.errors import RewardError

_CURRENCY = "$€£¥₹"
# Minus signs and full-width forms that stand for ASCII ones; the dashes of running text are left alone.
_ASCII_FORMS = str.maketrans("−﹣－‐‑０１２３４５６７８９，．＄", "-----0123456789,.$")
_LATEX_FORMS = (("{,}", ","), (r"\,", ""), (r"\!", ""), (r"\$", "$"), (r"\%", "%"))

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
# A minus after a digit, a letter or a bracket is an operator ("7-2"), not a sign.
_SIGN = r"(?:(?<![0-9A-Za-z)\]])-)?"
NUMBER_PATTERN = rf"(?:[{_CURRENCY}]-|{_SIGN}[{_CURRENCY}]?)(?:{_DIGITS}(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
_NUMBER = re.compile(NUMBER_PATTERN)
_BOXED = "\\boxed{"


def to_ascii(text: str) -> str:
    """``text`` with other forms of minus, digits, commas and points, and LaTeX's spellings of them, as ASCII."""
    text = text.translate(_ASCII_FORMS)
    for latex, plain in _LATEX_FORMS:
        text = text.replace(latex, plain)
    return text


def parse_number(text: str) -> Decimal:
    """The value of a text that `NUMBER_PATTERN` matched."""
    digits = "".join(char for char in text if char not in _CURRENCY and char not in ",-")
    value = Decimal(digits)
    return -value if "-" in text else value


def last_number(text: str) -> Decimal | None:
    """The last number of a text, None if it has none."""
    found = _NUMBER.findall(to_ascii(text))
    return parse_number(found[-1]) if found else None


def only_number(text: str) -> Decimal | None:
    """The number of a text that has exactly one, else None (a fraction or a list is no number)."""
    found = _NUMBER.findall(to_ascii(text))
    return parse_number(found[0]) if len(found) == 1 else None


def last_boxed(text: str) -> tuple[int, str] | None:
    r"""Where the last complete ``\boxed{...}`` starts and what is in it (braces are matched), None if there is none."""
    end = len(text)
    while (start := text.rfind(_BOXED, 0, end)) >= 0:
        depth = 1
        for i in range(start + len(_BOXED), end):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return start, text[start + len(_BOXED) : i]
        end = start
    return None


def truth_numbers(ground_truth: Any) -> list[Decimal]:
    """The right answers as numbers: of an int, a float, a text (after "####" where it has that), or a list of those
    (any is right).

    Raises:
        RewardError: it is of another type, or a text without a number.
    """
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, (int, float, str, list)):
        raise RewardError(
            f"The ground truth {ground_truth!r:.80} is {type(ground_truth).__name__}; a number is needed: an int, a "
            f"float, a text with a number, or a list of those (column reward_model.ground_truth)."
        )
    if isinstance(ground_truth, list):
        if not ground_truth:
            raise RewardError("The ground truth is an empty list: no answer would be right.")
        return [number for entry in ground_truth for number in truth_numbers(entry)]
    if isinstance(ground_truth, str):
        number = last_number(ground_truth.rpartition("####")[2])
    else:
        number = Decimal(str(ground_truth))
    if number is None or not number.is_finite():
        raise RewardError(f"The ground truth {ground_truth!r:.80} holds no number (column reward_model.ground_truth).")
    return [number]


def is_any(number: Decimal | None, truths: Sequence[Decimal]) -> bool:
    """Whether ``number`` equals one of ``truths`` exactly (1234 and 1234.00 are equal)."""
    return number is not None and any(number == truth for truth in truths)
