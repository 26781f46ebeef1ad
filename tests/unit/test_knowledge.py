"""Stored forecasts: whole or not there, bounded, and never in the way of a run."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from langgraph.graph import START, StateGraph

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.config.env import settings_from_env
from pancake_langgraph.forecast import TransitionForecaster
from pancake_langgraph.runtime import Runtime, attach
from pancake_langgraph.runtime.knowledge import MAX_BYTES, MAX_FILES, ForecastFolder, Knowledge

ID = "0123456789abcdef"


class Oracle(TransitionForecaster):
    """Can be looked at after its runtime is closed."""


def graph(*names: str) -> Any:
    builder = StateGraph(dict)
    for name in names:
        builder.add_node(name, lambda _: {})
    builder.add_edge(START, names[0])
    builder.add_conditional_edges(names[0], lambda _: names[-1], list(names[1:]))
    return builder.compile()


def run(folder: Path, times: int = 5, *names: str) -> tuple[Oracle, Runtime]:
    oracle = Oracle()
    with Runtime(RuntimeSettings(engine="null", forecast_dir=str(folder)), forecaster=oracle) as runtime:
        attached = attach(graph(*(names or ("a", "b", "c"))), runtime=runtime)
        runtime.start()
        for _ in range(times):
            attached.invoke({})
        assert runtime.wait_idle()
        assert runtime.statistics().failed_signals == 0
    return oracle, runtime


def test_a_new_process_starts_with_what_the_last_one_learnt(tmp_path: Path) -> None:
    first, _ = run(tmp_path)
    [path] = tmp_path.iterdir()
    later, runtime = run(tmp_path, 0)
    found = {c.node: c.p_next for c in later.candidates(path.stem, "a", context=(START,))}
    assert found["c"] == pytest.approx(first.candidates(path.stem, "a", context=(START,))[0].p_next)
    assert found["c"] > 0.8
    assert runtime.statistics().failed_forecast_files == 0


def test_graphs_are_kept_apart(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, 5, "a", "b", "d")
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_is_written_unless_a_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with Runtime(RuntimeSettings(engine="null")) as runtime:
        attach(graph("a", "b"), runtime=runtime).invoke({})
        assert runtime.wait_idle()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_can_be_named_by_a_variable() -> None:
    assert settings_from_env({}).forecast_dir is None
    assert settings_from_env({"PANCAKE_FORECAST_DIR": "~/forecasts"}).forecast_dir == "~/forecasts"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": "pancake forecast", "version": 99}',
        '{"format": "other", "version": 1}',
        "[" * 100_000,
    ],
    ids=["empty", "cut", "list", "newer", "foreign", "deep"],
)
def test_a_damaged_file_is_counted_said_once_and_learnt_anew(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path)
    [path] = tmp_path.iterdir()
    path.write_text(text, encoding="utf-8")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "pancake_langgraph.runtime.knowledge"):
        _, runtime = run(tmp_path)
    assert runtime.statistics().failed_forecast_files == 1
    assert len([record for record in caplog.records if "stored forecast" in record.message]) == 1
    assert json.loads(path.read_text(encoding="utf-8"))["graph_id"] == path.stem


def test_a_snapshot_that_does_not_fit_is_counted_too(tmp_path: Path) -> None:
    run(tmp_path)
    [path] = tmp_path.iterdir()
    stored = json.loads(path.read_text(encoding="utf-8"))
    stored["snapshot"]["graphs"][0]["slow"] = 7
    path.write_text(json.dumps(stored), encoding="utf-8")
    _, runtime = run(tmp_path)
    assert runtime.statistics().failed_forecast_files == 1


def test_a_folder_that_cannot_be_used_does_no_harm(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder", encoding="utf-8")
    _, runtime = run(blocked / "inside")
    assert runtime.statistics().failed_forecast_files >= 1


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path: Path) -> None:
    folder = ForecastFolder(tmp_path)
    folder.write(ID, {"n": 1})
    with pytest.raises(TypeError):
        folder.write(ID, {"n": object()})
    assert folder.read(ID) == {"n": 1}
    assert [path.name for path in tmp_path.iterdir()] == [f"{ID}.json"]


def test_a_file_is_for_its_owner_only(tmp_path: Path) -> None:
    ForecastFolder(tmp_path / "new").write(ID, {})
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / f"{ID}.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("graph_id", ["unread", "../../etc/passwd", "", "ABCDEF0123456789", f"{ID}\n"])
def test_what_is_no_fingerprint_names_no_file(tmp_path: Path, graph_id: str) -> None:
    folder = ForecastFolder(tmp_path)
    folder.write(graph_id, {})
    assert folder.read(graph_id) is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_graph_is_refused(tmp_path: Path) -> None:
    folder = ForecastFolder(tmp_path)
    folder.write(ID, {})
    (tmp_path / f"{ID}.json").rename(tmp_path / f"{ID[::-1]}.json")
    with pytest.raises(ConfigError, match="another graph"):
        folder.read(ID[::-1])


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    folder = ForecastFolder(tmp_path)
    with (tmp_path / f"{ID}.json").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ConfigError, match="delete it"):
        folder.read(ID)


def test_the_folder_is_bounded_and_foreign_files_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{}", encoding="utf-8")
    folder = ForecastFolder(tmp_path)
    for number in range(MAX_FILES + 5):
        folder.write(f"{number:016x}", {})
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == MAX_FILES + 1
    assert "notes.json" in names
    assert f"{MAX_FILES + 4:016x}.json" in names


async def test_a_graph_is_loaded_once_and_saved_only_when_it_ran(tmp_path: Path) -> None:
    forecaster = TransitionForecaster()
    forecaster.observe_transition(ID, "a", "b", elapsed_s=1.0)
    knowledge = Knowledge(ForecastFolder(tmp_path), forecaster)
    knowledge.touch(ID)  # not attached: nobody asked for it
    await knowledge.save()
    assert list(tmp_path.iterdir()) == []
    knowledge.want(ID)
    await knowledge.load()
    await knowledge.save()
    assert list(tmp_path.iterdir()) == []
    knowledge.touch(ID)
    await knowledge.save()
    assert len(list(tmp_path.iterdir())) == 1
    before = forecaster.snapshot()
    knowledge.want(ID)
    await knowledge.load()
    assert forecaster.snapshot() == before
