"""Conversations read -> token sequences with what is learnt of them, cut to length; in this process or in several."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from burnish.config.sft import SFTDataConfig
from burnish.data.problems import Place, RowError
from burnish.data.readers import ReadRow
from burnish.data.sft_rows import Conversation, read_conversation
from burnish.render import (
    ConversationRenderer,
    TrainingSequence,
    is_blank,
    is_empty_message,
    is_empty_prompt,
    shows_tools,
    template_markers,
)
from burnish.utils.errors import DataError

Spans = list[tuple[int, int]]

# Those that chat templates know.
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})


@dataclass(kw_only=True, slots=True)
class PreparedSequence:
    """A sequence as the dataset keeps it.

    Attributes:
        ids: int32 [tokens].
        spans: [begin, end) of the learnt tokens; none begins at 0.
        length: tokens before it was cut.
    """

    ids: np.ndarray
    spans: Spans
    length: int


@dataclass(kw_only=True, slots=True)
class PreparedConversation:
    """A row as the dataset keeps it.

    Attributes:
        place: where it comes from.
        data_source: see `Conversation`.
        sequences: usually one; none where nothing is to be learnt.
        notes: how often what happened that the user should hear of, by the names of `burnish.data.sft_remarks`.
    """

    place: Place
    data_source: str
    sequences: list[PreparedSequence]
    notes: dict[str, int]


class ConversationPreparer:
    """Prepares rows, one by one.

    Args:
        tokenizer: renders the conversations.
        config: the ``data`` section.
    """

    workers_key = "data.render_workers"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.markers = template_markers(tokenizer)
        self._renderer = ConversationRenderer(tokenizer, config.apply_chat_template_kwargs)
        self._shows_tools: bool | None = None

    @property
    def num_workers(self) -> int:
        """Processes that share the work of large sets."""
        return self.config.render_workers

    def prepare(self, rows: Iterable[ReadRow]) -> Iterator[PreparedConversation | RowError]:
        """Each row in order, or what is wrong with it."""
        return (self._prepare(place, row) for place, row in rows)

    def _prepare(self, place: Place, row: dict[str, Any] | RowError) -> PreparedConversation | RowError:
        if isinstance(row, RowError):
            return row
        try:
            conversation = read_conversation(row, self.config)
        except RowError as error:
            return error.at(place)
        column = self.config.response_key or self.config.messages_key
        try:
            notes: Counter[str] = Counter()
            sequences = self._render(conversation, notes)
            kept = [one for one in (self._cut(sequence, notes) for sequence in sequences) if one is not None]
        except RowError as error:
            return error.at(place)
        except DataError as error:
            expected = f"a conversation that renders to at most {self.config.max_length} tokens"
            return RowError(str(error), place=place, column=column, seen=f"{row.get(column)!r:.80}", expected=expected)
        notes["nothing"] += not sequences
        notes["several"] += len(sequences) > 1
        return PreparedConversation(
            place=place,
            data_source=conversation.data_source,
            sequences=kept,
            notes={k: n for k, n in notes.items() if n},
        )

    def _render(self, conversation: Conversation, notes: Counter[str]) -> list[TrainingSequence]:
        config = self.config
        if conversation.messages is None and not self.tokenizer.chat_template and config.system_prompt is None:
            if conversation.tools:
                raise DataError("The row has tools, and a tokenizer without a chat template has no way to show them.")
            notes["empty"] += is_blank(conversation.response)
            notes["empty_prompts"] += is_empty_prompt(conversation.prompt)
            made = [self._text_pair(conversation.prompt, conversation.response)]
        else:
            messages = conversation.as_messages(config.system_prompt)
            thinking = conversation.enable_thinking
            made = self._renderer.sequences(
                messages,
                tools=conversation.tools or None,
                chat_template_kwargs={} if thinking is None else {"enable_thinking": thinking},
                train_on=config.train_on,
                turn_by_turn=config.ignore_input_ids_mismatch,
            )
            learnt = [messages[number] for sequence in made for number in sequence.turns]
            notes["empty"] += sum(map(is_empty_message, learnt))
            notes["empty_prompts"] += _asks_nothing(messages, made)
            notes["hidden_tools"] += bool(conversation.tools) and not self._has_place_for(conversation.tools, messages)
            notes["other_roles"] += any(message["role"] not in _ROLES for message in messages)
            notes["templated"] += any(marker in str(message) for marker in self.markers for message in messages)
        for sequence in made:
            notes["without_end"] += sequence.without_end
            notes["added_end"] += sequence.added_end
            notes["cut_tokens"] += sequence.cut_tokens
            notes["unwritten"] += sequence.unwritten
        return made

    def _text_pair(self, prompt: str, response: str) -> TrainingSequence:
        try:
            return self._renderer.text_pair(prompt, response)
        except DataError as error:
            if prompt.strip():
                raise
            key = self.config.prompt_key or "prompt"
            raise RowError(
                f"column {key!r}: {error}",
                column=key,
                seen=f"text ({prompt!r:.60})",
                expected="a text with a token or more",
            ) from error

    def _has_place_for(self, tools: list[dict[str, Any]], messages: list[Any]) -> bool:
        """Whether the chat template shows tools, as its first conversation that has any says."""
        if self._shows_tools is None:
            kwargs = self.config.apply_chat_template_kwargs
            self._shows_tools = shows_tools(messages, self.tokenizer, tools, kwargs)
        return self._shows_tools

    def _cut(self, sequence: TrainingSequence, notes: Counter[str]) -> PreparedSequence | None:
        """The sequence in at most ``data.max_length`` tokens; None where nothing to learn is left of it."""
        length, limit = len(sequence.ids), self.config.max_length
        ids, spans = sequence.ids, list(sequence.spans)
        if length > limit:
            if self.config.truncation == "error":
                raise DataError(
                    f"The conversation has {length} tokens, more than data.max_length={limit}. Raise the limit, or set "
                    f"data.truncation to right (its end is cut off) or left (its beginning)."
                )
            notes["cut"] += 1
            first = length - limit if self.config.truncation == "left" else 0
            ids = ids[first : first + limit]
            # The first token of a sequence is predicted by nothing.
            spans = [(max(begin - first, 1), min(end - first, limit)) for begin, end in spans]
            notes["answers_without_end"] += sum(end - first > limit > begin - first for begin, end in sequence.spans)
            notes["answers_lost"] += sum(end <= begin for begin, end in spans)
            spans = [(begin, end) for begin, end in spans if end > begin]
            if not spans:
                notes["nothing_left"] += 1
                return None
        return PreparedSequence(ids=np.asarray(ids, dtype=np.int32), spans=spans, length=length)


def _asks_nothing(messages: list[Any], made: list[TrainingSequence]) -> bool:
    """Whether all that stands before the first learnt answer is empty; not where nothing is learnt, which is told of itself."""
    first = min((number for sequence in made for number in sequence.turns), default=0)
    return first > 0 and is_empty_prompt(messages[:first])
