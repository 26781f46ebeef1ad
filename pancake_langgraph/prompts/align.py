"""Finding shapes: one real call is aligned with the state that its node had read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pancake_langgraph._types import WireObject
from pancake_langgraph.prompts.fields import (
    MAX_TEXT_CHARS,
    Fields,
    Form,
    Hole,
    WireMemo,
    is_messages,
    join,
    lists_in,
    texts_in,
)
from pancake_langgraph.prompts.identity import same_message
from pancake_langgraph.prompts.parts import Fixed, Keep, Part, Slice, Text, lay_out
from pancake_langgraph.prompts.shape import PromptShape

#: Texts shorter than this stand in a prompt by chance too often; a loose reading takes them between word edges.
MIN_HOLE_CHARS: Final = 4
#: Texts of this length hardly stand anywhere by chance; one reading takes only such.
SURE_HOLE_CHARS: Final = 16
#: Texts of a state that one message is searched for.
MAX_TEXTS: Final = 96
MAX_SEPARATOR_CHARS: Final = 24
#: Characters that the searches of one alignment may read.
SEARCH_BUDGET_CHARS: Final = 1_000_000
#: Message comparisons that one alignment may make.
COMPARISONS: Final = 4_000
#: Places at which one value is looked for in one message.
MAX_PLACES: Final = 16
MAX_RANK: Final = 1_000
_FILTERS: Final = (
    frozenset[str](),
    frozenset({"system"}),
    frozenset({"tool", "call"}),
    frozenset({"system", "tool", "call"}),
    frozenset({"tool"}),
    frozenset({"system", "assistant", "tool", "call"}),
)
_LAYOUTS: Final = ("", "paired", "short", "strict")
#: How a prompt is read: whether "the last n" is likelier than "all", and how long a value of the state has to be.
_READINGS: Final = ((False, MIN_HOLE_CHARS), (True, MIN_HOLE_CHARS), (False, 1), (False, SURE_HOLE_CHARS))


def shapes_of(
    messages: Sequence[WireObject], fields: Fields, memo: WireMemo, *, literal_head: int
) -> list[PromptShape]:
    """Return the ways in which `messages` can be made of `fields`, the likelier first, and the literal one last.

    The first `literal_head` messages are known to be constant.
    """
    lists = {name: memo.wire(value) for name, value in fields.items() if is_messages(value)}
    slices, texts = _Slices(messages, lists), _Texts(fields)
    found: list[PromptShape] = []
    for prefers_last, shortest in _READINGS:
        parts: list[Part] = []
        position = 0
        while position < len(messages):
            part: Part | None = None
            size = 0
            if position >= literal_head:
                size, part = slices.at(position, prefers_last=prefers_last)
            if part is None:
                size, part = 1, literal(messages[position])
                if isinstance(part, Text) and position >= literal_head:
                    part = texts.filled(part, position, shortest)
            parts.append(part)
            position += size
        shape = PromptShape(tuple(parts))
        found += [shape, shape.general_part()]
    found.append(PromptShape(tuple(literal(message) for message in messages)))
    return [shape for n, shape in enumerate(found) if shape.parts and shape not in found[:n]]


def literal(message: WireObject) -> Part:
    """Return a message as a part without holes."""
    content, role = message.get("content"), message.get("role")
    if isinstance(content, str) and isinstance(role, str) and not message.keys() - {"role", "content", "name"}:
        return Text(role, (content,))
    return Fixed(message)


@dataclass(frozen=True, slots=True)
class _Tail:
    """The messages of a field that a filter leaves, with how far from the end each of them stands.

    `lasts` are those distances by mark, `results` those of tool results; the longest first.
    """

    field: str
    without: frozenset[str]
    kept: tuple[WireObject, ...]
    lasts: Mapping[object, Sequence[int]]
    results: Sequence[int]

    @staticmethod
    def of(field: str, without: frozenset[str], wire: Sequence[WireObject]) -> _Tail:
        """Prepare one list of messages."""
        kept = Keep(without).of(wire)
        lasts: dict[object, list[int]] = {}
        for distance, message in zip(range(len(kept), 0, -1), kept, strict=True):
            lasts.setdefault(_mark(message), []).append(distance)
        results = [len(kept) - n for n, message in enumerate(kept) if message.get("role") == "tool"]
        return _Tail(field, without, kept, lasts, results[-MAX_PLACES:])


class _Slices:
    """Finds runs of state messages in a prompt.  The work for one alignment is bounded."""

    def __init__(self, messages: Sequence[WireObject], lists: dict[str, tuple[WireObject, ...]]) -> None:
        self._messages = messages
        self._budget = COMPARISONS
        self._lists = lists
        self._tails = [_Tail.of(field, without, wire) for field, wire in lists.items() for without in _FILTERS]
        self._starts: dict[object, list[tuple[int, Slice, Sequence[WireObject]]]] = {}
        self._found: dict[int, list[tuple[int, int, Slice]]] = {}
        for rank, (field, keep, taken) in enumerate(self._variants()):
            if taken:
                self._starts.setdefault(_mark(taken[0]), []).append((rank, Slice(field, keep), taken))

    def at(self, position: int, *, prefers_last: bool) -> tuple[int, Slice | None]:
        """Return the longest run that stands at `position`, with its length; of equal ones the likeliest."""
        found = self._found.get(position)
        if found is None:
            found = self._found[position] = list(self._runs(position))
        if not found:
            return 0, None
        longest = max(size for size, _, _ in found)
        runs = [(bool(s.keep.last) != prefers_last, rank, s) for size, rank, s in found if size == longest]
        return longest, min(runs, key=lambda run: run[:2])[2]

    def _variants(self) -> Iterator[tuple[str, Keep, Sequence[WireObject]]]:
        for field, wire in self._lists.items():
            for layout in _LAYOUTS:
                if layout and lay_out(wire, layout) == list(wire):
                    continue
                for without in _FILTERS:
                    keep = Keep(without, layout=layout)
                    yield field, keep, keep.of(wire)
                keep = Keep(but_last=True, layout=layout)
                yield field, keep, keep.of(wire)

    def _runs(self, position: int) -> Iterator[tuple[int, int, Slice]]:
        for rank, part, taken in self._starts.get(_mark(self._messages[position]), ()):
            if self._stands(taken, position):
                yield len(taken), rank, part
        for rank, tail in enumerate(self._tails, MAX_RANK):
            for keep, taken in self._lasts(tail, position):
                if self._stands(taken, position):
                    yield len(taken), rank, Slice(tail.field, keep)
                    break

    def _lasts(self, tail: _Tail, position: int) -> Iterator[tuple[Keep, Sequence[WireObject]]]:
        """Yield "the last n" that may stand at `position`, the longest first.

        A history that was cut between a call and its result begins with the result, which the chat model drops.
        """
        mark, rest = _mark(self._messages[position]), len(self._messages) - position
        for last in tail.lasts.get(mark, ()):
            if last <= rest:
                yield Keep(tail.without, last=last), tail.kept[-last:]
        for last in tail.results:
            if self._budget <= 0:
                return
            if last <= rest + 1:
                self._budget -= last
                laid = lay_out(tail.kept[-last:], "paired")
                if laid and _mark(laid[0]) == mark:
                    yield Keep(tail.without, last=last, layout="paired"), laid

    def _stands(self, taken: Sequence[WireObject], position: int) -> bool:
        if not taken or len(taken) > len(self._messages) - position:
            return False
        for offset, ours in enumerate(taken):
            self._budget -= 1
            if self._budget <= 0 or not same_message(ours, self._messages[position + offset]):
                return False
        return True


class _Texts:
    """Finds values of the state in the messages of a prompt.  The work for one alignment is bounded."""

    def __init__(self, fields: Fields) -> None:
        self._texts = sorted(texts_in(fields), key=lambda found: -len(found[1]))[:MAX_TEXTS]
        self._lists = list(lists_in(fields))[:MAX_TEXTS]
        self._budget_chars = SEARCH_BUDGET_CHARS
        self._found: dict[int, list[tuple[Hole, str, list[int]]]] = {}

    def filled(self, part: Text, position: int, shortest: int) -> Text:
        """Return a literal text with holes where values of at least `shortest` characters stand in it."""
        content = "".join(piece for piece in part.pieces if isinstance(piece, str))
        found = self._found.get(position)
        if found is None:
            found = self._found[position] = list(self._places(content)) if len(content) <= MAX_TEXT_CHARS else []
        spans: list[tuple[int, int, Hole]] = []
        for hole, text, starts in found:
            if len(text) < shortest:
                continue
            for start in starts:
                end = start + len(text)
                if all(end <= taken or start >= until for taken, until, _ in spans):
                    spans.append((start, end, hole))
        pieces: list[str | Hole] = []
        done = 0
        for start, end, hole in sorted(spans, key=lambda span: span[0]):
            if start > done:
                pieces.append(content[done:start])
            pieces.append(hole)
            done = end
        if done < len(content) or not pieces:
            pieces.append(content[done:])
        return Text(part.role, tuple(pieces))

    def _places(self, content: str) -> Iterator[tuple[Hole, str, list[int]]]:
        """Yield the texts that stand in `content` with their places, the longest first."""
        texts = [(hole, text) for hole, text in self._texts if len(text) <= len(content)]
        for path, items in self._lists:
            self._budget_chars -= len(content)
            if self._budget_chars > 0 and sum(map(len, items)) >= MIN_HOLE_CHARS:
                separator = separator_in(content, items)
                if separator:
                    texts.append((Hole(path, Form.JOINED, separator), join(items, separator)))
        for hole, text in sorted(texts, key=lambda found: -len(found[1])):
            starts: list[int] = []
            start = -1
            while self._budget_chars > 0 and len(starts) < MAX_PLACES:
                self._budget_chars -= len(content) - max(start, 0)
                start = content.find(text, start + 1)
                if start < 0:
                    break
                if len(text) >= MIN_HOLE_CHARS or _stands_alone(content, start, start + len(text)):
                    starts.append(start)
            if starts:
                yield hole, text, starts


def _mark(message: WireObject) -> object:
    """Return what two forms of one message have in common at a glance."""
    content = message.get("content") or ""
    return message.get("role"), content if isinstance(content, str) else None


def separator_in(content: str, items: Sequence[str]) -> str:
    """Return what stands between the items where `content` holds them joined; empty when it does not.

    Of a single item nothing can be told; a line break is the likeliest.
    """
    if len(items) == 1:
        return "\n" if len(items[0]) >= MIN_HOLE_CHARS and items[0] in content else ""
    start = content.find(items[0])
    while start >= 0:
        behind = start + len(items[0])
        following = content.find(items[1], behind + 1, behind + MAX_SEPARATOR_CHARS + len(items[1]))
        if following > 0:
            between = content[behind:following]
            has_letters = any(letter.isalpha() for letter in between)
            for separator in dict.fromkeys((between, re.sub(r"\b2\b", "{n}", between))):
                if has_letters and len(items) == 2 and len(items[0]) < MIN_HOLE_CHARS:
                    continue  # two short items with words between them stand in many texts
                if content.startswith(join(items, separator), start):
                    return separator
        start = content.find(items[0], start + 1)
    return ""


def _stands_alone(content: str, start: int, end: int) -> bool:
    before, behind = content[start - 1 : start], content[end : end + 1]
    return not (before.isalnum() or behind.isalnum())
