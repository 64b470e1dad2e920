"""From conversations to token sequences with what is learnt of them: the assistant's answers, as generation has to give them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.render.faithful import check_answer, check_history
from burnish.render.prompt import Messages, encode_text, normalize_messages
from burnish.render.spans import Span, SpanEncoder, continue_ids
from burnish.render.turns import History, Turn, TurnReader
from burnish.utils.errors import DataError

LOSS_KEYS = ("loss", "weight")
"""The keys of a message that say whether it is learnt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSequence:
    """A token sequence, and what of it is learnt.

    Attributes:
        ids: of all tokens.
        spans: the learnt ones, [begin, end), ascending and disjoint; none begins at 0.
        turns: numbers of the messages that are learnt here.
        without_end: answers among them behind which no token ends the turn, so that the model does not learn to stop there.
        added_end: an end-of-sequence token was put behind the last answer, since the template writes none.
        cut_tokens: a token of the text lay across the beginning or end of an answer and was made two.
        unwritten: parts of the answers (thoughts, text beside calls of tools) for which the template has no place.
    """

    ids: list[int]
    spans: tuple[Span, ...]
    turns: tuple[int, ...] = ()
    without_end: int = 0
    added_end: bool = False
    cut_tokens: bool = False
    unwritten: int = 0


@dataclass
class _Group:
    """Turns that stand in one text as generation would have seen them."""

    text: str
    last: Turn
    turns: list[Turn] = field(default_factory=list)
    unwritten: int = 0


class ConversationRenderer:
    """Renders conversations for supervised fine-tuning.

    What is learnt of an answer is what generation would give for it: from where `burnish.render.render` of the messages before
    it ends, to the token that ends the turn. Nothing of other messages is learnt. A template that marks what is generated
    (``{% generation %}``) decides what of an answer is learnt; the token that ends the turn always is.

    Args:
        tokenizer: with its chat template.
        chat_template_kwargs: further variables of the template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(chat_template_kwargs or {})
        self._readers: dict[str, TurnReader] = {}
        self._encoder = SpanEncoder(tokenizer)

    def sequences(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        train_on: str = "all",
        turn_by_turn: bool = False,
    ) -> list[TrainingSequence]:
        """One sequence for a conversation that stays as it is while it goes on; none where nothing is to be learnt.

        Its ids are those of ``apply_chat_template`` on the messages up to the last learnt one (see `SpanEncoder.encode` for
        the one exception, and ``added_end``).

        Args:
            messages: may have ``loss`` (a boolean) or ``weight`` (0 or 1): an assistant's message with false or 0 is not learnt.
            tools: functions or JSON schemas that the template shows to the model.
            chat_template_kwargs: variables of the template for this conversation, on top of the renderer's.
            train_on: "all": every answer is learnt; "last": the last one alone.
            turn_by_turn: where the template writes an earlier answer differently once the conversation goes on (drops its
                thoughts, say), learn each such answer in a sequence of its own, which ends with it.

        Raises:
            DataError: a message is malformed, or the template refuses the conversation; an answer has no prompt; or the template
                writes an earlier answer differently later, and ``turn_by_turn`` is false.
            ModelError: the tokenizer has no chat template.
        """
        normal, wanted = learnt_messages(messages, train_on)
        reader = self._reader(chat_template_kwargs)
        history = History(reader, normal[: max(wanted, default=0) + 1], tools)
        groups: list[_Group] = []
        for number in reversed(wanted):
            turn = reader.turn(history, number)
            unwritten = check_answer(normal[number], turn)
            holder = next((group for group in groups if group.text.startswith(turn.text)), None)
            if holder is not None:
                holder.turns.append(turn)
                holder.unwritten += unwritten
                continue
            if groups and not turn_by_turn:
                raise DataError(
                    f"The chat template writes the answer in message {number} differently once the conversation goes on (drops "
                    f"its thoughts, say), so in one sequence it would not be what generation gives. Set "
                    f"data.ignore_input_ids_mismatch=true to learn each such answer in a sequence of its own, or "
                    f"data.train_on=last to learn the last one alone."
                )
            if not groups:
                check_history(history, number, turn.text[: turn.begin])
            groups.append(self._start_group(turn, unwritten))
        return [self._encode(group) for group in reversed(groups)]

    def text_pair(self, prompt: str, response: str) -> TrainingSequence:
        """A prompt and its answer as plain text, for a tokenizer without chat template: `burnish.render.render` of the prompt,
        then the answer and the end-of-sequence token.

        Raises:
            DataError: the prompt has no tokens, or the answer cannot be tokenized behind it.
        """
        ids = encode_text(prompt, self._tokenizer)
        if not ids:
            raise DataError(
                f"The prompt {prompt!r} has no tokens: a model needs at least one to go on from. Give it a text, or leave it out."
            )
        answer = continue_ids(ids, response, self._tokenizer) if response else []
        end = self._tokenizer.eos_token_id
        has_end = bool(answer) and answer[-1] == end
        if end is not None and not has_end:
            answer = [*answer, int(end)]
        spans = ((len(ids), len(ids) + len(answer)),) if answer else ()
        return TrainingSequence(ids=[*ids, *answer], spans=spans, turns=(1,), without_end=int(end is None))

    def ends_turns(self, chat_template_kwargs: Mapping[str, Any] | None = None) -> bool:
        """Whether the template writes a token that ends a turn behind an answer."""
        return self._reader(chat_template_kwargs).ends_turns

    def _reader(self, chat_template_kwargs: Mapping[str, Any] | None) -> TurnReader:
        kwargs = {**self._kwargs, **(chat_template_kwargs or {})}
        name = repr(sorted(kwargs.items()))
        if name not in self._readers:
            self._readers[name] = TurnReader(self._tokenizer, kwargs)
        return self._readers[name]

    def _start_group(self, turn: Turn, unwritten: int) -> _Group:
        if turn.end_token is None and self._tokenizer.eos_token is not None:
            return _Group(turn.text + str(self._tokenizer.eos_token), turn, [turn], unwritten)
        return _Group(turn.written.text, turn, [turn], unwritten)

    def _encode(self, group: _Group) -> TrainingSequence:
        turns = sorted(group.turns, key=lambda turn: turn.begin)
        added_end = group.last.end_token is None and self._tokenizer.eos_token is not None
        spans: list[Span] = []
        for turn in turns:
            end = len(group.text) if added_end and turn is group.last else turn.end
            spans += _learnt(turn, end, group.last.written.marks)
        ids, places, cut_tokens = self._encoder.encode(group.text, spans)
        return TrainingSequence(
            ids=ids,
            spans=tuple((begin, end) for begin, end in places if end > begin),
            turns=tuple(turn.number for turn in turns),
            without_end=sum(turn.end_token is None for turn in turns) - added_end,
            added_end=added_end,
            cut_tokens=cut_tokens,
            unwritten=group.unwritten,
        )


def learnt_messages(messages: Sequence[Mapping[str, Any]], train_on: str = "all") -> tuple[Messages, list[int]]:
    """The messages without their ``loss`` and ``weight``, and the numbers of those that are learnt.

    Raises:
        DataError: a message is malformed, its ``loss`` or ``weight`` is neither yes nor no, one that is not the assistant's is to
            be learnt, or one that is to be learnt is the first.
    """
    normal = normalize_messages(messages)
    wanted = []
    for number, message in enumerate(normal):
        asked = [_is_learnt(message, key, number) for key in LOSS_KEYS if message.get(key) is not None]
        for key in LOSS_KEYS:
            message.pop(key, None)
        if message["role"] != "assistant":
            if any(asked):
                raise DataError(
                    f"Message {number} ({message['role']}) is to be learnt (loss or weight): only an assistant's can be. Leave "
                    f"it out there."
                )
        elif all(asked):
            wanted.append(number)
    if train_on == "last":
        wanted = wanted[-1:]
    if wanted and wanted[0] == 0:
        raise DataError(
            "The conversation begins with an assistant's message, which answers nothing. Put the user's message before it, "
            "leave it out, or give it loss: false."
        )
    return normal, wanted


def _is_learnt(message: Mapping[str, Any], key: str, number: int) -> bool:
    value = message[key]
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise DataError(
        f"Message {number} has {key}: {value!r}. It is true or false (or 1 or 0): a message is learnt or not, by parts it is not."
    )


def _learnt(turn: Turn, end: int, marks: tuple[Span, ...] | None) -> Iterator[Span]:
    """What of a turn is learnt, as places in its text: what the template marks, if it marks anything, and the end token."""
    if marks is None:
        yield turn.begin, end
        return
    last_begin = end if turn.end_token is None else turn.end_token[0]
    inside = [(max(begin, turn.begin), min(stop, last_begin)) for begin, stop in marks]
    kept = [span for span in inside if span[1] > span[0]]
    touches_end = any(begin < end and stop > last_begin for begin, stop in marks)
    if not kept and not touches_end:
        return
    if end > last_begin:
        kept.append((last_begin, end))
    begin, stop = kept[0]
    for next_begin, next_stop in kept[1:]:
        if next_begin > stop:
            yield begin, stop
            begin = next_begin
        stop = next_stop
    yield begin, stop
