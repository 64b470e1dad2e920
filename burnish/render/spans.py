"""Places in a text to places among its tokens, proven by comparing ids and never read off a tokenizer's offsets.

Offsets are not to be relied on: tokenizers trim white space from them, count bytes of one character alike, or normalise the text
first.
"""

import bisect
import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from burnish.utils.errors import DataError

Span = tuple[int, int]

# Characters; the ends of prompts are the same in all rows, and longer texts are answers.
_LONGEST_KEPT = 200
# Texts: where no special token stands before an answer, what precedes it is another one in every row.
_MOST_KEPT = 10_000


class SpanEncoder:
    """Tokenizes rendered texts, and tells which ids are the texts of given places."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special_ids = {text: number for text, number in special.items() if text}
        self._known = frozenset(self._special_ids.values())
        self._special: re.Pattern[str] | None = None
        if self._special_ids:
            by_length = sorted(self._special_ids, key=len, reverse=True)
            begins = "".join(sorted({text[0] for text in by_length}))
            self._special = re.compile(f"(?=[{re.escape(begins)}])(?:{'|'.join(map(re.escape, by_length))})")
        self._tails: dict[str, list[int]] = {}

    def encode(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[Span], bool]:
        """The ids of a rendered text, and which of them are the texts of ``spans``.

        The ids are those of the whole text, as long as what stands before each bound has the ids that it has by itself. Where it
        has not (a token lies across the bound, or white space is cut otherwise), the text behind the bound is tokenized by
        itself: a model that was given what stands before it has to go on from there.

        Args:
            spans: ascending and disjoint, [begin, end) in characters; the first does not begin at 0.

        Returns:
            ids; spans of ids, in the order of ``spans``; whether the ids are others than those of the whole text.

        Raises:
            DataError: a part of the text, tokenized by itself, is another text.
        """
        bounds = [bound for span in spans for bound in span]
        (whole,) = _encode([text], self._tokenizer)
        places = self._places(text, whole, bounds)
        if places is None:
            before = _encode([text[:bound] for bound in bounds], self._tokenizer)
            if all(whole[: len(part)] == part for part in before):
                places = [len(part) for part in before]
        if places is not None:
            return whole, _pairs(places), False
        return _piece_by_piece(text, bounds, self._tokenizer)

    def _places(self, text: str, ids: list[int], bounds: Sequence[int]) -> list[int] | None:
        """How many ids stand before each bound; None where that cannot be told from the special tokens.

        The text is cut at its special tokens before anything else, so what stands between the last one and a bound is
        tokenized alike whatever stands before it, and is mostly the same in all rows.
        """
        if self._special is None:
            return None
        texts = [(match.start(), match.group()) for match in self._special.finditer(text)]
        tokens = [(place, token) for place, token in enumerate(ids) if token in self._known]
        if [self._special_ids[name] for _, name in texts] != [token for _, token in tokens]:
            return None
        starts = [start for start, _ in texts]
        places = []
        for bound in bounds:
            number = bisect.bisect_left(starts, bound) - 1
            if number < 0:
                return None
            tail = self._tail(text[starts[number] : bound])
            place = tokens[number][0]
            if ids[place : place + len(tail)] != tail:
                return None
            places.append(place + len(tail))
        return places

    def _tail(self, text: str) -> list[int]:
        if text not in self._tails:
            (ids,) = _encode([text], self._tokenizer)
            if len(text) > _LONGEST_KEPT or len(self._tails) >= _MOST_KEPT:
                return ids
            self._tails[text] = ids
        return self._tails[text]


def continue_ids(ids: list[int], text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of ``text`` as what follows ``ids``, which end where a model was asked to go on.

    Raises:
        DataError: no ids of the text by itself decode to it there.
    """
    (direct,) = _encode([text], tokenizer)
    expected = _decode(ids, tokenizer) + text
    if _decode([*ids, *direct], tokenizer) == expected:
        return direct
    # Tokenizers that put a space before a text may not put it behind a special token, or at least not within a text.
    for anchor in filter(None, (tokenizer.eos_token, "\n")):
        before, anchored = _encode([anchor, anchor + text], tokenizer)
        behind = anchored[len(before) :]
        if anchored[: len(before)] == before and _decode([*ids, *behind], tokenizer) == expected:
            return behind
    raise DataError(
        f"The text {text[:60]!r} cannot be tokenized as what follows its prompt: by itself it decodes to another text, and in "
        f"the conversation a token lies across its beginning. Let the chat template end the prompt with a special token, or "
        f"leave the row out."
    )


def _piece_by_piece(
    text: str, bounds: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[Span], bool]:
    (ids,) = _encode([text[: bounds[0]]], tokenizer)
    places = [len(ids)]
    for begin, end in zip(bounds, [*bounds[1:], len(text)], strict=True):
        if end > begin:
            ids = [*ids, *continue_ids(ids, text[begin:end], tokenizer)]
        places.append(len(ids))
    return ids, _pairs(places[:-1]), True


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """As `apply_chat_template` does: the template alone writes special tokens."""
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return [list(ids) for ids in encoded]  # type: ignore[arg-type]  # its declared type is of other flags


def _decode(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _pairs(places: Sequence[int]) -> list[Span]:
    return [(places[at], places[at + 1]) for at in range(0, len(places), 2)]
