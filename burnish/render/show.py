"""A token sequence for people to read, with the learnt part marked."""

from collections.abc import Sequence
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from burnish.render.spans import Span

BEGIN, END = "«", "»"
_LEFT_OUT = " [...] "


def marked_text(
    ids: Sequence[int], spans: Sequence[Span], tokenizer: PreTrainedTokenizerBase, *, max_part: int = 400
) -> str:
    """The text on one line, what is learnt between « and », line ends as "\\n".

    Args:
        spans: [begin, end) of the learnt ids, ascending and disjoint.
        max_part: characters of each part; of a longer one the middle is left out.
    """
    bounds = [0, *(bound for span in spans for bound in span), len(ids)]
    parts = []
    for number, (begin, end) in enumerate(pairwise(bounds)):
        text = str(
            tokenizer.decode(list(ids[begin:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
        shown = _shortened(text, max_part).replace("\n", "\\n")
        parts.append(f"{BEGIN}{shown}{END}" if number % 2 else shown)
    return "".join(parts)


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = (limit - len(_LEFT_OUT)) // 2
    return text[:half] + _LEFT_OUT + text[-half:]
