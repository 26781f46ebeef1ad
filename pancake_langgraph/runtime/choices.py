"""Reads which nodes a value returned by a node, or by the code after it, may name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from langgraph.types import Command, Send

from pancake_langgraph.forecast import Clue
from pancake_langgraph.wire.fields import MAX_CHARS, MAX_FIELDS

_MAX_NAMES = 64
_NONE: frozenset[str] = frozenset()


def names_chosen(value: object) -> frozenset[str]:
    """Return what may be names of nodes, or labels that stand for them; longer texts are none and are not kept."""
    if type(value) is dict:  # what most nodes return
        return _NONE
    return frozenset(islice((name for name in _names(value) if len(name) <= MAX_CHARS), _MAX_NAMES))


def _names(value: object) -> Iterator[str]:
    if isinstance(value, str | bool):
        yield str(value)
    elif isinstance(value, Send):
        yield value.node
    elif isinstance(value, Command):
        if value.graph is None:
            yield from _names(value.goto)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in islice(value, _MAX_NAMES):
            yield from _names(item) if isinstance(item, str | bool | Send | Command) else ()


def clues_in(calls: Sequence[Any] | Iterable[Any]) -> tuple[Clue, ...]:
    """Return what the tool calls of a whole answer tell: for models whose stream was not seen."""
    clues: dict[Clue, None] = {}
    for call in islice(calls, MAX_FIELDS):
        clues[Clue(call["name"])] = None
        for field, value in islice(call["args"].items(), MAX_FIELDS):
            text = str(value).lower() if isinstance(value, bool) else value
            if isinstance(text, str) and 0 < len(text) <= MAX_CHARS and len(field) <= MAX_CHARS:
                clues[Clue(call["name"], field, text)] = None
    return tuple(clues)
