"""A self-test of a chat template, run before anything trains on what it writes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.render.prompt import render, render_text
from burnish.utils.errors import DataError

_QUESTION = "Which number comes after 41?"
_ANSWER = "42 it is"


@dataclass(frozen=True, kw_only=True)
class TemplateCheck:
    """What `check_template` found; ``problems`` are sentences, none means that the template behaves."""

    has_template: bool
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.problems


def check_template(
    tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any] | None = None
) -> TemplateCheck:
    """Renders small conversations and says what would hurt training.

    Checked: the user's words are in the prompt; the generation prompt opens an assistant's turn; the prompt is a prefix
    of the conversation that goes on with an answer; the answer is closed by an end-of-sequence token; the begin token
    is not doubled.
    """
    if not tokenizer.chat_template:
        return TemplateCheck(has_template=False)
    question = [{"role": "user", "content": _QUESTION}]
    answered = [*question, {"role": "assistant", "content": _ANSWER}]
    kwargs = dict(chat_template_kwargs or {})
    try:
        prompt = render_text(question, tokenizer, chat_template_kwargs=kwargs)
        bare = render_text(question, tokenizer, chat_template_kwargs=kwargs, add_generation_prompt=False)
        whole = render_text(answered, tokenizer, chat_template_kwargs=kwargs, add_generation_prompt=False)
        ids = render(question, tokenizer, chat_template_kwargs=kwargs)
    except DataError as error:
        return TemplateCheck(has_template=True, problems=(f"It cannot render a question and an answer: {error}",))

    problems = []
    if _QUESTION not in prompt:
        problems.append("The user's message is not in the prompt that it writes.")
    if prompt == bare:
        problems.append("add_generation_prompt changes nothing: the model is not told that it is its turn.")
    if not whole.startswith(prompt):
        problems.append(
            "A prompt is not the beginning of the same conversation with an answer: turns render differently later."
        )
    problems += _check_answer_end(whole, tokenizer)
    if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
        problems.append(f"The prompt begins with two begin tokens ({tokenizer.bos_token}).")
    return TemplateCheck(has_template=True, problems=tuple(problems))


def _check_answer_end(whole: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    if _ANSWER not in whole:
        return ["An assistant's answer is not in the conversation that it writes."]
    end = whole.rpartition(_ANSWER)[2]
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    if not any(token in end for token in [*special, tokenizer.eos_token or ""] if token):
        return ["No special token follows an assistant's answer: the model never sees where an answer ends."]
    return []
