"""The texts of a conversation's beginnings, all from one rendering of it, where it is proven that they are what the chat template
would write for each.

Most templates write message after message and read nothing of what comes later. Whether one does so cannot be told from texts,
so it is watched: the template gets a list of messages that notes what is read of it and when. The text of the first n messages
is then what was written before message n was asked for, and what the template writes behind its loop, if

- nothing but the loop asked for message n or a later one, when the text of message n - 1 was written to its end (no length of
  the list, no last message, no ``loop.last``), so that until then everything went as it does without the later messages;
- what stands behind the loop reads no message and no variable that the template sets, so that it is the same behind each of them.

A beginning for which that does not hold, in this conversation, has to be rendered.
"""

import json
import operator
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NoReturn

from jinja2 import Template, nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

from burnish.render.prompt import Messages
from burnish.render.spans import Span

SEEN_BY_TEMPLATES = "{{ [messages, tools] | tojson }}"
"""A chat template that writes what chat templates get of a conversation."""

# Stands between the messages' texts; where a conversation holds it, there are more of them than messages.
_BOUND = "\x00burnish\x00"
_OVER, _BEGIN, _END = "burnish_over", "burnish_begin", "burnish_end"
# What gives another value at every call.
_RANDOM = {"random", "lipsum"}


@dataclass(frozen=True, slots=True)
class Prefixes:
    """A rendered conversation, and the text of each of its beginnings.

    Attributes:
        text: of all messages.
        skipped: messages at the beginning that the template's loop leaves out (a system message that is written before it).
        bounds: where message ``skipped`` begins, where the next one, ..., where what is behind the loop begins.
        unproven: lengths of beginnings whose text is not known.
    """

    text: str
    skipped: int
    bounds: tuple[int, ...]
    unproven: frozenset[int]

    def of(self, number: int) -> str:
        """The text of the first ``number`` messages."""
        return self.text[: self.end(number)] + self.text[self.bounds[-1] :]

    def end(self, number: int) -> int:
        """Where their text ends, without what is behind the loop."""
        return self.bounds[max(0, number - self.skipped)]

    def marks(self, number: int, marks: tuple[Span, ...]) -> tuple[Span, ...]:
        """Of the places marked as generated, ascending, those in the first ``number`` messages."""
        return marks[: bisect_left(marks, (self.end(number), 0))]


def prefixes_of(
    source: str, messages: Messages, variables: Mapping[str, Any], *, add_generation_prompt: bool
) -> Prefixes | None:
    """The conversation rendered with its messages watched; None where its beginnings are not proven to be those of its text.

    Args:
        source: the chat template.
        messages: as templates get them.
        variables: all others of the template.

    Raises:
        Exception: what the template raises.
    """
    template = _watching(source)
    if template is None:
        return None
    watch = _Watch(len(messages))
    written = template.render(
        **variables,
        messages=_Watched(messages, watch),
        add_generation_prompt=add_generation_prompt,
        **{_OVER: watch.over, _BEGIN: watch.begin, _END: watch.end},
    )
    parts = written.split(_BOUND)
    if not watch.is_proof or watch.skipped is None or len(parts) != len(messages) - watch.skipped + 2:
        return None
    if watch.unproven >= set(range(1, len(messages))):
        return None
    bounds = tuple(accumulate(map(len, parts[:-1])))
    return Prefixes("".join(parts), watch.skipped, bounds, frozenset(watch.unproven) - {len(messages)})


def seen_by_templates(written: str) -> tuple[Messages, Any]:
    """Messages and tools of what `SEEN_BY_TEMPLATES` wrote."""
    messages, tools = json.loads(written)
    return messages, tools


@lru_cache(maxsize=16)
def _watching(source: str) -> Template | None:
    """The template, saying where each round of its last loop begins and ends; None where no such loop can be followed by what is
    the same behind every message."""
    environment = _compile_jinja_template(source).environment
    tree = environment.parse(source)
    places = [place for place, node in enumerate(tree.body) if isinstance(node, nodes.For)]
    if not places or _names(tree) & _RANDOM or any(node.name in _RANDOM for node in tree.find_all(nodes.Filter)):
        return None
    loop, behind = tree.body[places[-1]], tree.body[places[-1] + 1 :]
    assert isinstance(loop, nodes.For)
    if loop.test is not None or loop.else_ or loop.recursive:
        return None
    read = set().union(*(_names(node) for node in behind))
    if read & ({"messages"} | _set_names(tree)) or any(_is_own_scope(node) for part in behind for node in _all(part)):
        return None
    loop.iter = _call(_OVER, loop.iter)  # type: ignore[arg-type]  # declared as any node
    loop.body = [nodes.Output([_call(_BEGIN)]), *loop.body, nodes.Output([_call(_END)])]
    code = environment.compile(tree.set_environment(environment))
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


def _all(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    yield from node.find_all(nodes.Node)


def _names(node: nodes.Node) -> set[str]:
    return {name.name for name in _all(node) if isinstance(name, nodes.Name)}


def _set_names(tree: nodes.Template) -> set[str]:
    """Every name to which the template gives a value anywhere."""
    stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    stored |= {reference.name for reference in tree.find_all(nodes.NSRef)}
    return stored | {macro.name for macro in tree.find_all(nodes.Macro)}


def _is_own_scope(node: nodes.Node) -> bool:
    """Whether what happens there is not told by the names in it."""
    return isinstance(
        node, nodes.CallBlock | nodes.Block | nodes.Include | nodes.Import | nodes.FromImport | nodes.Extends
    )


def _call(name: str, *arguments: nodes.Expr) -> nodes.Expr:
    return nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)


class _ReadsAheadError(Exception):
    """The template asked for what a beginning of the conversation does not have."""


class _Watch:
    """What a template has read of its messages, in the order of time.

    Args:
        num_messages: that there are.

    Attributes:
        skipped: messages before those of the loop; None: it has not come.
        unproven: lengths of beginnings of which more was read than they have.
    """

    def __init__(self, num_messages: int) -> None:
        self.skipped: int | None = None
        self.unproven: set[int] = set()
        self._num_messages = num_messages
        # The last message that is in every beginning with which the template comes as far as this.
        self._current = 0
        self._num_rounds = 0
        self._is_inside = False
        # What the loop has asked for: its next round has to begin with it at once.
        self._pending: int | None = None
        # Templates may catch what is raised.
        self._has_failed = False

    @property
    def is_behind(self) -> bool:
        """Whether the loop went through all messages."""
        return self._num_rounds > 0 and self._current == self._num_messages - 1 and not self._is_inside

    @property
    def is_proof(self) -> bool:
        """Whether the unproven beginnings are all that may be others than what was written."""
        return self.is_behind and not self._has_failed and self._pending is None

    def fail(self) -> NoReturn:
        """Ends the rendering: what was read tells a beginning from a longer one, whichever they are."""
        self._has_failed = True
        raise _ReadsAheadError

    def read(self, number: int) -> None:
        """Message ``number`` is read, or that it is there."""
        if self.is_behind or self._pending is not None:
            self.fail()
        self.unproven.update(range(self._current + 1, number + 1))

    def over(self, messages: Any) -> Any:
        """The loop begins, over these."""
        if not isinstance(messages, _Watched) or self.skipped is not None:
            self.fail()
        self.skipped = messages._first
        return messages

    def ask(self, number: int) -> None:
        """An iteration asks for message ``number``, or whether there is one more."""
        if self.is_behind and number == self._num_messages:
            return
        if self.skipped is None or self._is_inside or self.is_behind or number != self._next:
            self.read(number)
        else:
            self._pending = number

    def begin(self) -> str:
        """A round of the loop begins."""
        number = self._next
        # Without having been asked for now, where it was in the round before.
        if self._is_inside or (self._pending != number and number not in self.unproven):
            self.fail()
        self._current, self._pending, self._is_inside = number, None, True
        self._num_rounds += 1
        return _BOUND if self._num_rounds == 1 else ""

    def end(self) -> str:
        """It ends."""
        self._is_inside = False
        return _BOUND

    @property
    def _next(self) -> int:
        return (self.skipped or 0) if self._num_rounds == 0 else self._current + 1


class _Watched(Sequence[Any]):
    """Messages from number ``first`` on, as a list that is watched. It is none, so that nothing reads it unseen."""

    __hash__ = None  # type: ignore[assignment]  # as of lists

    def __init__(self, messages: Messages, watch: _Watch, first: int = 0) -> None:
        self._messages = messages
        self._watch = watch
        self._first = first

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            if key.stop is not None or key.step is not None or (key.start or 0) < 0:
                self._watch.fail()
            return _Watched(self._messages, self._watch, self._first + (key.start or 0))
        number = self._first + operator.index(key)
        if number < self._first:
            self._watch.fail()
        self._watch.read(number)
        return self._messages[number]

    def __iter__(self) -> Iterator[Any]:
        for number in range(self._first, len(self._messages)):
            self._watch.ask(number)
            yield self._messages[number]
        self._watch.ask(len(self._messages))

    def __bool__(self) -> bool:
        self._watch.read(self._first)
        return True

    def __len__(self) -> int:
        self._watch.fail()

    def __eq__(self, other: object) -> bool:
        self._watch.fail()

    def __repr__(self) -> str:
        self._watch.fail()
