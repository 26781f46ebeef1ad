"""Walking the objects behind a runnable, within a budget and without running any of them."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any, cast

from pancake_langgraph.topology._code import CodeFacts

_MAX_OBJECTS = 400
_MAX_DEPTH = 6
_MAX_ITEMS = 32
_ATOMS = (str, bytes, int, float, bool, type(None))
# Fields under which runnables and tools keep what they wrap.
_WRAPPED = ("func", "afunc", "bound", "runnable", "coroutine", "first", "middle", "last", "steps", "steps__")
# Nodes and tools made by these libraries declare their jumps; their internals mention `Command` for other reasons.
_DECLARING = ("langchain.", "langchain_core.", "langgraph.", "langgraph_supervisor.", "langgraph_swarm.", "deepagents.")


class _NoTask:
    """Stands for the class of tasks where LangGraph has another name for it."""


def walk(root: object) -> Iterator[object]:
    """Yield objects behind a runnable, nearest first, without entering graphs, tasks, modules or models."""
    from langchain_core.language_models import BaseLanguageModel
    from langchain_core.retrievers import BaseRetriever
    from langgraph.pregel.protocol import PregelProtocol

    opaque = (PregelProtocol, BaseLanguageModel, BaseRetriever, task_type(), type, types.ModuleType)
    seen: set[int] = set()
    level: list[object] = [root]
    kept: list[object] = []  # bound methods are made on the fly: an id must not be used twice
    for _ in range(_MAX_DEPTH):
        following: list[object] = []
        for item in level:
            if id(item) in seen or type(item) in _ATOMS:
                continue
            if len(seen) >= _MAX_OBJECTS:
                return
            seen.add(id(item))
            kept.append(item)
            yield item
            if not issubclass(type(item), opaque):
                following.extend(_children(item))
        level = following


def task_type() -> type:
    """Return the class of what `@task` makes; LangGraph does not publish it, so it may be one that nothing is."""
    from langgraph import func

    found = getattr(func, "_TaskFunction", None)
    return found if isinstance(found, type) else _NoTask


def declares(function: types.FunctionType) -> bool:
    """Whether a library wrote the function: its jumps are declared, and its globals say nothing about a node."""
    return (function.__module__ or "").startswith(_DECLARING)


def outer_function(runnable: object) -> types.FunctionType | None:
    """Return the function that a runnable runs first, where it is a plain Python function or method."""
    stored = _stored(runnable)
    for found in (runnable, stored.get("func"), stored.get("afunc")):
        if type(found) is types.MethodType:
            found = found.__func__
        if type(found) is types.FunctionType:
            return found
    return None


def safe_getattr(item: object, name: str) -> Any:
    """Return an attribute, or `None` when it is missing or its property raises."""
    try:
        return getattr(item, name, None)
    except Exception:  # noqa: BLE001 - a property of a foreign object may raise anything; a hint fails open
        return None


def _children(item: object) -> Iterator[object]:
    if type(item) is types.FunctionType:
        yield from _referenced(item)
    elif type(item) is types.MethodType:
        yield from (item.__func__, item.__self__)
        yield from _used_fields(item)
    elif issubclass(type(item), functools.partial):
        partial = cast("functools.partial[object]", item)
        yield from (partial.func, *partial.args[:_MAX_ITEMS], *list(partial.keywords.values())[:_MAX_ITEMS])
    elif type(item) is dict:  # exact types only: iterating a foreign container may run anything
        yield from list(item.values())[:_MAX_ITEMS]
    elif type(item) in (list, tuple, set, frozenset):
        yield from list(cast("Iterable[object]", item))[:_MAX_ITEMS]
    else:
        yield from _fields(item)


def _fields(item: object) -> Iterator[object]:
    """Yield what a runnable wraps, and the fields of a callable object of the user's."""
    stored = _stored(item)
    yield from (stored[name] for name in _WRAPPED if name in stored)
    call = safe_getattr(type(item), "__call__")
    if issubclass(type(call), types.FunctionType) and not declares(call):
        yield call
        yield from list(stored.values())[:_MAX_ITEMS]


def _used_fields(method: types.MethodType) -> Iterator[object]:
    """Yield the fields and methods of its object that a method names: `self.model`, `self._ask`."""
    owner, function = method.__self__, method.__func__
    if type(function) is not types.FunctionType:
        return
    stored = _stored(owner)
    for name in CodeFacts.of(function).names[: 2 * _MAX_ITEMS]:
        if name in stored:
            yield stored[name]
            continue
        for base in type(owner).__mro__:
            other = base.__dict__.get(name)
            if type(other) is types.FunctionType:
                yield types.MethodType(other, owner)
            if other is not None:
                break


def _stored(item: object) -> dict[str, object]:
    """Return the instance dictionary without running any property or `__getattr__` (lazy proxies, remote objects)."""
    try:
        stored = object.__getattribute__(item, "__dict__")
    except AttributeError:
        return {}
    return stored if type(stored) is dict else {}


def _referenced(function: types.FunctionType) -> Iterator[object]:
    """Yield what a function closes over and the globals that it names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell: the variable is not assigned yet
            continue
    if declares(function):
        return  # a library's globals say nothing about this node
    for name in CodeFacts.of(function).names:
        if name in function.__globals__:
            yield function.__globals__[name]
