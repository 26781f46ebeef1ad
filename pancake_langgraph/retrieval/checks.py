"""What every engine checks before it stores or searches, so that all refuse the same with the same words.

Nothing here changes what it is given: items come back as copies that share nothing mutable with the caller.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pancake_langgraph._errors import InvalidItem, InvalidQuery, RetrievalError
from pancake_langgraph.retrieval.base import Item, ItemId, Namespace, Query, Vector, View
from pancake_langgraph.retrieval.filters import Predicate, compile_filter

#: Deeper values are refused; JSON readers give up somewhere, too.
MAX_VALUE_DEPTH = 100
#: Integers that every JSON reader and writer in use takes.
MIN_INT, MAX_INT = -(2**63), 2**64 - 1
MAX_DIM = 1 << 16


@dataclass(frozen=True, slots=True)
class CheckedView:
    """A view that can be used: prefixes of which none lies below another, and its filter as a predicate.

    `passes` is `None` where everything passes, so that whoever can skip the values does.
    """

    prefixes: tuple[Namespace, ...]
    passes: Predicate | None
    allowed: frozenset[ItemId] | None

    def covers(self, namespace: Namespace) -> bool:
        """Return whether a namespace lies below one of the prefixes, or is one."""
        return any(namespace[: len(prefix)] == prefix for prefix in self.prefixes)

    def shows(self, item: Item) -> bool:
        """Return whether the view shows an item: prefixes, filter and allow-list together."""
        return (
            self.covers(item.id.namespace)
            and (self.passes is None or self.passes(item.value))
            and (self.allowed is None or item.id in self.allowed)
        )


def checked_dim(dim: object) -> int:
    """Return the length of vectors.

    Raises:
        RetrievalError: if it is no integer from 1 to `MAX_DIM`.
    """
    if isinstance(dim, bool) or not isinstance(dim, int) or not 0 < dim <= MAX_DIM:
        raise RetrievalError(f"dim: got {dim!r}, allowed are integers from 1 to {MAX_DIM}")
    return dim


# -- items ----------------------------------------------------------------------------------------------------------


def checked_items(items: Iterable[Item], dim: int) -> list[Item]:
    """Return copies that can be stored: plain JSON values, read-only float32 vectors.

    Raises:
        InvalidItem: if one may not be stored, or an id stands twice.  Texts and numbers of values are not quoted.
    """
    found: dict[ItemId, Item] = {}
    for position, item in enumerate(items):
        if not isinstance(item, Item):
            raise InvalidItem(f"item {position}: got {type(item).__name__}, allowed is `Item`")
        where = f"item {position}"
        item_id = checked_id(item.id, where)
        if item_id in found:
            raise InvalidItem(
                f"{where}: the id {named(item_id)} stands twice in one call, and it is not clear which one is meant; "
                "nothing was stored; give each item its own key, or leave one out"
            )
        if not isinstance(item.value, Mapping):
            raise InvalidItem(f"{where} {named(item_id)}: got a {type(item.value).__name__}, allowed is a mapping")
        where = f"{where} {named(item_id)}"
        expires_at_s = item.expires_at_s
        if expires_at_s is not None:
            expires_at_s = checked_time(expires_at_s, f"{where}: expires_at_s")
        found[item_id] = replace(
            item,
            id=item_id,
            value=json_value(item.value, where),
            vectors=tuple(_vector(one, dim, f"{where}, vector {at}") for at, one in enumerate(item.vectors)),
            created_at_s=checked_time(item.created_at_s, f"{where}: created_at_s"),
            updated_at_s=checked_time(item.updated_at_s, f"{where}: updated_at_s"),
            expires_at_s=None
            if item.expires_at_s is None
            else checked_time(item.expires_at_s, f"{where}: expires_at_s"),
        )
    return list(found.values())


def checked_ids(ids: Iterable[ItemId]) -> list[ItemId]:
    """Return ids that can be looked up, in order.

    Raises:
        InvalidQuery: if one is no id.
    """
    try:
        return [checked_id(item_id, f"id {position}") for position, item_id in enumerate(ids)]
    except InvalidItem as error:
        raise InvalidQuery(str(error)) from error


def checked_id(item_id: object, where: str) -> ItemId:
    """Return an id that may be stored.

    Raises:
        InvalidItem: if it is no `ItemId`, or one of its labels or its key is empty or no text.
    """
    if not isinstance(item_id, ItemId):
        raise InvalidItem(f"{where}: got an id of {type(item_id).__name__}, allowed is `ItemId`")
    namespace = _namespace(item_id.namespace, f"{where}: namespace", InvalidItem)
    key = _label(item_id.key, f"{where}: key", InvalidItem)
    return item_id if namespace is item_id.namespace and key is item_id.key else ItemId(namespace, key)


def json_value(value: Any, where: str, depth: int = 0) -> Any:
    """Return a deep copy of a JSON value; tuples become lists, as they would on the way through JSON.

    Raises:
        InvalidItem: if it is no JSON; the message names the place and the type, never the value.
    """
    if depth > MAX_VALUE_DEPTH:
        raise InvalidItem(f"{where}: nested deeper than {MAX_VALUE_DEPTH} levels; flatten it")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, int):
        if not MIN_INT <= value <= MAX_INT:
            raise InvalidItem(f"{where}: got an integer of {value.bit_length()} bits, allowed are 64; write it as text")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidItem(f"{where}: got NaN or infinity, which JSON does not have; store null or a text instead")
        return float(value)
    if isinstance(value, Mapping):
        copied: dict[str, Any] = {}
        for key, one in value.items():
            if not isinstance(key, str):
                raise InvalidItem(f"{where}: got a key of {type(key).__name__}, allowed are texts")
            copied[_text(key, where)] = json_value(one, f"{where}.{key[:40]}" if depth < 4 else where, depth + 1)
        return copied
    if isinstance(value, list | tuple):
        return [json_value(one, where, depth + 1) for one in value]
    raise InvalidItem(
        f"{where}: got {type(value).__name__}, allowed are JSON values: "
        "texts, finite numbers, true, false, null, lists, objects with texts as keys"
    )


# -- queries --------------------------------------------------------------------------------------------------------


def checked_query(query: object, dim: int) -> tuple[Vector, CheckedView]:
    """Return what a query asks for: its vector as float32 and its view.

    Raises:
        InvalidQuery: if it cannot be answered.
    """
    if not isinstance(query, Query):
        raise InvalidQuery(f"query: got {type(query).__name__}, allowed is `Query`")
    checked_count(query.limit, "limit")
    checked_count(query.offset, "offset")
    try:
        vector = _vector(query.vector, dim, "query vector")
    except InvalidItem as error:
        raise InvalidQuery(str(error)) from error
    return vector, checked_view(query.view)


def checked_view(view: object) -> CheckedView:
    """Return a view that can be used.

    Raises:
        InvalidQuery: for a prefix that is no tuple of texts, an unknown filter, or an allow-list of other things.
    """
    if not isinstance(view, View):
        raise InvalidQuery(f"view: got {type(view).__name__}, allowed is `View`")
    if not isinstance(view.prefixes, tuple | list):
        raise InvalidQuery(f"prefixes: got {type(view.prefixes).__name__}, allowed is a tuple of namespaces")
    prefixes = {_namespace(prefix, "prefix", InvalidQuery) for prefix in view.prefixes}
    outermost = [one for one in prefixes if not any(one[:cut] in prefixes for cut in range(len(one)))]
    allowed = view.allowed
    if allowed is not None and not isinstance(allowed, frozenset | set):
        raise InvalidQuery(
            f"allowed: got {type(allowed).__name__}, allowed is a frozenset of `ItemId`, or None for all"
        )
    if allowed is not None and not all(isinstance(one, ItemId) for one in allowed):
        strange = next(type(one).__name__ for one in allowed if not isinstance(one, ItemId))
        raise InvalidQuery(f"allowed: got a {strange} in it, allowed are `ItemId` only")
    return CheckedView(
        tuple(sorted(outermost)),
        compile_filter(view.where) if not isinstance(view.where, Mapping) or view.where else None,
        None if allowed is None else frozenset(allowed),
    )


def checked_count(value: object, name: str) -> int:
    """Return a count.

    Raises:
        InvalidQuery: if it is no integer from 0 on.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidQuery(f"{name}: got {value!r}, allowed are integers from 0 on")
    return value


def best_first(score: float, item_id: ItemId) -> tuple[float, Namespace, str]:
    """Return what hits are sorted by: the highest score first, equal ones by id."""
    return (-score, item_id.namespace, item_id.key)


def latest_first(item: Item) -> tuple[float, Namespace, str]:
    """Return what listed items are sorted by: the last updated first, equal times by id."""
    return (-item.updated_at_s, item.id.namespace, item.id.key)


def named(item_id: ItemId) -> str:
    """Return an id as messages show it."""
    return "/".join((*item_id.namespace, item_id.key))[:120]


# -- parts ----------------------------------------------------------------------------------------------------------


def _vector(vector: object, dim: int, where: str) -> Vector:
    """Return a read-only copy as float32."""
    try:
        with np.errstate(over="ignore"):
            copied = np.array(vector, dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidItem(f"{where}: got {type(vector).__name__}, allowed are {dim} numbers") from error
    if copied.shape != (dim,):
        raise InvalidItem(
            f"{where}: got the shape {copied.shape}, allowed is ({dim},), the length of this index; "
            "embed with the model that the index was made with"
        )
    if not np.isfinite(copied).all():
        raise InvalidItem(
            f"{where}: got NaN or infinity (in float32), allowed are finite numbers; look at the embedder"
        )
    copied.setflags(write=False)
    return copied


def _namespace(namespace: object, where: str, error: type[InvalidItem | InvalidQuery]) -> Namespace:
    """Return a namespace of texts that are not empty, as plain `tuple` and `str`; the root, `()`, is one."""
    if not isinstance(namespace, tuple):
        raise error(f"{where}: got {type(namespace).__name__}, allowed is a tuple of texts such as ('team', 'notes')")
    labels = tuple([_label(label, where, error) for label in namespace])
    is_plain = type(namespace) is tuple and all(map(operator.is_, labels, namespace))
    return namespace if is_plain else labels


def _label(label: object, where: str, error: type[InvalidItem | InvalidQuery]) -> str:
    """Return a text that is not empty as plain `str`, also where an enum was given."""
    if not isinstance(label, str) or not label:
        got = "an empty text" if label == "" else f"a {type(label).__name__}"
        raise error(f"{where}: got {got}, allowed are texts of at least one character")
    try:
        label.encode()
    except UnicodeEncodeError:
        raise error(f"{where}: got a text that is no valid Unicode (half a surrogate pair)") from None
    return label if type(label) is str else str.__str__(label)


def _text(text: str, where: str) -> str:
    """Return a text as plain `str`, also where an enum was given."""
    plain = str.__str__(text)
    try:
        plain.encode()
    except UnicodeEncodeError:
        raise InvalidItem(f"{where}: got a text that is no valid Unicode (half a surrogate pair)") from None
    return plain


def checked_time(value: object, where: str) -> float:
    """Return a time.

    Raises:
        InvalidItem: if it is no finite number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidItem(f"{where}: got {type(value).__name__} that is no finite number, allowed are seconds")
    return float(value)


def checked_expiries(expiries: Mapping[ItemId, float | None]) -> list[ItemId]:
    """Return the ids of items that are to expire at other times, in order.

    Raises:
        InvalidQuery: if one is no id.
        InvalidItem: if a time is no finite number.
    """
    for item_id, expires_at_s in expiries.items():
        if expires_at_s is not None:
            checked_time(expires_at_s, named(item_id))
    return checked_ids(expiries)


def is_as_read(item: Item, updated_at_s: Mapping[ItemId, float] | None) -> bool:
    """Return whether an item is the one that was read, and still has an end; see `TouchesItems.touch`."""
    return updated_at_s is None or (item.expires_at_s is not None and item.updated_at_s == updated_at_s.get(item.id))


def checked_seconds(value: object, name: str) -> float:
    """Return a duration.

    Raises:
        RetrievalError: if it is no finite number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise RetrievalError(f"{name}: got {value!r}, allowed are seconds above 0, or None for no limit")
    return float(value)


def one_of_each(ids: Sequence[ItemId]) -> list[ItemId]:
    """Return ids without repetition, in order."""
    return list(dict.fromkeys(ids))
