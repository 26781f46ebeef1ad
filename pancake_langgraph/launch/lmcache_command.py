"""From a plan to the KV cache server's command line.  Pure."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import unquote

from pancake_langgraph.launch.plans import TierPlan, split_redis_url
from pancake_langgraph.launch.ports import LOOPBACK
from pancake_langgraph.launch.process import Command
from pancake_langgraph.launch.vllm_command import COMMON_ENV

#: The package has no module entry, and a console script may not be on the path of an environment that is not active.
_ENTRY: Final = "import sys; from lmcache.cli.main import main; sys.argv[0] = 'lmcache'; sys.exit(main())"
_GB: Final = 1024**3
#: How long a looked-up object stays locked for its reader.  LMCache 0.5.6 leaves the locks of requests that go away
#: between lookup and load, 300 s by default; a load takes well under a second.
_READ_TTL_S: Final = 30


@dataclass(frozen=True, slots=True)
class TierPlaces:
    """What one start of the tier got: ports, shared-memory name, folder of the disk tier (`None`: no disk tier)."""

    port: int
    http_port: int
    shm_name: str
    l2_dir: Path | None

    @property
    def shm_files(self) -> tuple[str, ...]:
        """Names under which the shared memory shows in the file system (the server adds a prefix of its own)."""
        return (self.shm_name, f"lmcache_l1_pool_{self.shm_name}")

    @property
    def http_url(self) -> str:
        """Base URL of health and prefetch."""
        return f"http://{LOOPBACK}:{self.http_port}"


def lmcache_command(plan: TierPlan, places: TierPlaces, *, device: Literal["cpu", "gpu"]) -> Command:
    """Return arguments and environment that start the KV cache server of `plan`."""
    argv = [sys.executable, "-c", _ENTRY, "server"]
    argv += ["--host", LOOPBACK, "--port", str(places.port)]
    argv += ["--http-host", LOOPBACK, "--http-port", str(places.http_port)]
    argv += ["--chunk-size", str(plan.chunk_tokens), "--l1-size-gb", f"{plan.l1_bytes / _GB:.6f}"]
    argv += ["--eviction-policy", "LRU", "--l2-prefetch-policy", "retain"]
    argv += ["--l1-read-ttl-seconds", str(_READ_TTL_S)]
    # All of them get everything; what several have is read from the first.
    if places.l2_dir is not None:
        argv += ["--l2-adapter", json.dumps(_disk_adapter(plan, places.l2_dir))]
    env = dict(COMMON_ENV)
    if plan.l3_url is not None:
        parts = split_redis_url(plan.l3_url)
        argv += ["--l2-adapter", json.dumps(_redis_adapter(plan, str(parts.hostname), parts.port or 0))]
        # Not in the arguments, which every user of the machine can read.
        named = {"USERNAME": parts.username, "PASSWORD": parts.password}
        env |= {f"LMCACHE_RESP_{name}": unquote(said) for name, said in named.items() if said}
    if device == "cpu":
        # On CPU only the engine-driven mode starts at all, and only shared memory makes it fast.
        argv += ["--supported-transfer-mode", "engine_driven", "--shm-name", places.shm_name]
        env["OMP_NUM_THREADS"] = "1"
    return Command(tuple(argv), env)


def _disk_adapter(plan: TierPlan, folder: Path) -> dict[str, Any]:
    """Return how the cache server is told what to use for its disk tier."""
    if plan.l2_adapter == "plain":
        return {"type": "fs", "base_path": str(folder)}
    params = {"base_path": str(folder), "max_capacity_gb": plan.l2_bytes / _GB}
    return _verified(plan, "disk_adapter", "VerifiedDiskAdapter", params)


def _redis_adapter(plan: TierPlan, host: str, port: int) -> dict[str, Any]:
    """Return how the cache server is told of its shared tier."""
    return _verified(plan, "redis_adapter", "VerifiedRedisAdapter", {"host": host, "port": port})


def _verified(plan: TierPlan, module: str, name: str, params: dict[str, Any]) -> dict[str, Any]:
    params = {**params, "codec": plan.l2_codec}
    if plan.l2_key_file is not None:
        params["key_file"] = str(plan.l2_key_file.resolve())
    module_path = f"pancake_lmcache.{module}"
    return {"type": "plugin", "module_path": module_path, "class_name": name, "adapter_params": params}
