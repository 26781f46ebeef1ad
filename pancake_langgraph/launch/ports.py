"""Loopback ports: find free ones, and say who holds a taken one."""

from __future__ import annotations

import contextlib
import socket

import psutil

from pancake_langgraph._errors import ConfigError, LaunchError

LOOPBACK = "127.0.0.1"


def free_ports(num_ports: int) -> tuple[int, ...]:
    """Return `num_ports` distinct loopback TCP ports that were free a moment ago.

    All are held while the last is found, so they differ; another process can still take one before it is used.
    """
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(num_ports):
            listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            listener.bind((LOOPBACK, 0))
            ports.append(int(listener.getsockname()[1]))
        return tuple(ports)


def port_is_free(port: int) -> bool:
    """Say whether a server could listen on this loopback port now.

    Raises:
        ConfigError: if `port` is not in 1..65535.
    """
    if not 1 <= port <= 65535:
        raise ConfigError(f"port: got {port}, allowed is 1 to 65535")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        # As servers do: a port that only lingers in TIME_WAIT counts as free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def port_holder(port: int) -> str:
    """Describe the process that listens on `port`, as far as this user may know."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.Error:
        connections = []
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            if connection.pid is None:
                break
            with contextlib.suppress(psutil.Error):
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return "a process that this user cannot see"


def require_free(port: int, purpose: str) -> None:
    """Check that `port` can be had for `purpose`.

    Raises:
        LaunchError: if something listens there already; the message names who.
        ConfigError: if `port` is not in 1..65535.
    """
    if not port_is_free(port):
        raise LaunchError(
            f"{purpose}: port {port} on {LOOPBACK} is taken by {port_holder(port)}; "
            "end that process, or give another port (or none, to take a free one)"
        )
