"""The forms in which conversations are stored, each read or refused with the way out."""

import json

import pytest

from burnish.config import SFTDataConfig
from burnish.data.problems import RowError
from burnish.data.sft_rows import read_conversation

TURNS = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
PAIR = {"prompt_key": "question", "response_key": "answer"}


def read(row, **config):
    return read_conversation(row, SFTDataConfig(**config))


@pytest.mark.parametrize("messages", [TURNS, json.dumps(TURNS), repr(TURNS)])
def test_messages_are_a_list_or_its_text(messages):
    assert read({"messages": messages}).messages == TURNS


def test_sharegpt_conversations_are_messages_under_other_names():
    said = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "1+1?"},
        {"from": "gpt", "value": "2", "weight": 0},
        {"from": "observation", "value": "o"},
    ]
    assert read({"conversations": said}, messages_key="conversations").messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2", "weight": 0},
        {"role": "tool", "content": "o"},
    ]


def test_a_pair_of_texts_stays_one_and_becomes_messages_where_these_are_needed():
    pair = read({"question": "1+1?", "answer": "2"}, **PAIR)
    assert (pair.messages, pair.prompt, pair.response) == (None, "1+1?", "2")
    assert pair.as_messages(None) == TURNS
    assert pair.as_messages("Be brief.") == [{"role": "system", "content": "Be brief."}, *TURNS]


@pytest.mark.parametrize("prompt", [TURNS[:1], json.dumps(TURNS[:1])])
@pytest.mark.parametrize("response", ["2", TURNS[1:], TURNS[1]])
def test_a_prompt_or_a_response_may_be_messages(prompt, response):
    assert read({"question": prompt, "answer": response}, **PAIR).messages == TURNS


def test_of_a_prompt_and_a_response_the_response_alone_is_learnt():
    asked = [*TURNS, {"role": "assistant", "content": "two", "weight": 1}, {"role": "user", "content": "2+2?"}]
    messages = read({"question": asked, "answer": "4"}, **PAIR).messages
    assert [message.get("loss") for message in messages] == [None, False, None, None, None]
    assert [messages[number] for number in (0, 2, 3)] == [asked[number] for number in (0, 2, 3)]


@pytest.mark.parametrize(
    ("stored", "source"), [("gsm8k", "gsm8k"), (3, "3"), ("", "unknown"), (None, "unknown"), ([], "unknown")]
)
def test_a_source_is_a_text_or_a_number(stored, source):
    assert read({"messages": TURNS, "data_source": stored}).data_source == source


@pytest.mark.parametrize("stored", [dict, json.dumps])
def test_a_key_with_a_dot_names_an_entry_of_a_column(stored):
    row = {"extra_info": stored({"question": "1+1?", "answer": "2"})}
    pair = read(row, prompt_key="extra_info.question", response_key="extra_info.answer")
    assert (pair.prompt, pair.response) == ("1+1?", "2")
    with pytest.raises(RowError, match="no column 'extra_info.other'"):
        read(row, prompt_key="extra_info.question", response_key="extra_info.other")
    with_dot = {"q.a": "1+1?", "b": "2"}
    assert read(with_dot, prompt_key="q.a", response_key="b").prompt == "1+1?"


def test_a_system_message_that_is_there_stays():
    own = [{"role": "system", "content": "mine"}, *TURNS]
    assert read({"messages": own}).as_messages("other") == own


def test_tools_thinking_and_source_come_from_their_columns():
    tools = [{"type": "function", "function": {"name": "add"}}]
    row = {"messages": TURNS, "tools": json.dumps(tools), "enable_thinking": False, "data_source": "mine"}
    said = read(row)
    assert (said.tools, said.enable_thinking, said.data_source) == (tools, False, "mine")
    assert read({"messages": TURNS, "t": tools}, tools_key="t").tools == tools
    assert read({"messages": TURNS, "enable_thinking": "True"}).enable_thinking is True
    for nothing in (None, "", []):
        bare = read({"messages": TURNS, "tools": nothing})
        assert (bare.tools, bare.enable_thinking, bare.data_source) == ([], None, "unknown")


@pytest.mark.parametrize(
    ("row", "config", "what"),
    [
        ({"conversations": []}, {}, r"no column 'messages'.*Set data.messages_key=conversations"),
        ({"question": "q", "answer": "a"}, {}, r"Set data.prompt_key=question data.response_key=answer"),
        ({"x": 1}, {}, r"Columns present: x\. Set data.messages_key to the one"),
        ({"messages": None}, {}, "'messages' is empty"),
        ({"messages": "hello"}, {}, "'messages' is str .*data.prompt_key and data.response_key"),
        ({"messages": "[{'role': 'user', "}, {}, "begins like a list of messages .* no valid JSON"),
        ({"messages": [{"from": "function_call", "value": "{}"}]}, {}, "'function_call'.*'tool_calls'"),
        (
            {"messages": [{"from": "narrator", "value": "x"}]},
            {},
            "message 0 is from 'narrator'; read are system, human",
        ),
        ({"messages": [{"from": "human", "value": "x"}, {"role": "user"}]}, {}, "message 1 has no 'from' and 'value'"),
        ({"question": "q"}, PAIR, r"no column 'answer', which data.response_key names"),
        ({"question": None, "answer": "a"}, PAIR, r"column 'question' is empty"),
        ({"question": "q", "answer": TURNS[:1]}, PAIR, "begins with a message of role 'user'"),
        ({"question": "q", "answer": 7}, PAIR, r"'answer' \(data.response_key\) is int .*Store it as the text"),
        ({"messages": TURNS, "tools": "none"}, {}, "'tools' is a text that is not JSON"),
        ({"messages": TURNS, "enable_thinking": "perhaps"}, {}, "'enable_thinking' is str .*not true or false"),
    ],
)
def test_what_cannot_be_read_is_named_with_the_way_out(row, config, what):
    with pytest.raises(RowError, match=what):
        read(row, **config)
