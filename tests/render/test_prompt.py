import pytest

from burnish.render import compose, encode_composed, looks_templated, normalize_messages, prompt, render, render_text
from burnish.utils.errors import ConfigError, DataError, ModelError
from tests.render import chat_templates
from tests.render.chat_templates import tokenizer_with
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


# ------------------------------------------------------------------------------------------- many at once

PROMPTS = ["1+1=", " naïve 🙂\n", "<|im_end|> in a question", "", "שלום " * 30]
TEMPLATES = {
    name: value for name, value in vars(chat_templates).items() if name.isupper() and name[0] != "_" and "{%" in value
}


def from_library(tokenizer, messages):
    made = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, add_generation_prompt=True)
    return list(made["input_ids"])


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_encoded_together_have_the_ids_of_apply_chat_template(name):
    tokenizer = tokenizer_with(TEMPLATES[name])
    conversations = [[{"role": "user", "content": text}] for text in PROMPTS]
    together = encode_composed([compose(one, tokenizer) for one in conversations], tokenizer)
    assert together == [from_library(tokenizer, one) for one in conversations]
    assert together == [render(one, tokenizer) for one in conversations]


@pytest.mark.parametrize("ends", [{}, {"begin": True}, {"begin": True, "end": True}])
def test_texts_encoded_together_have_the_ids_that_each_has_alone(ends):
    tokenizer = byte_tokenizer(None, **ends)
    texts = [text for text in [*PROMPTS, "closed<|im_end|>"] if text or ends]
    together = encode_composed([compose(text, tokenizer) for text in texts], tokenizer)
    assert together == [prompt.encode_text(text, tokenizer) for text in texts]
    assert together == [render(text, tokenizer) for text in texts]


class OwnTemplate(type(byte_tokenizer())):
    def apply_chat_template(self, *arguments, **options):
        made = super().apply_chat_template(*arguments, **options)
        return {"input_ids": [7, *made["input_ids"]]} if options.get("tokenize") else made


class OwnCall(type(byte_tokenizer())):
    def __call__(self, text, **options):
        assert isinstance(text, str)
        made = super().__call__(text, **options)
        return {"input_ids": [7, *made["input_ids"]]}


@pytest.mark.parametrize("cls", [OwnTemplate, OwnCall])
def test_a_tokenizer_with_a_way_of_its_own_goes_it_prompt_by_prompt(cls):
    tokenizer = cls(tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    conversations = [[{"role": "user", "content": text}] for text in PROMPTS]
    together = encode_composed([compose(one, tokenizer) for one in conversations], tokenizer)
    assert together == [from_library(tokenizer, one) for one in conversations]
    assert all(ids[0] == 7 for ids in together)


def test_what_is_tokenized_at_once_has_a_bound(monkeypatch):
    monkeypatch.setattr(prompt, "_MOST_AT_ONCE", 10)
    tokenizer = byte_tokenizer(None)
    texts = ["12345", "12345", "1", "1234567890123", "12"]
    assert list(prompt._portions(texts)) == [["12345", "12345"], ["1"], ["1234567890123"], ["12"]]
    assert encode_composed(texts, tokenizer) == [render(text, tokenizer) for text in texts]
