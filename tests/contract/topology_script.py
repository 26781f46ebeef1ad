"""What every shape is made of: the scripted model, a few tools, and the `Shape` itself."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import PrivateAttr

ASK = {"messages": [HumanMessage("Hello, please help me with my order.", id="ask")]}

Answer = str | AIMessage


class Scripted(BaseChatModel):
    """Gives its answers in the order of the calls, then `done`.  Threads may call it at once."""

    answers: Sequence[Answer] = ()
    _num_calls: int = PrivateAttr(default=0)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Runnable:
        return self.bind(tools=[convert_to_openai_tool(each) for each in tools])

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any):
        with self._lock:
            index, self._num_calls = self._num_calls, self._num_calls + 1
        answer = self.answers[index] if index < len(self.answers) else "done"
        message = AIMessage(answer) if isinstance(answer, str) else answer.model_copy()
        return ChatResult(generations=[ChatGeneration(message=message)])


@dataclass(frozen=True)
class Shape:
    """A graph with what runs it and what must be said about it.

    `build` takes the model.  `answers` is the script of the main run, `others` are scripts that take other ways;
    `inputs` starts a run and `resumes` are the inputs after each stop.  `raises` is how a run ends that must not end
    well.  `unknown` are all sources of undeclared jumps (`None`: every node), `varies` those whose decision no script
    of this shape takes both ways.
    """

    build: Callable[[BaseChatModel], Any]
    answers: tuple[Answer, ...] = ()
    others: tuple[tuple[Answer, ...], ...] = ()
    inputs: Any = field(default_factory=lambda: ASK)
    resumes: tuple[Any, ...] = ()
    raises: type[Exception] | None = None
    unknown: frozenset[str] | set[str] | None = frozenset()
    varies: frozenset[str] | set[str] = frozenset()


def call_of(name: str, call_id: str = "1", **args: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": args, "id": call_id}])


def calls_of(*names: str, **args: Any) -> AIMessage:
    """One answer that calls several tools, all with the same arguments."""
    return AIMessage("", tool_calls=[{"name": name, "args": args, "id": f"{i}"} for i, name in enumerate(names)])


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def look_up(word: str) -> str:
    """Look a word up."""
    return f"{word}: a word"


@tool(return_direct=True)
def finish_with(text: str) -> str:
    """Answer with this text at once."""
    return text
