"""What a runtime remembers of runs that have ended does not grow with their number."""

import asyncio

from langgraph.checkpoint.memory import InMemorySaver

from pancake_langgraph.bench.forecast_agents import tool_rounds
from pancake_langgraph.bench.forecast_cost import WireModel
from pancake_langgraph.bench.forecast_shapes import Parts, one_message
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.ledger import Ledger
from pancake_langgraph.runtime import Runtime, attach


async def test_no_message_of_an_ended_run_is_held() -> None:
    with Runtime(RuntimeSettings(engine="null"), ledger=Ledger(max_events=10)) as runtime:
        graph = attach(tool_rounds(Parts(WireModel(), InMemorySaver(), lambda delta_s: None, 0)), runtime=runtime)
        held = []
        for number in range(6):
            await graph.ainvoke(one_message(number), {"configurable": {"thread_id": f"t{number}"}})
            assert await asyncio.to_thread(runtime.expectations) == ()
            held.append(len(runtime._state.book._memo))
        assert held == [0] * 6


async def test_messages_are_remembered_while_their_run_goes_on() -> None:
    seen = []

    class Looking(WireModel):
        def _generate(self, *args, **kwargs):
            runtime.expectations()  # first: then every signal so far was taken in
            seen.append(len(runtime._state.book._memo))
            return super()._generate(*args, **kwargs)

    with Runtime(RuntimeSettings(engine="null")) as runtime:
        graph = attach(tool_rounds(Parts(Looking(), InMemorySaver(), lambda delta_s: None, 0)), runtime=runtime)
        await graph.ainvoke(one_message(0), {"configurable": {"thread_id": "t"}})
    assert max(seen) > 0
