"""Attach a runtime to a graph: one line, or none at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from pancake_langgraph._errors import ConfigError, TopologyError
from pancake_langgraph.config import settings_from_env
from pancake_langgraph.plan import read_phases
from pancake_langgraph.runtime.handler import RuntimeHandler
from pancake_langgraph.runtime.runtime import Runtime
from pancake_langgraph.topology import read_topology

if TYPE_CHECKING:
    from langgraph.pregel import Pregel

G = TypeVar("G", bound="Pregel[Any, Any, Any, Any]")


def attach(graph: G, *, runtime: Runtime | None = None, **settings: Any) -> G:
    """Return the graph with a runtime watching it.

    The result is a copy made by `with_config`: same type, same results, same checkpoints; the graph given is not
    changed.  Keyword arguments are fields of `RuntimeSettings`; what is not given comes from `PANCAKE_*` variables.
    A runtime given stays the caller's to close; one made here ends with the process, or by `runtime_of(g).close()`.
    A checkpointer that tells what it stored (`PancakeSaver`, or any other in `observe`) is listened to.

    Raises:
        TopologyError: if `graph` is not a compiled graph.
        ConfigError: if a setting is wrong, or settings are given together with a runtime.
    """
    if runtime is not None and settings:
        raise ConfigError(f"give either a runtime or settings, got both (settings: {', '.join(sorted(settings))})")
    if not hasattr(graph, "with_config") or not hasattr(graph, "nodes"):
        raise TopologyError(
            f"attach needs a compiled graph, got {type(graph).__name__}; "
            "call .compile() on a StateGraph, or pass the @entrypoint function's graph"
        )
    if runtime_of(graph) is not None:
        raise ConfigError("this graph is attached already; close its runtime and attach the original graph again")
    chosen = runtime or Runtime(settings_from_env(**settings))
    handler = chosen.handler(graph_id=chosen.learn_topology(read_topology(graph), read_phases(graph)))
    chosen.learn_prompts(handler.graph_id, graph)
    chosen.listen_to(getattr(graph, "checkpointer", None))
    return graph.with_config(callbacks=[handler])  # added to the graph's own


def runtime_of(graph: Any) -> Runtime | None:
    """Return the runtime attached to a graph, if any."""
    callbacks = (getattr(graph, "config", None) or {}).get("callbacks")
    for handler in callbacks if isinstance(callbacks, list) else getattr(callbacks, "handlers", ()):
        if isinstance(handler, RuntimeHandler) and isinstance(handler.runtime, Runtime):
            return handler.runtime
    return None
