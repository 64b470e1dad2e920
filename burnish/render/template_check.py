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
    """What `check_template` found; ``problems`` are sentences, none means that the template behaves.

    ``remarks`` are what several turns have to know: how a template treats history.
    """

    has_template: bool
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

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
    is not doubled. Over several turns: whether a conversation stays the beginning of the longer one, what stands behind the
    token that ends a turn, whether two tool messages in a row are kept, and whether thoughts are dropped from history.
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
    remarks = _check_turns(tokenizer, kwargs, whole)
    return TemplateCheck(has_template=True, problems=tuple(problems), remarks=tuple(remarks))


def turn_end_ids(
    tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any] | None = None
) -> tuple[int, ...]:
    """The special token that the template writes behind an assistant's answer; nothing where there is none."""
    turns = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    whole = _render(turns, tokenizer, dict(chat_template_kwargs or {}))
    if whole is None or _ANSWER not in whole:
        return ()
    end = whole.rpartition(_ANSWER)[2]
    found = [(end.find(str(t)), i) for i, t in tokenizer.added_tokens_decoder.items() if t.special and str(t) in end]
    return (min(found)[1],) if found else ()


def _render(
    turns: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any], *, prompt: bool = False
) -> str | None:
    try:
        return render_text(turns, tokenizer, chat_template_kwargs=kwargs, add_generation_prompt=prompt)
    except DataError:
        return None


def _check_turns(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any], whole: str) -> list[str]:
    """What a conversation of several turns has to know."""
    first = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    longer = [*first, {"role": "user", "content": "And after that?"}]
    remarks = []
    later = _render(longer, tokenizer, kwargs)
    if later is not None and not later.startswith(whole):
        remarks.append(
            "It is not prefix-stable: a second question changes how the first answer is written, so turns cannot be joined "
            "by their tokens."
        )
    end = whole.rpartition(_ANSWER)[2]
    specials = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special and str(token) in end]
    behind = end.rpartition(specials[-1])[2] if specials else ""
    if behind:
        remarks.append(
            f"It writes {behind!r} behind the token that ends a turn, which a sampled response does not have: between turns "
            f"these tokens have to be added."
        )
    thought = [{**first[0]}, {"role": "assistant", "content": f"<think>\nplus one\n</think>\n\n{_ANSWER}"}, longer[2]]
    kept = _render(thought, tokenizer, kwargs)
    if kept is not None and "plus one" not in kept:
        remarks.append("It drops <think> blocks from earlier turns: later prompts do not hold what was sampled.")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    results = [{"role": "tool", "content": f"result {letter}"} for letter in ("one", "two")]
    tools: list[dict[str, Any]] = [first[0], {"role": "assistant", "content": "", "tool_calls": [call, call]}, *results]
    together = _render(tools, tokenizer, kwargs)
    if together is None:
        remarks.append("It renders no tool messages: it cannot be used with tools.")
    elif "result one" not in together or "result two" not in together:
        remarks.append("Of two tool messages in a row it does not write both.")
    return remarks


def _check_answer_end(whole: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    if _ANSWER not in whole:
        return ["An assistant's answer is not in the conversation that it writes."]
    end = whole.rpartition(_ANSWER)[2]
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    if not any(token in end for token in [*special, tokenizer.eos_token or ""] if token):
        return ["No special token follows an assistant's answer: the model never sees where an answer ends."]
    return []
