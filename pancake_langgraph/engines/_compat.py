"""Every name that depends on a server's version, in one place, with the versions it was tried with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

# Routes, relative to the server's root.
MODELS_ROUTE: Final = "/v1/models"
CHAT_ROUTE: Final = "/v1/chat/completions"
COMPLETIONS_ROUTE: Final = "/v1/completions"
TOKENIZE_ROUTE: Final = "/tokenize"
VERSION_ROUTE: Final = "/version"
METRICS_ROUTE: Final = "/metrics"
KV_EVENT_SOURCES_ROUTE: Final = "/kv_event_sources"

# Routes of the KV cache server.
TIER_STATUS_ROUTE: Final = "/status"
TIER_PREFETCH_ROUTE: Final = "/cache/prefetches"
TIER_CLEAR_ROUTE: Final = "/cache/clear"

# Metrics.
METRIC_RUNNING: Final = "vllm:num_requests_running"
METRIC_WAITING: Final = "vllm:num_requests_waiting"
METRIC_POOL_USED: Final = "vllm:kv_cache_usage_perc"
METRIC_TIER_HITS: Final = "vllm:external_prefix_cache_hits_total"
METRIC_CACHE_CONFIG: Final = "vllm:cache_config_info"
LABEL_BLOCK_SIZE: Final = "block_size"
LABEL_NUM_BLOCKS: Final = "num_gpu_blocks"
LABEL_PREFIX_CACHING: Final = "enable_prefix_caching"

# KV events.
EVENT_STORED: Final = "BlockStored"
EVENT_REMOVED: Final = "BlockRemoved"
EVENT_CLEARED: Final = "AllBlocksCleared"
#: Name of the engine's own pool in events; the CPU engine says the same.
POOL_MEDIUM: Final = "GPU"

#: Fields that carry reasoning text in deltas, newest name first.
REASONING_FIELDS: Final = ("reasoning", "reasoning_content")
#: The first release whose prompts may carry a salt.
_CACHE_SALT_SINCE: Final = (0, 9)

_TESTED: Final[Mapping[str, str]] = MappingProxyType({"vllm": "0.32.0", "lmcache": "0.5.6"})
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


def tested_versions() -> Mapping[str, str]:
    """Return the version of each outside server that the adapters were run against."""
    return _TESTED


def version_note(server: str, version: str | None) -> str | None:
    """Return a remark when `version` is not the tested one, else `None`."""
    tested = _TESTED[server]
    if version is None:
        return f"{server} did not say its version; tested with {tested}"
    if version.split("+", 1)[0] != tested:
        return f"{server} {version} is not the tested version {tested}"
    return None


def knows_cache_salt(version: str | None) -> bool:
    """Return whether that release of the engine separates cache entries by salt.

    The engine drops fields it does not know without a word, so that trying proves nothing: the version has to.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= _CACHE_SALT_SINCE


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Shape of the engine's pool as its metrics tell it; `None` means "not said"."""

    block_size_tokens: int | None = None
    pool_tokens: int | None = None
    prefix_caching: bool | None = None


def pool_config(metrics_text: str) -> PoolConfig:
    """Read the pool's shape from the text of the metrics route."""
    for name, labels, _ in _samples(metrics_text, METRIC_CACHE_CONFIG):
        if name == METRIC_CACHE_CONFIG:
            block_size = _positive(labels.get(LABEL_BLOCK_SIZE))
            num_blocks = _positive(labels.get(LABEL_NUM_BLOCKS))
            # One block of the pool is a placeholder that never holds anything.
            tokens = (num_blocks - 1) * block_size if block_size and num_blocks else None
            caching = {"True": True, "False": False}.get(labels.get(LABEL_PREFIX_CACHING, ""))
            return PoolConfig(block_size, tokens, caching)
    return PoolConfig()


def gauge(metrics_text: str, name: str) -> float | None:
    """Return the sum over all series of one gauge, or `None` when it is not exported."""
    values = [value for found, _, value in _samples(metrics_text, name) if found == name]
    return sum(values) if values else None


def _samples(text: str, prefix: str) -> list[tuple[str, dict[str, str], float]]:
    found: list[tuple[str, dict[str, str], float]] = []
    for line in text.splitlines():
        if line.startswith(prefix) and (match := _SAMPLE.match(line)):
            try:
                value = float(match[3])
            except ValueError:
                continue
            found.append((match[1], dict(_LABEL.findall(match[2] or "")), value))
    return found


def _positive(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None
