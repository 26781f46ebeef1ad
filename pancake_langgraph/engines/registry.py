"""Makes engine adapters by name; nothing is imported before it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pancake_langgraph._clock import Clock, VirtualClock
from pancake_langgraph._errors import ConfigError
from pancake_langgraph.engines.base import Engine

_DEFAULT_DEADLINE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a factory gets; an adapter takes what it needs and leaves the rest."""

    base_url: str | None = None
    model: str | None = None
    api_key: str | None = None
    kv_events_endpoint: str | None = None
    kv_replay_endpoint: str | None = None
    deadline_s: float = _DEFAULT_DEADLINE_S
    clock: Clock | None = None

    def require_base_url(self, engine: str) -> str:
        """Return the address.

        Raises:
            ConfigError: if there is none.
        """
        if self.base_url is None:
            raise ConfigError(f"base_url: got none, allowed for engine {engine!r} is the server's http:// address")
        return self.base_url


EngineFactory = Callable[[EngineOptions], Engine]


def _null(_: EngineOptions) -> Engine:
    from pancake_langgraph.engines.null import NullEngine

    return NullEngine()


def _fake(options: EngineOptions) -> Engine:
    from pancake_langgraph.engines.fake import FakeEngine, FakeEngineSettings

    settings = FakeEngineSettings() if options.model is None else FakeEngineSettings(model=options.model)
    return FakeEngine(settings, options.clock or VirtualClock())


def _openai(options: EngineOptions) -> Engine:
    from pancake_langgraph.engines.openai import OpenAIEngine

    return OpenAIEngine(
        options.require_base_url("openai"),
        model=options.model,
        api_key=options.api_key,
        deadline_s=options.deadline_s,
    )


def _vllm(options: EngineOptions) -> Engine:
    from pancake_langgraph.engines.vllm import VllmEngine

    return VllmEngine(
        options.require_base_url("vllm"),
        model=options.model,
        api_key=options.api_key,
        kv_events_endpoint=options.kv_events_endpoint,
        kv_replay_endpoint=options.kv_replay_endpoint,
        deadline_s=options.deadline_s,
    )


_FACTORIES: dict[str, EngineFactory] = {"fake": _fake, "null": _null, "openai": _openai, "vllm": _vllm}


def engine_names() -> tuple[str, ...]:
    """Return the names that `create_engine` knows."""
    return tuple(sorted(_FACTORIES))


def register_engine(name: str, factory: EngineFactory) -> None:
    """Make another adapter known.  Call it at start-up; not thread-safe.

    Raises:
        ConfigError: if the name is taken or empty.
    """
    if not name.strip():
        raise ConfigError("engine: got an empty name, allowed is any other")
    if name in _FACTORIES:
        raise ConfigError(f"engine: got {name!r}, which is taken; allowed is a name other than {engine_names()}")
    _FACTORIES[name] = factory


def create_engine(
    name: str,
    *,
    base_url: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    kv_events_endpoint: str | None = None,
    kv_replay_endpoint: str | None = None,
    deadline_s: float = _DEFAULT_DEADLINE_S,
    clock: Clock | None = None,
) -> Engine:
    """Make the adapter called `name`; it connects to nothing before `open`.

    Raises:
        ConfigError: if the name is unknown, or a value is not usable.
    """
    factory = _FACTORIES.get(name)
    if factory is None:
        raise ConfigError(f"engine: got {name!r}, allowed are {', '.join(engine_names())}")
    return factory(
        EngineOptions(
            base_url=base_url,
            model=model,
            api_key=api_key,
            kv_events_endpoint=kv_events_endpoint,
            kv_replay_endpoint=kv_replay_endpoint,
            deadline_s=deadline_s,
            clock=clock,
        )
    )
