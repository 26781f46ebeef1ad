"""A context that is held whole in the pool is not looked for in the cache server, and nothing of it gets lost there."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from pancake_langgraph.launch import Stack

pytestmark = pytest.mark.real

LENGTH = 640
NEW = 96
_NUMBERS = itertools.count(1)


def metric(stack: Stack, name: str) -> float:
    text = httpx.get(stack.base_url.removesuffix("/v1") + "/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name}{{"))


def complete(stack: Stack, prompt: list[int], salt: str, *, hints: dict[str, Any] | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": stack.served_model_name,
        "prompt": prompt,
        "max_tokens": 40,
        "min_tokens": 40,
        "temperature": 0.0,
        "cache_salt": salt,
        "return_token_ids": True,
        "kv_transfer_params": {"cached_token_stats": True, **({"pancake": hints} if hints else {})},
    }
    response = httpx.post(f"{stack.base_url}/completions", json=body, timeout=120.0)
    assert response.is_success, response.text
    answer = response.json()
    assert isinstance(answer, dict)
    return answer


def words(first: int, count: int) -> list[int]:
    return [first + position % 997 for position in range(count)]


def written(answer: dict[str, Any]) -> list[int]:
    ids = answer["choices"][0]["token_ids"]
    assert len(ids) == 40
    return [int(token) for token in ids]


def until(seen: Callable[[], bool]) -> None:
    for _ in range(200):
        if seen():
            return
        time.sleep(0.05)
    pytest.fail("not seen within ten seconds")


def press(stack: Stack) -> None:
    """Turn the whole pool over."""
    text = httpx.get(stack.base_url.removesuffix("/v1") + "/metrics").text
    line = next(line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
    labels = dict(part.split("=", 1) for part in line[line.index("{") + 1 : line.rindex("}")].split(",") if "=" in part)
    pool_tokens = int(labels["num_gpu_blocks"].strip('"')) * int(labels["block_size"].strip('"'))
    for _ in range(pool_tokens // 1900 + 2):
        complete(stack, words(20_000 + next(_NUMBERS), 1900), f"press {next(_NUMBERS)}")


def test_the_next_turn_of_a_held_thread_asks_no_cache_server_and_leaves_no_hole_in_it(tiny_stack: Stack) -> None:
    stack, salt = tiny_stack, f"spared {next(_NUMBERS)}"
    spared = metric(stack, "vllm:pancake_spared_lookups_total")
    prompt = words(3_000, LENGTH)
    hold = {"id": salt, "num_tokens": 2**31 - 1, "ttl_s": 300.0, "priority": 50, "whole": True}
    first = complete(stack, prompt, salt, hints={"hold": hold})
    turn = [*prompt, *written(first), *words(9_000, NEW)]
    second = complete(stack, turn, salt, hints={"release": [salt]})
    until(lambda: metric(stack, "vllm:pancake_spared_lookups_total") == spared)  # released before it is looked up
    third = [*turn, *written(second), *words(15_000, NEW)]
    again = {**hold, "id": f"{salt} again"}
    complete(stack, turn, salt, hints={"hold": again})
    answer = complete(stack, third, salt)
    until(lambda: metric(stack, "vllm:pancake_spared_lookups_total") == spared + 1)

    complete(stack, words(500, LENGTH), f"{salt} other", hints={"release": [f"{salt} again"]})
    press(stack)
    lost = complete(stack, third, salt)
    found = lost["kv_transfer_params"]["cached_token_stats"]
    assert found["num_vllm_cached_tokens"] == 0
    assert found["num_lmcache_cached_tokens"] >= len(third) - 2 * 64, "the cache server has all that was read"
    assert written(lost) == written(answer)


def test_a_context_of_which_the_cache_server_had_all_is_looked_for_unless_it_is_said_to_be_whole(
    tiny_stack: Stack,
) -> None:
    stack, salt = tiny_stack, f"spared {next(_NUMBERS)}"
    spared = metric(stack, "vllm:pancake_spared_lookups_total")
    prompt = [*words(4_000, LENGTH), 7]  # whole chunks, and a token that nobody looks up
    hold = {"id": salt, "num_tokens": LENGTH, "ttl_s": 300.0, "priority": 50}
    complete(stack, [*prompt, *words(9_000, NEW)], salt)
    complete(stack, prompt, salt, hints={"hold": hold})
    complete(stack, [*prompt, *words(9_500, NEW)], salt)
    complete(stack, words(600, LENGTH), f"{salt} other", hints={"release": [salt]})
    assert metric(stack, "vllm:pancake_spared_lookups_total") == spared


def test_a_context_whose_end_the_cache_server_did_not_have_is_not_looked_for(tiny_stack: Stack) -> None:
    stack, salt = tiny_stack, f"spared {next(_NUMBERS)}"
    spared = metric(stack, "vllm:pancake_spared_lookups_total")
    head, end = words(5_000, LENGTH), words(11_000, NEW)
    prompt = [*head, *end, 7]
    hold = {"id": salt, "num_tokens": LENGTH + NEW, "ttl_s": 300.0, "priority": 50}
    complete(stack, [*head, 7], salt)
    complete(stack, prompt, salt, hints={"hold": hold})
    answer = complete(stack, [*prompt, *words(9_000, NEW)], salt)
    until(lambda: metric(stack, "vllm:pancake_spared_lookups_total") == spared + 1)
    complete(stack, words(700, LENGTH), f"{salt} other", hints={"release": [salt]})
    press(stack)
    assert written(complete(stack, [*prompt, *words(9_000, NEW)], salt)) == written(answer)
