"""Pure decisions and the compiled plan: what is known in, actions with reasons out.  No I/O, no clock of its own."""

from pancake_langgraph.plan.compiled import CompiledPlan, Expected, Loop, Step, Suspension, ToolStep
from pancake_langgraph.plan.compiling import Learnt, compile_plan
from pancake_langgraph.plan.declared import GraphPhases, declared_for, read_phases
from pancake_langgraph.plan.habits import AnswerHabits
from pancake_langgraph.plan.holding import HoldDecision, HoldVerb, Waiting, hold_priority, hold_ttl_s, plan_holds
from pancake_langgraph.plan.warming import TOO_LATE, WarmInputs, WarmVerdict, plan_warm
from pancake_langgraph.plan.words import plan_in_words, plan_mermaid

__all__ = [
    "TOO_LATE",
    "AnswerHabits",
    "CompiledPlan",
    "Expected",
    "GraphPhases",
    "HoldDecision",
    "HoldVerb",
    "Learnt",
    "Loop",
    "Step",
    "Suspension",
    "ToolStep",
    "Waiting",
    "WarmInputs",
    "WarmVerdict",
    "compile_plan",
    "declared_for",
    "hold_priority",
    "hold_ttl_s",
    "plan_holds",
    "plan_in_words",
    "plan_mermaid",
    "plan_warm",
    "read_phases",
]
