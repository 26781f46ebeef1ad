"""How often the plain engine itself writes other words from a cold prompt than after its own cache hit."""

from __future__ import annotations

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from pancake_langgraph.bench.arms import Arm, arm_run
from pancake_langgraph.bench.servers import Servers
from pancake_langgraph.bench.text import passages

NUM_PROMPTS = 6
_ANSWER_TOKENS = 16


async def cold_versus_hit(servers: Servers, *, prompt_words: int, repeat: int) -> dict[str, int]:
    """Ask the plain engine each of a few prompts twice under one salt, alone; count the pairs that differ.

    In bfloat16 sums taken in another order may turn a greedy choice; nothing compared with the plain engine can be
    nearer to it than it is to itself.
    """
    differing = 0
    for number in range(NUM_PROMPTS):
        model = arm_run(Arm.PLAIN, servers, cache_salt=f"floor-{repeat}-{number}").model(max_tokens=_ANSWER_TOKENS)
        prompt: list[BaseMessage] = [
            SystemMessage(f"You are reader {number}. {passages(prompt_words, seed=3000 + number)}"),
            HumanMessage("Say in one sentence what this is about."),
        ]
        cold, hit = [_text(await model.ainvoke(prompt)) for _ in range(2)]
        differing += cold != hit
    return {"prompts": NUM_PROMPTS, "differing": differing}


def _text(answer: AIMessage) -> str:
    return str(answer.content)
