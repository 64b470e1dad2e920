"""Tokens of dumped responses: their texts by the run's tokenizer file, and the numbers of each from the dump."""

import codecs
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

SCALE = 1000
"""Numbers are whole thousandths in the page: shorter than decimals, and finer than colours show."""
_NUMBERS = ("rollout_log_probs", "old_log_probs", "advantages", "token_level_scores", "values")
_MASKS = ("loss_mask", "response_mask")
# Beyond it nothing is told apart by colour, and the numbers stay short.
_LARGEST = 10**7


class Pieces:
    """Cuts a sequence of token ids into texts, one for each token, that together are the decoded text.

    A character whose bytes lie in several tokens stands at the last of them; the others are empty.

    Args:
        file: a ``tokenizer.json``.
    """

    def __init__(self, file: Path) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        description = json.loads(file.read_text(encoding="utf-8"))
        self._added = {token["id"]: token["content"] for token in description.get("added_tokens", [])}
        kinds = _decoder_kinds(description.get("decoder"))
        self._is_byte_level = "ByteLevel" in kinds
        self._is_sentencepiece = bool(kinds & {"Metaspace", "ByteFallback", "Replace"})
        self._whole: dict[int, str | None] = {}

    def split(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        pieces = [self._whole[i] if i in self._whole else self._look_up(i) for i in ids]
        if None not in pieces:
            return pieces  # type: ignore[return-value]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        last = len(ids) - 1
        return [decoder.decode(self._bytes(i), final=place == last) for place, i in enumerate(ids)]

    def _look_up(self, token_id: int) -> str | None:
        """The token's text; None where its bytes are not whole characters."""
        try:
            text: str | None = self._bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self._whole[token_id] = text
        return text

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return f"⟨{token_id}⟩".encode()
        if self._is_byte_level:
            table = _bytes_of_characters()
            return b"".join(table.get(character, character.encode()) for character in token)
        if self._is_sentencepiece:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            return token.replace("▁", " ").encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


def _decoder_kinds(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    return {decoder.get("type", "")}.union(*(_decoder_kinds(inner) for inner in decoder.get("decoders", [])))


@cache
def _bytes_of_characters() -> dict[str, bytes]:
    """The alphabet in which byte-level tokenizers write bytes: printable ones as they are, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    return table | {chr(0x100 + number): bytes([byte]) for number, byte in enumerate(others)}


def page_tokens(row: Mapping[str, Any], pieces: Pieces | None) -> dict[str, Any]:
    """The tokens of a response as the page has them.

    Args:
        row: of `burnish.trainer.rollout_store.read_tokens`.
        pieces: None: ids instead of texts.

    Returns:
        ``text`` (or ``ids``), lists of `SCALE`-ths by the names of the row's numbers (one number instead of a list where all
        are equal, null where one is not finite), and masks as "0110" (1 where all are set). What the row lacks is left out.
    """
    ids = row["response_ids"].tolist()
    tokens: dict[str, Any] = {"text": pieces.split(ids)} if pieces is not None else {"ids": ids}
    for name in _NUMBERS:
        numbers = row.get(name)
        if numbers is not None and len(numbers) == len(ids) and len(ids):
            tokens[name] = _thousandths(numbers)
    for name in _MASKS:
        mask = row.get(name)
        if mask is not None and len(mask) == len(ids):
            flags = mask.astype(bool)
            tokens[name] = 1 if flags.all() else (flags.view(np.uint8) + ord("0")).tobytes().decode()
    return tokens


def _thousandths(numbers: np.ndarray) -> int | list[int | None]:
    finite = np.isfinite(numbers)
    whole = np.rint(np.clip(np.where(finite, numbers, 0), -_LARGEST / SCALE, _LARGEST / SCALE) * SCALE).astype(np.int64)
    if finite.all():
        return int(whole[0]) if (whole == whole[0]).all() else whole.tolist()
    return [number if is_finite else None for number, is_finite in zip(whole.tolist(), finite.tolist(), strict=True)]
