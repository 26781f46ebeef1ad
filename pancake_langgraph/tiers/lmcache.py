"""The LMCache server: asks it to bring a prompt's KV from disk into host memory."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

import httpx

from pancake_langgraph._errors import ConfigError, TierError
from pancake_langgraph._types import TokenPrefix
from pancake_langgraph.config.address import require_http_address
from pancake_langgraph.engines import _compat
from pancake_langgraph.engines._http import is_loopback
from pancake_langgraph.tiers.base import PrefetchReport, TierHealth
from pancake_langgraph.tiers.naming import tier_salt

logger = logging.getLogger(__name__)

# The server has no way to wait for a prefetch; one takes tens of milliseconds on a local disk.
_FIRST_POLL_S: Final = 0.005
_LONGEST_POLL_S: Final = 0.05
_POLL_GROWTH: Final = 1.5
_CLOSE_TIMEOUT_S: Final = 1.0
_MAX_REASON_CHARS: Final = 300


class LMCacheTier:
    """One LMCache server.  Belongs to the loop that first awaits it.

    `model_key` is the `--model` string that the engine was started with, not the served name: the server keys its
    objects by it.
    """

    def __init__(self, url: str, model_key: str, *, deadline_s: float = 2.0) -> None:
        """Prepare without connecting; `deadline_s` bounds each method as a whole.

        Raises:
            ConfigError: if a value is not usable.
        """
        require_http_address("tier url", url)
        if not model_key:
            raise ConfigError("model_key: got an empty string, allowed is the engine's --model string")
        if not 0 < deadline_s <= 600:
            raise ConfigError(f"deadline_s: got {deadline_s}, allowed is more than 0 up to 600")
        self._url = url.rstrip("/")
        self._model_key = model_key
        self._deadline_s = deadline_s
        self._kv_identity: str | None = None
        self._client: httpx.AsyncClient | None = None

    @property
    def name(self) -> str:
        """The adapter's name."""
        return "lmcache"

    async def open(self) -> None:
        """Make the connection pool.  Idempotent; connects to nothing."""
        self._opened()

    async def close(self) -> None:
        """Close all sockets.  Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            try:
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await client.aclose()
            except TimeoutError:
                logger.debug("connections to the tier did not close within %s s", _CLOSE_TIMEOUT_S)

    async def health(self) -> TierHealth:
        """Ask for the server's state.  Never raises."""
        try:
            async with asyncio.timeout(self._deadline_s):
                status = await self._json("GET", _compat.TIER_STATUS_ROUTE)
        except TimeoutError:
            return TierHealth(alive=False, chunk_tokens=None, detail=self._too_late("status"))
        except TierError as exc:
            return TierHealth(alive=False, chunk_tokens=None, detail=str(exc))
        chunk = status.get("chunk_size")
        healthy = status.get("is_healthy", True) is not False
        return TierHealth(
            alive=healthy,
            chunk_tokens=chunk if isinstance(chunk, int) and chunk > 0 else None,
            detail="ok" if healthy else "the server says that it is not healthy; look at its log",
        )

    async def prefetch(self, prefix: TokenPrefix) -> PrefetchReport:
        """Load from disk what the server holds of `prefix`, and wait for the end of it.

        A prefix shorter than one chunk finds nothing, at once.

        Raises:
            TierError: if the server does not answer within the deadline, refuses, or knows no engine for the model.
        """
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(self._deadline_s):
                found, total = await self._prefetch(prefix)
        except TimeoutError as exc:
            raise TierError(self._too_late("prefetch")) from exc
        return PrefetchReport(found_chunks=found, total_chunks=total, elapsed_s=time.monotonic() - started_s)

    async def clear_host(self) -> None:
        """Drop what the server holds in host memory, but for what is being read or written.

        Raises:
            TierError: if the server does not answer within the deadline or refuses.
        """
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._json("POST", _compat.TIER_CLEAR_ROUTE, {"tier": "l1"})
        except TimeoutError as exc:
            raise TierError(self._too_late("clear")) from exc

    def identify(self, kv_identity: str | None) -> None:
        """Look from now on for KV of the engine that calls itself so; `None`: of one that names no identity."""
        self._kv_identity = kv_identity

    async def _prefetch(self, prefix: TokenPrefix) -> tuple[int, int]:
        body = {
            "model_name": self._model_key,
            "world_size": 1,
            "token_ids": list(prefix.token_ids),
            "cache_salt": tier_salt(self._kv_identity, prefix.cache_salt),
        }
        job = await self._json("POST", _compat.TIER_PREFETCH_ROUTE, body)
        chunks = _count(job, "chunks")
        if job.get("status") == "noop" or chunks == 0:
            return 0, 0
        job_id, pause_s = job.get("request_id"), _FIRST_POLL_S
        if not isinstance(job_id, str):
            raise TierError(f"prefetch: {self._url} named no request_id; tested with {_compat.tested_versions()}")
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * _POLL_GROWTH, _LONGEST_POLL_S)
            state = await self._json("GET", f"{_compat.TIER_PREFETCH_ROUTE}/{job_id}")
            if state.get("status") == "completed":
                found, total = _count(state, "found_keys"), _count(state, "total_keys")
                return (found * chunks // total if total else 0), chunks

    async def _json(self, method: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = await self._opened().request(method, route, json=body)
        except httpx.HTTPError as exc:
            raise TierError(
                f"tier: cannot reach {self._url} ({type(exc).__name__}); start the cache server or correct tier_url"
            ) from exc
        if not response.is_success:
            raise self._refusal(route, response)
        try:
            decoded = response.json()
        except (ValueError, RecursionError) as exc:
            raise TierError(f"tier: {self._url}{route} answered no JSON; is this an LMCache server?") from exc
        if not isinstance(decoded, dict):
            raise TierError(f"tier: {self._url}{route} answered a JSON {type(decoded).__name__}, allowed is an object")
        return decoded

    def _refusal(self, route: str, response: httpx.Response) -> TierError:
        try:
            decoded = response.json()
            reason = str(decoded.get("detail") or decoded.get("error") or decoded) if isinstance(decoded, dict) else ""
        except (ValueError, RecursionError):
            reason = response.text
        text = f"tier: {route.split('/')[1]} answered {response.status_code}: {reason[:_MAX_REASON_CHARS]}"
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE and "layout" in reason:
            return TierError(
                f"{text}; give the engine's --model string as tier_model, and wait one heartbeat after a restart "
                "of the cache server"
            )
        return TierError(f"{text}; look at the cache server's log")

    def _too_late(self, what: str) -> str:
        return f"tier: {self._url} gave no answer to {what} within {self._deadline_s:g} s; is it stopped or overloaded?"

    def _opened(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(
                base_url=self._url,
                timeout=httpx.Timeout(None),  # the deadline stands around each method
                trust_env=not is_loopback(self._url),
            )
        return self._client


def _count(answer: dict[str, Any], key: str) -> int:
    value = answer.get(key)
    if not isinstance(value, int) or value < 0:
        raise TierError(f"tier: got {key}={value!r}, allowed is a count; tested with {_compat.tested_versions()}")
    return value
