"""Savers and stores on every backend, for their contract suites."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pancake_langgraph.checkpoint.store import Store
from pancake_langgraph.saver import PancakeSaver
from tests.contract.store_kit import KINDS, SHARED_KINDS, MakeStore, opened

BACKENDS = ("sqlite", "memory", "redis")


@dataclass(slots=True)
class SaverFactory:
    """Makes savers on one fresh database; all of them are closed at the end of the test.

    On `memory` each saver has a database of its own, on the others they share one.
    """

    backend: str
    where: str
    _made: ExitStack = field(default_factory=ExitStack)

    def __call__(self, **options: Any) -> PancakeSaver:
        saver = PancakeSaver(self.where, **options)
        self._made.callback(saver.close)
        return saver

    def close(self) -> None:
        self._made.close()


@pytest.fixture(params=BACKENDS)
def saver_factory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SaverFactory]:
    where: Callable[[], str] = {
        "sqlite": lambda: str(tmp_path / "saver.db"),
        "memory": lambda: ":memory:",
        "redis": lambda: request.getfixturevalue("clean_valkey_url"),
    }[request.param]
    factory = SaverFactory(request.param, where())
    yield factory
    factory.close()


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with opened(request.param, request, tmp_path) as make:
        yield make()


@pytest.fixture(params=SHARED_KINDS)
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeStore]:
    with opened(request.param, request, tmp_path) as make:
        yield make
