"""The fake engine behind a real loopback port, with the routes and answers of a vLLM server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from pancake_langgraph._errors import ContextOverflow, EngineError, EngineFault, EngineRejected
from pancake_langgraph._types import Prompt, TokenPrefix, Usage
from pancake_langgraph.engines import _compat
from pancake_langgraph.engines.base import ChatDelta, ChatRequest
from pancake_langgraph.engines.fake import FakeEngine
from pancake_langgraph.engines.pool_hints import PARAMS_FIELD, answers_to_wire, hints_from_wire
from pancake_langgraph.testing._http_server import Answer, Call, LoopbackServer

T = TypeVar("T")

_DEFAULT_MAX_TOKENS = 64
_KNOWN_FIELDS = frozenset(
    {"model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "temperature", "cache_salt"}
)


class FakeEngineServer:
    """Serves one `FakeEngine` to any OpenAI client.

    Use it as a context: `with FakeEngineServer(engine) as server: client(server.base_url)`.  The engine lives on the
    server's own loop; what is asked of it from elsewhere goes through `on_engine`.
    """

    def __init__(
        self,
        engine: FakeEngine | None = None,
        *,
        piece_delay_s: float = 0.0,
        version: str | None = _compat.tested_versions()["vllm"],
        without_routes: Sequence[str] = (),
    ) -> None:
        """Prepare; `piece_delay_s` is real time before each piece, `without_routes` answer 404."""
        self.engine = engine if engine is not None else FakeEngine()
        self._piece_delay_s = piece_delay_s
        self._version = version
        self._server = LoopbackServer(self._handle)
        self._calls = 0
        routes: dict[tuple[str, str], Callable[[Call], Any]] = {
            ("GET", _compat.MODELS_ROUTE): self._models,
            ("GET", "/health"): self._health,
            ("GET", _compat.METRICS_ROUTE): self._metrics,
            ("POST", _compat.TOKENIZE_ROUTE): self._tokenize,
            ("POST", _compat.CHAT_ROUTE): self._chat,
            ("POST", _compat.COMPLETIONS_ROUTE): self._completions,
            ("POST", "/reset_prefix_cache"): self._reset,
        }
        if version is not None:
            routes["GET", _compat.VERSION_ROUTE] = self._tell_version
        self._routes = {key: route for key, route in routes.items() if key[1] not in without_routes}

    def __enter__(self) -> Self:
        """Listen on a free port."""
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._server.stop()

    @property
    def root_url(self) -> str:
        """Address without `/v1`."""
        return f"http://127.0.0.1:{self._server.port}"

    @property
    def base_url(self) -> str:
        """Address that an OpenAI client takes."""
        return f"{self.root_url}/v1"

    @property
    def hang_ups(self) -> Sequence[str]:
        """Paths of requests whose clients went away before the answer was complete."""
        return self._server.hang_ups

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the server's loop, where the engine lives; cancelling the future cancels it."""
        return self._server.run(coroutine)

    def on_engine(self, action: Callable[[FakeEngine], object]) -> None:
        """Run `action` with the engine on the server's loop, soon."""
        self._server.call_soon(lambda: action(self.engine))

    # -- routes ---------------------------------------------------------------------------------------------------

    async def _handle(self, call: Call) -> Answer:
        route = self._routes.get((call.method, call.path))
        if route is None:
            return Answer(404, {"detail": "Not Found"})
        try:
            answer = await route(call)
        except EngineError as exc:
            return _error_answer(exc)
        return answer if isinstance(answer, Answer) else Answer(payload=answer)

    async def _models(self, _: Call) -> dict[str, Any]:
        found = await self.engine.probe()
        entry = {"id": found.model, "object": "model", "created": 0, "owned_by": "vllm", "root": found.model}
        return {"object": "list", "data": [entry | {"parent": None, "max_model_len": found.max_model_len_tokens}]}

    async def _health(self, _: Call) -> Answer:
        await self.engine.probe()
        return Answer(text="")

    async def _tell_version(self, _: Call) -> dict[str, Any]:
        return {"version": self._version}

    async def _metrics(self, _: Call) -> Answer:
        found, numbers = await self.engine.probe(), await self.engine.statistics()
        series = f'engine="0",model_name="{found.model}"'
        # The real pool counts one placeholder block more than it can use.
        blocks = (found.pool_tokens or 0) // (found.block_size_tokens or 1) + 1
        return Answer(
            text=(
                f"# TYPE {_compat.METRIC_RUNNING} gauge\n"
                f"{_compat.METRIC_RUNNING}{{{series}}} {float(numbers.running or 0)}\n"
                f"{_compat.METRIC_WAITING}{{{series}}} {float(numbers.waiting or 0)}\n"
                f"{_compat.METRIC_POOL_USED}{{{series}}} {numbers.pool_used_ratio}\n"
                f'{_compat.METRIC_CACHE_CONFIG}{{{_compat.LABEL_BLOCK_SIZE}="{found.block_size_tokens}",'
                f'{_compat.LABEL_PREFIX_CACHING}="True",engine="0",{_compat.LABEL_NUM_BLOCKS}="{blocks}"}} 1.0\n'
            )
        )

    async def _reset(self, _: Call) -> dict[str, Any]:
        return {"success": self.engine.clear_pool()}

    async def _tokenize(self, call: Call) -> dict[str, Any]:
        self._check_model(call)
        prompt = _prompt_of(call)
        generation = bool(call.body.get("add_generation_prompt", True))
        tokens = await self.engine.tokenize(prompt, add_generation_prompt=generation)
        window = self.engine.settings.max_model_len_tokens
        return {"count": len(tokens), "max_model_len": window, "tokens": list(tokens), "token_strs": None}

    async def _completions(self, call: Call) -> dict[str, Any]:
        self._check_model(call)
        tokens = call.body.get("prompt")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise EngineRejected("prompt: allowed here is a list of token ids", status_code=400)
        if int(call.body.get("max_tokens", 16)) != 1:
            raise EngineRejected("max_tokens: allowed here is 1", status_code=400)
        prefix = TokenPrefix(tuple(tokens), call.body.get("cache_salt"))
        hints = hints_from_wire(call.body.get(PARAMS_FIELD))
        report = await self.engine.warm(prefix, priority=int(call.body.get("priority", 0)), hints=hints)
        usage = _usage_json(Usage(report.prompt_tokens, 1, report.cached_tokens))
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        choice["prompt_token_ids"] = tokens if call.body.get("return_token_ids") else None
        answer = self._envelope("cmpl", "text_completion") | {"choices": [choice], "usage": usage}
        if hints is not None and self.engine.settings.pool_hints:
            answer[PARAMS_FIELD] = answers_to_wire(report.answers)
        return answer

    async def _chat(self, call: Call) -> Answer:
        self._check_model(call)
        request = _chat_request(call)
        if not call.body.get("stream"):
            deltas = [delta async for delta in self._deltas(request)]
            return Answer(payload=self._completed(call, deltas))
        stream = self._deltas(request)
        first = await anext(stream)  # what is refused is refused before the stream begins
        return Answer(stream=self._chunks(call, first, stream))

    async def _deltas(self, request: ChatRequest) -> AsyncIterator[ChatDelta]:
        async with aclosing(self.engine.chat(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                if self._piece_delay_s and delta.prompt_token_ids is None:
                    await asyncio.sleep(self._piece_delay_s)
                yield delta

    async def _chunks(self, call: Call, first: ChatDelta, deltas: AsyncIterator[ChatDelta]) -> AsyncIterator[str]:
        envelope = self._envelope("chatcmpl", "chat.completion.chunk")
        opening: dict[str, Any] = envelope | {"choices": [_choice({"role": "assistant", "content": ""})]}
        if call.body.get("return_token_ids"):
            opening["prompt_token_ids"] = list(first.prompt_token_ids or ())
        yield json.dumps(opening)
        usage: Usage | None = None
        call_ids = _CallIds(envelope["id"])
        try:
            async for delta in deltas:
                if delta.usage is not None:
                    usage = delta.usage
                else:
                    yield json.dumps(
                        envelope | {"choices": [_choice(_delta_json(delta, call_ids), delta.finish_reason)]}
                    )
        except EngineError as exc:
            yield json.dumps(_error_answer(exc).payload)
        if usage is not None and (call.body.get("stream_options") or {}).get("include_usage"):
            yield json.dumps(envelope | {"choices": [], "usage": _usage_json(usage)})
        yield "[DONE]"

    def _completed(self, call: Call, deltas: Sequence[ChatDelta]) -> dict[str, Any]:
        envelope = self._envelope("chatcmpl", "chat.completion")
        call_ids = _CallIds(envelope["id"])
        calls: dict[int, dict[str, Any]] = {}
        for delta in deltas:
            if delta.tool_index is not None:
                known = calls.setdefault(
                    delta.tool_index,
                    {
                        "id": call_ids.of(delta.tool_index),
                        "type": "function",
                        "function": {"name": delta.tool_name or "", "arguments": ""},
                    },
                )
                known["function"]["arguments"] += delta.tool_arguments or ""
        text = "".join(delta.text or "" for delta in deltas)
        message = {"role": "assistant", "content": text if text or not calls else None}
        message["reasoning"] = "".join(delta.reasoning or "" for delta in deltas) or None
        if calls:
            message["tool_calls"] = list(calls.values())  # type: ignore[assignment]
        reason = next(delta.finish_reason for delta in deltas if delta.finish_reason)
        usage = next(delta.usage for delta in deltas if delta.usage is not None)
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason, "stop_reason": None}
        answer = envelope | {"choices": [choice], "usage": _usage_json(usage)}
        if call.body.get("return_token_ids"):
            ids = next(delta.prompt_token_ids for delta in deltas if delta.prompt_token_ids is not None)
            answer["prompt_token_ids"] = list(ids)
        return answer

    def _envelope(self, prefix: str, kind: str) -> dict[str, Any]:
        self._calls += 1
        return {"id": f"{prefix}-{self._calls:08x}", "object": kind, "created": 0, "model": self.engine.settings.model}

    def _check_model(self, call: Call) -> None:
        asked, served = call.body.get("model"), self.engine.settings.model
        if asked not in (None, served):
            raise _NotServed(f"The model `{asked}` does not exist. Valid aliases: {served}.", status_code=404)


class _NotServed(EngineRejected):
    """Answered with the parameter `model`, as the real server does."""


@dataclass(slots=True)
class _CallIds:
    """Stable ids for the tool calls of one answer, and which of them were sent."""

    stem: str
    sent: set[int] = field(default_factory=set)

    def of(self, index: int) -> str:
        return f"call-{self.stem}-{index}"


def _prompt_of(call: Call) -> Prompt:
    messages, tools = call.body.get("messages"), call.body.get("tools")
    if not isinstance(messages, list) or not messages:
        raise EngineRejected("messages: allowed is a list of 1 or more", status_code=400)
    return Prompt.of(messages, tools or ())


def _chat_request(call: Call) -> ChatRequest:
    body = call.body
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or _DEFAULT_MAX_TOKENS
    if body.get("n") not in (None, 1):
        raise EngineRejected("n: allowed here is 1", status_code=400)
    return ChatRequest(
        prompt=_prompt_of(call),
        max_tokens=int(limit),
        temperature=float(body.get("temperature") or 0.0),
        cache_salt=body.get("cache_salt"),
        tool_choice=body.get("tool_choice"),
        extra={key: value for key, value in body.items() if key not in _KNOWN_FIELDS},
    )


def _choice(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _delta_json(delta: ChatDelta, call_ids: _CallIds) -> dict[str, Any]:
    if delta.text is not None:
        return {"content": delta.text}
    if delta.reasoning is not None:
        return {"reasoning": delta.reasoning}
    if delta.tool_index is None:
        return {}
    piece: dict[str, Any] = {"index": delta.tool_index, "function": {}}
    if delta.tool_index not in call_ids.sent:
        call_ids.sent.add(delta.tool_index)
        piece |= {"id": call_ids.of(delta.tool_index), "type": "function"}
    if delta.tool_name is not None:
        piece["function"]["name"] = delta.tool_name
    if delta.tool_arguments is not None:
        piece["function"]["arguments"] = delta.tool_arguments
    return {"tool_calls": [piece]}


def _usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _error_answer(exc: EngineError) -> Answer:
    status = exc.status_code if isinstance(exc, EngineRejected | EngineFault) else 500
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    param = "max_tokens" if isinstance(exc, ContextOverflow) else None
    if isinstance(exc, _NotServed):
        kind, param = "NotFoundError", "model"
    return Answer(status, {"error": {"message": str(exc), "type": kind, "param": param, "code": status}})
