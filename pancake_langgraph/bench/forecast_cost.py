"""What observing and forecasting cost in the user's process: processor time per model call, and memory over many runs.

The model answers in memory and tells the observers what a real one tells from the wire, so that thousands of runs fit
into a minute.  Counted is processor time: that of the handler's callbacks in the user's thread and all of the
runtime's own thread.
"""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import psutil
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.checkpoint.memory import InMemorySaver

from pancake_langgraph._types import Usage
from pancake_langgraph.bench.forecast_agents import tool_rounds
from pancake_langgraph.bench.forecast_shapes import Parts, one_message
from pancake_langgraph.bench.statistics import percentile
from pancake_langgraph.chat.watch import RunProbe, Watch
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.ledger import Ledger
from pancake_langgraph.prompts.wire_form import wire_form
from pancake_langgraph.runtime import Runtime, attach

#: Runs after which memory is looked at first: by then every table is warm, and most are at their bounds.
FIRST_LOOK_RUNS: Final = 1_000
_CALLS_PER_RUN: Final = 2
#: So small that both looks find the ledger full: what is asked is whether anything else grows.
_LEDGER_EVENTS: Final = 2_000
_CONTEXTS: Final = 64
_CLOCK_READINGS: Final = 501


@dataclass(frozen=True, slots=True)
class Weight:
    """Memory after a number of runs: of the process, and the objects that Python's collector knows."""

    runs: int
    rss_bytes: int
    objects: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What was measured.  `observe_s` has one value per run: processor time divided by the run's model calls."""

    observe_s: tuple[float, ...]
    weights: tuple[Weight, ...]

    def summary(self) -> dict[str, Any]:
        """Return the figures for a result."""
        ms = [1000.0 * value for value in self.observe_s]
        first, last = self.weights[0], self.weights[-1]
        return {
            "observe_ms_per_call": {"p50": round(percentile(ms, 50.0), 3), "p99": round(percentile(ms, 99.0), 3)},
            "memory": [
                {"runs": w.runs, "rss_mib": round(w.rss_bytes / 2**20, 1), "objects": w.objects} for w in self.weights
            ],
            "grown_mib": round((last.rss_bytes - first.rss_bytes) / 2**20, 1),
            "grown_objects": last.objects - first.objects,
        }


class WireModel(BaseChatModel):
    """Asks for a tool once, then answers; no server."""

    @property
    def _llm_type(self) -> str:
        return "wire"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        """Bind nothing: the schema is the same in every call."""
        return self

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        watch = Watch(RunProbe.of(run_manager))
        watch.request({"model": "wire", "messages": list(wire_form(messages) or ()), "max_tokens": 16})
        watch.first_piece(None)
        answer = AIMessage("found it")
        if messages[-1].type != "tool":
            watch.tool_name("look_up")
            call = {"name": "look_up", "args": {"query": "rivers"}, "id": "call-1", "type": "tool_call"}
            answer = AIMessage("", tool_calls=[call])
        watch.end(Usage(300, 8, None), "stop")
        return ChatResult(generations=[ChatGeneration(message=answer)])

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._generate(messages, stop, run_manager, **kwargs)


async def measure_cost(runs: int) -> Cost:
    """Run a tool loop of two calls `runs` times, each in a thread of its own."""
    with Runtime(
        RuntimeSettings(engine="null", max_contexts=_CONTEXTS), ledger=Ledger(max_events=_LEDGER_EVENTS)
    ) as runtime:
        runtime.start()
        saver = InMemorySaver()
        graph = attach(tool_rounds(Parts(WireModel(), saver, _no_time, 0)), runtime=runtime)
        callbacks = _CallbackTime()
        for handler in graph.config["callbacks"]:
            callbacks.wrap(handler)
        thread_s = _thread_time("pancake-runtime")
        observe_s: list[float] = []
        asking_s: list[float] = []
        weights: list[Weight] = []
        for number in range(runs):
            before_s = callbacks.spent_s + thread_s()
            await graph.ainvoke(one_message(number), {"configurable": {"thread_id": f"cost-{number}"}})
            runtime.expectations()
            taken_in_s = callbacks.spent_s + thread_s()
            runtime.expectations()
            asking_s.append(callbacks.spent_s + thread_s() - taken_in_s)
            observe_s.append(taken_in_s - before_s)
            saver.delete_thread(f"cost-{number}")
            if number + 1 in (min(FIRST_LOOK_RUNS, max(runs // 2, 1)), runs):
                weights.append(_weigh(number + 1))
    own_s = statistics.median(asking_s)  # what asking costs is the bench's own
    return Cost(tuple((spent_s - own_s) / _CALLS_PER_RUN for spent_s in observe_s), tuple(weights))


class _CallbackTime:
    """Adds up the processor time of a handler's callbacks, without what reading the clock takes."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._clock_s = 0.0
        self._clock_s = self._time_of_nothing()

    def _time_of_nothing(self) -> float:
        nothing = self._timed(lambda: None)
        readings: list[float] = []
        for _ in range(_CLOCK_READINGS):
            before_s = self.spent_s
            nothing()
            readings.append(self.spent_s - before_s)
        self.spent_s = 0.0
        return statistics.median(readings)

    def wrap(self, handler: Any) -> None:
        for name in dir(handler):
            if name.startswith("on_"):
                setattr(handler, name, self._timed(getattr(handler, name)))

    def _timed(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started_s = time.thread_time()
            try:
                return callback(*args, **kwargs)
            finally:
                self.spent_s += time.thread_time() - started_s - self._clock_s

        return timed


def _thread_time(name: str) -> Callable[[], float]:
    """Return a clock of the processor time of the thread called `name`, started last; it stands still if none is."""
    ids = [thread.ident for thread in threading.enumerate() if thread.name == name and thread.ident is not None]
    if not ids:
        return lambda: 0.0
    clock = time.pthread_getcpuclockid(ids[-1])
    return lambda: time.clock_gettime(clock)


def _weigh(runs: int) -> Weight:
    gc.collect()
    return Weight(runs, psutil.Process().memory_info().rss, len(gc.get_objects()))


def _no_time(delta_s: float) -> None:
    """Let no time pass."""
