"""What hostile use must not break: odd addresses and servers, every kind of graph, cancellation, a server that dies."""

import asyncio
import gc
import logging
import operator
import socket
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt

from pancake_langgraph._errors import ConfigError, EngineError, EngineUnavailable, MalformedStream, PancakeError
from pancake_langgraph._types import Prompt
from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.cli._checks import _check_tier
from pancake_langgraph.cli.main import main
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.engines.fake import FakeAnswer, FakeEngine, FakeEngineSettings, FakeToolCall
from pancake_langgraph.engines.registry import create_engine
from pancake_langgraph.ledger import SpanEnded, SpanStarted
from pancake_langgraph.runtime import Runtime, attach
from pancake_langgraph.testing.bridged_engine import BridgedEngine
from pancake_langgraph.testing.fake_server import FakeEngineServer
from pancake_langgraph.testing.wire_replies import Act, Reply, event, tool_delta
from pancake_langgraph.testing.wire_server import WireServer

#: A word that no log may hold.
MARK = "zebrafish"
RULES = " ".join(f"rule{number}" for number in range(60)) + f" {MARK}"
ASK: Any = {"messages": [("user", f"look please {MARK}")]}

# -- addresses ------------------------------------------------------------------------------------------------------

NO_ADDRESSES = [
    "",
    "garbage",
    "ftp://127.0.0.1/v1",
    "http://",
    "http://[::1/v1",
    "http://127.0.0.1:0/v1",
    "http://127.0.0.1:99999/v1",
    "http://127.0.0.1:port/v1",
    "http://a b/v1",
    "http://a\nb/v1",
    f"http://{'a' * 70}/v1",
]


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_an_address_that_leads_nowhere_is_refused_before_anything_is_sent(url: str) -> None:
    for make in (
        lambda: PancakeChatModel(model="m", base_url=url),
        lambda: RuntimeSettings(base_url=url),
        lambda: create_engine("openai", base_url=url),
        lambda: RuntimeSettings(tier_url=url, tier_model="m"),
    ):
        with pytest.raises(ConfigError, match=r"url: got .*allowed is an http:// or https:// address"):
            make()


async def test_an_address_changed_later_is_checked_as_well() -> None:
    chat = PancakeChatModel(model="m", base_url="http://127.0.0.1:1/v1")
    chat.openai_api_base = "http://127.0.0.1:99999/v1"
    with pytest.raises(ConfigError, match="99999"):
        await chat.ainvoke("hi")


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="api_key") as caught:
        PancakeChatModel(model="m", base_url="http://someone:s3cret@127.0.0.1:1/v1")
    assert "s3cret" not in str(caught.value)


# -- odd servers ----------------------------------------------------------------------------------------------------

DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "reply",
    [
        Reply.stream(b"data: " + DEEP + b"\n\n"),
        Reply(body=DEEP),
        Reply(status=400, body=DEEP),
        Reply.json({"choices": [5]}),
        Reply.json({"choices": 5}),
    ],
    ids=["streamed", "whole", "refusal", "choice", "choices"],
)
async def test_json_that_no_reader_can_follow_is_a_typed_error(reply: Reply) -> None:
    with WireServer([reply] * 2) as server:
        chat = PancakeChatModel(model="small", base_url=server.base_url)
        with pytest.raises(EngineError):
            await chat.ainvoke("hi")
        with pytest.raises(EngineError):
            await asyncio.to_thread(chat.invoke, "hi")


@pytest.mark.parametrize("engine", ["openai", "vllm"])
async def test_an_engine_that_answers_too_deep_is_a_typed_error(engine: str) -> None:
    with WireServer(routes={"/v1/models": Reply(body=DEEP)}) as server:
        port = create_engine(engine, base_url=server.base_url)
        await port.open()
        with pytest.raises(MalformedStream):
            await port.probe()
        await port.close()


@pytest.mark.parametrize("make", [BridgedEngine, lambda server: create_engine("vllm", base_url=server.base_url)])
async def test_half_a_surrogate_pair_has_tokens(make: Callable[[FakeEngineServer], Any]) -> None:
    prompt = Prompt.of([{"role": "user", "content": "half \ud800 pair"}])
    with FakeEngineServer(fake_engine()) as server:
        port = make(server)
        await port.open()
        assert await port.tokenize(prompt, add_generation_prompt=True)
        await port.close()


@pytest.mark.parametrize(
    "fields", [{"model": 5}, {"api_key": 5}, {"kv_events_endpoint": 5}, {"tier_url": 5, "tier_model": "m"}], ids=str
)
def test_a_setting_of_another_type_is_a_typed_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="allowed is"):
        RuntimeSettings(**fields)


ODD_CHATS = {
    "rate": Reply.error(429, MARK),
    "fault": Reply.error(500, MARK),
    "busy": Reply.error(503, MARK),
    "cut": Reply.stream(event({"role": "assistant", "content": "a"}), Act.CUT),
    "half a call": Reply.stream(
        event({"tool_calls": [tool_delta('{"q": "a', call_id="c", name="look")]}), event({}, finish_reason="length")
    ),
    "half a call, cut": Reply.stream(
        event({"tool_calls": [tool_delta('{"q": "a', call_id="c", name="look")]}), Act.CUT
    ),
    "no json": Reply.stream(b"data: {nope\n\n"),
    "odd ids": Reply.stream(event({"content": "x"}, prompt_token_ids=["a", None]), event({}, finish_reason="stop")),
    "odd usage": Reply.stream(
        event({"content": "x"}),
        event({}, finish_reason="stop"),
        event(usage={"prompt_tokens": -5, "completion_tokens": 1.5, "total_tokens": None}),
    ),
}


@pytest.mark.parametrize("name", ODD_CHATS)
def test_an_odd_answer_ends_an_attached_graph_as_it_ends_the_plain_one(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    warmed = Reply.json({"choices": [{"text": "x", "finish_reason": "length", "index": 0}]})
    with WireServer(lambda path, body: ODD_CHATS[name] if "chat" in path else warmed) as server:
        runtime = Runtime(RuntimeSettings(engine="openai", base_url=server.base_url))
        plain, watched = agent(server), attach(agent(server), runtime=runtime)
        ends = [asyncio.run(end_of(graph)) for graph in (plain, watched)]
        assert ends[0] == ends[1]
        assert MARK not in ends[0][1]
        assert history(plain) == history(watched)
        assert runtime.wait_idle()
        assert (runtime.statistics().open_calls, runtime.statistics().expected_calls) == (0, 0)
        close(runtime)
    assert not [record.getMessage() for record in caplog.records if MARK in record.getMessage()]
    assert MARK not in caplog.text


async def end_of(graph: Any) -> tuple[str, str]:
    try:
        state = await graph.ainvoke(ASK, thread("t"))
    except PancakeError as exc:
        return type(exc).__name__, str(exc)
    return "ended", str(state["messages"][-1].content)


# -- graphs ---------------------------------------------------------------------------------------------------------


def script(prompt: Any) -> FakeAnswer | str:
    names = [entry["function"]["name"] for entry in prompt.tools or ()]
    if any(message["role"] == "assistant" for message in prompt.messages):
        return "done"
    for name in names:
        if name == "look" or name.startswith("transfer_to_"):
            return FakeAnswer(tool_calls=(FakeToolCall(name, {"q": "a"} if name == "look" else {}),))
    return "done"


@tool
async def look(q: str) -> str:
    """Look it up."""
    await asyncio.sleep(0)
    return "found"


def model(server: Any) -> PancakeChatModel:
    return PancakeChatModel(model=getattr(server, "served", ("fake",))[0], base_url=server.base_url, max_tokens=16)


def agent(server: Any) -> Any:
    return create_agent(model(server), [look], system_prompt=RULES, checkpointer=InMemorySaver())


def supervisor(server: Any) -> Any:
    from langgraph_supervisor import create_supervisor

    workers: list[Any] = [
        create_agent(model(server), [look], system_prompt=f"{n} {RULES}", name=n) for n in ("math", "poet")
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library builds on a deprecated constructor
        return create_supervisor(workers, model=model(server), prompt=RULES).compile(checkpointer=InMemorySaver())


def swarm(server: Any) -> Any:
    from langgraph_swarm import create_handoff_tool, create_swarm

    alice = create_agent(model(server), [create_handoff_tool(agent_name="Bob")], system_prompt=RULES, name="Alice")
    bob = create_agent(model(server), [look], system_prompt=f"Bob {RULES}", name="Bob")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return create_swarm([alice, bob], default_active_agent="Alice").compile(checkpointer=InMemorySaver())


def functional(server: Any) -> Any:
    chat = model(server)

    @task
    async def work(text: str) -> str:
        return str((await chat.ainvoke([SystemMessage(RULES), HumanMessage(text)])).content)

    @entrypoint(checkpointer=InMemorySaver())
    async def flow(given: Any) -> dict[str, Any]:
        return {"messages": [HumanMessage(await work(await work("a")))]}

    return flow


def asking(server: Any, title: str = "") -> Any:
    chat = model(server)

    async def call(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await chat.ainvoke([SystemMessage(f"{title} {RULES}"), *state["messages"]])]}

    return call


def subgraphs(server: Any) -> Any:
    call = asking(server)
    inner = StateGraph(MessagesState).add_node("x", call).add_node("y", call).add_edge(START, "x").add_edge("x", "y")
    compiled = inner.compile()

    async def inside(state: MessagesState) -> dict[str, Any]:
        return {"messages": (await compiled.ainvoke(state))["messages"][-1:]}

    graph = StateGraph(MessagesState).add_node("a", call).add_node("sub", compiled).add_node("inside", inside)
    graph.add_edge(START, "a").add_edge("a", "sub").add_edge("sub", "inside")
    return graph.compile(checkpointer=InMemorySaver())


class Fan(TypedDict):
    messages: Annotated[list[Any], operator.add]
    number: int


def fan_out(server: Any) -> Any:
    chat = model(server)

    def plan(state: Fan) -> list[Send]:
        return [Send("work", {"messages": [HumanMessage(f"part {n}")], "number": n}) for n in range(8)]

    async def work(state: Fan) -> dict[str, Any]:
        first = await chat.ainvoke([SystemMessage(RULES), *state["messages"]])
        last = await chat.ainvoke([SystemMessage(RULES), *state["messages"], first, HumanMessage("more")])
        return {"messages": [f"{state['number']} {last.content}"]}

    graph = StateGraph(Fan).add_node("plan", lambda state: {"number": 0}).add_node("work", work)
    graph.add_node("merge", lambda state: {"number": len(state["messages"])}).add_edge(START, "plan")
    graph.add_conditional_edges("plan", plan, ["work"]).add_edge("work", "merge")
    return graph.compile(checkpointer=InMemorySaver())


def command(server: Any) -> Any:
    call = asking(server)

    async def jump(state: MessagesState) -> Any:
        return Command(goto="b", update=await call(state))

    graph = StateGraph(MessagesState).add_node("a", jump).add_node("b", asking(server, "b")).add_edge(START, "a")
    return graph.compile(checkpointer=InMemorySaver())


def human(server: Any) -> Any:
    call = asking(server)

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [HumanMessage(str(interrupt("go on?"))), *(await call(state))["messages"]]}

    graph = StateGraph(MessagesState).add_node("a", call).add_node("ask", ask).add_edge(START, "a").add_edge("a", "ask")
    return graph.compile(checkpointer=InMemorySaver())


GRAPHS = [agent, supervisor, swarm, functional, subgraphs, fan_out, command, human]


class Bed:
    """A fake engine behind a port, and a runtime on it."""

    def __init__(self, server: FakeEngineServer, runtime: Runtime) -> None:
        self.server, self.runtime = server, runtime


def fake_engine() -> FakeEngine:
    return FakeEngine(FakeEngineSettings(pool_blocks=180, max_model_len_tokens=2800, script=script))


@pytest.fixture(params=["bridged", "http"])
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    before = threading.active_count()
    with FakeEngineServer(fake_engine()) as server:
        if request.param == "bridged":
            runtime = Runtime(RuntimeSettings(engine="fake"), engine=BridgedEngine(server))
        else:
            runtime = Runtime(RuntimeSettings(engine="vllm", base_url=server.base_url))
        runtime.start()
        assert threading.active_count() == before + 2
        yield Bed(server, runtime)
        close(runtime)
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("pancake", "loopback"))]


def close(runtime: Runtime) -> None:
    runtime.close()
    runtime.check_integrity()
    assert runtime.statistics().failed_signals == 0
    assert runtime.ledger.statistics().open_actions == 0


def thread(name: Any) -> Any:
    return {"configurable": {"thread_id": name}}


def shown(value: Any) -> Any:
    """Return a value without the ids that differ from run to run."""
    if isinstance(value, BaseMessage):
        calls = [(call["name"], call["args"]) for call in getattr(value, "tool_calls", ())]
        return value.type, value.content, value.name, calls
    if isinstance(value, dict):
        return {key: shown(inner) for key, inner in value.items()}
    return [shown(inner) for inner in value] if isinstance(value, list | tuple) else value


def history(graph: Any, name: str = "t") -> list[Any]:
    return [
        (state.next, dict(state.metadata), shown(state.values), [(t.name, str(t.error)) for t in state.tasks])
        for state in graph.get_state_history(thread(name))
    ]


async def settled(bed: Bed) -> None:
    """Wait until all is taken in; nothing may be left open, and every span has one start and one end."""
    assert await asyncio.to_thread(bed.runtime.wait_idle)
    found = bed.runtime.statistics()
    assert (found.open_calls, found.expected_calls, found.failed_signals) == (0, 0, 0)
    events = bed.runtime.ledger.events()
    started = [e.span_id for e in events if isinstance(e, SpanStarted)]
    assert sorted(started) == sorted(e.span_id for e in events if isinstance(e, SpanEnded))
    assert len(started) == len(set(started))


@pytest.mark.parametrize("build", GRAPHS, ids=lambda build: build.__name__)
async def test_every_kind_of_graph_runs_as_without_the_runtime(
    bed: Bed, build: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    plain, watched = build(bed.server), attach(build(bed.server), runtime=bed.runtime)
    for name in ("t", "u", "t"):
        for graph in (plain, watched):
            await graph.ainvoke(ASK, thread(name))
            if build is human:
                await graph.ainvoke(Command(resume="yes"), thread(name))
    assert history(plain, "t") == history(watched, "t")
    assert history(plain, "u") == history(watched, "u")
    for mode in ("values", "updates", "messages", "debug"):
        streams = []
        for graph in (plain, watched):
            parts = graph.astream(ASK, thread(mode), stream_mode=mode, subgraphs=True)
            streams.append(sorted([type(part[-1]).__name__ async for part in parts]))
        assert streams[0] == streams[1]
    assert await outcome_of(event_names(plain)) == await outcome_of(event_names(watched))
    await settled(bed)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [record for record in caplog.records if MARK in record.getMessage()]


async def outcome_of(work: Awaitable[list[str]]) -> list[str] | str:
    """Return the result, or what was raised: some releases of LangGraph fail on functional graphs themselves."""
    try:
        return await work
    except Exception as exc:
        return type(exc).__name__


async def event_names(graph: Any) -> list[str]:
    return sorted([e["event"] + e["name"] async for e in graph.astream_events(ASK, thread("e"))])


async def test_fifty_runs_at_once_share_one_runtime(bed: Bed) -> None:
    graph = attach(agent(bed.server), runtime=bed.runtime)
    states = await asyncio.gather(*(graph.ainvoke(ASK, thread(f"t{number % 45}")) for number in range(50)))
    assert {state["messages"][-1].content for state in states} == {"done"}
    loose = attach(create_agent(model(bed.server), [look], system_prompt=RULES), runtime=bed.runtime)
    assert len(await loose.abatch([ASK] * 5)) == 5
    await settled(bed)


def test_threads_and_loops_share_one_runtime(bed: Bed) -> None:
    chat = model(bed.server)

    def call(state: MessagesState) -> dict[str, Any]:
        return {"messages": [chat.invoke([SystemMessage(RULES), *state["messages"]])]}

    builder = StateGraph(MessagesState).add_node("x", call).add_node("y", call).add_edge(START, "x").add_edge("x", "y")
    graph = attach(builder.compile(), runtime=bed.runtime)
    runners = [threading.Thread(target=graph.invoke, args=(ASK,)) for _ in range(6)]
    runners += [threading.Thread(target=lambda: asyncio.run(graph.ainvoke(ASK))) for _ in range(4)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    asyncio.run(settled(bed))
    assert bed.runtime.statistics().calls == 20


async def test_runs_cancelled_at_any_moment_leave_nothing_behind(bed: Bed) -> None:
    for build in (agent, swarm, fan_out, subgraphs):
        graph = attach(build(bed.server), runtime=bed.runtime)
        for pause_s in (0.0, 0.005, 0.02):
            running = asyncio.create_task(graph.ainvoke(ASK, thread(f"{build.__name__} {pause_s}")))
            await asyncio.sleep(pause_s)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    assert await asyncio.to_thread(bed.runtime.wait_idle)
    found = bed.runtime.statistics()
    assert (found.open_calls, found.expected_calls) == (0, 0)


async def test_a_runtime_closed_under_running_graphs_does_no_harm(bed: Bed) -> None:
    graph = attach(fan_out(bed.server), runtime=bed.runtime)
    running = [asyncio.create_task(graph.ainvoke(ASK, thread(f"t{number}"))) for number in range(4)]
    await asyncio.sleep(0.02)
    await asyncio.to_thread(bed.runtime.close)
    assert {(await each)["number"] for each in running} == {1 + 8}
    assert (await graph.ainvoke(ASK, thread("after")))["number"] == 1 + 8


@pytest.mark.parametrize("text", ["half \ud800 pair", "nul \x00", "<|im_end|>", "x " * 20_000], ids=range(4))
async def test_odd_prompts_end_as_without_the_runtime(bed: Bed, text: str) -> None:
    ends = []
    for graph in (agent(bed.server), attach(agent(bed.server), runtime=bed.runtime)):
        try:
            state = await graph.ainvoke({"messages": [("user", text)]}, thread(0))
            ends.append(str(state["messages"][-1].content))
        except EngineError as exc:
            ends.append(f"{type(exc).__name__} {exc}")
    assert ends[0] == ends[1]
    await settled(bed)


def test_a_server_that_dies_and_comes_back_leaves_a_resumable_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    listen = asyncio.start_server
    monkeypatch.setattr(asyncio, "start_server", lambda cb, host, _, **kw: listen(cb, host, port, **kw))
    servers = [FakeEngineServer(fake_engine()).__enter__()]
    runtime = Runtime(RuntimeSettings(engine="vllm", base_url=servers[0].base_url, breaker_open_s=0.01))
    runtime.start()
    dies: list[str] = []

    @tool("look")
    async def fatal(q: str) -> str:
        """Look it up while the server ends, and perhaps comes back."""
        if dies:
            await asyncio.to_thread(servers[-1].__exit__)
            if dies.pop() == "restarts":
                servers.append(FakeEngineServer(fake_engine()).__enter__())
        return "found"

    async def use() -> None:
        chat = PancakeChatModel(model="fake", base_url=servers[0].base_url, max_tokens=16)
        made = create_agent(chat, [fatal], system_prompt=RULES, checkpointer=InMemorySaver())
        graph = attach(made, runtime=runtime)
        dies.append("restarts")
        assert (await graph.ainvoke(ASK, thread("a")))["messages"][-1].content == "done"
        dies.append("stays away")
        with pytest.raises(EngineUnavailable):
            await graph.ainvoke(ASK, thread("b"))
        assert (await graph.aget_state(thread("b"))).next == ("model",)
        servers.append(FakeEngineServer(fake_engine()).__enter__())
        assert (await graph.ainvoke(None, thread("b")))["messages"][-1].content == "done"

    asyncio.run(use())
    assert runtime.wait_idle()
    close(runtime)
    servers[-1].__exit__()


# -- sockets --------------------------------------------------------------------------------------------------------


async def test_a_model_that_is_dropped_closes_its_sockets_on_its_loop() -> None:
    """A collected pool would close its sockets in a finalizer, with a warning that fails this test."""
    with WireServer() as server:
        cycle: dict[str, Any] = {"model": PancakeChatModel(model="small", base_url=server.base_url)}
        cycle["self"] = cycle
        await cycle["model"].ainvoke("hi")
        assert server.num_open == 1
        del cycle
        gc.collect()
        for _ in range(20):
            await asyncio.sleep(0)
        assert await asyncio.to_thread(server.wait_for, lambda: server.num_open == 0)


async def test_a_fake_server_that_stops_under_its_clients_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with FakeEngineServer(fake_engine()) as server:
        await model(server).ainvoke("hi")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# -- command line ---------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Run the command; return its one line of error."""
    with pytest.raises(SystemExit) as caught:
        main(list(args))
    assert caught.value.code == 1
    [line] = capsys.readouterr().err.strip().splitlines()
    return line


def test_a_folder_that_cannot_be_made_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    (model_dir / "config.json").write_text("{}")
    for args in (
        ("models", "prepare", "--cache-dir", str(file)),
        ("up", "--no-tier", "--model", str(model_dir), "--log-dir", str(file)),
        ("demo", "--trace", str(file / "trace.json")),
    ):
        assert f"cannot use {file}" in refused(capsys, *args)
    monkeypatch.setenv("PANCAKE_CACHE_DIR", str(file))
    assert "PANCAKE_CACHE_DIR" in refused(capsys, "up", "--no-tier", "--model", str(model_dir))


def test_a_taken_port_is_refused_before_anything_is_prepared_or_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pancake_langgraph.cli.up.prepare_smollm", lambda **_: pytest.fail("prepared"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is taken" in refused(capsys, "up", "--port", str(port))


@pytest.mark.parametrize("url", ["garbage", "http://[::1", "http://127.0.0.1:99999"])
def test_doctor_names_a_cache_servers_address_that_is_none(url: str) -> None:
    result = _check_tier(url)
    assert (result.status, "allowed is" in result.found) == ("fail", True)


def test_explain_points_at_the_users_line_and_never_at_the_import_system(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken_app.py"
    broken.write_text("x = 1\nimport no_such_module_of_mine\n")
    assert f"({broken}, line 2)" in refused(capsys, "explain", f"{broken}:graph")
    for spec in ("no_such_module_of_mine:graph", ".relative:graph"):
        assert "line" not in refused(capsys, "explain", spec).partition("Mend")[0]
