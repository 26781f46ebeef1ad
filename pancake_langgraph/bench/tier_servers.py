"""One cache server of `pancake bench tiers`, the store below its main memory, and an engine in front of it."""

from __future__ import annotations

import contextlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from pancake_langgraph._errors import LaunchError
from pancake_langgraph.bench.saver_arms import ValkeyServer
from pancake_langgraph.bench.servers import Progress, ServersPlan
from pancake_langgraph.bench.tier_arms import TierGroup
from pancake_langgraph.launch.device import resolve_device
from pancake_langgraph.launch.lmcache_command import lmcache_command
from pancake_langgraph.launch.plans import TierPlan
from pancake_langgraph.launch.process import ChildProcess, Command, Leftovers
from pancake_langgraph.launch.stack import EngineProcess, TierProcess

_ADAPTER_OPTION = "--l2-adapter"


class TierServers:
    """Starts what one group needs; a context manager.

    The lower store is empty at the start and gone at the end.
    """

    def __init__(self, group: TierGroup, plan: ServersPlan, *, on_progress: Progress) -> None:
        """Prepare; nothing is started."""
        self.group = group
        self.plan = plan
        self._on_progress = on_progress
        self._open = contextlib.ExitStack()
        self._folder: Path | None = None
        self._valkey: ValkeyServer | None = None
        self._tier: TierProcess | None = None
        self._engine: EngineProcess | None = None

    @property
    def tier(self) -> TierProcess:
        """The cache server.

        Raises:
            LaunchError: if it was not started.
        """
        if self._tier is None:
            raise LaunchError("the cache server of this bench does not run; use `with TierServers(...)`")
        return self._tier

    @property
    def engine(self) -> EngineProcess:
        """The engine.

        Raises:
            LaunchError: if it was not started.
        """
        if self._engine is None:
            raise LaunchError("the engine of this bench does not run; use `with TierServers(...)`")
        return self._engine

    def __enter__(self) -> TierServers:
        """Start the lower store, the cache server and the engine, one after the other."""
        try:
            self._start()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything that was started."""
        self._open.close()

    def stored_bytes(self) -> int:
        """Return what the lower store holds: the sizes of all files, or the memory of all keys with their names."""
        if self._valkey is not None:
            return self._valkey.stored_bytes()
        total = 0
        for path in self._folder.iterdir() if self._folder is not None else ():
            with contextlib.suppress(FileNotFoundError):  # a file that is being written changes its name
                total += path.stat().st_size
        return total

    def _start(self) -> None:
        self._on_progress(f"{self.group.lower}: starting a cache server and an engine")
        if self.group.place == "valkey":
            self._valkey = ValkeyServer()
            self._open.callback(self._valkey.close)
        else:
            self._folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="pancake-bench-")))
        url = self._valkey.url.removesuffix("/0") if self._valkey is not None else None
        tier_plan = group_tier_plan(self.group, self.plan, folder=self._folder, url=url)
        tier = TierProcess(tier_plan)
        if (adapter := own_adapter(self.group, folder=self._folder, url=url)) is not None:
            use_adapter(tier, adapter)
        self._tier = self._open.enter_context(tier)
        stack = self.plan.engine(pool_tokens=self.plan.pool_tokens, tier=tier_plan)
        self._engine = self._open.enter_context(EngineProcess(stack, tier=tier, name="tiers engine"))


def group_tier_plan(group: TierGroup, plan: ServersPlan, *, folder: Path | None, url: str | None) -> TierPlan:
    """Return how `pancake up` would start a group's cache server; `folder` or `url` is its lower store."""
    base = TierPlan(l1_bytes=plan.l1_bytes, chunk_tokens=plan.chunk_tokens, l2_dir=folder)
    if group.codec is None:
        return replace(base, l2_adapter="plain", l2=group.place == "disk")
    if group.place == "disk":
        return replace(base, l2_codec=group.codec)
    return replace(base, l2=False, l3_url=url, l2_codec=group.codec)


def own_adapter(group: TierGroup, *, folder: Path | None, url: str | None) -> dict[str, Any] | None:
    """Return LMCache's own settings for a group that a `TierPlan` cannot express; `None` if it can."""
    if group.serde == "fp8":
        return {
            "type": "fs",
            "base_path": str(folder),
            "serde": {"type": "fp8", "fp8_dtype": "float8_e4m3fn"},
        }
    if group.codec is None and url is not None:
        address = urlsplit(url)
        return {"type": "resp", "host": address.hostname, "port": address.port}
    return None


def with_adapter(command: Command, adapter: dict[str, Any]) -> Command:
    """Return the command with `adapter` as the only store below main memory."""
    argv: list[str] = []
    rest = iter(command.argv)
    for word in rest:
        if word == _ADAPTER_OPTION:
            next(rest, None)
        else:
            argv.append(word)
    return Command((*argv, _ADAPTER_OPTION, json.dumps(adapter)), command.env)


def use_adapter(tier: TierProcess, adapter: dict[str, Any]) -> None:
    """Have a cache server that was not started yet use `adapter`."""
    command = lmcache_command(tier.plan, tier.places, device=resolve_device("auto"))
    tier.process = ChildProcess(
        "cache server",
        with_adapter(command, adapter),
        log_path=tier.log_dir / "lmcache.log",
        leftovers=Leftovers(tier.places.shm_files, ()),
    )
