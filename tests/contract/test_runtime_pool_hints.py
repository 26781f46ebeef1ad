"""The runtime on an engine that takes hints on its pool."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest

from pancake_langgraph._types import ActionKind, HintState, HintVerb, Outcome, TokenPrefix
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.engines.base import WarmReport
from pancake_langgraph.engines.fake import FakeEngine, FakeEngineSettings
from pancake_langgraph.engines.pool_hints import PoolHints
from pancake_langgraph.ledger import ActionState, HintAnswered
from pancake_langgraph.runtime import Runtime, attach
from pancake_langgraph.testing.fake_server import FakeEngineServer
from tests.contract.runtime_bed import Stub, StubBed, chats, run, script, tool_loop

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
def hint_bed(**settings: Any) -> Iterator[StubBed]:
    fake = FakeEngineSettings(pool_blocks=80, max_model_len_tokens=1200, script=script, pool_hints=True)
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


async def test_one_hint_keeps_a_paused_agents_context_and_nothing_else_is_sent(bed: StubBed) -> None:
    await run(attach(tool_loop(bed, pressed(bed, 12)), runtime=bed.runtime))
    first, second = chats(bed)
    assert second.cached_tokens >= first.prompt_tokens // 16 * 16
    assert answers(bed) == [(HintVerb.HOLD, HintState.ACCEPTED)]
    assert bed.runtime.wait_idle()
    sent = bed.actions(ActionState.SUBMITTED)
    assert [action.kind for action in sent] == [ActionKind.HOLD]
    assert [action.outcome for action in bed.actions()] == [Outcome.USED]


async def test_the_same_pause_takes_many_requests_without_hints() -> None:
    with hint_bed(pool_hints=False) as bed:
        await run(attach(tool_loop(bed, pressed(bed, 12)), runtime=bed.runtime))
        assert answers(bed) == []
        assert set(bed.stub.said) == {None}
        assert len(bed.stub.said) > 1


async def test_an_engine_that_does_not_answer_is_asked_again_and_again_as_without_hints(bed: StubBed) -> None:
    bed.stub.is_deaf = True
    await run(attach(tool_loop(bed, pressed(bed, 12)), runtime=bed.runtime))
    first, second = chats(bed)
    assert second.cached_tokens >= first.prompt_tokens // 16 * 16
    assert len(bed.stub.said) > 1


async def test_without_pressure_nothing_is_said(bed: StubBed) -> None:
    graph = attach(tool_loop(bed, pressed(bed, 0)), runtime=bed.runtime)
    await run(graph)
    assert bed.runtime.wait_idle()
    assert bed.stub.said == []


async def test_a_release_travels_with_the_next_hint(bed: StubBed) -> None:
    graph = attach(tool_loop(bed, pressed(bed, 4)), runtime=bed.runtime)
    await run(graph, thread="one")
    assert bed.runtime.wait_idle()
    assert answers(bed) == [(HintVerb.HOLD, HintState.ACCEPTED)]
    await run(graph, thread="two")
    assert answers(bed)[1:] == [(HintVerb.RELEASE, HintState.ACCEPTED), (HintVerb.HOLD, HintState.ACCEPTED)]
    first, second = (hints for hints in bed.stub.said if hints is not None)
    assert first.hold is not None
    assert second.hold is not None
    assert second.release == (first.hold.hint_id,)
    assert second.retire == ()


async def test_what_a_run_without_a_thread_has_left_goes_first_except_what_others_read(bed: StubBed) -> None:
    """Only such a run is known never to go on; the first of its agent shows no shared part and is released only."""
    graph = attach(tool_loop(bed, pressed(bed, 4), checkpointer=None), runtime=bed.runtime)
    for number in range(3):
        await graph.ainvoke({"messages": [("user", f"look {number} {uuid4().hex * 20}")]})
        assert bed.runtime.wait_idle()
    said = [hints for hints in bed.stub.said if hints is not None]
    assert [len(hints.release) for hints in said] == [0, 1, 0]
    assert [len(hints.retire) for hints in said] == [0, 0, 1]
    (retired,) = said[2].retire
    assert said[1].hold is not None
    assert retired.hint_id == said[1].hold.hint_id
    assert 100 < retired.keep_tokens < said[1].hold.num_tokens
    assert (HintVerb.RETIRE, HintState.ACCEPTED) in answers(bed)
