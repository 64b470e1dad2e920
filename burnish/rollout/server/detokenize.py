"""Tokens to text: all at once, or while they come, without a character cut in two and without a stop string."""

from collections.abc import Callable, Sequence
from functools import cache

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Decoding goes on from the last tokens alone: a window of at most _WINDOW is cut to its last _KEPT.
_WINDOW = 24
_KEPT = 8
_LONGEST_WINDOW = 256
# A character has at most four bytes, but a tokenizer with byte fallback shows every byte of a run as broken until all of
# the run is whole; a run as long as this is no text.
_MAX_BROKEN = 64


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """The text of tokens, without special ones and without any tidying of spaces."""

    def decode(token_ids: Sequence[int]) -> str:
        text = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    return decode


def token_text(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], str]:
    """The text of one token, special or not; the pieces of a character that is cut in two are U+FFFD."""

    @cache  # Bounded by the vocabulary.
    def text(token_id: int) -> str:
        return str(tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return text


class Detokenizer:
    """The text of a growing list of tokens: the pieces that ``push`` and ``flush`` give are the text of all of them.

    (Of a tokenizer with byte fallback a run of bytes that is no UTF-8 may get another number of U+FFFD than when it is
    decoded at once.)
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = 0  # Characters of the window's text that were given out.

    def push(self, token_ids: Sequence[int]) -> str:
        """The characters that are whole now and were not before."""
        self._window += token_ids
        text = self._decode(self._window)
        whole = len(text.rstrip(_REPLACEMENT))
        if len(text) - whole > _MAX_BROKEN:
            whole = len(text) - 3
        piece = text[self._given : whole]
        self._given = max(self._given, whole)
        if len(self._window) > _WINDOW:
            self._shorten(text)
        return piece

    def flush(self) -> str:
        """The rest, whole or not."""
        text = self._decode(self._window)
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def _shorten(self, text: str) -> None:
        window = self._window[-_KEPT:]
        tail = self._decode(window)
        # Not where the cut goes through a character: what follows would read differently. Bytes that are no text, on and
        # on, have no better place.
        clean = tail and text.endswith(tail) and not tail.startswith(_REPLACEMENT)
        if clean or len(self._window) > _LONGEST_WINDOW:
            self._window = window
            self._given = max(0, len(tail) - (len(text) - self._given))


class StreamedText:
    """The text of one response while it comes: held back where it may be the beginning of a stop string.

    Args:
        decode: see `decoder`.
        stops: the stop strings.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stops = stops
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that can be sent."""
        text = self._held + self._detokenizer.push(token_ids)
        held = _length_of_possible_stop(text, self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self, token_ids: Sequence[int], stop_reason: int | str | None, *, ended_by_token: bool) -> str:
        """The last text.

        Args:
            token_ids: the tokens that were not pushed yet.
            stop_reason: the engine's: a stop string ends the text before it.
            ended_by_token: the last token is a stop token, which is no part of the text.
        """
        if ended_by_token:
            token_ids = token_ids[:-1]
        text = self._held + self._detokenizer.push(token_ids[:-1])
        before_last = len(text)
        text += self._detokenizer.push(token_ids[-1:]) + self._detokenizer.flush()
        self._held = ""
        return cut_at_stop(text, stop_reason, before_last)


def response_text(
    decode: Callable[[Sequence[int]], str],
    token_ids: Sequence[int],
    stop_reason: int | str | None,
    *,
    ended_by_token: bool,
) -> str:
    """The text of a finished response, as `StreamedText` gives it in pieces."""
    if ended_by_token:
        token_ids = token_ids[:-1]
    text = decode(token_ids)
    if not isinstance(stop_reason, str):
        return text
    return cut_at_stop(text, stop_reason, len(decode(token_ids[:-1]).rstrip(_REPLACEMENT)))


def cut_at_stop(text: str, stop_reason: int | str | None, before_last: int) -> str:
    """``text`` up to the stop string that its last token completed.

    Earlier ones were allowed (``min_tokens``) and stay. A stop string that is spelt with special tokens is not found,
    since those are not in the text: then all of it comes before.

    Args:
        before_last: characters of ``text`` before its last token.
    """
    if not isinstance(stop_reason, str):
        return text
    place = text.find(stop_reason, max(0, before_last - len(stop_reason) + 1))
    return text if place < 0 else text[:place]


def _length_of_possible_stop(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of ``text`` that some stop string begins with."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
