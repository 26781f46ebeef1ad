"""The saver under a LangGraph server."""

from __future__ import annotations

from pathlib import Path

import pytest

from pancake_langgraph import PancakeSaver
from pancake_langgraph._errors import ConfigError
from pancake_langgraph.config.env import saver_from_env
from pancake_langgraph.served import make_saver, unless_served


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "PANCAKE_SAVER",
        "PANCAKE_SAVER_ALLOW",
        "PANCAKE_SAVER_TTL_S",
        "LANGSMITH_LANGGRAPH_API_VARIANT",
        "LANGGRAPH_CHECKPOINTER",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", ["LANGSMITH_LANGGRAPH_API_VARIANT", "LANGGRAPH_CHECKPOINTER"])
def test_under_a_server_the_apps_own_saver_is_dropped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = PancakeSaver()
    assert unless_served(saver) is saver
    monkeypatch.setenv(name, "local_dev")
    assert unless_served(saver) is None


async def test_a_server_gets_the_saver_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PANCAKE_SAVER", str(tmp_path / "threads.db"))
    async with make_saver() as saver:
        assert isinstance(saver, PancakeSaver)
        assert [item async for item in saver.alist(None)] == []
    assert (tmp_path / "threads.db").exists()


def test_classes_and_time_to_live_are_read() -> None:
    environ = {"PANCAKE_SAVER": "redis://h", "PANCAKE_SAVER_ALLOW": " app:Plan, app.x:Y,", "PANCAKE_SAVER_TTL_S": "60"}
    assert saver_from_env(environ) == ("redis://h", (("app", "Plan"), ("app.x", "Y")), 60.0)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({}, "PANCAKE_SAVER is not set"),
        ({"PANCAKE_SAVER": "a.db", "PANCAKE_SAVER_ALLOW": "app.Plan"}, "module:Class"),
        ({"PANCAKE_SAVER": "a.db", "PANCAKE_SAVER_TTL_S": "soon"}, "PANCAKE_SAVER_TTL_S"),
    ],
)
def test_what_cannot_be_read_is_named(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        saver_from_env(environ)
