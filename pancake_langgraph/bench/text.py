"""Real text for prompts: sentences of this package's own documentation strings, drawn with a seed."""

from __future__ import annotations

import ast
import functools
import random
from pathlib import Path


@functools.cache
def _sentences() -> tuple[str, ...]:
    root = Path(__file__).resolve().parent.parent
    found: list[str] = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = " ".join((ast.get_docstring(node) or "").split())
                found += [f"{part.strip()}." for part in text.split(". ") if len(part.split()) >= 6]
    return tuple(sorted(set(found)))


def passages(num_words: int, *, seed: int) -> str:
    """Return about `num_words` words of sentences; equal seeds give equal text for one version of the package."""
    rng = random.Random(seed)
    sentences = _sentences()
    words = 0
    chosen: list[str] = []
    while words < num_words:
        sentence = rng.choice(sentences)
        chosen.append(sentence)
        words += len(sentence.split())
    return " ".join(chosen)
