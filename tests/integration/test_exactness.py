"""Same words, same history: with Pancake on, off, on other engines' hints, and with the cache server broken half-way.

Greedy, in float32, where the engine itself gives the same tokens from a cold prompt and from its cache.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import SecretStr

from examples.fan_out import app as fan_out
from examples.handoff import app as handoff
from examples.research_team import app as research_team
from examples.research_team.corpus import Corpus, load_corpus, project_docs
from examples.subgraph import app as subgraph
from examples.tool_loop import app as tool_loop
from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.launch import Stack
from pancake_langgraph.ledger import BreakerChanged
from pancake_langgraph.runtime import Runtime, attach

pytestmark = pytest.mark.real

BROKEN_TIER_LIMIT_S = 2.0


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus(project_docs())


def examples(corpus: Corpus) -> dict[str, tuple[Callable[..., Any], Any]]:
    def team(model: BaseChatModel, **kwargs: Any) -> Any:
        return research_team.build_graph(model, corpus, max_tokens=16, **kwargs)

    return {
        "tool_loop": (tool_loop.build_graph, tool_loop.inputs()),
        "handoff": (handoff.build_graph, handoff.inputs()),
        "fan_out": (fan_out.build_graph, fan_out.inputs()),
        "subgraph": (subgraph.build_graph, subgraph.inputs()),
        "research_team": (team, research_team.inputs()),
    }


NAMES = ("tool_loop", "handoff", "fan_out", "subgraph", "research_team")


def ours(stack: Stack) -> PancakeChatModel:
    return PancakeChatModel(model=stack.served_model_name, base_url=stack.base_url, temperature=0.0)


def theirs(stack: Stack) -> ChatOpenAI:
    return ChatOpenAI(
        model=stack.served_model_name, base_url=stack.base_url, api_key=SecretStr("EMPTY"), temperature=0.0
    )


def runtime_for(stack: Stack, engine: str) -> Runtime:
    with_tier = engine == "vllm"
    return Runtime(
        RuntimeSettings(
            engine=engine,
            base_url=stack.base_url,
            model=stack.served_model_name if engine == "vllm" else None,
            kv_events_endpoint=stack.kv_events_endpoint,
            kv_replay_endpoint=stack.kv_replay_endpoint,
            tier_url=stack.tier_url if with_tier else None,
            tier_model=stack.model_key if with_tier else None,
        )
    )


def shown(value: Any) -> Any:
    """Return state without what is random by design: ids, and the server's report on itself."""
    if hasattr(value, "content"):
        calls = [(call["name"], call["args"]) for call in getattr(value, "tool_calls", None) or ()]
        return value.type, value.content, calls
    if isinstance(value, dict):
        return {key: shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    return value


def history(graph: Any, given: Any) -> list[Any]:
    config = {"configurable": {"thread_id": "t"}}
    graph.invoke(given, config)
    return [
        (snapshot.next, (snapshot.metadata or {}).get("step"), shown(snapshot.values))
        for snapshot in graph.get_state_history(config)
    ]


@pytest.fixture
def expected(exact_stack: Stack, corpus: Corpus) -> Callable[[str], list[Any]]:
    def run(name: str) -> list[Any]:
        build, given = examples(corpus)[name]
        return history(build(theirs(exact_stack), checkpointer=InMemorySaver()), given)

    return run


@pytest.mark.parametrize("name", NAMES)
def test_history_equals_plain_langgraph_on_every_engine_attached_or_not(
    name: str, exact_stack: Stack, corpus: Corpus, expected: Callable[[str], list[Any]]
) -> None:
    build, given = examples(corpus)[name]
    plain = expected(name)
    assert history(build(ours(exact_stack), checkpointer=InMemorySaver()), given) == plain
    for engine in ("null", "fake", "vllm"):
        with runtime_for(exact_stack, engine) as runtime:
            runtime.start()
            for _ in range(2):  # the second run is forecast from the first
                graph = attach(build(ours(exact_stack), checkpointer=InMemorySaver()), runtime=runtime)
                assert history(graph, given) == plain, f"engine {engine}"
            assert runtime.wait_idle()
            assert runtime.statistics().failed_signals == 0
        runtime.check_integrity()
        assert runtime.ledger.statistics().open_actions == 0


class Longest(BaseCallbackHandler):
    """Measures model calls."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started: dict[Any, float] = {}

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: Any, **kwargs: Any) -> None:
        self._started[run_id] = time.monotonic()

    def on_llm_end(self, response: Any, *, run_id: Any, **kwargs: Any) -> None:
        self.seconds.append(time.monotonic() - self._started.pop(run_id))


def break_tier(stack: Stack, how: str) -> None:
    assert stack.tier is not None
    getattr(stack.tier, how)()


def mend_tier(stack: Stack, how: str) -> None:
    assert stack.tier is not None
    assert stack.tier_process is not None
    if how == "freeze":
        stack.tier.thaw()
    else:
        stack.tier_process.restart()


def breaker_changes(runtime: Runtime) -> list[bool]:
    return [e.is_open for e in runtime.ledger.events() if isinstance(e, BreakerChanged) and e.part == "tier"]


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_broken_cache_server_changes_no_word_holds_no_call_up_and_is_noticed_both_ways(
    how: str, exact_stack: Stack, corpus: Corpus, expected: Callable[[str], list[Any]]
) -> None:
    build, given = examples(corpus)["research_team"]
    plain = expected("research_team")
    whole, broken = Longest(), Longest()

    def run(runtime: Runtime, measure: Longest) -> None:
        graph = build(ours(exact_stack), tool_delay_s=0.2, checkpointer=InMemorySaver())
        graph = attach(graph.with_config(callbacks=[measure]), runtime=runtime)
        assert history(graph, given) == plain

    def run_until(runtime: Runtime, measure: Longest, changes: list[bool]) -> None:
        for _ in range(30):
            run(runtime, measure)
            if breaker_changes(runtime) == changes:
                return
        raise AssertionError(f"the breaker never changed to {changes}, got {breaker_changes(runtime)}")

    with runtime_for(exact_stack, "vllm") as runtime:
        runtime.start()
        run(runtime, whole)
        half_way = threading.Timer(0.3, break_tier, (exact_stack, how))
        half_way.start()
        run_until(runtime, broken, [True])
        half_way.join()
        mend_tier(exact_stack, how)
        run_until(runtime, whole, [True, False])
        assert runtime.statistics().failed_signals == 0
    runtime.check_integrity()
    # Not a benchmark: a call that hangs on a dead tier waits for minutes, not for fractions of a second.
    assert max(broken.seconds) <= max(whole.seconds) + BROKEN_TIER_LIMIT_S
