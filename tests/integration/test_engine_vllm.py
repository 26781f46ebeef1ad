"""The adapter suite and the residency index against the real engine."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from pancake_langgraph._errors import EngineRejected, EngineUnavailable, ModelNotFound
from pancake_langgraph._types import TokenPrefix
from pancake_langgraph.engines import _compat
from pancake_langgraph.engines.base import ChatRequest, Engine
from pancake_langgraph.engines.registry import create_engine
from pancake_langgraph.engines.vllm import VllmEngine
from pancake_langgraph.launch import Stack

pytestmark = pytest.mark.real


def _suite():
    name = "pancake_engine_suite"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "engine_suite.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def _engine(stack: Stack) -> Engine:
    return create_engine(
        "vllm",
        base_url=stack.base_url,
        model=stack.served_model_name,
        kv_events_endpoint=stack.kv_events_endpoint,
        kv_replay_endpoint=stack.kv_replay_endpoint,
        deadline_s=120.0,
    )


class TestVllmContract(_suite().EngineContract):
    @pytest.fixture
    def engine(self, smol_stack: Stack) -> Engine:
        return _engine(smol_stack)


@pytest.fixture
async def vllm(smol_stack: Stack) -> AsyncIterator[Engine]:
    engine = _engine(smol_stack)
    await engine.open()
    yield engine
    await engine.close()


async def _pool_hit(stack: Stack, tokens: list[int], salt: str | None) -> int:
    """Read `tokens` without storing anything in the tier; return what came from the engine's own pool."""
    body = {
        "model": stack.served_model_name,
        "prompt": tokens,
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {"cached_token_stats": True, "lmcache.max_offload_tokens": 0},
    }
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        response = await client.post(
            f"{stack.base_url}/completions", json=body | ({"cache_salt": salt} if salt else {})
        )
    assert response.status_code == 200, response.text
    return response.json()["kv_transfer_params"]["cached_token_stats"]["num_vllm_cached_tokens"]


async def test_probe_tells_the_shape_of_the_pool(vllm: Engine, smol_stack: Stack) -> None:
    found = await vllm.probe()
    assert found.version == _compat.tested_versions()["vllm"]
    assert (found.engine, found.model, found.max_model_len_tokens) == ("vllm", smol_stack.served_model_name, 4096)
    assert found.block_size_tokens == 64
    assert found.pool_tokens is not None
    assert found.pool_tokens % 64 == 0
    assert 4096 < found.pool_tokens < 200_000_000 // 23_000
    assert found.tokenizer
    assert found.token_prompts
    assert found.prompt_token_ids
    assert found.priority
    assert found.cache_salt
    assert found.kv_events
    assert found.tool_parser
    assert found.prefix_caching


async def test_events_are_found_without_being_told_where(smol_stack: Stack) -> None:
    engine = create_engine("vllm", base_url=smol_stack.base_url)
    await engine.open()
    try:
        assert (await engine.probe()).kv_events
        await _suite().settled(engine, TokenPrefix((1,)))
    finally:
        await engine.close()


@pytest.mark.parametrize("salt", [None, "evict"])
async def test_residency_equals_the_engines_own_hits_after_eviction(
    vllm: Engine, smol_stack: Stack, salt: str | None
) -> None:
    """Press prompts through the pool until the first are gone; then the index and the engine agree on each."""
    found = await vllm.probe()
    assert found.pool_tokens is not None
    first = 2000 if salt else 1000
    prompts = [[first + k, *range(3000 + k, 3000 + k + 1199)] for k in range(found.pool_tokens // 1200 + 3)]
    for tokens in prompts:
        await _pool_hit(smol_stack, tokens, salt)
    await _suite().settled(vllm, TokenPrefix(tuple(prompts[-1]), salt), resident_tokens=1152)
    told = [(await vllm.residency(TokenPrefix(tuple(tokens), salt))).resident_tokens for tokens in prompts]
    assert told[0] == 0
    assert told[-1] == 1152
    assert 0 < sum(told) <= found.pool_tokens
    for tokens, resident in reversed(list(zip(prompts, told, strict=True))):
        if resident == 0:
            break  # asking about what is gone would push out what is still to be asked
        assert await _pool_hit(smol_stack, tokens, salt) == min(resident, (len(tokens) - 1) // 64 * 64)
    other = TokenPrefix(tuple(prompts[-1]), "another")
    assert (await vllm.residency(other)).resident_tokens == 0


async def test_a_partly_evicted_prompt_keeps_its_head(vllm: Engine, smol_stack: Stack) -> None:
    found = await vllm.probe()
    assert found.pool_tokens is not None
    await _reset(smol_stack)
    victim = [700, *range(5000, 5000 + 1999)]
    await _pool_hit(smol_stack, victim, "part")
    left = found.pool_tokens - 1984 + 640
    for start in range(0, left, 2000):
        await _pool_hit(smol_stack, [800 + start % 97, *range(9000, 9000 + min(2000, left - start) - 1)], f"p{start}")
    await asyncio.sleep(0.2)
    resident = (await vllm.residency(TokenPrefix(tuple(victim), "part"))).resident_tokens
    assert 0 < resident < 1984
    assert await _pool_hit(smol_stack, victim, "part") == resident


async def test_a_reset_shows_with_the_next_request(vllm: Engine, smol_stack: Stack) -> None:
    tokens = tuple(range(11_000, 11_300))
    await vllm.warm(TokenPrefix(tokens, "reset"), priority=0)
    await _suite().settled(vllm, TokenPrefix(tokens, "reset"), resident_tokens=256)
    await _reset(smol_stack)
    await vllm.warm(TokenPrefix(tokens[:2], "reset"), priority=0)
    await _suite().settled(vllm, TokenPrefix(tokens, "reset"), resident_tokens=0)


async def test_a_late_subscriber_learns_the_past(smol_stack: Stack) -> None:
    early, late = _engine(smol_stack), _engine(smol_stack)
    tokens = tuple(range(12_000, 12_300))
    try:
        await early.open()
        await early.warm(TokenPrefix(tokens, "late"), priority=0)
        await late.open()
        found = await _suite().settled(late, TokenPrefix(tokens, "late"), resident_tokens=256)
        assert found.known
    finally:
        await early.close()
        await late.close()


async def test_a_cancelled_warm_up_stops_in_the_engine(vllm: Engine) -> None:
    await vllm.probe()
    task = asyncio.create_task(vllm.warm(TokenPrefix(tuple(range(13_000, 16_500)), "stop"), priority=10))
    async with asyncio.timeout(10):
        while not (await vllm.statistics()).running:
            await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5):
        while (await vllm.statistics()).running:
            await asyncio.sleep(0.02)


async def test_wrong_requests_get_typed_errors(smol_stack: Stack, vllm: Engine) -> None:
    wrong = create_engine("vllm", base_url=smol_stack.base_url, model="nope")
    with pytest.raises(ModelNotFound, match="nope"):
        await wrong.probe()
    await wrong.close()
    request = ChatRequest(_suite().prompt_of(1), max_tokens=2, extra={"temperature": "hot"})
    with pytest.raises(EngineRejected) as refused:
        await _suite().collect(vllm, request)
    assert refused.value.status_code == 400


async def test_an_engine_killed_in_mid_stream_is_unavailable_and_starts_over_unknown(smol_stack: Stack) -> None:
    engine = _engine(smol_stack)
    assert isinstance(engine, VllmEngine)
    await engine.open()
    try:
        await _suite().settled(engine, TokenPrefix((1,)))
        stream = engine.chat(ChatRequest(_suite().prompt_of(30), max_tokens=200))
        await anext(stream)
        await asyncio.to_thread(smol_stack.engine.kill)
        with pytest.raises(EngineUnavailable):
            async for _ in stream:
                pass
        await _suite().settled(engine, TokenPrefix((1,)), known=False)
        with pytest.raises(EngineUnavailable):
            await engine.probe()
    finally:
        await engine.close()


async def _reset(stack: Stack) -> None:
    root = stack.base_url.removesuffix("/v1")
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        for _ in range(50):
            if (await client.post(f"{root}/reset_prefix_cache")).json()["success"]:
                return
            await asyncio.sleep(0.1)
    raise AssertionError("the pool could not be reset: blocks are held")
