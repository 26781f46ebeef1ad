"""The real servers start, answer, break, come back, and leave nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from pancake_langgraph._errors import LaunchError
from pancake_langgraph.launch import Stack, StackPlan
from pancake_langgraph.launch.ports import port_is_free

pytestmark = pytest.mark.real


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not come true in time"
        time.sleep(0.05)


def living(pids: set[int]) -> set[int]:
    return {pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE}


def own_shm_files() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir() if "pancake_" in path.name} if folder.is_dir() else set()


def chat(stack: Stack, text: str, max_tokens: int = 8) -> str:
    body = {
        "model": stack.served_model_name,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    answer = httpx.post(f"{stack.base_url}/chat/completions", json=body, timeout=60.0, trust_env=False)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


def rendered(stack: Stack, messages: list[dict[str, str]], *, prompt: bool) -> list[int]:
    body = {"model": stack.served_model_name, "messages": messages, "add_generation_prompt": prompt}
    url = stack.base_url.removesuffix("/v1") + "/tokenize"
    answer = httpx.post(url, json=body, timeout=60.0, trust_env=False)
    answer.raise_for_status()
    return list(answer.json()["tokens"])


def test_a_taken_port_is_refused_before_anything_starts(smol_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(LaunchError, match=f"port {port} .*taken by process {os.getpid()}"),
            Stack(StackPlan(model_dir=smol_dir, engine_port=port)),
        ):
            pass


def test_a_model_that_cannot_be_loaded_is_explained_from_the_log(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(LaunchError, match="ended before it was ready") as caught, Stack(StackPlan(model_dir=tmp_path)):
        pass
    assert "model-server.log" in str(caught.value)


OWNER = """
import sys, time
from pathlib import Path
from pancake_langgraph.launch import Stack, StackPlan, TierPlan
plan = StackPlan(model_dir=Path(sys.argv[1]), dtype="float32", kv_pool_bytes=32_000_000,
                 tier=TierPlan(l1_bytes=64_000_000), run_dir=Path(sys.argv[2]))
with Stack(plan) as stack:
    print(stack.engine.pid, stack.tier.pid, stack.engine_process.places.port, stack.tier_process.port, flush=True)
    print(stack.kv_events_endpoint, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_an_owner_that_ends_takes_everything_with_it(
    tiny_dir: Path, tmp_path: Path, signal_number: signal.Signals
) -> None:
    before = own_shm_files()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tiny_dir), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        engine_pid, tier_pid, engine_port, tier_port = map(int, owner.stdout.readline().split())
        sockets = Path(owner.stdout.readline().strip().removeprefix("ipc://")).parent
        tree = {process.pid for process in psutil.Process(owner.pid).children(recursive=True)}
        assert {engine_pid, tier_pid} < tree
        assert len(tree) >= 5
        assert sockets.is_dir()
        assert sockets.stat().st_mode & 0o077 == 0
    finally:
        owner.send_signal(signal_number)
        owner.communicate(timeout=60)
    wait_until(lambda: not living(tree), limit_s=30)
    wait_until(lambda: not sockets.exists(), limit_s=10)
    assert port_is_free(engine_port)
    assert port_is_free(tier_port)
    assert own_shm_files() <= before
    assert not list(tmp_path.glob("l2-*"))


def test_the_stack_answers_and_listens_on_loopback_only(tiny_stack: Stack) -> None:
    assert tiny_stack.engine_process.healthy()
    assert tiny_stack.tier_process is not None
    assert tiny_stack.tier_process.healthy()
    assert chat(tiny_stack, "hello there") == chat(tiny_stack, "hello there")
    assert tiny_stack.tier is not None
    for root in (tiny_stack.engine.pid, tiny_stack.tier.pid):
        for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    assert connection.laddr.ip in {"127.0.0.1", "::1"}


def test_the_tiny_model_reads_its_context(tiny_stack: Stack) -> None:
    first, second = (chat(tiny_stack, text, 16) for text in ("one two three", "three two one"))
    assert first != second


def test_rendering_through_the_engine_only_appends_tokens(tiny_stack: Stack) -> None:
    conversation = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4."},
        {"role": "user", "content": "And 3 + 3?"},
    ]
    whole = rendered(tiny_stack, conversation, prompt=False)
    for cut in range(1, len(conversation)):
        start = rendered(tiny_stack, conversation[:cut], prompt=False)
        assert whole[: len(start)] == start
    asked = rendered(tiny_stack, conversation[:2], prompt=True)
    assert whole[: len(asked)] == asked


def test_calls_go_on_while_the_tier_is_frozen_killed_and_back(tiny_stack: Stack) -> None:
    expected = chat(tiny_stack, "steady")
    tier, process = tiny_stack.tier_process, tiny_stack.tier
    assert tier is not None
    assert process is not None
    process.freeze()
    assert chat(tiny_stack, "steady") == expected
    process.thaw()
    process.kill()
    assert not process.alive
    assert chat(tiny_stack, "steady") == expected
    port, pid = tier.port, process.pid
    tier.restart()
    assert (tier.port, tier.healthy()) == (port, True)
    assert process.pid != pid
    assert chat(tiny_stack, "steady") == expected


def test_a_killed_engine_comes_back_on_its_port(tiny_stack: Stack) -> None:
    url = tiny_stack.base_url
    tiny_stack.engine.kill()
    assert not tiny_stack.engine_process.healthy()
    tiny_stack.engine_process.restart()
    assert tiny_stack.base_url == url
    assert chat(tiny_stack, "back again")
