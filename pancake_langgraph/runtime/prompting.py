"""Joins what the hooks saw of states and prompts: teaches the book, asks it for the prompts of expected calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple
from uuid import UUID

from langchain_core.messages import AIMessage

from pancake_langgraph._types import ActionKind, AgentKey, Candidate, NodeId, Prompt, ThreadId
from pancake_langgraph.prompts import Prediction, Unknown, begins_with, strip_task_ids
from pancake_langgraph.prompts.book import NEVER_CALLED
from pancake_langgraph.prompts.fields import sends_reasoning, without_reasoning
from pancake_langgraph.prompts.identity import parent_namespace
from pancake_langgraph.prompts.outlook import Outlook, Spot
from pancake_langgraph.prompts.parts import Known
from pancake_langgraph.prompts.prefix import common_prefix_tokens
from pancake_langgraph.runtime.expectations import ANYWHERE, Cause, Expectation
from pancake_langgraph.runtime.signals import Closed, Opened, Requested
from pancake_langgraph.runtime.spans import OpenSpan
from pancake_langgraph.runtime.state import Call, State

#: Candidates of one level that wait for their prompts.
MAX_WAITING: Final = 64
#: States of one expected call that are kept until its prompt is told.
MAX_KNOWN: Final = 8


class _Waiting(NamedTuple):
    """A candidate whose prompt could not be told yet."""

    candidate: Candidate
    thread_id: ThreadId
    around: str
    span: OpenSpan
    unknown: Unknown

    @property
    def request(self) -> tuple[Candidate, ThreadId, str, OpenSpan]:
        """What to ask again."""
        return self.candidate, self.thread_id, self.around, self.span


class _Due(NamedTuple):
    """An expected call whose prompt is to be told anew, and what became known of its state meanwhile, newest last."""

    expectation: Expectation
    graph_id: str
    known: list[Known]


class PromptWatch:
    """Knows which state each run is in, and what its next prompts begin with.  Lives on the runtime's loop.

    Prompts of calls that are expected already are told anew in `catch_up` only, from the newest state: several nodes
    may start and end before anybody looks.
    """

    def __init__(self, state: State) -> None:
        """Teach and ask the book of `state`."""
        self._state = state
        self._outlook = Outlook(max_levels=state.settings.max_contexts)
        self._told: OrderedDict[str, str] = OrderedDict()
        self._waiting: OrderedDict[tuple[UUID, str], dict[NodeId, _Waiting]] = OrderedDict()
        self._due: dict[int, _Due] = {}

    def run_started(self, opened: Opened) -> None:
        """Take in the input of a run."""
        fields = None if opened.is_resumed else opened.fields
        self._outlook.run_started(opened.run_id, opened.thread_id, fields, opened.graph_id)

    def node_started(self, opened: Opened, span: OpenSpan) -> None:
        """Take in the state that a node reads."""
        spot = _spot(span)
        self._level_moved_on(span.root_id, spot.around)
        self._outlook.node_started(span.root_id, spot, opened.fields, opened.graph_id)
        if opened.fields is None or opened.is_pushed:  # which of several workers calls first is not known
            return
        node = strip_task_ids(opened.checkpoint_ns)
        for expectation in self._state.expectations:  # what it reads is certain now
            place = expectation.place
            if expectation.run_id == span.root_id and place.node == node and place.around in (spot.around, ANYWHERE):
                self._foretell(expectation, Known(opened.fields), opened.graph_id)

    def node_ended(self, span: OpenSpan, closed: Closed, *, finished: bool) -> None:
        """Take in what a node wrote; the prompts expected next are then known further."""
        opened = span.opened
        spot = _spot(span)
        if not finished:
            self._outlook.node_cut(span.root_id, spot)
            return
        self._outlook.node_ended(span.root_id, spot, closed.updates, opened.graph_id)
        for expectation in self._state.expectations:
            if expectation.run_id == span.root_id:
                self.refresh(expectation, spot.around, opened.graph_id)

    def run_ended(self, root_id: UUID) -> None:
        """Forget a run's state."""
        for key in [key for key in self._waiting if key[0] == root_id]:
            del self._waiting[key]
        self._state.book.forget_messages(self._outlook.run_ended(root_id))

    def learn(self, agent: AgentKey, thread_id: ThreadId, signal: Requested, opened: Opened, claim: object) -> None:
        """Learn from a real call; `claim` is what was expected of it."""
        node = self._state.spans.node_at(thread_id, opened.checkpoint_ns)
        fields = node.opened.fields if node else None
        book = self._state.book
        book.observe(
            agent,
            thread_id,
            signal.prompt,
            None if fields is None else Known(fields),
            cache_salt=signal.cache_salt,
            graph_id=opened.graph_id,
            task=node.opened.run_id if node else None,
        )
        if isinstance(claim, Expectation) and claim.full_prompt is not None:
            right = begins_with(signal.prompt, claim.full_prompt)
            book.note_resume(claim.came_from or claim.agent, agent, right=right)

    def put_off(self, candidate: Candidate, thread_id: ThreadId, around: str, span: OpenSpan) -> bool:
        """Keep a candidate for `waiting` if its node never called, as most never do; return whether that is so."""
        if self._state.book.may_call(candidate.node, graph_id=span.opened.graph_id):
            return False
        self._wait(candidate, thread_id, around, span, NEVER_CALLED)
        return True

    def predict(self, candidate: Candidate, thread_id: ThreadId, around: str, span: OpenSpan) -> Prediction | None:
        """Return what the next prompt of a candidate begins with.

        Where nothing can be said yet, it is kept for `waiting`.
        """
        node, graph_id = candidate.node, span.opened.graph_id
        known = self._outlook.known(span.root_id, around, node, num_between=candidate.steps - 1, graph_id=graph_id)
        found = self._state.book.predict(node, thread_id, known, graph_id=graph_id)
        if isinstance(found, Prediction):
            self._told.pop(node, None)
            return found
        if found.seen or known.fields:
            self._wait(candidate, thread_id, around, span, found)
        return None

    def ask_again(self, candidate: Candidate, thread_id: ThreadId, around: str, span: OpenSpan) -> None:
        """Keep a candidate for `waiting`: its next turn cannot be told from the present one yet."""
        self._wait(candidate, thread_id, around, span, Unknown("its present turn has not ended", seen=False))

    def _wait(self, candidate: Candidate, thread_id: ThreadId, around: str, span: OpenSpan, unknown: Unknown) -> None:
        level = self._waiting.get((span.root_id, around))
        if level is None:
            level = self._waiting[span.root_id, around] = {}
            if len(self._waiting) > self._state.settings.max_contexts:
                self._waiting.popitem(last=False)
        level[candidate.node] = _Waiting(candidate, thread_id, around, span, unknown)
        if len(level) > MAX_WAITING:
            del level[next(iter(level))]

    def waiting(self, root_id: UUID, around: str) -> tuple[tuple[Candidate, ThreadId, str, OpenSpan], ...]:
        """Take out the candidates of a level whose prompts could not be told before; more is known now.

        Those of nodes that still never called wait on: no state tells what they will read.
        """
        level = self._waiting.pop((root_id, around), None)
        if level is None:
            return ()
        silent = {node: waits for node, waits in level.items() if self._is_silent(waits)}
        if silent:
            self._waiting[root_id, around] = silent
        return tuple(waits.request for node, waits in level.items() if node not in silent and self._can_be_told(waits))

    def _can_be_told(self, waits: _Waiting) -> bool:
        """Whether asking again may help; of the state around a node that has only now called all may be unknown."""
        span, node = waits.span, waits.candidate.node
        return waits.unknown is not NEVER_CALLED or self._outlook.knows(
            span.root_id, waits.around, node, graph_id=span.opened.graph_id
        )

    def _is_silent(self, waits: _Waiting) -> bool:
        """Whether a candidate waits because its node never called, which is still so."""
        node, graph_id = waits.candidate.node, waits.span.opened.graph_id
        return waits.unknown is NEVER_CALLED and not self._state.book.may_call(node, graph_id=graph_id)

    def _level_moved_on(self, root_id: UUID, around: str) -> None:
        """Give up the candidates of a level: the next node has started.  The ledger gets the reasons."""
        for waits in self._waiting.pop((root_id, around), {}).values():
            self._tell(waits.candidate.node, waits.thread_id, waits.unknown)

    def refresh(self, expectation: Expectation, around: str, graph_id: str) -> None:
        """Let an expected prompt grow with what is known now."""
        place = expectation.place
        around = around if place.around == ANYWHERE else place.around
        known = self._outlook.known(
            expectation.run_id, around, place.node, num_between=expectation.num_between, graph_id=graph_id
        )
        self._foretell(expectation, known, graph_id)

    def _foretell(self, expectation: Expectation, known: Known, graph_id: str) -> None:
        if expectation.busy or expectation.claimed:
            return
        if expectation.cause is Cause.RESUME and expectation.base_ids is not None:
            return  # it reads on behind what it has read
        due = self._due.get(id(expectation))
        if due is None:
            due = self._due[id(expectation)] = _Due(expectation, graph_id, [])
        due.known.append(known)
        if len(due.known) >= MAX_KNOWN:
            self.catch_up()

    def catch_up(self) -> None:
        """Tell the prompts of expected calls from what has become known of their states.

        To be called before anything is learnt about prompts, and before anybody reads what is expected.
        """
        if not self._due:
            return
        due, self._due = self._due, {}
        for expectation, graph_id, known in due.values():
            if expectation in self._state.expectations:
                self._foretell_by(expectation, reversed(known), graph_id)

    def _foretell_by(self, expectation: Expectation, states: Iterable[Known], graph_id: str) -> None:
        """Take the first of several states that says what is read."""
        place = expectation.place
        agent = expectation.agent if expectation.cause is Cause.RESUME else None
        for known in states:
            found = self._state.book.predict(place.node, place.thread_id, known, graph_id=graph_id, agent=agent)
            if isinstance(found, Prediction):
                expectation.foretell(found)
                return

    def resume_prompt(self, call: Call, answer: AIMessage) -> tuple[AgentKey, Prompt, Prompt] | None:
        """Return who comes back, what he will read, and all that he would read if nothing was trimmed.

        `None` when the answer has no wire form.
        """
        form = self._state.book.wire(answer)
        if form is None:
            return None
        if not sends_reasoning(call.prompt.messages):
            (form,) = without_reasoning((form,))
        full = Prompt((*call.prompt.messages, form), call.prompt.tools)
        return *self._state.book.resumed(call.agent, call.prompt, form), full

    def judge_tokens(self, call: Call) -> None:
        """Tell the book whether a prompt whose messages were foreseen also had the tokens that were foreseen."""
        claim = call.claim
        if claim is None or claim.prefix is None or call.token_ids is None or not claim.fits(call.prompt):
            return
        shared = common_prefix_tokens(claim.prefix.token_ids[: claim.edge_tokens], call.token_ids)
        self._state.book.note_tokens(call.agent.namespace, right=shared == claim.edge_tokens)

    def _tell(self, node: str, thread_id: ThreadId, unknown: Unknown) -> None:
        """Book once why a node's prompt cannot be told; that it was never seen is no news."""
        if not unknown.seen or self._told.get(node) == unknown.reason:
            return
        self._told[node] = unknown.reason
        while len(self._told) > self._state.settings.max_contexts:
            self._told.popitem(last=False)
        self._state.handles.reject(
            ActionKind.WARM, agent=node, thread_id=thread_id, num_tokens=0, reason=f"no prompt: {unknown.reason}"
        )


def _spot(span: OpenSpan) -> Spot:
    if span.spot is None:
        span.spot = _spot_of(span.opened)
    return span.spot


def _spot_of(opened: Opened) -> Spot:
    around = parent_namespace(opened.checkpoint_ns)
    return Spot(
        opened.checkpoint_ns,
        around,
        strip_task_ids(around),
        strip_task_ids(opened.checkpoint_ns).rpartition("|")[2] or opened.name,
        is_pushed=opened.is_pushed,
        step=opened.step,
        order=opened.order,
    )
