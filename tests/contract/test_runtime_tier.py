"""A tier that gives wrong answers is left alone, says so once, and is used again when it was proven right."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pancake_langgraph._types import ActionKind, TokenPrefix
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.engines.base import Capabilities, Recital, WarmReport
from pancake_langgraph.engines.fake import FakeEngine, FakeEngineSettings
from pancake_langgraph.ledger import ActionState, BreakerChanged
from pancake_langgraph.plan import holding
from pancake_langgraph.runtime import Runtime, attach
from pancake_langgraph.runtime import runtime as runtime_module
from pancake_langgraph.testing.bridged_engine import BridgedEngine
from pancake_langgraph.testing.fake_server import FakeEngineServer
from pancake_langgraph.tiers.base import PrefetchReport, TierHealth
from pancake_langgraph.tiers.canary import canary_chunks
from pancake_langgraph.tiers.null import NullTier
from tests.contract.runtime_bed import Bed as AppBed
from tests.contract.runtime_bed import run, script, stub_bed, tool_loop, until

CHUNK = 32
NUM_CHUNKS = canary_chunks(CHUNK)
STORED = CHUNK * NUM_CHUNKS


class Reader(BridgedEngine):
    """An engine with a connector that can be asked; what it reads from the tier is `from_tier`."""

    tier_state = "unproven"
    from_tier = "7"
    probes = 0
    restarts = 0
    judged: tuple[bool, ...] = ()
    read: tuple[TokenPrefix, ...] = ()
    fails = False

    async def probe(self) -> Capabilities:
        self.probes += 1
        return replace(await super().probe(), kv_identity="w1", tier_state=self.tier_state)

    async def recite(self, prefix: TokenPrefix, *, max_tokens: int, tier_salt: str | None = None) -> Recital:
        if self.fails:
            raise ValueError("a bug")
        word = "7" if tier_salt is None else self.from_tier
        is_known = prefix in self.read or tier_salt is not None
        self.read += (prefix,)
        return Recital((word,), (-0.1,), 3.0, STORED if is_known else 0)

    async def judge_tier(self, *, is_right: bool) -> bool:
        self.judged += (is_right,)
        return True


class Memory(NullTier):
    """A tier that has everything, unless it is away."""

    is_away = False
    missed = 0
    identity: str | None = None

    async def health(self) -> TierHealth:
        if self.is_away:
            self.missed += 1
            return TierHealth(alive=False, chunk_tokens=None, detail="away")
        return TierHealth(alive=True, chunk_tokens=CHUNK, detail="ok")

    async def prefetch(self, prefix: TokenPrefix) -> PrefetchReport:
        return PrefetchReport(NUM_CHUNKS, NUM_CHUNKS, 0.0)

    def identify(self, kv_identity: str | None) -> None:
        self.identity = kv_identity


@dataclass
class Bed:
    reader: Reader
    tier: Memory
    runtime: Runtime

    def breaker_reasons(self) -> list[str]:
        events = self.runtime.ledger.events()
        return [e.reason for e in events if isinstance(e, BreakerChanged) and e.part == "tier"]


@contextmanager
def opened(**facts: Any) -> Iterator[Bed]:
    with FakeEngineServer(FakeEngine(FakeEngineSettings())) as server:
        reader, tier = Reader(server), Memory()
        for name, value in facts.items():
            setattr(reader, name, value)
        settings = RuntimeSettings(engine="fake", tier_url="http://127.0.0.1:1", tier_model="m")
        with Runtime(settings, engine=reader, tier=tier) as runtime:
            runtime.start()
            assert runtime.wait_idle()
            yield Bed(reader, tier, runtime)


def eventually(condition: Callable[[], bool]) -> bool:
    """Wait until something on the runtime's own loop has happened."""
    deadline_s = time.monotonic() + 10.0
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    return condition()


def test_a_tier_that_answers_rightly_is_proven_once_and_looked_up_under_the_engines_identity() -> None:
    with opened() as bed:
        assert eventually(lambda: bed.reader.judged == (True,))
        assert bed.breaker_reasons() == []
        assert bed.tier.identity == "w1"


def test_a_tier_that_answers_wrongly_is_switched_off_in_engine_and_runtime(caplog: pytest.LogCaptureFixture) -> None:
    with opened(from_tier="six") as bed:
        assert eventually(lambda: bool(bed.breaker_reasons()))
        assert bed.reader.judged == (False,)
        (reason,) = bed.breaker_reasons()
        assert "wrong answers" in reason
        assert "L1" in reason
    assert [record.levelname for record in caplog.records if "switched off" in record.message] == ["ERROR"]


@pytest.mark.parametrize("state", ["proven", None])
def test_what_others_have_proven_or_cannot_be_asked_is_not_asked_again(state: str | None) -> None:
    with opened(tier_state=state) as bed:
        assert bed.reader.judged == ()
        assert bed.breaker_reasons() == []


def test_an_engine_that_was_told_not_to_read_the_tier_is_believed() -> None:
    with opened(tier_state="off") as bed:
        assert eventually(lambda: len(bed.breaker_reasons()) == 1)
        assert bed.reader.judged == ()


def test_an_engine_that_was_started_anew_while_nobody_called_it_is_probed_and_its_tier_proven_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime_module, "_SWEEP_S", 0.005)
    with opened() as bed:
        assert eventually(lambda: bed.reader.judged == (True,))
        assert bed.reader.probes == 1
        bed.reader.restarts = 1
        assert eventually(lambda: bed.reader.judged == (True, True))
        assert bed.reader.probes == 2


def test_a_bug_while_proving_is_counted_and_costs_the_proof_only() -> None:
    with opened(fails=True) as bed:
        assert eventually(lambda: bed.runtime.statistics().failed_signals == 1)
        assert bed.reader.judged == ()
        assert bed.breaker_reasons() == []


async def test_the_codec_of_an_agents_kv_goes_with_its_warm_requests_and_prefetches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, str | None]] = []
    plain_warm = BridgedEngine.warm

    class Watched(Memory):
        async def prefetch(self, prefix: TokenPrefix) -> PrefetchReport:
            asked.append(("prefetch", prefix.cache_salt))
            return await super().prefetch(prefix)

    async def warm(self: BridgedEngine, prefix: TokenPrefix, **more: Any) -> WarmReport:
        asked.append(("warm", prefix.cache_salt))
        return await plain_warm(self, prefix, **more)

    monkeypatch.setattr(BridgedEngine, "warm", warm)
    with stub_bed(Watched(), tier_url="http://127.0.0.1:1", tier_model="m") as bed:

        async def pause() -> None:
            sent = bed.stub.warms
            await asyncio.to_thread(bed.press, prompts=4)
            await until(lambda: bed.stub.warms > sent)

        graph = tool_loop(bed, pause, cache_salt="tenant", kv_codec="int4")
        await run(attach(graph, runtime=bed.runtime))
        assert await asyncio.to_thread(bed.runtime.wait_idle)
    assert set(asked) == {("prefetch", "tenant!int4"), ("warm", "tenant!int4")}


async def test_a_disk_is_asked_once_however_often_a_context_is_lost_in_one_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holding, "RESTORE_AGAIN_FACTOR", 1.0)  # at once, however long that took
    asked: list[TokenPrefix] = []

    class Watched(Memory):
        async def prefetch(self, prefix: TokenPrefix) -> PrefetchReport:
            asked.append(prefix)
            return await super().prefetch(prefix)

    with stub_bed(Watched(), tier_url="http://127.0.0.1:1", tier_model="m") as bed:

        async def pause() -> None:
            for sent in (0, 1):
                await asyncio.to_thread(bed.press, prompts=4)
                await until(lambda sent=sent: bed.stub.warms > sent)
                assert await asyncio.to_thread(bed.runtime.wait_idle)

        await run(attach(tool_loop(bed, pause), runtime=bed.runtime))
        assert await asyncio.to_thread(bed.runtime.wait_idle)
        restored = [each for each in bed.actions(ActionState.SUBMITTED) if each.kind is ActionKind.WARM]
        assert len(restored) >= 2
    assert len(asked) == 1


@pytest.mark.parametrize("was_wrong", [True, False])
async def test_a_cache_server_that_comes_back_is_proven_anew_also_after_wrong_answers(
    monkeypatch: pytest.MonkeyPatch, was_wrong: bool
) -> None:
    monkeypatch.setattr(runtime_module, "_SWEEP_S", 0.005)
    with FakeEngineServer(FakeEngine(FakeEngineSettings(script=script))) as server:
        reader, tier = Reader(server), Memory()
        reader.from_tier = "six" if was_wrong else "7"
        settings = RuntimeSettings(engine="fake", tier_url="http://127.0.0.1:1", tier_model="m", breaker_open_s=0.01)
        with Runtime(settings, engine=reader, tier=tier) as runtime:
            runtime.start()
            await until(lambda: reader.judged == (not was_wrong,))
            bed = Bed(reader, tier, runtime)

            async def pause() -> None:
                tier.is_away = True
                await until(lambda: tier.missed > settings.breaker_failures)
                reader.from_tier = "7"
                tier.is_away = False
                await until(lambda: reader.judged == (not was_wrong, True))
                await until(lambda: bed.breaker_reasons()[-1] == "answers again")

            await run(attach(tool_loop(AppBed(server, runtime), pause), runtime=runtime))
            assert len(bed.breaker_reasons()) == 2
