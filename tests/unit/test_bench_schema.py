from __future__ import annotations

import copy
import getpass
import json
import math
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench import readme, schema_page
from pancake_langgraph.bench.machine import Machine, read_machine
from pancake_langgraph.bench.render import arms_table, format_figure, markdown, ratios_table
from pancake_langgraph.bench.schema import BenchResult, BenchSchemaError, MetricStatistics, RatioStatistics, validate

ROOT = Path(__file__).parents[2]
MACHINE = Machine("Some CPU", 2, 8.0, "Linux x86_64", "3.11.7", {"langgraph": "1.2.24"})


def a_result(**change: Any) -> BenchResult:
    fields: dict[str, Any] = {
        "workload": "tool-pause",
        "version": "0.1.0",
        "machine": MACHINE,
        "date": "2025-01-31",
        "repeats": 5,
        "arms": {
            "plain": {"ttft_s": MetricStatistics(1.5, 2.0, 2.5, 40)},
            "pancake": {
                "ttft_s": MetricStatistics(0.1, 0.2, 0.3, 40),
                "output_tokens_per_s": MetricStatistics(123.4, 130.0, 131.0, 5),
            },
        },
        "ratios": {"ttft_s.p50 plain/pancake": RatioStatistics(15.0, 12.0, 16.0)},
        "outcomes": {"used": 30, "late": 2, "wasted": 1, "failed": 0, "rejected": 4},
        "notes": ("a | b",),
    }
    return BenchResult(**(fields | change))


@pytest.mark.parametrize("change", [{}, {"summary": {"concurrency": 2.5}, "sweep": ({"pressure": 0.5},)}])
def test_a_result_survives_json(change: dict):
    result = a_result(**change)
    assert BenchResult.from_json(result.to_json()) == result


def test_the_json_has_exactly_the_documented_keys():
    document = json.loads(a_result().to_json())
    assert list(document) == [
        "workload", "version", "machine", "date", "repeats", "arms", "ratios", "outcomes", "notes",
    ]  # fmt: skip
    assert set(document["arms"]["plain"]["ttft_s"]) == {"p50", "p90", "p99", "n"}
    assert set(document["ratios"]["ttft_s.p50 plain/pancake"]) == {"median", "min", "max"}


def edit(path: str, value: Any) -> dict[str, Any]:
    """Return a valid document with one place changed, or removed when `value` is `...`."""
    document = copy.deepcopy(a_result().to_dict())
    *parents, last = path.split("/")
    target = document
    for key in parents:
        target = target[key]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("workload", ..., "workload: missing"),
        ("extra", 1, "extra: not a known key"),
        ("workload", "", "workload: got ''"),
        ("date", "yesterday", "date: got 'yesterday'"),
        ("repeats", 0, "repeats: got 0"),
        ("repeats", True, "repeats: got True"),
        ("notes", "text", "notes: got str"),
        ("machine", [], "machine: got list"),
        ("machine/host", "x", "machine: got the keys"),
        ("machine/cores", 0, "machine.cores"),
        ("machine/memory_gib", "8", "machine.memory_gib"),
        ("machine/accelerator", 3, "machine.accelerator"),
        ("machine/packages", {"a": 1}, "machine.packages"),
        ("machine/cpu", None, "machine.cpu"),
        ("arms", {}, "arms: got {}"),
        ("arms/bad arm", {}, "arms.bad arm: allowed"),
        ("arms/plain", 3, "arms.plain: got int"),
        ("arms/plain/speed", {"p50": 1, "p90": 1, "p99": 1, "n": 1}, "arms.plain.speed: not a known metric"),
        ("arms/plain/ttft_s", {"p50": 1}, "arms.plain.ttft_s: got"),
        ("arms/plain/ttft_s/p50", math.nan, "finite"),
        ("arms/plain/ttft_s/p50", 9.0, "ascending"),
        ("arms/plain/ttft_s/n", 0, "arms.plain.ttft_s.n"),
        ("ratios", [], "ratios: got list"),
        ("ratios/ttft_s plain", {"median": 1, "min": 1, "max": 1}, "metric.percentile first/second"),
        ("ratios/ttft_s.p50 plain/other", None, "names an arm that is not there"),
        ("ratios/tpot_s.p42 a/b", None, "metric.percentile first/second"),
        ("outcomes", 1, "outcomes: got int"),
        ("outcomes/lucky", 1, "outcomes.lucky: not a known outcome"),
        ("outcomes/used", -1, "outcomes.used"),
        ("summary", 1, "summary: got int"),
        ("sweep", {}, "sweep: got dict"),
    ],
)
def test_a_wrong_document_is_refused_with_the_place(path: str, value: Any, said: str):
    parts = path.split("/") if not path.startswith("ratios/") else None
    if parts is None:  # keys of ratios hold a slash themselves
        document = copy.deepcopy(a_result().to_dict())
        document["ratios"][path.removeprefix("ratios/")] = value
    else:
        document = edit(path, value)
    with pytest.raises(BenchSchemaError) as caught:
        validate(document)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "ratio", [{"median": 1.0}, {"median": math.inf, "min": 1.0, "max": 2.0}, {"median": 3.0, "min": 1.0, "max": 2.0}]
)
def test_a_wrong_ratio_is_refused(ratio: dict):
    document = a_result().to_dict()
    document["ratios"]["ttft_s.p50 plain/pancake"] = ratio
    with pytest.raises(BenchSchemaError, match="ratios"):
        validate(document)


def test_all_problems_are_listed_at_once():
    document = edit("repeats", 0) | {"date": "?"}
    with pytest.raises(BenchSchemaError) as caught:
        validate(document)
    assert "repeats" in str(caught.value)
    assert "date" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_text_that_is_no_result_is_a_typed_error(text: str):
    with pytest.raises(BenchSchemaError):
        BenchResult.from_json(text)


def test_a_figure_that_is_not_finite_is_never_written():
    with pytest.raises(BenchSchemaError, match="finite"):
        a_result(arms={"plain": {"ttft_s": MetricStatistics(1.0, 1.0, math.inf, 1)}}, ratios={}).to_json()


def test_the_schema_page_is_what_the_code_says():
    page = (ROOT / "docs" / "bench-schema.md").read_text(encoding="utf-8")
    assert page == schema_page.schema_markdown(), (
        "run python -m pancake_langgraph.bench.schema_page docs/bench-schema.md"
    )


def test_the_schema_page_command_writes_the_page(tmp_path: Path):
    path = tmp_path / "page.md"
    assert CliRunner().invoke(schema_page.main, [str(path)]).exit_code == 0
    assert path.read_text(encoding="utf-8") == schema_page.schema_markdown()


def test_machine_facts_do_not_name_the_machine():
    machine = read_machine(accelerator="Some GPU")
    text = machine.line()
    assert machine.cores >= 1
    assert machine.memory_gib > 0
    assert socket.gethostname() not in text or len(socket.gethostname()) < 3
    assert str(Path.home()) == "/" or str(Path.home()) not in text
    assert f"/{getpass.getuser()}" not in text
    assert text.startswith("Some GPU")
    validate(a_result(machine=machine).to_dict())


def test_a_result_prints_as_tables():
    console = Console(width=120)
    with console.capture() as capture:
        console.print(arms_table(a_result()), ratios_table(a_result()))
    assert "ttft_s" in capture.get()
    assert "plain/pancake" in capture.get()


def test_markdown_has_one_row_for_each_arm_and_metric_and_no_loose_bars():
    text = markdown(a_result())
    assert text.count("| ttft_s (lower is better) |") == 2
    assert "| `ttft_s.p50 plain/pancake` | 15.0 | 12.0 | 16.0 |" in text
    assert "a \\| b" in text
    assert "Actions: 30 used" in text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.0123, "0.012"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_figures_are_short(value: float, text: str):
    assert format_figure(value) == text


def write_readme(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_the_readme_block_is_rewritten_and_a_second_run_changes_nothing(tmp_path: Path):
    page = write_readme(tmp_path / "README.md", f"# Title\n\n{readme.BEGIN_MARK}\nold\n{readme.END_MARK}\n\nAfter.\n")
    results = tmp_path / "results.json"
    results.write_text(a_result().to_json(), encoding="utf-8")
    runner = CliRunner()
    first = runner.invoke(readme.main, [str(page), str(results)])
    assert first.exit_code == 0, first.output
    once = page.read_text(encoding="utf-8")
    assert once.startswith("# Title\n")
    assert once.endswith("\n\nAfter.\n")
    assert "old" not in once
    assert "2025-01-31" in once
    assert "Some CPU" in once
    second = runner.invoke(readme.main, [str(page), str(results)])
    assert "up to date" in second.output
    assert page.read_text(encoding="utf-8") == once


@pytest.mark.parametrize("text", ["nothing", readme.BEGIN_MARK, f"{readme.END_MARK}\n{readme.BEGIN_MARK}"])
def test_a_readme_without_one_block_is_refused(text: str):
    with pytest.raises(ConfigError, match="marks"):
        readme.replace_block(text, "block")


def test_a_wrong_results_file_ends_with_an_error_and_leaves_the_readme(tmp_path: Path):
    text = f"{readme.BEGIN_MARK}\n{readme.END_MARK}\n"
    page = write_readme(tmp_path / "README.md", text)
    results = tmp_path / "results.json"
    results.write_text("{}", encoding="utf-8")
    outcome = CliRunner().invoke(readme.main, [str(page), str(results)])
    assert outcome.exit_code == 1
    assert "not a bench result" in outcome.output
    assert page.read_text(encoding="utf-8") == text
