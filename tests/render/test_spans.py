"""Places in a text to places among its tokens, with tokenizers whose tokens lie across them."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from burnish.render import ConversationRenderer, render
from burnish.render.spans import SpanEncoder, continue_ids
from burnish.utils.errors import DataError
from tests.render.fake_tokenizers import CHATML, byte_tokenizer


def wrapped(tokenizer, template=None):
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    made.chat_template = template
    return made


def merging(*merges, template=None):
    """Bytes, and tokens made of two characters: a token for each of ``merges``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [tuple(merge.replace("\n", "Ċ").replace(" ", "Ġ")) for merge in merges]
    vocab = {text: number for number, text in enumerate([*alphabet, *map("".join, pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrapped(tokenizer, template)


def spaced(scheme):
    """A tokenizer that puts a space before a text, and takes the first one away when it decodes."""
    vocab = {char: number for number, char in enumerate("▁abc:")}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return wrapped(tokenizer)


def texts_of(tokenizer, text, spans):
    ids, places, changed = SpanEncoder(tokenizer).encode(text, spans)
    return ids, [tokenizer.decode(ids[begin:end]) for begin, end in places], changed


def test_the_ids_are_those_of_the_whole_text_where_no_token_lies_across_a_bound():
    tokenizer = merging("ab", "cd")
    text = "<|im_start|>ab<|im_end|>cdab<|im_end|>x"
    spans = [(12, 24), (26, 38)]
    ids, texts, changed = texts_of(tokenizer, text, spans)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert texts == ["ab<|im_end|>", "ab<|im_end|>"]
    assert not changed


def test_what_is_kept_of_the_rows_has_a_bound(monkeypatch):
    monkeypatch.setattr("burnish.render.spans._MOST_KEPT", 2)
    tokenizer = merging("ab")
    encoder = SpanEncoder(tokenizer)
    for number in range(5):
        ids, places, _ = encoder.encode(f"<|im_start|>q{number}: ab", [(16, 18)])
        assert tokenizer.decode(ids[places[0][0] :]) == "ab"
    assert len(encoder._tails) == 2


def test_a_text_without_special_tokens_is_cut_by_comparing_prefixes():
    tokenizer = merging("ab")
    ids, texts, changed = texts_of(tokenizer, "abcab", [(2, 3), (3, 5)])
    assert ids == tokenizer("abcab")["input_ids"]
    assert texts == ["c", "ab"]
    assert not changed


def test_a_token_across_a_bound_is_made_two_as_generation_would_give_them():
    tokenizer = merging("\n\n", template=CHATML)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "\ny"}]
    (made,) = ConversationRenderer(tokenizer).sequences(messages)
    begin, end = made.spans[0]
    assert made.cut_tokens
    assert made.ids[:begin] == render(messages[:1], tokenizer)
    assert tokenizer.decode(made.ids[begin:end]) == "\ny<|im_end|>"
    assert made.ids != render(messages, tokenizer, add_generation_prompt=False)
    assert tokenizer.decode(made.ids) == tokenizer.decode(render(messages, tokenizer, add_generation_prompt=False))


def test_text_that_looks_like_a_special_token_in_an_answer_does_no_harm():
    tokenizer = byte_tokenizer()
    messages = [
        {"role": "user", "content": "<|im_start|>"},
        {"role": "assistant", "content": "a<|im_end|>b<|im_end|>"},
    ]
    (made,) = ConversationRenderer(tokenizer).sequences(messages)
    begin, end = made.spans[0]
    assert tokenizer.decode(made.ids[begin:end]) == "a<|im_end|>b<|im_end|>"
    assert made.ids == render(messages, tokenizer, add_generation_prompt=False)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_tokenizer_that_puts_a_space_before_texts_puts_none_behind_a_prompt(scheme):
    tokenizer = spaced(scheme)
    ids = tokenizer("a:")["input_ids"]
    assert tokenizer.decode([*ids, *continue_ids(ids, "bc", tokenizer)]) == "a:bc"


def test_a_text_that_cannot_be_continued_is_an_error():
    with pytest.raises(DataError, match="cannot be tokenized as what follows its prompt"):
        continue_ids([1], "q", spaced("always"))
