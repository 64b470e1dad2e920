import pytest

from burnish.render import looks_templated, normalize_messages, render, render_text
from burnish.utils.errors import ConfigError, DataError, ModelError
from tests.render.fake_tokenizers import CHATML, byte_tokenizer

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}]


def decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_messages_render_to_the_ids_of_the_templates_text():
    tokenizer = byte_tokenizer()
    ids = render(MESSAGES, tokenizer)
    assert all(type(token) is int for token in ids)
    assert decode(tokenizer, ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render_text(MESSAGES, tokenizer) == decode(tokenizer, ids)


def test_a_string_is_one_user_message_where_there_is_a_template():
    tokenizer = byte_tokenizer()
    assert render("1+1=", tokenizer) == render([{"role": "user", "content": "1+1="}], tokenizer)


def test_a_string_is_tokenized_as_it_is_where_there_is_no_template():
    tokenizer = byte_tokenizer(None)
    assert decode(tokenizer, render("1+1=", tokenizer)) == "1+1="


def test_a_raw_string_keeps_the_begin_token_and_loses_the_end_token_that_the_tokenizer_adds():
    tokenizer = byte_tokenizer(None, begin=True, end=True)
    assert decode(tokenizer, render("hi", tokenizer)).replace(" ", "") == "<s>hi"


def test_the_template_alone_decides_about_special_tokens():
    tokenizer = byte_tokenizer(begin=True, end=True)
    assert render("hi", tokenizer) == render("hi", byte_tokenizer())


def test_messages_without_a_template_are_refused():
    with pytest.raises(ModelError, match="no chat template.*custom_chat_template"):
        render(MESSAGES, byte_tokenizer(None))


def test_template_kwargs_reach_the_template_and_may_not_take_what_burnish_sets():
    tokenizer = byte_tokenizer("{% if thinking %}T{% endif %}{{ messages[0].content }}")
    assert decode(tokenizer, render("x", tokenizer, chat_template_kwargs={"thinking": True})) == "Tx"
    with pytest.raises(ConfigError, match="apply_chat_template_kwargs may not hold tokenize"):
        render("x", tokenizer, chat_template_kwargs={"tokenize": False})


def test_a_conversation_that_the_template_refuses_is_a_data_error():
    tokenizer = byte_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="roles must alternate"):
        render(MESSAGES, tokenizer)


def test_the_generation_prompt_is_optional():
    tokenizer = byte_tokenizer()
    assert render(MESSAGES, tokenizer)[: len(render(MESSAGES, tokenizer, add_generation_prompt=False))] == render(
        MESSAGES, tokenizer, add_generation_prompt=False
    )


@pytest.mark.parametrize("text", ["", "   ", "🙂 日本語 שלום \u200b", "x" * 100_000])
def test_any_text_renders(text):
    tokenizer = byte_tokenizer()
    assert decode(tokenizer, render(text, tokenizer)) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(DataError, match="has no tokens"):
        render("", byte_tokenizer(None))


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([], "list of messages is empty"),
        (7, "a string or a list of messages, not int"),
        (["hi"], "Message 0 is str"),
        ([{"content": "hi"}], "Message 0 has no 'role'"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], r"Message 1 \(user\) has nothing \(null\) as 'content'"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content part of type 'image'"),
    ],
)
def test_malformed_messages_are_named(messages, what):
    with pytest.raises(DataError, match=what):
        normalize_messages(messages)


def test_text_parts_become_one_text_and_a_message_of_tool_calls_needs_no_content():
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    calls = [{"function": {"name": "add"}}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": calls}]
    assert normalize_messages(messages) == [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]


def test_a_text_that_was_templated_before_is_recognised():
    tokenizer = byte_tokenizer()
    assert looks_templated(render_text("hi", tokenizer), tokenizer)
    assert not looks_templated("what does <s> mean? <im_start>", tokenizer)
    assert not looks_templated(render_text("hi", tokenizer), byte_tokenizer(None))
    assert CHATML.startswith("{%")


def test_arguments_of_tool_calls_are_objects_to_the_template_unless_it_wants_text():
    def call(arguments):
        return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    as_object = byte_tokenizer("{{ messages[0].tool_calls[0].function.arguments | tojson }}")
    as_text = byte_tokenizer("{{ 'args ' + messages[0].tool_calls[0].function.arguments }}")
    for arguments in ({"a": "é"}, '{"a": "é"}'):
        assert render_text([call(arguments)], as_object) == '{"a": "é"}'
        assert render_text([call(arguments)], as_text) == 'args {"a": "é"}'
        assert decode(as_text, render([call(arguments)], as_text)) == 'args {"a": "é"}'
    assert render_text([call("no json")], as_object) == '"no json"'
    with pytest.raises(DataError, match="not a list of calls"):
        normalize_messages([{"role": "assistant", "content": "", "tool_calls": "f"}])
