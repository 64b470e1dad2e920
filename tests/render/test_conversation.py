"""What is learnt of a conversation, over the forms that chat templates have."""

import pytest

from burnish.render import ConversationRenderer, marked_text, render
from burnish.utils.errors import DataError, ModelError
from tests.render.chat_templates import (
    CLOSED_AT_END,
    HEADERS,
    INSTRUCT,
    LOST_SYSTEM,
    MARKED,
    MARKED_ANSWER,
    MODEL_ROLE,
    OPENED_THOUGHT,
    PLAIN,
    STABLE,
    TEXT_ARGUMENTS,
    THINKING,
    TOOLS,
    tokenizer_with,
)
from tests.render.fake_tokenizers import CHATML, byte_tokenizer

TURNS = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "naïve 🙂?"},
    {"role": "assistant", "content": "4 שלום"},
]
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}
WITH_TOOLS = [
    {"role": "user", "content": "add"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 2"},
]


def thought(text, answer):
    return {"role": "assistant", "content": f"<think>\n{text}\n</think>\n\n{answer}"}


THOUGHTS = [TURNS[0], thought("one more", "2"), TURNS[2], thought("two more", "4")]


def sequences(template, messages, *, kwargs=None, **options):
    return ConversationRenderer(tokenizer_with(template), kwargs).sequences(messages, **options)


def learnt(template, messages, **options):
    """The learnt texts of each sequence."""
    tokenizer = tokenizer_with(template)
    made = sequences(template, messages, **options)
    return [[tokenizer.decode(one.ids[begin:end]) for begin, end in one.spans] for one in made]


@pytest.mark.parametrize("name", STABLE)
def test_the_ids_are_those_of_the_template_and_what_precedes_an_answer_is_its_prompt(name):
    tokenizer = tokenizer_with(STABLE[name])
    (made,) = ConversationRenderer(tokenizer).sequences(TURNS)
    assert made.ids == render(TURNS, tokenizer, add_generation_prompt=False)
    assert made.turns == (1, 3)
    for number, (begin, _) in zip(made.turns, made.spans, strict=True):
        assert made.ids[:begin] == render(TURNS[:number], tokenizer)
    assert not made.cut_tokens
    assert made.without_end == 0


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (HEADERS, "<|eot_id|>"),
        (INSTRUCT, "</s>"),
        (MODEL_ROLE, "<end_of_turn>"),
        (CLOSED_AT_END, "<|end|>"),
        (MARKED, "<|im_end|>"),
    ],
)
def test_nothing_but_the_answers_and_the_tokens_that_end_them_is_learnt(template, end):
    space = " " if template is INSTRUCT else ""
    assert learnt(template, TURNS) == [[f"{space}2{end}", f"{space}4 שלום{end}"]]
    assert learnt(template, TURNS, train_on="last") == [[f"{space}4 שלום{end}"]]


@pytest.mark.parametrize("template", [HEADERS, INSTRUCT, MODEL_ROLE])
def test_the_template_alone_writes_the_begin_token(template):
    (made,) = sequences(template, TURNS)
    begin = tokenizer_with(template).bos_token_id
    assert made.ids.count(begin) == 1
    assert made.ids[0] == begin


def test_an_answer_may_be_empty_and_is_ended_all_the_same():
    assert learnt(CHATML, [TURNS[0], {"role": "assistant", "content": ""}]) == [["<|im_end|>"]]


def test_masks_do_not_come_from_the_padding_token():
    tokenizer = tokenizer_with(CHATML, pad_is_end=True)
    (made,) = ConversationRenderer(tokenizer).sequences(TURNS)
    assert made == sequences(CHATML, TURNS)[0]
    assert tokenizer.pad_token_id in [made.ids[end - 1] for _, end in made.spans]


def test_what_comes_after_the_last_learnt_answer_is_left_out():
    assert sequences(CHATML, [*TURNS, TURNS[0]]) == sequences(CHATML, TURNS)


def test_messages_with_loss_false_or_weight_0_are_context_only():
    unlearnt = [TURNS[0], {**TURNS[1], "weight": 0}, TURNS[2], {**TURNS[3], "loss": True}]
    assert learnt(CHATML, unlearnt) == [["4 שלום<|im_end|>"]]
    assert sequences(CHATML, unlearnt)[0].ids == sequences(CHATML, TURNS)[0].ids
    assert sequences(CHATML, [TURNS[0], {**TURNS[1], "loss": False}]) == []


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([{**TURNS[0], "loss": True}, TURNS[1]], r"Message 0 \(user\) is to be learnt"),
        ([TURNS[0], {**TURNS[1], "weight": 0.5}], "weight: 0.5. It is true or false"),
        ([TURNS[1], TURNS[2], TURNS[3]], "begins with an assistant's message"),
        ([], "list of messages is empty"),
        ([TURNS[0], {"role": "assistant", "content": None}], r"Message 1 \(assistant\) has nothing"),
    ],
)
def test_what_cannot_be_learnt_is_named(messages, what):
    with pytest.raises(DataError, match=what):
        sequences(CHATML, messages)


def test_a_tokenizer_without_template_names_the_way_out():
    with pytest.raises(ModelError, match=r"no chat template.*custom_chat_template.*data\.response_key"):
        ConversationRenderer(byte_tokenizer(None)).sequences(TURNS)


# ----------------------------------------------------------------------------------------- tools, thoughts


@pytest.mark.parametrize("template", [TOOLS, TEXT_ARGUMENTS])
def test_calls_of_tools_are_learnt_once_quoted_and_their_results_are_not(template):
    (texts,) = learnt(template, WITH_TOOLS)
    assert "".join(texts).count('"name": "add"') == 1
    assert '"a": 1' in texts[0]
    assert '\\"' not in texts[0]
    assert texts[0].endswith("</tool_call><|im_end|>")
    assert texts[1] == "It is 2<|im_end|>"


def test_tools_are_shown_in_the_prompt_as_in_generation():
    tokenizer = tokenizer_with(TOOLS)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    (made,) = ConversationRenderer(tokenizer).sequences(WITH_TOOLS, tools=tools)
    begin = made.spans[0][0]
    assert made.ids[:begin] == render(WITH_TOOLS[:1], tokenizer, tools=tools)
    assert '"name": "add"' in tokenizer.decode(made.ids[:begin])


def test_thoughts_that_are_dropped_from_history_are_refused_or_learnt_turn_by_turn():
    with pytest.raises(DataError, match=r"message 1 differently.*ignore_input_ids_mismatch=true.*train_on=last"):
        sequences(THINKING, THOUGHTS)
    assert learnt(THINKING, THOUGHTS, train_on="last") == [["<think>\ntwo more\n</think>\n\n4<|im_end|>"]]
    tokenizer = tokenizer_with(THINKING)
    first, second = sequences(THINKING, THOUGHTS, turn_by_turn=True)
    assert (first.turns, second.turns) == ((1,), (3,))
    for one, number in ((first, 1), (second, 3)):
        assert one.ids == render(THOUGHTS[: number + 1], tokenizer, add_generation_prompt=False)
        assert one.ids[: one.spans[0][0]] == render(THOUGHTS[:number], tokenizer)
    assert "one more" in tokenizer.decode(first.ids)
    assert "one more" not in tokenizer.decode(second.ids)


def test_answers_within_one_turn_of_tools_stay_one_sequence():
    steps = [WITH_TOOLS[0], {**WITH_TOOLS[1], "reasoning_content": "hm"}, *WITH_TOOLS[2:], TURNS[2], TURNS[3]]
    first, second = sequences(THINKING, steps, turn_by_turn=True)
    assert (first.turns, second.turns) == ((1, 3), (5,))


def test_a_system_message_that_moves_with_the_conversation_is_where_generation_sees_it():
    moving = [{"role": "system", "content": "Be brief."}, *TURNS]
    with pytest.raises(DataError, match="message 2 differently"):
        sequences(INSTRUCT, moving)
    tokenizer = tokenizer_with(INSTRUCT)
    for one in sequences(INSTRUCT, moving, turn_by_turn=True):
        assert one.ids[: one.spans[0][0]] == render(moving[: one.turns[0]], tokenizer)
    with pytest.raises(DataError, match="otherwise than the prompt that asks for it"):
        sequences(LOST_SYSTEM, moving[:3])


@pytest.mark.parametrize(
    "answer", [thought("one more", "2"), {"role": "assistant", "content": "2", "reasoning_content": "one more"}]
)
def test_a_thought_that_the_prompt_opens_is_learnt_from_there_on(answer):
    assert learnt(OPENED_THOUGHT, [TURNS[0], answer]) == [["one more\n</think>\n\n2<|im_end|>"]]
    (made,) = sequences(OPENED_THOUGHT, [TURNS[0], answer])
    assert made.ids[: made.spans[0][0]] == render(TURNS[:1], tokenizer_with(OPENED_THOUGHT))


def test_a_sampled_response_to_an_opened_thought_is_learnt_as_it_was_sampled():
    sampled = {"role": "assistant", "content": "one more\n</think>\n\n2"}
    assert learnt(OPENED_THOUGHT, [TURNS[0], sampled]) == [["one more\n</think>\n\n2<|im_end|>"]]


def test_an_opened_thought_without_thoughts_is_refused():
    with pytest.raises(DataError, match="opens a thought.*reasoning_content"):
        sequences(OPENED_THOUGHT, TURNS[:2])


def test_a_closed_thought_belongs_to_the_prompt_and_contradicts_thoughts():
    off = {"enable_thinking": False}
    assert learnt(THINKING, TURNS[:2], kwargs=off) == [["2<|im_end|>"]]
    assert learnt(THINKING, TURNS[:2]) == [["<think>\n\n</think>\n\n2<|im_end|>"]]
    with pytest.raises(DataError, match="enable_thinking is false"):
        sequences(THINKING, THOUGHTS[:2], kwargs=off)


def test_a_conversation_may_set_variables_of_the_template_for_itself():
    renderer = ConversationRenderer(tokenizer_with(THINKING), {"enable_thinking": True})
    (off,) = renderer.sequences(TURNS[:2], chat_template_kwargs={"enable_thinking": False})
    (on,) = renderer.sequences(TURNS[:2])
    assert off.ids == on.ids
    assert off.spans[0][0] > on.spans[0][0]


# --------------------------------------------------------------------------------- what a template leaves out


def writing(expression):
    """CHATML with something else in the place of a message's content."""
    return CHATML.replace("{{ message.content }}", expression)


@pytest.mark.parametrize(
    ("template", "messages", "what"),
    [
        (CHATML, WITH_TOOLS, r"does not write the tool call of message 1 \(add\)"),
        (writing("{{ message.content[0].text }}"), TURNS, "does not write the text of message 3"),
        (writing("{{ message.content | upper }}"), [TURNS[0], {"role": "assistant", "content": "two"}], "as it is"),
        (writing("{{ message.content if message.role == 'assistant' }}"), TURNS, r"does not write message 0 \(user\)"),
        (
            TOOLS.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"),
            WITH_TOOLS,
            r"does not write message 2 \(tool\)",
        ),
        (
            writing("{{ '<think></think>' if message.role == 'assistant' }}{{ message.content }}"),
            THOUGHTS,
            "a thought of its own",
        ),
        ("{{ raise_exception('no') }}", TURNS, "refuses this conversation: no"),
        ("{{ messages[0].content + 1 }}", TURNS, r"fails on this conversation \(TypeError"),
        (CHATML + "{% if add_generation_prompt %}Go!{% endif %}", TURNS, "otherwise than the prompt that asks for it"),
    ],
)
def test_what_the_template_leaves_out_or_changes_is_an_error(template, messages, what):
    with pytest.raises(DataError, match=what):
        sequences(template, messages)


def test_a_thought_that_has_no_place_in_the_template_is_counted():
    (made,) = sequences(CHATML, [TURNS[0], {**TURNS[1], "reasoning_content": "one more"}])
    assert made.unwritten == 1


def test_words_that_a_template_takes_out_of_a_system_message_do_no_harm():
    template = CHATML.replace("{{ message.content }}", "{{ message.content.replace('/no_think', '') }}")
    assert len(sequences(template, [{"role": "system", "content": "Be brief /no_think now."}, *TURNS])) == 1


# ---------------------------------------------------------------------------------------------- ends, marks


def test_without_a_token_that_ends_turns_the_last_answer_gets_the_end_of_sequence_token():
    (made,) = sequences(PLAIN, TURNS)
    assert learnt(PLAIN, TURNS) == [["2", "4 שלום<|im_end|>"]]
    assert (made.without_end, made.added_end) == (1, True)
    assert not ConversationRenderer(tokenizer_with(PLAIN)).ends_turns()
    assert ConversationRenderer(tokenizer_with(CHATML)).ends_turns()


def test_a_token_behind_calls_of_tools_may_be_another_one():
    template = TOOLS.replace(
        "<|im_end|>\n{% endfor %}", "{{ '<|end|>' if m.tool_calls else '<|im_end|>' }}\n{% endfor %}"
    )
    (texts,) = learnt(template, WITH_TOOLS)
    assert texts[0].endswith("</tool_call><|end|>")
    assert texts[1].endswith("<|im_end|>")


def test_two_tokens_that_always_stand_together_end_a_turn_together():
    template = CHATML.replace("{{ message.content }}<|im_end|>", "{{ message.content }}<|end|><|im_end|>")
    assert learnt(template, TURNS[:2]) == [["2<|end|><|im_end|>"]]


def test_marks_of_the_template_decide_what_is_learnt_and_the_end_is_always():
    assert learnt(MARKED, TURNS) == learnt(CHATML, TURNS)
    assert learnt(MARKED_ANSWER, TURNS) == learnt(CHATML, TURNS)
    assert learnt(MARKED_ANSWER, THOUGHTS) == [["\n\n2<|im_end|>", "\n\n4<|im_end|>"]]


def test_the_learnt_part_can_be_shown():
    tokenizer = tokenizer_with(CHATML)
    (made,) = ConversationRenderer(tokenizer).sequences(TURNS)
    shown = marked_text(made.ids, made.spans, tokenizer)
    assert shown.startswith(
        "<|im_start|>user\\n1+1?<|im_end|>\\n<|im_start|>assistant\\n«2<|im_end|>»\\n<|im_start|>user"
    )
    (long,) = ConversationRenderer(tokenizer).sequences([TURNS[0], {"role": "assistant", "content": "x" * 1000}])
    assert len(marked_text(long.ids, long.spans, tokenizer, max_part=100)) < 220


# ------------------------------------------------------------------------------------------- plain texts


def test_a_plain_pair_is_the_prompt_of_generation_then_the_answer_and_its_end():
    tokenizer = byte_tokenizer(None, begin=True, end=True)
    made = ConversationRenderer(tokenizer).text_pair("1+1=", "2 🙂")
    begin = made.spans[0][0]
    assert made.ids[:begin] == render("1+1=", tokenizer)
    assert tokenizer.decode(made.ids[begin:]) == "2 🙂<|im_end|>"
    assert made.spans == ((begin, len(made.ids)),)
    again = ConversationRenderer(tokenizer).text_pair("1+1=", "2 🙂<|im_end|>")
    assert again.ids == made.ids


def test_a_plain_pair_needs_a_prompt():
    with pytest.raises(DataError, match="has no tokens"):
        ConversationRenderer(byte_tokenizer(None)).text_pair("", "2")
