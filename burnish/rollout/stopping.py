"""Stop strings: which token completes one of them, found as tokens come and without decoding a text again."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from burnish.utils.errors import RolloutError


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Where a stop string was completed."""

    index: int
    """Of the completing token among those that were fed last."""
    stop: str
    """The string. Of several that one token completes the one that ends first, then the longest."""


class StopStrings:
    """Watches the text of one response for strings that end it.

    The text is what the tokens stand for in the place where they are, special tokens included: a string may begin or end
    within a token, lie across tokens, or hold characters whose bytes several tokens share. It is compared byte by byte,
    which finds the same as comparing characters, since no character's UTF-8 begins within another's.

    Args:
        tokenizer: the model's.
        stops: the strings, none of them empty.
        min_new_tokens: a string that is completed by one of this many first tokens does not count.

    Raises:
        RolloutError: there is no tokenizer, or it does not tell which bytes a token stands for.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], min_new_tokens: int = 0) -> None:
        if tokenizer is None:
            raise RolloutError(
                f"stop={list(stops)} needs the model's tokenizer, but the rollout engine was made without one. Pass it as "
                f"tokenizer=..., or use stop_token_ids."
            )
        self._token_bytes = token_bytes(tokenizer)
        self._stops = [(text.encode(), text) for text in stops]
        self._num_ignored = min_new_tokens
        self._num_kept = max((len(stop) for stop, _ in self._stops), default=1) - 1
        self._tail = b""

    def feed(self, token_ids: Iterable[int]) -> StopMatch | None:
        """Takes the next tokens of the response; what is fed after a match has no meaning.

        Returns:
            The first token that completes a stop string, or None.
        """
        pieces = [self._token_bytes[token] for token in token_ids]
        ignored = min(self._num_ignored, len(pieces))
        self._num_ignored -= ignored
        text = self._tail + b"".join(pieces)
        # A string that ends before this place was seen earlier, or does not count.
        start = len(self._tail) + sum(map(len, pieces[:ignored]))
        found = []
        for stop, name in self._stops:
            begin = text.find(stop, max(0, start - len(stop) + 1))
            if begin >= 0:
                found.append((begin + len(stop), -len(stop), name))
        if found:
            end, _, name = min(found)
            return StopMatch(self._token_at(pieces, end - len(self._tail)), name)
        self._tail = text[max(0, len(text) - self._num_kept) :]
        return None

    @staticmethod
    def _token_at(pieces: Sequence[bytes], end: int) -> int:
        """The token that brings the text to ``end`` bytes."""
        length = 0
        for index, piece in enumerate(pieces):
            length += len(piece)
            if length >= end:
                return index
        raise AssertionError("a match lies within the text")


class TokenBytes(dict[int, bytes]):
    """Token id -> the bytes it stands for, computed when it is first asked for; nothing for ids without a token."""

    def __init__(self, token_of: Callable[[int], str | None], steps: Sequence[Callable[[str], str | bytes]]) -> None:
        super().__init__()
        self._token_of = token_of
        self._steps = steps

    def __missing__(self, token_id: int) -> bytes:
        value: str | bytes = self._token_of(token_id) or ""
        for step in self._steps:
            if isinstance(value, str):
                value = step(value)
        self[token_id] = result = value.encode() if isinstance(value, str) else value
        return result


@lru_cache(maxsize=8)
def token_bytes(tokenizer: Any) -> TokenBytes:
    """What each token of a tokenizer stands for, behind other tokens (at the start of a text some drop a space).

    Args:
        tokenizer: of transformers, with a `tokenizers.Tokenizer` behind it, or such a one itself. Byte-level tokenizers
            and those of SentencePiece's kind, with or without byte fallback, do.

    Raises:
        RolloutError: any other, where what a token stands for may depend on its neighbours.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    decoder = getattr(backend, "decoder", None)
    name = type(tokenizer).__name__
    if decoder is None:
        raise RolloutError(
            f"Stop strings need a tokenizer that tells which bytes a token stands for, but this {name} has no decoder of "
            f"the tokenizers library. Use stop_token_ids in place of stop."
        )
    parts = _flatten(json.loads(decoder.__getstate__()))
    steps = [step for number, part in enumerate(parts) for step in _steps_of(part, parts[:number], name)]
    return TokenBytes(backend.id_to_token, steps)


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [inner for part in parts for inner in (_flatten(part) if part["type"] == "Sequence" else [part])]


def _steps_of(
    part: dict[str, Any], before: Sequence[dict[str, Any]], tokenizer: str
) -> list[Callable[[str], str | bytes]]:
    """What one part of a decoder does to a token."""
    kind, is_fused = part["type"], any(other["type"] == "Fuse" for other in before)
    if kind == "ByteLevel":
        return [_from_byte_level]
    if kind == "ByteFallback":
        return [_from_byte_fallback]
    if kind == "Fuse" or (kind == "Strip" and is_fused and not part["stop"]):
        return []  # The strip is at the start of a whole text.
    if kind == "Metaspace":
        return [lambda token: token.replace(part["replacement"], " ")]
    if kind == "Replace" and "String" in part["pattern"] and not is_fused:
        return [lambda token: token.replace(part["pattern"]["String"], part["content"])]
    raise RolloutError(
        f"Stop strings need a tokenizer that tells which bytes a token stands for, but the decoder of this {tokenizer} has "
        f"a part {kind!r} that burnish does not know. Use stop_token_ids in place of stop."
    )


def _from_byte_level(token: str) -> str | bytes:
    """Each character names a byte; a token with any other character, as added ones may have, is its own text."""
    values = [_BYTE_OF.get(character) for character in token]
    return token if None in values else bytes(values)  # type: ignore[arg-type]


def _from_byte_fallback(token: str) -> str | bytes:
    is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    try:
        return bytes([int(token[3:5], 16)]) if is_byte else token
    except ValueError:
        return token


def _bytes_by_character() -> dict[str, int]:
    """Byte-level BPE writes printable Latin-1 as itself and the other bytes, in order, as the characters from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _bytes_by_character()
