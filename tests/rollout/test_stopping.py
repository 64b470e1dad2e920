"""Stop strings end a response at the token after which its decoded text first holds one of them."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from burnish.rollout.stopping import StopMatch, StopStrings, token_bytes
from burnish.utils.errors import RolloutError
from examples.tiny_model.tokenizer import build_tokenizer
from tests.render.fake_tokenizers import byte_tokenizer

TEXTS = [
    "the answer is 42</answer> and then the question: what is the answer?\n\nQuestion: one two three",
    "naïve café, 漢字かな交じり文, 漢字漢字 🙂🙃🙂 emoji 🙂",
    "aaaa aaab abab </s> </answer> <answer> answer answer\n\n\n",
] * 3


def trained_byte_level() -> Tokenizer:
    """Byte-level BPE whose merges cross words and cut characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_end|>", "two words"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def trained_byte_fallback() -> Tokenizer:
    """As Llama 2's: words with a mark for a space, bytes for what the vocabulary lacks."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.replace("🙂", "").replace("漢", "") for text in TEXTS], trainer)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = trained_byte_level(), trained_byte_fallback()
TOKENIZERS = {"byte_level": BYTE_LEVEL, "byte_fallback": BYTE_FALLBACK, "bytes": byte_tokenizer().backend_tokenizer}
STOPS = [
    "</answer>",
    "\n\n",
    "漢字",
    "🙂",
    "a",
    "wer is",
    "é",
    "aab",
    "two words",
    "<|im_end|>",
    "</s>",
    " ",
    "abab </",
]


def naive(tokenizer: Tokenizer, token_ids: list[int], stops: list[str], min_new_tokens: int = 0) -> int | None:
    """The first token after which the decoded text has a stop string that it did not have before."""
    # Behind another token, as a response is behind its prompt: at the start of a text a space may be dropped.
    before = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
    start = len(tokenizer.decode(before, skip_special_tokens=False))
    counts = None
    for length in range(len(token_ids) + 1):
        text = tokenizer.decode(before + token_ids[:length], skip_special_tokens=False)[start:]
        counts, previous = [count_all(text, stop) for stop in stops], counts
        is_new = previous is not None and any(now > earlier for now, earlier in zip(counts, previous, strict=True))
        if is_new and length > min_new_tokens:
            return length - 1
    return None


def count_all(text: str, stop: str) -> int:
    return sum(text.startswith(stop, place) for place in range(len(text)))


def feed_in_parts(watcher: StopStrings, token_ids: list[int], sizes: list[int]) -> StopMatch | None:
    """The match with its index in the whole response."""
    start = 0
    for size in [*sizes, len(token_ids)]:
        match = watcher.feed(token_ids[start : start + size])
        if match is not None:
            return replace(match, index=match.index + start)
        start += size
        if start >= len(token_ids):
            break
    return None


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_completing_token_is_the_one_that_decoding_everything_again_finds(name: str, data: Any) -> None:
    tokenizer = TOKENIZERS[name]
    pieces = st.sampled_from([*STOPS, *TEXTS, "b", " answer", "</", "ans", "字", "🙃", "x"])
    text = "".join(data.draw(st.lists(pieces, max_size=5)))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    cut = data.draw(st.integers(0, len(ids)))
    if name != "byte_fallback":  # It decodes a run of bytes all or nothing, so one wrong byte hides right characters.
        ids = ids[:cut] + data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=6)) + ids[cut:]
    stops = data.draw(st.lists(st.sampled_from(STOPS), min_size=1, max_size=4, unique=True))
    min_new_tokens = data.draw(st.integers(0, 4))
    sizes = data.draw(st.lists(st.integers(0, 9), max_size=20))
    match = feed_in_parts(StopStrings(tokenizer, stops, min_new_tokens), ids, sizes)
    assert (None if match is None else match.index) == naive(tokenizer, ids, stops, min_new_tokens)
    if match is not None:
        assert match.stop in stops
        assert match == feed_in_parts(StopStrings(tokenizer, stops, min_new_tokens), ids, [])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for text in TEXTS:
        table = token_bytes(tokenizer)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        joined = b"".join(table[token] for token in ids).decode()
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert joined == decoded or joined == f" {decoded}"


def test_a_character_whose_bytes_are_split_over_tokens_is_found_at_its_last_byte() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("x🙂y", add_special_tokens=False)
    assert len(ids) == 6
    assert StopStrings(tokenizer, ["🙂"]).feed(ids) == StopMatch(4, "🙂")
    watcher = StopStrings(tokenizer, ["🙂"])
    assert [watcher.feed([token]) for token in ids[:5]] == [None] * 4 + [StopMatch(0, "🙂")]


def test_a_string_may_begin_and_end_within_tokens() -> None:
    tokens = [BYTE_LEVEL.id_to_token(i) for i in BYTE_LEVEL.encode("the answer is").ids]
    assert len(tokens) < len("the answer is")
    ids = BYTE_LEVEL.encode("the answer is").ids
    for begin in range(5):
        assert StopStrings(BYTE_LEVEL, ["the answer"[begin:]]).feed(ids) is not None


def test_of_strings_that_one_token_completes_the_one_that_ends_first_is_named_then_the_longest() -> None:
    special = BYTE_LEVEL.token_to_id("two words")
    assert StopStrings(BYTE_LEVEL, ["words", "word", "o word"]).feed([special]) == StopMatch(0, "o word")


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    ids = BYTE_LEVEL.encode("</answer>").ids
    assert StopStrings(BYTE_LEVEL, ["</answer>"]).feed([9999, *ids[:-1], 5000, ids[-1]]) == StopMatch(
        len(ids) + 1, "</answer>"
    )


def test_a_tokenizer_of_transformers_is_as_good_as_the_one_behind_it() -> None:
    tokenizer = build_tokenizer(512)
    ids = tokenizer.encode("1+2=3\n\n4")
    match = StopStrings(tokenizer, ["\n\n"]).feed(ids)
    assert match is not None
    assert tokenizer.decode(ids[: match.index + 1]) == "1+2=3\n\n"


def test_what_a_token_stands_for_must_be_known() -> None:
    with pytest.raises(RolloutError, match=r"stop=\['x'\] needs the model's tokenizer"):
        StopStrings(None, ["x"])
    with pytest.raises(RolloutError, match="this object has no decoder.*stop_token_ids"):
        StopStrings(object(), ["x"])
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    with pytest.raises(RolloutError, match="has no decoder"):
        StopStrings(words, ["x"])
    words.decoder = decoders.WordPiece()
    with pytest.raises(RolloutError, match="a part 'WordPiece' that burnish does not know"):
        StopStrings(words, ["x"])
