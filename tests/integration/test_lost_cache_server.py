"""A cache server lost in the middle of a call: the engine lives, the words stay, the loss is counted."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from pancake_langgraph.launch import Stack

pytestmark = pytest.mark.real

NUM_TOKENS = 8
LOST = "vllm:pancake_lost_kv_stores_total"


def complete(stack: Stack, prompt: str, *, salt: str) -> str:
    response = httpx.post(
        f"{stack.base_url}/completions",
        json={
            "model": stack.served_model_name,
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0.0,
            "cache_salt": salt,
        },
        timeout=120,
    )
    assert response.is_success, response.text
    return str(response.json()["choices"][0]["text"])


def lost_stores(stack: Stack) -> float:
    text = httpx.get(stack.base_url.removesuffix("/v1") + "/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(LOST + "{"))


def is_loss_reported(stack: Stack, before: float) -> bool:
    for number in range(5):  # the engine reports with its steps
        complete(stack, "tick", salt=f"tick {number}")
        if lost_stores(stack) > before:
            return True
        time.sleep(0.2)
    return False


def mend(stack: Stack, how: str) -> None:
    assert stack.tier_process is not None
    if how == "freeze":
        stack.tier_process.process.thaw()
    else:
        stack.tier_process.restart()


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_cache_server_lost_while_a_prompt_is_stored_costs_the_store_only(how: str, exact_stack: Stack) -> None:
    stack = exact_stack
    assert stack.tier is not None
    assert stack.engine_process is not None
    prompt = " ".join(f"Item {number} of the list is {number * number}." for number in range(160))
    expected = complete(stack, prompt, salt=f"{how} whole")
    for attempt in range(10):  # the engine may notice the loss by its heartbeat before it stores again
        before = lost_stores(stack)
        lost = threading.Timer(0.3 + 0.1 * attempt, getattr(stack.tier, how))
        lost.start()
        # A salt hides what is cached: the prompt is read, and stored, step by step, and the server goes meanwhile.
        assert complete(stack, prompt, salt=f"{how} lost {attempt}") == expected
        lost.join()
        is_reported = is_loss_reported(stack, before)
        assert stack.engine_process.healthy()
        assert complete(stack, prompt, salt=f"{how} after {attempt}") == expected
        mend(stack, how)
        if is_reported:
            return
    raise AssertionError("the cache server never went in the middle of a store")
