"""What the documentation shows is run."""

import re
from pathlib import Path
from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph

from pancake_langgraph.cli.main import pancake
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.engines.fake import FakeEngine, FakeEngineSettings
from pancake_langgraph.runtime import Runtime, attach, runtime_of
from pancake_langgraph.testing.fake_server import FakeEngineServer

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
MODEL = re.compile(r'model="[^"]+"')


def builder() -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("agent", lambda state: {"messages": [("ai", "hello")]})
    graph.add_edge(START, "agent")
    graph.add_edge("agent", END)
    return graph


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    with FakeEngineServer(FakeEngine(FakeEngineSettings(model="doc"))) as server:
        scope: dict[str, Any] = {"builder": builder(), "saver": InMemorySaver(), "checkpointer": InMemorySaver()}
        scope["embeddings"] = DeterministicFakeEmbedding(size=384)
        with Runtime(RuntimeSettings(engine="null")) as runtime:
            scope["graph"] = attach(builder().compile(), runtime=runtime)  # pages that begin after the attaching
        for block in blocks:
            code = MODEL.sub('model="doc"', block).replace("http://127.0.0.1:8000/v1", server.base_url)
            exec(compile(code, f"{page.name}", "exec"), scope)
        if (runtime := runtime_of(scope.get("graph"))) is not None:
            runtime.close()
        if (model := scope.get("model")) is not None:
            assert model.invoke("hi").content
    if page.name in ("README.md", "quickstart.md"):
        assert blocks


def test_every_command_and_target_that_is_named_exists() -> None:
    commands = set(pancake.list_commands(None))  # type: ignore[arg-type]
    targets = set(re.findall(r"^([a-z ]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    known_targets = {word for line in targets for word in line.split()}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"(?:`|^    )pancake ([a-z]+)", text, re.M)) <= commands, page.name
        assert set(re.findall(r"(?:`|^    )make ([a-z]+)", text, re.M)) <= known_targets, page.name


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"
