r"""Scores of multiple choice: the response must name the right letter.

What counts, for the truth C:

================================= ====== ========
response ends with                strict flexible
================================= ====== ========
``\boxed{C}``                     1      1
``\boxed{\text{(C)}}``            1      1
``Answer: C``                     1      1
``The answer is (C) Paris.``      1      1
``**Answer:** **c**``             1      1
``<answer>C</answer>``            1      1
``Answer: A`` and later ``Answer: C`` 1  1
``Answer: C`` and later ``Answer: A`` 0  0
``Answer: B or C``                0      0
``Answer: C is wrong, so A``      0      0
``Answer: Certainly``             0      0
``C``                             0      1
``(C).``                          0      1
``so it must be C``               0      0
================================= ====== ========

flexible, the default, also takes a last line that is nothing but the letter.
"""

import re
from typing import Any, Literal

from burnish.reward.functions.answer import last_boxed, last_stated, last_tag
from burnish.reward.functions.reference import unusable_truth, with_reference
from burnish.utils.errors import RewardError

Method = Literal["strict", "flexible"]

_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{|[{}*`$\[\]\"“”]|\\[()]")
_BEFORE = re.compile(r"(?:the )?(?:option|choice|letter)\s+(?=\(?[A-Z](?![A-Za-z0-9']))", re.IGNORECASE)
_LETTER = re.compile(r"\(?([A-Z])(?:\)|(?![A-Za-z0-9'])|\Z)", re.IGNORECASE)
_ANOTHER = re.compile(r"\s*(?:or|and|,|;|/|&)\s*\(?[A-Z]\)?(?![A-Za-z0-9])", re.IGNORECASE)
_DENIED = re.compile(r"\s*(?:is|was)(?:n't|\s+(?:wrong|incorrect|not|false|ruled)\b)", re.IGNORECASE)
_LETTER_ALONE = re.compile(r"\(?([A-Z])\)?\.?", re.IGNORECASE)


def extract_choice(solution_str: str, method: Method = "flexible") -> str:
    """The letter that a response gives as its answer, "" if it gives none, or several."""
    places = (last_boxed(solution_str), last_stated(solution_str), last_tag(solution_str))
    found = max((place for place in places if place), key=lambda place: place[0], default=None)
    if found is not None:
        return _leading_letter(found[1])
    lines = solution_str.strip().rsplit("\n", 1)
    alone = _LETTER_ALONE.fullmatch(_MARKUP.sub("", lines[-1]).strip()) if method == "flexible" else None
    return alone.group(1).upper() if alone else ""


def _leading_letter(text: str) -> str:
    text = _BEFORE.sub("", _MARKUP.sub("", text).strip(), count=1)
    found = _LETTER.match(text)
    if found is None or _ANOTHER.match(text, found.end()) or _DENIED.match(text, found.end()):
        return ""
    # "a dog" begins with an article; as a letter it stands alone or in front of a sign.
    if found.group() == "a" and len(text) > 1:
        return ""
    # "I think", "I don't know"; a ninth choice is followed by a sign or by nothing.
    if found.group() == "I" and re.match(r"\s+[a-z]", text[1:]):
        return ""
    return found.group(1).upper()


def truth_letters(ground_truth: Any) -> list[str]:
    """The right letters: of a letter ("C", "(C)"), or a list of those (any is right).

    Raises:
        RewardError: it is anything else.
    """
    if isinstance(ground_truth, list) and ground_truth:
        return [letter for entry in ground_truth for letter in truth_letters(entry)]
    alone = _LETTER_ALONE.fullmatch(ground_truth.strip()) if isinstance(ground_truth, str) else None
    if alone is None:
        raise unusable_truth(ground_truth, "is no letter of a choice", "'C', '(C)' or a list of those")
    return [alone.group(1).upper()]


def reference_solution(ground_truth: Any, extra_info: dict[str, Any] | None = None) -> str:
    """The letter after "Answer:"."""
    return f"Answer: {truth_letters(ground_truth)[0]}"


@with_reference(reference_solution)
def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    data_source: str = "",
    method: Method = "flexible",
) -> dict[str, Any]:
    """``score`` 1.0 for the right letter, else 0.0; ``acc``, the same as a bool; ``pred``, the letter found, or "".

    Raises:
        RewardError: a ground truth that is no letter, or an unknown ``method``.
    """
    if method not in ("strict", "flexible"):
        raise RewardError(f"The method {method!r} of choice must be 'strict' or 'flexible'.")
    truths = truth_letters(ground_truth)
    pred = extract_choice(solution_str, method)
    acc = pred in truths
    return {"score": float(acc), "acc": acc, "pred": pred}
