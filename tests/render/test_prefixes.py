"""The texts of a conversation's beginnings from one rendering: those that the template writes for each, or none."""

import random

import pytest
from transformers import PreTrainedTokenizerBase

from burnish.render import ConversationRenderer, turns
from burnish.render.turns import History, TurnReader
from burnish.utils.errors import DataError
from tests.render import chat_templates
from tests.render.chat_templates import MODEL_ROLE, TOOLS, tokenizer_with
from tests.render.fake_tokenizers import CHATML

# Header tokens and a begin token with the first message, as Llama 3 has them.
LLAMA = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim %}"
    "{% set content = content + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# The system message within the first question, as early Mistral and Llama 2 have it.
FOLDED = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set rest = messages %}{%- endif %}{{- bos_token }}{%- for m in rest %}"
    "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- if m['role'] == 'user' %}{{- '[INST] ' }}{%- if loop.first and system is defined %}{{- system + '\n\n' }}{%- endif %}"
    "{{- m['content'] + '[/INST]' }}"
    "{%- else %}{{- ' ' + m['content'] + eos_token }}{%- endif %}{%- endfor %}"
)
# Results of tools in a row make one turn, closed where no other follows, as Qwen 2.5 has them.
JOINED = (
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>system\nHelp.<|im_end|>\n' }}{%- endif %}{%- for m in messages %}"
    "{%- if m.role in ('user', 'assistant') or (m.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}"
    "{%- endif %}{{- '\n<tool_response>' + m.content }}{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{- '<|im_end|>\n' }}{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# The cue is written within the loop.
CUE_INSIDE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}\n{% endfor %}"
)
COUNTING = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% endif %}"
    "[{{ ns.n }}{{ loop.previtem.role if loop.previtem is defined }}] {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[answer]{% endif %}"
)
TEMPLATES = {
    **{name: value for name, value in vars(chat_templates).items() if name.isupper() and name[0] != "_" and "{%" in value},
    "CHATML": CHATML, "LLAMA": LLAMA, "FOLDED": FOLDED, "JOINED": JOINED, "CUE_INSIDE": CUE_INSIDE, "COUNTING": COUNTING,
}  # fmt: skip
PROVEN = {
    "CHATML", "DEFAULT_SYSTEM", "HEADERS", "MODEL_ROLE", "CLOSED_AT_END", "TOOLS", "PLAIN", "OPENED_THOUGHT", "MARKED",
    "MARKED_ANSWER", "TEXT_ARGUMENTS", "LLAMA", "FOLDED", "JOINED", "COUNTING",
}  # fmt: skip
"""Those in which the texts come from one rendering, of some conversations at least."""


def conversation(seed, num_turns=6, *, kinds=("system", "thoughts", "tools")):
    draw = random.Random(seed)
    words = ["one", " two", "três", "🙂", "\n", "<think>", "  ", "<|im_end|>", "4", "\x00"]

    def text():
        return "".join(draw.choice(words) for _ in range(draw.randint(1, 6))) + "x"

    messages = [{"role": "system", "content": text()}] if "system" in kinds and draw.random() < 0.5 else []
    for _ in range(num_turns):
        messages.append({"role": "user", "content": text()})
        if "tools" in kinds and draw.random() < 0.3:
            call = {"type": "function", "function": {"name": "add", "arguments": {"a": draw.randint(0, 9)}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages += [{"role": "tool", "content": text()} for _ in range(draw.randint(1, 3))]
        answer = text()
        if "thoughts" in kinds and draw.random() < 0.5:
            answer = f"<think>\n{text()}\n</think>\n\n{answer}"
        messages.append({"role": "assistant", "content": answer})
    return messages


def at_once(template, messages, tools=None):
    """A conversation whose beginnings come from one rendering where they can, and the lengths of those that do, without the
    prompt and with it."""
    reader = TurnReader(tokenizer_with(template), {})
    history = History(reader, messages, tools)
    history._num_asked = 1000
    found = [history._prefixes(prompt) for prompt in (False, True)]
    numbers = set(range(1, len(messages)))
    return reader, history, [set() if one is None else numbers - one.unproven for one in found]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_of_every_beginning_is_what_the_template_writes_for_it(name):
    template, tools = TEMPLATES[name], [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    num_proven = 0
    for seed in range(12):
        kinds = [(), ("system",), ("system", "thoughts"), ("system", "thoughts", "tools")][seed % 4]
        messages = conversation(seed, kinds=kinds)
        reader, history, proven = at_once(template, messages, tools if seed % 2 else None)
        num_proven += sum(map(len, proven))
        for number in range(1, len(messages) + 1):
            for prompt in (False, True):
                try:
                    expected = reader.write(messages[:number], tools if seed % 2 else None, prompt=prompt)
                except DataError as error:
                    with pytest.raises(DataError) as again:
                        history.write(number, prompt=prompt)
                    assert str(again.value) == str(error)
                else:
                    assert history.write(number, prompt=prompt) == expected
    assert (num_proven > 0) == (name in PROVEN)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("turn_by_turn", [False, True])
def test_what_is_learnt_is_what_it_is_where_every_beginning_is_rendered(name, turn_by_turn, monkeypatch):
    renderer = ConversationRenderer(tokenizer_with(TEMPLATES[name]))

    def made(messages):
        try:
            return renderer.sequences(messages, turn_by_turn=turn_by_turn)
        except DataError as error:
            return str(error)

    for seed in range(12):
        messages = conversation(seed, kinds=[(), ("system",), ("tools",), ("system", "thoughts", "tools")][seed % 4])
        monkeypatch.setattr(turns, "_FEW", 1_000_000)
        one_by_one = made(messages)
        monkeypatch.setattr(turns, "_FEW", 0)
        assert made(messages) == one_by_one


@pytest.mark.parametrize("template", [CHATML, LLAMA, FOLDED, MODEL_ROLE, JOINED, chat_templates.MARKED])
def test_a_conversation_is_rendered_as_often_however_many_turns_it_has(template, monkeypatch):
    rendered = []
    original = PreTrainedTokenizerBase.get_chat_template

    def counting(tokenizer, *arguments):
        rendered.append(1)
        return original(tokenizer, *arguments)

    renderer = ConversationRenderer(tokenizer_with(template))
    renderer.ends_turns()
    monkeypatch.setattr(PreTrainedTokenizerBase, "get_chat_template", counting)
    counts = []
    for num_turns in (10, 60):
        rendered.clear()
        (made,) = renderer.sequences(conversation(0, num_turns, kinds=()))
        assert len(made.turns) == num_turns
        counts.append(len(rendered))
    assert counts[0] == counts[1]


BODY = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CUE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}{% for m in messages %}" + BODY + "{% endfor %}" + CUE,
        "{{ messages[-1].content }}{% for m in messages %}" + BODY + "{% endfor %}" + CUE,
        "{{ (messages | last).role }}{% for m in messages %}" + BODY + "{% endfor %}" + CUE,
        "{{ messages is sequence }}{% for m in messages %}" + BODY + "{% endfor %}" + CUE,
        "{{ messages == messages[0:] }}{% for m in messages %}" + BODY + "{% endfor %}" + CUE,
        "{{ messages[:3] | map(attribute='role') | join }}{% for m in messages %}" + BODY + "{% endfor %}" + CUE,
        "{% for m in messages | list %}" + BODY + "{% endfor %}" + CUE,
        "{% for m in messages | map('upper') %}" + BODY + "{% endfor %}" + CUE,
        "{% for m in messages[::-1] %}" + BODY + "{% endfor %}" + CUE,
        "{% for m in messages if m.role != 'system' %}" + BODY + "{% endfor %}" + CUE,
        "{% for m in messages %}{{ '' if loop.last else '-' }}" + BODY + "{% endfor %}" + CUE,
        "{% for m in messages %}" + BODY + "{{ '' if loop.last else '-' }}{% endfor %}" + CUE,
        "{% for m in messages %}" + BODY + "{{ loop.nextitem.role if loop.nextitem is defined }}{% endfor %}" + CUE,
        "{% for m in messages %}{{ loop.length }}" + BODY + "{% endfor %}" + CUE,
        "{% for m in messages %}{{ loop.revindex }}" + BODY + "{% endfor %}" + CUE,
        "{% for m in messages %}{{ messages[loop.index].role }}" + BODY + "{% endfor %}" + CUE,
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'q' in messages }}{% endif %}" + BODY + "{% endfor %}" + CUE,
        "{% for m in messages %}{% for x in messages %}{{ x.role }}{% endfor %}" + BODY + "{% endfor %}" + CUE,
        "{% for m in messages %}{% if loop.index == 3 %}{% continue %}{% endif %}" + BODY + "{% endfor %}" + CUE,
        "{% for m in messages %}" + BODY + "{% if loop.index == 5 %}{% break %}{% endif %}{% endfor %}" + CUE,
        "{% for m in messages %}" + BODY + "{% endfor %}{{ messages[0].role }}" + CUE,
        "{% for m in messages %}" + BODY + "{% endfor %}{% if messages %}.{% endif %}" + CUE,
        "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = m.content %}" + BODY + "{% endfor %}{{ ns.x }}" + CUE,
        "{% set ns = namespace(x='') %}{% set other = ns %}{% for m in messages %}{% set ns.x = m.role %}"
        + BODY
        + "{% endfor %}{{ other.x }}"
        + CUE,
        "{% macro tell() %}{{ messages | length }}{% endmacro %}{% for m in messages %}" + BODY + "{% endfor %}{{ tell() }}",
        "{% set sep = joiner('|') %}{% for m in messages %}{{ sep() }}" + BODY + "{% endfor %}{{ sep() }}" + CUE,
        "{% for m in messages %}" + BODY + "{% endfor %}{% for x in messages %}{{ x.role }}{% endfor %}" + CUE,
        "{% if messages %}{% for m in messages %}" + BODY + "{% endfor %}{% endif %}" + CUE,
        "{% for m in messages %}{{ [1, 2, 3, 4, 5] | random }}" + BODY + "{% endfor %}" + CUE,
    ],
)  # fmt: skip
def test_a_template_that_reads_ahead_is_asked_for_every_beginning(template):
    messages = conversation(3, kinds=())
    _, _, proven = at_once(template, messages)
    assert proven == [set(), set()]


@pytest.mark.parametrize(
    "before",
    ["{{ messages[1].role }}", "{{ (messages | selectattr('role', 'equalto', 'assistant') | first).content }}"],
)
def test_beginnings_that_have_all_that_was_read_come_from_one_rendering(before):
    template = before + "{% for m in messages %}" + BODY + "{% endfor %}" + CUE
    messages = conversation(3, kinds=())
    assert at_once(template, messages)[2] == [set(range(2, len(messages)))] * 2
    messages = conversation(3)
    last_results = {n for n, one in enumerate(messages, 1) if one["role"] == "tool"}
    assert last_results
    assert at_once(JOINED, messages)[2] == [set(range(1, len(messages))) - last_results] * 2


def test_a_template_that_reads_what_is_there_already_is_asked_once():
    template = (
        "{% if messages and messages[0].role == 'user' %}{{ messages[0].content }}{% endif %}{{ (messages | first).role }}"
        "{% for m in messages %}{% if not loop.first %}{{ messages[loop.index0 - 1].role }}{{ loop.previtem.content }}{% endif %}"
        + BODY + "{% endfor %}" + CUE
    )  # fmt: skip
    messages = conversation(3, kinds=())
    reader, history, proven = at_once(template, messages)
    assert proven == [set(range(1, len(messages)))] * 2
    for number in range(1, len(messages) + 1):
        assert history.write(number) == reader.write(messages[:number], None)


def test_what_needs_the_arguments_of_calls_as_text_is_asked_for_every_beginning():
    messages = conversation(1, kinds=("tools",))
    assert any("tool_calls" in message for message in messages)
    assert at_once(chat_templates.TEXT_ARGUMENTS, messages)[2] == [set(), set()]
    assert at_once(TOOLS, messages)[2] == [set(range(1, len(messages)))] * 2


def test_a_tokenizer_with_a_way_of_its_own_is_asked_for_every_beginning():
    class Own(type(tokenizer_with(CHATML))):
        def apply_chat_template(self, *arguments, **options):
            return super().apply_chat_template(*arguments, **options)

    own = Own(tokenizer_object=tokenizer_with(CHATML).backend_tokenizer, eos_token="<|im_end|>")
    own.chat_template = CHATML
    assert TurnReader(own, {}).prefixes(conversation(3, kinds=()), None, prompt=False) is None


def test_variables_that_are_arguments_of_the_library_are_left_to_it():
    reader = TurnReader(tokenizer_with(CHATML), {"continue_final_message": False})
    assert reader.prefixes(conversation(3, kinds=()), None, prompt=False) is None
