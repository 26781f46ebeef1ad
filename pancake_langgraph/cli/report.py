"""Tables for the terminal."""

from __future__ import annotations

from rich.table import Table

from pancake_langgraph.bench.render import format_figure
from pancake_langgraph.bench.statistics import percentile
from pancake_langgraph.observe import Summary


def summary_tables(summary: Summary) -> tuple[Table, Table]:
    """Return one table of first-token times per agent and one of what became of the actions."""
    times = Table(title="time to first token", title_justify="left")
    times.add_column("agent")
    for column in ("calls", "p50 s", "p90 s", "max s"):
        times.add_column(column, justify="right")
    for agent, values in summary.ttft_s_by_agent.items():
        figures = (percentile(values, 50), percentile(values, 90), max(values))
        times.add_row(agent, str(len(values)), *map(format_figure, figures))
    actions = Table(title="actions", title_justify="left", caption=_caption(summary), caption_justify="left")
    actions.add_column("outcome")
    actions.add_column("actions", justify="right")
    actions.add_column("tokens", justify="right")
    for outcome, count in summary.outcomes.items():
        actions.add_row(outcome.value, str(count), f"{summary.outcome_tokens[outcome]:,}")
    actions.add_row("open", str(summary.open_actions), "")
    return times, actions


def _caption(summary: Summary) -> str:
    cached = "unknown" if summary.cached_tokens is None else f"{summary.cached_tokens:,}"
    waste = "none settled" if summary.waste_ratio is None else f"{summary.waste_ratio:.1%}"
    return (
        f"{summary.calls} calls in {summary.runs} runs read {summary.prompt_tokens:,} prompt tokens "
        f"(cached: {cached}); warmed {summary.warm_tokens:,} tokens, wasted: {waste}"
    )
