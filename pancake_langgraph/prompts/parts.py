"""The parts a prompt is made of: texts with holes for state, slices of state messages, messages taken as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pancake_langgraph._types import WireObject
from pancake_langgraph.prompts.fields import NO_FORM, Fields, Hole, WireMemo, text_of
from pancake_langgraph.wire.messages import pair_tool_calls, short_tool_call_ids, strict_roles

VARIES: Final = "the rest of the message varies"


@dataclass(frozen=True, slots=True)
class Keep:
    """Which messages of a list a slice takes: none of the roles in `without`, then the `last` ones or all `but_last`.

    `last` 0 takes all.  `paired` and `strict` say how the chat model lays the taken ones out.
    """

    without: frozenset[str] = frozenset()
    last: int = 0
    but_last: bool = False
    layout: str = ""

    def of(self, messages: Sequence[WireObject]) -> tuple[WireObject, ...]:
        """Return the messages that are taken, in order."""
        taken = [m for m in messages if not self.drops(m)] if self.without else messages
        if self.but_last:
            taken = taken[:-1]
        if self.last:
            taken = taken[-self.last :]
        return tuple(lay_out(taken, self.layout))

    def drops(self, message: WireObject) -> bool:
        """Whether a message falls out by its role; `"call"` stands for assistant messages that call tools."""
        role = "call" if message.get("tool_calls") else message.get("role")
        return role in self.without

    @property
    def grows(self) -> bool:
        """Whether what is taken only gets longer when the list does."""
        return not self.last and not self.but_last


def lay_out(messages: Sequence[WireObject], layout: str) -> Sequence[WireObject]:
    """Apply one of the chat model's layouts: `"paired"`, `"short"` ids, `"strict"` roles, or none."""
    if not layout or NO_FORM in messages:
        return messages
    paired = pair_tool_calls(messages)
    if layout == "short":
        return short_tool_call_ids(paired)
    return strict_roles(paired) if layout == "strict" else paired


@dataclass(frozen=True, slots=True)
class Slice:
    """Messages of one state field."""

    field: str
    keep: Keep


@dataclass(frozen=True, slots=True)
class Text:
    """One message whose content is text: literal pieces and holes.  `is_cut` says that it goes on in an unknown way."""

    role: str
    pieces: tuple[str | Hole, ...]
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Fixed:
    """One message that is always the same and no plain text."""

    message: WireObject


Part = Slice | Text | Fixed


class Known(NamedTuple):
    """What is known of the state that a node will read.

    `fields` are the values, `unsure` the fields that may still be written before, `growing` the message fields that
    may only get longer.  With neither, the state is exact.  `all_unsure` says that fields which are not in `fields`
    may appear as well.
    """

    fields: Fields
    unsure: frozenset[str] = frozenset()
    growing: frozenset[str] = frozenset()
    all_unsure: bool = False

    def sure_of(self, field: str) -> bool:
        """Whether the field will be read with the value it has here."""
        return field in self.fields and field not in self.unsure and field not in self.growing and not self.all_unsure


class Rendering(NamedTuple):
    """The known beginning of a prompt: whole messages, then perhaps the beginning of one more (`is_cut`).

    `stop` says why it ends where it ends; empty when the shape was rendered to its end.  `is_complete` says that every
    part was rendered, as far as the shape knows it.
    """

    messages: tuple[WireObject, ...]
    is_cut: bool = False
    stop: str = ""
    is_complete: bool = False


def render(parts: Sequence[Part], known: Known, memo: WireMemo) -> Rendering:
    """Render as many parts as are certain."""
    messages: list[WireObject] = []
    for number, part in enumerate(parts, 1):
        if isinstance(part, Fixed):
            messages.append(part.message)
        elif isinstance(part, Slice):
            taken, stop = _slice(part, known, memo)
            messages += taken
            if stop:
                return _without_unknown(messages, Rendering((), stop=stop))
        else:
            text, stop = _fill(part, known)
            if stop and not text:
                return _without_unknown(messages, Rendering((), stop=stop))
            messages.append({"role": part.role, "content": text})
            if stop:
                is_complete = stop == VARIES and number == len(parts)
                return _without_unknown(messages, Rendering((), is_cut=True, stop=stop, is_complete=is_complete))
    return _without_unknown(messages, Rendering((), is_complete=True))


def _slice(part: Slice, known: Known, memo: WireMemo) -> tuple[Sequence[WireObject], str]:
    value = known.fields.get(part.field)
    if part.field in known.unsure or (known.all_unsure and part.field not in known.growing):
        return (), f"{part.field} may still change"
    if not isinstance(value, list | tuple):
        return (), f"{part.field} is not known"
    wire = memo.wire(value)
    if part.field in known.growing:
        if not part.keep.grows:
            return (), f"{part.field} may still grow"
        plain = Keep(part.keep.without).of(wire)
        return _settled(plain, part.keep.layout), f"{part.field} may still grow"
    return part.keep.of(wire), ""


def _settled(messages: Sequence[WireObject], layout: str) -> Sequence[WireObject]:
    """Lay out a list that may still grow: what the next message could change is left out."""
    if not layout or NO_FORM in messages:
        return messages
    answered = {m.get("tool_call_id") for m in messages if m.get("role") == "tool"}
    end = len(messages)
    for position, message in enumerate(messages):
        if any(call.get("id") not in answered for call in message.get("tool_calls") or ()):
            end = position
            break
    laid = lay_out(messages[:end], layout)
    if layout == "strict":  # the last one may be joined with what comes
        return laid[:-1]
    return [*laid, *lay_out(messages[end:], layout)[:1]] if end < len(messages) else laid


def _fill(part: Text, known: Known) -> tuple[str, str]:
    done: list[str] = []
    for piece in part.pieces:
        if isinstance(piece, str):
            done.append(piece)
            continue
        name = piece.path[0]
        if not known.sure_of(name):
            return "".join(done), f"{name} may still change" if name in known.fields else f"{name} is not known"
        text = text_of(known.fields, piece)
        if text is None:
            return "".join(done), f"{name} has no text"
        done.append(text)
    return "".join(done), VARIES if part.is_cut else ""


def _without_unknown(messages: list[WireObject], rest: Rendering) -> Rendering:
    """End before the first message that cannot be told in advance (no wire form, pictures)."""
    for position, message in enumerate(messages):
        if message is NO_FORM or not is_plain(message):
            why = "a message without wire form" if message is NO_FORM else "a message with other parts than text"
            return Rendering(tuple(messages[:position]), stop=why)
    return Rendering(tuple(messages), rest.is_cut, rest.stop, rest.is_complete)


def is_plain(message: WireObject) -> bool:
    """Whether a message's content is text only."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return True
    return isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content)


def chars_of(message: WireObject) -> int:
    """Return about how many characters a message adds to the prompt."""
    content: Any = message.get("content")
    calls = message.get("tool_calls")
    text = len(content) if isinstance(content, str) else len(str(content)) if content else 0
    return text + (len(str(calls)) if calls else 0) + 8
