"""Runs the team once: `python -m examples.research_team --base-url URL --model NAME`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click
from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableConfig
from langgraph.graph.state import CompiledStateGraph

from examples.research_team.app import DEFAULT_QUESTION, TeamState, build_graph, inputs
from examples.research_team.corpus import load_corpus, project_docs
from pancake_langgraph._errors import PancakeError
from pancake_langgraph.config.env import settings_from_env

_CONFIG: RunnableConfig = {"configurable": {"thread_id": "research"}}


def make_model(*, base_url: str, model: str, plain: bool) -> BaseChatModel:
    """Return the chat model: ours, or the one that the app would use without us."""
    if plain:
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(model=model, base_url=base_url, api_key=lambda: "EMPTY", temperature=0.0)
    from pancake_langgraph.chat_model import PancakeChatModel

    return PancakeChatModel(model=model, base_url=base_url, temperature=0.0)


@click.command()
@click.option("--base-url", required=True, help="OpenAI-compatible address, for example http://127.0.0.1:8000/v1.")
@click.option("--model", required=True, help="Model name as the server knows it.")
@click.option("--question", default=DEFAULT_QUESTION, show_default=True)
@click.option("--corpus", type=click.Path(path_type=Path), help="Folder of texts; default: this project's docs.")
@click.option("--tool-delay", "tool_delay_s", type=click.FloatRange(min=0), default=0.0, help="Seconds a tool takes.")
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True, help="Most rounds of research.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write the timeline to this file.")
@click.option("--plain", is_flag=True, help="Use ChatOpenAI and no runtime.")
def main(
    *,
    base_url: str,
    model: str,
    question: str,
    corpus: Path | None,
    tool_delay_s: float,
    rounds: int,
    trace: Path | None,
    plain: bool,
) -> None:
    """Answer one question from a folder of texts."""
    try:
        texts = load_corpus(corpus if corpus is not None else project_docs())
        chat_model = make_model(base_url=base_url, model=model, plain=plain)
        graph = build_graph(chat_model, texts, max_rounds=rounds, tool_delay_s=tool_delay_s)
        started_s = time.monotonic()
        if plain:
            final = graph.invoke(inputs(question), _CONFIG)
        else:
            final = _run_attached(graph, question, base_url=base_url, model=model, trace=trace)
    except PancakeError as exc:
        click.echo(f"error: {exc}", err=True)
        sys.exit(1)
    for message in final["messages"]:
        click.echo(f"--- {message.name or message.type}\n{message.content}")
    click.echo(f"--- {time.monotonic() - started_s:.1f} s")


def _run_attached(
    graph: CompiledStateGraph[TeamState, None, TeamState, TeamState],
    question: str,
    *,
    base_url: str,
    model: str,
    trace: Path | None,
) -> dict[str, Any]:
    from pancake_langgraph.observe import write_trace
    from pancake_langgraph.runtime import Runtime, attach

    runtime = Runtime(settings_from_env(base_url=base_url, model=model))
    try:
        watched = attach(graph, runtime=runtime)
        final = watched.invoke(inputs(question), _CONFIG)
        runtime.wait_idle()
    finally:
        runtime.close()
    if trace is not None:
        write_trace(runtime.ledger.events(), trace, process_name="research_team")
        click.echo(f"timeline: {trace}", err=True)
    return final


if __name__ == "__main__":
    main()
