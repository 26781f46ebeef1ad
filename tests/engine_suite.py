"""What every engine adapter must do, whatever is behind it.  Test modules bind it to adapters.

A subject's capabilities decide which half of a statement is tested: that the adapter does it, or that it refuses with
the right error.  Nothing is skipped.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace

import pytest

from pancake_langgraph._errors import ContextOverflow, Unsupported
from pancake_langgraph._types import HintState, HintVerb, Prompt, TokenPrefix
from pancake_langgraph.engines.base import Capabilities, ChatDelta, ChatRequest, Engine, ReportsEvictions, Residency
from pancake_langgraph.engines.pool_hints import HintAnswer, HoldHint, PoolHints, RetireHint

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
_WORDS = ("river", "stone", "garden", "window", "letter", "market", "winter", "copper", "silver", "bridge", "harbor")
#: KV events travel beside the answer; this is how long they may take.
_EVENT_WAIT_S = 5.0


def prompt_of(seed: int, words: int = 120, *, tools: bool = False) -> Prompt:
    """Return a prompt that no other seed shares a block with."""
    draw = random.Random(seed)
    text = " ".join(draw.choices(_WORDS, k=words))
    messages = [{"role": "system", "content": f"Agent {seed}. {text}"}, {"role": "user", "content": "Say hi."}]
    return Prompt.of(messages, [WEATHER] if tools else [])


async def collect(engine: Engine, request: ChatRequest) -> list[ChatDelta]:
    """Return all pieces of one answer."""
    async with asyncio.timeout(120):
        return [delta async for delta in engine.chat(request)]


async def settled(
    engine: Engine, prefix: TokenPrefix, *, known: bool = True, resident_tokens: int | None = None
) -> Residency:
    """Return the residency as soon as the events have told what is expected."""
    async with asyncio.timeout(_EVENT_WAIT_S):
        while True:
            found = await engine.residency(prefix)
            if found.known == known and resident_tokens in (None, found.resident_tokens):
                return found
            await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Subject:
    """One opened adapter, what it said it can do, and whether tools can be forced on it."""

    engine: Engine
    can: Capabilities
    answers_with_text: bool = True


class EngineContract:
    """Bind it with a fixture `engine` that yields a fresh adapter, not yet opened."""

    @pytest.fixture
    async def subject(self, engine: Engine) -> AsyncIterator[Subject]:
        await engine.open()
        yield Subject(engine, await engine.probe(), answers_with_text=engine.name != "null")
        await engine.close()

    async def test_is_an_engine_whose_open_and_close_may_be_repeated(self, engine: Engine) -> None:
        assert isinstance(engine, Engine)
        await engine.open()
        await engine.open()
        await engine.close()
        await engine.close()

    async def test_probe_says_the_same_twice(self, subject: Subject) -> None:
        assert await subject.engine.probe() == subject.can
        assert subject.can.engine

    async def test_an_answer_ends_with_one_reason_and_usage_comes_last_at_most_once(self, subject: Subject) -> None:
        deltas = await collect(subject.engine, ChatRequest(prompt_of(1), max_tokens=6))
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] in (["stop"], ["length"])
        with_usage = [delta for delta in deltas if delta.usage is not None]
        assert with_usage == ([deltas[-1]] if subject.answers_with_text else [])
        if subject.answers_with_text:
            assert "".join(delta.text or "" for delta in deltas)
            usage = deltas[-1].usage
            assert usage is not None
            assert 0 < usage.completion_tokens <= 6 < usage.prompt_tokens

    async def test_the_output_limit_is_kept_and_named(self, subject: Subject) -> None:
        deltas = await collect(subject.engine, ChatRequest(prompt_of(1), max_tokens=1))
        reason = next(delta.finish_reason for delta in deltas if delta.finish_reason)
        assert reason == ("length" if subject.answers_with_text else "stop")

    async def test_greedy_answers_repeat_at_the_same_cached_length(self, subject: Subject) -> None:
        request = ChatRequest(prompt_of(2), max_tokens=5)
        await collect(subject.engine, request)
        answers = [await collect(subject.engine, request) for _ in range(2)]
        first, second = ("".join(delta.text or "" for delta in deltas) for deltas in answers)
        assert first == second

    async def test_a_forced_tool_is_named_before_its_arguments(self, subject: Subject) -> None:
        choice = {"type": "function", "function": {"name": "weather"}}
        request = ChatRequest(prompt_of(3, tools=True), max_tokens=64, tool_choice="required")
        if not subject.answers_with_text:
            deltas = await collect(subject.engine, request)
            assert all(delta.tool_name is None for delta in deltas)
            return
        for forced in ("required", choice):
            deltas = await collect(subject.engine, replace(request, tool_choice=forced))
            pieces = [delta for delta in deltas if delta.tool_index is not None]
            assert pieces[0].tool_name == "weather"
            assert [delta.tool_name for delta in pieces].count("weather") == 1
            arguments = "".join(delta.tool_arguments or "" for delta in pieces)
            assert json.loads(arguments) == {"city": "Rome"}

    async def test_tokens_are_those_that_the_engine_reads(self, subject: Subject) -> None:
        prompt = prompt_of(4)
        if not subject.can.tokenizer:
            with pytest.raises(Unsupported):
                await subject.engine.tokenize(prompt, add_generation_prompt=True)
            return
        tokens = await subject.engine.tokenize(prompt, add_generation_prompt=True)
        without = await subject.engine.tokenize(prompt, add_generation_prompt=False)
        assert tokens[: len(without)] == without
        deltas = await collect(subject.engine, ChatRequest(prompt, max_tokens=1))
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.prompt_tokens == len(tokens)
        if subject.can.prompt_token_ids:
            assert deltas[0].prompt_token_ids == tokens

    async def test_a_warmed_prompt_is_read_from_the_cache(self, subject: Subject) -> None:
        prompt = prompt_of(5)
        if not subject.can.token_prompts:
            with pytest.raises(Unsupported):
                await subject.engine.warm(TokenPrefix((1, 2, 3)), priority=10)
            return
        tokens = await subject.engine.tokenize(prompt, add_generation_prompt=True)
        first = await subject.engine.warm(TokenPrefix(tokens), priority=10)
        second = await subject.engine.warm(TokenPrefix(tokens), priority=10)
        deltas = await collect(subject.engine, ChatRequest(prompt, max_tokens=1))
        assert first.prompt_tokens == second.prompt_tokens == len(tokens)
        assert first.elapsed_s >= 0
        usage = deltas[-1].usage
        assert usage is not None
        assert usage.cached_tokens == second.cached_tokens
        if (block := subject.can.block_size_tokens) is not None:
            assert second.cached_tokens == (len(tokens) - 1) // block * block > 0

    async def test_a_hint_on_the_pool_gets_one_answer_or_is_ignored(self, subject: Subject) -> None:
        block = subject.can.block_size_tokens
        if not subject.can.token_prompts or block is None:
            assert not subject.can.pool_hints
            return
        tokens = await subject.engine.tokenize(prompt_of(12), add_generation_prompt=True)
        edge = len(tokens) // block * block
        hold = PoolHints(hold=HoldHint("suite-1", edge, 30.0, 50))
        report = await subject.engine.warm(TokenPrefix(tokens), priority=10, hints=hold)
        if not subject.can.pool_hints:
            assert report.answers == ()
            return
        assert report.answers == (HintAnswer(HintVerb.HOLD, "suite-1", HintState.ACCEPTED, edge),)
        ends = PoolHints(release=("suite-1", "never"), retire=(RetireHint("suite-1"), RetireHint("none")))
        report = await subject.engine.warm(TokenPrefix(tokens[:5]), priority=10, hints=ends)
        assert [(answer.hint_id, answer.verb, answer.state) for answer in report.answers] == [
            ("suite-1", HintVerb.RELEASE, HintState.ACCEPTED),
            ("never", HintVerb.RELEASE, HintState.MISSING),
            ("suite-1", HintVerb.RETIRE, HintState.ACCEPTED),
            ("none", HintVerb.RETIRE, HintState.MISSING),
        ]
        more = PoolHints(hold=HoldHint("suite-2", edge + block, 30.0, 50))
        report = await subject.engine.warm(TokenPrefix(tokens[:edge]), priority=10, hints=more)
        assert report.answers == (HintAnswer(HintVerb.HOLD, "suite-2", HintState.CLIPPED, edge),)
        await subject.engine.warm(TokenPrefix(tokens), priority=10, hints=PoolHints(release=("suite-2",)))

    async def test_a_salt_keeps_cache_entries_apart(self, subject: Subject) -> None:
        if not subject.can.cache_salt:
            with pytest.raises(Unsupported):
                await subject.engine.warm(TokenPrefix((1, 2, 3), "a"), priority=0)
            if subject.answers_with_text:  # an answer from a shared cache is not what was asked for either
                with pytest.raises(Unsupported):
                    await collect(subject.engine, ChatRequest(prompt_of(6), max_tokens=1, cache_salt="a"))
            return
        tokens = await subject.engine.tokenize(prompt_of(6), add_generation_prompt=True)
        hits = [
            (await subject.engine.warm(TokenPrefix(tokens, salt), priority=0)).cached_tokens
            for salt in ("a", "a", "b", "b", None)
        ]
        whole = hits[1]
        assert whole
        assert hits == [0, whole, 0, whole, 0]

    async def test_residency_agrees_with_the_next_hit(self, subject: Subject) -> None:
        engine, block = subject.engine, subject.can.block_size_tokens
        if not subject.can.kv_events or block is None:
            assert (await engine.residency(TokenPrefix((1, 2, 3)))).known is False
            return
        tokens = await engine.tokenize(prompt_of(7), add_generation_prompt=True)
        before = await settled(engine, TokenPrefix(tokens, "r"), known=True)
        assert before.resident_tokens == 0
        await engine.warm(TokenPrefix(tokens, "r"), priority=0)
        expected = len(tokens) // block * block
        after = await settled(engine, TokenPrefix(tokens, "r"), resident_tokens=expected)
        assert after.allocated_tokens - before.allocated_tokens >= expected
        assert (await engine.residency(TokenPrefix(tokens))).resident_tokens == 0
        assert (await engine.residency(TokenPrefix((*tokens[:block], 5, *tokens), "r"))).resident_tokens == block
        hit = (await engine.warm(TokenPrefix(tokens, "r"), priority=0)).cached_tokens
        assert hit == (len(tokens) - 1) // block * block

    async def test_listeners_hear_of_a_changed_pool(self, subject: Subject) -> None:
        heard = asyncio.Event()
        if not isinstance(subject.engine, ReportsEvictions):
            assert not subject.can.kv_events
            return
        subject.engine.add_residency_listener(heard.set)
        if subject.can.kv_events:
            tokens = await subject.engine.tokenize(prompt_of(8), add_generation_prompt=True)
            await subject.engine.warm(TokenPrefix(tokens, "listen"), priority=0)
            async with asyncio.timeout(_EVENT_WAIT_S):
                await heard.wait()

    async def test_a_prompt_beyond_the_window_is_a_context_overflow(self, subject: Subject) -> None:
        window = subject.can.max_model_len_tokens
        if window is None:
            assert not subject.can.token_prompts
            return
        with pytest.raises(ContextOverflow):
            await collect(subject.engine, ChatRequest(prompt_of(9), max_tokens=window * 2))
        with pytest.raises(ContextOverflow):
            await subject.engine.warm(TokenPrefix((200,) * (window + 1)), priority=0)

    async def test_an_abandoned_answer_leaves_the_engine_usable(self, subject: Subject) -> None:
        async with aclosing(subject.engine.chat(ChatRequest(prompt_of(10), max_tokens=30))) as deltas:
            await anext(deltas)
        deltas_after = await collect(subject.engine, ChatRequest(prompt_of(10), max_tokens=2))
        assert any(delta.finish_reason for delta in deltas_after)

    async def test_a_cancelled_warm_up_is_counted_and_leaves_the_engine_usable(self, subject: Subject) -> None:
        if not subject.can.token_prompts:
            return await self.test_an_abandoned_answer_leaves_the_engine_usable(subject)
        tokens = await subject.engine.tokenize(prompt_of(11, words=400), add_generation_prompt=True)
        task = asyncio.create_task(subject.engine.warm(TokenPrefix(tokens), priority=10))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        report = await subject.engine.warm(TokenPrefix(tokens), priority=10)
        assert report.prompt_tokens == len(tokens)
        numbers = await subject.engine.statistics()
        assert (numbers.warms, numbers.warms_cancelled) == (2, 1)
        return None

    async def test_parallel_answers_do_not_mix(self, subject: Subject) -> None:
        requests = [ChatRequest(prompt_of(20 + k), max_tokens=4) for k in range(3)]
        for request in requests:
            await collect(subject.engine, request)
        alone = [await collect(subject.engine, request) for request in requests]
        together = await asyncio.gather(*(collect(subject.engine, request) for request in requests))
        for one, other in zip(alone, together, strict=True):
            assert [d.usage for d in one if d.usage] == [d.usage for d in other if d.usage]
            assert [d.prompt_token_ids for d in one if d.prompt_token_ids] == [
                d.prompt_token_ids for d in other if d.prompt_token_ids
            ]

    async def test_statistics_and_residency_never_raise(self, subject: Subject) -> None:
        await collect(subject.engine, ChatRequest(prompt_of(1), max_tokens=1))
        assert (await subject.engine.statistics()).chats == 1
        await subject.engine.close()
        assert (await subject.engine.statistics()).chats == 1
        await subject.engine.residency(TokenPrefix(()))
