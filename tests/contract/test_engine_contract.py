"""One suite over every adapter; the HTTP adapters talk to the fake engine behind a real port."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from pancake_langgraph._clock import VirtualClock
from pancake_langgraph._errors import ConfigError
from pancake_langgraph.engines.base import Engine
from pancake_langgraph.engines.fake import FakeEngine, FakeEngineSettings
from pancake_langgraph.engines.registry import create_engine, engine_names, register_engine
from pancake_langgraph.testing.fake_server import FakeEngineServer


def _suite():
    name = "pancake_engine_suite"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "engine_suite.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture
def server() -> Iterator[FakeEngineServer]:
    settings = FakeEngineSettings(pool_blocks=512, max_model_len_tokens=4096)
    with FakeEngineServer(FakeEngine(settings, VirtualClock())) as running:
        yield running


class TestEngineContract(_suite().EngineContract):
    pool_hints = False

    @pytest.fixture
    def server(self) -> Iterator[FakeEngineServer]:
        settings = FakeEngineSettings(pool_blocks=512, max_model_len_tokens=4096, pool_hints=self.pool_hints)
        with FakeEngineServer(FakeEngine(settings, VirtualClock())) as running:
            yield running

    @pytest.fixture(params=["null", "fake", "openai", "vllm"])
    async def engine(self, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
        if request.param in ("openai", "vllm"):
            base_url = request.getfixturevalue("server").base_url
            yield create_engine(request.param, base_url=base_url, deadline_s=20.0)
        else:
            yield create_engine(request.param, clock=VirtualClock())


class TestEngineContractWithPoolHints(TestEngineContract):
    pool_hints = True

    @pytest.fixture(params=["fake", "vllm"])
    async def engine(self, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
        if request.param == "vllm":
            yield create_engine("vllm", base_url=request.getfixturevalue("server").base_url, deadline_s=20.0)
        else:
            yield FakeEngine(FakeEngineSettings(pool_hints=True), VirtualClock())

    async def test_hints_are_found_by_the_probe(self, subject: Any) -> None:
        assert subject.can.pool_hints


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="fake, null, openai, vllm"):
        create_engine("nope")


@pytest.mark.parametrize("name", ["openai", "vllm"])
def test_an_http_adapter_needs_an_address(name: str) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        create_engine(name)
    with pytest.raises(ConfigError, match="base_url"):
        create_engine(name, base_url="ftp://somewhere")


def test_a_taken_name_cannot_be_registered_again() -> None:
    with pytest.raises(ConfigError, match="taken"):
        register_engine("null", lambda options: create_engine("null"))
    assert engine_names() == ("fake", "null", "openai", "vllm")
