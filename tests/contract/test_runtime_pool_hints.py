"""The runtime on an engine that takes hints on its pool."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.messages import SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph

from pancake_langgraph._types import ActionKind, HintState, HintVerb, TokenPrefix
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.engines.base import WarmReport
from pancake_langgraph.engines.fake import FakeEngine, FakeEngineSettings
from pancake_langgraph.engines.pool_hints import HoldHint, PoolHints
from pancake_langgraph.ledger import ActionRecorded, ActionState, HintAnswered
from pancake_langgraph.plan.holding import FORETOLD_PRIORITY
from pancake_langgraph.runtime import Runtime, attach
from pancake_langgraph.testing.fake_server import FakeEngineServer
from tests.contract.runtime_bed import WORDS, State, Stub, StubBed, chats, run, script, tool_loop

#: First tokens of other traffic's prompts, each of its own.
_BASES = itertools.count(50_000, 1000)


class Listening(Stub):
    """A stub that keeps what was said to the pool, and may leave it unanswered."""

    is_deaf = False

    def __init__(self, server: FakeEngineServer) -> None:
        super().__init__(server)
        self.said: list[PoolHints | None] = []

    async def warm(self, prefix: TokenPrefix, *, priority: int, hints: PoolHints | None = None) -> WarmReport:
        self.said.append(hints)
        return await super().warm(prefix, priority=priority, hints=None if self.is_deaf else hints)


@contextmanager
def hint_bed(*, hold_cap_ratio: float = 0.5, **settings: Any) -> Iterator[StubBed]:
    fake = FakeEngineSettings(
        pool_blocks=80, max_model_len_tokens=1200, script=script, pool_hints=True, hold_cap_ratio=hold_cap_ratio
    )
    with FakeEngineServer(FakeEngine(fake)) as server:
        stub = Listening(server)
        runtime = Runtime(RuntimeSettings(engine="fake", **settings), engine=stub)
        runtime.start()
        yield StubBed(server, runtime, stub)
        runtime.close()
        runtime.check_integrity()
        assert runtime.statistics().failed_signals == 0
        assert runtime.ledger.statistics().open_actions == 0


@pytest.fixture
def bed() -> Iterator[StubBed]:
    with hint_bed() as made:
        yield made


@pytest.fixture
def narrow_bed() -> Iterator[StubBed]:
    with hint_bed(hold_cap_ratio=0.05) as made:
        yield made


def answers(bed: StubBed) -> list[tuple[HintVerb, HintState]]:
    return [(e.verb, e.state) for e in bed.runtime.ledger.events() if isinstance(e, HintAnswered)]


def pressed(bed: StubBed, rounds: int) -> Any:
    """Return a pause in which other traffic turns the pool over, a prompt at a time."""

    async def pause() -> None:
        for _ in range(rounds):
            base = next(_BASES)
            prefix = TokenPrefix(tuple(range(base, base + 200)))
            await asyncio.wrap_future(bed.server.run(bed.server.engine.warm(prefix, priority=0)))
            assert await asyncio.to_thread(bed.runtime.wait_idle)

    return pause


async def test_the_call_that_asks_for_the_tool_holds_its_own_context_and_nothing_is_sent(bed: StubBed) -> None:
    await run(attach(tool_loop(bed, pressed(bed, 12)), runtime=bed.runtime))
    first, second = chats(bed)
    assert second.cached_tokens >= first.prompt_tokens // 16 * 16
    assert bed.runtime.wait_idle()
    assert bed.actions(ActionState.SUBMITTED) == []
    assert [hints.hold is not None for hints in bed.server.engine.heard] == [True, True]


async def test_a_pause_whose_call_told_no_token_counts_is_held_as_well(
    bed: StubBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StubBed, "model", partialmethod(StubBed.model, stream_usage=False))
    await run(attach(tool_loop(bed, pressed(bed, 4)), runtime=bed.runtime))
    _, answer = bed.server.engine.heard
    assert answer.release == ()  # the call that comes back finds the hold in force


async def test_an_answer_with_a_hold_is_the_same_message_as_without(bed: StubBed) -> None:
    held = await run(attach(tool_loop(bed, pressed(bed, 0)), runtime=bed.runtime))
    plain = await run(tool_loop(bed, pressed(bed, 0)))

    def shown(state: Any) -> list[Any]:
        drop = ("id", "tool_call_id", "response_metadata", "tool_calls", "usage_metadata")
        return [{k: v for k, v in message.model_dump().items() if k not in drop} for message in state["messages"]]

    assert shown(held) == shown(plain)
    assert "kv_transfer_params" not in str(held)


async def test_the_same_pause_takes_many_requests_without_hints() -> None:
    with hint_bed(pool_hints=False) as bed:
        await run(attach(tool_loop(bed, pressed(bed, 12)), runtime=bed.runtime))
        assert answers(bed) == []
        assert set(bed.stub.said) == {None}
        assert len(bed.stub.said) > 1


async def test_what_does_not_fit_under_the_cap_is_asked_once_and_then_read_again_as_without_hints(
    narrow_bed: StubBed,
) -> None:
    bed = narrow_bed
    await run(attach(tool_loop(bed, pressed(bed, 12)), runtime=bed.runtime))
    first, second = chats(bed)
    assert second.cached_tokens >= first.prompt_tokens // 16 * 16
    assert answers(bed).count((HintVerb.HOLD, HintState.CLIPPED)) == 1
    assert len(bed.stub.said) > 1


async def work_in_turns(bed: StubBed, *, ends: Iterator[bool]) -> None:
    """Let two agents with contexts of their own work ten times; a run may end behind the first of them.

    Between two runs both contexts are lost; before the first agent calls there is time to bring the other one's up,
    which is twice as long.
    """

    def agent(system: str) -> Any:
        model = bed.model()

        async def node(state: State) -> dict[str, Any]:
            assert await asyncio.to_thread(bed.runtime.wait_idle)
            return {"messages": [await model.ainvoke([SystemMessage(system), *state["messages"]])]}

        return node

    builder = StateGraph(State)
    builder.add_node("first", agent(f"first {WORDS}"))
    builder.add_node("second", agent(f"second {WORDS} {WORDS}"))
    builder.add_edge(START, "first")
    builder.add_conditional_edges("first", lambda state: END if next(ends) else "second", ["second", END])
    graph = attach(builder.compile(checkpointer=InMemorySaver()), runtime=bed.runtime)
    for number in range(10):
        await run(graph, f"letter {number}", thread=f"t{number}")
        await asyncio.to_thread(bed.press, prompts=4)


def second_warmed(bed: StubBed) -> list[ActionRecorded]:
    every = bed.actions(ActionState.SUBMITTED)
    return [each for each in every if each.agent == "second" and each.kind is ActionKind.WARM]


def second_held(bed: StubBed) -> list[HoldHint]:
    holds = [hints.hold for hints in bed.stub.said if hints is not None and hints.hold is not None]
    return [hold for hold in holds if hold.num_tokens > 250]


async def test_what_is_brought_up_for_a_sure_successor_is_held_until_it_comes(bed: StubBed) -> None:
    await work_in_turns(bed, ends=itertools.repeat(False))
    holds = second_held(bed)
    assert len(holds) >= len(second_warmed(bed)) > 0
    assert not any(hold.is_whole for hold in holds)  # whether more of it is known, the engine sees for itself
    assert {hold.priority for hold in holds} == {FORETOLD_PRIORITY}
    assert (HintVerb.HOLD, HintState.ACCEPTED) in answers(bed)
    assert (HintVerb.RELEASE, HintState.ACCEPTED) in answers(bed)


async def test_what_is_brought_up_for_one_of_several_ways_is_not_held(bed: StubBed) -> None:
    await work_in_turns(bed, ends=itertools.cycle([True, False, False, False]))
    assert second_warmed(bed)
    assert second_held(bed) == []


async def test_without_pressure_nothing_is_sent(bed: StubBed) -> None:
    graph = attach(tool_loop(bed, pressed(bed, 0)), runtime=bed.runtime)
    await run(graph)
    assert bed.runtime.wait_idle()
    assert bed.stub.said == []


async def test_a_call_that_cannot_ask_for_a_tool_says_nothing(bed: StubBed) -> None:
    model = bed.model()

    async def node(state: State) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder = StateGraph(State)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    await run(attach(builder.compile(), runtime=bed.runtime))
    assert bed.server.engine.heard == ()


async def test_a_release_travels_with_the_next_call(bed: StubBed) -> None:
    graph = attach(tool_loop(bed, pressed(bed, 4)), runtime=bed.runtime)
    for thread in ("one", "two"):
        await run(graph, thread=thread)
        assert bed.runtime.wait_idle()
    ask, answer, ask_again, answer_again = bed.server.engine.heard
    holds = [hints.hold.hint_id for hints in bed.server.engine.heard if hints.hold is not None]
    assert len(set(holds)) == 4
    assert ask.release == answer.release == ()  # while the second call is on its way the first one's hold is in force
    assert set(ask_again.release) == set(holds[:2])
    assert answer_again.release == ()
    assert answer_again.retire == ()


async def test_what_a_run_without_a_thread_has_left_goes_first_except_what_others_read(bed: StubBed) -> None:
    """Only such a run is known never to go on; the first of its agent shows no shared part and is released only."""
    graph = attach(tool_loop(bed, pressed(bed, 4), checkpointer=None), runtime=bed.runtime)
    for number in range(3):
        await graph.ainvoke({"messages": [("user", f"look {number} {uuid4().hex * 20}")]})
        assert bed.runtime.wait_idle()
    heard = bed.server.engine.heard
    retired = [[hint.hint_id for hint in hints.retire] for hints in heard]
    holds = [hints.hold.hint_id for hints in heard if hints.hold is not None]
    assert retired == [[], [], [], [], [holds[2]], []]
    (hint,) = heard[4].retire
    assert hint.keep_tokens > 100
