"""Holds the size budgets: `python .ci/size_check.py FOLDER…` prints what is over and exits 1 when anything is too far.

Modules: 400 lines wanted, 600 at most; below `tests` 600 without a wish.  Functions: 80 lines at most, docstring and
decorators not counted.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

WANTED_MODULE_LINES = 400
MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 80

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests/"

#: `path` or `path::function`, from the root of the repository -> why it may be longer.
EXCEPTIONS: dict[str, str] = {
    "tests/data/record_vllm_answers.py::requests": "a table of what is recorded, one entry after the other",
    "tests/unit/test_checkpoint_codec.py": "one value of every kind, and what is refused, share their samples",
}


class Finding(NamedTuple):
    """One thing over its budget; `hard` ones fail the check."""

    place: str
    text: str
    hard: bool


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function's body and signature, without docstring and decorators."""
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def check_source(place: str, source: str) -> Iterator[Finding]:
    """Yield what in one module is over its budget."""
    num_lines = len(source.splitlines())
    wanted = MAX_MODULE_LINES if place.startswith(TESTS) else WANTED_MODULE_LINES
    if num_lines > wanted and place not in EXCEPTIONS:
        limit = MAX_MODULE_LINES if num_lines > MAX_MODULE_LINES else wanted
        yield Finding(place, f"{num_lines} lines, {limit} allowed", hard=num_lines > MAX_MODULE_LINES)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{place}::{node.name}"
            if (lines := function_lines(node)) > MAX_FUNCTION_LINES and name not in EXCEPTIONS:
                yield Finding(
                    f"{place}:{node.lineno}", f"{node.name} has {lines} lines, {MAX_FUNCTION_LINES} allowed", hard=True
                )


def place_of(path: Path) -> str:
    """Return how a file is named: from the root of the repository where it lies there."""
    whole = path.resolve()
    return (whole.relative_to(ROOT) if whole.is_relative_to(ROOT) else whole).as_posix()


def main(folders: list[str]) -> int:
    """Check every Python file below `folders`; return the exit code."""
    findings = [
        finding
        for folder in folders
        for path in sorted(Path(folder).rglob("*.py"))
        for finding in check_source(place_of(path), path.read_text(encoding="utf-8"))
    ]
    for finding in findings:
        print(f"{'error' if finding.hard else 'note'}: {finding.place}: {finding.text}")  # noqa: T201 -- its purpose
    return int(any(finding.hard for finding in findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
