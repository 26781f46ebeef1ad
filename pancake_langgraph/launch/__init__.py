"""Real parts as child processes: the model server and the KV cache server, on loopback only."""

from pancake_langgraph.launch.plans import StackPlan, TierPlan
from pancake_langgraph.launch.process import ChildProcess
from pancake_langgraph.launch.stack import EngineProcess, Stack, TierProcess

__all__ = ["ChildProcess", "EngineProcess", "Stack", "StackPlan", "TierPlan", "TierProcess"]
