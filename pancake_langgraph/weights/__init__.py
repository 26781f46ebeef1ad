"""Model files: made ready once, kept in the cache folder, verified by digest."""

from pathlib import Path

from pancake_langgraph.weights.smollm import prepare_smollm
from pancake_langgraph.weights.tiny import build_tiny_llama

__all__ = ["TOOLS_TEMPLATE", "build_tiny_llama", "prepare_smollm"]

#: Chat template (ChatML) that renders tools, tool calls and tool results, and only ever appends.
TOOLS_TEMPLATE = Path(__file__).with_name("chat_template_tools.jinja")
