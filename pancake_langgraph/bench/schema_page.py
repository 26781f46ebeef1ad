"""Writes the page that documents the result format from the dataclasses themselves.

python -m pancake_langgraph.bench.schema_page docs/bench-schema.md
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path

import click

from pancake_langgraph.bench.machine import Machine
from pancake_langgraph.bench.metrics import METRICS
from pancake_langgraph.bench.schema import BenchResult, MetricStatistics, RatioStatistics

_INTRODUCTION = """\
# Format of bench results

<!-- Made by `python -m pancake_langgraph.bench.schema_page`; a test keeps it equal to the code. -->

Every bench of this project writes the same JSON object: `pancake bench NAME --json FILE`. Figures are only written
down, never judged: the exit status is 0 whatever they are. Numbers are finite and not negative; keys that are not
listed here are refused.

An *arm* is one way of serving the same work, for example `plain` (an ordinary chat model and an engine with prefix
caching), `reactive` (the same with a KV cache server behind the engine), `pancake`, and `oracle` (everything is
resident already). A *repeat* runs every arm once, one after the other in the same process tree, so the arms of one
repeat can be compared as a pair.
"""

_PERCENTILES = """\
Percentiles interpolate linearly between the two nearest values. They are taken over all values of all repeats, in
ascending order for every metric.
"""

_RATIOS = """\
A ratio is formed per repeat and then summarized, so that slow drift of the machine cancels out. For metrics where
less is better it is first / second, for the others second / first: above 1 the second arm is better. A repeat in which
the divisor is 0 gives no ratio, and a note says so.
"""


def schema_markdown() -> str:
    """Return the whole page."""
    parts = [
        _INTRODUCTION,
        "## Top level\n\n" + _field_table(BenchResult),
        "## Machine\n\n" + _field_table(Machine),
        "## Figures of one metric\n\n" + _PERCENTILES + "\n" + _field_table(MetricStatistics),
        "## Metrics\n\n" + _metric_table(),
        "## Ratios\n\n" + _RATIOS + "\n" + _field_table(RatioStatistics),
    ]
    return "\n".join(parts)


def _field_table(kind: type) -> str:
    lines = ["| key | required | meaning |", "| --- | --- | --- |"]
    for entry in fields(kind):
        required = "yes" if kind is not BenchResult or entry.default is MISSING else "no"
        lines.append(f"| `{entry.name}` | {required} | {entry.metadata['doc']} |")
    return "\n".join(lines) + "\n"


def _metric_table() -> str:
    lines = ["| metric | unit | better | one value is |", "| --- | --- | --- | --- |"]
    lines += [f"| `{name}` | {meta.unit} | {meta.better} | {meta.description} |" for name, meta in METRICS.items()]
    return "\n".join(lines) + "\n"


@click.command()
@click.argument("page", type=click.Path(dir_okay=False, path_type=Path))
def main(page: Path) -> None:
    """Write PAGE."""
    page.write_text(schema_markdown(), encoding="utf-8")


if __name__ == "__main__":
    main()
