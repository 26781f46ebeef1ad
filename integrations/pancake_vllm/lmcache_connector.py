"""LMCache's connector, except that lost cache servers and requests that go away do not take the engine down.

LMCache 0.5.6 asks its server for a place before it stores, inside the engine's step, and raises when no answer comes in
time; vLLM ends the engine process for that.  A store is only a hint for later requests, so here it is dropped, counted
and logged.  Lookups and loads already fail open in LMCache itself.

A request that is aborted while its KV is loaded is reported by LMCache 0.5.6 twice: as one that has nothing to store,
and as loaded.  vLLM 0.32 frees it at the first report and ends the engine process at the second; and if the load is the
second, it goes on writing to blocks that were given away.  Here only the end of its load is reported.

It also takes hints on the engine's own pool, see `pancake_vllm.pool_hints`, and asks the cache server for nothing that
the pool holds whole, see `pancake_vllm.lookup_mixin`.

Used by `--kv-transfer-config` with `"kv_connector": "FailOpenLMCacheConnector"` and
`"kv_connector_module_path": "pancake_vllm.lmcache_connector"`, both public options of vLLM.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from typing import Any, Final

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.lmcache_mp_metrics import LMCacheMPConnectorStats, LMCacheMPPromMetrics

from pancake_vllm.identity_mixin import IdentityMixin
from pancake_vllm.lookup_mixin import SparedLookupMixin
from pancake_vllm.pool_hints import PoolHintsMixin

_LOST: Final = "lost_stores"
_SPARED: Final = "spared_lookups"
_LOG_PAUSE_S: Final = 60.0
#: Aborted requests that are remembered: the engine may name one again in its next steps.
_MAX_ABORTED: Final = 4096

#: A child of vLLM's logger, which alone has a handler in the engine process.
_logger = logging.getLogger("vllm.pancake")


class FailOpenStats(LMCacheMPConnectorStats):
    """LMCache's lookup times and, since the last report, the steps that lost their stores and the lookups spared."""

    def __post_init__(self) -> None:
        """Fill in what a report from another process may lack."""
        super().__post_init__()
        self.data.setdefault(_LOST, 0)
        self.data.setdefault(_SPARED, 0)

    def record_lost(self) -> None:
        """Count one step whose stores were dropped."""
        self.data[_LOST] += 1

    def record_spared(self) -> None:
        """Count one request that was not looked up in the cache server."""
        self.data[_SPARED] += 1

    def clone_and_reset(self) -> FailOpenStats:
        """Return what was counted and start anew."""
        snapshot = FailOpenStats(data=self.data)
        self.reset()
        return snapshot

    def reset(self) -> None:
        """Start anew."""
        super().reset()
        self.data[_LOST] = 0
        self.data[_SPARED] = 0

    def aggregate(self, other: Any) -> FailOpenStats:
        """Add what another process counted."""
        super().aggregate(other)
        for name in (_LOST, _SPARED):
            self.data[name] += other.data.get(name, 0)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures of the engine's periodic log line."""
        lost = self.data[_LOST]
        return {**super().reduce(), **({"Lost KV stores": lost} if lost else {})}

    def is_empty(self) -> bool:
        """Say whether there is nothing to report."""
        return super().is_empty() and not self.data[_LOST] and not self.data[_SPARED]


class FailOpenPromMetrics(LMCacheMPPromMetrics):
    """LMCache's metrics and two more.

    `vllm:pancake_lost_kv_stores_total` counts steps whose stores the cache server did not take,
    `vllm:pancake_spared_lookups_total` requests that were not looked up, since the pool held their context whole.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        texts = {
            _LOST: ("lost_kv_stores", "Engine steps whose KV stores were dropped because the cache server failed."),
            _SPARED: ("spared_lookups", "Requests not looked up in the cache server: the pool held their context."),
        }
        self._counted: dict[str, dict[int, Any]] = {}
        for key, (name, text) in texts.items():
            counter = self._counter_cls(name=f"vllm:pancake_{name}", documentation=text, labelnames=labelnames)
            self._counted[key] = {engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report to the metrics."""
        super().observe(transfer_stats_data, engine_idx)
        for key, counters in self._counted.items():
            counters[engine_idx].inc(transfer_stats_data.get(key, 0))


class FailOpenLMCacheConnector(SparedLookupMixin, IdentityMixin, PoolHintsMixin, LMCacheMPConnector):
    """`LMCacheMPConnector` for hard times: it fails open, takes pool hints, and keeps apart what is not the same.

    Its stores fail open, each aborted request is reported once, hints on the pool are carried out, what the pool holds
    whole is not looked up, and KV of other weights and adapters is another's.

    Used from the engine's step only, as its parent is.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connector_stats = FailOpenStats()
        self._quiet_until_s = 0.0
        self._loading: set[str] = set()
        self._aborted: OrderedDict[str, None] = OrderedDict()

    # -- in the scheduler ------------------------------------------------------------------------------------------

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take in that a request got its blocks; with `num_external_tokens` a load into them begins."""
        self._aborted.pop(request.request_id, None)  # a caller may use an id again
        if num_external_tokens > 0:
            self._loading.add(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Take in that a request has ended, by itself or aborted; see `KVConnectorBase_V1.request_finished`."""
        if request.request_id in self._loading:
            self._aborted[request.request_id] = None
            while len(self._aborted) > _MAX_ABORTED:
                self._aborted.popitem(last=False)
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return answer

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the workers report, before the scheduler does: an aborted load has no store that could end."""
        self._loading.difference_update(connector_output.finished_recving or ())
        if connector_output.finished_sending:
            connector_output.finished_sending -= self._aborted.keys()
        super().update_connector_output(connector_output)

    def _record_spared(self) -> None:
        self._connector_stats.record_spared()

    # -- in the workers --------------------------------------------------------------------------------------------

    def wait_for_save(self) -> None:
        """Store the blocks of this step; on any failure drop them, count them and log it once a minute at most.

        What failed was never registered as a running store, so its requests finish as if nothing had been stored.
        """
        try:
            super().wait_for_save()
        except Exception as exc:  # noqa: BLE001 - whatever a store dies of, the answer does not depend on it
            self._connector_stats.record_lost()
            self._log(exc)

    def _log(self, exc: Exception) -> None:
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + _LOG_PAUSE_S
            _logger.warning("the cache server takes no KV (%s: %s); going on without it", type(exc).__name__, exc)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FailOpenStats:
        """Return the report of a worker as an object."""
        return FailOpenStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> FailOpenPromMetrics:
        """Return what turns reports into Prometheus metrics."""
        return FailOpenPromMetrics(*args, **kwargs)
