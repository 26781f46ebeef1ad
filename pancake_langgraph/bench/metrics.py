"""The metrics that results may hold."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Direction(StrEnum):
    """Which way is better."""

    LOWER = "lower"
    HIGHER = "higher"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its unit in words, which way is better, and what one value of it is."""

    unit: str
    better: Direction
    description: str


METRICS: dict[str, Metric] = {
    "ttft_s": Metric("s", Direction.LOWER, "One model call: from sending the request to the first token."),
    "tpot_s": Metric("s", Direction.LOWER, "One model call: time per output token after the first one."),
    "program_s": Metric("s", Direction.LOWER, "One program (a thread's run from START to END): wall time."),
    "prefilled_tokens": Metric(
        "tokens", Direction.LOWER, "One repeat: prompt tokens that the engine had to compute, warm-ups included."
    ),
    "reprefilled_tokens": Metric(
        "tokens", Direction.LOWER, "One call after a pause: tokens read before it that the engine computed again."
    ),
    "others_ttft_s": Metric("s", Direction.LOWER, "One call of a thread that presses on the pool: as ttft_s."),
    "output_tokens_per_s": Metric("tokens/s", Direction.HIGHER, "One repeat: output tokens over wall time."),
    "programs_per_min": Metric("1/min", Direction.HIGHER, "One repeat: finished programs over wall time."),
    "put_s": Metric("s", Direction.LOWER, "One checkpoint stored by a saver, as the graph waits for it."),
    "put_writes_s": Metric("s", Direction.LOWER, "One task's pending writes stored by a saver."),
    "get_tuple_s": Metric("s", Direction.LOWER, "One checkpoint read back whole by a saver."),
    "step_s": Metric("s", Direction.LOWER, "One turn of a conversation: a run of the graph, its saver included."),
    "observe_s": Metric("s", Direction.LOWER, "One model call: processor time of observing and forecasting."),
    "lead_s": Metric("s", Direction.HIGHER, "One start of a node: time since the forecast had first named it."),
    "kl_nats": Metric(
        "nats", Direction.LOWER, "One token of an answer: how far its chances are from those on KV as it is (KL)."
    ),
    "equal_share": Metric(
        "1", Direction.HIGHER, "One answer: the share of its greedy tokens that are those on KV as it is."
    ),
    "search_s": Metric("s", Direction.LOWER, "One search in an index or store, the query's vector being known."),
    "insert_s": Metric("s", Direction.LOWER, "One item put into an index or store, its vector being known."),
    "recall": Metric("1", Direction.HIGHER, "One search: the share of the true nearest items that it found."),
    "searches_per_s": Metric(
        "1/s", Direction.HIGHER, "One repeat: searches over the time they took, inserts between them included."
    ),
    "bulk_per_s": Metric(
        "1/s", Direction.HIGHER, "One repeat: searches of a job that nobody waits for, over the time it took."
    ),
    "hit_rate": Metric(
        "1", Direction.HIGHER, "One repeat: the share of what searches needed, in bytes, that was in memory by then."
    ),
    "precision": Metric(
        "1", Direction.HIGHER, "One repeat: the share of the partitions brought up for a search that it needed."
    ),
    "read_bytes": Metric(
        "bytes", Direction.LOWER, "One repeat: read from disk for a search on average, ahead of it and in it."
    ),
    "retrieval_wait_s": Metric("s", Direction.LOWER, "One search in a graph's node: from its text to what was found."),
    "memory_bytes": Metric("bytes", Direction.LOWER, "One repeat: main memory that an open index takes."),
    "stored_bytes": Metric("bytes", Direction.LOWER, "One repeat: what a saver holds after the last turn counted."),
}

#: The percentiles that results hold, by the name of their field.
PERCENTILES: dict[str, float] = {"p50": 50.0, "p90": 90.0, "p99": 99.0}
