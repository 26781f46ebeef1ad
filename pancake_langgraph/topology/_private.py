"""Guarded looks into other people's objects.  Everything in here is a hint and may be wrong or empty.

LangGraph and LangChain do not publish what a node's function closes over, yet that is where models, tools and
undeclared jumps are.  The reads below walk closures, referenced globals and wrapped runnables, within a budget; a
failed read yields nothing and is never an error.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pancake_langgraph.topology._code import CodeFacts, is_straight, mentioned_values
from pancake_langgraph.topology._walk import declares, outer_function, safe_getattr, task_type, walk
from pancake_langgraph.topology.parts import CallKind, NodeKind

__all__ = [
    "HANDOFF_KEY",
    "Hints",
    "Inner",
    "JumpTraits",
    "always_routes",
    "calls_of",
    "guarded",
    "hints_of",
    "inner_of",
    "interrupts",
    "jump_traits",
    "node_kind",
    "safe_getattr",
    "tools_of",
    "walk",
]

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

HANDOFF_KEY = "__handoff_destination"

# The model nodes of these agents never jump by themselves.
_NEVER_JUMPING = ("langchain.agents.factory", "langgraph.prebuilt.chat_agent_executor")
_MAX_INNER = 16


@dataclass(frozen=True, slots=True)
class Inner:
    """What the code of a node runs itself: `graphs`, and `tasks` in the order in which the code names them.

    `always` says that the node does nothing but run its one graph, so that the graph stands for the node.
    """

    graphs: tuple[Any, ...] = ()
    tasks: tuple[Any, ...] = ()
    always: bool = False


@dataclass(frozen=True, slots=True)
class JumpTraits:
    """What the code of a node suggests: `jumps` by command, `leaves_graph` to a parent, and the `names` it mentions."""

    jumps: bool = False
    leaves_graph: bool = False
    sends: bool = False
    names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Hints:
    """All looks into one runnable."""

    kind: NodeKind
    calls: tuple[CallKind, ...]
    tools: Mapping[str, str | None]
    traits: JumpTraits
    inner: Inner
    interrupts: bool


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
    outer = outer_function(runnable)
    if outer is not None and (outer.__module__ or "").startswith(_NEVER_JUMPING):
        return JumpTraits()  # it holds the tools that it offers to the model, but does not run them
    jumps = leaves_graph = sends = False
    names: set[str] = set()
    for function in walk(runnable):
        if type(function) is not types.FunctionType or declares(function):
            continue
        code = CodeFacts.of(function)
        names |= code.strings
        sends = sends or code.mentions("Send", Send)
        # `Command(update=...)` alone does not move; a bare `Command` handed around might.
        if code.mentions("Command", Command) and ("goto" in code.strings or "update" not in code.strings):
            jumps = True
            leaves_graph = leaves_graph or "PARENT" in code.names
    return JumpTraits(jumps, leaves_graph, sends, frozenset(names))


def _calls_of(runnable: object) -> frozenset[CallKind]:
    """Say what a node may call.  What a library's function holds on to is not called, except for its model."""
    from langchain_core.language_models import BaseLanguageModel
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.tools import BaseTool
    from langgraph.pregel.protocol import PregelProtocol

    tools = safe_getattr(runnable, "tools_by_name")
    if isinstance(tools, Mapping):
        return frozenset[CallKind](("tools",)).union(*(_calls_of(tool) for tool in tools.values()))
    if issubclass(type(runnable), PregelProtocol):
        return frozenset[CallKind](("graph",))
    outer = outer_function(runnable)
    holds = outer is not None and (outer.__module__ or "").startswith(_NEVER_JUMPING)
    found: set[CallKind] = set()
    for item in walk(runnable):
        if issubclass(type(item), BaseLanguageModel):
            found.add("model")
        elif holds or item is runnable:
            continue
        elif issubclass(type(item), BaseRetriever):
            found.add("retriever")
        elif issubclass(type(item), PregelProtocol):
            found.add("graph")
        elif _is_tool(item, BaseTool):
            found.add("tools")
    return frozenset(found)


def _is_tool(item: object, tool: type) -> bool:
    return issubclass(type(item), tool) or isinstance(_tool_names(item), Mapping)


def _tool_names(item: object) -> object:
    return safe_getattr(item, "tools_by_name") if hasattr(type(item), "tools_by_name") else None


def _inner_of(runnable: object) -> Inner:
    """Find the graphs and tasks that a node's code can run, by the objects that it refers to."""
    from langgraph.pregel.protocol import PregelProtocol

    if issubclass(type(runnable), PregelProtocol):
        return Inner((runnable,), always=True)
    task = task_type()
    graphs: dict[int, Any] = {}
    tasks: dict[int, Any] = {}
    for item in _with_tools(runnable):
        if issubclass(type(item), PregelProtocol):
            graphs.setdefault(id(item), item)
        elif issubclass(type(item), task):
            tasks.setdefault(id(item), item)
    outer = outer_function(runnable)
    order = {id(value): at for at, value in enumerate(mentioned_values(outer))} if outer is not None and tasks else {}
    by_order = sorted(tasks.values(), key=lambda each: order.get(id(each), len(order)))
    always = len(graphs) == 1 and not tasks and (outer is None or declares(outer) or is_straight(outer))
    always = always and not isinstance(safe_getattr(runnable, "tools_by_name"), Mapping)
    return Inner(tuple(graphs.values())[:_MAX_INNER], tuple(by_order)[:_MAX_INNER], always)


def _with_tools(runnable: object) -> Iterator[object]:
    tools = safe_getattr(runnable, "tools_by_name")
    if isinstance(tools, Mapping):
        for tool in tools.values():
            yield from walk(tool)
        return
    outer = outer_function(runnable)
    if outer is None or not (outer.__module__ or "").startswith(_NEVER_JUMPING):
        yield from walk(runnable)


def _always_routes(path: object) -> bool:
    """Whether a conditional edge always names a target: those of agents do; one of the user's may return none."""
    outer = outer_function(path)
    return outer is not None and (outer.__module__ or "").startswith("langchain.agents.")


def _interrupts(runnable: object) -> bool:
    """Whether the code of a node names LangGraph's `interrupt`."""
    from langgraph.types import interrupt

    return any(
        type(function) is types.FunctionType and CodeFacts.of(function).mentions("", interrupt)
        for function in _with_tools(runnable)
    )


_UNKNOWN: NodeKind = "unknown"
_NO_TOOLS: dict[str, str | None] = {}

node_kind = guarded(_node_kind, on_failure=_UNKNOWN)
always_routes = guarded(_always_routes, on_failure=False)
calls_of = guarded(_calls_of, on_failure=frozenset[CallKind]())
inner_of = guarded(_inner_of, on_failure=Inner())
interrupts = guarded(_interrupts, on_failure=False)
tools_of = guarded(_tools_of, on_failure=_NO_TOOLS)
# What could not be looked at may jump anywhere.
jump_traits = guarded(_jump_traits, on_failure=JumpTraits(jumps=True))


def hints_of(runnable: object) -> Hints:
    """Look once at everything.  Never raises."""
    return Hints(
        node_kind(runnable),
        tuple(sorted(calls_of(runnable))),
        tools_of(runnable),
        jump_traits(runnable),
        inner_of(runnable),
        interrupts(runnable),
    )
