"""A connector that moves no KV and takes pool hints: for an engine without a cache server.

Used by `--kv-transfer-config` with `"kv_connector": "PoolHintsConnector"`, `"kv_connector_module_path":
"pancake_vllm.hints_connector"` and `"kv_role": "kv_both"`.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

from pancake_vllm.pool_hints import PoolHintsMixin


class NoMetadata(KVConnectorMetadata):
    """What the scheduler tells the workers: nothing."""


class _MovesNothing(KVConnectorBase_V1, SupportsHMA):
    """A connector without any KV outside the engine."""

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether somebody waits for this engine's KV: nobody."""
        return False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Save nothing."""

    def wait_for_save(self) -> None:
        """Wait for nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Say that there is nothing to load."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take note of nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> NoMetadata:
        """Tell the workers nothing."""
        return NoMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Let the blocks go at once."""
        return False, None


class PoolHintsConnector(PoolHintsMixin, _MovesNothing):
    """Takes pool hints and moves nothing.  Used from the engine's step only."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Take in that a request has ended."""
        return self.request_finished(request, block_ids[0] if block_ids else [])
