"""The HTTP adapters against servers that misbehave, and what they send."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import pytest

from pancake_langgraph._errors import (
    ContextOverflow,
    EngineError,
    EngineFault,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    MalformedStream,
    ModelNotFound,
    Unsupported,
)
from pancake_langgraph._types import Prompt, TokenPrefix
from pancake_langgraph.engines.base import ChatDelta, ChatRequest
from pancake_langgraph.engines.openai import OpenAIEngine
from pancake_langgraph.engines.vllm import VllmEngine
from pancake_langgraph.testing._http_server import Answer, Call, LoopbackServer
from pancake_langgraph.testing.fake_server import FakeEngineServer

REQUEST = ChatRequest(Prompt.of([{"role": "user", "content": "a very secret question"}]), max_tokens=5)


class Stub:
    """A model server that says what it was told to say."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.answers: dict[str, Answer] = {
            "/v1/models": Answer(payload={"object": "list", "data": [{"id": "m"}]}),
        }
        self.chunks: list[str] = []
        self.server = LoopbackServer(self.handle)

    async def handle(self, call: Call) -> Answer:
        self.calls.append(call)
        if call.path == "/v1/chat/completions" and call.path not in self.answers:
            return Answer(stream=self._stream())
        return self.answers.get(call.path, Answer(404, {"detail": "Not Found"}))

    async def _stream(self) -> AsyncIterator[str]:
        for chunk in self.chunks:
            yield chunk

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}/v1"


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()
    made.server.start()
    yield made
    made.server.stop()


@pytest.fixture
async def engine(stub: Stub) -> AsyncIterator[OpenAIEngine]:
    made = OpenAIEngine(stub.base_url, deadline_s=5.0)
    yield made
    await made.close()


def chunk(delta: dict | None = None, finish: str | None = None, **more) -> str:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return json.dumps({"id": "x", "choices": choices, **more})


def call_piece(**fields) -> dict:
    function = {key: fields.pop(key) for key in ("name", "arguments") if key in fields}
    return {"tool_calls": [{**fields, "function": function}]}


async def collect(engine: OpenAIEngine, request: ChatRequest = REQUEST) -> list[ChatDelta]:
    async with asyncio.timeout(20):
        return [delta async for delta in engine.chat(request)]


# -- shapes of streams ------------------------------------------------------------------------------------------------


async def test_unicode_line_separators_are_text(stub, engine):
    stub.chunks = [
        json.dumps({"choices": [{"delta": {"content": "a\u2028b\x85c"}, "finish_reason": "stop"}]}, ensure_ascii=False),
        "[DONE]",
    ]
    assert [delta.text for delta in await collect(engine)] == ["a\u2028b\x85c", None]


async def test_usage_in_every_chunk_is_told_once_and_last(stub, engine):
    numbers = [{"prompt_tokens": 7, "completion_tokens": k, "prompt_tokens_details": None} for k in (1, 2)]
    stub.chunks = [
        chunk({"content": "a"}, usage=numbers[0]),
        chunk({"content": "b"}, "stop", usage=numbers[1]),
        "[DONE]",
    ]
    deltas = await collect(engine)
    assert [delta.usage for delta in deltas[:-1]] == [None] * 3
    assert deltas[-1].usage is not None
    assert (deltas[-1].usage.completion_tokens, deltas[-1].usage.cached_tokens) == (2, None)


@pytest.mark.parametrize(
    ("details", "told"), [(None, None), ({}, None), ({"cached_tokens": None}, None), ({"cached_tokens": 0}, 0)]
)
async def test_unknown_cached_tokens_are_not_zero(stub, engine, details, told):
    usage = {"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": details}
    stub.chunks = [chunk({"content": "a"}, "stop"), chunk(None, usage=usage), "[DONE]"]
    deltas = await collect(engine)
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.cached_tokens is told


async def test_no_usage_is_no_piece(stub, engine):
    stub.chunks = [chunk({"content": "a"}, "stop"), "[DONE]"]
    assert all(delta.usage is None for delta in await collect(engine))


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_reasoning_is_told_apart_under_both_names(stub, engine, field):
    stub.chunks = [chunk({field: "hm"}), chunk({"content": "a"}, "stop"), "[DONE]"]
    deltas = await collect(engine)
    assert [(delta.reasoning, delta.text) for delta in deltas[:2]] == [("hm", None), (None, "a")]


@pytest.mark.parametrize(
    "pieces",
    [
        [
            call_piece(index=0, id="a", name="f", arguments='{"v":'),
            call_piece(index=1, id="b", name="g", arguments="{"),
            call_piece(index=0, arguments="30}"),
            call_piece(index=1, arguments="}"),
        ],
        [
            call_piece(id="a", name="f", arguments='{"v":'),
            call_piece(id="b", name="g", arguments="{"),
            call_piece(id="a", name="f", arguments="30}"),
            call_piece(id="b", arguments="}"),
        ],
        [
            call_piece(index=0, id="a", name="f"),
            call_piece(index=0, id="a", name="f", arguments='{"v":30}'),
            call_piece(index=1, id="b", name="g", arguments="{}"),
        ],
    ],
    ids=["by-index", "by-id", "name-repeated"],
)
async def test_interleaved_tool_calls_stay_apart(stub, engine, pieces):
    stub.chunks = [*(chunk(piece) for piece in pieces), chunk({}, "tool_calls"), "[DONE]"]
    calls: dict[int, list[str]] = {}
    for delta in await collect(engine):
        if delta.tool_index is not None:
            entry = calls.setdefault(delta.tool_index, ["", ""])
            entry[0] += delta.tool_name or ""
            entry[1] += delta.tool_arguments or ""
    assert calls == {0: ["f", '{"v":30}'], 1: ["g", "{}"]}


@pytest.mark.parametrize(
    "chunks",
    [
        ["{not json"],
        ["[1]"],
        [chunk(call_piece(index=0, name="f")), chunk(call_piece(index=0, name="g"))],
        [chunk(call_piece(id="a", name="f")), chunk(call_piece(id="b", name="g")), chunk(call_piece(arguments="{}"))],
        [json.dumps({"choices": 3})],
        [json.dumps({"choices": ["x"]})],
        [chunk({}, usage={"prompt_tokens": "many"})],
    ],
    ids=["json", "array", "two-names", "nobodys-piece", "choices", "choice", "usage"],
)
async def test_what_cannot_be_read_raises_and_is_not_guessed(stub, engine, chunks):
    stub.chunks = [*chunks, chunk({"content": "a"}, "stop"), "[DONE]"]
    with pytest.raises(MalformedStream) as failed:
        await collect(engine)
    assert "secret" not in str(failed.value)


async def test_a_stream_that_ends_early_is_an_unavailable_engine(stub, engine):
    stub.chunks = [chunk({"content": "a"})]
    with pytest.raises(EngineUnavailable):
        await collect(engine)


async def test_an_end_without_the_end_mark_is_enough_after_a_finish_reason(stub, engine):
    stub.chunks = [chunk({"content": "a"}, "stop")]
    assert [delta.finish_reason for delta in await collect(engine)] == [None, "stop"]


async def test_an_error_in_the_stream_is_typed(stub, engine):
    stub.chunks = [chunk({"content": "a"}), json.dumps({"error": {"message": "broken", "code": 500}})]
    with pytest.raises(EngineFault, match="broken"):
        await collect(engine)


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (400, "This model's maximum context length is 10 tokens. However, your prompt has 20.", ContextOverflow),
        (400, "bad field", EngineRejected),
        (401, "no key", EngineRejected),
        (404, "The model `m` does not exist.", ModelNotFound),
        (429, "slow down", EngineRejected),
        (500, "assertion", EngineFault),
        (503, "starting", EngineFault),
    ],
)
async def test_statuses_become_types(stub, engine, status, message, kind):
    stub.answers["/v1/chat/completions"] = Answer(status, {"error": {"message": message}})
    with pytest.raises(EngineError) as failed:
        await collect(engine)
    assert type(failed.value) is kind
    assert failed.value.status_code == status


# -- servers that are away or silent ----------------------------------------------------------------------------------


async def test_nobody_there_is_unavailable_and_names_the_address():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    engine = OpenAIEngine(f"http://127.0.0.1:{port}/v1")
    await engine.open()
    with pytest.raises(EngineUnavailable, match=str(port)):
        await engine.probe()
    with pytest.raises(EngineUnavailable):
        await collect(engine)
    assert (await engine.statistics()).running is None
    await engine.close()


async def test_a_port_that_never_answers_costs_no_more_than_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = OpenAIEngine(f"http://127.0.0.1:{silent.getsockname()[1]}", deadline_s=0.05)
        async with asyncio.timeout(10):
            with pytest.raises(EngineTimeout):
                await engine.probe()
            await engine.statistics()
        await engine.close()


async def test_a_stream_that_stalls_is_a_timeout(stub):
    async def stall() -> AsyncIterator[str]:
        yield chunk({"content": "a"})
        await asyncio.Event().wait()

    stub.answers["/v1/chat/completions"] = Answer(stream=stall())
    engine = OpenAIEngine(stub.base_url, deadline_s=0.2)
    with pytest.raises(EngineTimeout):
        await collect(engine)
    await engine.close()


async def _hung_up(server: FakeEngineServer, times: int) -> None:
    async with asyncio.timeout(5):
        while len(server.hang_ups) < times:
            await asyncio.sleep(0.01)


async def test_the_server_sees_abandoned_answers_and_cancelled_warm_ups():
    with FakeEngineServer(piece_delay_s=0.02) as server:
        engine = VllmEngine(server.base_url)
        await engine.probe()
        for _ in range(5):
            async with aclosing(engine.chat(REQUEST)) as deltas:
                await anext(deltas)
                await anext(deltas)
        await _hung_up(server, 5)
        assert set(server.hang_ups) == {"/v1/chat/completions"}
        server.on_engine(lambda fake: fake.hold("warm"))
        task = asyncio.create_task(engine.warm(TokenPrefix(tuple(range(300, 400))), priority=9))
        async with asyncio.timeout(5):
            while not (await engine.statistics()).running:
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _hung_up(server, 6)
        assert server.hang_ups[-1] == "/v1/completions"
        server.on_engine(lambda fake: fake.release("warm"))
        assert (await engine.warm(TokenPrefix((1, 2, 3)), priority=9)).prompt_tokens == 3
        async with asyncio.timeout(5):
            while (await engine.statistics()).running:
                await asyncio.sleep(0.01)
        await engine.close()


async def test_a_cancelled_chat_task_closes_its_socket():
    with FakeEngineServer() as server:
        server.on_engine(lambda fake: fake.hold("chat"))
        engine = OpenAIEngine(server.base_url)
        await engine.probe()
        task = asyncio.create_task(collect(engine))
        await asyncio.sleep(0.03)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _hung_up(server, 1)
        await engine.close()


# -- finding out ------------------------------------------------------------------------------------------------------


async def test_the_only_model_is_taken_and_several_must_be_named(stub, engine):
    assert (await engine.probe()).model == "m"
    stub.answers["/v1/models"] = Answer(payload={"data": [{"id": "m"}, {"id": "n"}]})
    with pytest.raises(ModelNotFound, match="'m', 'n'"):
        await engine.probe()
    named = OpenAIEngine(stub.base_url, model="n")
    assert (await named.probe()).model == "n"
    await named.close()


async def test_a_model_that_is_not_served_names_those_that_are(stub):
    engine = OpenAIEngine(stub.base_url, model="nope")
    with pytest.raises(ModelNotFound, match=r"'nope'.*'m'"):
        await engine.probe()
    await engine.close()


@pytest.mark.parametrize("payload", [{"data": "x"}, [], {"data": [{}]}])
async def test_something_else_on_that_port_is_said(stub, engine, payload):
    stub.answers["/v1/models"] = Answer(payload=payload)
    with pytest.raises(MalformedStream):
        await engine.probe()


async def test_a_server_without_tokenizer_can_chat_but_not_be_warmed(stub, engine):
    found = await engine.probe()
    assert (found.tokenizer, found.token_prompts, found.cache_salt, found.priority) == (False,) * 4
    assert any("tokenizer" in note for note in found.notes)
    with pytest.raises(Unsupported, match="/tokenize"):
        await engine.tokenize(REQUEST.prompt, add_generation_prompt=True)
    with pytest.raises(Unsupported):
        await engine.warm(TokenPrefix((1,)), priority=1)
    stub.chunks = [chunk({"content": "a"}, "stop"), "[DONE]"]
    assert await collect(engine)


async def test_the_generic_adapter_sends_no_private_fields():
    with FakeEngineServer() as server:
        seen = []
        inner = server.engine.warm

        async def spy(prefix, *, priority, hints=None):
            seen.append(priority)
            return await inner(prefix, priority=priority, hints=hints)

        server.engine.warm = spy
        for kind, priority in ((OpenAIEngine, 0), (VllmEngine, 7)):
            engine = kind(server.base_url)
            await engine.probe()
            seen.clear()
            await engine.warm(TokenPrefix((1, 2, 3)), priority=7)
            assert seen == [priority]
            await engine.close()


async def test_extra_fields_are_merged_last(stub, engine):
    stub.chunks = [chunk({"content": "a"}, "stop"), "[DONE]"]
    await collect(engine, ChatRequest(REQUEST.prompt, 5, extra={"temperature": 0.5, "seed": 3}))
    body = stub.calls[-1].body
    assert (body["temperature"], body["seed"], body["stream"], body["max_tokens"]) == (0.5, 3, True, 5)
    assert "tools" not in body


async def test_the_key_is_sent_and_never_shown(stub):
    engine = OpenAIEngine(stub.base_url, api_key="sk-hidden")
    stub.answers["/v1/models"] = Answer(401, {"error": {"message": "wrong key"}})
    with pytest.raises(EngineRejected) as refused:
        await engine.probe()
    assert "sk-hidden" not in str(refused.value) + repr(engine)
    await engine.close()


async def test_vllm_reads_the_pool_and_doubts_other_versions():
    for version, remarks in (("0.32.0", 0), ("0.41.1", 1), (None, 1)):
        with FakeEngineServer(version=version) as server:
            engine = VllmEngine(server.base_url)
            found = await engine.probe()
            assert (found.block_size_tokens, found.pool_tokens) == (16, 4096)
            assert found.prefix_caching
            assert found.cache_salt is (version is not None)
            assert sum("tested" in note for note in found.notes) == remarks
            await engine.close()


async def test_vllm_without_metrics_knows_no_pool():
    with FakeEngineServer(without_routes=("/metrics",)) as server:
        engine = VllmEngine(server.base_url)
        found = await engine.probe()
        assert (found.block_size_tokens, found.pool_tokens) == (None, None)
        assert found.token_prompts
        await engine.close()


async def test_a_missing_tool_parser_is_found():
    with FakeEngineServer() as server:

        def refuse(_):
            raise EngineRejected('"auto" tool choice requires --enable-auto-tool-choice', status_code=400)

        engine = VllmEngine(server.base_url)
        assert (await engine.probe()).tool_parser is True
        server.engine._answer = lambda request, tokens: refuse(request)
        assert (await engine.probe()).tool_parser is False
        await engine.close()


async def test_gauges_reach_the_statistics():
    with FakeEngineServer() as server:
        engine = OpenAIEngine(server.base_url)
        numbers = await engine.statistics()
        assert (numbers.running, numbers.waiting, numbers.pool_used_ratio) == (0, 0, 0.0)
        await engine.close()


@pytest.mark.parametrize(
    ("sources", "heard"),
    [
        ({"0": {"enable_kv_cache_events": True, "endpoint": "ipc:///nowhere/e", "replay_endpoint": None}}, True),
        ({"0": {"enable_kv_cache_events": True, "endpoint": "tcp://10.0.0.1:1", "replay_endpoint": None}}, False),
        ({"0": {"enable_kv_cache_events": False, "endpoint": "ipc:///nowhere/e"}}, False),
        ({"0": {}, "1": {}}, False),
        ([], False),
    ],
    ids=["socket-file", "another-machine", "off", "two-ranks", "nonsense"],
)
async def test_the_server_may_tell_where_its_events_are(stub, sources, heard):
    stub.answers["/kv_event_sources"] = Answer(payload=sources)
    stub.answers["/metrics"] = Answer(text="")
    engine = VllmEngine(stub.base_url)
    await engine.open()
    found = await engine.probe()
    assert found.kv_events is heard
    assert not (await engine.residency(TokenPrefix((1,)))).known
    await engine.close()


async def test_a_server_that_refuses_private_fields_still_takes_token_prompts(stub):
    async def handle(call: Call) -> Answer:
        if call.path == "/v1/completions" and "priority" in call.body:
            return Answer(400, {"error": {"message": "priority scheduling is not enabled"}})
        return await Stub.handle(stub, call)

    stub.answers["/tokenize"] = Answer(payload={"tokens": [1, 2, 3]})
    stub.answers["/v1/completions"] = Answer(payload={"choices": [{"text": ""}]})
    stub.server._handler = handle
    engine = VllmEngine(stub.base_url)
    found = await engine.probe()
    assert (found.token_prompts, found.priority) == (True, False)
    report = await engine.warm(TokenPrefix((1, 2)), priority=5)
    assert (report.prompt_tokens, report.cached_tokens) == (2, None)  # no usage: what was sent, and nothing known
    assert "priority" not in stub.calls[-1].body
    await engine.close()
