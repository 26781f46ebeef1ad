"""Bench `tiers`: time to the first token of one prompt, by where its KV is.

Each cache server with its own store below main memory is started in turn with an engine of its own.  In every repeat a
new prompt is read once and waited for until the lower store has it; then the same tokens come from every place once, in
an order that rotates.  `cold` is the same prompt under a salt that nothing was stored for.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

import httpx

from pancake_langgraph._errors import MalformedStream, TierError
from pancake_langgraph._types import TokenPrefix
from pancake_langgraph.bench.machine import read_machine
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.servers import Progress, ServersPlan, reset_pool
from pancake_langgraph.bench.statistics import describe_arms
from pancake_langgraph.bench.text import passages
from pancake_langgraph.bench.tier_arms import (
    TIER_ARM_TEXT,
    GroupResult,
    TierArm,
    TierGroup,
    TierSample,
    chosen_groups,
    rotated,
    tier_ratios,
    tier_samples,
    tier_summary,
)
from pancake_langgraph.bench.tier_servers import TierServers
from pancake_langgraph.engines.vllm import VllmEngine
from pancake_langgraph.tiers.lmcache import LMCacheTier

PROMPT_TOKENS: Final = 2_000
ANSWER_TOKENS: Final = 12
_PROMPT_WORDS: Final = 2_000
_TEXT_SEED: Final = 5_000
_REQUEST_S: Final = 300.0
_TIER_S: Final = 60.0
_STORE_ATTEMPTS: Final = 5
_CLEAR_ATTEMPTS: Final = 50
#: The lower store is taken to be done when nothing waits and its size stays for so many looks, each so many seconds.
_QUIET_LOOKS, _LOOK_S = 3, 0.1
_LONGEST_STORE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class TiersPlan:
    """How often, and which arms; engines are set up by `servers`."""

    servers: ServersPlan
    repeats: int
    arms: tuple[TierArm, ...]
    bf16_token_bytes: int


def run_tiers(plan: TiersPlan, on_progress: Progress) -> BenchResult:
    """Run all groups one after the other.

    Raises:
        LaunchError: if a server does not start.
        TierError: if a cache server does not answer, or does not store the prompt.
        MalformedStream: if the engine answers in another form.
    """
    results: list[GroupResult] = []
    for group in chosen_groups(plan.arms):
        with TierServers(group, plan.servers, on_progress=on_progress) as servers:
            results.append(asyncio.run(_run_group(servers, plan, on_progress)))
    return tiers_result(plan, results)


def tiers_result(plan: TiersPlan, results: Sequence[GroupResult]) -> BenchResult:
    """Compose the documented result.  Pure but for the facts on the machine and the date."""
    samples = tier_samples(results)
    return BenchResult(
        workload="tiers",
        version=metadata.version("pancake-langgraph"),
        machine=read_machine(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        repeats=plan.repeats,
        arms=describe_arms(samples),
        ratios=tier_ratios(results),
        outcomes={},
        notes=(
            *(f"{arm}: {TIER_ARM_TEXT[TierArm(arm)]}." for arm in samples),
            (
                f"A prompt of {PROMPT_TOKENS:,} tokens, chunks of {plan.servers.chunk_tokens}; each of the "
                f"{len(results)} cache servers has an engine of its own, and cold, l0 and l1 are measured with each."
            ),
            "A ratio compares with the cold prompt of the same server and repeat.",
            "What is read from disk was written just before, so that it comes from the system's file cache.",
        ),
        summary=tier_summary(results, bf16_token_bytes=plan.bf16_token_bytes),
    )


async def _run_group(servers: TierServers, plan: TiersPlan, on_progress: Progress) -> GroupResult:
    engine, process = VllmEngine(servers.engine.base_url), servers.engine
    tier = LMCacheTier(servers.tier.url, process.model_key, deadline_s=_TIER_S)
    root = process.base_url.removesuffix("/v1")
    await engine.open()
    await tier.open()
    try:
        async with httpx.AsyncClient(base_url=root, timeout=_REQUEST_S, trust_env=False) as client:
            found = await engine.probe()
            tier.identify(found.kv_identity)
            stage = _Stage(servers, tier, client, process.plan.served_model_name)
            return await _run_repeats(stage, plan, on_progress)
    finally:
        await tier.close()
        await engine.close()


async def _run_repeats(stage: _Stage, plan: TiersPlan, on_progress: Progress) -> GroupResult:
    """Run a round that does not count, in which everything happens for the first time, and then the repeats."""
    group = stage.group
    repeats: list[dict[TierArm, TierSample]] = []
    sizes: list[float] = []
    stored_tokens = 0
    for repeat in range(-1, plan.repeats):
        on_progress(f"{group.lower}: {f'repeat {repeat + 1} of {plan.repeats}' if repeat >= 0 else 'trial run'}")
        prompt = TokenPrefix(await stage.prompt(_TEXT_SEED + repeat), f"tiers-{group.lower}-{repeat}")
        stored = await stage.store(prompt)
        sizes.append(stored.bytes_added / stored.tokens)
        stored_tokens = stored.tokens
        done = {arm: await stage.measure(arm, prompt) for arm in rotated(group.arms, max(repeat, 0))}
        if repeat >= 0:
            repeats.append(done)
    return GroupResult(group, tuple(repeats), sizes[-1], stored_tokens)


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a prompt left in the lower store: bytes, and tokens in whole chunks."""

    bytes_added: int
    tokens: int


class _Stage:
    """Puts a prompt's KV where it is to be, and times the prompt from there."""

    def __init__(self, servers: TierServers, tier: LMCacheTier, client: httpx.AsyncClient, model: str) -> None:
        self.group: TierGroup = servers.group
        self._servers = servers
        self._tier = tier
        self._client = client
        self._model = model

    async def prompt(self, seed: int) -> tuple[int, ...]:
        """Return the tokens of real text, `PROMPT_TOKENS` of them."""
        text = passages(_PROMPT_WORDS, seed=seed)
        answer = await self._client.post("/tokenize", json={"model": self._model, "prompt": text})
        tokens = answer.json().get("tokens") if answer.is_success else None
        if not isinstance(tokens, list) or len(tokens) < PROMPT_TOKENS:
            raise MalformedStream(f"/tokenize: got {answer.status_code}, allowed are {PROMPT_TOKENS} tokens or more")
        return tuple(tokens[:PROMPT_TOKENS])

    async def store(self, prompt: TokenPrefix) -> _Stored:
        """Read the prompt and wait until the lower store has all of its whole chunks.

        Raises:
            TierError: if it never has.
        """
        before = await self._quiet_bytes()
        for _ in range(_STORE_ATTEMPTS):
            await self._reset()
            await self._ask(prompt)
            after = await self._quiet_bytes()
            await self._empty_host()
            report = await self._tier.prefetch(prompt)
            if report.total_chunks and report.found_chunks >= report.total_chunks:
                return _Stored(after - before, report.total_chunks * self._servers.plan.chunk_tokens)
        raise TierError(
            f"{self.group.lower}: after {_STORE_ATTEMPTS} prompts the store below main memory has "
            f"{report.found_chunks} of {report.total_chunks} chunks; look at the cache server's log"
        )

    async def measure(self, arm: TierArm, prompt: TokenPrefix) -> TierSample:
        """Time the prompt with its KV in the place of `arm`."""
        if arm in (TierArm.COLD, TierArm.L0):
            # Under salts of their own: what comes back from a store that packs is not what was computed.
            await self._reset()
            fresh = TokenPrefix(prompt.token_ids, f"{prompt.cache_salt}-{arm}")
            sample = await self._ask(fresh)
            await self._quiet_bytes()  # what it stores is not to be in the way of what comes next
            return sample if arm is TierArm.COLD else await self._ask(fresh)
        if arm is TierArm.L1:
            await self._tier.prefetch(prompt)
        else:
            await self._empty_host()
        await self._reset()
        return await self._ask(prompt)

    async def _reset(self) -> None:
        await asyncio.to_thread(reset_pool, self._servers.engine)

    async def _quiet_bytes(self) -> int:
        """Return what the lower store holds once that does not change any more."""
        seen, quiet = -1, 0
        deadline_s = time.monotonic() + _LONGEST_STORE_S
        while quiet < _QUIET_LOOKS and time.monotonic() < deadline_s:
            await asyncio.sleep(_LOOK_S)
            now = await asyncio.to_thread(self._servers.stored_bytes)
            busy = (await self._host_state()).pending_stores
            quiet = quiet + 1 if now == seen and not busy else 0
            seen = now
        return seen

    async def _empty_host(self) -> None:
        """Empty main memory; what is still being read or written there is waited for.

        Raises:
            TierError: if something stays.
        """
        for _ in range(_CLEAR_ATTEMPTS):
            await self._tier.clear_host()
            if not (left := (await self._host_state()).objects):
                return
            await asyncio.sleep(_LOOK_S)
        raise TierError(f"{self.group.lower}: main memory still holds {left} objects after {_CLEAR_ATTEMPTS} clearings")

    async def _host_state(self) -> HostState:
        answer = await self._client.get(f"{self._servers.tier.url}/status")
        return host_state(answer.json() if answer.is_success else None)

    async def _ask(self, prompt: TokenPrefix) -> TierSample:
        """Send the prompt; the time runs until the first piece of the answer."""
        body = {
            "model": self._model,
            "prompt": list(prompt.token_ids),
            "cache_salt": prompt.cache_salt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first_s: float | None = None
        words: list[str] = []
        cached_tokens = 0
        started_s = time.perf_counter()
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            if not answer.is_success:
                raise MalformedStream(f"/v1/completions: got {answer.status_code}, allowed is 200; see its log")
            async for line in answer.aiter_lines():
                piece = _piece(line)
                for choice in piece.get("choices") or ():
                    first_s = time.perf_counter() - started_s if first_s is None else first_s
                    words.append(str(choice.get("text", "")))
                details = (piece.get("usage") or {}).get("prompt_tokens_details") or {}
                cached_tokens = int(details.get("cached_tokens") or cached_tokens)
        if first_s is None:
            raise MalformedStream("/v1/completions: got an answer without any token; see the engine's log")
        return TierSample(first_s, cached_tokens, "".join(words))


@dataclass(frozen=True, slots=True)
class HostState:
    """What a cache server says: objects in its main memory, and those that have yet to be written below it."""

    objects: int
    pending_stores: int


def host_state(status: object) -> HostState:
    """Read the answer to `GET /status`.

    Raises:
        TierError: if it has another form.
    """
    try:
        if not isinstance(status, Mapping):
            raise TypeError
        manager = status["storage_manager"]
        store = manager["store_controller"]
        pending = int(store["pending_keys_count"]) + int(store["in_flight_task_count"])
        return HostState(int(manager["l1_manager"]["total_object_count"]), pending)
    except (KeyError, TypeError, ValueError) as exc:
        raise TierError("/status: got no counts of objects and stores; is this a tested version of LMCache?") from exc


def _piece(line: str) -> dict[str, Any]:
    """Return the JSON object of a line of the stream; an empty one where there is none."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return {}
    decoded = json.loads(data)
    return decoded if isinstance(decoded, dict) else {}
