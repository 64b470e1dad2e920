"""Messages to ids: chat template, truncation, what of a conversation is learnt, the template's self-test, the tokenizer."""

from burnish.render.conversation import LOSS_KEYS, ConversationRenderer, TrainingSequence
from burnish.render.prompt import (
    Composed,
    checked_ids,
    compose,
    encode_composed,
    encode_text,
    is_blank,
    is_empty_message,
    is_empty_prompt,
    looks_templated,
    normalize_messages,
    render,
    render_text,
    shows_tools,
    template_markers,
)
from burnish.render.show import marked_text
from burnish.render.template_check import TemplateCheck, check_template
from burnish.render.tokenizer import load_tokenizer, read_chat_template, set_pad_token, tokenizer_of
from burnish.render.truncation import TRUNCATION_POLICIES, truncate

__all__ = [
    "LOSS_KEYS",
    "TRUNCATION_POLICIES",
    "Composed",
    "ConversationRenderer",
    "TemplateCheck",
    "TrainingSequence",
    "check_template",
    "checked_ids",
    "compose",
    "encode_composed",
    "encode_text",
    "is_blank",
    "is_empty_message",
    "is_empty_prompt",
    "load_tokenizer",
    "looks_templated",
    "marked_text",
    "normalize_messages",
    "read_chat_template",
    "render",
    "render_text",
    "set_pad_token",
    "shows_tools",
    "template_markers",
    "tokenizer_of",
    "truncate",
]
