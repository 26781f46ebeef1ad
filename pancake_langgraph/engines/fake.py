"""A deterministic engine in memory: tokenizer, template, tools, streams, and time and a KV pool that are modelled.

It never sleeps: on a `VirtualClock` prefill and decode move the clock, on any other clock they take no time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pancake_langgraph._clock import Clock, VirtualClock
from pancake_langgraph._errors import ConfigError, ContextOverflow, EngineError, EngineRejected
from pancake_langgraph._types import Prompt, TokenPrefix, Usage
from pancake_langgraph.engines import fake_text
from pancake_langgraph.engines.base import (
    Capabilities,
    ChatDelta,
    ChatRequest,
    EngineStatistics,
    Residency,
    WarmReport,
)
from pancake_langgraph.engines.fake_hints import FakePoolHints
from pancake_langgraph.engines.fake_pool import EventSink, LruBlockPool
from pancake_langgraph.engines.fake_schedule import FakeScheduler, ServedCall, Work
from pancake_langgraph.engines.fake_text import FakeAnswer, FakeToolCall
from pancake_langgraph.engines.pool_hints import PARAMS_FIELD, PoolHints, hints_from_wire

__all__ = ["FakeAnswer", "FakeEngine", "FakeEngineSettings", "FakeToolCall", "ServedCall"]

#: Either answers by the text of the last message, or a function of the prompt; `None` means "no answer for this".
Script = Mapping[str, FakeAnswer | str] | Callable[[Prompt], FakeAnswer | str | None]


@dataclass(frozen=True, slots=True)
class FakeEngineSettings:
    """What the fake engine is like.

    Attributes:
        model: Served model name.
        block_size_tokens: Tokens per block of the pool.
        pool_blocks: Blocks in the pool; it must hold one request of `max_model_len_tokens`.
        max_model_len_tokens: Longest prompt plus answer.
        step_tokens: Prompt tokens computed at a time; between steps others run and a warm-up can be cancelled.
        prefill_s_per_token: Modelled seconds per computed prompt token.
        decode_s_per_token: Modelled seconds per token of the answer.
        answer_words: Length of answers that no script gives.
        script: Scripted answers.
        strict_script: Whether a prompt without a scripted answer is refused.
        pool_hints: Whether hints on the pool are carried out.
        hold_cap_ratio: Share of the pool that hints may hold.
    """

    model: str = "fake"
    block_size_tokens: int = 16
    pool_blocks: int = 256
    max_model_len_tokens: int = 4096
    step_tokens: int = 256
    prefill_s_per_token: float = 0.001
    decode_s_per_token: float = 0.02
    answer_words: int = 8
    script: Script = field(default_factory=dict)
    strict_script: bool = False
    pool_hints: bool = False
    hold_cap_ratio: float = 0.5

    def __post_init__(self) -> None:
        """Check every range.

        Raises:
            ConfigError: if a value is out of range or the pool is too small.
        """
        for name in ("block_size_tokens", "pool_blocks", "max_model_len_tokens", "step_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}, allowed is 1 or more")
        if min(self.prefill_s_per_token, self.decode_s_per_token, self.answer_words) < 0:
            raise ConfigError("prefill_s_per_token, decode_s_per_token, answer_words: allowed is 0 or more")
        if self.pool_blocks * self.block_size_tokens < self.max_model_len_tokens:
            raise ConfigError(
                f"pool_blocks: got {self.pool_blocks}, allowed is enough for max_model_len_tokens "
                f"({-(-self.max_model_len_tokens // self.block_size_tokens)} blocks)"
            )


class FakeEngine:
    """Same prompt, same answer, in every process.  All methods belong to one event loop."""

    def __init__(self, settings: FakeEngineSettings | None = None, clock: Clock | None = None) -> None:
        """Start with an empty pool; without a clock a virtual one is made."""
        self.settings = settings if settings is not None else FakeEngineSettings()
        self.clock: Clock = clock if clock is not None else VirtualClock()
        self._pool = LruBlockPool(
            self.settings.pool_blocks, self.settings.block_size_tokens, on_events=self._pool_changed
        )
        self._scheduler = FakeScheduler(
            self._pool,
            self.clock,
            step_tokens=self.settings.step_tokens,
            prefill_s_per_token=self.settings.prefill_s_per_token,
            decode_s_per_token=self.settings.decode_s_per_token,
        )
        self._hints = (
            FakePoolHints(self._pool, self.clock, cap_ratio=self.settings.hold_cap_ratio)
            if self.settings.pool_hints
            else None
        )
        self._sinks: list[EventSink] = []
        self._listeners: list[Callable[[], None]] = []
        self._chats = self._warms = self._warms_cancelled = 0
        self._failure: EngineError | None = None

    @property
    def name(self) -> str:
        """The adapter's name."""
        return "fake"

    @property
    def served(self) -> Sequence[ServedCall]:
        """The latest requests that ended, oldest first."""
        return self._scheduler.served

    # -- for tests ------------------------------------------------------------------------------------------------

    def hold(self, work: Work) -> None:
        """Let requests of this kind stop before their next step, until `release`."""
        self._scheduler.hold(work)

    def release(self, work: Work) -> None:
        """Let held requests go on."""
        self._scheduler.release(work)

    def fail_with(self, error: EngineError | None) -> None:
        """Let every call raise `error` from now on; `None` heals the engine."""
        self._failure = error

    def clear_pool(self) -> bool:
        """Forget all prefixes, as the engine's reset does; false while a request runs."""
        return self._pool.clear()

    def add_event_sink(self, sink: EventSink) -> None:
        """Give `sink` each batch of KV events, in the wire form of the real engine."""
        self._sinks.append(sink)

    # -- the port -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def probe(self) -> Capabilities:
        """Return everything: this engine can do all that the port asks."""
        self._check_health()
        settings = self.settings
        return Capabilities(
            engine=self.name,
            version="1",
            model=settings.model,
            max_model_len_tokens=settings.max_model_len_tokens,
            block_size_tokens=settings.block_size_tokens,
            pool_tokens=settings.pool_blocks * settings.block_size_tokens,
            tokenizer=True,
            token_prompts=True,
            prompt_token_ids=True,
            priority=True,
            cache_salt=True,
            kv_events=True,
            pool_hints=settings.pool_hints,
            hold_cap_tokens=int(settings.pool_blocks * settings.hold_cap_ratio) * settings.block_size_tokens,
            tool_parser=True,
            prefix_caching=True,
        )

    async def tokenize(self, prompt: Prompt, *, add_generation_prompt: bool) -> tuple[int, ...]:
        """Render with the fake template."""
        self._check_health()
        return tuple(fake_text.render(prompt, add_generation_prompt=add_generation_prompt))

    async def chat(self, request: ChatRequest) -> AsyncIterator[ChatDelta]:
        """Stream one answer, a piece per token; the name of a tool comes before its arguments.

        Raises:
            ContextOverflow: if prompt and answer do not fit.
            EngineRejected: if the script is strict and has no answer, or a tool is forced that is not there.
        """
        self._check_health()
        self._chats += 1
        tokens = fake_text.render(request.prompt, add_generation_prompt=True)
        self._check_window(len(tokens), request.max_tokens)
        answer = self._answer(request, tokens)
        emissions = list(_emissions(answer))
        planned = min(request.max_tokens, sum(len(ids) for ids, _ in emissions))
        hints = hints_from_wire(request.extra.get(PARAMS_FIELD)) if self._hints is not None else None
        if self._hints is not None and hints is not None:
            self._hints.begin(hints)
        priority = int(request.extra.get("priority", 0))
        call = self._scheduler.call("chat", tokens, request.cache_salt, priority=priority, planned_tokens=planned)
        async with call:
            await call.prefill()
            yield ChatDelta(prompt_token_ids=tuple(tokens))
            for ids, delta in emissions:
                if not await call.decode(ids, limit=request.max_tokens):
                    reason = "length"
                    break
                if delta is not None:
                    yield delta
            else:
                reason = "tool_calls" if answer.tool_calls else "stop"
            call.complete = True
            if self._hints is not None and hints is not None:
                self._hints.end(hints, TokenPrefix(call.sequence, request.cache_salt))
            yield ChatDelta(finish_reason=reason)
            yield ChatDelta(usage=Usage(len(tokens), call.output_tokens, call.cached_tokens))

    @property
    def heard(self) -> tuple[PoolHints, ...]:
        """What carriers said of the pool, oldest first; nothing where hints are not carried out."""
        return tuple(self._hints.heard) if self._hints is not None else ()

    async def warm(self, prefix: TokenPrefix, *, priority: int, hints: PoolHints | None = None) -> WarmReport:
        """Read `prefix` step by step; a cancelled warm-up leaves the blocks it has computed.

        Raises:
            EngineRejected: if the prefix is empty.
            ContextOverflow: if it does not fit.
        """
        self._check_health()
        if not prefix.token_ids:
            raise EngineRejected("warm: got an empty prefix, allowed is 1 token or more", status_code=400)
        self._check_window(prefix.num_tokens, 1)
        self._warms += 1
        started_s = self.clock.now_s()
        answers = self._hints.begin(hints) if self._hints is not None and hints is not None else []
        tokens = list(prefix.token_ids)
        call = self._scheduler.call("warm", tokens, prefix.cache_salt, priority=priority, planned_tokens=1)
        try:
            async with call:
                await call.prefill()
                await call.decode([fake_text.SPECIAL["<end>"]], limit=1)
                call.complete = True
                if self._hints is not None and hints is not None:
                    answers += self._hints.end(hints, prefix)
        except asyncio.CancelledError:
            self._warms_cancelled += 1
            raise
        return WarmReport(prefix.num_tokens, call.cached_tokens, self.clock.now_s() - started_s, tuple(answers))

    async def residency(self, prefix: TokenPrefix) -> Residency:
        """Say exactly how many leading tokens are in the pool."""
        return Residency(
            known=True,
            resident_tokens=self._pool.resident_tokens(prefix.token_ids, prefix.cache_salt),
            allocated_tokens=self._pool.allocated_tokens,
        )

    async def statistics(self) -> EngineStatistics:
        """Return counters and gauges."""
        return EngineStatistics(
            chats=self._chats,
            warms=self._warms,
            warms_cancelled=self._warms_cancelled,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            pool_used_ratio=self._pool.used_ratio,
        )

    def add_residency_listener(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each change of the pool."""
        self._listeners.append(callback)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _check_health(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _check_window(self, prompt_tokens: int, max_tokens: int) -> None:
        window = self.settings.max_model_len_tokens
        if prompt_tokens + max_tokens > window:
            raise ContextOverflow(
                f"the maximum context length is {window} tokens, but the prompt has {prompt_tokens} tokens and "
                f"max_tokens={max_tokens} were asked for; shorten the prompt or lower max_tokens",
                status_code=400,
            )

    def _answer(self, request: ChatRequest, tokens: list[int]) -> FakeAnswer:
        script = self.settings.script
        if callable(script):
            found = script(request.prompt)
        else:
            messages = request.prompt.messages
            found = script.get(fake_text.text_of(messages[-1])) if messages else None
        if isinstance(found, str):
            found = FakeAnswer(found)
        if found is None and self.settings.strict_script:
            raise EngineRejected(
                f"script: no answer for a prompt of {len(request.prompt.messages)} messages; "
                "add one for the text of its last message",
                status_code=400,
            )
        if found is None:
            found = FakeAnswer(_structured(request) or fake_text.words_for(tokens, self.settings.answer_words))
        return _with_tool_choice(found, request)

    def _pool_changed(self, events: list[dict[str, Any]]) -> None:
        for sink in self._sinks:
            sink(events)
        for callback in self._listeners:
            callback()


def _emissions(answer: FakeAnswer) -> Iterator[tuple[list[int], ChatDelta | None]]:
    """Yield the tokens of an answer with what each group of them shows."""
    for piece in fake_text.pieces_of(answer.reasoning or ""):
        yield fake_text.tokens_of(piece), ChatDelta(reasoning=piece)
    for piece in fake_text.pieces_of(answer.text):
        yield fake_text.tokens_of(piece), ChatDelta(text=piece)
    for index, call in enumerate(answer.tool_calls):
        arguments = fake_text.canonical_json(dict(call.arguments))
        opening = [fake_text.SPECIAL["<call>"], *fake_text.tokens_of(call.name), fake_text.SPECIAL["<arguments>"]]
        yield opening, ChatDelta(tool_index=index, tool_name=call.name)
        for piece in fake_text.pieces_of(arguments):
            yield fake_text.tokens_of(piece), ChatDelta(tool_index=index, tool_arguments=piece)
    yield [fake_text.SPECIAL["<end>"]], None


def _structured(request: ChatRequest) -> str | None:
    """Return JSON that fits the schema that the request asks for, if it asks for one."""
    wanted = request.extra.get("response_format")
    if not isinstance(wanted, Mapping) or wanted.get("type") != "json_schema":
        return None
    schema = (wanted.get("json_schema") or {}).get("schema")
    return fake_text.canonical_json(fake_text.example_of(schema))


def _with_tool_choice(answer: FakeAnswer, request: ChatRequest) -> FakeAnswer:
    choice = request.tool_choice
    if choice in (None, "auto"):
        return answer
    if choice == "none":
        return FakeAnswer(answer.text, (), answer.reasoning)
    wanted = (choice.get("function") or {}).get("name") if isinstance(choice, Mapping) else None
    scripted = tuple(call for call in answer.tool_calls if wanted is None or call.name == wanted)
    if scripted:
        return FakeAnswer("", scripted, answer.reasoning)
    for tool in request.prompt.tools:
        function = tool.get("function") or {}
        if wanted is None or function.get("name") == wanted:
            arguments = fake_text.example_of(function.get("parameters"))
            return FakeAnswer("", (FakeToolCall(str(function.get("name")), arguments),), answer.reasoning)
    names = [(tool.get("function") or {}).get("name") for tool in request.prompt.tools]
    raise EngineRejected(f"tool_choice: got {wanted or choice!r}, allowed is one of {names}", status_code=400)
