"""What several turns have to know of a chat template, each fault made on purpose."""

import pytest

from burnish.render import check_template
from burnish.render.template_check import turn_end_ids
from tests.render.fake_tokenizers import CHATML, byte_tokenizer

CLOSED = CHATML.replace("<|im_end|>\n", "<|im_end|>")
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not loop.last and '</think>' in message.content %}"
    "{{ message.content.split('</think>')[-1].strip() }}{% else %}{{ message.content }}{% endif %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAST_ONLY = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% if loop.last or message.role != 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONE_TOOL = (
    "{% for message in messages %}{% if message.role != 'tool' or loop.last %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_TOOLS = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "remark"),
    [
        (CHATML, r"'\n' behind the token that ends a turn"),
        (THINKING, "drops <think> blocks from earlier turns"),
        (LAST_ONLY, "not prefix-stable"),
        (ONE_TOOL, "does not write both"),
        (NO_TOOLS, "renders no tool messages"),
    ],
)
def test_each_way_of_treating_history_is_told(template, remark):
    expected = remark.replace("\n", "\\n")
    checked = check_template(byte_tokenizer(template))
    assert checked.ok, "none of them hurts a single turn"
    (found,) = checked.remarks
    assert expected in found


def test_a_template_without_surprises_has_no_remarks():
    assert check_template(byte_tokenizer(CLOSED)).remarks == ()


def test_the_token_behind_an_answer_is_the_one_that_ends_a_turn():
    tokenizer = byte_tokenizer()
    assert turn_end_ids(tokenizer) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    bare = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    assert turn_end_ids(byte_tokenizer(bare)) == ()
