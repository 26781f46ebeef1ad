"""Guarded looks into other people's objects.  Everything in here is a hint and may be wrong or empty.

LangGraph and LangChain do not publish what a node's function closes over, yet that is where models, tools and
undeclared jumps are.  The reads below walk closures, referenced globals and wrapped runnables, within a budget; a
failed read yields nothing and is never an error.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from pancake_langgraph.topology.parts import NodeKind

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

HANDOFF_KEY = "__handoff_destination"

_MAX_OBJECTS = 400
_MAX_DEPTH = 6
_MAX_ITEMS = 32
_ATOMS = (str, bytes, int, float, bool, type(None))
# Fields under which runnables and tools keep what they wrap.
_WRAPPED = ("func", "afunc", "bound", "runnable", "coroutine", "first", "middle", "last", "steps", "steps__")
# Nodes and tools made by these libraries declare their jumps; their internals mention `Command` for other reasons.
_DECLARING = ("langchain.", "langchain_core.", "langgraph.", "langgraph_supervisor.", "langgraph_swarm.")


@dataclass(frozen=True, slots=True)
class JumpTraits:
    """What the code of a node suggests: `jumps` by command, `leaves_graph` to a parent, and the `names` it mentions."""

    jumps: bool = False
    leaves_graph: bool = False
    sends: bool = False
    names: frozenset[str] = frozenset()


def guarded(read: Callable[[object], _T], *, on_failure: _T) -> Callable[[object], _T]:
    """Make a read that never raises: it logs once per failure at debug level and gives `on_failure`."""

    @functools.wraps(read)
    def guard(runnable: object) -> _T:
        try:
            return read(runnable)
        except Exception:  # foreign objects may raise anything; a hint fails open
            _logger.debug("a look into %s failed", type(runnable).__qualname__, exc_info=True)
            return on_failure

    return guard


def _node_kind(runnable: object) -> NodeKind:
    """Guess what a node does.  A node with a model is a model node even if it also reads documents."""
    from langchain_core.language_models import BaseLanguageModel
    from langchain_core.retrievers import BaseRetriever

    if isinstance(safe_getattr(runnable, "tools_by_name"), Mapping):
        return "tools"
    found: NodeKind = "unknown"
    for item in walk(runnable):
        # By type, not `isinstance`: that asks lazy proxies for their `__class__`.
        if issubclass(type(item), BaseLanguageModel):
            return "model"
        if issubclass(type(item), BaseRetriever):
            found = "retriever"
        elif type(item) is types.FunctionType and found == "unknown":
            found = "plain"
    return found


def _tools_of(runnable: object) -> dict[str, str | None]:
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


def _jump_traits(runnable: object) -> JumpTraits:
    """Look for jumps that a node's own code, or a plain tool of a tools node, can make without declaring them."""
    from langgraph.types import Command, Send

    tools = safe_getattr(runnable, "tools_by_name")
    if isinstance(tools, Mapping):
        destinations = _tools_of(runnable)
        parts = [_jump_traits(tool) for name, tool in tools.items() if destinations.get(str(name)) is None]
        return JumpTraits(
            jumps=any(part.jumps for part in parts),
            leaves_graph=any(part.leaves_graph for part in parts),
            names=frozenset[str]().union(*(part.names for part in parts)),
        )
    jumps = leaves_graph = sends = False
    names: set[str] = set()
    for function in walk(runnable):
        if type(function) is not types.FunctionType or _declares(function):
            continue
        code = _CodeFacts.of(function)
        names |= code.strings
        sends = sends or code.mentions("Send", Send)
        # `Command(update=...)` alone does not move; a bare `Command` handed around might.
        if code.mentions("Command", Command) and ("goto" in code.strings or "update" not in code.strings):
            jumps = True
            leaves_graph = leaves_graph or "PARENT" in code.names
    return JumpTraits(jumps, leaves_graph, sends, frozenset(names))


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
            if id(item) in seen or type(item) in _ATOMS:
                continue
            if len(seen) >= _MAX_OBJECTS:
                return
            seen.add(id(item))
            yield item
            if not issubclass(type(item), opaque):
                following.extend(_children(item))
        level = following


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
    if issubclass(type(call), types.FunctionType) and not _declares(call):
        yield call
        yield from list(stored.values())[:_MAX_ITEMS]


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
        values = function.__globals__
        strings.update(text for name in names if isinstance(text := values.get(name), str))  # `END` and the like
        return _CodeFacts(frozenset(names), frozenset(strings), values)

    def mentions(self, name: str, value: object) -> bool:
        """Whether the code names `value`, by its usual name or under an alias."""
        return name in self.names or any(self.values.get(other) is value for other in self.names)


_UNKNOWN: NodeKind = "unknown"
_NO_TOOLS: dict[str, str | None] = {}

node_kind = guarded(_node_kind, on_failure=_UNKNOWN)
tools_of = guarded(_tools_of, on_failure=_NO_TOOLS)
# What could not be looked at may jump anywhere.
jump_traits = guarded(_jump_traits, on_failure=JumpTraits(jumps=True))
