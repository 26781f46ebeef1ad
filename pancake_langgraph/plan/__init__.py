"""Pure decisions: what is known in, actions with reasons out.  No I/O, no clock of its own."""

from pancake_langgraph.plan.holding import HoldDecision, HoldVerb, Waiting, plan_holds
from pancake_langgraph.plan.warming import WarmInputs, WarmVerdict, plan_warm

__all__ = ["HoldDecision", "HoldVerb", "Waiting", "WarmInputs", "WarmVerdict", "plan_holds", "plan_warm"]
