"""What each agent reads: learned prompt shapes and the prompts they predict."""

from pancake_langgraph.prompts.book import PromptBook
from pancake_langgraph.prompts.identity import agent_key, begins_with, strip_task_ids
from pancake_langgraph.prompts.prediction import Prediction, Source, Unknown
from pancake_langgraph.prompts.prefix import cut_at_block_edge
from pancake_langgraph.prompts.shape import PromptShape

__all__ = [
    "Prediction",
    "PromptBook",
    "PromptShape",
    "Source",
    "Unknown",
    "agent_key",
    "begins_with",
    "cut_at_block_edge",
    "strip_task_ids",
]
