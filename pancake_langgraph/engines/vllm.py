"""vLLM: everything the generic adapter does, and the shape of its pool, priorities, salts and KV events."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from pancake_langgraph._errors import EngineError, EngineRejected, MalformedStream, Unsupported
from pancake_langgraph._types import TokenPrefix
from pancake_langgraph.engines import _compat
from pancake_langgraph.engines._http import is_loopback
from pancake_langgraph.engines.base import Capabilities, Recital, Residency, TierState
from pancake_langgraph.engines.kv_events import KvEventSubscriber
from pancake_langgraph.engines.openai import DEFAULT_DEADLINE_S, OpenAIEngine
from pancake_langgraph.engines.pool_hints import (
    HINTS_FIELD,
    PARAMS_FIELD,
    PROBE_PARAMS,
    hold_cap_tokens,
    tier_facts,
    understands_hints,
)
from pancake_langgraph.engines.recital import read_recital, recital_body
from pancake_langgraph.engines.residency import PoolIndex

logger = logging.getLogger(__name__)

#: Priority of the probe's own requests: after everything else.
_PROBE_PRIORITY: Final = 1000
_PROBE_TOOL: Final = {
    "type": "function",
    "function": {"name": "noop", "parameters": {"type": "object", "properties": {}}},
}


class VllmEngine(OpenAIEngine):
    """A vLLM server.

    With KV events `residency` is exact for what the engine has published: it publishes after each step, so that a
    reset without any later request shows only with the next one.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        kv_events_endpoint: str | None = None,
        kv_replay_endpoint: str | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        """Prepare without connecting.

        The event endpoints are given as the engine's own configuration has them.  Without one, a server on this
        machine is asked for it by `probe`.

        Raises:
            ConfigError: if an address or the deadline is not usable.
        """
        super().__init__(base_url, model=model, api_key=api_key, deadline_s=deadline_s)
        self._listeners: list[Callable[[], None]] = []
        self._is_open = False
        self._subscriber: KvEventSubscriber | None = None
        if kv_events_endpoint is not None:
            self._subscriber = self._subscribe_to(kv_events_endpoint, kv_replay_endpoint)

    @property
    def name(self) -> str:
        """The adapter's name."""
        return "vllm"

    async def open(self) -> None:
        """Make the connection pool and start to listen for KV events.  Idempotent."""
        await super().open()
        self._is_open = True
        if self._subscriber is not None:
            await self._subscriber.start()

    async def close(self) -> None:
        """Close all sockets and stop to listen.  Idempotent."""
        self._is_open = False
        if self._subscriber is not None:
            await self._subscriber.stop()
        await super().close()

    async def probe(self) -> Capabilities:
        """Ask for model, routes, pool, priority, salts, tool parser and KV events.

        Costs the engine two one-token requests of a few prompt tokens.

        Raises:
            EngineUnavailable: if the server cannot be reached.
            ModelNotFound: if it does not serve the configured model.
        """
        found = await super().probe()
        found = await self._probe_pool(found)
        found = replace(
            found,
            engine=self.name,
            tool_parser=await self._probe_tool_parser(found),
            kv_events=await self._probe_events(),
        )
        if (note := _compat.version_note("vllm", found.version)) is not None:
            found = replace(found, notes=(*found.notes, note))
        self._found = found
        return found

    @property
    def restarts(self) -> int:
        """How often the server was seen to start anew; needs KV events."""
        return self._subscriber.restarts if self._subscriber is not None else 0

    def add_residency_listener(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the engine's loop after each change of the pool."""
        self._listeners.append(callback)

    async def residency(self, prefix: TokenPrefix) -> Residency:
        """Say how many leading tokens the engine holds, as far as its events tell.  Never raises."""
        index = self._subscriber.index if self._subscriber is not None else None
        if index is None or not index.complete:
            return Residency(known=False, allocated_tokens=index.allocated_tokens if index is not None else 0)
        return Residency(
            known=True,
            resident_tokens=index.resident_tokens(prefix.token_ids, prefix.cache_salt),
            allocated_tokens=index.allocated_tokens,
        )

    async def recite(self, prefix: TokenPrefix, *, max_tokens: int, tier_salt: str | None = None) -> Recital:
        """Answer greedily, after everything else; from the tier as of `tier_salt` if given.

        Raises:
            EngineError: on any failure of the server.
        """
        found = await self._capabilities()
        body = recital_body(found.model, prefix, max_tokens=max_tokens, tier_salt=tier_salt, priority=_PROBE_PRIORITY)
        return read_recital(await self._http.post_json(_compat.COMPLETIONS_ROUTE, body))

    async def judge_tier(self, *, is_right: bool) -> bool:
        """Tell the connector inside the engine whether the tier may be read; return whether it took note.

        Raises:
            EngineError: on any failure of the server.
        """
        found = await self._capabilities()
        state = TierState.PROVEN if is_right else TierState.OFF
        body = {"model": found.model, "prompt": [1, 1], "max_tokens": 1, "temperature": 0, "priority": _PROBE_PRIORITY}
        answer = await self._http.post_json(
            _compat.COMPLETIONS_ROUTE, {**body, PARAMS_FIELD: {HINTS_FIELD: {"tier": state}}}
        )
        return tier_facts(answer)[1] == state

    # -- finding out ----------------------------------------------------------------------------------------------

    def _probe_fields(self) -> dict[str, Any]:
        return {"priority": _PROBE_PRIORITY, "return_token_ids": True, PARAMS_FIELD: PROBE_PARAMS}

    def _judge_completion(self, found: Capabilities, answer: Any) -> Capabilities:
        choices = answer.get("choices") if isinstance(answer, dict) else None
        first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        identity, tier_state = tier_facts(answer)
        # The field is taken without the policy too, then without effect: nothing tells the two apart.
        return replace(
            found,
            kv_identity=identity,
            tier_state=tier_state,
            priority=True,
            prompt_token_ids=bool(first.get("prompt_token_ids")),
            pool_hints=understands_hints(answer),
            hold_cap_tokens=hold_cap_tokens(answer),
            cache_salt=_compat.knows_cache_salt(found.version),
            notes=(*found.notes, "priorities count only with --scheduling-policy priority; the server does not say"),
        )

    async def _probe_pool(self, found: Capabilities) -> Capabilities:
        try:
            pool = _compat.pool_config(await self._http.get_text(_compat.METRICS_ROUTE))
        except EngineRejected as exc:
            return replace(found, notes=(*found.notes, f"no metrics: {exc}"))
        return replace(
            found,
            block_size_tokens=pool.block_size_tokens,
            pool_tokens=pool.pool_tokens,
            prefix_caching=pool.prefix_caching,
        )

    async def _probe_tool_parser(self, found: Capabilities) -> bool | None:
        body: dict[str, Any] = {
            "model": found.model,
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [_PROBE_TOOL],
            "tool_choice": "auto",
            "max_tokens": 1,
        }
        if found.priority:
            body["priority"] = _PROBE_PRIORITY
        try:
            await self._http.post_json(_compat.CHAT_ROUTE, body)
        except Unsupported:
            return False
        except EngineError as exc:  # a capability that cannot be told is "not known"
            logger.debug("tool parser unknown: %s", type(exc).__name__)
            return None
        return True

    async def _probe_events(self) -> bool:
        if self._subscriber is not None:
            return True
        if not is_loopback(self._http.root):
            return False  # an address that another machine names means nothing here
        try:
            sources = await self._http.get_json(_compat.KV_EVENT_SOURCES_ROUTE)
        except (EngineRejected, MalformedStream):
            return False
        endpoints = _only_source(sources)
        if endpoints is None:
            return False
        self._subscriber = self._subscribe_to(*endpoints)
        if self._is_open:
            await self._subscriber.start()
        return True

    def _subscribe_to(self, endpoint: str, replay_endpoint: str | None) -> KvEventSubscriber:
        return KvEventSubscriber(endpoint, replay_endpoint=replay_endpoint, on_change=self._changed)

    def _changed(self, _: PoolIndex) -> None:
        for callback in self._listeners:
            callback()


def _only_source(sources: Any) -> tuple[str, str | None] | None:
    """Return the endpoints of the one rank that publishes over a socket file, else `None`."""
    if not isinstance(sources, dict) or len(sources) != 1:
        return None  # several ranks have several pools: no single index describes them
    (source,) = sources.values()
    if not isinstance(source, dict) or not source.get("enable_kv_cache_events"):
        return None
    endpoint, replay = source.get("endpoint"), source.get("replay_endpoint")
    if not isinstance(endpoint, str) or not endpoint.startswith("ipc://"):
        return None
    return endpoint, replay if isinstance(replay, str) and replay.startswith("ipc://") else None
