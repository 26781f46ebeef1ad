"""`PANCAKE_RUNTIME=1` watches without a line of code; without it nothing is registered."""

import os
import subprocess
import sys
import textwrap

import pytest

from pancake_langgraph.engines.fake import FakeEngine
from pancake_langgraph.testing.fake_server import FakeEngineServer

APP = """
    import sys, warnings
    warnings.simplefilter("error")
    from langchain_core.callbacks.manager import CallbackManager
    from langchain_core.tracers.context import _configure_hooks
    before = len(_configure_hooks)
    from langgraph.graph import END, START, MessagesState, StateGraph
    from pancake_langgraph import PancakeChatModel, attach
    model = PancakeChatModel(max_tokens=4)
    hooks = len(_configure_hooks) - before
    builder = StateGraph(MessagesState)
    builder.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.add_edge(START, "agent")
    builder.add_edge("agent", END)
    graph = builder.compile()
    for _ in range(2):
        graph.invoke({"messages": [("user", "hi")]})
    calls = 0
    if hooks:
        from pancake_langgraph.runtime.environment import environment_runtime
        runtime = environment_runtime()
        attached = attach(graph, runtime=runtime)
        attached.invoke({"messages": [("user", "hi")]})
        assert runtime.wait_idle()
        calls = runtime.statistics().calls
        runtime.close()
        runtime.check_integrity()
    print(hooks, calls)
"""


@pytest.mark.parametrize(("switch", "expected"), [("1", "1 3"), ("0", "0 0"), (None, "0 0")])
def test_the_variable_alone_decides(switch: str | None, expected: str) -> None:
    with FakeEngineServer(FakeEngine()) as server:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PANCAKE_")}
        environ |= {"PANCAKE_BASE_URL": server.base_url, "PANCAKE_MODEL": "fake", "PANCAKE_ENGINE": "openai"}
        if switch is not None:
            environ["PANCAKE_RUNTIME"] = switch
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(APP)], env=environ, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == expected


def test_a_bad_switch_is_refused_by_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import pancake_langgraph.chat_model"],
        env={**os.environ, "PANCAKE_RUNTIME": "perhaps"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "PANCAKE_RUNTIME" in done.stderr
