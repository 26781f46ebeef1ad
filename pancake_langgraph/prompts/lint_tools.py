"""Finds where two lists of tools differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pancake_langgraph._types import WireObject
from pancake_langgraph.prompts.lint_kinds import BreakKind, BreakPlace, Difference
from pancake_langgraph.prompts.lint_volatile import volatile_at
from pancake_langgraph.prompts.prefix import common_prefix_tokens
from pancake_langgraph.wire.bodies import tool_names


def find_tool_break(old: Sequence[WireObject], new: Sequence[WireObject]) -> Difference | None:
    """Return where two lists of tools stop being the same bytes, or `None`.

    A list that gets longer is a break as well: the history stands behind it.
    """
    if same_tools(old, new):
        return None
    names, now = tool_names(old), tool_names(new)
    index = _first_difference(old, new)
    if Counter(names) != Counter(now):
        return _other_tools(index, names, now)
    name = names[index]
    if names != now:
        detail = f"{name} stood where {now[index]} stands now"
        return _difference(BreakKind.TOOL_ORDER, BreakPlace("tool", index, now[index]), detail)
    path, left, right = differing_value(old[index], new[index])
    if left is right is None:
        return _difference(BreakKind.TOOL_ORDER, BreakPlace("tool", index, name, path), "other order of keys")
    return _other_value(BreakPlace("tool", index, name, path), left, right)


def same_tools(old: Sequence[WireObject], new: Sequence[WireObject]) -> bool:
    """Say whether two lists of tools are the same bytes on the wire."""
    return old is new or (old == new and all(_same_bytes(a, b) for a, b in zip(old, new, strict=True)))


def _other_tools(index: int, names: Sequence[str], now: Sequence[str]) -> Difference:
    gone, added = Counter(names) - Counter(now), Counter(now) - Counter(names)
    parts = [f"{word} {', '.join(sorted(found))}" for word, found in (("without", gone), ("with new", added)) if found]
    place = BreakPlace("tool", index, now[index] if index < len(now) else "")
    shares_some = not names or not now or bool(set(names) & set(now))
    return _difference(BreakKind.TOOL_SET, place, "; ".join(parts), is_alike=shares_some)


def _other_value(place: BreakPlace, left: object, right: object) -> Difference:
    if not isinstance(left, str) or not isinstance(right, str):
        return _difference(BreakKind.TOOL_SCHEMA, place, "another value")
    char = common_prefix_tokens(left, right)
    place = BreakPlace(place.where, place.index, place.role, place.field, char)
    volatile = volatile_at(left, right, char)
    if volatile is not None and volatile.goes_on:
        return _difference(volatile.kind, place, f"{volatile.detail} in a tool")
    return _difference(BreakKind.TOOL_SCHEMA, place, "another text")


def _difference(kind: BreakKind, place: BreakPlace, detail: str, *, is_alike: bool = True) -> Difference:
    return Difference(kind, place, detail, continues=is_alike, is_alike=is_alike)


def differing_value(old: Any, new: Any, path: str = "") -> tuple[str, Any, Any]:
    """Return path and values of the first difference of two JSON values; both `None` where only keys are turned round.

    The path is that of the object around where keys were added, taken or turned round.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for (key, left), (other, right) in zip(old.items(), new.items(), strict=False):
            if key != other:
                return (path, None, None) if set(old) == set(new) and old == new else _keyed(old, new, path)
            if left != right or not _same_bytes(left, right):
                return differing_value(left, right, f"{path}.{key}" if path else str(key))
        return path, sorted(old, key=str), sorted(new, key=str)
    if isinstance(old, list | tuple) and isinstance(new, list | tuple):
        for index, (left, right) in enumerate(zip(old, new, strict=False)):
            if left != right or not _same_bytes(left, right):
                return differing_value(left, right, f"{path}[{index}]")
        return path, len(old), len(new)
    return path, old, new


def _keyed(old: Mapping[Any, Any], new: Mapping[Any, Any], path: str) -> tuple[str, Any, Any]:
    """Look behind another order of keys for the value that differs as well."""
    if set(old) != set(new):
        return path, sorted(old, key=str), sorted(new, key=str)
    key = next(key for key in old if old[key] != new[key])
    return differing_value(old[key], new[key], f"{path}.{key}" if path else str(key))


def _first_difference(old: Sequence[WireObject], new: Sequence[WireObject]) -> int:
    for index, (left, right) in enumerate(zip(old, new, strict=False)):
        if left != right or not _same_bytes(left, right):
            return index
    return min(len(old), len(new))


def _same_bytes(left: object, right: object) -> bool:
    """Whether two equal values also have the same order of keys."""
    return left is right or json.dumps(left, default=str) == json.dumps(right, default=str)
