"""The chat templates that TRL ships, which are those of published models: what is learnt of a conversation under each of them."""

import re
from pathlib import Path

import pytest

from burnish.render import ConversationRenderer, normalize_messages, render
from burnish.render.turns import TurnReader
from burnish.utils.errors import DataError
from tests.render.fake_tokenizers import byte_tokenizer

_ROOT = Path(__file__).parents[2] / ".peers"
_FOLDERS = [*_ROOT.glob("parity/trl/chat_templates"), *_ROOT.glob("*/lib/python*/site-packages/trl/chat_templates")]
TEMPLATES = {path.stem: path for folder in reversed(_FOLDERS) for path in folder.glob("*.jinja")}

_ENDS = {
    "llama3": "<|eot_id|>",
    "qwen": "<|im_end|>",
    "phi": "<|endoftext|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "glm": "<|endoftext|>",
    "gptoss": "<|return|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
}
_LOOKS_SPECIAL = re.compile(r"<\|?[A-Za-z_/｜▁|]+\|?>|<｜[^>]*?｜>|\[/?[A-Z_]+\]")
_TURNS = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2+2?"},
    {"role": "assistant", "content": "4 it is 🙂"},
]
CONVERSATIONS = {
    "turns": _TURNS,
    "thoughts": [
        _TURNS[0],
        {"role": "assistant", "content": "<think>\none more\n</think>\n\n2"},
        _TURNS[2],
        {"role": "assistant", "content": "<think>\ntwo more\n</think>\n\n4"},
    ],
    "reasoning": [_TURNS[0], {"role": "assistant", "content": "2", "reasoning_content": "one more"}],
    "tools": [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "2", "name": "add"},
        {"role": "assistant", "content": "It is 2"},
    ],
    "empty": [_TURNS[0], {"role": "assistant", "content": ""}],
}


def tokenizer_of(name):
    template = TEMPLATES[name].read_text(encoding="utf-8")
    found = {text for text in _LOOKS_SPECIAL.findall(template) if "|" in text or "｜" in text or "_of_" in text}
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted({*found, *_ENDS.values(), "<eos>"})})
    tokenizer.eos_token = next((end for start, end in _ENDS.items() if name.startswith(start)), "<eos>")
    return tokenizer


@pytest.mark.skipif(not TEMPLATES, reason="TRL is not installed here: `make test-parity` does that.")
def test_there_are_templates_of_the_common_families():
    assert {"llama3", "qwen3", "qwen2_5", "gemma3", "phi3", "gptoss"} <= set(TEMPLATES)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_an_answer_is_learnt_behind_its_prompt_up_to_its_end_or_the_row_is_refused(name, conversation):
    tokenizer, messages = tokenizer_of(name), CONVERSATIONS[conversation]
    try:
        made = ConversationRenderer(tokenizer).sequences(messages, turn_by_turn=True)
    except DataError:
        return  # What a template refuses or leaves out is none of its conversations.
    assert sorted(turn for one in made for turn in one.turns) == [
        number for number, message in enumerate(messages) if message["role"] == "assistant"
    ]
    for one in made:
        is_marked = "generation %}" in tokenizer.chat_template or "generation -%}" in tokenizer.chat_template
        assert is_marked or len(one.spans) == len(one.turns)
        for turn, (begin, end) in zip(one.turns, one.spans, strict=False):
            if is_marked:
                continue  # What is learnt may begin later, and in parts.
            assert one.ids[:begin] == render(messages[:turn], tokenizer)
            assert one.without_end or one.ids[end - 1] >= 256, "it ends with a token of its own"
        whole = render(messages[: one.turns[-1] + 1], tokenizer, add_generation_prompt=False)
        opened = tokenizer.decode(one.ids[: one.spans[-1][0]]).rstrip().endswith("<think>")
        assert one.ids == whole or one.added_end or opened


@pytest.mark.parametrize("name", sorted(name for name in TEMPLATES if f"{name}_training" in TEMPLATES))
def test_what_is_learnt_lies_inside_the_marks_of_trls_training_templates(name):
    """TRL marks what follows the role; of that, what the prompt of generation has already is not learnt here (an opened
    thought), nor what stands behind the token that ends the turn."""
    tokenizer, marked = tokenizer_of(name), tokenizer_of(f"{name}_training")
    marked.eos_token = tokenizer.eos_token
    compared = 0
    for kind, messages in CONVERSATIONS.items():
        if (name, kind) == ("diffusion_gemma", "tools"):
            continue  # Its prompt behind a tool's result opens no turn, so generation gives the role, too.
        try:
            (made,) = ConversationRenderer(tokenizer).sequences(messages, train_on="last")
            written = TurnReader(marked, {}).write(normalize_messages(messages), None)
        except DataError:
            continue
        if made.added_end or not written.marks:
            continue
        begin, end = made.spans[-1]
        learnt = tokenizer.decode(made.ids[begin:end])
        texts = [written.text[start:stop] for start, stop in written.marks]
        assert (
            any(learnt in text for text in [*texts, "".join(texts)])
            or "<think>" in tokenizer.decode(made.ids[:begin])[-12:]
        )
        compared += 1
    assert compared or name.startswith(("llava", "idefics", "smolvlm", "glm"))
