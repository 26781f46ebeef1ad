"""What a batch of a LangGraph store's operations needs: worked out and checked before anything is embedded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.embeddings import Embeddings
from langgraph.store.base import (
    GetOp,
    IndexConfig,
    ListNamespacesOp,
    Op,
    PutOp,
    SearchOp,
    get_text_at_path,
    tokenize_path,
)

from pancake_langgraph._errors import ConfigError, InvalidItem, InvalidQuery
from pancake_langgraph.retrieval.base import ItemId
from pancake_langgraph.retrieval.checks import checked_count, checked_id, json_value, named
from pancake_langgraph.retrieval.records import record_filter
from pancake_langgraph.retrieval.scopes import Scope

#: The whole value as JSON, as one text.
_WHOLE = "$"
_KNOWN = ("dims", "embed", "fields")


@dataclass(frozen=True, slots=True)
class Put:
    """A value to store, copied, with the texts of it that are to be found."""

    id: ItemId
    value: Mapping[str, Any]
    texts: tuple[str, ...]
    ttl_s: float | None


@dataclass(slots=True)
class StorePlan:
    """Operations by kind, reads with their places in the batch; of writes to one id the last counts."""

    num_ops: int = 0
    gets: list[tuple[int, GetOp]] = field(default_factory=list)
    searches: list[tuple[int, SearchOp]] = field(default_factory=list)
    listings: list[tuple[int, ListNamespacesOp]] = field(default_factory=list)
    writes: dict[ItemId, Put | None] = field(default_factory=dict)

    @property
    def puts(self) -> list[Put]:
        """What is to be stored."""
        return [put for put in self.writes.values() if put is not None]

    @property
    def deletes(self) -> list[ItemId]:
        """What is to be deleted."""
        return [item_id for item_id, put in self.writes.items() if put is None]

    @property
    def texts(self) -> list[str]:
        """What is to be embedded for storing, in the order of `puts`."""
        return [text for put in self.puts for text in put.texts]

    @property
    def queries(self) -> list[str]:
        """What is to be embedded for searching, each once."""
        return list(dict.fromkeys(op.query for _, op in self.searches if op.query))


def make_plan(ops: Iterable[Op], scope: Scope, fields: Sequence[str] | None) -> StorePlan:
    """Sort and check operations; `fields` are indexed by default, `None` indexes nothing at all.

    Raises:
        InvalidItem: if a value may not be stored, or a view may not write there.
        InvalidQuery: if a search cannot be answered, or an operation is not known.
    """
    plan = StorePlan()
    for place, op in enumerate(ops):
        plan.num_ops += 1
        if isinstance(op, PutOp):
            item_id = checked_id(ItemId(_as_tuple(op.namespace), op.key), "put")
            scope.check_write(item_id.namespace)
            plan.writes.pop(item_id, None)
            plan.writes[item_id] = None if op.value is None else _put(item_id, op, fields)
        elif isinstance(op, GetOp):
            plan.gets.append((place, op))
        elif isinstance(op, SearchOp):
            checked_count(op.limit, "limit")
            checked_count(op.offset, "offset")
            record_filter(op.filter)
            plan.searches.append((place, op))
        elif isinstance(op, ListNamespacesOp):
            checked_count(op.limit, "limit")
            checked_count(op.offset, "offset")
            plan.listings.append((place, op))
        else:
            raise InvalidQuery(
                f"operation {place}: got {type(op).__name__}, allowed are GetOp, SearchOp, PutOp and ListNamespacesOp"
            )
    return plan


def checked_index(index: IndexConfig | None) -> list[str] | None:
    """Return the fields that an index configuration names; `None` when nothing is indexed.

    Raises:
        ConfigError: if it lacks an embedder, or names something that is not known.
    """
    if index is None:
        return None
    if unknown := sorted(set(index) - set(_KNOWN)):
        raise ConfigError(f"index: got {', '.join(unknown)}, allowed are {', '.join(_KNOWN)}")
    embed: Any = index.get("embed")
    if not (callable(embed) or isinstance(embed, str | Embeddings)):
        got = "no 'embed'" if embed is None else f"'embed' of type {type(embed).__name__}"
        raise ConfigError(f"index: got {got}, allowed are an Embeddings object, a function, and a provider string")
    fields: Any = index.get("fields")
    if fields is None:
        return [_WHOLE]
    if isinstance(fields, str) or not all(isinstance(one, str) and one for one in fields):
        raise ConfigError(
            f"index: fields got {fields!r}, allowed is a list of paths such as ['text', 'notes[*].title']"
        )
    return list(fields)


def _put(item_id: ItemId, op: PutOp, fields: Sequence[str] | None) -> Put:
    where = f"put {named(item_id)}"
    if not isinstance(op.value, Mapping):
        raise InvalidItem(f"{where}: got {type(op.value).__name__}, allowed is a mapping")
    # Copied now: the app may go on changing its dict while texts are embedded.
    value = json_value(op.value, where)
    if op.ttl is not None and (isinstance(op.ttl, bool) or not isinstance(op.ttl, int | float) or not op.ttl > 0):
        raise InvalidItem(f"{where}: ttl got {op.ttl!r}, allowed are minutes above 0, or None for never")
    return Put(
        item_id, value, _texts(where, value, _paths(where, op, fields)), None if op.ttl is None else op.ttl * 60.0
    )


def _paths(where: str, op: PutOp, fields: Sequence[str] | None) -> Sequence[str]:
    if fields is None or op.index is False:
        return ()
    if op.index is None:
        return fields
    if not isinstance(op.index, list | tuple) or not all(isinstance(one, str) and one for one in op.index):
        raise InvalidItem(f"{where}: index got {type(op.index).__name__}, allowed are False, None and a list of paths")
    return op.index


def _texts(where: str, value: Mapping[str, Any], paths: Sequence[str]) -> tuple[str, ...]:
    """Return the texts at paths, each once."""
    found: dict[str, None] = {}
    for path in paths:
        for text in get_text_at_path(value, _WHOLE if path == _WHOLE else tokenize_path(path)):
            if not text.strip():
                raise InvalidItem(
                    f"{where}: the text at {path!r} is empty and has no meaning to search for; nothing was stored; "
                    "leave the field out, or put the value with index=False or with other fields"
                )
            found[text] = None
    return tuple(found)


def _as_tuple(namespace: Any) -> Any:
    return tuple(namespace) if isinstance(namespace, list) else namespace
