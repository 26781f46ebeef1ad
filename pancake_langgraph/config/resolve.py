"""From what was asked to what will run, given what the engine showed."""

from __future__ import annotations

from dataclasses import dataclass

from pancake_langgraph.config.settings import RuntimeSettings


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The part of an engine's capabilities that decides what the runtime may do."""

    tokenizer: bool
    token_prompts: bool
    prompt_token_ids: bool
    priority: bool
    kv_events: bool
    prefix_caching: bool | None
    block_size_tokens: int | None
    pool_tokens: int | None
    pool_hints: bool = False
    hold_cap_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Resolved:
    """What will run, each switch with its reason in `reasons` (same order as decided)."""

    warm: bool
    hold: bool
    tier: bool
    priority: int
    block_size_tokens: int
    pool_tokens: int | None
    ask_token_ids: bool
    reasons: tuple[str, ...]
    pool_hints: bool = False
    hold_cap_tokens: int | None = None


#: Cut used when an engine does not say its block size; a multiple of every size vLLM uses on CPU and GPU.
FALLBACK_BLOCK_TOKENS = 128


def resolve(settings: RuntimeSettings, facts: EngineFacts | None) -> Resolved:
    """Decide what will run.  Pure.

    `facts` is `None` when the engine could not be probed; everything is then off.
    """
    if facts is None:
        return Resolved(
            warm=False,
            hold=False,
            tier=False,
            priority=0,
            block_size_tokens=FALLBACK_BLOCK_TOKENS,
            pool_tokens=None,
            ask_token_ids=False,
            reasons=("engine not reachable: observing only",),
        )
    reasons: list[str] = []
    warm = facts.tokenizer and facts.token_prompts and facts.prefix_caching is not False
    if facts.prefix_caching is False:
        reasons.append("prefix caching is off in the engine: no warm-ups (start it with --enable-prefix-caching)")
    elif not warm:
        reasons.append("engine has no tokenizer route or takes no token prompts: no warm-ups")
    hold = warm and facts.kv_events and facts.pool_tokens is not None
    if warm and not hold:
        reasons.append("no KV events or pool size unknown: contexts are warmed once, not held")
    hints = hold and settings.pool_hints and facts.pool_hints
    if hold and not hints:
        why = "engine takes none" if settings.pool_hints else "switched off"
        reasons.append(f"no pool hints ({why}): contexts are held by reading them again")
    tier = settings.tier_url is not None
    reasons.append(f"tier {'at ' + settings.tier_url if settings.tier_url else 'not configured'}")
    if not facts.priority:
        reasons.append("engine has no priority scheduling: warm-ups are sent without a priority")
    block = facts.block_size_tokens or FALLBACK_BLOCK_TOKENS
    return Resolved(
        warm=warm,
        hold=hold,
        tier=tier,
        priority=settings.warm_priority if facts.priority else 0,
        block_size_tokens=block,
        pool_tokens=facts.pool_tokens,
        ask_token_ids=facts.prompt_token_ids,
        reasons=tuple(reasons),
        pool_hints=hints,
        hold_cap_tokens=facts.hold_cap_tokens if hints else None,
    )
