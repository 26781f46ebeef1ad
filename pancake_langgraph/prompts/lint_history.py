"""Finds where two lists of messages stop being the same, and what was done to the history there."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final

from pancake_langgraph._types import WireObject
from pancake_langgraph.prompts.fields import REASONING_KEYS
from pancake_langgraph.prompts.identity import canonical, leading_system_messages, same_message
from pancake_langgraph.prompts.lint_kinds import BreakKind, BreakPlace, Difference
from pancake_langgraph.prompts.lint_volatile import volatile_at
from pancake_langgraph.prompts.prefix import common_prefix_tokens

SYSTEM_ROLES: Final = ("system", "developer")
#: Messages behind the break that are looked at for where the history goes on.
_MAX_ALIGNED: Final = 2000
_MAX_PLACES: Final = 8
#: So many equal characters at their beginning say that two system prompts are one that was changed.
_ALIKE_CHARS: Final = 64
_MIN_CONTAINED: Final = 8
_SUMMARY_CHARS: Final = 300
_SUMMARY: Final = re.compile(r"summary|summari[sz]", re.I)
_THINKING: Final = re.compile(r"<think>.*?</think>\s*", re.S)


def find_message_break(old: Sequence[WireObject], new: Sequence[WireObject]) -> Difference | None:
    """Return where `new` stops being an extension of `old`.

    `None` where one of the two begins with the other: what is shorter was computed as a whole.
    """
    index = first_difference(old, new)
    return None if index is None else _explained(old, new, index)


def first_difference(old: Sequence[WireObject], new: Sequence[WireObject]) -> int | None:
    """Return the first position where the two hold different messages, or `None` where one begins with the other."""
    for index, (left, right) in enumerate(zip(old, new, strict=False)):
        if not same_turn(left, right):
            return index
    return None


def same_turn(left: WireObject, right: WireObject) -> bool:
    """Say whether two wire forms are of one message with the same reasoning."""
    return left is right or left == right or (same_message(left, right) and reasoning_of(left) == reasoning_of(right))


def reasoning_of(message: WireObject) -> str:
    """Return the reasoning that a wire form carries beside its content."""
    return next((str(message[key]) for key in REASONING_KEYS if message.get(key)), "")


def text_fields(message: WireObject) -> Iterator[tuple[str, str]]:
    """Yield path and text of all that a template can write of a message, in the usual order."""
    if reasoning := reasoning_of(message):
        yield "reasoning_content", reasoning
    content = message.get("content")
    if isinstance(content, str):
        yield "content", content
    for number, part in enumerate(content if isinstance(content, list) else ()):
        text = part.get("text") if isinstance(part, Mapping) else part
        yield f"content[{number}]", text if isinstance(text, str) else str(part)
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        yield f"tool_calls[{number}].function.name", str(function.get("name") or "")
        yield f"tool_calls[{number}].function.arguments", str(function.get("arguments") or "")
        yield f"tool_calls[{number}].id", str(call.get("id") or "")
    if message.get("tool_call_id"):
        yield "tool_call_id", str(message["tool_call_id"])


def turn_key(message: WireObject) -> Hashable:
    """Return what is equal for two wire forms of one message, whether or not they carry its reasoning."""
    content = message.get("content")
    if not isinstance(content, str) or message.get("tool_calls"):
        return canonical(message)
    if message.get("role") == "assistant":
        content = _without_thinking(content)
    return message.get("role"), content, message.get("tool_call_id")


# -- what was done ------------------------------------------------------------------------------------------------


def _explained(old: Sequence[WireObject], new: Sequence[WireObject], index: int) -> Difference:
    rest, now = old[index : index + _MAX_ALIGNED], new[index : index + _MAX_ALIGNED]
    gone, added = _aligned(rest, now)
    pair = _Pair(rest[0], now[0], index)
    if gone == added == 0:
        return pair.difference(BreakKind.REASONING, "past thinking is written in another way", continues=True)
    if gone == added or (gone and pair.is_system):  # else the two messages at the break are two turns, not one
        found = pair.volatile(continues=gone > 0)
        if found is not None and (found.is_alike or gone == added > 0):
            return found
    if gone <= 0 and index > len(leading_system_messages(old)) and _is_passing(rest, now):
        detail = f"the last {_count(len(rest))} not kept at this place"
        return Difference(BreakKind.REMOVED, pair.place_only, detail, continues=True, is_alike=False)
    if gone < 0:
        return _without_a_tail(pair, rest, now, is_start=_is_start(old, index))
    if gone == added == 1:
        kind = BreakKind.SYSTEM if pair.is_system else BreakKind.EDITED
        return pair.difference(kind, pair.what, continues=True)
    return _moved(pair, gone, added, is_start=_is_start(old, index))


def _moved(pair: _Pair, gone: int, added: int, *, is_start: bool) -> Difference:
    """The history goes on behind the break, by another number of messages."""
    if gone == 0:
        place = pair.place_only
        return Difference(BreakKind.INSERTED, place, f"{_count(added)} put before", continues=True, is_alike=False)
    if added == 0:
        kind = BreakKind.TRIMMED if is_start else BreakKind.REMOVED
        return Difference(kind, pair.place_only, f"{_count(gone)} gone", continues=True, is_alike=False)
    detail = f"{_count(gone)} replaced by {added}"
    if gone > added and is_start:
        return Difference(BreakKind.SUMMARIZED, pair.place_only, detail, continues=True, is_alike=False)
    if gone == added:
        return pair.difference(BreakKind.EDITED, f"{_count(gone)} changed in place", continues=True)
    return Difference(BreakKind.OTHER, pair.place_only, detail, continues=True, is_alike=False)


def _without_a_tail(
    pair: _Pair, rest: Sequence[WireObject], now: Sequence[WireObject], *, is_start: bool
) -> Difference:
    """Nothing behind the break is in both: name it by the messages at the break alone."""
    if pair.is_system and pair.same_role:
        return pair.difference(BreakKind.SYSTEM, pair.what, continues=pair.is_alike)
    is_summary = _SUMMARY.search(pair.now_text, 0, _SUMMARY_CHARS) is not None
    if is_start and len(rest) >= 3 and len(now) * 2 <= len(rest):
        detail = f"{_count(len(rest))} replaced by {len(now)}"
        return Difference(BreakKind.SUMMARIZED, pair.place_only, detail, continues=is_summary, is_alike=False)
    if pair.same_role:
        return pair.difference(BreakKind.EDITED, pair.what, continues=pair.is_alike)
    return Difference(BreakKind.OTHER, pair.place_only, "another message", continues=False, is_alike=False)


def _is_passing(rest: Sequence[WireObject], now: Sequence[WireObject]) -> bool:
    """Whether the answer stands where messages stood that were sent behind the history for one call only."""
    return now[0].get("role") == "assistant" and all(m.get("role") not in ("assistant", "tool") for m in rest)


class _Pair:
    """The two messages at the break."""

    def __init__(self, old: WireObject, new: WireObject, index: int) -> None:
        self.same_role = old.get("role") == new.get("role")
        self.is_system = old.get("role") in SYSTEM_ROLES
        self.place_only = BreakPlace("message", index, str(new.get("role") or ""))
        self._index = index
        self._role = str(old.get("role") or "")
        self.field, self.old_text, self.now_text = _differing_field(old, new)
        self.char = common_prefix_tokens(self.old_text, self.now_text)

    @property
    def what(self) -> str:
        return "another text" if self.old_text or self.now_text else "another form"

    @property
    def is_alike(self) -> bool:
        """Whether one of the two texts was made from the other."""
        short, long = sorted((self.old_text, self.now_text), key=len)
        if self.is_system:
            ending = common_prefix_tokens(short[self.char :][::-1], long[self.char :][::-1])
            return self.char >= _ALIKE_CHARS or 2 * (self.char + ending) >= max(len(short), 1)
        return len(short) >= _MIN_CONTAINED and (self.char == len(short) or short in long)

    def volatile(self, *, continues: bool) -> Difference | None:
        """Return the break as one by a clock, an id or a counter, where it is one."""
        if not self.same_role:
            return None
        if self.field.endswith("id"):
            place = BreakPlace("message", self._index, self._role, self.field, self.char)
            return Difference(BreakKind.RANDOM_ID, place, "tool call id", continues=True, is_alike=True)
        found = volatile_at(self.old_text, self.now_text, self.char)
        if found is None:
            return None
        is_long = self.is_system or len(self.now_text) - self.char >= _ALIKE_CHARS
        is_alike = found.goes_on and is_long
        return self.difference(found.kind, found.detail, continues=continues or is_alike, is_alike=is_alike)

    def difference(self, kind: BreakKind, detail: str, *, continues: bool, is_alike: bool | None = None) -> Difference:
        """Return a break inside this message."""
        place = BreakPlace("message", self._index, self._role, self.field, self.char)
        return Difference(kind, place, detail, continues, self.is_alike if is_alike is None else is_alike)


def _differing_field(old: WireObject, new: WireObject) -> tuple[str, str, str]:
    left, right = dict(text_fields(old)), dict(text_fields(new))
    for name in (*left, *(name for name in right if name not in left)):
        if left.get(name, "") != right.get(name, ""):
            return name, left.get(name, ""), right.get(name, "")
    return "", "", ""


def _aligned(rest: Sequence[WireObject], now: Sequence[WireObject]) -> tuple[int, int]:
    """Return after how many messages of each list both go on alike; -1 twice where they never do."""
    ours, theirs = [turn_key(message) for message in rest], [turn_key(message) for message in now]
    places: defaultdict[Any, list[int]] = defaultdict(list)
    for position, key in enumerate(theirs):
        if len(places[key]) < _MAX_PLACES:
            places[key].append(position)
    for gone, key in enumerate(ours):
        for added in places.get(key, ()):
            nexts = ours[gone + 1 : gone + 2], theirs[added + 1 : added + 2]
            if not nexts[0] or not nexts[1] or nexts[0] == nexts[1]:
                return gone, added
    return -1, -1


def _is_start(old: Sequence[WireObject], index: int) -> bool:
    """Whether the history begins at `index`, up to a first message that trimming may keep."""
    return index <= len(leading_system_messages(old)) + 1


def _without_thinking(content: str) -> str:
    return _THINKING.sub("", content) if "<think>" in content else content


def _count(number: int) -> str:
    return f"{number} message{'' if number == 1 else 's'}"
