"""What the package exports, and what type checkers make of it."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import pancake_langgraph
from pancake_langgraph import _errors

ROOT = Path(__file__).resolve().parents[2]
ERRORS = {
    name for name, kind in vars(_errors).items() if inspect.isclass(kind) and issubclass(kind, _errors.PancakeError)
}


def test_every_name_can_be_imported_and_every_error_is_a_name() -> None:
    for name in pancake_langgraph.__all__:
        assert getattr(pancake_langgraph, name).__name__ == name
    assert set(pancake_langgraph.__all__) >= ERRORS
    assert dir(pancake_langgraph) == sorted(pancake_langgraph.__all__)
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = pancake_langgraph.Nonsense


def test_every_error_that_the_pages_name_can_be_imported() -> None:
    known = set(pancake_langgraph.__all__)
    python = {"KeyError", "OSError", "TypeError", "ValueError", "ImportError", "RuntimeError", "TimeoutError"}
    named: set[str] = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        words = set(re.findall(r"`([A-Z][a-z]\w+)`", page.read_text(encoding="utf-8")))
        named |= {word for word in words if word in ERRORS or word.endswith(("Error", "Locked", "Mismatch"))}
    assert len(named) > 5
    assert named - known - python == set()


def test_type_checkers_know_these_names_and_no_others() -> None:
    tree = ast.parse(Path(pancake_langgraph.__file__).read_text(encoding="utf-8"))
    assert not [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"]
    checked = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    known = {alias.name for node in checked for line in node.body for alias in line.names}  # type: ignore[attr-defined]
    assert known == set(pancake_langgraph.__all__)
