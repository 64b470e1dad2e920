"""What a user should hear of what became of his conversations, counted over the rows and said once."""

from collections.abc import Mapping
from typing import Literal

from burnish.config.sft import SFTDataConfig

Level = Literal["warning", "note"]


def remarks(
    notes: Mapping[str, int], num_rows: int, config: SFTDataConfig, first: Mapping[str, str]
) -> list[tuple[Level, str]]:
    """Sentences about a dataset.

    Args:
        notes: how often what happened, by name (see `PreparedConversation.notes`).
        num_rows: rows that were read.
        first: the first row of each name, in words.
    """
    said: list[tuple[Level, str]] = []
    limit = f"data.max_length={config.max_length}"
    sentences: dict[str, tuple[Level, str]] = {
        "nothing": (
            "warning",
            "{n} of {rows} rows have nothing to learn (no assistant's message, or none whose loss or weight is not 0) and were "
            "left out, the first: {first}.",
        ),
        "other_roles": (
            "warning",
            "{n} rows have messages of other roles than system, developer, user, assistant and tool, which are never learnt (an "
            "answer's role is assistant). The first: {first}.",
        ),
        "hidden_tools": (
            "warning",
            "{n} rows have tools, and the chat template shows none of them to the model. The first: {first}.",
        ),
        "cut": ("warning", f"{{n}} conversations were cut to {limit} tokens (data.truncation={config.truncation})."),
        "answers_without_end": (
            "warning",
            f"{{n}} answers lost their end by that, so the model does not learn to stop there, the first: {{first}}. Raise "
            f"{limit} to learn them whole.",
        ),
        "answers_lost": ("warning", "{n} answers were cut off as a whole by that, the first: {first}."),
        "nothing_left": (
            "warning",
            "{n} conversations had nothing left to learn after it and were left out, the first: {first}.",
        ),
        "empty": (
            "warning",
            "{n} answers are empty (no text, or white space alone): what is learnt of them is to end at once. The first: "
            "{first}. Leave such rows out.",
        ),
        "empty_prompts": (
            "warning",
            "{n} of {rows} rows have nothing but empty messages (no text, or white space alone) before what is learnt, so "
            "nothing is asked there. The first: {first}. Leave such rows out, or name the column that holds the question.",
        ),
        "added_end": (
            "warning",
            "The chat template writes no token that ends a turn: behind the last answer of {n} sequences the end-of-sequence "
            "token was put, so that the model learns to stop.",
        ),
        "without_end": (
            "warning",
            "Behind {n} answers stands no token that ends the turn: the model does not learn to stop there. The first: {first}.",
        ),
        "unwritten": (
            "warning",
            "The chat template has no place for {n} thoughts (reasoning_content) or texts beside tool calls: they are not "
            "learnt. The first: {first}.",
        ),
        "templated": (
            "warning",
            "{n} rows hold the chat template's own tokens in the text of their messages: they were templated before, and the "
            "template was applied to them again. The first: {first}.",
        ),
        "several": (
            "note",
            "{n} conversations became several sequences, since the chat template writes earlier answers differently once a "
            "conversation goes on (data.ignore_input_ids_mismatch=true): each answer is learnt behind the prompt that "
            "generation would have seen.",
        ),
        "cut_tokens": (
            "note",
            "In {n} sequences a token lay across the beginning or end of an answer; it was made two, as generation gives them.",
        ),
    }
    for name, (level, text) in sentences.items():
        if notes.get(name):
            said.append((level, text.format(n=f"{notes[name]:,}", rows=f"{num_rows:,}", first=first.get(name, ""))))
    return said
