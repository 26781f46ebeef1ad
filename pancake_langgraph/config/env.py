"""The one reader of environment variables.  All names begin with `PANCAKE_`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.config.settings import RuntimeSettings

ENV_RUNTIME: Final = "PANCAKE_RUNTIME"

#: Environment variable -> (field, parser).  Anything else that begins with `PANCAKE_` belongs to other parts.
_FIELDS: Final[dict[str, tuple[str, type[Any]]]] = {
    "PANCAKE_ENGINE": ("engine", str),
    "PANCAKE_BASE_URL": ("base_url", str),
    "PANCAKE_MODEL": ("model", str),
    "PANCAKE_API_KEY": ("api_key", str),
    "PANCAKE_KV_EVENTS": ("kv_events_endpoint", str),
    "PANCAKE_KV_REPLAY": ("kv_replay_endpoint", str),
    "PANCAKE_TIER_URL": ("tier_url", str),
    "PANCAKE_TIER_MODEL": ("tier_model", str),
    "PANCAKE_P_WARM_MIN": ("p_warm_min", float),
    "PANCAKE_RESERVE_RATIO": ("reserve_ratio", float),
    "PANCAKE_MAX_INFLIGHT_ACTIONS": ("max_inflight_actions", int),
    "PANCAKE_WARM_PRIORITY": ("warm_priority", int),
    "PANCAKE_WASTE_BUDGET_RATIO": ("waste_budget_ratio", float),
    "PANCAKE_ACTION_TTL_S": ("action_ttl_s", float),
    "PANCAKE_WARM_DEADLINE_S": ("warm_deadline_s", float),
    "PANCAKE_TIER_DEADLINE_S": ("tier_deadline_s", float),
    "PANCAKE_BREAKER_FAILURES": ("breaker_failures", int),
    "PANCAKE_BREAKER_OPEN_S": ("breaker_open_s", float),
    "PANCAKE_MAX_CONTEXTS": ("max_contexts", int),
    "PANCAKE_FORECAST_DIR": ("forecast_dir", str),
    "PANCAKE_POOL_HINTS": ("pool_hints", bool),
}

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"", "0", "false", "no", "off"})


def parse_bool(name: str, text: str) -> bool:
    """Read a switch.

    Raises:
        ConfigError: if `text` is none of 1/true/yes/on and 0/false/no/off (any case, or empty for off).
    """
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ConfigError(f"{name}: got {text!r}, allowed are 1, true, yes, on, 0, false, no, off")


def settings_from_env(environ: Mapping[str, str] | None = None, **overrides: Any) -> RuntimeSettings:
    """Build settings from `PANCAKE_*`; keyword arguments that are not `None` win.

    Raises:
        ConfigError: if a value cannot be read or is out of range, or an override is not a field.
    """
    source = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for name, (field_name, parser) in _FIELDS.items():
        text = source.get(name, "").strip()
        if text:
            values[field_name] = _parse(name, text, parser)
    known = {field_name for field_name, _ in _FIELDS.values()}
    for name, value in overrides.items():
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}; allowed are {', '.join(sorted(known))}")
        if value is not None:
            values[name] = value
    return RuntimeSettings(**values)


def runtime_requested(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether `PANCAKE_RUNTIME` asks for the runtime to attach by itself.

    Raises:
        ConfigError: if the variable holds something that is no switch.
    """
    source = os.environ if environ is None else environ
    return parse_bool(ENV_RUNTIME, source.get(ENV_RUNTIME, ""))


def _parse(name: str, text: str, parser: type[Any]) -> Any:
    if parser is bool:
        return parse_bool(name, text)
    try:
        return parser(text)
    except ValueError as exc:
        raise ConfigError(f"{name}: got {text!r}, allowed is a {parser.__name__}") from exc


def saver_from_env(environ: Mapping[str, str] | None = None) -> tuple[str, tuple[tuple[str, str], ...], float | None]:
    """Return where a server's saver keeps its threads, the classes it allows, and their time to live in seconds.

    `PANCAKE_SAVER` is a file or a URL; `PANCAKE_SAVER_ALLOW` a comma-separated list of `module:Class`;
    `PANCAKE_SAVER_TTL_S` a number of seconds.

    Raises:
        ConfigError: if the first is not set, or another cannot be read.
    """
    source = os.environ if environ is None else environ
    where = source.get("PANCAKE_SAVER", "").strip()
    if not where:
        raise ConfigError("PANCAKE_SAVER is not set; name a SQLite file, or the URL of a Redis or Valkey server")
    allow = []
    for entry in filter(None, map(str.strip, source.get("PANCAKE_SAVER_ALLOW", "").split(","))):
        module, colon, name = entry.partition(":")
        if not (module and colon and name):
            raise ConfigError(f"PANCAKE_SAVER_ALLOW: got {entry!r}, allowed is module:Class, separated by commas")
        allow.append((module, name))
    ttl = source.get("PANCAKE_SAVER_TTL_S", "").strip()
    return where, tuple(allow), _parse("PANCAKE_SAVER_TTL_S", ttl, float) if ttl else None


def under_langgraph_server(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether this process is a LangGraph server, `langgraph dev` included: it brings a checkpointer of its own."""
    source = os.environ if environ is None else environ
    return bool(source.get("LANGSMITH_LANGGRAPH_API_VARIANT") or source.get("LANGGRAPH_CHECKPOINTER"))
