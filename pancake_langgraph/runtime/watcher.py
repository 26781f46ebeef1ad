"""Watches: turns signals into knowledge (prompts, transitions, durations) and into expected calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from uuid import UUID

from langchain_core.messages import AIMessage

from pancake_langgraph._types import Candidate, NodeId, Outcome, ThreadId
from pancake_langgraph.forecast import Clue
from pancake_langgraph.ledger import SpanKind, SpanStatus
from pancake_langgraph.prompts import begins_with, strip_task_ids
from pancake_langgraph.prompts.identity import parent_namespace
from pancake_langgraph.prompts.prefix import common_prefix_tokens
from pancake_langgraph.runtime.actor import Actor
from pancake_langgraph.runtime.choices import clues_in
from pancake_langgraph.runtime.expectations import ANYWHERE, Cause, Expectation, Place
from pancake_langgraph.runtime.linting import lint_call
from pancake_langgraph.runtime.prompting import PromptWatch
from pancake_langgraph.runtime.signals import (
    Closed,
    Decided,
    FieldWritten,
    FirstPiece,
    Interrupted,
    Measured,
    Opened,
    Requested,
    Routed,
    Signal,
    ToolNamed,
)
from pancake_langgraph.runtime.spans import OpenSpan
from pancake_langgraph.runtime.state import DEFAULT_MAX_OUTPUT_TOKENS, Call, State, estimated_tokens
from pancake_langgraph.runtime.successors import Successors
from pancake_langgraph.runtime.trails import UNREAD, Situation, Trails
from pancake_langgraph.topology import START

#: Signals that neither change nor ask what is expected: what a call wrote before them need not be looked at yet.  The
#: end of a call may first tell more of it.
_QUIET = frozenset({FirstPiece, ToolNamed, FieldWritten, Measured, Closed})


class Watcher:
    """Learns from signals.  Lives on the runtime's loop.

    Whoever gives it signals calls `settle` after the last one that is there.
    """

    def __init__(self, state: State, actor: Actor) -> None:
        """Report to `actor` what has to be acted on."""
        self._state = state
        self._actor = actor
        self._prompts = PromptWatch(state)
        self._successors = Successors(state, actor, self._prompts)
        self._trails = Trails(state.forecaster, state.topologies, max_runs=state.settings.max_contexts)
        self._writing: UUID | None = None
        self._has_news = False
        self._receivers: dict[type[Signal], Callable[[Any], None]] = {
            Opened: self._opened,
            Requested: self._requested,
            FirstPiece: self._first_piece,
            ToolNamed: self._tool_named,
            FieldWritten: self._field_written,
            Decided: self._decided,
            Interrupted: self._interrupted,
            Measured: self._measured,
            Routed: self._routed,
            Closed: self._closed,
        }

    def receive(self, signal: Signal) -> None:
        """Take in one signal."""
        if self._writing is not None and type(signal) not in _QUIET:
            self._read_what_is_written()
        self._receivers[type(signal)](signal)

    def settle(self) -> None:
        """Foretell anew what the signals since the last time have changed: once, however many those were."""
        self._read_what_is_written()
        self._prompts.catch_up()
        if self._has_news:
            self._has_news = False
            self._actor.poke()

    def _read_what_is_written(self) -> None:
        """Foretell anew where a call leads that has written something since."""
        if (call_id := self._writing) is None:
            return
        self._writing = None
        call, span = self._state.calls.get(call_id), self._state.spans.get(call_id)
        if call is None or span is None:
            return
        situation = self._trails.situation(span.root_id, span.opened.checkpoint_ns)
        if situation is not None:
            self._successors.foretell(situation, call.graph_id, call.place.thread_id, call.place.around, span)
            self._has_news = True

    # -- starts ---------------------------------------------------------------------------------------------------

    def _opened(self, signal: Opened) -> None:
        if self._state.spans.get(signal.run_id) is not None:
            return  # two handlers of this runtime see the run: graph and sub-graph were both attached
        span = self._state.spans.open(signal)
        if signal.kind is SpanKind.NODE:
            self._node_started(signal, span)
        elif signal.kind is SpanKind.TOOL:
            self._trails.tool_started(span.root_id, signal.checkpoint_ns, signal.name)
            self._tool_started(signal)
        elif signal.kind is SpanKind.RUN and span.root_id == signal.run_id:
            self._trails.run_started(signal)
            self._prompts.run_started(signal)
            if not signal.is_resumed:
                start = Situation(START, (), (), signal.at_s)
                self._successors.foretell(start, _graph_id(signal), _thread_of(signal, span), "", span)
                self._has_news = True

    def _node_started(self, signal: Opened, span: OpenSpan) -> None:
        node = NodeId(strip_task_ids(signal.checkpoint_ns) or signal.name)
        around = parent_namespace(signal.checkpoint_ns)
        situation = self._trails.node_started(signal, span.root_id)
        if not signal.is_pushed:  # other nodes may be sent inputs beside it
            self._successors.drop_dead_branches(node, around, span, situation.context[-1:])
        self._prompts.node_started(signal, span)
        self._successors.foretell(situation, _graph_id(signal), _thread_of(signal, span), around, span)
        self._has_news = True

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
        self._has_news = True

    def _routed(self, signal: Routed) -> None:
        """The next nodes are stored: no guess any more, also while sibling tasks of the step still work."""
        span = self._state.spans.run_of(signal.thread_id)
        if span is None:
            return
        level = strip_task_ids(signal.checkpoint_ns)
        for name in signal.nodes:
            node = NodeId(f"{level}|{name}" if level else name)
            certain = Candidate(node=node, p_next=1.0, steps=1, eta_s=None, reason="stored by the saver")
            self._successors.expect(certain, signal.thread_id, signal.checkpoint_ns, span)
        self._has_news = True

    # -- model calls ----------------------------------------------------------------------------------------------

    def _requested(self, signal: Requested) -> None:
        span = self._state.spans.get(signal.run_id)
        if span is None or signal.run_id in self._state.calls:
            return
        self._prompts.catch_up()
        opened = span.opened
        thread_id = _thread_of(opened, span)
        agent = self._state.book.agent_of(opened.checkpoint_ns, opened.agent_name, signal.prompt)
        place = Place(thread_id, parent_namespace(opened.checkpoint_ns), agent.namespace)
        expected = self._state.expectations
        claim = expected.claim(place, signal.prompt) or expected.claim(
            Place(thread_id, ANYWHERE, agent.namespace), signal.prompt
        )
        self._prompts.learn(agent, thread_id, signal, opened, claim)
        self._trails.call_started(span.root_id, opened.checkpoint_ns)
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
            pool_hint_id=signal.hints.hold.hint_id if signal.hints and signal.hints.hold else None,
        )
        if signal.hints is not None:
            self._actor.hints.call_sent(signal.hints)
        self._state.counters.calls += 1
        self._actor.give_way()
        self._has_news = True

    def _first_piece(self, signal: FirstPiece) -> None:
        self._state.spans.mark(signal)
        call = self._state.calls.get(signal.run_id)
        if call is None:
            return
        call.began = True
        if signal.prompt_token_ids is not None:
            call.token_ids = signal.prompt_token_ids
            call.num_prompt_tokens = len(signal.prompt_token_ids)
        self._has_news = True

    def _tool_named(self, signal: ToolNamed) -> None:
        """The first streamed tool name: a handoff tells the next agent before the answer is complete."""
        self._state.spans.mark(signal)
        self._written(signal.run_id, (Clue(signal.tool_name),))

    def _field_written(self, signal: FieldWritten) -> None:
        self._written(signal.run_id, (Clue(signal.tool, signal.field, signal.value),))

    def _written(self, call_id: UUID, clues: Iterable[Clue]) -> None:
        """A call has written something that may tell where its node leads."""
        call = self._state.calls.get(call_id)
        span = self._state.spans.get(call_id)
        if call is None or span is None:
            return
        new = self._trails.call_wrote(span.root_id, span.opened.checkpoint_ns, clues)
        node = call.agent.namespace
        if any(self._state.forecaster.tells(call.graph_id, node, clue) for clue in new):
            if self._writing not in (None, call_id):
                self._read_what_is_written()
            self._writing = call_id

    def _decided(self, signal: Decided) -> None:
        span = self._state.spans.get(signal.run_id)
        if span is not None:
            self._trails.decided(signal, span.opened, span.root_id)

    def _interrupted(self, signal: Interrupted) -> None:
        self._trails.run_cut(signal.run_id)

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
        if signal.answer is not None and signal.answer.tool_calls:
            self._written(signal.run_id, clues_in(signal.answer.tool_calls))
        self._read_what_is_written()
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
        self._has_news = True

    def _node_ended(self, signal: Closed, span: OpenSpan) -> None:
        self._prompts.node_ended(span, signal, finished=signal.status is SpanStatus.OK)
        for waiting in self._prompts.waiting(span.root_id, parent_namespace(span.opened.checkpoint_ns)):
            self._successors.expect(*waiting)
        self._trails.node_ended(span.opened, signal, span.root_id)

    def _run_ended(self, signal: Closed, span: OpenSpan) -> None:
        """A run that ended needs nothing any more: a fact, and the cheapest one there is."""
        self._prompts.run_ended(span.root_id)
        self._trails.run_ended(span.opened, signal)
        for expectation in self._state.expectations:
            if expectation.run_id == span.root_id:
                self._actor.drop(expectation, "run ended")
        for call in [call for call in self._state.calls.values() if call.root_id == span.root_id]:
            self._state.calls.pop(call.run_id, None)  # its end was never reported: a cancelled task
            if call.claim is not None:
                self._actor.settle_claim(call.claim, Outcome.WASTED, "its call was cancelled")
        self._actor.run_ended(span.root_id, is_over=not span.opened.thread_id)

    def _call_ended(self, signal: Closed) -> None:
        call = self._state.calls.pop(signal.run_id, None)
        if call is None:
            return
        lint_call(self._state, call)
        self._prompts.catch_up()
        if call.claim is not None:
            self._prompts.judge_tokens(call)
            outcome, reason = judge(call)
            self._actor.settle_claim(call.claim, outcome, reason)
        answer = signal.answer
        stands_alone = call.root_id == call.run_id  # outside any run: nothing would tell that it comes back
        pauses = signal.status is SpanStatus.OK and answer is not None and answer.tool_calls and not stands_alone
        expected = self._expect_resume(call, answer) if pauses and answer is not None else None
        if call.pool_hint_id is None:
            return
        if expected is not None:
            usage = call.usage
            num_tokens = usage.prompt_tokens + usage.completion_tokens if usage is not None else call.num_prompt_tokens
            self._actor.hints.call_held(expected, call.pool_hint_id, num_tokens)
        elif signal.status is SpanStatus.OK:  # an aborted one holds nothing
            self._actor.hints.call_over(call.pool_hint_id)

    def _expect_resume(self, call: Call, answer: AIMessage) -> Expectation | None:
        """The agent asked for a tool: it is certain to read all this again, and then the result."""
        found = self._prompts.resume_prompt(call, answer)
        if found is None or answer.tool_calls[0]["name"] in self._state.handoff_tools.get(call.graph_id, ()):
            return None
        agent, prompt, full = found
        is_whole = begins_with(prompt, call.prompt)
        expected = Expectation(
            place=call.place,
            agent=agent,
            came_from=call.agent,
            cause=Cause.RESUME,
            run_id=call.root_id,
            prompt=prompt,
            full_prompt=full,
            cache_salt=call.cache_salt,
            p_next=1.0,
            created_at_s=self._state.clock.now_s(),
            eta_at_s=self._pause_eta(call, answer),
            base_ids=call.token_ids if is_whole else None,
            restorable=self._state.settings.tier_url is not None,
            is_whole=is_whole,
        )
        self._successors.add(expected)
        return expected

    def _pause_eta(self, call: Call, answer: AIMessage) -> float | None:
        known = [self._state.forecaster.tool_seconds(call.graph_id, tool["name"]) for tool in answer.tool_calls]
        if any(quantiles is None for quantiles in known):
            return None
        return self._state.clock.now_s() + max(quantiles.p50_s for quantiles in known if quantiles is not None)


def judge(call: Call) -> tuple[Outcome, str]:
    """Say what became of the work done for a call that has ended.  Facts only: its tokens and its cached count."""
    claim = call.claim
    if claim is None or claim.prefix is None:
        return Outcome.WASTED, "nothing was prepared"
    if call.token_ids is not None:
        shared = common_prefix_tokens(claim.prefix.token_ids[: claim.edge_tokens], call.token_ids)
        if shared < claim.edge_tokens:
            return Outcome.WASTED, f"the prompt differs at token {shared} of {claim.edge_tokens}"
    elif not claim.fits(call.prompt):
        return Outcome.WASTED, "the prompt differs from the predicted one"
    if call.usage is None:
        return Outcome.WASTED, "the call ended without token counts"
    cached = call.usage.cached_tokens
    if cached is not None and cached < claim.edge_tokens:
        return Outcome.WASTED, f"only {cached} of {claim.edge_tokens} tokens were found again"
    return Outcome.USED, "its call read it" if cached is None else f"{cached} tokens were read from cache"


def _graph_id(signal: Opened) -> str:
    return signal.graph_id or UNREAD


def _thread_of(signal: Opened, span: OpenSpan) -> ThreadId:
    return signal.thread_id or ThreadId(str(span.root_id))
