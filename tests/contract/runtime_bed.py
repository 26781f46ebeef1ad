"""A runtime on a real HTTP wire and the fake engine's modelled pool, for the runtime's suites."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AnyMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode

from pancake_langgraph._errors import TierError
from pancake_langgraph._types import TokenPrefix
from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.engines.base import Capabilities, Residency, WarmReport
from pancake_langgraph.engines.fake import FakeAnswer, FakeEngine, FakeEngineSettings, FakeToolCall
from pancake_langgraph.engines.pool_hints import PoolHints
from pancake_langgraph.forecast import Forecaster
from pancake_langgraph.ledger import ActionRecorded, ActionState
from pancake_langgraph.runtime import Runtime
from pancake_langgraph.testing.bridged_engine import BridgedEngine
from pancake_langgraph.testing.fake_server import FakeEngineServer
from pancake_langgraph.tiers.base import PrefetchReport, Tier
from pancake_langgraph.tiers.null import NullTier

WORDS = " ".join(f"rule{number}" for number in range(180))


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


@dataclass
class Bed:
    """A fake engine behind a port, and a runtime on it."""

    server: FakeEngineServer
    runtime: Runtime

    def model(self, **fields: Any) -> PancakeChatModel:
        return PancakeChatModel(model="fake", base_url=self.server.base_url, max_tokens=16, **fields)

    def press(self, *, prompts: int) -> None:
        """Push other contexts through the pool, as other traffic does."""

        async def push() -> None:
            for number in range(prompts):
                base = 50_000 + number * 1000
                await self.server.engine.warm(TokenPrefix(tuple(range(base, base + 400))), priority=0)

        self.server.run(push()).result(10)

    def actions(self, state: ActionState = ActionState.SETTLED) -> list[ActionRecorded]:
        return [e for e in self.runtime.ledger.events() if isinstance(e, ActionRecorded) and e.state is state]


def script(prompt: Any) -> FakeAnswer | str | None:
    last = prompt.messages[-1]
    if last["role"] == "user" and "look" in str(last["content"]):
        return FakeAnswer(tool_calls=(FakeToolCall("look", {"q": "a"}),))
    return "done"


@contextmanager
def open_bed() -> Iterator[Bed]:
    """Open a bed; at the end everything has to be accounted for."""
    engine = FakeEngine(FakeEngineSettings(pool_blocks=80, max_model_len_tokens=1200, script=script))
    with FakeEngineServer(engine) as server:
        runtime = Runtime(RuntimeSettings(engine="fake", action_ttl_s=5.0), engine=BridgedEngine(server))
        runtime.start()
        yield Bed(server, runtime)
        runtime.close()
        runtime.check_integrity()
        assert runtime.statistics().failed_signals == 0
        assert runtime.ledger.statistics().open_actions == 0


def tool_loop(bed: Bed, pause: Any, *, checkpointer: Any = True, **fields: Any) -> Any:
    @tool
    async def look(q: str) -> str:
        """Look it up."""
        await pause()
        return "found"

    model = bed.model(**fields).bind_tools([look])

    async def agent(state: State) -> dict[str, Any]:
        return {"messages": [await model.ainvoke([SystemMessage(WORDS), *state["messages"]])]}

    def route(state: State) -> str:
        return "tools" if getattr(state["messages"][-1], "tool_calls", None) else END

    builder = StateGraph(State)
    builder.add_node("agent", agent)
    builder.add_node("tools", ToolNode([look]))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", route, ["tools", END])
    builder.add_edge("tools", "agent")
    return builder.compile(checkpointer=InMemorySaver() if checkpointer is True else checkpointer)


def chats(bed: Bed) -> list[Any]:
    return [call for call in bed.server.engine.served if call.work == "chat"]


async def run(graph: Any, text: str = "look please", thread: str = "t") -> Any:
    return await graph.ainvoke({"messages": [("user", text)]}, {"configurable": {"thread_id": thread}})


class Stub(BridgedEngine):
    """A bridged engine that stalls or breaks where a test wants it to."""

    probes = residency_bugs = warms = looks = 0
    is_stalled = is_blind = False
    warm_error: Exception | None = None

    async def probe(self) -> Capabilities:
        self.probes += 1
        await asyncio.sleep(0.01)
        return await super().probe()

    async def warm(self, prefix: TokenPrefix, *, priority: int, hints: PoolHints | None = None) -> WarmReport:
        self.warms += 1
        if self.is_stalled:
            await asyncio.Event().wait()
        if self.warm_error is not None:
            raise self.warm_error
        return await super().warm(prefix, priority=priority, hints=hints)

    async def residency(self, prefix: TokenPrefix) -> Residency:
        self.looks += 1
        if self.is_blind:
            await asyncio.Event().wait()
        if self.residency_bugs:
            self.residency_bugs -= 1
            raise ValueError("a bug")
        return await super().residency(prefix)


class DeadTier(NullTier):
    """A tier that does not answer."""

    async def prefetch(self, prefix: TokenPrefix) -> PrefetchReport:
        raise TierError("gone")


@dataclass
class StubBed(Bed):
    """A bed whose engine port is a `Stub`."""

    stub: Stub


@contextmanager
def stub_bed(tier: Tier | None = None, forecaster: Forecaster | None = None, **settings: Any) -> Iterator[StubBed]:
    engine = FakeEngine(FakeEngineSettings(pool_blocks=80, max_model_len_tokens=1200, script=script))
    with FakeEngineServer(engine) as server:
        stub = Stub(server)
        runtime = Runtime(RuntimeSettings(engine="fake", **settings), engine=stub, tier=tier, forecaster=forecaster)
        runtime.start()
        yield StubBed(server, runtime, stub)
        runtime.close()
        runtime.check_integrity()
        assert runtime.ledger.statistics().open_actions == 0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def pressed_pause(bed: StubBed, *, until_set: asyncio.Event | None = None) -> Any:
    """Return a tool's pause in which the agent's context is lost and a warm-up for it is sent, which stalls."""

    async def pause() -> None:
        bed.stub.is_stalled = True
        sent = bed.stub.warms
        await asyncio.to_thread(bed.press, prompts=4)
        await until(lambda: bed.stub.warms > sent)
        if until_set is not None:
            await until_set.wait()

    return pause
