"""Where the runtime's work could be lost, doubled or in the way."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from pancake_langgraph._errors import EngineRejected
from pancake_langgraph._types import ActionKind, Outcome, Prompt, ThreadId
from pancake_langgraph.engines.base import Residency
from pancake_langgraph.ledger import ActionState, BreakerChanged, SpanKind
from pancake_langgraph.runtime import attach
from pancake_langgraph.runtime.signals import Opened, Requested
from tests.contract.runtime_bed import (
    Bed,
    DeadTier,
    open_bed,
    pressed_pause,
    run,
    stub_bed,
    tool_loop,
    until,
)


@pytest.fixture
def bed() -> Iterator[Bed]:
    with open_bed() as made:
        yield made


def an_expectation(node: str = "agent") -> Any:
    from pancake_langgraph._types import AgentKey
    from pancake_langgraph.runtime.expectations import Cause, Expectation, Place

    expectation = Expectation(
        place=Place(ThreadId("t"), "", node),
        agent=AgentKey("agent", "", "0"),
        cause=Cause.RESUME,
        run_id=uuid4(),
        prompt=Prompt(()),
        cache_salt=None,
        p_next=1.0,
        created_at_s=0.0,
    )
    expectation.set_tokens(tuple(range(100)), 16)
    return expectation


async def test_work_cancelled_before_its_first_step_is_settled_too(bed: Bed) -> None:
    def submit_and_drop() -> None:
        actor = bed.runtime._actor
        assert actor is not None
        expectation = an_expectation()
        actor._performer.submit(expectation, ActionKind.WARM, "test", missing_tokens=96)
        actor.drop(expectation, "gone at once")

    bed.runtime._background.call(submit_and_drop)
    assert await asyncio.to_thread(bed.runtime.wait_idle)
    assert [a.outcome for a in bed.actions()] == [Outcome.WASTED]
    assert bed.runtime.ledger.statistics().open_actions == 0


async def test_a_computing_warm_up_gives_way_also_to_a_call_at_its_own_place(bed: Bed) -> None:
    """A sibling worker of a fan-out calls: this warm-up is for another worker at the same node."""
    bed.server.on_engine(lambda engine: engine.hold("warm"))

    def submit() -> None:
        actor = bed.runtime._actor
        assert actor is not None
        expectation = an_expectation()
        bed.runtime._state.expectations.add(expectation)
        actor._performer.submit(expectation, ActionKind.WARM, "test", missing_tokens=96)

    bed.runtime._background.call(submit)
    await asyncio.sleep(0.05)
    bed.runtime._background.call(lambda: bed.runtime._actor.give_way())  # type: ignore[union-attr]
    bed.server.on_engine(lambda engine: engine.release("warm"))
    assert await asyncio.to_thread(bed.runtime.wait_idle)
    given_up = [a for a in bed.actions() if a.outcome is Outcome.WASTED]
    assert given_up[0].reason == "gave way to foreground work"


async def test_a_call_is_not_kept_waiting_for_the_next_look_while_something_computes(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pancake_langgraph.runtime.background.LOOK_S", 600.0)
    bed.server.on_engine(lambda engine: engine.hold("warm"))

    def submit() -> None:
        actor = bed.runtime._actor
        assert actor is not None
        expectation = an_expectation()
        expectation.created_at_s = bed.runtime._clock.now_s()
        bed.runtime._state.expectations.add(expectation)
        actor._performer.submit(expectation, ActionKind.WARM, "test", missing_tokens=96)

    bed.runtime._background.ask(submit).result(5)
    call_id = uuid4()
    bed.runtime.post(Opened(1.0, call_id, None, SpanKind.CALL, "agent", ThreadId("t")))
    bed.runtime._background.ask(lambda: None).result(5)  # the loop is awake, and its next look far away
    bed.runtime.post(Requested(1.0, call_id, Prompt(()), None, None))
    await until(lambda: [a.reason for a in bed.actions()] == ["gave way to foreground work"])
    bed.server.on_engine(lambda engine: engine.release("warm"))


# -- where work could be lost, doubled or in the way -------------------------------------------------------------------


async def test_work_under_way_when_its_call_has_ended_is_given_up_and_late() -> None:
    with stub_bed() as bed:
        await run(attach(tool_loop(bed, pressed_pause(bed)), runtime=bed.runtime))
        assert await asyncio.to_thread(bed.runtime.wait_idle)
        assert [a.outcome for a in bed.actions()] == [Outcome.LATE]


async def test_closing_does_not_wait_for_work_whose_call_has_come(caplog: pytest.LogCaptureFixture) -> None:
    with stub_bed() as bed:

        async def pause() -> None:
            await pressed_pause(bed)()
            bed.server.on_engine(lambda engine: engine.hold("chat"))

        graph = attach(tool_loop(bed, pause), runtime=bed.runtime)
        running = asyncio.create_task(run(graph))
        await until(lambda: bed.runtime.statistics().calls == 2)
        await asyncio.to_thread(bed.runtime.close)
        assert [a.outcome for a in bed.actions()] == [Outcome.LATE]
        assert not caplog.records
        bed.server.on_engine(lambda engine: engine.release("chat"))
        await running


async def test_an_action_cancelled_twice_is_settled_once() -> None:
    with stub_bed() as bed:

        async def pause() -> None:
            await pressed_pause(bed)()
            bed.stub.is_blind, bed.stub.looks = True, 0

        await run(attach(tool_loop(bed, pause), runtime=bed.runtime))
        await until(lambda: bed.stub.looks > 0)
        await asyncio.to_thread(bed.runtime.close)
        assert [a.outcome for a in bed.actions()] == [Outcome.LATE]


async def test_an_unexpected_error_in_a_warm_up_or_an_evaluation_is_counted_and_costs_only_itself() -> None:
    with stub_bed(breaker_open_s=0.01) as bed:
        bed.stub.warm_error = ValueError("a bug")
        bed.stub.residency_bugs = 1

        async def pause() -> None:
            await asyncio.to_thread(bed.press, prompts=4)
            await until(lambda: bed.stub.warms > 0)
            bed.stub.warm_error = None
            await asyncio.sleep(0.02)
            await asyncio.to_thread(bed.press, prompts=1)
            assert await asyncio.to_thread(bed.runtime.wait_idle)

        await run(attach(tool_loop(bed, pause), runtime=bed.runtime))
        assert await asyncio.to_thread(bed.runtime.wait_idle)
        assert {a.outcome for a in bed.actions()} == {Outcome.FAILED, Outcome.USED}
        assert bed.runtime.statistics().failed_signals >= 2


async def test_a_prefix_that_the_engine_refuses_is_sent_once_and_opens_no_breaker() -> None:
    with stub_bed() as bed:
        bed.stub.warm_error = EngineRejected("too long", status_code=400)

        async def pause() -> None:
            for _ in range(3):
                await asyncio.to_thread(bed.press, prompts=4)
                assert await asyncio.to_thread(bed.runtime.wait_idle)

        await run(attach(tool_loop(bed, pause), runtime=bed.runtime))
        assert bed.stub.warms == 1
        assert not any(isinstance(e, BreakerChanged) for e in bed.runtime.ledger.events())


async def test_without_an_answering_tier_a_restore_computes_and_gives_way() -> None:
    settings: dict[str, Any] = {
        "tier_url": "http://127.0.0.1:9",
        "tier_model": "m",
        "breaker_failures": 1,
        "breaker_open_s": 60.0,
    }
    with stub_bed(DeadTier(), **settings) as bed:

        async def pause() -> None:
            await asyncio.to_thread(bed.press, prompts=4)
            assert await asyncio.to_thread(bed.runtime.wait_idle)

        await run(attach(tool_loop(bed, pause), runtime=bed.runtime))
        await until(lambda: any(isinstance(e, BreakerChanged) for e in bed.runtime.ledger.events()))
        assert await asyncio.to_thread(bed.runtime.wait_idle)
        before, over = len(bed.actions()), asyncio.Event()
        graph = attach(tool_loop(bed, pressed_pause(bed, until_set=over)), runtime=bed.runtime)
        paused = asyncio.create_task(run(graph, thread="paused"))
        await until(lambda: bed.stub.is_stalled and len(bed.actions(ActionState.SUBMITTED)) > before)
        await run(graph, "hello", thread="other")
        await until(lambda: len(bed.actions()) > before)
        settled = bed.actions()[before]
        assert (settled.outcome, settled.reason) == (Outcome.WASTED, "gave way to foreground work")
        over.set()
        await paused


async def test_a_warm_up_that_computes_stays_away_until_the_call_it_gave_way_to_answers() -> None:
    with stub_bed() as bed:
        over = asyncio.Event()
        graph = attach(tool_loop(bed, pressed_pause(bed, until_set=over)), runtime=bed.runtime)
        paused = asyncio.create_task(run(graph, thread="paused"))
        await until(lambda: bed.stub.warms == 1)
        bed.server.on_engine(lambda engine: engine.hold("chat"))
        other = asyncio.create_task(run(graph, "hello", thread="other"))
        await until(lambda: bed.actions() != [])
        assert await asyncio.to_thread(bed.runtime.wait_idle)
        assert bed.stub.warms == 1
        bed.server.on_engine(lambda engine: engine.release("chat"))
        await until(lambda: bed.stub.warms > 1)
        over.set()
        await asyncio.gather(paused, other)


async def test_a_context_that_a_running_call_reads_takes_no_room_and_is_not_touched(bed: Bed) -> None:
    expectation = an_expectation()
    call = a_call(expectation, token_ids=(*range(100), 7, 8))
    other = a_call(expectation, token_ids=(*range(50), *range(60)))
    unanswered = a_call(expectation, token_ids=None)
    assert call.reads(expectation)
    assert not other.reads(expectation)
    assert unanswered.reads(expectation) == expectation.fits(unanswered.prompt)
    assert not replace(call, cache_salt="another").reads(expectation)

    def seen() -> int | None:
        actor = bed.runtime._actor
        assert actor is not None
        bed.runtime._state.calls[call.run_id] = call
        assert actor._is_in_use(expectation, Residency(known=True, resident_tokens=96, allocated_tokens=500))
        del bed.runtime._state.calls[call.run_id]
        assert not actor._is_in_use(expectation, Residency(known=True, resident_tokens=96, allocated_tokens=900))
        return expectation.used_at_allocated_tokens

    async def look() -> int | None:
        return seen()

    assert await asyncio.wrap_future(bed.runtime._background.run(look())) == 500  # it was in use until then


def a_call(expectation: Any, *, token_ids: tuple[int, ...] | None) -> Any:
    from pancake_langgraph.runtime.state import Call

    return Call(
        run_id=uuid4(),
        root_id=uuid4(),
        graph_id="",
        place=expectation.place,
        agent=expectation.agent,
        prompt=expectation.prompt,
        cache_salt=None,
        max_tokens=8,
        num_prompt_tokens=102,
        token_ids=token_ids,
        began=True,
    )


async def test_a_state_that_does_not_let_itself_be_read_is_counted_and_harms_nothing(bed: Bed) -> None:
    def unreadable(value: object) -> Any:
        raise RuntimeError(type(value).__name__)

    async def pause() -> None:
        await asyncio.sleep(0)

    graph = attach(tool_loop(bed, pause), runtime=bed.runtime)
    handler = graph.config["callbacks"][0]
    before = bed.runtime.statistics().unreadable_states
    assert handler._seen(unreadable, {"messages": []}) is None
    assert bed.runtime.statistics().unreadable_states == before + 1
    await run(graph)
    assert await asyncio.to_thread(bed.runtime.wait_idle)
    assert bed.runtime.statistics().failed_signals == 0
