"""Text that comes in pieces is the text that comes at once, and never has half a character or a stop string in it."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from burnish.rollout.server.detokenize import Detokenizer, StreamedText, decoder, response_text, token_text
from tests.render.fake_tokenizers import byte_tokenizer

BYTE_LEVEL = byte_tokenizer()


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece's: a few words with their space, all else byte by byte."""
    words = ["<unk>", "▁a", "b", "▁"]
    vocab = {token: i for i, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


BYTE_FALLBACK = byte_fallback_tokenizer()


def fallback_ids(text: str) -> list[int]:
    words = {" a": 1, "b": 2, " ": 3}
    ids = []
    while text:
        word = next((word for word in words if text.startswith(word)), None)
        ids += [words[word]] if word else [4 + byte for byte in text[0].encode()]
        text = text[len(word or text[0]) :]
    return ids


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    pieces, place = [], 0
    while place < len(ids):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(ids[place : place + size])
        place += size
    return pieces


texts = st.text(st.sampled_from("ab é€😀\n 日"), max_size=80)
sizes = st.lists(st.integers(1, 7), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(texts, sizes, st.sampled_from(["byte level", "byte fallback"]))
def test_the_pieces_are_the_text_and_hold_only_whole_characters(text, sizes, kind):
    tokenizer = BYTE_LEVEL if kind == "byte level" else BYTE_FALLBACK
    ids = BYTE_LEVEL(text)["input_ids"] if kind == "byte level" else fallback_ids(text)
    decode = decoder(tokenizer)
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.push(part) for part in cut(ids, sizes)] + [detokenizer.flush()]
    assert "".join(pieces) == decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=120), sizes)
def test_bytes_that_are_no_text_are_given_out_too(data, sizes):
    decode = decoder(BYTE_LEVEL)
    ids = [BYTE_LEVEL.convert_tokens_to_ids(token) for token in byte_names(data)]
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.push(part) for part in cut(ids, sizes)] + [detokenizer.flush()]
    assert "".join(pieces) == decode(ids) == data.decode(errors="replace")


def byte_names(data: bytes) -> list[str]:
    from burnish.rollout.stopping import _BYTE_OF

    names = {byte: name for name, byte in _BYTE_OF.items()}
    return [names[byte] for byte in data]


def test_a_whole_character_is_given_out_with_its_last_token():
    detokenizer = Detokenizer(decoder(BYTE_LEVEL))
    given = [detokenizer.push([token]) for token in BYTE_LEVEL("a€b")["input_ids"]]
    assert given == ["a", "", "", "€", "b"]


def test_the_work_for_a_token_does_not_grow_with_the_text():
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return decoder(BYTE_LEVEL)(ids)

    detokenizer = Detokenizer(decode)
    for token in BYTE_LEVEL("é" * 1000)["input_ids"]:
        detokenizer.push([token])
    assert longest < 40
    for _ in range(1000):
        detokenizer.push([BYTE_LEVEL.convert_tokens_to_ids("ÿ")])  # The byte 0xFF, which is in no text.
    assert longest < 300


@settings(max_examples=150, deadline=None)
@given(
    st.text(st.sampled_from("ab€"), max_size=40),
    st.lists(st.text(st.sampled_from("ab€"), min_size=1, max_size=4), max_size=3, unique=True),
    sizes,
)
def test_streamed_text_ends_before_its_stop_string_and_shows_none_of_it_before(text, stops, sizes):
    first = min(((text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text), default=None)
    text_to_stop = text if first is None else text[: first[0]]
    reason = None if first is None else first[2]
    ids = BYTE_LEVEL(text_to_stop)["input_ids"]
    *parts, last = cut(ids, sizes) or [[]]
    decode = decoder(BYTE_LEVEL)
    streamed = StreamedText(decode, stops)
    pieces = [streamed.push(part) for part in parts] + [streamed.finish(last, reason, ended_by_token=False)]
    right = text_to_stop.removesuffix(reason or "")
    assert "".join(pieces) == right
    assert response_text(decode, ids, reason, ended_by_token=False) == right


def test_only_the_stop_string_that_ended_the_response_is_cut():
    """Earlier ones were passed over on purpose (min_tokens)."""
    decode, ids = decoder(BYTE_LEVEL), BYTE_LEVEL("x.y.z.")["input_ids"]
    streamed = StreamedText(decode, ["."])
    given = [streamed.push([token]) for token in ids[:-1]]
    assert "".join(given) == "x.y.z"
    assert streamed.finish(ids[-1:], ".", ended_by_token=False) == ""
    assert response_text(decode, ids, ".", ended_by_token=False) == "x.y.z"


def test_held_back_text_is_given_out_when_it_was_no_stop_string():
    decode = decoder(BYTE_LEVEL)
    streamed = StreamedText(decode, ["END", "NO!"])
    assert [streamed.push(BYTE_LEVEL(part)["input_ids"]) for part in ("a E", "N", "T", "N")] == ["a ", "", "ENT", ""]
    assert streamed.finish(BYTE_LEVEL("O")["input_ids"], None, ended_by_token=False) == "NO"


@pytest.mark.parametrize("token", ["<|im_end|>", "a"])
def test_a_stop_token_is_no_part_of_the_text_special_or_not(token):
    decode = decoder(BYTE_LEVEL)
    ids = [*BYTE_LEVEL("bab")["input_ids"], BYTE_LEVEL.convert_tokens_to_ids(token)]
    assert response_text(decode, ids, ids[-1], ended_by_token=True) == "bab"
    assert StreamedText(decode, []).finish(ids, ids[-1], ended_by_token=True) == "bab"


def test_a_stop_string_of_special_tokens_leaves_the_text_whole():
    decode, ids = decoder(BYTE_LEVEL), BYTE_LEVEL("yes<|im_end|>")["input_ids"]
    assert response_text(decode, ids, "<|im_end|>", ended_by_token=False) == "yes"


def test_the_text_of_a_single_token_shows_special_ones():
    text = token_text(BYTE_LEVEL)
    assert text(BYTE_LEVEL.eos_token_id) == "<|im_end|>"
    assert json.dumps(text(BYTE_LEVEL("€")["input_ids"][0])) == '"\\ufffd"'
