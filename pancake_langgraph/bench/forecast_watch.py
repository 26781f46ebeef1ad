"""Overhears a running runtime: what its forecaster answers, what it expects to be read, and what then happens.

Nothing here changes what the runtime does.  Before each node starts and before it ends the witness waits until the
runtime has taken in every signal so far, so that figures do not depend on how busy the machine is.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver

from pancake_langgraph._clock import Clock, VirtualClock
from pancake_langgraph._types import Candidate, Prompt
from pancake_langgraph.bench.forecast_score import END_LABEL, Decision, Lead, Observed, ReadCall
from pancake_langgraph.bench.forecast_truth import Execution, RunTruth, Written
from pancake_langgraph.engines import fake_text
from pancake_langgraph.forecast import Forecaster
from pancake_langgraph.prompts import strip_task_ids
from pancake_langgraph.prompts.prefix import common_prefix_tokens
from pancake_langgraph.runtime.expectations import ExpectedCall
from pancake_langgraph.runtime.runtime import Runtime
from pancake_langgraph.topology import Topology

#: A node counts as named from this chance on.
NAMED_P = 0.5
_WATCHED = ("on_chain_start", "on_chain_end", "on_chain_error", "on_chat_model_start", "on_wire_request")
_HEARD = (*_WATCHED, "on_wire_tool_name", "on_wire_field", "on_llm_end", "on_tool_start")


class SharedClock(VirtualClock):
    """A virtual clock that nodes and the fake engine move from their own threads."""

    def __init__(self) -> None:
        """Start at 0."""
        super().__init__()
        self._lock = threading.Lock()

    def advance(self, delta_s: float) -> None:
        """Move forward by `delta_s` seconds.

        Raises:
            ValueError: if `delta_s` is negative.
        """
        with self._lock:
            super().advance(delta_s)


@dataclass(frozen=True, slots=True)
class Said:
    """One answer of the forecaster: its number in the order of all events, when, about which node, and what."""

    number: int
    at_s: float
    node: str
    chances: Mapping[str, float]
    named: frozenset[str]


class OverheardForecaster:
    """Hands every question on to another forecaster and keeps its answers about candidates."""

    def __init__(self, inner: Forecaster, *, clock: Clock, numbers: Iterator[int]) -> None:
        """Wrap `inner`."""
        self._inner = inner
        self._clock = clock
        self.numbers = numbers
        self._topologies: dict[str, Topology] = {}
        self.said: list[Said] = []

    def __getattr__(self, name: str) -> Any:
        """Return what the wrapped forecaster has under `name`."""
        return getattr(self._inner, name)

    def add_graph(self, graph_id: str, topology: Topology) -> None:
        """Delegate, and keep the topology."""
        self._topologies[graph_id] = topology
        self._inner.add_graph(graph_id, topology)

    def candidates(self, graph_id: str, node: str, **kwargs: Any) -> tuple[Candidate, ...]:
        """Delegate, and keep the answer."""
        found = self._inner.candidates(graph_id, node, **kwargs)
        p_end = self._inner.p_end(graph_id, node, context=kwargs.get("context", ()))
        chances = next_chances(found, self._topologies.get(graph_id), node, p_end=p_end)
        named = frozenset(str(candidate.node) for candidate in found if candidate.p_next >= NAMED_P)
        self.said.append(Said(next(self.numbers), self._clock.now_s(), node, chances, named))
        return found


def next_chances(
    candidates: Sequence[Candidate], topology: Topology | None, node: str, *, p_end: float
) -> dict[str, float]:
    """Return the chances of what `node` leads to itself: the next step, nodes that wait for others, and the end.

    How many steps off a join or a deferred node is depends on what runs beside `node`, so it is taken by its name: of
    several candidates for it the nearest is the one that `node` itself leads to.  The chance of the end is cut to what
    the others leave: after a streamed tool name they are certain.
    """
    waiting = _waiting_exits(topology, node)
    chances: dict[str, float] = {}
    for candidate in sorted(candidates, key=lambda c: c.steps):
        target = str(candidate.node)
        if target in waiting:
            chances.setdefault(target, candidate.p_next)
        elif candidate.steps == 1:
            chances[target] = max(chances.get(target, 0.0), candidate.p_next)
    end = min(p_end, max(0.0, 1.0 - sum(chances.values())))
    return {**chances, END_LABEL: end} if end > 0.0 else chances


def _waiting_exits(topology: Topology | None, node: str) -> frozenset[str]:
    """Return the exits of `node` that start only when other branches have come as far."""
    hops = topology.hops(node) if topology else ()
    found = set()
    for hop in hops:
        info = topology.node(hop.target) if topology else None
        if hop.kind == "join" or (info is not None and info.deferred):
            found.add(str(hop.target))
    return frozenset(found)


class WritesSaver(InMemorySaver):
    """Keeps what each task of the present run wrote, as far as it routes."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.written: dict[str, Written] = {}

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Store, and remember."""
        new, old = Written.of(writes), self.written.get(task_id)
        if old is not None:  # a task may write more than once
            new = Written(new.targets | old.targets, new.is_call or old.is_call)
        self.written[task_id] = new
        super().put_writes(config, writes, task_id, task_path)

    def forget(self, thread_id: str) -> None:
        """Drop everything of a thread that has ended."""
        self.written.clear()
        self.delete_thread(thread_id)


@dataclass(slots=True)
class _Call:
    execution: str
    expected: tuple[ExpectedCall, ...]
    is_first: bool
    token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class _Run:
    """What one run has shown so far."""

    executions: OrderedDict[str, Execution] = field(default_factory=OrderedDict)
    expected: dict[str, tuple[ExpectedCall, ...]] = field(default_factory=dict)
    opened: dict[UUID, str] = field(default_factory=dict)
    calls: dict[UUID, _Call] = field(default_factory=dict)


class Witness:
    """Watches one run at a time from the user's side, a moment before the runtime does."""

    def __init__(self, runtime: Runtime, forecaster: OverheardForecaster, *, clock: Clock) -> None:
        """Watch the runs of `runtime`, which asks `forecaster`."""
        self._runtime = runtime
        self._forecaster = forecaster
        self._clock = clock
        self._numbers = forecaster.numbers
        self._run = _Run()

    def precede(self, handler: object) -> None:
        """Let every callback of the runtime's handler reach the witness first.

        LangChain keeps no order among handlers, so the two are made one.  What the handler was told is taken in before
        it returns: a virtual clock that went on meanwhile would make a moment seconds.
        """
        for name in _HEARD:
            then = self._taken_in(getattr(handler, name))
            setattr(handler, name, _in_order(getattr(self, name), then) if name in _WATCHED else then)

    def begin(self) -> None:
        """Forget the last run."""
        self._run = _Run()
        self._forecaster.said.clear()

    def observed(
        self, runs_seen: int, written: Mapping[str, Written], odds: Mapping[str, Mapping[str, float]]
    ) -> Observed:
        """Return what the run that has ended showed; `odds` are the true chances after nodes that draw lots."""
        run = self._run
        truth = RunTruth(tuple(run.executions.values()), written)
        leaves = truth.leaves
        decisions = tuple(
            Decision(runs_seen, e.label, self._chances(e), truth.after(e), odds.get(e.label)) for e in leaves if e.ended
        )
        return Observed(decisions, self._read_calls(runs_seen), self._leads(runs_seen, leaves))

    def _taken_in(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **kwargs: Any) -> Any:
            answer = callback(*args, **kwargs)
            self._runtime.expectations()
            return answer

        return told

    # -- callbacks ------------------------------------------------------------------------------------------------

    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: UUID, metadata: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Note the start of a node, and what the runtime expected before it."""
        meta = metadata or {}
        namespace = str(meta.get("langgraph_checkpoint_ns") or "")
        if not namespace or meta.get("langgraph_node") == "__start__" or namespace in self._run.executions:
            return
        self._run.expected[namespace] = self._runtime.expectations()
        self._run.opened[run_id] = namespace
        self._run.executions[namespace] = Execution(
            namespace, int(meta.get("langgraph_step") or 0), next(self._numbers), self._clock.now_s()
        )

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Note the end of a node, after all that the runtime said while it ran."""
        namespace = self._run.opened.pop(run_id, None)
        if namespace is not None:
            self._runtime.expectations()
            self._run.executions[namespace].ended = next(self._numbers)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Note the end of a node that failed or hands over to the graph around it."""
        self.on_chain_end(None, run_id=run_id)

    def on_chat_model_start(
        self, serialized: Any, messages: Any, *, run_id: UUID, metadata: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Note the start of a call; a later call of a node has what was expected just before it."""
        namespace = str((metadata or {}).get("langgraph_checkpoint_ns") or "")
        is_first = all(call.execution != namespace for call in self._run.calls.values())
        expected = self._run.expected.get(namespace, ()) if is_first else self._runtime.expectations()
        self._run.calls[run_id] = _Call(namespace, expected, is_first)

    def on_wire_request(self, run_id: UUID, payload: Mapping[str, Any]) -> None:
        """Note the real prompt."""
        if (call := self._run.calls.get(run_id)) is not None:
            call.token_ids = tokens_of(Prompt.of(payload.get("messages") or (), payload.get("tools")), is_asked=True)

    # -- reading --------------------------------------------------------------------------------------------------

    def _chances(self, execution: Execution) -> Mapping[str, float]:
        """Return the last forecast about a node before it ended; parallel executions of it share theirs."""
        said = [
            s
            for s in self._forecaster.said
            if s.node == execution.label and execution.started < s.number < execution.ended
        ]
        return said[-1].chances if said else {}

    def _leads(self, runs_seen: int, leaves: Sequence[Execution]) -> tuple[Lead, ...]:
        leads = []
        last: dict[str, tuple[Execution, int]] = {}
        for execution in leaves[1:]:
            before, after = last.get(execution.label, (None, 0))
            if before is not None and not execution.started < before.ended:  # beside it, both are named by the same
                after = before.started
            named = (s for s in self._forecaster.said if execution.label in s.named)
            first = next((s for s in named if after < s.number < execution.started), None)
            lead_s = execution.started_at_s - first.at_s if first else 0.0
            leads.append(Lead(runs_seen, execution.label, max(lead_s, 0.0)))
            last[execution.label] = execution, after
        return tuple(leads)

    def _read_calls(self, runs_seen: int) -> tuple[ReadCall, ...]:
        turns: dict[str, int] = {}
        ends = [e.ended for e in self._run.executions.values() if e.ended]
        first_end = min(ends, default=0)
        found = []
        for call in self._run.calls.values():
            if not call.token_ids:
                continue
            label = strip_task_ids(call.execution)
            expected = self._expected_of_step(call) if call.is_first else call.expected
            known, foretold = best_prefix(expected, label, call.token_ids)
            turn = turns.get(label, 0)
            turns[label] = turn + 1
            own = self._run.executions.get(call.execution)
            found.append(
                ReadCall(
                    runs_seen=runs_seen,
                    node=label,
                    turn=turn,
                    prompt_tokens=len(call.token_ids),
                    known_tokens=known,
                    foretold_tokens=foretold,
                    opens_run=own is None or own.started < first_end,
                )
            )
        return tuple(found)

    def _expected_of_step(self, call: _Call) -> tuple[ExpectedCall, ...]:
        """Return what was expected before any execution of the node in this step: workers share their prefix."""
        own = self._run.executions.get(call.execution)
        if own is None:
            return call.expected
        return tuple(
            expected
            for namespace, e in self._run.executions.items()
            if (e.label, e.around, e.step) == (own.label, own.around, own.step)
            for expected in self._run.expected[namespace]
        )


def best_prefix(expected: Sequence[ExpectedCall], node: str, token_ids: Sequence[int]) -> tuple[int, int]:
    """Return how many leading tokens of a prompt were foretold truly, and how long that prediction was."""
    best = (0, 0)
    for each in expected:
        if each.node == node:
            foretold = tokens_of(each.prompt, is_asked=False)
            best = max(best, (common_prefix_tokens(foretold, token_ids), len(foretold)))
    return best


def tokens_of(prompt: Prompt, *, is_asked: bool) -> tuple[int, ...]:
    """Return a prompt's tokens in the fake engine's template, with the opening of the answer if it `is_asked`."""
    return tuple(fake_text.render(prompt, add_generation_prompt=is_asked))


def _in_order(first: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        first(*args, **kwargs)
        return then(*args, **kwargs)

    return both


def counter() -> Iterator[int]:
    """Return numbers for one order of all events, from 1."""
    return itertools.count(1)


#: Moves the clock by the time that something other than a model call takes.
Work = Callable[[float], None]
