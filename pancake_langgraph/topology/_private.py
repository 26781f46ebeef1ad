"""Guarded looks into other people's objects.  Everything in here is a hint and may be wrong or empty.

LangGraph and LangChain do not publish what a node's function closes over, yet that is where models, tools and
undeclared jumps are.  The reads below walk closures, referenced globals and wrapped runnables, within a budget; a
failed read yields nothing and is never an error.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pancake_langgraph.topology.parts import NodeKind

HANDOFF_KEY = "__handoff_destination"

_MAX_OBJECTS = 400
_MAX_DEPTH = 6
_MAX_ITEMS = 32
_WRAPPED = ("func", "afunc", "bound", "runnable", "coroutine", "path")
# Nodes and tools made by these libraries declare their jumps; their internals mention `Command` for other reasons.
_DECLARING = ("langchain.", "langchain_core.", "langgraph.", "langgraph_supervisor.", "langgraph_swarm.")


@dataclass(frozen=True, slots=True)
class JumpTraits:
    """What the code of a node suggests: `jumps` by command, `leaves_graph` to a parent, and the `names` it mentions."""

    jumps: bool = False
    leaves_graph: bool = False
    sends: bool = False
    names: frozenset[str] = frozenset()


def node_kind(runnable: object) -> NodeKind:
    """Guess what a node does.  A node with a model is a model node even if it also reads documents."""
    from langchain_core.language_models import BaseLanguageModel
    from langchain_core.retrievers import BaseRetriever

    if isinstance(safe_getattr(runnable, "tools_by_name"), Mapping):
        return "tools"
    found: NodeKind = "unknown"
    for item in walk(runnable):
        if isinstance(item, BaseLanguageModel):
            return "model"
        if isinstance(item, BaseRetriever):
            found = "retriever"
        elif isinstance(item, types.FunctionType) and found == "unknown":
            found = "plain"
    return found


def tools_of(runnable: object) -> dict[str, str | None]:
    """Return tool name to handoff destination (`None` for an ordinary tool); empty for nodes that run no tools."""
    tools = safe_getattr(runnable, "tools_by_name")
    if not isinstance(tools, Mapping):
        return {}
    destinations: dict[str, str | None] = {}
    for name, tool in tools.items():
        metadata = safe_getattr(tool, "metadata")
        target = metadata.get(HANDOFF_KEY) if isinstance(metadata, Mapping) else None
        destinations[str(name)] = target if isinstance(target, str) else None
    return destinations


def jump_traits(runnable: object) -> JumpTraits:
    """Look for jumps that a node's own code, or a plain tool of a tools node, can make without declaring them."""
    from langgraph.types import Command, Send

    tools = safe_getattr(runnable, "tools_by_name")
    if isinstance(tools, Mapping):
        destinations = tools_of(runnable)
        parts = [jump_traits(tool) for name, tool in tools.items() if destinations.get(str(name)) is None]
        return JumpTraits(
            jumps=any(part.jumps for part in parts),
            leaves_graph=any(part.leaves_graph for part in parts),
            names=frozenset[str]().union(*(part.names for part in parts)),
        )
    jumps = leaves_graph = sends = False
    names: set[str] = set()
    for function in walk(runnable):
        if not isinstance(function, types.FunctionType) or _declares(function):
            continue
        code = _CodeFacts.of(function)
        names |= code.strings
        sends = sends or code.mentions("Send", Send)
        # `Command(update=...)` alone does not move; a bare `Command` handed around might.
        if code.mentions("Command", Command) and ("goto" in code.strings or "update" not in code.strings):
            jumps = True
            leaves_graph = leaves_graph or "PARENT" in code.names
    return JumpTraits(jumps, leaves_graph, sends, frozenset(names))


def declares_no_targets(runnable: object) -> Literal[True] | None:
    """Return `True` when no Python code could be found behind a runnable, so nothing can be said about its jumps."""
    return None if any(isinstance(item, types.FunctionType) for item in walk(runnable)) else True


def walk(root: object) -> Iterator[object]:
    """Yield objects behind a runnable, nearest first, without entering sub-graphs, modules or models."""
    from langchain_core.language_models import BaseLanguageModel
    from langchain_core.retrievers import BaseRetriever
    from langgraph.pregel.protocol import PregelProtocol

    opaque = (PregelProtocol, BaseLanguageModel, BaseRetriever, type, types.ModuleType)
    seen: set[int] = set()
    level: list[object] = [root]
    for _ in range(_MAX_DEPTH):
        following: list[object] = []
        for item in level:
            if id(item) in seen or isinstance(item, str | bytes | int | float | bool | None):
                continue
            if len(seen) >= _MAX_OBJECTS:
                return
            seen.add(id(item))
            yield item
            if not isinstance(item, opaque):
                following.extend(_children(item))
        level = following


def safe_getattr(item: object, name: str) -> Any:
    """Return an attribute, or `None` when it is missing or its property raises."""
    try:
        return getattr(item, name, None)
    except Exception:  # noqa: BLE001 - a property of a foreign object may raise anything; a hint fails open
        return None


def _children(item: object) -> Iterator[object]:
    if isinstance(item, types.FunctionType):
        yield from _referenced(item)
    elif isinstance(item, types.MethodType):
        yield from (item.__func__, item.__self__)
    elif isinstance(item, functools.partial):
        yield from (item.func, *item.args[:_MAX_ITEMS], *list(item.keywords.values())[:_MAX_ITEMS])
    elif isinstance(item, Mapping):
        yield from list(item.values())[:_MAX_ITEMS]
    elif isinstance(item, list | tuple | set | frozenset):
        yield from list(item)[:_MAX_ITEMS]
    else:
        yield from _fields(item)


def _fields(item: object) -> Iterator[object]:
    """Yield what a runnable wraps, and the fields of a callable object of the user's."""
    for name in _WRAPPED:
        if (value := safe_getattr(item, name)) is not None:
            yield value
    steps = safe_getattr(item, "steps")
    if isinstance(steps, list | tuple):
        yield from list(steps)[:_MAX_ITEMS]
    call = safe_getattr(type(item), "__call__")
    if isinstance(call, types.FunctionType) and not _declares(call):
        yield call
        yield from list(vars(item).values())[:_MAX_ITEMS] if hasattr(item, "__dict__") else ()


def _referenced(function: types.FunctionType) -> Iterator[object]:
    """Yield what a function closes over and the globals that it names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell: the variable is not assigned yet
            continue
    if _declares(function):
        return  # a library's globals say nothing about this node
    for name in _CodeFacts.of(function).names:
        if name in function.__globals__:
            yield function.__globals__[name]


def _declares(function: types.FunctionType) -> bool:
    return (function.__module__ or "").startswith(_DECLARING)


@dataclass(frozen=True, slots=True)
class _CodeFacts:
    """Names and string constants of a function and of the functions written inside it."""

    names: frozenset[str]
    strings: frozenset[str]
    values: Mapping[str, object]

    @staticmethod
    def of(function: types.FunctionType) -> _CodeFacts:
        names: set[str] = set()
        strings: set[str] = set()
        stack: list[object] = [function.__code__]
        while stack:
            constant = stack.pop()
            if isinstance(constant, types.CodeType):
                names.update(constant.co_names)
                stack.extend(constant.co_consts)
            elif isinstance(constant, str):
                strings.add(constant)
            elif isinstance(constant, tuple | frozenset):
                stack.extend(constant)
        return _CodeFacts(frozenset(names), frozenset(strings), function.__globals__)

    def mentions(self, name: str, value: object) -> bool:
        """Whether the code names `value`, by its usual name or under an alias."""
        return name in self.names or any(self.values.get(other) is value for other in self.names)
