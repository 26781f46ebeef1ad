"""Spares a request the look-up in the cache server where the pool holds its whole context: a mix-in for LMCache.

LMCache 0.5.6 answers a look-up in two round trips, and vLLM asks for their results once per step.  So each request
waits for steps of whatever else runs before it may begin.  A context that is held whole is in the pool as far as it is
known, and what comes behind it is new.  That is so where its thread has read and written no more, as the hint says; and
where the cache server did not have all of it when it was looked up, since then it had nothing behind it either.
Another thread may have read the very same since: then a few tokens are computed that might have been copied.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from typing import Any, Final, NamedTuple

from pancake_vllm.hint_words import read_orders

#: Held contexts of which it is remembered how much of them the cache server was given.
_MAX_REMEMBERED: Final = 1024
#: A thread is looked up again after this time: the cache server forgets what nobody asks for, and is then told anew.
MAX_SPARED_S: Final = 30.0

#: A child of vLLM's logger, which alone has a handler in the engine process.
_logger = logging.getLogger("vllm.pancake")


#: With more than this behind the context a request is looked up: computing it takes longer than waiting does, and would
#: be lost where the cache server has it after all.
MAX_NEW_TOKENS: Final = 512


class _Stored(NamedTuple):
    """How much of a context the cache server was given, and when its thread was last looked up there."""

    num_tokens: int
    looked_up_s: float


class SparedLookupMixin:
    """Mix into `LMCacheMPConnector`, before `IdentityMixin` and `PoolHintsMixin`; the scheduler's side only.

    Where LMCache's record of a request is not as in 0.5.6, every request is looked up, as without this.
    """

    _hints: Any = None
    _stored: OrderedDict[str, _Stored]
    _spared: dict[str, float]
    _spares: bool = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stored = OrderedDict()
        self._spared = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Say at once that there is nothing to load where the pool holds all; else ask the cache server."""
        if self._spares and self._is_spared(request, num_computed_tokens):
            self._record_spared()
            return 0, False
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(  # type: ignore[misc]
            request, num_computed_tokens
        )
        return found

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Remember of a context that is held from now on how much of it the cache server was given."""
        record = self._record_of(request)
        num_stored, is_new = getattr(record, "num_stored_tokens", None), self._had_new_tokens(record, request)
        looked_up_s = self._spared.pop(request.request_id, None)
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)  # type: ignore[misc]
        orders = read_orders(getattr(request, "kv_transfer_params", None))
        if orders is not None and orders.hold is not None and num_stored is not None:
            looked_up_s = self._now_s() if looked_up_s is None else looked_up_s
            self._stored[orders.hold.hint_id] = _Stored(num_stored, looked_up_s)
            self._stored.move_to_end(orders.hold.hint_id)
            while len(self._stored) > _MAX_REMEMBERED:
                self._stored.popitem(last=False)
            if is_new and self._hints is not None and self._hints.book is not None:
                self._hints.book.say_whole(orders.hold.hint_id)
        return answer

    def _record_spared(self) -> None:
        """Count a look-up that was spared."""

    def _now_s(self) -> float:
        return time.monotonic()

    def _record_of(self, request: Any) -> Any | None:
        """Return LMCache's record of a request, which is made when it is first looked up."""
        return getattr(self, "request_trackers", {}).get(request.request_id)

    def _had_new_tokens(self, record: Any, request: Any) -> bool:
        """Whether the cache server did not have all chunks of a prompt: what is behind them it cannot have either."""
        num_found = getattr(record, "num_lmcache_hit_tokens", None)
        chunk = getattr(getattr(self, "scheduler_adapter", None), "lmcache_tokens_per_chunk", None)
        num_prompt = getattr(request, "num_prompt_tokens", None)
        if not (isinstance(num_found, int) and isinstance(chunk, int) and isinstance(num_prompt, int) and chunk > 0):
            return False
        return num_found < (num_prompt - 1) // chunk * chunk

    def _is_spared(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the pool holds all there can be of a request; its record is then made as if looked up."""
        try:
            record = self._record_of(request)
            if record is not None and (record.lookup_started_at is not None or record.state.name != "PREFETCHING"):
                return False  # asked already: what is reserved for it has to be taken or given back
            stored = self._stored_of(request, num_computed_tokens)
            if stored is None:
                self._spared.pop(request.request_id, None)
                if record is not None:  # spared in an earlier step that had no room for it, and lost meanwhile
                    record.num_stored_tokens = 0
                return False
            record = self._get_or_create_request_tracker(self._salted(request))  # type: ignore[attr-defined]
            aligned: int = self._hit_alignment_tokens  # type: ignore[attr-defined]
            chunk: int = self.scheduler_adapter.lmcache_tokens_per_chunk  # type: ignore[attr-defined]
            record.num_vllm_hit_tokens = num_computed_tokens // aligned * aligned
            # Storing goes on at the edge of a chunk, also where the context now ends a little before what was stored.
            record.num_stored_tokens = min(stored.num_tokens, record.num_vllm_hit_tokens) // chunk * chunk
            self._spared[request.request_id] = stored.looked_up_s
        except Exception as exc:  # noqa: BLE001 - fails open, as the scheduler must not see it: off from here on
            self._spares = False
            _logger.warning("look-ups are spared no more, is this another LMCache? %s", repr(exc)[:200])
            return False
        return True

    def _stored_of(self, request: Any, num_computed_tokens: int) -> _Stored | None:
        """Return how much of a context was stored; `None` where it is not held whole or is to be looked up again."""
        book = self._hints.book if self._hints is not None else None
        if book is None or num_computed_tokens < book.block_size_tokens:
            return None
        if len(request.all_token_ids) - num_computed_tokens > MAX_NEW_TOKENS:
            return None
        hint_id = book.whole_behind(request.block_hashes, num_computed_tokens // book.block_size_tokens)
        stored = self._stored.get(hint_id) if hint_id is not None else None
        return stored if stored is not None and self._now_s() - stored.looked_up_s < MAX_SPARED_S else None
