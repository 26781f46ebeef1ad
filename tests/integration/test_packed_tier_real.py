"""KV that left main memory in 8 or 4 bits, or through a shared Redis, comes back to the real engine."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pancake_langgraph.launch import Stack, StackPlan, TierPlan
from pancake_langgraph.launch.run_folder import new_run_dir

pytestmark = pytest.mark.real

CHUNK_TOKENS, NUM_CHUNKS = 64, 6
NUM_PROMPT_TOKENS = CHUNK_TOKENS * NUM_CHUNKS + 8
#: SmolLM2-135M: 30 layers, keys and values, 3 heads of 64 channels, 2 bytes each.
CHUNK_BYTES = CHUNK_TOKENS * 30 * 2 * 3 * 64 * 2


def ask(stack: Stack, salt: str, num_tokens: int = NUM_PROMPT_TOKENS) -> tuple[list[str], list[float], int]:
    """Return the answer's tokens, their log probabilities, and how many tokens of the prompt were cached."""
    response = httpx.post(
        f"{stack.base_url}/completions",
        json={
            "model": stack.served_model_name,
            "prompt": [20_000 + (7 * position) % 3001 for position in range(num_tokens)],
            "max_tokens": 8,
            "temperature": 0.0,
            "logprobs": 1,
            "cache_salt": salt,
        },
        timeout=120.0,
    )
    assert response.is_success, response.text
    answer = response.json()
    found = answer["choices"][0]["logprobs"]
    details = answer["usage"].get("prompt_tokens_details") or {}
    return found["tokens"], found["token_logprobs"], details.get("cached_tokens") or 0


def storage(stack: Stack) -> dict[str, Any]:
    status: dict[str, Any] = httpx.get(f"{stack.tier_url}/status").json()["storage_manager"]
    return status


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


def forget(stack: Stack) -> None:
    """Empty the engine's pool and the cache server's memory: what is left is below."""
    root = stack.base_url.removesuffix("/v1")
    until(lambda: httpx.post(f"{root}/reset_prefix_cache").json().get("success", True))
    until(lambda: storage(stack)["store_controller"]["in_flight_task_count"] == 0)
    assert httpx.post(f"{stack.tier_url}/cache/clear", json={"force": True}).is_success


def files_of(stack: Stack) -> set[Path]:
    assert stack.tier_process is not None
    assert stack.tier_process.places.l2_dir is not None
    return set(stack.tier_process.places.l2_dir.glob("*.pkv"))


def test_packed_kv_comes_back_from_disk_and_exact_kv_as_it_was(smol_stack: Stack) -> None:
    sizes: dict[str, int] = {}
    for codec in ("exact", "int8", "int4"):
        salt, others = f"packed!{codec}", files_of(smol_stack)
        ask(smol_stack, salt)
        tokens, chances, pooled = ask(smol_stack, salt)  # from the pool: the same tokens are computed as below
        until(lambda others=others: len(files_of(smol_stack) - others) == NUM_CHUNKS)
        forget(smol_stack)
        sizes[codec] = sum(path.stat().st_size for path in files_of(smol_stack) - others)
        again, chances_again, cached = ask(smol_stack, salt)
        assert cached >= (NUM_CHUNKS - 1) * CHUNK_TOKENS
        assert pooled >= (NUM_CHUNKS - 1) * CHUNK_TOKENS
        assert len(again) == len(tokens) == 8
        if codec == "exact":
            assert again == tokens
            assert chances_again == pytest.approx(chances, abs=1e-4)
        else:
            assert again[0] == tokens[0]
            assert chances_again[0] == pytest.approx(chances[0], abs=0.25)
            assert chances_again != chances  # it did come through the codec
    exact = NUM_CHUNKS * CHUNK_BYTES
    assert exact < sizes["exact"] < 1.01 * exact
    assert sizes["int8"] <= 0.53 * exact
    assert sizes["int4"] <= 0.30 * exact
    counts = storage(smol_stack)["l2_adapters"][0]["counts"]
    assert not {kind for kind in counts if kind.startswith(("kept_exact", "refused"))}


def test_a_thread_that_grows_writes_only_its_new_chunks(smol_stack: Stack) -> None:
    before = files_of(smol_stack)
    written: list[int] = []
    for turn in range(1, 4):
        ask(smol_stack, "grows!int8", 2 * turn * CHUNK_TOKENS + 8)
        until(lambda turn=turn: len(files_of(smol_stack) - before) == 2 * turn)
        until(lambda: storage(smol_stack)["store_controller"]["in_flight_task_count"] == 0)
        written.append(sum(path.stat().st_size for path in files_of(smol_stack) - before) - sum(written))
    assert len(set(written)) == 1  # two chunks at each turn, however long the thread is


def test_two_cache_servers_share_kv_through_one_server(
    tiny_dir: Path, one_engine: None, start_valkey: Callable[..., Any]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shared = start_valkey(port=port)
    tier = TierPlan(l1_bytes=64_000_000, l2=False, l3_url=shared.url)
    plan = StackPlan(
        model_dir=tiny_dir, dtype="float32", kv_pool_bytes=32_000_000, tier=tier, dev_routes=True, run_dir=new_run_dir()
    )
    with Stack(plan) as first:
        tokens, chances, cached = ask(first, "shared")
        assert cached == 0
        until(lambda: shared_names(shared) == NUM_CHUNKS)
    with Stack(plan) as second:
        again, chances_again, cached = ask(second, "shared")
        assert cached >= (NUM_CHUNKS - 1) * CHUNK_TOKENS
        assert again == tokens
        assert chances_again == pytest.approx(chances, abs=1e-4)
        assert ask(second, "another tenant")[2] == 0


def shared_names(shared: Any) -> int:
    with shared.client() as client:
        return len(client.keys("*"))
