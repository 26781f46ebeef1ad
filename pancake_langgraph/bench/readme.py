"""Rewrites the figures in a README, or in another page, from bench results.

    python -m pancake_langgraph.bench.readme README.md results.json [more.json ...]

The block between the two marker lines is replaced; everything else stays as it is.  Running it again with the same
results changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import click

from pancake_langgraph._errors import ConfigError, PancakeError
from pancake_langgraph.bench.render import format_figure
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.tier_tables import kv_quality_rows, tiers_rows

BEGIN_MARK = "<!-- bench:begin -->"
END_MARK = "<!-- bench:end -->"


#: What a reader of a README wants to see first; everything else stands in the result file.
ROWS: Final = (("ttft_s", "p50"), ("ttft_s", "p99"), ("program_s", "p50"), ("prefilled_tokens", "p50"))
AGAINST: Final = ("plain", "reactive")
OURS: Final = "pancake"
#: Workloads whose tables have an arm per row.
TABLES: Final[Mapping[str, Callable[[BenchResult], list[str]]]] = {"tiers": tiers_rows, "kv-quality": kv_quality_rows}


def render_block(results: Sequence[BenchResult]) -> str:
    """Return the Markdown between the marks: a short table per result, its outcomes, date and machine."""
    return "\n\n".join(_table(result) if result.workload in TABLES else _short(result) for result in results)


def _table(result: BenchResult) -> str:
    """Return a workload's own table, and where it comes from."""
    count = f" ({result.repeats} paired repeats)" if result.repeats > 1 else ""
    rows = TABLES[result.workload](result)
    return "\n".join([f"**`{result.workload}`**{count}", "", *rows, "", _provenance(result)])


def _short(result: BenchResult) -> str:
    """Return the first figures of one result: an arm per column, then the paired ratios that compare with ours."""
    arms = tuple(result.arms)
    versus = [arm for arm in AGAINST if arm in arms and OURS in arms]
    head = ["", *arms, *(f"{arm} / {OURS}" for arm in versus)]
    rows = [
        [f"`{metric}` {name}", *_figures(result, metric, name), *_ratios(result, metric, name, versus)]
        for metric, name in ROWS
        if any(metric in of for of in result.arms.values())
    ]
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in result.outcomes.items())
    return "\n".join(
        [
            f"**`{result.workload}`** ({result.repeats} paired repeats)",
            "",
            f"| {' | '.join(head)} |",
            f"|{' --- |' * len(head)}",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
            f"Actions of the runtime: {outcomes}. {_provenance(result)}",
        ]
    )


def _figures(result: BenchResult, metric: str, name: str) -> list[str]:
    return [format_figure(getattr(of[metric], name)) if metric in of else "" for of in result.arms.values()]


def _ratios(result: BenchResult, metric: str, name: str, versus: Sequence[str]) -> list[str]:
    cells = []
    for arm in versus:
        ratio = result.ratios.get(f"{metric}.{name} {arm}/{OURS}")
        cells.append(
            f"**{format_figure(ratio.median)}** ({format_figure(ratio.min)} to {format_figure(ratio.max)})"
            if ratio
            else ""
        )
    return cells


def replace_block(text: str, block: str) -> str:
    """Return `text` with `block` between the marks.

    Raises:
        ConfigError: if there is not exactly one block.
    """
    if text.count(BEGIN_MARK) != 1 or text.count(END_MARK) != 1 or text.index(END_MARK) < text.index(BEGIN_MARK):
        raise ConfigError(
            f"cannot find where the figures go: got {text.count(BEGIN_MARK)} begin and {text.count(END_MARK)} end "
            f"marks; put one line `{BEGIN_MARK}` and after it one line `{END_MARK}` into the file"
        )
    before, _, rest = text.partition(BEGIN_MARK)
    _, _, after = rest.partition(END_MARK)
    return f"{before}{BEGIN_MARK}\n{block}\n{END_MARK}{after}"


def update_readme(readme: Path, results: Sequence[Path]) -> bool:
    """Rewrite the block of `readme` from result files; return whether the file changed.

    Raises:
        ConfigError: if the README has no block.
        BenchSchemaError: if a file is not a bench result.
        OSError: if a file cannot be read or written.
    """
    block = render_block([BenchResult.from_json(path.read_text(encoding="utf-8")) for path in results])
    old = readme.read_text(encoding="utf-8")
    new = replace_block(old, block)
    if new == old:
        return False
    readme.write_text(new, encoding="utf-8")
    return True


def _provenance(result: BenchResult) -> str:
    return f"Measured {result.date} with version {result.version} on {result.machine.line()}."


@click.command()
@click.argument("readme", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("results", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(readme: Path, results: tuple[Path, ...]) -> None:
    """Put the figures of RESULTS into README."""
    try:
        changed = update_readme(readme, results)
    except PancakeError as exc:
        click.echo(f"error: {exc}", err=True)
        sys.exit(1)
    click.echo(f"{readme}: {'figures rewritten' if changed else 'figures are up to date'}")


if __name__ == "__main__":
    main()
