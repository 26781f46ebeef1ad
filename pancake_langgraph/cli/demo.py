"""`pancake demo`: the main job from nothing, next to what people use today."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from pancake_langgraph._errors import ConfigError, PancakeError
from pancake_langgraph.cli.bench import show

if TYPE_CHECKING:
    from pancake_langgraph.bench.servers import Servers

_TOOL_DELAY_S = 1.5


@click.command()
@click.option("--corpus", type=click.Path(path_type=Path), help="Folder of texts; default: this project's docs.")
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(1, 1000), help="Paired repeats.")
@click.option(
    "--trace",
    "trace_file",
    default=Path("runs/research_team.perfetto.json"),
    show_default=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where the timeline goes.",
)
def demo(corpus: Path | None, repeats: int, trace_file: Path) -> None:
    """Run the example team on the real engine, then compare with what people use today.

    Starts and stops everything itself.  One repeat shows the picture; claims need `pancake bench tool-pause`.
    """
    from pancake_langgraph.bench.servers import Servers
    from pancake_langgraph.bench.workloads import BenchOptions, servers_plan, tool_pause
    from pancake_langgraph.weights.smollm import prepare_smollm

    progress = Console(stderr=True)

    def tell(text: str) -> None:
        progress.log(text, highlight=False)

    try:
        example, texts = _example(corpus)
        trace_file.parent.mkdir(parents=True, exist_ok=True)  # minutes before it is written
        tell("preparing the model (once; kept in the cache folder)")
        options = BenchOptions(repeats=repeats, model_dir=prepare_smollm(on_progress=lambda step, _: tell(step)))
        with Servers(servers_plan(options), on_progress=tell) as servers:
            _run_team(example, texts, servers, trace_file, tell)
            result = asyncio.run(_bench(tool_pause, servers, options, tell))
    except PancakeError as exc:
        raise click.ClickException(str(exc)) from exc
    console = Console()
    show(result, console)
    console.print(f"timeline of the example run: {trace_file} (open it at ui.perfetto.dev, or with any Perfetto)")


async def _bench(workload: Any, servers: Servers, options: Any, tell: Any) -> Any:
    return await workload(servers, options, tell)


def _example(corpus: Path | None) -> tuple[Any, Any]:
    """Import the example; it is part of the source tree, not of the installed package."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        app = importlib.import_module("examples.research_team.app")
        texts = importlib.import_module("examples.research_team.corpus")
    except ModuleNotFoundError as exc:
        raise ConfigError("examples/research_team not found: run `make demo` in a checkout of the project") from exc
    return app, texts.load_corpus(corpus if corpus is not None else texts.project_docs())


def _run_team(example: Any, texts: Any, servers: Servers, trace_file: Path, tell: Any) -> None:
    """Run the team with ChatOpenAI and with Pancake attached; write the timeline of the second."""
    from pancake_langgraph.bench.arms import Arm, arm_run
    from pancake_langgraph.observe import write_trace
    from pancake_langgraph.runtime import attach

    for arm in (Arm.REACTIVE, Arm.PANCAKE):
        tell(f"research team on its corpus, {arm}")
        servers.reset(arm)
        ready = arm_run(arm, servers, cache_salt=f"demo-{arm}")
        graph = example.build_graph(ready.model(max_tokens=48), texts, max_rounds=1, tool_delay_s=_TOOL_DELAY_S)
        if ready.runtime is not None:
            graph = attach(graph, runtime=ready.runtime)
        started_s = time.monotonic()
        try:
            final = graph.invoke(example.inputs(), {"configurable": {"thread_id": "research"}})
        finally:
            if ready.runtime is not None:
                ready.runtime.close()
        tell(f"research team, {arm}: {time.monotonic() - started_s:.1f} s, {len(final['messages'])} messages")
        if ready.runtime is not None:
            write_trace(ready.runtime.ledger.events(), trace_file, process_name="research_team")
