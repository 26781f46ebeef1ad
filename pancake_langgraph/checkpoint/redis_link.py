"""The way to a Redis or Valkey server, or a cluster of them: whole batches of commands per round trip.

Commands of one batch, and of one session, name keys of one hash slot.  Only this module knows the client library.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar, cast

from pancake_langgraph._errors import CheckpointError, ConfigError, SchemaMismatch, StoreUnavailable

_log = logging.getLogger(__name__)

T = TypeVar("T")
Command = tuple[bytes | str | int | float, ...]

SCHEMES: Final = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
#: What a user has to be allowed for connecting; the cluster ones only with a cluster.
CONNECT_COMMANDS: Final = ("select",)
CLUSTER_COMMANDS: Final = ("cluster|slots", "command")
#: Only for the warning about eviction; without them there is none.
POLICY_COMMANDS: Final = ("info", "config|get")
_MAX_CONNECTIONS: Final = 10_000
_MOVED_PAUSE_S: Final = 0.02

#: Name of the client library's error class, or first word of the server's answer -> what happened, and what mends it.
_TROUBLE: Final = {
    "OutOfMemoryError": ("is out of memory", "raise its maxmemory, or delete or prune threads"),
    "ReadOnlyError": ("is a replica, or may not write", "name the primary in the URL"),
    "BusyLoadingError": ("is still loading its data", "try again in a moment"),
    "MasterDownError": ("lost its primary", "wait for the failover, then resume the thread"),
    "ClusterDownError": ("is a cluster that is down", "bring its nodes back, then resume the thread"),
    "SlotNotCoveredError": ("is a cluster with slots that no node serves", "bring its nodes back"),
    "RedisClusterException": ("is no cluster, or none of its nodes answers", "check the address and the scheme"),
    "AuthenticationError": ("refused the name or password", "correct them in the URL"),
    "AuthorizationError": ("refused the name or password", "correct them in the URL"),
    "MaxConnectionsError": ("is asked by too many threads at once", "use fewer threads"),
    "NOAUTH": ("wants a password", "put it into the URL"),
    "MISCONF": ("cannot save to its disk and refuses writes", "free its disk, or see its log"),
    "BUSY": ("is busy with a script", "end that script"),
    "MovedError": ("is a node of a cluster", "write the URL as redis+cluster://"),
    "AskError": ("is a node of a cluster", "write the URL as redis+cluster://"),
    "CROSSSLOT": ("is a cluster", "write the URL as redis+cluster://"),
}


class Wire(Protocol):
    """What is used of one connection of the client library."""

    def pack_commands(self, commands: Sequence[Command]) -> Any:
        """Encode commands."""

    def send_packed_command(self, command: Any) -> None:
        """Send what was encoded."""

    def read_response(self) -> Any:
        """Return the next reply; raise it if it is an error."""

    def disconnect(self) -> None:
        """Close the socket."""


class Elsewhere(Exception):
    """The keys are on another node now, or on their way there."""


class Session:
    """One connection, held for a few batches.  Not thread-safe."""

    def __init__(self, wire: Wire, translate: Callable[[Exception], Exception]) -> None:
        """Wrap a connection that is ready to send."""
        self._wire = wire
        self._translate = translate
        self.is_watching = False

    def ask(self, *commands: Command) -> list[Any]:
        """Send all commands at once and return their replies.

        Raises:
            StoreUnavailable: for the first reply that is an error, and if the connection failed.
            SchemaMismatch: if a key holds something else.
        """
        self.is_watching = self.is_watching or any(command[0] == "WATCH" for command in commands)
        replies = self._exchange(commands)
        self._raise_first(replies)
        return replies

    def multi(self, commands: Sequence[Command]) -> list[Any] | None:
        """Run commands as one transaction; return the replies, or `None` if a watched key has changed.

        Raises:
            StoreUnavailable: if a command was refused (then none was run), and if the connection failed (then it is
                not known whether they were run).
            SchemaMismatch: if a key holds something else.
        """
        replies = self._exchange((("MULTI",), *commands, ("EXEC",)))
        self.is_watching = False
        if any(isinstance(reply, Exception) for reply in replies):
            self.drop()  # the server may still be collecting
        self._raise_first(replies)
        if replies[-1] is None:
            return None
        done = cast("list[Any]", replies[-1])
        self._raise_first(done)
        return done

    def unwatch(self) -> None:
        """Forget what is watched."""
        if self.is_watching:
            self.is_watching = False
            self.ask(("UNWATCH",))

    def drop(self) -> None:
        """Close the socket; the pool opens a new one when it is needed."""
        self.is_watching = False
        self._wire.disconnect()

    def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        from redis.exceptions import RedisError, ResponseError

        replies: list[Any] = []
        try:
            self._wire.send_packed_command(self._wire.pack_commands(commands))
            for _ in commands:
                try:
                    replies.append(self._wire.read_response())
                except ResponseError as exc:
                    replies.append(exc)
        except (RedisError, OSError) as exc:
            self.drop()
            raise self._translate(exc) from exc
        except BaseException:
            self.drop()  # else the next user of the connection reads replies that are not meant for it
            raise
        return replies

    def _raise_first(self, replies: Sequence[Any]) -> None:
        for reply in replies:
            if isinstance(reply, Exception):
                raise self._translate(reply) from reply


class RedisLink:
    """Connections to one server or cluster, made when they are needed.  Thread-safe; a fork gets its own."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Check the URL; nothing is opened.

        Raises:
            ConfigError: if the URL's scheme is not known.
        """
        scheme, separator, rest = url.partition("://")
        if scheme not in SCHEMES or not separator:
            raise ConfigError(
                f"not the URL of a Redis server: scheme {scheme if separator else ''!r}; "
                f"write {', '.join(f'{known}://…' for known in SCHEMES)}"
            )
        self.is_cluster = scheme.endswith("+cluster")
        self.shown = shown(url)
        self._url = f"{scheme.removesuffix('+cluster')}://{rest}"
        self._timeout_s = timeout_s
        self._client: Any = None
        self._is_stale = False

    def open(self) -> None:
        """Make the client, unless there is one.  Not thread-safe; the other methods are.

        Raises:
            ConfigError: if the client library is missing, or does not understand the URL.
            StoreUnavailable: if a cluster does not answer.
        """
        if self._client is None:
            self._client = self._connect()

    def close(self) -> None:
        """Close all connections; the next call opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def ask(self, key: bytes, *commands: Command) -> list[Any]:
        """Run one batch on the node that holds `key`.  Raises as `Session.ask`."""
        return self.run(key, lambda session: session.ask(*commands))

    def each(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands whose keys (the second word) may be in different slots; they are not atomic together."""
        if not self.is_cluster and commands:
            return self.ask(b"", *commands)
        return [self.ask(cast("bytes", command[1]), command)[0] for command in commands]

    def run(self, key: bytes, work: Callable[[Session], T]) -> T:
        """Call `work` with a session on the node that holds `key`; again if the keys have moved.

        Raises:
            StoreUnavailable: if there is no connection, or the keys keep moving for as long as the timeout.
        """
        give_up_s = time.monotonic() + self._timeout_s
        while True:
            try:
                with self._session(key) as session:
                    return work(session)
            except Elsewhere as exc:
                if time.monotonic() >= give_up_s:
                    raise StoreUnavailable(
                        f"{self.shown}: keys were being moved between nodes for {self._timeout_s:g} s; "
                        "wait for the resharding to end, then resume the thread"
                    ) from exc
                self._is_stale = True
                time.sleep(_MOVED_PAUSE_S)

    @contextlib.contextmanager
    def _session(self, key: bytes) -> Iterator[Session]:
        from redis.exceptions import RedisClusterException, RedisError

        try:
            pool = self._pool(key)
            wire = pool.get_connection()
        except (RedisError, RedisClusterException, OSError) as exc:
            raise self._translate(exc) from exc
        session = Session(wire, self._translate)
        try:
            yield session
            session.unwatch()
        except BaseException:
            if session.is_watching:
                session.drop()
            raise
        finally:
            pool.release(wire)

    def _pool(self, key: bytes) -> Any:
        client = self._client
        if client is None:
            raise StoreUnavailable(f"{self.shown}: the store was closed during a call")
        if not self.is_cluster:
            return client.connection_pool
        if self._is_stale:
            client.nodes_manager.initialize()
            self._is_stale = False
        return client.get_redis_connection(client.get_node_from_key(key)).connection_pool

    def _connect(self) -> Any:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as exc:
            raise ConfigError(
                "a Redis URL needs the package `redis`, which is not installed; pip install 'redis>=6'"
            ) from exc
        options: dict[str, Any] = {
            "socket_timeout": self._timeout_s,
            "socket_connect_timeout": self._timeout_s,
            "max_connections": _MAX_CONNECTIONS,
            "protocol": 2,
            "driver_info": None,  # CLIENT SETINFO is often forbidden
        }
        try:
            if self.is_cluster:
                return redis.RedisCluster.from_url(self._url, retry=Retry(NoBackoff(), 1), **options)
            return redis.Redis.from_url(self._url, retry=Retry(NoBackoff(), 0), **options)
        except (redis.RedisError, redis.exceptions.RedisClusterException, OSError) as exc:
            raise self._translate(exc) from exc
        except (ValueError, TypeError) as exc:  # their text may hold the password
            raise ConfigError(
                f"the Redis client does not understand the URL {self.shown}; "
                "write redis://user:password@host:port/number, special characters percent-encoded"
            ) from exc

    def _translate(self, exc: Exception) -> Exception:
        from redis import exceptions as of_redis

        if isinstance(exc, CheckpointError):
            return exc
        if self.is_cluster and isinstance(exc, of_redis.AskError | of_redis.TryAgainError):  # MovedError is an AskError
            return Elsewhere()
        network = (of_redis.ConnectionError, of_redis.TimeoutError, of_redis.ClusterDownError, OSError)
        if isinstance(exc, (*network, of_redis.RedisClusterException)):
            self._is_stale = True
        return translated(exc, self.shown, self._timeout_s)


def shown(url: str) -> str:
    """Return a URL without its password and options; only its scheme where it is not clear which part is which."""
    scheme, _, rest = url.partition("://")
    head, _, options = rest.partition("?")
    login, at, place = head.rpartition("@")
    host = place.partition("/")[0]
    port = "" if host.endswith("]") else host.partition(":")[2].rpartition(":")[2]
    is_clear = "/" not in login and (at or scheme == "unix" or "@" not in options) and (not port or port.isdigit())
    name = login.partition(":")[0]
    return f"{scheme}://{name}{at if name else ''}{place}" if is_clear else f"{scheme}://…"


def translated(exc: Exception, place: str, timeout_s: float) -> CheckpointError:
    """Return our error for one of the client library; its text holds no state and no password."""
    text = str(exc)
    kind = type(exc).__name__
    word = text.partition(" ")[0]
    if word == "WRONGTYPE":
        return SchemaMismatch(f"{place}: a key below pancake: holds something else; use another database number")
    if found := re.search(r"unknown command [`'\"]?([\w|.]+)", text):
        return StoreUnavailable(
            f"{place} does not know the command {found[1].upper()}; use Redis 6 or later, or Valkey"
        )
    if kind == "NoPermissionError" or re.search("NOPERM|no permissions", text, re.IGNORECASE):
        if found := re.search(r"['\"]([\w|]+)['\"] command|command ['\"]?([\w|]+)", text):
            command = found[1] or found[2]
            return StoreUnavailable(f"{place}: this user may not call {command.upper()}; allow it: +{command.lower()}")
        return StoreUnavailable(f"{place}: this user may not use keys that start with pancake:; allow them: ~pancake:*")
    if kind in _TROUBLE or word in _TROUBLE:
        happened, mend = _TROUBLE[kind if kind in _TROUBLE else word]
        return StoreUnavailable(f"{place} {happened}; nothing of this call was stored; {mend}")
    if kind == "TimeoutError":
        return StoreUnavailable(
            f"{place} did not answer within {timeout_s:g} s; see whether it runs, or allow more time"
        )
    if kind == "ConnectionError" or isinstance(exc, OSError):
        reason = text.rstrip(".")
        return StoreUnavailable(f"{place}: no connection ({reason}); start the server, then resume the thread")
    code = word if word.isupper() else kind  # what follows may quote arguments
    return StoreUnavailable(f"{place} refused a command ({code}); see the server's log")


def warn_if_evicting(link: RedisLink, key: bytes) -> None:
    """Log a warning if the node that holds `key` may throw data away; nothing if this user may not know that."""
    policy = _policy(link, key)
    if policy not in (None, "noeviction"):
        _log.warning(
            "%s has maxmemory-policy %s: it may throw threads away when its memory is full; set it to noeviction",
            link.shown,
            policy,
        )


def _policy(link: RedisLink, key: bytes) -> str | None:
    for command in (("INFO", "memory"), ("CONFIG", "GET", "maxmemory-policy")):
        try:
            (reply,) = link.ask(key, command)
        except CheckpointError:  # often forbidden, and not needed
            _log.debug("%s does not tell its eviction policy by %s", link.shown, command[0])
            continue
        text = b"maxmemory_policy:" + reply[1] if isinstance(reply, list) and len(reply) > 1 else reply
        if isinstance(text, bytes) and (found := re.search(rb"maxmemory_policy:([\w-]+)", text)):
            return found[1].decode()
    return None
