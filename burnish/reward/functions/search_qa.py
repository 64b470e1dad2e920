"""Scores of short answers to questions, as in question answering with search: exact match and F1.

What counts, for the truths "Barack Obama" and "Obama":

=================================================== == ==== ======
the last ``<answer>`` says                          em f1   sub_em
=================================================== == ==== ======
``Barack Obama``                                    1  1    1
``barack  obama.``                                  1  1    1
``the Obama``                                       1  1    1
``Barack H. Obama``                                 0  0.8  1
``It was Obama``                                    0  0.5  1
``Joe Biden``                                       0  0    0
=================================================== == ==== ======

Texts are compared as SQuAD does (Rajpurkar et al., arXiv:1606.05250): lower case, without punctuation, without a, an and
the, one space between words. F1 counts the words that both have; the best of the truths counts. sub_em is 1 where a truth
stands in the answer, word for word. A response without ``<answer>`` gets 0 for each.
"""

import re
import string
from collections import Counter
from typing import Any, Literal

from burnish.reward.functions.answer import last_tag
from burnish.reward.functions.reference import unusable_truth, with_reference
from burnish.utils.errors import RewardError

Metric = Literal["em", "f1", "sub_em"]

_NEEDED = "a text, a list of texts or {'target': [...]}"
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """SQuAD's form of a text."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(answer: str, truth: str) -> float:
    """2 p r / (p + r) of the words of two texts, p the share of the answer's and r the share of the truth's that the
    other has; 0 where one has none."""
    mine, right = normalise(answer).split(), normalise(truth).split()
    num_shared = sum((Counter(mine) & Counter(right)).values())
    return 2 * num_shared / (len(mine) + len(right)) if num_shared else 0.0


def truth_texts(ground_truth: Any) -> list[str]:
    """The right answers: of a text, a list of texts, or ``{"target": ...}`` of either (Search-R1's form).

    Raises:
        RewardError: it is anything else, or a text of which nothing is left when normalised.
    """
    target = ground_truth.get("target") if isinstance(ground_truth, dict) else ground_truth
    texts = []
    for text in target if isinstance(target, list) else [target]:
        if isinstance(text, (int, float)) and not isinstance(text, bool):
            texts.append(str(text))
        elif isinstance(text, str):
            texts.append(text)
        else:
            raise unusable_truth(ground_truth, "holds no answer", _NEEDED)
    if not any(normalise(text) for text in texts):
        raise unusable_truth(ground_truth, "holds no answer", _NEEDED)
    return texts


def reference_solution(ground_truth: Any, extra_info: dict[str, Any] | None = None) -> str:
    """The first of the right answers in ``<answer>`` tags."""
    return f"<answer>{next(text for text in truth_texts(ground_truth) if normalise(text))}</answer>"


@with_reference(reference_solution)
def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    data_source: str = "",
    metric: Metric = "em",
    format_score: float = 0.0,
) -> dict[str, Any]:
    """The ``metric`` of the last ``<answer>``.

    Args:
        format_score: what an answer with a metric of 0 gets.

    Returns:
        ``score``; ``em`` and ``f1`` of the answer, to be logged; ``pred``, the answer found, "" if there is none.

    Raises:
        RewardError: a ground truth without an answer, or an unknown ``metric``.
    """
    if metric not in ("em", "f1", "sub_em"):
        raise RewardError(f"The metric {metric!r} of search_qa must be 'em', 'f1' or 'sub_em'.")
    truths = [text for text in truth_texts(ground_truth) if normalise(text)]
    found = last_tag(solution_str)
    if found is None:
        return {"score": 0.0, "em": 0.0, "f1": 0.0, "pred": ""}
    pred = normalise(found[1])
    values = {
        "em": float(any(pred == normalise(truth) for truth in truths)),
        "f1": max(f1(found[1], truth) for truth in truths),
        "sub_em": float(any(f" {normalise(truth)} " in f" {pred} " for truth in truths)),
    }
    score = values[metric] or format_score
    return {"score": score, "em": values["em"], "f1": values["f1"], "pred": found[1].strip()}
