"""What observers and callbacks see of a call."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage

from pancake_langgraph._errors import (
    EngineUnavailable,
)
from pancake_langgraph._types import Usage
from pancake_langgraph.testing.wire_replies import Act, Reply, event, tool_delta
from pancake_langgraph.testing.wire_server import WireServer
from pancake_langgraph.wire.fields import MAX_FIELDS
from pancake_langgraph.wire.observer import CallObserver
from tests.contract.chat_model_wire import (
    RECORDING,
    ROLE,
    calls,
    model,
    ping,
)

# -- observers ------------------------------------------------------------------------------------------------------


class Watcher(BaseCallbackHandler):
    def __init__(self, extra: Mapping[str, Any] | None = None) -> None:
        self.extra = extra
        self.seen: list[tuple[Any, ...]] = []
        self.started: list[UUID] = []
        self.tokens: list[Any] = []

    def on_chat_model_start(self, *args: Any, run_id: UUID, **kwargs: Any) -> None:
        self.started.append(run_id)

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, **kwargs: Any) -> None:
        self.tokens.append(chunk)

    def on_wire_request(self, run_id: UUID, payload: Mapping[str, Any]) -> Mapping[str, Any] | None:
        self.seen.append(("request", run_id, payload["messages"][0]["content"]))
        return self.extra

    def on_wire_first_piece(self, run_id: UUID, prompt_token_ids: tuple[int, ...] | None) -> None:
        self.seen.append(("first", run_id, prompt_token_ids))

    def on_wire_tool_name(self, run_id: UUID, tool_name: str) -> None:
        self.seen.append(("tool", run_id, tool_name))

    def on_wire_end(self, run_id: UUID, usage: Usage | None, finish_reason: str | None) -> None:
        self.seen.append(("end", run_id, usage, finish_reason))


async def run_way(chat: Any, way: str, config: Any) -> None:
    if way == "invoke":
        chat.invoke("hi", config)
    elif way == "stream":
        list(chat.stream("hi", config))
    elif way == "ainvoke":
        await chat.ainvoke("hi", config)
    elif way == "astream":
        async for _ in chat.astream("hi", config):
            pass
    else:
        list(chat.stream_events("hi", config, version="v3"))


WAYS = ["invoke", "stream", "ainvoke", "astream", "events"]


@pytest.mark.parametrize("way", WAYS)
async def test_an_observer_sees_each_event_once_whatever_way_the_call_is_made(way: str) -> None:
    watcher = Watcher({"return_token_ids": True})
    assert isinstance(watcher, CallObserver)
    named = RECORDING.reply("tool_required")
    with WireServer([named, RECORDING.reply("chat_token_ids")]) as server:
        await run_way(model(server), way, {"callbacks": [watcher]})
        kinds = [entry[0] for entry in watcher.seen]
        assert kinds == ["request", "first", "tool", "end"]
        assert {entry[1] for entry in watcher.seen} == set(watcher.started)
        assert watcher.seen[2][2] == "get_weather"
        assert watcher.seen[3][2].prompt_tokens == 37
        assert server.chats[0].body["return_token_ids"] is True
        watcher.seen.clear()
        await run_way(model(server), way, {"callbacks": [watcher]})
    ids = watcher.seen[1][2]
    assert ids is not None
    assert len(ids) == 37


@pytest.mark.parametrize("way", WAYS)
async def test_an_observer_sees_the_end_of_a_failed_call(way: str) -> None:
    watcher = Watcher()
    with WireServer([Reply.stream(ROLE, Act.CUT)]) as server, contextlib.suppress(EngineUnavailable):
        await run_way(model(server), way, {"callbacks": [watcher]})
    assert watcher.seen[-1][0] == "end"
    assert watcher.seen[-1][2:] == (None, None)


async def test_an_observer_sees_the_end_of_a_cancelled_call() -> None:
    watcher = Watcher()
    with WireServer([Reply.stream(ROLE, Act.HANG)]) as server:
        task = asyncio.create_task(model(server).ainvoke("hi", {"callbacks": [watcher]}))
        await asyncio.to_thread(server.wait_for, lambda: len(server.chats) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert watcher.seen[-1][2:] == (None, None)


def test_an_observer_that_raises_does_no_harm() -> None:
    class Broken(Watcher):
        def on_wire_request(self, run_id: UUID, payload: Mapping[str, Any]) -> Mapping[str, Any] | None:
            raise RuntimeError("broken")

    good = Watcher({"priority": 7})
    with WireServer() as server:
        assert model(server).invoke("hi", {"callbacks": [Broken(), good]}).content == "Hello there."
        assert server.chats[0].body["priority"] == 7
    assert good.seen[-1][0] == "end"


async def answer_ended_s(server: WireServer) -> float | None:
    """When the server's thread had sent the last byte: it may learn that after the client has read it."""
    await asyncio.to_thread(server.wait_for, lambda: server.chats[0].ended_s is not None)
    return server.chats[0].ended_s


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
async def test_callbacks_see_the_tool_name_while_the_answer_is_still_coming(way: str) -> None:
    named_at: list[float] = []

    class Timed(Watcher):
        def on_llm_new_token(self, token: Any, *, chunk: Any = None, **kwargs: Any) -> None:
            if any(piece["name"] for piece in chunk.message.tool_call_chunks):
                named_at.append(time.monotonic())

    steps = calls([tool_delta("", call_id="a", name="ping")], [tool_delta("{}")])
    with WireServer([Reply.stream(*steps[:2], 0.03, *steps[2:])]) as server:
        await run_way(model(server).bind_tools([ping]), way, {"callbacks": [Timed()]})
        ended_s = await answer_ended_s(server)
    assert ended_s is not None
    assert len(named_at) == 1
    assert named_at[0] < ended_s


async def test_the_message_stream_of_a_graph_shows_each_message_once() -> None:
    from langgraph.graph import MessagesState, StateGraph

    watcher = Watcher()
    with WireServer() as server:
        chat = model(server)

        async def talk(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await chat.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState).add_node("talk", talk).add_edge("__start__", "talk").compile()
        streamed = [
            part
            async for part, _ in graph.astream(
                {"messages": [HumanMessage("hi")]}, {"callbacks": [watcher]}, stream_mode="messages"
            )
        ]
    assert "".join(str(part.content) for part in streamed) == "Hello there."
    assert len({part.id for part in streamed}) == 1
    assert [entry[0] for entry in watcher.seen] == ["request", "first", "end"]


class FieldWatcher(Watcher):
    def on_wire_field(self, run_id: UUID, tool: str, field: str, value: str) -> None:
        self.seen.append(("field", run_id, tool, field, value))


@pytest.mark.parametrize("way", ["invoke", "astream"])
async def test_an_observer_sees_an_argument_as_soon_as_it_is_written(way: str) -> None:
    told_at: list[float] = []

    class Timed(FieldWatcher):
        def on_wire_field(self, *args: Any) -> None:
            super().on_wire_field(*args)
            told_at.append(time.monotonic())

    watcher = Timed()
    steps = calls(
        [tool_delta("", call_id="a", name="ping")],
        [tool_delta('{"kind": "wri')],
        [tool_delta('ter", "text": "')],
        [tool_delta('long", "n": 3}')],
    )
    with WireServer([Reply.stream(*steps[:4], 0.03, *steps[4:])]) as server:
        await run_way(model(server).bind_tools([ping]), way, {"callbacks": [watcher]})
        ended_s = await answer_ended_s(server)
    fields = [entry[2:] for entry in watcher.seen if entry[0] == "field"]
    assert fields == [("ping", "kind", "writer"), ("ping", "text", "long")]
    assert [entry[0] for entry in watcher.seen] == ["request", "first", "tool", "field", "field", "end"]
    assert ended_s is not None
    assert told_at[0] < ended_s


async def test_an_observer_sees_the_fields_of_an_answer_that_is_an_object() -> None:
    watcher = FieldWatcher()
    pieces = ('{"ne', 'xt": "wri', 'ter", "sure": true', "}")
    steps = [event({"content": piece}) for piece in pieces]
    with WireServer([Reply.stream(ROLE, *steps, event({}, finish_reason="stop"))]) as server:
        await run_way(model(server), "ainvoke", {"callbacks": [watcher]})
    fields = [entry[2:] for entry in watcher.seen if entry[0] == "field"]
    assert fields == [("", "next", "writer"), ("", "sure", "true")]


def test_only_a_few_fields_of_one_answer_are_told_whatever_it_holds() -> None:
    watcher = FieldWatcher()
    steps = calls(
        *[[tool_delta("", index=n, call_id=f"c{n}", name="ping")] for n in range(20)],
        *[[tool_delta('{"a": "1", "b": "2"}', index=n)] for n in range(20)],
    )
    with WireServer([Reply.stream(*steps)]) as server:
        model(server).bind_tools([ping]).invoke("hi", {"callbacks": [watcher]})
    assert len([entry for entry in watcher.seen if entry[0] == "field"]) == MAX_FIELDS


class DraftWatcher(Watcher):
    def __init__(self, *wanted: str) -> None:
        super().__init__()
        self.wanted = frozenset(wanted)

    def wanted_wire_drafts(self, run_id: UUID) -> frozenset[str]:
        self.seen.append(("asked", run_id))
        return self.wanted

    def on_wire_draft(self, run_id: UUID, tool: str, text: str) -> None:
        self.seen.append(("draft", run_id, tool, text))


@pytest.mark.parametrize("way", ["invoke", "astream"])
async def test_an_observer_sees_the_first_words_of_the_arguments_it_asked_for(way: str) -> None:
    watcher, other = DraftWatcher("ping"), DraftWatcher()
    steps = calls(
        [tool_delta("", call_id="a", name="ping")],
        [tool_delta('{"query": "where')],
        [tool_delta(" is the")],
        [tool_delta(' key now"}')],
        [tool_delta("", index=1, call_id="b", name="pong")],
        [tool_delta('{"query": "one two three four"}', index=1)],
    )
    with WireServer([Reply.stream(*steps)]) as server:
        await run_way(model(server).bind_tools([ping]), way, {"callbacks": [watcher, other]})
    drafts = [entry[2:] for entry in watcher.seen if entry[0] == "draft"]
    assert drafts == [("ping", "where is"), ("ping", "where is the key now")]
    kinds = [entry[0] for entry in watcher.seen]
    assert kinds == ["request", "asked", "first", "tool", "draft", "draft", "tool", "end"]
    assert {entry[1] for entry in watcher.seen} == set(watcher.started)


async def test_an_observer_sees_the_first_words_of_an_answer() -> None:
    watcher = DraftWatcher("")
    steps = [event({"content": f"w{number} "}) for number in range(5)]
    with WireServer([Reply.stream(ROLE, *steps, event({}, finish_reason="stop"))]) as server:
        await run_way(model(server), "ainvoke", {"callbacks": [watcher]})
    assert [entry[2:] for entry in watcher.seen if entry[0] == "draft"] == [("", "w0 w1"), ("", "w0 w1 w2 w3")]


@pytest.mark.parametrize("wanted", [None, ["ping"], 3])
def test_an_observer_that_asks_for_nonsense_is_told_nothing(wanted: Any) -> None:
    watcher = DraftWatcher()
    watcher.wanted = wanted
    with WireServer() as server:
        assert model(server).invoke("hi", {"callbacks": [watcher]}).content == "Hello there."
    assert [entry[0] for entry in watcher.seen] == ["request", "asked", "first", "end"]
