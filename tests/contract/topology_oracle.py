"""What a shape really does: every level's `next` in order, what each task set off, and the order in which nodes run.

The outermost level comes from the history of the graph; it must equal what the graph streams while it runs, and the
levels inside are then taken from that stream.
"""

import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tests.contract.topology_script import Answer, Scripted, Shape

START, END = "__start__", "__end__"
_THREAD = {"configurable": {"thread_id": "oracle"}, "recursion_limit": 40}


@dataclass
class Fired:
    """One task that ended well, and the nodes that its writes start; none when its branch ended.

    `left` says that the task jumped out of its graph, so that its graph went no further.
    """

    source: str
    targets: frozenset[str]
    left: bool = False


@dataclass
class Observed:
    """One run.

    `nexts` maps a level's prefix to the sets of nodes that were next, in order; `fired` are all tasks of all levels;
    `follows` are pairs of nodes of which the second started when the first had just ended (or runs it), up to the first
    time that two nodes ran at once; `ended` says that the whole run came to its end.
    """

    nexts: dict[str, list[set[str]]] = field(default_factory=lambda: defaultdict(list))
    fired: list[Fired] = field(default_factory=list)
    follows: list[tuple[str, str]] = field(default_factory=list)
    ended: bool = False


def observe(shape: Shape, script: tuple[Answer, ...]) -> Observed:
    """Run a shape once under a script, to its end or to the failure that it is made for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = shape.build(Scripted(answers=script))
    events: list[tuple[tuple[str, ...], str, Any]] = []
    failure: Exception | None = None
    try:
        for inputs in (shape.inputs, *shape.resumes):
            modes = ["tasks", "checkpoints"]
            events.extend(graph.stream(inputs, _THREAD, stream_mode=modes, subgraphs=True))
    except Exception as exc:
        failure = exc
    assert type(failure) is (shape.raises or type(None)), failure
    seen = Observed()
    _read_nexts(graph, events, seen)
    _read_writes(graph, events, seen)
    ending = {payload["id"] for _, mode, payload in events if mode == "tasks" and "result" in payload}
    _Order(seen, set(graph.nodes), ending).read(events)
    seen.ended = failure is None and not graph.get_state(_THREAD).next
    return seen


def plain(namespace: tuple[str, ...]) -> str:
    return "".join(f"{part.partition(':')[0]}|" for part in namespace)


def _read_nexts(graph: Any, events: list[Any], seen: Observed) -> None:
    streams: dict[tuple[str, ...], list[set[str]]] = defaultdict(list)
    for namespace, mode, payload in events:
        if mode == "checkpoints":
            streams[namespace].append(set(payload["next"]))
    history = [set(state.next) for state in reversed(list(graph.get_state_history(_THREAD)))]
    assert [step for step in history if step in streams[()]] == history
    seen.nexts[""] = history
    for namespace, steps in streams.items():
        if namespace:
            seen.nexts[plain(namespace)].extend([set[str](), *steps])


def _read_writes(graph: Any, events: list[Any], seen: Observed) -> None:
    """Attribute what comes next to the task whose writes start it."""
    names: dict[str, str] = {}
    well: set[str] = set()
    ended: set[str] = set()
    for namespace, mode, payload in events:
        if mode == "tasks":
            names[payload["id"]] = f"{plain(namespace)}{payload['name']}"
            if "result" in payload:
                ended.add(payload["id"])
            if "result" in payload and not payload["error"] and not payload["interrupts"]:
                well.add(payload["id"])
    seen.fired += [Fired(name, frozenset(), left=True) for task, name in names.items() if task not in ended]
    for namespace in {event[0] for event in events}:
        config = {"configurable": {"thread_id": "oracle", "checkpoint_ns": "|".join(namespace)}}
        for stored in graph.checkpointer.list(config):
            if stored.config["configurable"]["checkpoint_ns"] != "|".join(namespace):
                continue
            targets: dict[str, set[str]] = defaultdict(set)
            for task, channel, value in stored.pending_writes or ():
                targets[task] |= {f"{plain(namespace)}{name}" for name in _started_by(channel, value)}
            seen.fired += [Fired(names[task], frozenset(found)) for task, found in targets.items() if task in well]


def _started_by(channel: str, value: Any) -> list[str]:
    if channel.startswith("branch:to:"):
        return [channel.removeprefix("branch:to:")]
    if channel.startswith("join:"):
        return [channel.rpartition(":")[2]]
    if channel == "__pregel_tasks":
        return [send.node for send in (value if isinstance(value, list) else [value])]
    return []


class _Order:
    """Follows starts and ends of tasks, up to where two run at once.

    A task that jumps out of its graph tells no end: it is over when anything happens outside of it.
    """

    def __init__(self, seen: Observed, declared: set[str], ending: set[str]) -> None:
        self._seen = seen
        self._declared = declared
        self._ending = ending
        self._open: list[tuple[str, str]] = []
        self._parents: set[str] = set()
        self._last = self._before = START

    def read(self, events: list[Any]) -> None:
        for namespace, mode, payload in events:
            if mode != "tasks":
                continue
            if "input" not in payload:
                self._end(namespace, payload)
            elif not self._start(namespace, payload):
                return
        self._seen.follows.append((self._last, END))

    def _start(self, namespace: tuple[str, ...], payload: Any) -> bool:
        node = self._name(namespace, payload["name"])
        if self._open and self._open[-1][1] == node:
            return False  # a fan-out
        self._drop_left(node)
        if self._open and not node.startswith(f"{self._open[-1][1]}|"):
            return False
        if self._open:
            self._parents.add(self._open[-1][1])
        self._seen.follows.append((self._last, node))
        self._open.append((payload["id"], node))
        self._before, self._last = self._last, node
        return True

    def _end(self, namespace: tuple[str, ...], payload: Any) -> None:
        node = f"{plain(namespace)}{payload['name']}"
        self._drop_left(node)
        if "__error_handler__" in node:  # it tells its end only
            self._seen.follows.append((self._last, node))
            self._last = node
        if not self._open or self._open[-1][0] != payload["id"]:
            return
        _, node = self._open.pop()
        if payload["interrupts"]:
            self._last = self._before
        elif node in self._parents:
            self._parents.discard(node)  # what it ran last stands for it
        else:
            self._last = node

    def _drop_left(self, node: str) -> None:
        while self._open and self._open[-1][0] not in self._ending and not node.startswith(f"{self._open[-1][1]}|"):
            self._parents.discard(self._open.pop()[1])

    def _name(self, namespace: tuple[str, ...], name: str) -> str:
        """Tasks of the functional API run under the node that calls them, which the stream does not say."""
        node = f"{plain(namespace)}{name}"
        if self._open and not namespace and name not in self._declared:
            return f"{self._open[-1][1]}|{name}"
        return node
