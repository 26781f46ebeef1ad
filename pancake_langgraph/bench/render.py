"""Bench results as tables: for the terminal (rich) and for Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from pancake_langgraph.bench.metrics import METRICS
from pancake_langgraph.bench.schema import BenchResult, RatioStatistics

_HEADER = ("metric", "arm", "p50", "p90", "p99", "n")


def arms_table(result: BenchResult) -> Table:
    """Return the figures of all arms as a rich table."""
    table = Table(title=f"{result.workload} ({result.repeats} paired repeats)", title_justify="left")
    for column in _HEADER:
        table.add_column(column, justify="left" if column in ("metric", "arm") else "right")
    for row in _arm_rows(result):
        table.add_row(*row)
    return table


def ratios_table(result: BenchResult) -> Table:
    """Return the paired ratios as a rich table."""
    table = Table(title="paired ratios; above 1 the second arm is better", title_justify="left")
    table.add_column("ratio")
    for column in ("median", "min", "max"):
        table.add_column(column, justify="right")
    for key, ratio in result.ratios.items():
        table.add_row(key, *_ratio_cells(ratio))
    return table


def forecast_table(result: BenchResult) -> Table:
    """Return the rows of bench `forecast`, one per shape."""
    columns = {
        "top1": "top1",
        "best_top1": "best",
        "top3": "top3",
        "brier": "brier",
        "best_brier": "best",
        "prefix_share": "prefix",
        "later_prefix_share": "later",
        "lead_s": "lead_s",
    }
    table = Table(title="by shape; best: what knowing the odds would give", title_justify="left")
    table.add_column("shape", no_wrap=True)
    for title in columns.values():
        table.add_column(title, justify="right", no_wrap=True)
    for row in result.sweep or ():
        cells = [format_figure(row[name]) if row.get(name) is not None else "" for name in columns]
        table.add_row(row["shape"], *cells)
    return table


def markdown(result: BenchResult) -> str:
    """Return the result as Markdown: one table of arms, one of ratios, outcomes, notes; ends without a newline."""
    parts = [f"**`{result.workload}`**, {result.repeats} paired repeats", _markdown_table(_HEADER, _arm_rows(result))]
    if result.ratios:
        rows = [(f"`{key}`", *_ratio_cells(ratio)) for key, ratio in result.ratios.items()]
        header = ("ratio (above 1: second arm better)", "median", "min", "max")
        parts.append(_markdown_table(header, rows))
    if result.outcomes:
        parts.append("Actions: " + ", ".join(f"{count} {name}" for name, count in result.outcomes.items()) + ".")
    if result.notes:
        parts.append("\n".join(f"- {_cell(note)}" for note in result.notes))
    return "\n\n".join(parts)


def format_figure(value: float) -> str:
    """Return a number with two or three significant digits, whole numbers from 100 on, never in exponent form."""
    if value == 0:
        return "0"
    if abs(value) < 0.01:
        return f"{value:.{1 - math.floor(math.log10(abs(value)))}f}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def _arm_rows(result: BenchResult) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for metric, meta in METRICS.items():
        for arm, metrics in result.arms.items():
            if metric in metrics:
                stats = metrics[metric]
                figures = (format_figure(stats.p50), format_figure(stats.p90), format_figure(stats.p99))
                rows.append((f"{metric} ({meta.better} is better)", arm, *figures, str(stats.n)))
    return rows


def _ratio_cells(ratio: RatioStatistics) -> tuple[str, str, str]:
    return format_figure(ratio.median), format_figure(ratio.min), format_figure(ratio.max)


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---" if name in ("metric", "arm") or name.startswith("ratio") else "---:" for name in header]
    return "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in (header, rule, *rows))


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
