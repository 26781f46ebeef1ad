"""Rewrites the figures in a README from bench results.

    python -m pancake_langgraph.bench.readme README.md results.json [more.json ...]

The block between the two marker lines is replaced; everything else stays as it is.  Running it again with the same
results changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from pancake_langgraph._errors import ConfigError, PancakeError
from pancake_langgraph.bench.render import markdown
from pancake_langgraph.bench.schema import BenchResult

BEGIN_MARK = "<!-- bench:begin -->"
END_MARK = "<!-- bench:end -->"


def render_block(results: Sequence[BenchResult]) -> str:
    """Return the Markdown that stands between the marks: each result with its version, date and machine line."""
    return "\n\n".join(f"{markdown(result)}\n\n{_provenance(result)}" for result in results)


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
