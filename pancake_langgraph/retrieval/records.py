"""How the values of a LangGraph store are laid out as items, and how they become LangGraph's items again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from langgraph.store.base import Item as StoreItem
from langgraph.store.base import MatchCondition, SearchItem

from pancake_langgraph._errors import InvalidQuery
from pancake_langgraph.retrieval.base import Item, Namespace
from pancake_langgraph.retrieval.filters import compile_filter

_VALUE, _TTL = "value", "ttl_s"


def record_value(value: Mapping[str, Any], ttl_s: float | None) -> dict[str, Any]:
    """Return the value of the item that holds a store's value and after how long without use it expires."""
    return {_VALUE: value} if ttl_s is None else {_VALUE: value, _TTL: ttl_s}


def ttl_of(item: Item) -> float | None:
    """Return after how many seconds without use an item expires; `None` for never."""
    ttl_s = item.value.get(_TTL)
    return None if ttl_s is None else float(ttl_s)


def record_filter(where: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the filter over items that is this filter over their values.

    Raises:
        InvalidQuery: if it is no filter.
    """
    if where is not None:
        compile_filter(where)
    return {_VALUE: dict(where)} if where else {}


def store_item(item: Item) -> StoreItem:
    """Return what LangGraph calls an item."""
    return StoreItem(
        value=_plain(item),
        key=item.id.key,
        namespace=item.id.namespace,
        created_at=_moment(item.created_at_s),
        updated_at=_moment(item.updated_at_s),
    )


def search_item(item: Item, score: float | None) -> SearchItem:
    """Return what LangGraph calls a found item; without a score it was listed."""
    return SearchItem(
        item.id.namespace,
        item.id.key,
        _plain(item),
        _moment(item.created_at_s),
        _moment(item.updated_at_s),
        score,
    )


def namespace_matches(namespace: Namespace, conditions: Sequence[MatchCondition]) -> bool:
    """Return whether a namespace meets all conditions; `*` stands for any one label.

    Raises:
        InvalidQuery: if a condition is neither on the beginning nor on the end.
    """
    for condition in conditions:
        path = condition.path
        if condition.match_type not in ("prefix", "suffix"):
            raise InvalidQuery(f"match_type: got {condition.match_type!r}, allowed are 'prefix' and 'suffix'")
        if len(path) > len(namespace):
            return False
        part = namespace[: len(path)] if condition.match_type == "prefix" else namespace[len(namespace) - len(path) :]
        if any(wanted not in ("*", label) for wanted, label in zip(path, part, strict=True)):
            return False
    return True


def _plain(item: Item) -> dict[str, Any]:
    """Return the value of a record; items that were stored otherwise, documents for example, are shown whole."""
    value = item.value.get(_VALUE)
    return dict(value if isinstance(value, Mapping) else item.value)


def _moment(time_s: float) -> datetime:
    return datetime.fromtimestamp(time_s, UTC)
