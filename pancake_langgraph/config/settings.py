"""What a user may ask of the runtime.  Frozen; every field has a default, a unit and a range."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.config.address import require_http_address

DEFAULT_BASE_URL: Final = "http://127.0.0.1:8000/v1"


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """Settings of one runtime.

    Attributes:
        engine: Adapter that carries hints: `vllm`, `openai`, `fake` or `null`.
        base_url: The server's OpenAI root, ending in `/v1`.
        model: Served model name; `None` takes the only one the server has.
        api_key: Bearer token, if the server wants one.
        kv_events_endpoint: ZeroMQ address of the engine's KV events (`ipc://…` or `tcp://…`), or `None`.
        kv_replay_endpoint: ZeroMQ address that replays lost KV events, or `None`.
        tier_url: HTTP root of the LMCache server, or `None` for no tier.
        tier_model: The `--model` string that the engine was started with (the tier's key), or `None`.
        p_warm_min: A successor less probable than this is not warmed, in [0, 1].
        reserve_ratio: Share of the engine's pool never planned for, in [0, 0.9].
        max_inflight_actions: Warm-ups under way at once, at least 1.
        warm_priority: Engine priority of warm-ups; larger is served later; 0 to 1,000.
        waste_budget_ratio: Computed tokens that may be wasted per prompt token served, in [0, 10]; over it, speculative
            warm-ups stop until the ratio has fallen again.
        action_ttl_s: An action not claimed within this time is settled as wasted, in (0, 3,600].
        warm_deadline_s: A warm-up may take this long, in (0, 600].
        tier_deadline_s: The tier must answer within this time, in (0, 60].
        breaker_failures: Failures in a row that open a breaker, at least 1.
        breaker_open_s: Time until an open breaker tries again, in (0, 600].
        max_contexts: Agent contexts remembered, at least 16.
        pool_hints: Whether the engine's pool is told which contexts to hold, where it takes such hints.
        forecast_dir: Folder that keeps what is learnt about each graph (names of nodes, tools and fields, counts and
            durations; no text), so that a new process starts with it. `None` keeps nothing: no file is ever written
            that was not asked for.
    """

    engine: str = "vllm"
    base_url: str = DEFAULT_BASE_URL
    model: str | None = None
    api_key: str | None = None
    kv_events_endpoint: str | None = None
    kv_replay_endpoint: str | None = None
    tier_url: str | None = None
    tier_model: str | None = None
    p_warm_min: float = 0.6
    reserve_ratio: float = 0.1
    max_inflight_actions: int = 2
    warm_priority: int = 10
    waste_budget_ratio: float = 0.25
    action_ttl_s: float = 60.0
    warm_deadline_s: float = 30.0
    tier_deadline_s: float = 1.0
    breaker_failures: int = 2
    breaker_open_s: float = 1.0
    max_contexts: int = 4096
    forecast_dir: str | None = None
    pool_hints: bool = True

    def __post_init__(self) -> None:
        """Check every range.

        Raises:
            ConfigError: if a value is out of range, naming the field, the value and the range.
        """
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ConfigError(f"{name}: got {value!r}, allowed is a number from {low} to {high}")
            if name in _WHOLE and not isinstance(value, int):
                raise ConfigError(f"{name}: got {value!r}, allowed is a whole number from {low} to {high}")
        require_http_address("base_url", self.base_url)
        if self.tier_url is not None:
            require_http_address("tier_url", self.tier_url)
        if self.tier_url is not None and self.tier_model is None:
            raise ConfigError(
                "tier_url is set without tier_model: give the --model string the engine was started with, "
                "since the tier keys its objects by that string (`pancake up` prints it as PANCAKE_TIER_MODEL)"
            )
        for name in ("model", "api_key", "tier_model", "forecast_dir"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name}: got a {type(value).__name__}, allowed is a text, or nothing")
        if not isinstance(self.pool_hints, bool):
            raise ConfigError(f"pool_hints: got {self.pool_hints!r}, allowed is True or False")
        for name in ("kv_events_endpoint", "kv_replay_endpoint"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value.startswith(("ipc://", "tcp://"))):
                raise ConfigError(f"{name}: got {value!r}, allowed is an ipc:// or tcp:// address")

    def __repr__(self) -> str:
        """Return all fields with the key masked."""
        shown = (
            f"{field.name}={'***' if field.name == 'api_key' and self.api_key else repr(getattr(self, field.name))}"
            for field in fields(self)
        )
        return f"RuntimeSettings({', '.join(shown)})"


_TINY: Final = 1e-6
_WHOLE: Final = frozenset({"max_inflight_actions", "warm_priority", "breaker_failures", "max_contexts"})
_RANGES: Final[tuple[tuple[str, float, float], ...]] = (
    ("p_warm_min", 0.0, 1.0),
    ("reserve_ratio", 0.0, 0.9),
    ("max_inflight_actions", 1, 64),
    ("warm_priority", 0, 1000),
    ("waste_budget_ratio", 0.0, 10.0),
    ("action_ttl_s", _TINY, 3600.0),
    ("warm_deadline_s", _TINY, 600.0),
    ("tier_deadline_s", _TINY, 60.0),
    ("breaker_failures", 1, 100),
    ("breaker_open_s", _TINY, 600.0),
    ("max_contexts", 16, 1_000_000),
)
