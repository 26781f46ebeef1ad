"""Which nodes come next, as stored state tells it.

LangGraph starts a node when its trigger channel is written: `branch:to:<node>` for edges, branches and `Command`, a
`join:<sources>:<node>` channel that has all its sources, `__pregel_tasks` for `Send`.  The rules were checked against
`get_state().next` (langgraph 1.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

_BRANCH: Final = "branch:to:"
_JOIN: Final = "join:"
_SENDS: Final = "__pregel_tasks"


def next_of_writes(writes: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
    """Return the nodes that one task's writes lead to for sure, in order; joins wait for others and are left out."""
    nodes: list[str] = []
    for channel, value in writes:
        if channel.startswith(_BRANCH):
            nodes.append(channel.removeprefix(_BRANCH))
        elif channel == _SENDS and (node := getattr(value, "node", None)) is not None:
            nodes.append(str(node))
    return tuple(dict.fromkeys(nodes))


def next_of_checkpoint(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the nodes that a checkpoint leads to, in order of their channels; empty at the end of a graph."""
    nodes: list[str] = []
    for channel, value in values.items():
        if channel.startswith(_BRANCH) and _is_released(value):
            nodes.append(channel.removeprefix(_BRANCH))
        elif channel.startswith(_JOIN) and _is_released(value):
            sources, _, node = channel.removeprefix(_JOIN).rpartition(":")
            seen = value[0] if isinstance(value, tuple | list) and len(value) == 2 else value
            if seen and set(sources.split("+")) == set(seen):
                nodes.append(node)
        elif channel == _SENDS and isinstance(value, list):
            nodes += [str(send.node) for send in value if hasattr(send, "node")]
    return tuple(dict.fromkeys(nodes))


def _is_released(value: Any) -> bool:
    """A deferred node's channel is a pair whose second part says whether it may start."""
    return not (isinstance(value, tuple | list) and len(value) == 2 and value[1] is False)
