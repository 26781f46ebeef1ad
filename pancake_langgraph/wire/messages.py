"""Deterministic repairs of message lists in wire form.

Each function keeps what it need not change (the same objects in the same order), and what it adds depends only on what
stands before it, so that the prompt of one turn stays a prefix of the next.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pancake_langgraph._types import WireObject
from pancake_langgraph.wire.json_text import decoded

#: What stands for the result of a call that was never executed.
NOT_RUN: Final = "not run: this call was interrupted before it was executed"
INVALID: Final = "not run: the arguments of this call were cut short or are not valid JSON"

_SYSTEM: Final = frozenset({"system", "developer"})
_LEGAL_ID: Final = re.compile(r"[a-zA-Z0-9]{9}")
_ALPHABET: Final = string.digits + string.ascii_letters


def strict_roles(messages: Sequence[WireObject]) -> list[WireObject]:
    """Fit templates that allow one system message, first, and no two equal roles in a row.

    Leading system messages become one.  A later one becomes part of the user's turn where it stands, so that the
    bytes before it never change.  Neighbours of one role are joined with an empty line, also where another agent speaks
    (a supervisor's hand-over behind a worker's answer); tool results stay apart.
    """
    fitted: list[WireObject] = []
    for message in messages:
        role = message.get("role")
        if role in _SYSTEM:
            only_system = all(kept.get("role") == "system" for kept in fitted)
            message = {**message, "role": "system" if only_system else "user"}
        if fitted and _joinable(fitted[-1], message):
            fitted[-1] = _merged(fitted[-1], message)
        else:
            fitted.append(message)
    return fitted


def pair_tool_calls(messages: Sequence[WireObject]) -> list[WireObject]:
    """Bring every tool call and its result together.

    A result moves directly behind its call.  A call without a result gets one that says it was not run; a result
    without a call is dropped.  Arguments that are no JSON object are wrapped into one, since servers parse them.
    """
    slots: dict[int, list[WireObject | None]] = {}
    open_calls: dict[str, tuple[int, int]] = {}
    for position, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if message.get("role") == "assistant" and calls:
            slots[position] = [None] * len(calls)
            open_calls.update({str(call.get("id")): (position, nth) for nth, call in enumerate(calls)})
        elif message.get("role") == "tool":
            place = open_calls.pop(str(message.get("tool_call_id")), None)
            if place is not None:
                slots[place[0]][place[1]] = message
    return _with_results(messages, slots)


def short_tool_call_ids(messages: Sequence[WireObject]) -> list[WireObject]:
    """Map every tool-call id to nine letters or digits; the same id always maps to the same one."""
    mapped: list[WireObject] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [{**call, "id": short_id(str(call.get("id") or ""))} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        elif message.get("role") == "tool":
            message = {**message, "tool_call_id": short_id(str(message.get("tool_call_id") or ""))}
        mapped.append(message)
    return mapped


def short_id(tool_call_id: str) -> str:
    """Return nine letters or digits for an id; ids that are so already stay."""
    if _LEGAL_ID.fullmatch(tool_call_id):
        return tool_call_id
    number = int.from_bytes(hashlib.blake2b(tool_call_id.encode("utf-8", "replace"), digest_size=8).digest())
    digits = []
    for _ in range(9):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return "".join(digits)


def _with_results(messages: Sequence[WireObject], slots: Mapping[int, list[WireObject | None]]) -> list[WireObject]:
    paired: list[WireObject] = []
    for position, message in enumerate(messages):
        if message.get("role") == "tool":
            continue
        if position not in slots:
            paired.append(message)
            continue
        calls = [_parsable(call) for call in message["tool_calls"]]
        same = all(new is old for new, old in zip(calls, message["tool_calls"], strict=True))
        paired.append(message if same else {**message, "tool_calls": calls})
        for old, new, result in zip(message["tool_calls"], calls, slots[position], strict=True):
            reason = NOT_RUN if new is old else INVALID
            paired.append(result or {"role": "tool", "tool_call_id": old.get("id"), "content": reason})
    return paired


def _parsable(call: WireObject) -> WireObject:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        return call
    try:
        if isinstance(decoded(arguments or ""), dict):
            return call
    except ValueError:
        pass
    wrapped = json.dumps({"unparsed": arguments}, ensure_ascii=False) if arguments else "{}"
    return {**call, "function": {**function, "arguments": wrapped}}


def _joinable(left: WireObject, right: WireObject) -> bool:
    role = left.get("role")
    return role == right.get("role") and role != "tool" and not left.get("tool_calls")


def _merged(left: WireObject, right: WireObject) -> WireObject:
    """Join two messages of one role; a name they do not share is dropped, calls of the second are kept."""
    merged = {**left, "content": _joined(left.get("content") or "", right.get("content") or "")}
    if left.get("name") != right.get("name"):
        merged.pop("name", None)
    if right.get("tool_calls"):
        merged["tool_calls"] = right["tool_calls"]
    return merged


def _joined(left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str):
        return f"{left}\n\n{right}" if left and right else left or right
    return [*_parts(left), *_parts(right)]


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
