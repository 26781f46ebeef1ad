"""Filters over JSON values, in LangGraph's words and four more.

A filter is a mapping.  A plain value asks for equality, a nested mapping looks into a nested object, a list compares
element by element, and a mapping of operators compares: `$eq $ne $gt $gte $lt $lte $in $nin`.  `$and` and `$or` take a
list of filters and may stand beside fields.  There are no dotted paths: `{"a": {"b": 1}}` is how to reach `b` in `a`.

A missing field counts as null.  Truth values are no numbers.  Numbers are ordered as numbers, also those that are
written as text; two texts of which one is no number are ordered as text; all else has no order and does not match.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pancake_langgraph._errors import InvalidQuery

#: Says whether a value passes.  Pure, thread safe, never raises.
Predicate = Callable[[Any], bool]

COMPARISONS = ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$in", "$nin")
LOGIC = ("$and", "$or")
#: Deeper filters are refused.
MAX_DEPTH = 32

_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
#: Longer ones are compared as text; they are names, not quantities.
_MAX_NUMBER_CHARS = 64


def matches(where: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Return whether `value` passes the filter; whoever asks for many values compiles it once.

    Raises:
        InvalidQuery: as `compile_filter` does.
    """
    return compile_filter(where)(value)


def compile_filter(where: Mapping[str, Any]) -> Predicate:
    """Return the filter as a predicate; an empty filter lets everything pass.

    Raises:
        InvalidQuery: if it is no mapping, names an unknown operator, compares a whole item, or holds what is no JSON.
    """
    if not isinstance(where, Mapping):
        raise InvalidQuery(
            f"filter: got {type(where).__name__}, allowed is a mapping such as {{'kind': 'note'}}; "
            "functions cannot be used as filters, because they would have to run after the search"
        )
    for key in where:
        if key in COMPARISONS:
            raise InvalidQuery(
                f"filter: got {key} at the top, where it has nothing to compare; "
                f"write {{'field': {{{key!r}: ...}}}}, or one of {', '.join(LOGIC)}"
            )
    return _condition(where, 0)


def equal(left: Any, right: Any) -> bool:
    """Return whether two JSON values are the same; truth values and numbers never are, 1 and 1.0 are."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, Mapping):
        return (
            isinstance(right, Mapping)
            and left.keys() == right.keys()
            and all(equal(one, right[key]) for key, one in left.items())
        )
    if isinstance(left, list | tuple):
        return (
            isinstance(right, list | tuple)
            and len(left) == len(right)
            and all(equal(one, other) for one, other in zip(left, right, strict=True))
        )
    return bool(left == right)


# -- compiling ------------------------------------------------------------------------------------------------------


def _condition(wanted: Any, depth: int) -> Predicate:
    """Compile what a field is compared with."""
    if depth > MAX_DEPTH:
        raise InvalidQuery(f"filter: nested deeper than {MAX_DEPTH} levels; flatten it")
    if isinstance(wanted, Mapping):
        return _mapping(wanted, depth)
    if isinstance(wanted, list | tuple):
        return _elements([_condition(one, depth + 1) for one in wanted])
    operand = _scalar(wanted)
    return lambda value: equal(value, operand)


def _mapping(wanted: Mapping[str, Any], depth: int) -> Predicate:
    """Compile operators, fields, or fields beside `$and` and `$or`."""
    parts: list[Predicate] = []
    fields: list[tuple[str, Predicate]] = []
    comparisons: list[str] = []
    for key, operand in wanted.items():
        if not isinstance(key, str):
            raise InvalidQuery(f"filter: got a key of {type(key).__name__}, allowed are field names and operators")
        if key in LOGIC:
            parts.append(_logic(key, operand, depth))
        elif key in COMPARISONS:
            comparisons.append(key)
            parts.append(_comparison(key, operand, depth))
        elif key.startswith("$"):
            raise InvalidQuery(f"filter: unknown operator {key!r}; allowed are {', '.join((*COMPARISONS, *LOGIC))}")
        else:
            fields.append((key, _condition(operand, depth + 1)))
    if comparisons and fields:
        raise InvalidQuery(
            f"filter: {comparisons[0]} stands beside the field {fields[0][0]!r}; "
            "compare a field or look into it, and join both with $and"
        )
    if fields or not wanted:
        parts.append(_fields(fields))
    return parts[0] if len(parts) == 1 else lambda value: all(part(value) for part in parts)


def _fields(fields: Sequence[tuple[str, Predicate]]) -> Predicate:
    """Look into an object."""
    if len(fields) == 1:
        ((key, condition),) = fields
        return lambda value: isinstance(value, Mapping) and condition(value.get(key))
    return lambda value: isinstance(value, Mapping) and all(condition(value.get(key)) for key, condition in fields)


def _elements(conditions: Sequence[Predicate]) -> Predicate:
    """Compare a list with conditions, one for each element."""
    return lambda value: (
        isinstance(value, list | tuple)
        and len(value) == len(conditions)
        and all(condition(one) for condition, one in zip(conditions, value, strict=True))
    )


def _logic(name: str, operand: Any, depth: int) -> Predicate:
    """Join filters."""
    if not isinstance(operand, list | tuple) or not all(isinstance(one, Mapping) for one in operand):
        raise InvalidQuery(f"filter: {name} got {type(operand).__name__}, allowed is a list of filters (mappings)")
    parts = [_condition(one, depth + 1) for one in operand]
    if name == "$and":
        return lambda value: all(part(value) for part in parts)
    return lambda value: any(part(value) for part in parts)


def _comparison(name: str, operand: Any, depth: int) -> Predicate:
    """Compare a field."""
    if name in ("$in", "$nin"):
        if not isinstance(operand, list | tuple | set | frozenset):
            raise InvalidQuery(f"filter: {name} got {type(operand).__name__}, allowed is a list of values")
        return _membership(name, [_json(one, depth) for one in operand])
    wanted = _json(operand, depth)
    if name == "$eq":
        return lambda value: equal(value, wanted)
    if name == "$ne":
        return lambda value: not equal(value, wanted)
    return _order(name, wanted)


def _membership(name: str, wanted: Sequence[Any]) -> Predicate:
    """Look a value up among others; texts, the usual case, in a set."""
    texts = {one for one in wanted if isinstance(one, str)}
    others = [one for one in wanted if not isinstance(one, str)]

    def among(value: Any) -> bool:
        return value in texts if isinstance(value, str) else any(equal(value, one) for one in others)

    return among if name == "$in" else lambda value: not among(value)


def _order(name: str, wanted: Any) -> Predicate:
    """Compare sizes."""
    if isinstance(wanted, bool) or not isinstance(wanted, int | float | str):
        raise InvalidQuery(f"filter: {name} got {type(wanted).__name__}, allowed are numbers and texts")
    number, text = _as_number(wanted), wanted if isinstance(wanted, str) else None
    decide: Callable[[int], bool] = {
        "$gt": lambda sign: sign > 0,
        "$gte": lambda sign: sign >= 0,
        "$lt": lambda sign: sign < 0,
        "$lte": lambda sign: sign <= 0,
    }[name]

    def ordered(value: Any) -> bool:
        found = _as_number(value)
        if found is not None and number is not None:
            return decide((found > number) - (found < number))
        if text is not None and isinstance(value, str):
            return decide((value > text) - (value < text))
        return False

    return ordered


# -- operands -------------------------------------------------------------------------------------------------------


def _as_number(value: Any) -> int | float | None:
    """Return a number, also one written as text; integers stay whole, so that large ones keep their order."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    if isinstance(value, str) and len(value) <= _MAX_NUMBER_CHARS and _NUMBER.fullmatch(value):
        return int(value) if value.lstrip("-").isdigit() else float(value)
    return None


def _scalar(value: Any) -> Any:
    """Return a JSON scalar as it is."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isnan(value):
            raise InvalidQuery("filter: got NaN, which equals nothing; allowed are numbers, texts, true, false, null")
        return value
    raise InvalidQuery(
        f"filter: got {type(value).__name__}, "
        "allowed are JSON values: numbers, texts, true, false, null, lists, objects"
    )


def _json(value: Any, depth: int) -> Any:
    """Return a JSON value as it is, and refuse others."""
    if depth > MAX_DEPTH:
        raise InvalidQuery(f"filter: nested deeper than {MAX_DEPTH} levels; flatten it")
    if isinstance(value, Mapping):
        return {key: _json(one, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_json(one, depth + 1) for one in value]
    return _scalar(value)
