"""The tier adapter against the real cache server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pancake_langgraph._errors import TierError
from pancake_langgraph._types import TokenPrefix
from pancake_langgraph.engines.base import Engine
from pancake_langgraph.engines.registry import create_engine
from pancake_langgraph.launch import Stack
from pancake_langgraph.tiers.base import Tier
from pancake_langgraph.tiers.registry import create_tier

pytestmark = pytest.mark.real


@pytest.fixture
async def vllm(smol_stack: Stack) -> AsyncIterator[Engine]:
    engine = create_engine("vllm", base_url=smol_stack.base_url, deadline_s=60.0)
    await engine.open()
    yield engine
    await engine.close()


@pytest.fixture
async def tier(smol_stack: Stack, vllm: Engine) -> AsyncIterator[Tier]:
    made = create_tier("lmcache", url=smol_stack.tier_url, model_key=smol_stack.model_key, deadline_s=10.0)
    await made.open()
    made.identify((await vllm.probe()).kv_identity)
    yield made
    await made.close()


async def test_health_tells_the_chunk_size(tier: Tier) -> None:
    health = await tier.health()
    assert health.alive
    assert health.chunk_tokens == 64


async def test_what_the_engine_has_read_is_found_under_its_salt_only(tier: Tier, vllm: Engine) -> None:
    tokens = tuple(range(20_000, 20_300))
    await vllm.warm(TokenPrefix(tokens, "tier-a"), priority=0)
    async with asyncio.timeout(20):
        while (report := await tier.prefetch(TokenPrefix(tokens, "tier-a"))).found_chunks < 4:
            await asyncio.sleep(0.1)  # storing is asynchronous
    assert (report.found_chunks, report.total_chunks) == (4, 4)
    for salt in ("tier-b", None):
        assert (await tier.prefetch(TokenPrefix(tokens, salt))).found_chunks == 0


async def test_a_prefix_below_one_chunk_finds_nothing(tier: Tier) -> None:
    report = await tier.prefetch(TokenPrefix(tuple(range(20_000, 20_040))))
    assert (report.found_chunks, report.total_chunks) == (0, 0)


async def test_a_wrong_model_key_is_an_error_that_names_the_mend(smol_stack: Stack) -> None:
    wrong = create_tier("lmcache", url=smol_stack.tier_url, model_key=smol_stack.served_model_name, deadline_s=10.0)
    with pytest.raises(TierError, match="--model string"):
        await wrong.prefetch(TokenPrefix(tuple(range(20_000, 20_300))))
    await wrong.close()


async def test_a_frozen_server_costs_no_more_than_the_deadline(smol_stack: Stack) -> None:
    tier = create_tier("lmcache", url=smol_stack.tier_url, model_key=smol_stack.model_key, deadline_s=0.5)
    assert (await tier.health()).alive
    process = smol_stack.tier
    assert process is not None
    process.freeze()
    try:
        with pytest.raises(TierError, match=r"within 0\.5 s"):
            await tier.prefetch(TokenPrefix(tuple(range(20_000, 20_300))))
        assert not (await tier.health()).alive
    finally:
        process.thaw()
        await tier.close()
