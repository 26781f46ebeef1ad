"""Any server with the OpenAI routes: what it can do is found by asking, and what it cannot do is not sent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

from pancake_langgraph._errors import (
    EngineError,
    EngineRejected,
    MalformedStream,
    ModelNotFound,
    Unsupported,
)
from pancake_langgraph._types import Prompt, TokenPrefix
from pancake_langgraph.engines import _compat
from pancake_langgraph.engines._chat_wire import DeltaReader, chat_body, usage_of
from pancake_langgraph.engines._http import HttpSession
from pancake_langgraph.engines.base import (
    Capabilities,
    ChatDelta,
    ChatRequest,
    EngineStatistics,
    Residency,
    WarmReport,
)
from pancake_langgraph.engines.pool_hints import PARAMS_FIELD, PoolHints, answers_from_wire, hints_to_wire
from pancake_langgraph.wire.errors import cut_stream

logger = logging.getLogger(__name__)

DEFAULT_DEADLINE_S: Final = 30.0
#: A streamed answer may take this long in all.
CHAT_TOTAL_S: Final = 3600.0
_STATISTICS_DEADLINE_S: Final = 1.0
_PROBE_TEXT: Final = "hi"


class OpenAIEngine:
    """A model server behind the OpenAI routes.

    Belongs to the loop that first awaits it.  `deadline_s` bounds every request without a stream, and in a stream the
    time without any byte.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        """Prepare without connecting; `model` as `None` takes the only one served.

        Raises:
            ConfigError: if the address or the deadline is not usable.
        """
        self._http = HttpSession(base_url, api_key=api_key, deadline_s=deadline_s)
        self._deadline_s = deadline_s
        self._wanted_model = model
        self._found: Capabilities | None = None
        self._chats = self._warms = self._warms_cancelled = 0

    @property
    def name(self) -> str:
        """The adapter's name."""
        return "openai"

    async def open(self) -> None:
        """Make the connection pool.  Idempotent; connects to nothing."""
        self._http.open()

    async def close(self) -> None:
        """Close all sockets.  Idempotent."""
        await self._http.close()

    async def probe(self) -> Capabilities:
        """Ask which model is served, and which routes there are.

        Raises:
            EngineUnavailable: if the server cannot be reached.
            ModelNotFound: if it does not serve the configured model, or several and none is configured.
        """
        entry = await self._served_model()
        window = entry.get("max_model_len")
        found = Capabilities(
            engine=str(entry.get("owned_by") or self.name),
            version=await self._version(),
            model=str(entry["id"]),
            max_model_len_tokens=window if isinstance(window, int) else None,
        )
        found = await self._probe_tokens(found)
        self._found = found
        return found

    async def chat(self, request: ChatRequest) -> AsyncIterator[ChatDelta]:
        """Stream one answer; closing the iterator or cancelling its task hangs up.

        Raises:
            Unsupported: if the request has a salt and the server knows none.
            EngineError: typed as in `pancake_langgraph._errors`.
        """
        found = await self._capabilities()
        self._require_salt(request.cache_salt, found)
        self._chats += 1
        body = chat_body(
            request,
            model=found.model or "",
            with_prompt_token_ids=found.prompt_token_ids,
        )
        reader, done = DeltaReader(self._http.facts), False
        stream = self._http.stream_json(
            _compat.CHAT_ROUTE, body, stall_s=self._deadline_s, total_s=max(CHAT_TOTAL_S, self._deadline_s)
        )
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                if chunk is None:
                    done = True
                    break
                for delta in reader.read(chunk):
                    yield delta
        if not (done or reader.finished):
            raise cut_stream(self._http.facts, "no finish reason")
        if (last := reader.last()) is not None:
            yield last

    async def tokenize(self, prompt: Prompt, *, add_generation_prompt: bool) -> tuple[int, ...]:
        """Render with the server's template and tokenizer.

        Raises:
            Unsupported: if the server has no tokenizer route.
            EngineError: on any other failure.
        """
        found = await self._capabilities()
        if not found.tokenizer:
            raise Unsupported(
                f"tokenize: {self._http.root} has no {_compat.TOKENIZE_ROUTE} route; use a vLLM server, "
                "or run without warm-ups (engine='null')"
            )
        return await self._tokenize(found.model, prompt, add_generation_prompt=add_generation_prompt)

    async def warm(self, prefix: TokenPrefix, *, priority: int, hints: PoolHints | None = None) -> WarmReport:
        """Read `prefix` with a one-token request; cancelling the task closes the socket.

        Raises:
            Unsupported: if the server takes no token prompts, or `prefix` has a salt and it knows none.
            EngineError: on any failure of the server.
        """
        found = await self._capabilities()
        if not found.token_prompts:
            raise Unsupported(f"warm: {self._http.root} takes no token ids at {_compat.COMPLETIONS_ROUTE}")
        self._require_salt(prefix.cache_salt, found)
        body: dict[str, Any] = {"model": found.model, "prompt": list(prefix.token_ids), "max_tokens": 1}
        body["temperature"] = 0
        if found.priority:
            body["priority"] = priority
        if prefix.cache_salt is not None:
            body["cache_salt"] = prefix.cache_salt
        if hints is not None and found.pool_hints:
            body[PARAMS_FIELD] = hints_to_wire(hints)
        self._warms += 1
        started_s = time.monotonic()
        try:
            answer = await self._http.post_json(_compat.COMPLETIONS_ROUTE, body)
        except asyncio.CancelledError:
            self._warms_cancelled += 1
            raise
        usage = usage_of(answer.get("usage")) if isinstance(answer, dict) else None
        return WarmReport(
            prompt_tokens=usage.prompt_tokens if usage is not None else prefix.num_tokens,
            cached_tokens=usage.cached_tokens if usage is not None else None,
            elapsed_s=time.monotonic() - started_s,
            answers=answers_from_wire(answer),
        )

    async def residency(self, prefix: TokenPrefix) -> Residency:
        """Say that nothing is known: plain servers report nothing about their pool."""
        return Residency(known=False)

    async def statistics(self) -> EngineStatistics:
        """Return this adapter's counters, with the server's gauges where it exports them."""
        own = EngineStatistics(chats=self._chats, warms=self._warms, warms_cancelled=self._warms_cancelled)
        try:
            text = await self._http.get_text(
                _compat.METRICS_ROUTE, deadline_s=min(_STATISTICS_DEADLINE_S, self._deadline_s)
            )
        except EngineError as exc:  # a snapshot without gauges is still a snapshot
            logger.debug("no metrics: %s", type(exc).__name__)
            return own
        running = _compat.gauge(text, _compat.METRIC_RUNNING)
        waiting = _compat.gauge(text, _compat.METRIC_WAITING)
        return replace(
            own,
            running=None if running is None else int(running),
            waiting=None if waiting is None else int(waiting),
            pool_used_ratio=_compat.gauge(text, _compat.METRIC_POOL_USED),
        )

    # -- finding out ----------------------------------------------------------------------------------------------

    def _require_salt(self, cache_salt: str | None, found: Capabilities) -> None:
        if cache_salt is not None and not found.cache_salt:
            raise Unsupported(
                f"cache_salt: {self._http.root} knows none, so that cache entries would be shared with others; "
                "leave it out, or use engine='vllm' with vLLM 0.9 or newer"
            )

    async def _capabilities(self) -> Capabilities:
        return self._found if self._found is not None else await self.probe()

    async def _served_model(self) -> dict[str, Any]:
        answer = await self._http.get_json(_compat.MODELS_ROUTE)
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, list) or not all(isinstance(entry, dict) and "id" in entry for entry in data):
            raise MalformedStream(f"{_compat.MODELS_ROUTE}: got no list of models; is this a model server?")
        names = [str(entry["id"]) for entry in data]
        if self._wanted_model is None:
            if len(data) == 1:
                return dict(data[0])
            raise ModelNotFound(f"model: got none, allowed is one of {names}; name it", status_code=404)
        if self._wanted_model not in names:
            raise ModelNotFound(
                f"model: got {self._wanted_model!r}, {self._http.root} serves {names}; correct the name",
                status_code=404,
            )
        return dict(data[names.index(self._wanted_model)])

    async def _version(self) -> str | None:
        try:
            answer = await self._http.get_json(_compat.VERSION_ROUTE)
        except (EngineRejected, MalformedStream):
            return None
        version = answer.get("version") if isinstance(answer, dict) else None
        return str(version) if version else None

    async def _probe_tokens(self, found: Capabilities) -> Capabilities:
        """Find out about the tokenizer, and with its tokens about token prompts."""
        prompt = Prompt.of([{"role": "user", "content": _PROBE_TEXT}])
        try:
            tokens = await self._tokenize(found.model, prompt, add_generation_prompt=True)
        except (EngineRejected, MalformedStream) as exc:
            return replace(found, notes=(*found.notes, f"no tokenizer route: {exc}"))
        found = replace(found, tokenizer=True)
        body: dict[str, Any] = {"model": found.model, "prompt": list(tokens[:2]), "max_tokens": 1, "temperature": 0}
        refused: EngineRejected | None = None
        for fields in (self._probe_fields(), {}):  # a server may refuse what only this adapter would like to send
            try:
                answer = await self._http.post_json(_compat.COMPLETIONS_ROUTE, body | fields)
            except EngineRejected as exc:
                refused = exc
                continue
            found = replace(found, token_prompts=True)
            return self._judge_completion(found, answer) if fields else found
        return replace(found, notes=(*found.notes, f"no token prompts: {refused}"))

    def _probe_fields(self) -> dict[str, Any]:
        """Return fields to add to the one-token request of `probe`."""
        return {}

    def _judge_completion(self, found: Capabilities, answer: Any) -> Capabilities:
        """Read from the answer to that request what else the server can do."""
        return found

    async def _tokenize(self, model: str | None, prompt: Prompt, *, add_generation_prompt: bool) -> tuple[int, ...]:
        body: dict[str, Any] = {
            "model": model,
            "messages": list(prompt.messages),
            "add_generation_prompt": add_generation_prompt,
        }
        if prompt.tools:
            body["tools"] = list(prompt.tools)
        answer = await self._http.post_json(_compat.TOKENIZE_ROUTE, body)
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, int) for token in tokens):
            raise MalformedStream(f"{_compat.TOKENIZE_ROUTE}: got no list of token ids")
        return tuple(tokens)
