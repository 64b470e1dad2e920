"""Chat templates in the forms that the common families of models have, written for tests: what surrounds a turn, what ends it,
what happens to system messages, thoughts and calls of tools."""

from tests.render.fake_tokenizers import CHATML, byte_tokenizer

# One default system message in front where there is none; nothing else.
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    + CHATML
)
# Header tokens, trimmed contents, a begin token, no line end behind a turn.
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Questions in brackets, the system message in the last of them, answers closed by the end-of-sequence token; no cue for them.
INSTRUCT = (
    "{{ bos_token }}{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if messages[0].role == 'system' and m == asked[-1] %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# The system message is in the last question while it is unanswered, and nowhere once it is answered.
LOST_SYSTEM = INSTRUCT.replace("m == asked[-1]", "loop.last")
# Roles that alternate, the assistant's under another name, the system message before the first question.
MODEL_ROLE = (
    "{{ bos_token }}{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first else '' }}{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# The end-of-sequence token behind every finished conversation, a token of its own behind every turn.
CLOSED_AT_END = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
_TURN_WITH_CALLS = (
    '{% for call in m.tool_calls or [] %}<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + _TURN_WITH_CALLS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Arguments of calls are written as the text that they are.
TEXT_ARGUMENTS = TOOLS.replace("call.function.arguments | tojson", "'' + call.function.arguments")
# A thought, perhaps an empty one, before the last answer; none before earlier ones.
THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}"
    "{% set own = m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '' %}"
    "{% set thought = m.reasoning_content or own %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    + _TURN_WITH_CALLS
    + "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# The prompt opens a thought, and a finished conversation has none.
OPENED_THOUGHT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# Nothing but text between turns.
PLAIN = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
# The answers, and the token behind them, are marked as generated; the line end behind that too.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What is marked leaves out the thought and the token that ends the turn.
MARKED_ANSWER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '</think>' in m.content %}{{ m.content.split('</think>')[0] }}</think>"
    "{% generation %}{{ m.content.split('</think>')[-1] }}{% endgeneration %}"
    "{% elif m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

STABLE = {
    "chatml": CHATML,
    "default_system": DEFAULT_SYSTEM,
    "headers": HEADERS,
    "instruct": INSTRUCT,
    "model_role": MODEL_ROLE,
    "closed_at_end": CLOSED_AT_END,
    "tools": TOOLS,
    "marked": MARKED,
}
"""Those in which a conversation stays the beginning of a longer one (without system message, thoughts and tools)."""

_TOKENS = (
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "</s>", "<start_of_turn>", "<end_of_turn>",
    "<|end|>", "<|user|>", "<|assistant|>", "<|system|>",
)  # fmt: skip
_ENDS = {INSTRUCT: "</s>", HEADERS: "<|eot_id|>", CLOSED_AT_END: "</s>", MODEL_ROLE: "</s>"}


def tokenizer_with(template, *, pad_is_end=False):
    """A byte tokenizer with ``template``, whose tokens are tokens of its own."""
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_TOKENS)})
    tokenizer.eos_token = _ENDS.get(template, "<|im_end|>")
    if pad_is_end:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
