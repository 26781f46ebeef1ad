"""Expects the calls of nodes that may run next, and gives up what has become unlikely."""

from __future__ import annotations

from collections.abc import Iterable

from pancake_langgraph._types import Candidate, NodeId, ThreadId
from pancake_langgraph.prompts import strip_task_ids
from pancake_langgraph.prompts.identity import parent_namespace
from pancake_langgraph.runtime.actor import Actor
from pancake_langgraph.runtime.expectations import ANYWHERE, Cause, Expectation, Place
from pancake_langgraph.runtime.prompting import PromptWatch
from pancake_langgraph.runtime.spans import OpenSpan
from pancake_langgraph.runtime.state import State
from pancake_langgraph.runtime.trails import Situation
from pancake_langgraph.topology import START

#: A successor less probable than this is one branch of several.
CERTAIN = 0.999
#: Chances of the next nodes that add up to more mean that several of them come.
MOST_FOR_A_CHOICE = 1.1


class Successors:
    """Turns forecasts into expected calls.  Lives on the runtime's loop."""

    def __init__(self, state: State, actor: Actor, prompts: PromptWatch) -> None:
        """Ask `prompts` what an expected call will read; have `actor` give up what was done for others."""
        self._state = state
        self._actor = actor
        self._prompts = prompts

    def foretell(self, situation: Situation, graph_id: str, thread_id: ThreadId, around: str, span: OpenSpan) -> None:
        """Expect what most likely follows a node, from all that is known about it now."""
        found = self._state.forecaster.candidates(
            graph_id,
            situation.node,
            first_tool_name=situation.tool,
            context=situation.context,
            clues=situation.clues,
            running=situation.running,
        )
        span.is_choice = sum(candidate.p_next for candidate in found if candidate.steps == 1) < MOST_FOR_A_CHOICE
        least = self._state.settings.p_warm_min
        for candidate in found:
            if candidate.p_next >= least:
                self.expect(candidate, thread_id, around, span, since_s=situation.started_at_s)
        self._drop_unlikely(found, span, situation.context[-1:])

    def _drop_unlikely(self, found: Iterable[Candidate], span: OpenSpan, before: tuple[NodeId, ...]) -> None:
        """Give up what was foretold by this execution, or by the one `before` it, and has become unlikely since."""
        likely = {candidate.node for candidate in found if candidate.p_next >= self._state.settings.p_warm_min}
        own = span.opened.checkpoint_ns
        for expectation in self._state.expectations:
            if expectation.run_id != span.root_id or not expectation.origin or expectation.place.node in likely:
                continue
            is_own = expectation.is_branch and expectation.origin == own
            is_past = (
                expectation.is_choice and expectation.num_between > 0 and strip_task_ids(expectation.origin) in before
            )
            if is_own or is_past:
                self._actor.drop(expectation, "what has happened since speaks against it")

    def drop_dead_branches(self, node: NodeId, around: str, span: OpenSpan, before: tuple[NodeId, ...]) -> None:
        """The execution `before` this one took one way: what it might have led to instead is not coming."""
        for expectation in self._state.expectations:
            place = expectation.place
            if not expectation.is_branch or expectation.run_id != span.root_id or place.around != around:
                continue
            origin = strip_task_ids(expectation.origin) or START
            if origin in before and place.node != node and not place.node.startswith(f"{node}|"):
                self._actor.drop(expectation, "another branch was taken")

    def expect(
        self,
        candidate: Candidate,
        thread_id: ThreadId,
        around: str,
        span: OpenSpan,
        since_s: float | None = None,
    ) -> None:
        """Expect the call of one candidate, foretold from the execution of `span`, which began at `since_s`."""
        node = candidate.node
        if self._prompts.put_off(candidate, thread_id, around, span):
            return
        same_level = parent_namespace(node) == strip_task_ids(around)
        place = Place(thread_id, around if same_level else ANYWHERE, node)
        known, origin = self._state.expectations, span.opened.checkpoint_ns
        elsewhere = known.at(Place(thread_id, ANYWHERE, node)) if same_level else ()
        if already := (*known.at(place), *elsewhere):
            for expectation in already:
                self._update(expectation, candidate, span, since_s)
                if same_level:
                    known.move(expectation, place)
            if node == strip_task_ids(span.opened.checkpoint_ns):  # what is expected is this turn's call, not the next
                self._prompts.ask_again(candidate, thread_id, around, span)
            else:
                for expectation in already:
                    self._prompts.refresh(expectation, around, span.opened.graph_id)
            return
        if self._calls_at(thread_id, node):
            return
        prediction = self._prompts.predict(candidate, thread_id, around, span)
        if prediction is None:
            return
        now_s = self._state.clock.now_s()
        self.add(
            Expectation(
                place=place,
                agent=prediction.agent,
                cause=Cause.SUCCESSOR,
                run_id=span.root_id,
                prompt=prediction.prompt,
                cache_salt=self._state.book.salt(prediction.agent),
                p_next=candidate.p_next,
                created_at_s=now_s,
                eta_at_s=None if candidate.eta_s is None else (since_s or now_s) + candidate.eta_s,
                is_branch=candidate.steps == 1 and candidate.p_next < CERTAIN and span.is_choice,
                is_choice=span.is_choice,
                source=prediction.source,
                is_cut=prediction.is_cut,
                stop=prediction.stop,
                num_between=candidate.steps - 1,
                origin=origin,
            )
        )

    def _update(self, expectation: Expectation, candidate: Candidate, span: OpenSpan, since_s: float | None) -> None:
        """Let an expected call know what is foretold of it now."""
        origin = span.opened.checkpoint_ns
        is_own = expectation.cause is Cause.SUCCESSOR and expectation.run_id == span.root_id
        if is_own and (expectation.num_between >= candidate.steps or expectation.origin == origin):
            # Foretold from nearer, or anew.
            expectation.p_next, expectation.origin = candidate.p_next, origin
            expectation.is_choice = span.is_choice
        expectation.p_next = max(expectation.p_next, candidate.p_next)
        if expectation.eta_at_s is None and candidate.eta_s is not None:
            expectation.eta_at_s = (since_s or self._state.clock.now_s()) + candidate.eta_s
        was_far = expectation.num_between > 0 and candidate.steps == 1  # only now it is one of the next
        is_branch = (expectation.is_branch or was_far) and candidate.p_next < CERTAIN
        expectation.is_branch = is_branch and span.is_choice
        expectation.num_between = min(expectation.num_between, candidate.steps - 1)

    def add(self, expectation: Expectation) -> None:
        """Expect a call; one that it takes the place of is given up."""
        for old in self._state.expectations.add(expectation):
            self._actor.drop(old, "replaced")

    def _calls_at(self, thread_id: ThreadId, node: str) -> bool:
        """Whether a call of `node` is under way in a thread."""
        places = (call.place for call in self._state.calls.values())
        return any(place.node == node and place.thread_id == thread_id for place in places)
