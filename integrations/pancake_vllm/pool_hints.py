"""Gives a KV connector pool hints: a mix-in for the scheduler's side, over vLLM's public connector calls only.

Hints fail open: no exception of theirs reaches the scheduler.  After a few failures they are switched off, with one
line in the log, and the engine goes on as it is without them.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from pancake_vllm.hint_book import DEFAULT_CAP_RATIO, HintBook
from pancake_vllm.hint_words import FIELD, VERSION, Answer, Orders, read_orders
from pancake_vllm.pool_order import BlockPoolOrder, PoolOrder

#: Setting in the connector's extra configuration: the share of the pool that may be held, 0 to 0.9; 0 takes no hints.
CAP_SETTING: Final = "pancake.hold_cap_ratio"
MAX_CAP_RATIO: Final = 0.9
#: Failures after which hints are switched off.
MAX_FAILURES: Final = 3
#: Requests whose early answers wait for their end.
_MAX_WAITING: Final = 4096
#: Ends of a request after which its beginning is worth keeping; an aborted one holds nothing.
_GOOD_ENDS: Final = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"})

#: A child of vLLM's logger, which alone has a handler in the engine process.
_logger = logging.getLogger("vllm.pancake")


class PoolHints:
    """The scheduler's side of pool hints, apart from any connector.

    Used from the engine's step only.  Every method may be called at any time and never raises; before `bind`, with
    several KV cache groups, and after `MAX_FAILURES` failures all of them do nothing.
    """

    def __init__(self, *, cap_ratio: float = DEFAULT_CAP_RATIO, clock: Callable[[], float] = time.monotonic) -> None:
        """Hold at most `cap_ratio` of the pool."""
        self.failures = 0
        self._cap_ratio = cap_ratio
        self._clock = clock
        self._book: HintBook | None = None
        self._early: OrderedDict[str, list[Answer]] = OrderedDict()

    @property
    def book(self) -> HintBook | None:
        """What is in force; `None` while hints are off."""
        return self._book

    def bind(self, pool: Any, *, num_groups: int) -> None:
        """Take hints for `pool` from now on."""
        self._guarded(self._bind, pool, num_groups)

    def arrived(self, request: Any) -> None:
        """Carry out what a new request releases and retires, before it takes blocks."""
        if self._book is not None:
            self._guarded(self._arrived, self._book, request)

    def allocated(self, blocks: Any) -> None:
        """Take in which blocks (`KVCacheBlocks`) a request was given."""
        if self._book is not None:
            self._guarded(self._allocated, self._book, blocks)

    def stepped(self) -> None:
        """Put the order right after a step's allocations."""
        if self._book is not None:
            self._guarded(self._stepped, self._book)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Carry out what a request holds, and return the answer to all its hints; `None` if it has none."""
        if self._book is None:
            return None
        found = self._guarded(self._finished, self._book, request)
        return found if isinstance(found, dict) else None

    def _guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        try:
            return work(*args)
        except Exception as exc:  # noqa: BLE001 - hints fail open: the scheduler must not see this; counted
            self.failures += 1
            if self.failures >= MAX_FAILURES and self._book is not None:
                self._book = None
                self._early.clear()
                _logger.warning("pool hints are off after %d failures, the last one %s", self.failures, repr(exc)[:200])
            return None

    # -- inside ---------------------------------------------------------------------------------------------------

    def _bind(self, pool: Any, num_groups: int) -> None:
        if num_groups != 1 or not pool.enable_caching or not 0.0 < self._cap_ratio <= MAX_CAP_RATIO:
            _logger.info("pool hints are off: %d KV cache groups, cap %s", num_groups, self._cap_ratio)
            return
        self._book = HintBook(self._order(pool), cap_ratio=self._cap_ratio)

    def _order(self, pool: Any) -> PoolOrder:
        return BlockPoolOrder(pool)

    def _arrived(self, book: HintBook, request: Any) -> None:
        orders = read_orders(request.kv_transfer_params)
        now_s = self._clock()
        if orders is not None:
            answers = [book.release(hint_id) for hint_id in orders.release]
            answers += [book.retire(hint, now_s=now_s) for hint in orders.retire]
            if answers:
                self._early[request.request_id] = answers
                while len(self._early) > _MAX_WAITING:
                    self._early.popitem(last=False)
        book.settle(now_s=now_s)

    def _allocated(self, book: HintBook, blocks: Any) -> None:
        for group in blocks.get_block_ids():
            book.allocated(group)

    def _stepped(self, book: HintBook) -> None:
        book.settle(now_s=self._clock())

    def _finished(self, book: HintBook, request: Any) -> dict[str, Any] | None:
        answers = self._early.pop(request.request_id, [])
        orders: Orders | None = read_orders(request.kv_transfer_params)
        if orders is None:
            return None
        if orders.hold is not None and request.status.name in _GOOD_ENDS:
            answers.append(book.hold(orders.hold, request.block_hashes, now_s=self._clock()))
        return {
            "version": VERSION,
            "answers": [answer.to_wire() for answer in (*answers, *orders.refused)],
            "held_tokens": book.held_tokens,
            "cap_tokens": book.cap_tokens,
        }


class PoolHintsMixin:
    """Mix into a `KVConnectorBase_V1`, before it: `class Mine(PoolHintsMixin, Theirs)`.  See `PoolHints`."""

    _hints: PoolHints | None = None

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take hints for the scheduler's pool."""
        super().bind_gpu_block_pool(gpu_block_pool)  # type: ignore[misc]
        hints = PoolHints(cap_ratio=_cap_ratio(self))
        groups = getattr(getattr(self, "_kv_cache_config", None), "kv_cache_groups", (None,))
        hints.bind(gpu_block_pool, num_groups=len(groups))
        self._hints = hints

    def on_new_request(self, request: Any) -> None:
        """Take in a new request, before it gets blocks."""
        super().on_new_request(request)  # type: ignore[misc]
        if self._hints is not None:
            self._hints.arrived(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take in that a request got its blocks."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]
        if self._hints is not None:
            self._hints.allocated(blocks)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return the connector's own metadata; the step's allocations are over."""
        metadata = super().build_connector_meta(scheduler_output)  # type: ignore[misc]
        if self._hints is not None:
            self._hints.stepped()
        return metadata

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Add the answer to the request's hints to what the connector reports."""
        delay_free, params = super().request_finished(request, block_ids)  # type: ignore[misc]
        answer = self._hints.finished(request) if self._hints is not None else None
        return delay_free, (params if answer is None else {**(params or {}), FIELD: answer})


def _cap_ratio(connector: Any) -> float:
    config = getattr(connector, "_kv_transfer_config", None)
    value = config.get_from_extra_config(CAP_SETTING, DEFAULT_CAP_RATIO) if config is not None else DEFAULT_CAP_RATIO
    return float(value) if isinstance(value, int | float) else 0.0
