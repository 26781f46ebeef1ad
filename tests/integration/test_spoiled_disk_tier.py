"""Files of the disk tier are spoiled under the real cache server: the answers stay those of a cold engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pancake_langgraph.launch import Stack

pytestmark = pytest.mark.real

CHUNK_TOKENS, NUM_CHUNKS = 64, 6
NUM_PROMPT_TOKENS = CHUNK_TOKENS * NUM_CHUNKS + 8
HITS = "vllm:external_prefix_cache_hits_total{"


class Tier:
    """One prompt and what lies on disk of it."""

    def __init__(self, stack: Stack, salt: str) -> None:
        assert stack.tier_process is not None
        assert stack.tier_process.places.l2_dir is not None
        self.stack, self.salt, self.folder = stack, salt, stack.tier_process.places.l2_dir

    def ask(self, salt: str | None = None) -> Any:
        """Return the tokens with their log probabilities."""
        response = httpx.post(
            f"{self.stack.base_url}/completions",
            json={
                "model": self.stack.served_model_name,
                "prompt": [20_000 + (7 * position) % 3001 for position in range(NUM_PROMPT_TOKENS)],
                "max_tokens": 8,
                "temperature": 0.0,
                "logprobs": 1,
                "cache_salt": self.salt if salt is None else salt,
            },
            timeout=120.0,
        )
        assert response.is_success, response.text
        found = response.json()["choices"][0]["logprobs"]
        return found["tokens"], found["token_logprobs"]

    def ask_cold(self) -> Any:
        """Return what every further answer has to equal, as far as float32 goes."""
        tokens, values = self.ask()
        return tokens, pytest.approx(values, abs=1e-4)

    def forget(self) -> None:
        """Empty the engine's pool and the cache server's memory: what is left is on disk."""
        root = self.stack.base_url.removesuffix("/v1")
        self.until(lambda: httpx.post(f"{root}/reset_prefix_cache").json().get("success", True))
        self.until(lambda: self.status()["store_controller"]["in_flight_task_count"] == 0)
        assert httpx.post(f"{self.stack.tier_url}/cache/clear", json={"force": True}).is_success

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = httpx.get(f"{self.stack.tier_url}/status").json()["storage_manager"]
        return status

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = self.status()["l2_adapters"][0]["counts"]
        return counts

    def refused(self) -> int:
        return sum(count for kind, count in self.counts().items() if kind.startswith("refused"))

    def loaded_tokens(self) -> float:
        text = httpx.get(self.stack.base_url.removesuffix("/v1") + "/metrics").text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(HITS))

    def files(self) -> set[Path]:
        return set(self.folder.glob("*.pkv"))

    @staticmethod
    def until(is_so: Callable[[], object]) -> None:
        end = time.monotonic() + 60.0
        while not is_so():
            assert time.monotonic() < end, "it never came true"
            time.sleep(0.02)


def flip(path: Path, number: int) -> None:
    data = bytearray(path.read_bytes())
    data[(number + 1) * len(data) // (NUM_CHUNKS + 1)] ^= 0x40
    path.write_bytes(data)


def test_every_spoiled_file_is_a_counted_miss_and_is_written_again(tiny_stack: Stack) -> None:
    tier = Tier(tiny_stack, "spoiled a")
    others = tier.files()
    cold = tier.ask_cold()
    tier.until(lambda: len(tier.files() - others) == NUM_CHUNKS)
    mine = sorted(tier.files() - others)
    assert tier.ask("spoiled b") == cold  # the same words of another tenant
    tier.until(lambda: len(tier.files() - others) == 2 * NUM_CHUNKS)
    theirs = sorted(tier.files() - others - set(mine))

    def spoil_and_ask(path: Path, spoil: Callable[[], object]) -> None:
        tier.forget()
        before, refused = tier.loaded_tokens(), tier.refused()
        spoil()
        spoiled = path.read_bytes() if path.exists() else b""
        assert tier.ask() == cold
        assert tier.refused() > refused
        assert tier.loaded_tokens() < before + NUM_CHUNKS * CHUNK_TOKENS
        tier.until(lambda: path.exists() and path.read_bytes() != spoiled)
        tier.until(lambda: tier.status()["store_controller"]["in_flight_task_count"] == 0)

    for number, path in enumerate(mine):
        spoil_and_ask(path, lambda path=path, number=number: flip(path, number))
    size = mine[0].stat().st_size
    spoil_and_ask(mine[0], lambda: os.truncate(mine[0], size // 2))
    spoil_and_ask(mine[1], lambda: mine[1].write_bytes(bytes(size)))
    spoil_and_ask(mine[2], lambda: mine[2].write_bytes(mine[3].read_bytes()))
    spoil_and_ask(mine[3], lambda: mine[3].write_bytes(theirs[0].read_bytes()))
    spoil_and_ask(mine[4], lambda: mine[4].write_bytes(b"something else"))
    spoil_and_ask(mine[5], lambda: mine[5].write_bytes(mine[5].read_bytes()[:8] + b"\x09\x00" + bytes(size - 10)))

    tier.forget()
    before, refused = tier.loaded_tokens(), tier.refused()
    assert tier.ask() == cold
    assert tier.loaded_tokens() == before + NUM_CHUNKS * CHUNK_TOKENS  # all of it came from disk, and nothing was wrong
    assert tier.refused() == refused
    counts = tier.counts()
    assert {"refused_damaged", "refused_size", "refused_identity", "refused_foreign", "refused_version"} <= set(counts)
    assert len(tier.files() - others) == 2 * NUM_CHUNKS


def test_a_missing_chunk_ends_the_hit_and_a_lost_folder_is_made_again(tiny_stack: Stack) -> None:
    tier = Tier(tiny_stack, "hole")
    others = tier.files()
    cold = tier.ask_cold()
    tier.until(lambda: len(tier.files() - others) == NUM_CHUNKS)
    for path in sorted(tier.files() - others):
        tier.forget()
        path.unlink()
        assert tier.ask() == cold
        tier.until(path.exists)
    tier.forget()
    aside = tier.folder.with_name("aside")
    tier.folder.rename(aside)
    tier.folder.write_text("a file where the folder should be")
    assert tier.ask() == cold
    tier.until(lambda: tier.counts().get("store_failed"))
    tier.forget()
    tier.folder.unlink()
    aside.rename(tier.folder)
    before = tier.loaded_tokens()
    assert tier.ask() == cold
    assert tier.loaded_tokens() == before + NUM_CHUNKS * CHUNK_TOKENS
    assert tiny_stack.tier_process is not None
    assert tiny_stack.tier_process.healthy()
