"""Keeps apart in the cache server what different weights and adapters computed: a mix-in for LMCache's connector."""

from __future__ import annotations

import logging
import secrets
from typing import Any, Final

from pancake_vllm.identity import CANARY_SALT, Adapters, engine_identity, tier_salt

#: Where a request's `kv_transfer_params`, and the answer's, speak of this package.
_FIELD: Final = "pancake"
#: In a request: look in the cache server under this salt, though the pool knows another.  Only between salts of known
#: answers: otherwise whoever may send requests could read as another tenant, or put KV that lost bits into the pool of
#: those who asked for exact KV.
_TIER_SALT: Final = "tier_salt"
#: In a request: what was found out about the cache server.  In the answer: what is known.
_TIER: Final = "tier"
#: What is known: nothing yet, that its answers are right, or that they are not, so that it is not read.
UNPROVEN, PROVEN, OFF = "unproven", "proven", "off"

#: A child of vLLM's logger, which alone has a handler in the engine process.
_logger = logging.getLogger("vllm.pancake")


class SaltedRequest:
    """A request as the cache server is to see it: the same, under another salt."""

    __slots__ = ("_request", "cache_salt")

    def __init__(self, request: Any, salt: str) -> None:
        """Show `salt` in place of the request's own."""
        self._request = request
        self.cache_salt = salt

    def __getattr__(self, name: str) -> Any:
        """Return what the request has."""
        return getattr(self._request, name)


class IdentityMixin:
    """Mix into `LMCacheMPConnector`, before it.  See `pancake_vllm.identity`; the scheduler's side only.

    A request with `kv_transfer_params={"pancake": {}}` is told the engine's identity, and whether the cache server is
    read, in its answer's.  One with `{"pancake": {"tier": "off"}}` ends that, for itself and all later ones, until one
    with `"proven"` or `"unproven"` comes; KV is still stored.
    """

    kv_identity: str | None = None
    tier_state: str = UNPROVEN
    _adapters: Adapters
    _pool: Any = None

    def __init__(self, vllm_config: Any, role: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, role, *args, **kwargs)  # type: ignore[call-arg]
        self._adapters = Adapters()
        if getattr(role, "name", "") == "SCHEDULER":
            self.kv_identity = engine_identity(vllm_config)
            _logger.info("KV of this engine is kept as %s", self.kv_identity)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Remember the pool, to empty it when an adapter is replaced."""
        super().bind_gpu_block_pool(gpu_block_pool)  # type: ignore[misc]
        self._pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        """Take in a new request; KV that an adapter of its name computed with other contents is dropped first."""
        self._take_note(_said(request).get(_TIER))
        lora = request.lora_request
        if lora is not None and self._adapters.is_replaced(lora) and self._pool is not None:
            _logger.warning("adapter %s was replaced: the prefix cache is emptied", lora.lora_name)
            self._pool.evict_blocks({block.block_id for block in self._pool.blocks})
        super().on_new_request(self._salted(request))  # type: ignore[misc]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Ask the cache server for what it has under this request's identity."""
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(  # type: ignore[misc]
            self._salted(request), num_computed_tokens
        )
        # Asked all the same, since LMCache's record of the request begins there; its counts of hits may stay 0.
        return (0, False) if self.tier_state == OFF else found

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Tell the identity to a request that asks for it, beside what else its answer says."""
        delay_free, params = super().request_finished(request, block_ids)  # type: ignore[misc]
        if self.kv_identity is not None and _FIELD in (getattr(request, "kv_transfer_params", None) or {}):
            told = (params or {}).get(_FIELD) or {}
            told = {**told, "kv_identity": self.kv_identity, _TIER: self.tier_state}
            params = {**(params or {}), _FIELD: told}
        return delay_free, params

    def _take_note(self, state: object) -> None:
        if state in (UNPROVEN, PROVEN, OFF) and state != self.tier_state:
            self.tier_state = str(state)
            level = logging.WARNING if state == OFF else logging.INFO
            _logger.log(level, "the cache server is now %s", {OFF: "switched off: it is not read"}.get(state, state))

    def _salted(self, request: Any) -> Any:
        if self.kv_identity is None:
            return request
        salt, other = request.cache_salt, _said(request).get(_TIER_SALT)
        if isinstance(other, str) and other.startswith(CANARY_SALT) and (salt or "").startswith(CANARY_SALT):
            salt = other
        if request.lora_request is None:
            return SaltedRequest(request, tier_salt(self.kv_identity, salt))
        adapter = self._adapters.name(request.lora_request)
        if adapter is None:  # nobody asks for this name again
            adapter = f"x{secrets.token_hex(8)}"
        return SaltedRequest(request, tier_salt(self.kv_identity, salt, adapter=adapter))


def _said(request: Any) -> dict[str, Any]:
    params = getattr(request, "kv_transfer_params", None)
    said = params.get(_FIELD) if isinstance(params, dict) else None
    return said if isinstance(said, dict) else {}
