"""Prompts that a compiled graph tells before its first call: agents made by `create_agent`, and declared ones.

Runs nothing of the application's and does no I/O.  What cannot be read is left out: it is learned from calls then.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final

from langchain_core.messages import SystemMessage
from langchain_core.utils.function_calling import convert_to_openai_tool

from pancake_langgraph._types import WireObject
from pancake_langgraph.phases import phase_of
from pancake_langgraph.prompts.align import literal
from pancake_langgraph.prompts.declared import DeclaredPrompt
from pancake_langgraph.prompts.parts import Keep, Part, Slice
from pancake_langgraph.prompts.prediction import Source
from pancake_langgraph.prompts.wire_form import wire_form
from pancake_langgraph.topology._private import safe_getattr, walk

logger = logging.getLogger(__name__)

METADATA_KEY: Final = "pancake"
_FACTORY: Final = "langchain.agents.factory"
_CHAT_BASE: Final = "BaseChatOpenAI"
_MAX_NESTING: Final = 6
_MAX_NODES: Final = 512


def prompts_of(graph: object) -> tuple[DeclaredPrompt, ...]:
    """Return what is known of the prompts of a compiled graph's nodes, sub-graphs included.  Never raises."""
    found: list[DeclaredPrompt] = []
    try:
        for namespace, node, agent_name in _nodes(_unbound(graph), "", 0):
            if (known := _declared(namespace, node) or _agent(namespace, node, agent_name)) is not None:
                found.append(known)
    except Exception as exc:  # noqa: BLE001 - foreign objects may raise anything; a hint fails open
        logger.debug("prompts of a graph could not be read: %s", type(exc).__name__)
    return tuple(found)


def _unbound(graph: object) -> Any:
    while (bound := safe_getattr(graph, "bound")) is not None and not hasattr(graph, "nodes"):
        graph = bound
    return graph


def _nodes(graph: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any, str | None]]:
    nodes = safe_getattr(graph, "nodes")
    if not isinstance(nodes, Mapping) or depth > _MAX_NESTING:
        return
    name = safe_getattr(graph, "name")
    for node_name, node in list(nodes.items())[:_MAX_NODES]:
        yield f"{prefix}{node_name}", node, name if isinstance(name, str) else None
    if callable(subgraphs := safe_getattr(graph, "get_subgraphs")):
        for inner_name, inner in subgraphs():
            yield from _nodes(inner, f"{prefix}{inner_name}|", depth + 1)


def _declared(namespace: str, node: Any) -> DeclaredPrompt | None:
    """Return the prompt that node metadata or a phase declares."""
    metadata = safe_getattr(node, "metadata")
    pancake = metadata.get(METADATA_KEY) if isinstance(metadata, Mapping) else None
    prompt = pancake.get("prompt") if isinstance(pancake, Mapping) else safe_getattr(pancake, "prompt")
    if prompt is None and (phase := phase_of(safe_getattr(node, "bound"))) is not None:
        prompt = phase.prompt
    return None if prompt is None else DeclaredPrompt(namespace, Source.DECLARED, prompt=prompt)


def _agent(namespace: str, node: Any, agent_name: str | None) -> DeclaredPrompt | None:
    """Return prompt and tools of a `create_agent` model node that no middleware can alter."""
    bound = safe_getattr(node, "bound")
    function = safe_getattr(bound, "func")
    if type(function) is not types.FunctionType or function.__module__ != _FACTORY:
        return None
    cells = _cells(function)
    others = _cells(safe_getattr(bound, "afunc"))
    if "default_tools" not in cells or cells.get("wrap_model_call_handler") or others.get("awrap_model_call_handler"):
        return None
    model = cells.get("model")
    if _CHAT_BASE not in {kind.__name__ for kind in type(model).__mro__}:
        return None  # another client may lay its requests out in another way
    tools = _tools(cells, bound)
    head = _head(cells.get("system_message"))
    if head is None:
        return None
    layout = "strict" if safe_getattr(model, "strict_roles") is True else ""
    if safe_getattr(model, "tool_call_id_style") == "alnum9" or safe_getattr(model, "send_reasoning_back") is True:
        return None  # learned from calls instead
    parts: tuple[Part, ...] = (*head, Slice("messages", Keep(layout=layout or "paired")))
    return DeclaredPrompt(
        namespace,
        Source.CODE,
        parts=parts,
        bound_tools=tools,
        tool_order=safe_getattr(model, "tool_order"),
        agent_name=agent_name,
    )


def _head(system: object) -> tuple[Part, ...] | None:
    if system is None:
        return ()
    wire = wire_form([system]) if isinstance(system, SystemMessage) else None
    return tuple(literal(message) for message in wire) if wire else None


def _tools(cells: Mapping[str, object], bound: object) -> tuple[WireObject, ...] | None:
    """Return the tools as they are bound, or `None` where only a call can tell."""
    tools, strict = cells["default_tools"], None
    answer = cells.get("initial_response_format")
    extra: list[object] = []
    if answer is not None:
        kind = type(answer).__name__
        if kind == "ProviderStrategy":
            strict = True
        elif kind == "ToolStrategy":
            infos = _found(bound, "structured_output_tools")
            if not isinstance(infos, Mapping):
                return None
            extra = [safe_getattr(info, "tool") for info in infos.values()]
        else:
            return None  # the agent asks the server first which strategy it can do
    if not isinstance(tools, list):
        return None
    wire = [_wire_tool(tool, strict=strict) for tool in (*tools, *extra)]
    if any(tool is None for tool in wire):
        return None
    known = [tool for tool in wire if tool is not None]
    return tuple(known)


def _wire_tool(tool: Any, *, strict: bool | None) -> WireObject | None:
    if safe_getattr(tool, "extras"):
        return None
    converted: WireObject = convert_to_openai_tool(tool, strict=strict)
    return converted


def _found(bound: object, name: str) -> object:
    """Return what a function behind the node closes over under `name`."""
    for item in walk(bound):
        if type(item) is types.FunctionType and item.__module__ == _FACTORY and name in (cells := _cells(item)):
            return cells[name]
    return None


def _cells(function: object) -> dict[str, object]:
    if type(function) is not types.FunctionType:
        return {}
    found: dict[str, object] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found
