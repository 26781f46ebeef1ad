"""What a saver tells a runtime: the next nodes, for sure, while siblings of the step still work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import SystemMessage
from langgraph.checkpoint.base import BaseCheckpointSaver, empty_checkpoint
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command

from pancake_langgraph import PancakeChatModel, PancakeSaver, attach
from pancake_langgraph._errors import ConfigError
from pancake_langgraph.checkpoint.listeners import Stored
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.engines.fake import FakeEngine, FakeEngineSettings
from pancake_langgraph.runtime import Runtime
from pancake_langgraph.saver import SaverStatistics, observe
from pancake_langgraph.testing.bridged_engine import BridgedEngine
from pancake_langgraph.testing.fake_server import FakeEngineServer

LONG = "a long context that only this agent reads " * 40


def chance(runtime: Runtime, node: str) -> float:
    """Return how probable the runtime holds it that `node` comes next."""
    return max((e.p_next for e in runtime._state.expectations if e.place.node == node), default=0.0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def build(server: FakeEngineServer, saver: BaseCheckpointSaver[Any], way: list[str], wait: Callable[[], Any]) -> Any:
    model = PancakeChatModel(model="fake", base_url=server.base_url, max_tokens=16)

    def speaker(name: str) -> Any:
        async def speak(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await model.ainvoke([SystemMessage(f"{name}: {LONG}"), *state["messages"]])]}

        return speak

    async def choose(state: MessagesState) -> Command[str]:
        return Command(goto=way[0])

    async def linger(state: MessagesState) -> dict[str, Any]:
        await wait()
        return {}

    builder = StateGraph(MessagesState)
    builder.add_node("choose", choose, destinations=("often", "seldom"))
    builder.add_node("linger", linger)
    builder.add_node("often", speaker("often"))
    builder.add_node("seldom", speaker("seldom"))
    builder.add_edge(START, "choose")
    builder.add_edge(START, "linger")
    return builder.compile(checkpointer=saver)


@pytest.mark.parametrize(
    ("make", "is_told"),
    [(PancakeSaver, True), (lambda: observe(InMemorySaver()), True), (InMemorySaver, False)],
    ids=["ours", "observed", "plain"],
)
async def test_a_node_that_is_stored_as_next_is_certain_while_its_step_still_runs(make: Any, is_told: bool) -> None:
    way = ["seldom"]
    engine = FakeEngine(FakeEngineSettings(pool_blocks=200, max_model_len_tokens=2000))
    with (
        FakeEngineServer(engine) as server,
        Runtime(RuntimeSettings(engine="fake"), engine=BridgedEngine(server)) as runtime,
    ):
        runtime.start()
        seen: list[float] = []

        async def wait() -> None:
            if runtime.statistics().calls == 5:
                if is_told:  # else it stays a guess, and too small a one
                    await until(lambda: chance(runtime, "seldom") == 1.0)
                assert await asyncio.to_thread(runtime.wait_idle)
                seen.append(chance(runtime, "seldom"))

        graph = attach(build(server, make(), way, wait), runtime=runtime)

        async def run(thread: str) -> None:
            await graph.ainvoke({"messages": [("user", "go")]}, {"configurable": {"thread_id": thread}})

        await run("first")
        way[0] = "often"
        for number in range(4):
            await run(f"often-{number}")
        way[0] = "seldom"
        await run("again")
        assert [p_next == 1.0 for p_next in seen] == [is_told]
        assert runtime.statistics().failed_signals == 0


async def test_a_closed_runtime_hears_no_more() -> None:
    saver = PancakeSaver()
    with FakeEngineServer(FakeEngine(FakeEngineSettings())) as server:
        runtime = Runtime(RuntimeSettings(engine="fake"), engine=BridgedEngine(server))
        runtime.listen_to(saver)
        runtime.listen_to(saver)
        assert saver.statistics().listeners == 1
        runtime.close()
        assert saver.statistics().listeners == 0


@pytest.mark.parametrize("make", [PancakeSaver, lambda: observe(InMemorySaver())], ids=["ours", "observed"])
def test_a_listener_that_fails_fails_alone_and_is_logged_once_and_counted(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    saver = make()
    heard: list[Any] = []

    def broken(stored: Any) -> None:
        raise ValueError("a bug")

    ends = [saver.subscribe(listener) for listener in (broken, heard.append, broken)]
    builder = StateGraph(MessagesState)
    builder.add_node("node", lambda _: {"messages": ["done"]})
    builder.add_edge(START, "node")
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"messages": ["hello"]}, {"configurable": {"thread_id": "t"}})
    clone = saver.with_allowlist([("some.module", "Name")])
    assert len(heard) >= 3
    assert saver.statistics() == clone.statistics() == SaverStatistics(listeners=3, failed_tellings=2 * len(heard))
    found = [record.message for record in caplog.records if "a listener of the saver failed" in record.message]
    assert len(found) == 2
    for end in ends * 2:
        end()
    clone.put({"configurable": {"thread_id": "t", "checkpoint_ns": ""}}, empty_checkpoint(), {}, {})
    assert saver.statistics() == SaverStatistics(listeners=0, failed_tellings=2 * len(heard))


async def test_an_observed_saver_does_what_the_one_inside_does() -> None:
    inner = InMemorySaver()
    saver = observe(inner)
    told: list[Stored] = []
    saver.subscribe(told.append)
    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    first = saver.put(config, {**empty_checkpoint(), "channel_values": {"a": 1}}, {"source": "input"}, {"a": 1})
    saver.put_writes(first, [("a", 2)], "task")
    second = await saver.aput(first, empty_checkpoint(), {"source": "loop"}, {})
    await saver.aput_writes(second, [("b", 3)], "task")
    assert [(stored.spot.checkpoint_id, stored.channels) for stored in told] == [
        (first["configurable"]["checkpoint_id"], ("a",)),
        (first["configurable"]["checkpoint_id"], ("a",)),
        (second["configurable"]["checkpoint_id"], ()),
        (second["configurable"]["checkpoint_id"], ("b",)),
    ]
    assert saver.get_tuple(first) == await saver.aget_tuple(first) == inner.get_tuple(first)
    assert list(saver.list(config)) == [found async for found in saver.alist(config)] == list(inner.list(config))
    assert [found.metadata["source"] for found in saver.list(config, filter={"source": "loop"}, limit=1)] == ["loop"]
    history = saver.get_delta_channel_history(config=second, channels=["a"])
    assert history == await saver.aget_delta_channel_history(config=second, channels=["a"])
    assert history == inner.get_delta_channel_history(config=second, channels=["a"])
    saver.delete_thread("t")
    assert list(inner.list(config)) == []
    await saver.aput(config, empty_checkpoint(), {}, {})
    await saver.adelete_thread("t")
    assert list(inner.list(config)) == []


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("delete_for_runs", (["run"],), {}),
        ("copy_thread", ("a", "b"), {}),
        ("prune", (["a"],), {"strategy": "delete"}),
    ],
)
async def test_an_observed_saver_hands_on_what_only_some_savers_can(
    name: str, arguments: tuple[Any, ...], named: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, calls = InMemorySaver(), []

    async def recorded(*args: Any, **kwargs: Any) -> None:
        calls.append((args, kwargs))

    monkeypatch.setattr(inner, name, lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(inner, f"a{name}", recorded)
    getattr(observe(inner), name)(*arguments, **named)
    await getattr(observe(inner), f"a{name}")(*arguments, **named)
    assert calls == [(arguments, named)] * 2


def test_only_checkpointers_can_be_observed() -> None:
    with pytest.raises(ConfigError, match="got str"):
        observe("app.db")  # type: ignore[arg-type]
