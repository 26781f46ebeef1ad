"""Makes tier adapters by name; nothing is imported before it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.tiers.base import Tier

_DEFAULT_DEADLINE_S = 2.0


@dataclass(frozen=True, slots=True)
class TierOptions:
    """What a factory gets."""

    url: str | None = None
    model_key: str | None = None
    deadline_s: float = _DEFAULT_DEADLINE_S


TierFactory = Callable[[TierOptions], Tier]


def _null(_: TierOptions) -> Tier:
    from pancake_langgraph.tiers.null import NullTier

    return NullTier()


def _lmcache(options: TierOptions) -> Tier:
    from pancake_langgraph.tiers.lmcache import LMCacheTier

    if options.url is None or options.model_key is None:
        raise ConfigError(
            f"tier 'lmcache': got url={options.url!r} and model_key={options.model_key!r}, allowed is the server's "
            "http:// address and the --model string that the engine was started with"
        )
    return LMCacheTier(options.url, options.model_key, deadline_s=options.deadline_s)


_FACTORIES: dict[str, TierFactory] = {"lmcache": _lmcache, "null": _null}


def tier_names() -> tuple[str, ...]:
    """Return the names that `create_tier` knows."""
    return tuple(sorted(_FACTORIES))


def register_tier(name: str, factory: TierFactory) -> None:
    """Make another adapter known.  Call it at start-up; not thread-safe.

    Raises:
        ConfigError: if the name is taken or empty.
    """
    if not name.strip():
        raise ConfigError("tier: got an empty name, allowed is any other")
    if name in _FACTORIES:
        raise ConfigError(f"tier: got {name!r}, which is taken; allowed is a name other than {tier_names()}")
    _FACTORIES[name] = factory


def create_tier(
    name: str, *, url: str | None = None, model_key: str | None = None, deadline_s: float = _DEFAULT_DEADLINE_S
) -> Tier:
    """Make the adapter called `name`; it connects to nothing before `open`.

    Raises:
        ConfigError: if the name is unknown, or a value is missing or not usable.
    """
    factory = _FACTORIES.get(name)
    if factory is None:
        raise ConfigError(f"tier: got {name!r}, allowed are {', '.join(tier_names())}")
    return factory(TierOptions(url=url, model_key=model_key, deadline_s=deadline_s))
