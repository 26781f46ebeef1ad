"""Tiers that go away, freeze or crawl: the same answers, no call much later, and back by themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from pancake_langgraph.launch import Stack, StackPlan, TierPlan
from pancake_langgraph.launch.run_folder import new_run_dir

pytestmark = pytest.mark.real

NUM_PROMPTS = 4
CHUNK_TOKENS, NUM_CHUNKS = 64, 4
#: What a lost tier may cost a call, whatever the call itself takes.
LIMIT_S = 2.0
#: Room for machines that do something else beside.
NOISE_S = 1.0


@dataclass(frozen=True)
class Shared:
    """A stack with all tiers, and the server of its third."""

    stack: Stack
    server: Any

    def ask(self, number: int, *, salt: str) -> tuple[str, int, float]:
        """Return the answer, its cached tokens, and the seconds it took."""
        first = 1_000 + 700 * number
        body = {
            "model": self.stack.served_model_name,
            "prompt": [first + position for position in range(NUM_CHUNKS * CHUNK_TOKENS + 4)],
            "max_tokens": 8,
            "temperature": 0.0,
            "cache_salt": salt,
        }
        started_s = time.monotonic()
        response = httpx.post(f"{self.stack.base_url}/completions", json=body, timeout=120.0)
        elapsed_s = time.monotonic() - started_s
        assert response.is_success, response.text
        answer = response.json()
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return answer["choices"][0]["text"], cached, elapsed_s

    def cold(self) -> tuple[list[str], float]:
        """Compute all prompts under a salt of their own; return the answers and the longest time."""
        said = [self.ask(number, salt=f"cold {time.monotonic()}") for number in range(NUM_PROMPTS)]
        return [text for text, _, _ in said], max(elapsed_s for _, _, elapsed_s in said)

    def store(self, salt: str) -> None:
        """Have the tiers keep all prompts, and the pool forget them."""
        for number in range(NUM_PROMPTS):
            self.ask(number, salt=salt)
        eventually(lambda: self.status()["store_controller"]["in_flight_task_count"] == 0)
        self.forget_pool()

    def forget_pool(self) -> None:
        url = self.stack.base_url.removesuffix("/v1") + "/reset_prefix_cache"
        eventually(lambda: httpx.post(url, timeout=30.0).json().get("success", True))

    def forget_memory(self) -> None:
        body = {"tier": "l1", "force": True}
        assert httpx.post(f"{self.stack.tier_url}/cache/clear", json=body, timeout=30.0).is_success

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = httpx.get(f"{self.stack.tier_url}/status", timeout=30.0).json()["storage_manager"]
        return status

    def counts(self) -> dict[str, int]:
        """What the third tier has counted."""
        found: dict[str, int] = next(a["counts"] for a in self.status()["l2_adapters"] if "is_reachable" in a)
        return found


def eventually(is_so: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def shared(
    one_engine: None, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory, start_valkey: Callable[..., Any]
) -> Iterator[Shared]:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = start_valkey(port=port)
    plan = StackPlan(
        model_dir=tiny_dir,
        dtype="float32",
        kv_pool_bytes=32_000_000,
        tier=TierPlan(l1_bytes=64_000_000, l2=False, l3_url=server.url, mq_timeout_s=1.0, heartbeat_s=0.5),
        dev_routes=True,
        run_dir=new_run_dir(),
    )
    with Stack(plan) as stack:
        yield Shared(stack, server)


@contextmanager
def frozen(shared: Shared) -> Iterator[None]:
    assert shared.stack.tier is not None
    shared.stack.tier.freeze()
    try:
        yield
    finally:
        shared.stack.tier.thaw()


@contextmanager
def crawling(shared: Shared) -> Iterator[None]:
    """Let the cache server run for a third of the time only."""
    tier = shared.stack.tier
    assert tier is not None
    is_over = threading.Event()

    def brake() -> None:
        while not is_over.wait(0.05):
            tier.freeze()
            time.sleep(0.1)
            tier.thaw()

    thread = threading.Thread(target=brake)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def killed(shared: Shared) -> Iterator[None]:
    assert shared.stack.tier is not None
    assert shared.stack.tier_process is not None
    shared.stack.tier.kill()
    try:
        yield
    finally:
        shared.stack.tier_process.restart()


@contextmanager
def server_gone(shared: Shared) -> Iterator[None]:
    shared.forget_memory()
    shared.server.stop()
    try:
        yield
    finally:
        shared.server.start()


@pytest.mark.parametrize("fault", [frozen, crawling, killed, server_gone], ids=lambda fault: fault.__name__)
def test_answers_stay_calls_are_hardly_later_and_the_tier_comes_back(
    shared: Shared, fault: Callable[[Shared], Any]
) -> None:
    expected, cold_s = shared.cold()
    salt = f"fault {fault.__name__}"
    shared.store(salt)
    with fault(shared):
        said = [shared.ask(number, salt=salt) for number in range(NUM_PROMPTS)]
    assert [text for text, _, _ in said] == expected
    assert max(elapsed_s for _, _, elapsed_s in said) < cold_s + LIMIT_S + NOISE_S
    again = f"after {fault.__name__}"

    def is_back() -> bool:
        """Whether what is stored now is read again; nothing was restarted but what was killed."""
        shared.store(again)
        texts, cached = zip(*[shared.ask(number, salt=again)[:2] for number in range(NUM_PROMPTS)], strict=True)
        assert list(texts) == expected
        shared.forget_pool()
        return min(cached) >= (NUM_CHUNKS - 1) * CHUNK_TOKENS

    eventually(is_back)


def test_a_lost_server_is_counted_and_used_again_when_it_is_back(shared: Shared) -> None:
    before = shared.counts().get("server_lost", 0)
    shared.store("counted")
    with server_gone(shared):
        assert shared.ask(0, salt="counted")[1] == 0
        assert shared.counts()["server_lost"] > before

    def is_back() -> bool:
        shared.store("counted again")
        shared.forget_memory()
        return shared.ask(0, salt="counted again")[1] >= (NUM_CHUNKS - 1) * CHUNK_TOKENS

    eventually(is_back)
