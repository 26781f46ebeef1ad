"""`pancake bench NAME`: run a workload and print what it measured."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from pancake_langgraph._errors import PancakeError

if TYPE_CHECKING:
    from pancake_langgraph.bench.options import LiveModel
    from pancake_langgraph.bench.schema import BenchResult


@click.command()
@click.argument("name")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1, 1000), help="Paired repeats.")
@click.option(
    "--sweep-repeats",
    default=0,
    show_default=True,
    type=click.IntRange(0, 1000),
    help="Repeats at every other point of a sweep; 0 leaves the sweep out.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here.")
@click.option(
    "--dtype",
    default="bfloat16",
    show_default=True,
    type=click.Choice(["bfloat16", "float32"]),
    help="Of the engine's model, and of the embedder of texts.",
)
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1, 1024), help="Threads per engine.")
@click.option("--chunk-tokens", default=32, show_default=True, type=int, help="Chunk of the cache server, in tokens.")
@click.option("--turns", default="10,100,1000", show_default=True, help="Lengths at which `saver` is measured.")
@click.option(
    "--runs", default=48, show_default=True, type=int, help="Runs of a shape in `forecast`, an arm in `retrieval-node`."
)
@click.option("--cost-runs", default=10_000, show_default=True, type=int, help="Runs that weigh cost in `forecast`.")
@click.option("--real-routers", is_flag=True, help="Let a real model choose routes in `forecast` as well.")
@click.option("--prompts", default=60, show_default=True, type=int, help="Prompts of `kv-quality`.")
@click.option("--chunks", default=100_000, show_default=True, type=int, help="Texts of the benches of indexes.")
@click.option("--large", default=1_000_000, show_default=True, type=int, help="Vectors of the large set; 0: none.")
@click.option("--searches", default=1_000, show_default=True, type=int, help="Searches of an arm in a repeat of these.")
@click.option(
    "--corpus", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Take texts of this folder."
)
@click.option(
    "--live-s", default=0.0, show_default=True, type=float, help="Seconds with a model in `agent-memory`; 0: without."
)
@click.option(
    "--live-model", default="small", show_default=True, type=click.Choice(["small", "tiny"]), help="The model of those."
)
@click.option("--reads-per-s", default="", help="Slower disks for `retrieval-node`, with commas: 2000,500. Needs root.")
@click.option("--arms", default="", help="Only these arms, with commas: plain,pancake. [default: all]")
def bench(
    name: str,
    repeats: int,
    sweep_repeats: int,
    json_file: Path | None,
    dtype: str,
    threads: int,
    chunk_tokens: int,
    turns: str,
    runs: int,
    cost_runs: int,
    real_routers: bool,
    prompts: int,
    chunks: int,
    large: int,
    searches: int,
    corpus: Path | None,
    live_s: float,
    live_model: LiveModel,
    reads_per_s: str,
    arms: str,
) -> None:
    """Run workload NAME with all arms interleaved.

    NAME: tool-pause, hold, no-pressure, handoff, fan-out, forecast, saver, tiers,
    kv-quality, retrieval, agent-memory, retrieval-load, drafts or retrieval-node.

    The exit status is 0 whatever the figures say; it is not 0 when the run itself failed.
    """
    from pancake_langgraph.bench.options import BenchOptions
    from pancake_langgraph.bench.workloads import run_bench

    if json_file is not None and not json_file.resolve().parent.is_dir():
        raise click.UsageError(f"--json: the folder of {json_file} does not exist; make it first")
    logging.basicConfig(level=logging.WARNING)
    progress = Console(stderr=True)
    try:
        options = BenchOptions(
            repeats=repeats,
            sweep_repeats=sweep_repeats,
            dtype=dtype,
            num_threads=threads,
            chunk_tokens=chunk_tokens,
            turns=_numbers("--turns", turns),
            runs=runs,
            cost_runs=cost_runs,
            real_routers=real_routers,
            prompts=prompts,
            chunks=chunks,
            large_rows=large,
            searches=searches,
            corpus=corpus,
            live_s=live_s,
            live_model=live_model,
            reads_per_s=_numbers("--reads-per-s", reads_per_s) if reads_per_s else (),
            arms=tuple(filter(None, (part.strip() for part in arms.split(",")))),
        )
        result = run_bench(name, options, lambda text: progress.log(text, highlight=False))
    except PancakeError as exc:
        raise click.ClickException(str(exc)) from exc
    console = Console()
    show(result, console)
    if json_file is not None:
        json_file.write_text(result.to_json(), encoding="utf-8")
        console.print(f"written: {json_file}")


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Return the whole numbers of a list with commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as exc:
        raise click.UsageError(f"{option}: got {text!r}, allowed are whole numbers with commas, as in 10,100") from exc


def show(result: BenchResult, console: Console) -> None:
    """Print tables, sweep, outcomes and notes."""
    from pancake_langgraph.bench.render import arms_table, forecast_table, ratios_table

    console.print(arms_table(result))
    if result.ratios:
        console.print(ratios_table(result))
    if result.workload == "forecast":
        console.print(forecast_table(result))
    else:
        for row in result.sweep or ():
            console.print(row)
    if result.outcomes:
        console.print(f"outcomes: {dict(result.outcomes)}")
    console.print(f"summary: {result.summary}")
    for note in result.notes:
        console.print(f"- {note}")
    console.print(result.machine.line())
