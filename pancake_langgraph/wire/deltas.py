"""Streamed tool calls, joined whatever way a server splits them.

Servers differ: an id in every piece or only in the first; no index; index 0 for every parallel call; the name sent
twice; arguments split inside a number, an escape or a surrogate pair; no arguments at all for a call without any.  A
piece goes to a call only when that is certain.  What cannot be joined raises; what was cut short becomes an invalid
call, whose emitted text no lenient JSON parser can complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pancake_langgraph._errors import MalformedStream
from pancake_langgraph.wire.json_text import decoded

_MAX_CALLS: Final = 256


@dataclass(frozen=True, slots=True)
class ToolPiece:
    """One normalised piece: `index` is unique per call, `id` and `name` come once, `arguments` are to be joined."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class JoinedCall:
    """One whole call; `problem` says why it must not be executed, `None` when it may."""

    index: int
    id: str
    name: str
    arguments: str
    problem: str | None = None


class SurrogateJoiner:
    """Joins UTF-16 halves that a server escaped in two pieces.  Not thread-safe."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        """Return `text` with halves joined; a trailing first half waits for the next piece."""
        text = self._held + text
        self._held = ""
        if text and "\ud800" <= text[-1] <= "\udbff":
            self._held, text = text[-1], text[:-1]
        return _joined(text)

    def finish(self) -> str:
        """Return what was still waiting, as a replacement character."""
        held, self._held = self._held, ""
        return _joined(held)


def _joined(text: str) -> str:
    if not any("\ud800" <= char <= "\udfff" for char in text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _Call:
    __slots__ = ("arguments", "id", "index", "name", "text", "wire_index")

    def __init__(self, index: int, wire_index: int | None) -> None:
        self.index = index
        self.wire_index = wire_index
        self.id: str | None = None
        self.name: str | None = None
        self.arguments = ""
        self.text = SurrogateJoiner()

    @property
    def complete(self) -> bool:
        return _problem_of(self.arguments) is None and bool(self.arguments.strip())


class ToolCallJoiner:
    """Joins the tool-call deltas of one answer.  Not thread-safe."""

    def __init__(self, *, id_seed: str = "call") -> None:
        """`id_seed` makes ids for calls that the server left without one; unique per answer."""
        self._calls: list[_Call] = []
        self._id_seed = id_seed

    @property
    def has_calls(self) -> bool:
        """Whether any call has begun."""
        return bool(self._calls)

    def feed(self, entries: Sequence[Any]) -> list[ToolPiece]:
        """Take the `tool_calls` of one delta.

        Raises:
            MalformedStream: if an entry is no tool-call delta, or cannot be given to one call with certainty.
        """
        pieces: list[ToolPiece] = []
        touched: set[int] = set()
        for entry in entries:
            wire_index, wire_id, name, arguments = _fields(entry)
            call = self._call_for(wire_index, wire_id, name, arguments, touched)
            touched.add(call.index)
            piece = _take(call, wire_id, name, arguments)
            if piece is not None:
                pieces.append(piece)
        return pieces

    def finish(self, finish_reason: str | None) -> tuple[list[ToolPiece], list[JoinedCall]]:
        """End the answer.

        Returns:
            The pieces still missing (made ids, `{}` for absent arguments, what spoils an invalid call), and all calls.
        """
        pieces: list[ToolPiece] = []
        calls: list[JoinedCall] = []
        for call in self._calls:
            tail = call.text.finish()
            call.arguments += tail
            cut = finish_reason == "length" and call is self._calls[-1]
            problem = _final_problem(call, cut=cut, finish_reason=finish_reason)
            made_id = None if call.id else f"{self._id_seed}-{call.index}"
            call.id = call.id or made_id
            if problem is not None:
                tail += _spoiler(call.arguments)
            elif not call.arguments.strip():
                tail = call.arguments = "{}"
            if tail or made_id:
                pieces.append(ToolPiece(call.index, made_id, None, tail))
            calls.append(JoinedCall(call.index, call.id or "", call.name or "", call.arguments, problem))
        return pieces, calls

    def _call_for(
        self, wire_index: int | None, wire_id: str | None, name: str | None, arguments: str, touched: set[int]
    ) -> _Call:
        if wire_id and (same := [call for call in self._calls if call.id == wire_id]):
            if wire_index is not None and same[-1].wire_index not in (None, wire_index):
                raise MalformedStream(_UNJOINABLE + "one id came under two indexes")
            return same[-1]
        if wire_index is None:
            return self._without_index(wire_id, name, arguments, touched)
        here = [call for call in self._calls if call.wire_index == wire_index]
        if not here:
            return self._new(wire_index)
        if wire_id and here[-1].id:
            if name:
                return self._new(wire_index)
            if len(here) > 1:
                raise MalformedStream(_UNJOINABLE + "a new id without a name under an index that several calls share")
            return here[-1]  # only the id changes from piece to piece
        if not wire_id and not name and len(here) > 1 and here[-1].complete:
            raise MalformedStream(_UNJOINABLE + "a piece without id or name under an index that several calls share")
        return self._same_or_next(here[-1], wire_index, name, arguments, touched)

    def _without_index(self, wire_id: str | None, name: str | None, arguments: str, touched: set[int]) -> _Call:
        if not self._calls:
            return self._new(None)
        last = self._calls[-1]
        if wire_id and last.id:
            if name:
                return self._new(None)
            if len(self._calls) > 1:
                raise MalformedStream(_UNJOINABLE + "a new id with neither index nor name")
            return last
        return self._same_or_next(last, None, name, arguments, touched)

    def _same_or_next(
        self, call: _Call, wire_index: int | None, name: str | None, arguments: str, touched: set[int]
    ) -> _Call:
        """Decide whether a piece continues `call` or begins the next one in the same place."""
        if not name:
            if call.complete and arguments.strip():
                raise MalformedStream(_UNJOINABLE + "arguments went on after a complete object")
            return call
        if call.index in touched and call.name:
            return self._new(wire_index)
        if call.name in (None, name) and not (call.complete and arguments.strip()):
            return call  # the name repeated
        if call.complete or not call.arguments.strip():
            return self._new(wire_index)
        raise MalformedStream(_UNJOINABLE + "another name came in the middle of a call's arguments")

    def _new(self, wire_index: int | None) -> _Call:
        if len(self._calls) >= _MAX_CALLS:
            raise MalformedStream(f"the server streamed more than {_MAX_CALLS} tool calls in one answer")
        call = _Call(len(self._calls), wire_index)
        self._calls.append(call)
        return call


_UNJOINABLE: Final = "streamed tool-call pieces cannot be joined without guessing: "


def _fields(entry: Any) -> tuple[int | None, str | None, str | None, str]:
    function = entry.get("function") if isinstance(entry, Mapping) else None
    if not isinstance(entry, Mapping) or not isinstance(function, Mapping | None):
        raise MalformedStream("a streamed tool call is not a JSON object with a `function` object")
    wire_index, wire_id = entry.get("index"), entry.get("id")
    name, arguments = (function or {}).get("name"), (function or {}).get("arguments")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    for label, value, kind in (
        ("index", wire_index, int),
        ("id", wire_id, str),
        ("name", name, str),
        ("arguments", arguments, str),
    ):
        if value is not None and not isinstance(value, kind):
            raise MalformedStream(
                f"a streamed tool call has {label} of type {type(value).__name__}, allowed is {kind.__name__} or null"
            )
    return wire_index, wire_id or None, name or None, arguments or ""


def _take(call: _Call, wire_id: str | None, name: str | None, arguments: str) -> ToolPiece | None:
    new_id = wire_id if wire_id and call.id is None else None
    new_name = name if name and call.name is None else None
    call.id = call.id or new_id
    call.name = call.name or new_name
    text = call.text.feed(arguments)
    call.arguments += text
    if new_id is None and new_name is None and not text:
        return None
    return ToolPiece(call.index, new_id, new_name, text)


def _problem_of(arguments: str) -> str | None:
    if not arguments.strip():
        return None
    try:
        value = decoded(arguments, strict=False)
    except ValueError:
        return "the arguments are not valid JSON"
    return None if isinstance(value, dict) else "the arguments are not a JSON object"


def _final_problem(call: _Call, *, cut: bool, finish_reason: str | None) -> str | None:
    problem = _problem_of(call.arguments)
    if cut and (problem is not None or not call.arguments.strip()):
        return "cut short: the output limit was reached inside the call (finish_reason 'length')"
    if problem is not None:
        return f"{problem} (finish_reason {finish_reason!r})"
    return None if call.name else f"the call has no tool name (finish_reason {finish_reason!r})"


def _spoiler(text: str) -> str:
    """Return what to append so that no parser that closes open brackets can make an object of `text`."""
    stack: list[str] = []
    inside = escaped = False
    for char in text:
        if inside:
            inside = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            inside = True
        elif char in "{[":
            stack.append(char)
        elif char in "}]" and stack:
            stack.pop()
    close_text = ('""' if escaped else '"') if inside else ""
    return close_text + ("}" if stack and stack[-1] == "[" else "]")
