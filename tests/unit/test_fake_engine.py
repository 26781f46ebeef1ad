"""The fake engine: same words everywhere, time on the clock, and a pool that behaves as the real one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from pancake_langgraph._clock import MonotonicClock, VirtualClock
from pancake_langgraph._errors import ConfigError, ContextOverflow, EngineRejected, EngineUnavailable
from pancake_langgraph._types import Prompt, TokenPrefix
from pancake_langgraph.engines.base import ChatDelta, ChatRequest
from pancake_langgraph.engines.fake import FakeAnswer, FakeEngine, FakeEngineSettings, FakeToolCall
from pancake_langgraph.engines.residency import PoolIndex

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}, "deep": {"$ref": "#/$defs/D"}},
            "$defs": {"D": {"type": "object", "properties": {"on": {"type": "boolean"}}}},
        },
    },
}


def prompt(*texts: str, tools: bool = False) -> Prompt:
    roles = ("system", "user", "assistant")
    messages = [{"role": roles[min(k, 1)], "content": text} for k, text in enumerate(texts)]
    return Prompt.of(messages, [TOOL] if tools else [])


async def answer(engine: FakeEngine, request: ChatRequest) -> list[ChatDelta]:
    return [delta async for delta in engine.chat(request)]


def text(deltas: list[ChatDelta]) -> str:
    return "".join(delta.text or "" for delta in deltas)


def engine(**settings) -> FakeEngine:
    return FakeEngine(FakeEngineSettings(**settings), VirtualClock())


async def test_the_answer_depends_on_nothing_but_the_prompt():
    first = await answer(engine(), ChatRequest(prompt("a", "b"), max_tokens=50))
    again = await answer(engine(), ChatRequest(prompt("a", "b"), max_tokens=50))
    other = await answer(engine(), ChatRequest(prompt("a", "c"), max_tokens=50))
    assert text(first) == text(again) != text(other)
    assert len(text(first).split()) == 8


def test_tokens_are_the_same_in_every_process():
    code = "from pancake_langgraph.engines.fake_text import tokens_of; print(tokens_of('some words, here'))"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


async def test_a_longer_conversation_only_appends_to_what_was_read_and_written():
    fake = engine(script={"find it": FakeAnswer("Let me look.", (FakeToolCall("search", {"query": "x"}),))})
    asked = prompt("You search.", "find it", tools=True)
    deltas = await answer(fake, ChatRequest(asked, max_tokens=100))
    read = await fake.tokenize(asked, add_generation_prompt=True)
    arguments = "".join(delta.tool_arguments or "" for delta in deltas)
    function = {"name": "search", "arguments": json.dumps(json.loads(arguments))}
    turn = {
        "role": "assistant",
        "content": text(deltas),
        "tool_calls": [{"id": "any", "type": "function", "function": function}],
    }
    longer = Prompt((*asked.messages, turn, {"role": "tool", "content": "found", "tool_call_id": "any"}), asked.tools)
    rendered = await fake.tokenize(longer, add_generation_prompt=True)
    assert rendered[: len(read)] == read
    usage = deltas[-1].usage
    assert usage is not None
    again = await answer(fake, ChatRequest(longer, max_tokens=4))
    block = fake.settings.block_size_tokens
    # What the answer wrote is in the pool too, but for its newest token.
    assert again[-1].usage.cached_tokens == (len(read) + usage.completion_tokens - 1) // block * block


async def test_a_script_speaks_thinks_and_calls_in_that_order():
    script = {"go": FakeAnswer("Text.", (FakeToolCall("search", {"query": "a"}), FakeToolCall("search")), "Hm.")}
    deltas = await answer(engine(script=script), ChatRequest(prompt("s", "go", tools=True), max_tokens=100))
    kinds = [
        "think" if d.reasoning else "text" if d.text else f"call{d.tool_index}" if d.tool_index is not None else "end"
        for d in deltas[1:]
    ]
    assert [kind for k, kind in enumerate(kinds) if k == 0 or kinds[k - 1] != kind] == [
        "think",
        "text",
        "call0",
        "call1",
        "end",
    ]
    assert [d.tool_name for d in deltas if d.tool_name] == ["search", "search"]
    assert next(d for d in deltas if d.tool_index == 0).tool_arguments is None
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["tool_calls"]


async def test_a_strict_script_refuses_what_it_does_not_know():
    fake = engine(script={"known": "yes"}, strict_script=True)
    assert text(await answer(fake, ChatRequest(prompt("s", "known"), max_tokens=9))) == "yes"
    with pytest.raises(EngineRejected, match="no answer") as refused:
        await answer(fake, ChatRequest(prompt("s", "a secret"), max_tokens=9))
    assert "a secret" not in str(refused.value)


async def test_a_script_may_be_a_function_of_the_prompt():
    fake = engine(script=lambda asked: f"{len(asked.messages)} messages")
    assert text(await answer(fake, ChatRequest(prompt("s", "u"), max_tokens=9))) == "2 messages"


async def test_forced_tools_get_arguments_that_fit_their_schema():
    for choice in ("required", {"type": "function", "function": {"name": "search"}}):
        request = ChatRequest(prompt("s", "u", tools=True), max_tokens=100, tool_choice=choice)
        deltas = await answer(engine(), request)
        arguments = json.loads("".join(delta.tool_arguments or "" for delta in deltas))
        assert arguments == {"query": "text", "limit": 1, "deep": {"on": True}}
    with pytest.raises(EngineRejected, match="tool_choice"):
        await answer(engine(), ChatRequest(prompt("s", "u"), max_tokens=9, tool_choice="required"))


async def test_no_tool_is_called_when_none_may_be():
    fake = engine(script={"go": FakeAnswer("x", (FakeToolCall("search"),))})
    deltas = await answer(fake, ChatRequest(prompt("s", "go", tools=True), max_tokens=99, tool_choice="none"))
    assert all(delta.tool_index is None for delta in deltas)
    assert text(deltas) == "x"


async def test_structured_output_fits_its_schema():
    schema = {"type": "object", "properties": {"n": {"type": "number"}, "tags": {"type": "array"}}}
    extra = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    deltas = await answer(engine(), ChatRequest(prompt("s", "u"), max_tokens=99, extra=extra))
    assert json.loads(text(deltas)) == {"n": 1.0, "tags": [{}]}


async def test_a_cut_tool_call_ends_with_length():
    deltas = await answer(engine(), ChatRequest(prompt("s", "u", tools=True), max_tokens=5, tool_choice="required"))
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    with pytest.raises(json.JSONDecodeError):
        json.loads("".join(delta.tool_arguments or "" for delta in deltas))


async def test_time_is_what_was_computed():
    clock = VirtualClock(100.0)
    settings = FakeEngineSettings(prefill_s_per_token=0.001, decode_s_per_token=0.1, block_size_tokens=16)
    fake = FakeEngine(settings, clock)
    tokens = tuple(range(500, 600))
    cold = await fake.warm(TokenPrefix(tokens), priority=0)
    warm = await fake.warm(TokenPrefix(tokens), priority=0)
    assert cold.elapsed_s == pytest.approx(100 * 0.001 + 0.1)
    assert warm.elapsed_s == pytest.approx(4 * 0.001 + 0.1)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 96)
    first, second = fake.served
    assert (first.arrived_s, second.arrived_s) == (100.0, pytest.approx(100.2))
    assert second.first_token_s == pytest.approx(100.304)
    assert not first.cancelled


async def test_a_real_clock_is_read_and_never_moved():
    fake = FakeEngine(FakeEngineSettings(prefill_s_per_token=1000.0), MonotonicClock())
    assert (await fake.warm(TokenPrefix((1, 2, 3)), priority=0)).elapsed_s < 1000


async def test_the_least_recently_used_prefix_goes_first_and_its_tail_before_its_head():
    fake = engine(pool_blocks=8, block_size_tokens=4, max_model_len_tokens=32)
    a, b, c = (TokenPrefix(tuple(range(start, start + 13))) for start in (0, 100, 200))
    await fake.warm(a, priority=0)
    await fake.warm(b, priority=0)
    await fake.warm(a, priority=0)  # a is now the newer one
    await fake.warm(c, priority=0)
    resident = [(await fake.residency(prefix)).resident_tokens for prefix in (a, b, c)]
    assert resident == [12, 4, 12]  # a partial block's slot is reused before anything is evicted
    assert (await fake.residency(a)).allocated_tokens == 36


async def test_salts_do_not_share():
    fake = engine()
    tokens = tuple(range(200, 264))
    await fake.warm(TokenPrefix(tokens, "one"), priority=0)
    assert (await fake.residency(TokenPrefix(tokens, "one"))).resident_tokens == 64
    assert (await fake.residency(TokenPrefix(tokens, "two"))).resident_tokens == 0
    assert (await fake.residency(TokenPrefix(tokens))).resident_tokens == 0


async def test_a_whole_prompt_hit_still_computes_the_last_block():
    fake = engine(block_size_tokens=16)
    prefix = TokenPrefix(tuple(range(200, 232)))
    await fake.warm(prefix, priority=0)
    assert (await fake.residency(prefix)).resident_tokens == 32
    assert (await fake.warm(prefix, priority=0)).cached_tokens == 16


async def test_a_cancelled_warm_up_keeps_what_it_computed_and_frees_its_blocks():
    fake = engine(step_tokens=16, block_size_tokens=16)
    prefix = TokenPrefix(tuple(range(200, 328)))
    task = asyncio.create_task(fake.warm(prefix, priority=0))
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert 0 < (await fake.residency(prefix)).resident_tokens < 128
    numbers = await fake.statistics()
    assert (numbers.warms, numbers.warms_cancelled, numbers.running, numbers.waiting) == (1, 1, 0, 0)
    assert numbers.pool_used_ratio == 0.0
    assert fake.served[-1].cancelled


async def test_held_work_waits_and_goes_on():
    fake = engine()
    fake.hold("warm")
    task = asyncio.create_task(fake.warm(TokenPrefix((1, 2, 3)), priority=0))
    await asyncio.sleep(0.01)
    assert not task.done()
    assert (await fake.statistics()).running == 1
    await answer(fake, ChatRequest(prompt("s", "u"), max_tokens=2))
    fake.release("warm")
    assert (await task).prompt_tokens == 3


async def test_a_full_pool_lets_the_more_urgent_in_first():
    fake = engine(pool_blocks=4, block_size_tokens=4, max_model_len_tokens=16)
    fake.hold("warm")
    order = []

    async def warm(name: str, start: int, priority: int) -> None:
        await fake.warm(TokenPrefix(tuple(range(start, start + 12))), priority=priority)
        order.append(name)

    tasks = [asyncio.create_task(warm("first", 0, 0))]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(warm("later", 100, 9)), asyncio.create_task(warm("urgent", 200, 1))]
    await asyncio.sleep(0.01)
    numbers = await fake.statistics()
    assert (numbers.running, numbers.waiting) == (1, 2)
    fake.release("warm")
    await asyncio.gather(*tasks)
    assert order == ["first", "urgent", "later"]


async def test_a_waiting_request_may_be_cancelled():
    fake = engine(pool_blocks=4, block_size_tokens=4, max_model_len_tokens=16)
    fake.hold("warm")
    running = asyncio.create_task(fake.warm(TokenPrefix(tuple(range(12))), priority=0))
    waiting = asyncio.create_task(fake.warm(TokenPrefix(tuple(range(50, 62))), priority=0))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    fake.release("warm")
    await running
    assert (await fake.statistics()).waiting == 0
    assert len(fake.served) == 1


async def test_its_events_feed_an_index_that_agrees():
    fake = engine(pool_blocks=8, block_size_tokens=4, max_model_len_tokens=32)
    index, heard = PoolIndex(), []
    index.reset(complete=True)
    fake.add_event_sink(index.apply)
    fake.add_residency_listener(lambda: heard.append(1))
    prefixes = [TokenPrefix(tuple(range(k * 50, k * 50 + 14)), salt) for k in range(4) for salt in (None, "s")]
    for prefix in prefixes:
        await fake.warm(prefix, priority=0)
        for other in prefixes:
            told = index.resident_tokens(other.token_ids, other.cache_salt)
            assert told == (await fake.residency(other)).resident_tokens
    assert heard
    assert fake.clear_pool()
    assert index.num_blocks == 0


async def test_a_broken_engine_breaks_every_call_until_it_heals():
    fake = engine()
    fake.fail_with(EngineUnavailable("gone"))
    with pytest.raises(EngineUnavailable):
        await answer(fake, ChatRequest(prompt("s", "u"), max_tokens=2))
    with pytest.raises(EngineUnavailable):
        await fake.warm(TokenPrefix((1,)), priority=0)
    with pytest.raises(EngineUnavailable):
        await fake.probe()
    fake.fail_with(None)
    await fake.probe()


async def test_what_does_not_fit_is_refused():
    fake = engine(max_model_len_tokens=64)
    with pytest.raises(ContextOverflow, match="64"):
        await answer(fake, ChatRequest(prompt("s", "u"), max_tokens=64))
    with pytest.raises(EngineRejected, match="empty"):
        await fake.warm(TokenPrefix(()), priority=0)


@pytest.mark.parametrize(
    "settings", [{"block_size_tokens": 0}, {"pool_blocks": 2}, {"decode_s_per_token": -1.0}, {"step_tokens": 0}]
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ConfigError):
        FakeEngineSettings(**settings)
