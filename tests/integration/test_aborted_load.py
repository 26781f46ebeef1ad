"""A call that goes away while the engine fetches its KV from the cache server."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

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


def waits_s(call_s: float) -> Iterator[float]:
    """Yield times after which a call goes away: all over the time that a load takes, before the call's end."""
    while True:  # not as many as there are prompts: each prompt gets another one in each round
        for milliseconds in range(10, 250, 19):
            yield min(milliseconds / 1000.0, 0.8 * call_s)


def timed_call_s(stack: Stack, number: int) -> float:
    started_s = time.perf_counter()
    complete(stack, number)
    return time.perf_counter() - started_s


def loaded_tokens(stack: Stack) -> float:
    text = httpx.get(stack.base_url.removesuffix("/v1") + "/metrics").text
    name = "vllm:external_prefix_cache_hits_total{"
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def test_calls_that_go_away_while_their_kv_is_loaded_leave_the_engine_alive_and_right(smol_stack: Stack) -> None:
    """LMCache reports such a request twice, as loaded and as ended; vLLM ends the engine at the second report."""
    stack = smol_stack
    assert stack.engine_process is not None
    # Computed, and loaded undisturbed: in bfloat16 sums of other shapes round differently, on some processors more.
    right = [{complete(stack, number)} for number in range(NUM_PROMPTS)]
    for _ in range(2):
        for number, answers in enumerate(right):
            answers.add(complete(stack, number))
    assert sum(len(answers) == 1 for answers in right) > NUM_PROMPTS // 2  # rounding, and no more than that
    call_s = min(timed_call_s(stack, number) for number in range(3))  # a machine may be faster than any fixed time
    wait_s, num_gone, before = waits_s(call_s), 0, loaded_tokens(stack)
    for _ in range(NUM_ROUNDS):
        for number in range(NUM_PROMPTS):  # the pool holds a few of them: each was pushed out when its turn comes
            try:
                complete(stack, number, timeout_s=next(wait_s))
            except httpx.TimeoutException:
                num_gone += 1
        assert stack.engine_process.healthy()
        assert is_pool_free(stack)
        assert [n for n in range(NUM_PROMPTS) if complete(stack, n) not in right[n]] == []
    assert num_gone > NUM_PROMPTS
    assert loaded_tokens(stack) > before + NUM_PROMPTS * 320


@pytest.mark.parametrize("order", ["load ends first", "request ends first", "both in one step"])
def test_a_request_that_ends_while_it_is_loaded_is_reported_once(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = bare_connector(monkeypatch)
    request = SimpleNamespace(request_id="r")
    connector.update_state_after_alloc(request, None, 64)
    reports = {
        "load ends first": [({"r"}, set()), (set(), {"r"})],
        "request ends first": [(set(), {"r"}), ({"r"}, set())],
        "both in one step": [({"r"}, {"r"})],
    }[order]
    connector.request_finished(request, [])
    assert [told(connector, loaded=loaded, stored=stored) for loaded, stored in reports] == [
        (loaded, set()) for loaded, _ in reports
    ]


def test_a_request_that_ends_after_its_load_is_reported_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = bare_connector(monkeypatch)
    first, again = SimpleNamespace(request_id="r"), SimpleNamespace(request_id="r")
    connector.update_state_after_alloc(first, None, 64)
    assert told(connector, loaded={"r"}, stored=set()) == ({"r"}, set())
    connector.update_state_after_alloc(first, None, 0)
    connector.request_finished(first, [])
    assert told(connector, loaded=set(), stored={"r"}) == (set(), {"r"})
    connector.update_state_after_alloc(again, None, 64)
    connector.request_finished(again, [])  # aborted while it is loaded; then its id is used once more
    assert told(connector, loaded={"r"}, stored={"r"}) == ({"r"}, set())
    connector.update_state_after_alloc(again, None, 0)
    connector.request_finished(again, [])
    assert told(connector, loaded=set(), stored={"r"}) == (set(), {"r"})


def told(connector: Any, *, loaded: set[str], stored: set[str]) -> tuple[set[str], set[str]]:
    """Return what the scheduler learns of what the workers report."""
    output = SimpleNamespace(finished_recving=set(loaded), finished_sending=set(stored))
    connector.update_connector_output(output)
    return output.finished_recving, output.finished_sending


def bare_connector(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a connector with its own bookkeeping only: what LMCache does beside it needs an engine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's import warns
        from pancake_vllm.lmcache_connector import FailOpenLMCacheConnector, LMCacheMPConnector

    monkeypatch.setattr(LMCacheMPConnector, "__init__", lambda self, *args: setattr(self, "_connector_stats", None))
    for name in ("update_state_after_alloc", "request_finished", "update_connector_output"):
        monkeypatch.setattr(LMCacheMPConnector, name, lambda self, *args: (True, None))
    return FailOpenLMCacheConnector(None, SimpleNamespace(name="WORKER"))
