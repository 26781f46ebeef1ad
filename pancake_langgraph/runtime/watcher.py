"""Watches: turns signals into knowledge (prompts, transitions, durations) and into expected calls."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from uuid import UUID

from langchain_core.messages import AIMessage

from pancake_langgraph._types import Candidate, NodeId, Outcome, Prompt, ThreadId, WireObject
from pancake_langgraph.ledger import SpanKind, SpanStatus
from pancake_langgraph.prompts import agent_key, begins_with, strip_task_ids
from pancake_langgraph.prompts.identity import parent_namespace
from pancake_langgraph.prompts.prefix import common_prefix_tokens
from pancake_langgraph.prompts.wire_form import wire_form
from pancake_langgraph.runtime.actor import Actor
from pancake_langgraph.runtime.expectations import Cause, Expectation, Place
from pancake_langgraph.runtime.signals import Closed, FirstPiece, Measured, Opened, Requested, Routed, Signal, ToolNamed
from pancake_langgraph.runtime.spans import OpenSpan
from pancake_langgraph.runtime.state import DEFAULT_MAX_OUTPUT_TOKENS, Call, State, estimated_tokens

#: `Place.around` of a predicted call whose task ids are not known yet.
ANYWHERE = "*"
CONTEXT_NODES = 4
#: A successor less probable than this is one branch of several.
CERTAIN = 0.999
START = NodeId("__start__")
END = NodeId("__end__")


@dataclass(slots=True)
class Trail:
    """Where one run has been: the leaf node that ended last, when it had started, and the nodes before it.

    `is_cut` says that a node was interrupted: the end of the run is then not the end of the graph.
    """

    last: NodeId = START
    started_at_s: float = 0.0
    context: tuple[NodeId, ...] = ()
    composites: set[str] = field(default_factory=set)
    is_cut: bool = False

    def step(self, node: NodeId, started_at_s: float) -> None:
        """Move on to `node`."""
        self.context = (*self.context, self.last)[-CONTEXT_NODES:]
        self.last, self.started_at_s = node, started_at_s


class Watcher:
    """Learns from signals.  Lives on the runtime's loop."""

    def __init__(self, state: State, actor: Actor) -> None:
        """Report to `actor` what has to be acted on."""
        self._state = state
        self._actor = actor
        self._trails: OrderedDict[UUID, Trail] = OrderedDict()

    def receive(self, signal: Signal) -> None:
        """Take in one signal."""
        if isinstance(signal, Opened):
            self._opened(signal)
        elif isinstance(signal, Requested):
            self._requested(signal)
        elif isinstance(signal, FirstPiece):
            self._first_piece(signal)
        elif isinstance(signal, ToolNamed):
            self._tool_named(signal)
        elif isinstance(signal, Measured):
            self._measured(signal)
        elif isinstance(signal, Routed):
            self._routed(signal)
        else:
            self._closed(signal)

    # -- starts ---------------------------------------------------------------------------------------------------

    def _opened(self, signal: Opened) -> None:
        if self._state.spans.get(signal.run_id) is not None:
            return  # two handlers of this runtime see the run: graph and sub-graph were both attached
        span = self._state.spans.open(signal)
        if signal.kind is SpanKind.NODE:
            self._node_started(signal, span)
        elif signal.kind is SpanKind.TOOL:
            self._tool_started(signal)

    def _node_started(self, signal: Opened, span: OpenSpan) -> None:
        node = NodeId(strip_task_ids(signal.checkpoint_ns) or signal.name)
        around = parent_namespace(signal.checkpoint_ns)
        trail = self._trail_of(span)
        if around:
            trail.composites.add(around)
        graph_id = _graph_id(signal)
        self._state.forecaster.observe_transition(
            graph_id,
            trail.last,
            node,
            elapsed_s=signal.at_s - (trail.started_at_s or signal.at_s),
            context=trail.context,
        )
        thread_id = _thread_of(signal, span)
        self._drop_dead_branches(node, around, span)
        messages = wire_form(signal.state_messages) if signal.state_messages else None
        for candidate in self._state.forecaster.candidates(graph_id, node, context=(*trail.context, trail.last)):
            self._expect_successor(candidate, thread_id, around, span, messages)
        self._actor.poke()

    def _drop_dead_branches(self, node: NodeId, around: str, span: OpenSpan) -> None:
        """The graph took one way: what was expected of the others is not coming."""
        for expectation in self._state.expectations:
            place = expectation.place
            if not expectation.is_branch or expectation.run_id != span.root_id or place.around != around:
                continue
            if place.node != node and not place.node.startswith(f"{node}|"):
                self._actor.drop(expectation, "another branch was taken")

    def _trail_of(self, span: OpenSpan) -> Trail:
        trail = self._trails.get(span.root_id)
        if trail is None:
            trail = self._trails[span.root_id] = Trail()
            while len(self._trails) > self._state.settings.max_contexts:
                self._trails.popitem(last=False)
        return trail

    def _expect_successor(
        self,
        candidate: Candidate,
        thread_id: ThreadId,
        around: str,
        span: OpenSpan,
        messages: tuple[WireObject, ...] | None,
    ) -> None:
        node = candidate.node
        if candidate.p_next < self._state.settings.p_warm_min:
            return
        same_level = parent_namespace(node) == strip_task_ids(around)
        place = Place(thread_id, around if same_level else ANYWHERE, node)
        known = self._state.expectations
        if already := (*known.at(place), *known.at(Place(thread_id, ANYWHERE, node))):
            for expectation in already:
                expectation.p_next = max(expectation.p_next, candidate.p_next)
                expectation.is_branch = expectation.is_branch and candidate.p_next < CERTAIN
            return
        if any(call.place.node == node for call in self._calls_of(thread_id)):
            return
        prediction = self._state.book.predict(node, thread_id, messages)
        if prediction is None:
            return
        now_s = self._state.clock.now_s()
        self._expect(
            Expectation(
                place=place,
                agent=prediction.agent,
                cause=Cause.SUCCESSOR,
                run_id=span.root_id,
                prompt=prediction.prompt,
                cache_salt=self._state.book.salt(prediction.agent),
                p_next=candidate.p_next,
                created_at_s=now_s,
                eta_at_s=None if candidate.eta_s is None else now_s + candidate.eta_s,
                is_branch=candidate.steps == 1 and candidate.p_next < CERTAIN,
            )
        )

    def _tool_started(self, signal: Opened) -> None:
        """An agent pauses: say when it may come back."""
        around = parent_namespace(signal.checkpoint_ns)
        quantiles = self._state.forecaster.tool_seconds(_graph_id(signal), signal.name)
        for expectation in self._state.expectations:
            place = expectation.place
            if expectation.cause is Cause.RESUME and (place.thread_id, place.around) == (signal.thread_id, around):
                if quantiles is None:
                    continue
                eta_at_s = signal.at_s + quantiles.p50_s
                expectation.eta_at_s = max(expectation.eta_at_s or eta_at_s, eta_at_s)
        self._actor.poke()

    def _routed(self, signal: Routed) -> None:
        """The next nodes are stored: no guess any more, also while sibling tasks of the step still work."""
        span = self._state.spans.run_of(signal.thread_id)
        if span is None:
            return
        level = strip_task_ids(signal.checkpoint_ns)
        for name in signal.nodes:
            node = NodeId(f"{level}|{name}" if level else name)
            certain = Candidate(node=node, p_next=1.0, steps=1, eta_s=None, reason="stored by the saver")
            self._expect_successor(certain, signal.thread_id, signal.checkpoint_ns, span, None)
        self._actor.poke()

    # -- model calls ----------------------------------------------------------------------------------------------

    def _requested(self, signal: Requested) -> None:
        span = self._state.spans.get(signal.run_id)
        if span is None or signal.run_id in self._state.calls:
            return
        opened = span.opened
        thread_id = _thread_of(opened, span)
        agent = agent_key(opened.checkpoint_ns, opened.agent_name, signal.prompt)
        place = Place(thread_id, parent_namespace(opened.checkpoint_ns), agent.namespace)
        expected = self._state.expectations
        claim = expected.claim(place, signal.prompt) or expected.claim(
            Place(thread_id, ANYWHERE, agent.namespace), signal.prompt
        )
        node_span = self._state.spans.node_at(thread_id, opened.checkpoint_ns)
        state_messages = node_span.opened.state_messages if node_span else None
        self._state.book.observe(
            agent,
            thread_id,
            signal.prompt,
            wire_form(state_messages) if state_messages else None,
            cache_salt=signal.cache_salt,
        )
        if claim is not None:
            claim.claimed = True
        self._state.calls[signal.run_id] = Call(
            run_id=signal.run_id,
            root_id=span.root_id,
            graph_id=_graph_id(opened),
            place=place,
            agent=agent,
            prompt=signal.prompt,
            cache_salt=signal.cache_salt,
            max_tokens=signal.max_tokens or DEFAULT_MAX_OUTPUT_TOKENS,
            num_prompt_tokens=claim.edge_tokens if claim and claim.edge_tokens else estimated_tokens(signal.prompt),
            claim=claim,
        )
        self._state.counters.calls += 1
        self._actor.give_way()
        self._actor.poke()

    def _first_piece(self, signal: FirstPiece) -> None:
        self._state.spans.mark(signal)
        call = self._state.calls.get(signal.run_id)
        if call is None:
            return
        call.began = True
        if signal.prompt_token_ids is not None:
            call.token_ids = signal.prompt_token_ids
            call.num_prompt_tokens = len(signal.prompt_token_ids)
        self._actor.poke()

    def _tool_named(self, signal: ToolNamed) -> None:
        """The first streamed tool name: a handoff tells the next agent before the answer is complete."""
        self._state.spans.mark(signal)
        call = self._state.calls.get(signal.run_id)
        span = self._state.spans.get(signal.run_id)
        if call is None or span is None:
            return
        node = NodeId(call.place.node)
        for candidate in self._state.forecaster.candidates(call.graph_id, node, first_tool_name=signal.tool_name):
            self._expect_successor(candidate, call.place.thread_id, call.place.around, span, None)
        self._actor.poke()

    def _measured(self, signal: Measured) -> None:
        self._state.spans.measure(signal)
        call = self._state.calls.get(signal.run_id)
        if call is None or call.over_at_s is not None:
            return
        call.over_at_s = signal.at_s
        if signal.usage is None:
            return
        call.usage = signal.usage
        self._state.counters.served_tokens += signal.usage.prompt_tokens

    # -- ends -----------------------------------------------------------------------------------------------------

    def _closed(self, signal: Closed) -> None:
        span = self._state.spans.close(signal)
        if span is None:
            return
        kind = span.opened.kind
        if kind is SpanKind.CALL:
            self._call_ended(signal)
        elif kind is SpanKind.TOOL:
            elapsed_s = signal.at_s - span.opened.at_s
            self._state.forecaster.observe_tool(_graph_id(span.opened), span.opened.name, elapsed_s)
        elif kind is SpanKind.NODE:
            self._node_ended(signal, span)
        elif kind is SpanKind.RUN and span.root_id == signal.run_id:
            self._run_ended(signal, span)
        self._actor.poke()

    def _node_ended(self, signal: Closed, span: OpenSpan) -> None:
        opened = span.opened
        trail = self._trail_of(span)
        if signal.status is SpanStatus.CANCELLED:  # an interrupt: the node will run again, and no route was taken
            trail.is_cut = True
            return
        if opened.checkpoint_ns in trail.composites:
            trail.composites.discard(opened.checkpoint_ns)  # a sub-graph: its last inner node stands for it
            return
        trail.step(NodeId(strip_task_ids(opened.checkpoint_ns) or opened.name), opened.at_s)

    def _run_ended(self, signal: Closed, span: OpenSpan) -> None:
        """A run that ended needs nothing any more: a fact, and the cheapest one there is."""
        trail = self._trails.pop(span.root_id, None)
        if trail is not None and signal.status is SpanStatus.OK and not trail.is_cut:
            self._state.forecaster.observe_transition(
                _graph_id(span.opened),
                trail.last,
                END,
                elapsed_s=signal.at_s - (trail.started_at_s or signal.at_s),
                context=trail.context,
            )
        for expectation in self._state.expectations:
            if expectation.run_id == span.root_id:
                self._actor.drop(expectation, "run ended")
        for call in [call for call in self._state.calls.values() if call.root_id == span.root_id]:
            self._state.calls.pop(call.run_id, None)  # its end was never reported: a cancelled task
            if call.claim is not None:
                self._actor.settle_claim(call.claim, Outcome.WASTED, "its call was cancelled")

    def _call_ended(self, signal: Closed) -> None:
        call = self._state.calls.pop(signal.run_id, None)
        if call is None:
            return
        if call.claim is not None:
            outcome, reason = judge(call)
            self._actor.settle_claim(call.claim, outcome, reason)
        answer = signal.answer
        stands_alone = call.root_id == call.run_id  # outside any run: nothing would tell that it comes back
        if signal.status is SpanStatus.OK and answer is not None and answer.tool_calls and not stands_alone:
            self._expect_resume(call, answer)

    def _expect_resume(self, call: Call, answer: AIMessage) -> None:
        """The agent asked for a tool: it is certain to read all this again, and then the result."""
        wire = wire_form([answer])
        if wire is None or answer.tool_calls[0]["name"] in self._state.handoff_tools.get(call.graph_id, ()):
            return
        self._expect(
            Expectation(
                place=call.place,
                agent=call.agent,
                cause=Cause.RESUME,
                run_id=call.root_id,
                prompt=Prompt((*call.prompt.messages, *wire), call.prompt.tools),
                cache_salt=call.cache_salt,
                p_next=1.0,
                created_at_s=self._state.clock.now_s(),
                eta_at_s=self._pause_eta(call, answer),
                base_ids=call.token_ids,
                restorable=self._state.settings.tier_url is not None,
            )
        )

    def _pause_eta(self, call: Call, answer: AIMessage) -> float | None:
        known = [self._state.forecaster.tool_seconds(call.graph_id, tool["name"]) for tool in answer.tool_calls]
        if any(quantiles is None for quantiles in known):
            return None
        return self._state.clock.now_s() + max(quantiles.p50_s for quantiles in known if quantiles is not None)

    def _expect(self, expectation: Expectation) -> None:
        for old in self._state.expectations.add(expectation):
            self._actor.drop(old, "replaced")

    def _calls_of(self, thread_id: ThreadId) -> list[Call]:
        return [call for call in self._state.calls.values() if call.place.thread_id == thread_id]


def judge(call: Call) -> tuple[Outcome, str]:
    """Say what became of the work done for a call that has ended.  Facts only: its tokens and its cached count."""
    claim = call.claim
    if claim is None or claim.prefix is None:
        return Outcome.WASTED, "nothing was prepared"
    if call.token_ids is not None:
        shared = common_prefix_tokens(claim.prefix.token_ids[: claim.edge_tokens], call.token_ids)
        if shared < claim.edge_tokens:
            return Outcome.WASTED, f"the prompt differs at token {shared} of {claim.edge_tokens}"
    elif not begins_with(call.prompt, claim.prompt):
        return Outcome.WASTED, "the prompt differs from the predicted one"
    if call.usage is None:
        return Outcome.WASTED, "the call ended without token counts"
    cached = call.usage.cached_tokens
    if cached is not None and cached < claim.edge_tokens:
        return Outcome.WASTED, f"only {cached} of {claim.edge_tokens} tokens were found again"
    return Outcome.USED, "its call read it" if cached is None else f"{cached} tokens were read from cache"


def _graph_id(signal: Opened) -> str:
    return signal.graph_id or "unread"


def _thread_of(signal: Opened, span: OpenSpan) -> ThreadId:
    return signal.thread_id or ThreadId(str(span.root_id))
