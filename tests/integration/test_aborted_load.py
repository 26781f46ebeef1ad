"""A call that goes away while the engine fetches its KV from the cache server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import httpx
import pytest

from pancake_langgraph.launch import Stack

pytestmark = pytest.mark.real

NUM_PROMPTS = 12
NUM_ROUNDS = 3


def body(stack: Stack, number: int) -> dict[str, object]:
    first = 20_000 + 40 * number
    return {
        "model": stack.served_model_name,
        "prompt": [first + position % 997 for position in range(640)],
        "max_tokens": 4,
        "temperature": 0.0,
        "cache_salt": f"load {number}",
    }


def complete(stack: Stack, number: int, *, timeout_s: float = 120.0) -> str:
    response = httpx.post(f"{stack.base_url}/completions", json=body(stack, number), timeout=timeout_s)
    assert response.is_success, response.text
    return str(response.json()["choices"][0]["text"])


def is_pool_free(stack: Stack) -> bool:
    """Whether every block comes back once nothing runs."""
    for number in range(50):
        complete(stack, NUM_PROMPTS + number % 2)  # the engine reports with its steps
        text = httpx.get(stack.base_url.removesuffix("/v1") + "/metrics").text
        used = [line for line in text.splitlines() if line.startswith("vllm:kv_cache_usage_perc{")]
        if used and all(float(line.rsplit(" ", 1)[1]) == 0.0 for line in used):
            return True
        time.sleep(0.1)
    return False


def waits_s() -> Iterator[float]:
    """Yield times after which a call goes away: all over the time that a load takes."""
    while True:
        for milliseconds in range(10, 250, 20):
            yield milliseconds / 1000.0


def test_calls_that_go_away_while_their_kv_is_loaded_leave_the_engine_alive_and_right(smol_stack: Stack) -> None:
    """LMCache reports such a request twice, as loaded and as ended; vLLM ends the engine at the second report."""
    stack = smol_stack
    assert stack.engine_process is not None
    expected = [complete(stack, number) for number in range(NUM_PROMPTS)]
    wait_s = waits_s()
    for _ in range(NUM_ROUNDS):
        for number in range(NUM_PROMPTS):  # the pool holds a few of them: each was pushed out when its turn comes
            with contextlib.suppress(httpx.TimeoutException):
                complete(stack, number, timeout_s=next(wait_s))
        assert stack.engine_process.healthy()
        assert is_pool_free(stack)
        assert [complete(stack, number) for number in range(NUM_PROMPTS)] == expected
