"""The tier adapters against a small stub."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from pancake_langgraph._errors import ConfigError, TierError
from pancake_langgraph._types import TokenPrefix
from pancake_langgraph.testing._http_server import Answer, Call, LoopbackServer
from pancake_langgraph.tiers.base import Tier
from pancake_langgraph.tiers.lmcache import LMCacheTier
from pancake_langgraph.tiers.registry import create_tier, register_tier, tier_names

PREFIX = TokenPrefix(tuple(range(300)), "salt")


class Stub:
    """Answers as the cache server does: submitted, pending for a while, completed once, then forgotten."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.submitted = Answer(202, {"request_id": "job-1", "chunks": 4, "status": "submitted"})
        self.pending = 2
        self.completed = {"request_id": "job-1", "status": "completed", "found_keys": 3, "total_keys": 4}
        self.status = Answer(payload={"is_healthy": True, "chunk_size": 64})
        self.server = LoopbackServer(self.handle)

    async def handle(self, call: Call) -> Answer:
        self.calls.append(call)
        if call.path == "/status":
            return self.status
        if call.method == "POST":
            return self.submitted
        if self.pending > 0:
            self.pending -= 1
            return Answer(payload={"request_id": "job-1", "status": "pending"})
        return Answer(payload=self.completed)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()
    made.server.start()
    yield made
    made.server.stop()


@pytest.fixture
async def tier(stub: Stub) -> AsyncIterator[Tier]:
    made = create_tier("lmcache", url=stub.url, model_key="some/model", deadline_s=5.0)
    await made.open()
    await made.open()
    yield made
    await made.close()
    await made.close()


async def test_a_prefetch_waits_for_its_end_and_counts_chunks(stub: Stub, tier: Tier) -> None:
    report = await tier.prefetch(PREFIX)
    assert (report.found_chunks, report.total_chunks) == (3, 4)
    assert report.elapsed_s > 0
    assert stub.calls[0].body == {
        "model_name": "some/model",
        "world_size": 1,
        "token_ids": list(range(300)),
        "cache_salt": "salt",
    }
    assert [call.path for call in stub.calls[1:]] == ["/cache/prefetches/job-1"] * 3


async def test_a_prefetch_looks_for_kv_of_the_agents_own_codec(stub: Stub, tier: Tier) -> None:
    tier.identify("w1")
    await tier.prefetch(TokenPrefix(PREFIX.token_ids, "salt!int4"))
    assert stub.calls[0].body["cache_salt"] == "w1!int4.salt"


async def test_keys_of_several_groups_are_counted_as_chunks(stub: Stub, tier: Tier) -> None:
    stub.completed |= {"found_keys": 4, "total_keys": 8}
    assert (await tier.prefetch(PREFIX)).found_chunks == 2


async def test_a_prefix_below_one_chunk_finds_nothing(stub: Stub, tier: Tier) -> None:
    stub.submitted = Answer(202, {"chunks": 0, "status": "noop"})
    report = await tier.prefetch(TokenPrefix((1, 2)))
    assert (report.found_chunks, report.total_chunks) == (0, 0)
    assert stub.calls[0].body["cache_salt"] == ""
    assert len(stub.calls) == 1


async def test_a_prefetch_that_never_ends_is_given_up_at_the_deadline(stub: Stub) -> None:
    stub.pending = 10**9
    tier = LMCacheTier(stub.url, "m", deadline_s=0.1)
    async with asyncio.timeout(5):
        with pytest.raises(TierError, match=r"within 0\.1 s"):
            await tier.prefetch(PREFIX)
    await tier.close()


async def test_an_unregistered_model_names_the_mend(stub: Stub, tier: Tier) -> None:
    stub.submitted = Answer(503, {"detail": "no layout registered for model_name='some/model' world_size=1"})
    with pytest.raises(TierError, match="--model string"):
        await tier.prefetch(PREFIX)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(500, {"error": "broken"}),
        Answer(200, text="<html>"),
        Answer(202, [1]),
        Answer(202, {"status": "submitted"}),
        Answer(202, {"status": "submitted", "chunks": 4}),
        Answer(202, {"status": "submitted", "chunks": -1}),
    ],
)
async def test_wrong_answers_are_tier_errors(stub: Stub, tier: Tier, answer: Answer) -> None:
    stub.submitted = answer
    with pytest.raises(TierError):
        await tier.prefetch(PREFIX)


async def test_a_wrong_end_is_a_tier_error(stub: Stub, tier: Tier) -> None:
    stub.completed = {"status": "completed", "found_keys": "all"}
    with pytest.raises(TierError, match="found_keys"):
        await tier.prefetch(PREFIX)


async def test_a_port_that_accepts_and_never_answers_costs_no_more_than_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tier = LMCacheTier(f"http://127.0.0.1:{silent.getsockname()[1]}", "m", deadline_s=0.05)
        async with asyncio.timeout(5):
            with pytest.raises(TierError, match=r"within 0\.05 s"):
                await tier.prefetch(PREFIX)
            health = await tier.health()
        assert not health.alive
        assert "0.05 s" in health.detail
        await tier.close()


async def test_nobody_there_is_a_tier_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    tier = LMCacheTier(f"http://127.0.0.1:{port}", "m")
    with pytest.raises(TierError, match="cannot reach"):
        await tier.prefetch(PREFIX)
    assert not (await tier.health()).alive
    await tier.close()


async def test_a_cancelled_prefetch_hangs_up(stub: Stub) -> None:
    asked = threading.Event()

    async def never(call: Call) -> Answer:
        asked.set()
        await asyncio.Event().wait()
        return Answer()

    silent = LoopbackServer(never)
    silent.start()
    try:
        tier = LMCacheTier(f"http://127.0.0.1:{silent.port}", "m", deadline_s=60.0)
        task = asyncio.create_task(tier.prefetch(PREFIX))
        assert await asyncio.to_thread(asked.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            while not silent.hang_ups:
                await asyncio.sleep(0.01)
        await tier.close()
    finally:
        silent.stop()


async def test_health_tells_the_chunk_size_where_it_is_said(stub: Stub, tier: Tier) -> None:
    health = await tier.health()
    assert (health.alive, health.chunk_tokens) == (True, 64)
    stub.status = Answer(payload={"is_healthy": False})
    health = await tier.health()
    assert (health.alive, health.chunk_tokens) == (False, None)
    stub.status = Answer(503, {"error": "engine not initialized"})
    health = await tier.health()
    assert not health.alive
    assert "not initialized" in health.detail


async def test_the_null_tier_holds_nothing() -> None:
    tier = create_tier("null", deadline_s=1.0)
    assert isinstance(tier, Tier)
    await tier.open()
    assert not (await tier.health()).alive
    assert (await tier.prefetch(PREFIX)).total_chunks == 0
    await tier.close()


def test_the_registry_refuses_what_it_cannot_make() -> None:
    with pytest.raises(ConfigError, match="lmcache, null"):
        create_tier("nope")
    with pytest.raises(ConfigError, match="model_key"):
        create_tier("lmcache", url="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="tier url"):
        LMCacheTier("ftp://x", "m")
    with pytest.raises(ConfigError, match="deadline_s"):
        LMCacheTier("http://x", "m", deadline_s=0)
    with pytest.raises(ConfigError, match="model_key"):
        LMCacheTier("http://x", "")
    with pytest.raises(ConfigError, match="taken"):
        register_tier("null", lambda options: create_tier("null"))
    assert tier_names() == ("lmcache", "null")


def test_adapters_fit_the_port(stub: Stub) -> None:
    assert isinstance(LMCacheTier(stub.url, "m"), Tier)
