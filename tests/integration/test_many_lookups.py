"""Ten thousand lookups, a tenth of them given up: nothing stays pinned in the engine or in the cache server."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from pancake_langgraph.launch import Stack

pytestmark = pytest.mark.real

NUM_LOOKUPS = 10_000
ABORT_EVERY = 10
NUM_PROMPTS = 64
CONCURRENCY = 24


def body(stack: Stack, number: int) -> dict[str, Any]:
    first = 1_000 + 131 * (number % NUM_PROMPTS)
    return {
        "model": stack.served_model_name,
        "prompt": [first + position for position in range(2 * 64 + 1)],
        "max_tokens": 1,
        "cache_salt": "lookups",
    }


async def ask(client: httpx.AsyncClient, stack: Stack, number: int) -> str:
    """Ask once; go away after a moment in every tenth case, from at once to a lookup's length."""
    call = client.post(f"{stack.base_url}/completions", json=body(stack, number))
    if number % ABORT_EVERY:
        return "answered" if (await call).is_success else "refused"
    try:
        async with asyncio.timeout((number // ABORT_EVERY % 40) / 1000.0):
            return "answered" if (await call).is_success else "refused"
    except TimeoutError:
        return "given up"


async def ask_all(stack: Stack) -> Counter[str]:
    ends: Counter[str] = Counter()
    numbers = iter(range(NUM_LOOKUPS))
    limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    async with httpx.AsyncClient(timeout=120.0, limits=limits, trust_env=False) as client:

        async def work() -> None:
            for number in numbers:
                ends[await ask(client, stack, number)] += 1

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return ends


def pins(stack: Stack) -> dict[str, float]:
    """What is taken in the cache server, and in the engine's pool."""
    status = httpx.get(f"{stack.tier_url}/status", timeout=30).json()["storage_manager"]["l1_manager"]
    lines = httpx.get(stack.base_url.removesuffix("/v1") + "/metrics", timeout=30).text.splitlines()
    used = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:kv_cache_usage_perc{")]
    names = ("read_locked_count", "write_locked_count", "temporary_count", "staging_object_count")
    return {**{name: status[name] for name in names}, "pool_used_ratio": max(used)}


def queries(stack: Stack) -> float:
    lines = httpx.get(stack.base_url.removesuffix("/v1") + "/metrics", timeout=30).text.splitlines()
    name = "vllm:external_prefix_cache_queries_total{"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_ten_thousand_lookups_of_which_a_tenth_go_away_leave_nothing_pinned(tiny_stack: Stack) -> None:
    stack = tiny_stack
    before = queries(stack)
    ends = asyncio.run(ask_all(stack))
    assert sum(ends.values()) == NUM_LOOKUPS
    assert ends["refused"] == 0
    assert ends["given up"] > NUM_LOOKUPS // ABORT_EVERY // 4
    assert queries(stack) > before
    deadline_s = time.monotonic() + 90.0  # locks of requests that went away lapse after 30 s
    left = pins(stack)
    while any(left.values()) and time.monotonic() < deadline_s:
        time.sleep(0.2)
        httpx.post(
            f"{stack.base_url}/completions", json=body(stack, 1), timeout=60
        )  # the engine reports with its steps
        left = pins(stack)
    assert not any(left.values()), left
