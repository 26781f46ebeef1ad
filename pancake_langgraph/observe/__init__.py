"""Views of the ledger: the timeline file and the summary."""

from pancake_langgraph.observe.perfetto import build_trace, write_trace
from pancake_langgraph.observe.summary import Summary, summarize

__all__ = ["Summary", "build_trace", "summarize", "write_trace"]
