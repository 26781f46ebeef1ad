"""Hints on the pool of the real engine, carried over HTTP, with LMCache beside them and without it."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pancake_langgraph.launch import Stack, StackPlan, TierPlan
from pancake_langgraph.launch import stack as launching
from pancake_langgraph.launch.process import Command
from pancake_langgraph.launch.run_folder import new_run_dir
from pancake_langgraph.launch.vllm_command import vllm_command

pytestmark = pytest.mark.real

LENGTH = 640
#: 128 blocks of 64 tokens and the placeholder; a token of the tiny model takes 512 bytes.
POOL_BYTES = 129 * 64 * 512
_NUMBERS = itertools.count(1)


def tokens(number: int) -> list[int]:
    """Return a prompt; salts keep those of different numbers apart."""
    first = 20_000 + number % 700 * 41
    return [first + position % 997 for position in range(LENGTH)]


def complete(stack: Stack, number: int, hints: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Read a prompt; the salt keeps this test's prompts apart from all others."""
    body: dict[str, Any] = {
        "model": stack.served_model_name,
        "prompt": tokens(number),
        "max_tokens": 1,
        "temperature": 0.0,
        "cache_salt": f"pool hints {number}",
    }
    if hints is not None:
        body["kv_transfer_params"] = {"pancake": hints}
    response = httpx.post(f"{stack.base_url}/completions", json=body | fields, timeout=120.0)
    assert response.is_success, response.text
    answer = response.json()
    assert isinstance(answer, dict)
    return answer


def hold(name: str, *, ttl_s: float = 300.0, priority: int = 50) -> dict[str, Any]:
    return {"hold": {"id": name, "num_tokens": LENGTH, "ttl_s": ttl_s, "priority": priority}}


def states(answer: dict[str, Any]) -> list[tuple[str, str]]:
    return [(item["verb"], item["state"]) for item in answer["kv_transfer_params"]["pancake"]["answers"]]


def held_tokens(stack: Stack) -> int:
    """Return what is held now, as the answer to hints without any says."""
    answer = complete(stack, 0, {})
    return int(answer["kv_transfer_params"]["pancake"]["held_tokens"])


def pool_tokens(stack: Stack) -> int:
    text = httpx.get(stack.base_url.removesuffix("/v1") + "/metrics").text
    line = next(line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
    labels = dict(part.split("=", 1) for part in line[line.index("{") + 1 : line.rindex("}")].split(",") if "=" in part)
    return (int(labels["num_gpu_blocks"].strip('"')) - 1) * int(labels["block_size"].strip('"'))


def resident(stack: Stack, number: int) -> int:
    """Return how many tokens of a prompt its next reading finds in the engine's own pool, the tier left out."""
    answer = complete(stack, number, kv_transfer_params={"cached_token_stats": True})
    stats = (answer.get("kv_transfer_params") or {}).get("cached_token_stats")
    if stats is not None:
        return int(stats["num_vllm_cached_tokens"])
    return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def press(stack: Stack) -> None:
    """Turn the whole pool over with prompts that nobody has read."""
    for _ in range(pool_tokens(stack) // LENGTH + 2):
        complete(stack, next(_NUMBERS) + 1_000)


@pytest.fixture(params=["lmcache", "alone"], scope="module")
def stack(request: pytest.FixtureRequest, _one_stack: Any, tiny_dir: Path) -> Iterator[Stack]:
    """The tiny model in float32: with LMCache's connector, which takes hints, and with one that does nothing else."""
    with_tier = request.param == "lmcache"
    with pytest.MonkeyPatch.context() as patched:
        if not with_tier:
            patched.setattr(launching, "vllm_command", alone)
        yield _one_stack.get(
            f"hints {request.param}",
            lambda: StackPlan(
                model_dir=tiny_dir,
                dtype="float32",
                kv_pool_bytes=POOL_BYTES,
                tier=TierPlan(l1_bytes=64_000_000) if with_tier else None,
                dev_routes=True,
                run_dir=new_run_dir(),
            ),
        )


def alone(plan: StackPlan, *args: Any, **kwargs: Any) -> Command:
    """Return the engine's command with the connector for engines without a cache server."""
    config = {
        "kv_connector": "PoolHintsConnector",
        "kv_connector_module_path": "pancake_vllm.hints_connector",
        "kv_role": "kv_both",
    }
    made = vllm_command(plan, *args, **kwargs)
    return replace(made, argv=(*made.argv, "--kv-transfer-config", json.dumps(config)))


@pytest.fixture
def numbers() -> list[int]:
    return [next(_NUMBERS) for _ in range(4)]


def test_a_held_prompt_stays_while_others_go_and_goes_when_released(stack: Stack, numbers: list[int]) -> None:
    held, other = numbers[:2]
    name = f"held-{held}"
    answer = complete(stack, held, hold(name))
    assert states(answer) == [("hold", "accepted")]
    complete(stack, other)
    press(stack)
    assert resident(stack, held) >= LENGTH - 64
    assert resident(stack, other) == 0
    assert states(complete(stack, other, {"release": [name, "unknown"]})) == [
        ("release", "accepted"),
        ("release", "missing"),
    ]
    press(stack)
    assert resident(stack, held) == 0
    assert held_tokens(stack) == 0


def test_a_hold_lapses_at_its_time(stack: Stack, numbers: list[int]) -> None:
    held = numbers[0]
    complete(stack, held, hold(f"short-{held}", ttl_s=0.05))
    time.sleep(0.06)
    assert held_tokens(stack) == 0
    press(stack)
    assert resident(stack, held) == 0


def test_a_retired_prompt_goes_before_older_ones(stack: Stack, numbers: list[int]) -> None:
    older, retired, carrier, _ = numbers
    complete(stack, older)
    complete(stack, retired, hold(f"gone-{retired}"))
    assert states(complete(stack, carrier, {"retire": [{"id": f"gone-{retired}"}]})) == [("retire", "accepted")]
    complete(stack, next(_NUMBERS) + 1_000)
    assert resident(stack, older) >= LENGTH - 64
    assert resident(stack, retired) < LENGTH - 64


def test_the_cap_leaves_a_part_of_the_pool_to_others(stack: Stack) -> None:
    cap = pool_tokens(stack) * 3 // 4
    names = [f"cap-{next(_NUMBERS)}" for _ in range(cap // LENGTH + 2)]
    found = [states(complete(stack, 2_000 + n, hold(name)))[0][1] for n, name in enumerate(names)]
    assert set(found[: cap // LENGTH]) == {"accepted"}
    assert found[-1] == "rejected"
    assert cap - 64 <= held_tokens(stack) <= cap
    complete(stack, next(_NUMBERS) + 1_000, {"release": names})
    assert held_tokens(stack) == 0


def test_aborted_carriers_leave_nothing_held_and_the_pool_can_be_reset(stack: Stack) -> None:
    for _ in range(8):
        body = {
            "model": stack.served_model_name,
            "prompt": tokens(next(_NUMBERS) + 3_000),
            "max_tokens": 3_000,
            "ignore_eos": True,
            "cache_salt": f"aborted {next(_NUMBERS)}",
            "kv_transfer_params": {"pancake": hold(f"aborted-{next(_NUMBERS)}")},
        }
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{stack.base_url}/completions", json=body, timeout=0.1)
    assert held_tokens(stack) == 0
    kept = next(_NUMBERS)
    complete(stack, kept, hold(f"kept-{kept}"))
    assert is_reset(stack)
    assert resident(stack, kept) == 0
    assert states(complete(stack, kept, {"release": [f"kept-{kept}"]})) == [("release", "accepted")]


def is_reset(stack: Stack) -> bool:
    """Reset the pool; it refuses while a request still runs down."""
    for _ in range(100):
        answer = httpx.post(stack.base_url.removesuffix("/v1") + "/reset_prefix_cache", timeout=10.0)
        if answer.is_success and answer.json().get("success", True):
            return True
        complete(stack, 0)
        time.sleep(0.05)
    return False


def test_answers_are_the_same_with_hints_and_without(stack: Stack, numbers: list[int]) -> None:
    wanted = {"max_tokens": 8, "logprobs": 1}
    plain = [complete(stack, number, None, **wanted)["choices"][0] for number in numbers]
    hinted = [
        complete(stack, number, hold(f"same-{number}", priority=number % 3), **wanted)["choices"][0]
        for number in numbers
    ]
    press(stack)
    after = [complete(stack, number, {"release": [f"same-{number}"]}, **wanted)["choices"][0] for number in numbers]
    assert [choice["text"] for choice in hinted] == [choice["text"] for choice in plain]
    assert [choice["text"] for choice in after] == [choice["text"] for choice in plain]


def test_malformed_hints_are_rejected_and_the_request_is_served(stack: Stack, numbers: list[int]) -> None:
    answer = complete(stack, numbers[0], {"hold": {"id": 7}, "release": [None], "retire": "x"})
    assert states(answer) == [("hold", "rejected"), ("release", "rejected")]
    assert answer["choices"][0]["finish_reason"] == "length"
