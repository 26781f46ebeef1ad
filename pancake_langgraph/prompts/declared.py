"""Prompts known before the first call: declared by the application, or read from an agent's own code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, convert_to_messages

from pancake_langgraph._types import WireObject
from pancake_langgraph.prompts.fields import NO_FORM, WireMemo
from pancake_langgraph.prompts.identity import common_messages
from pancake_langgraph.prompts.parts import Known, Part, Rendering, render
from pancake_langgraph.prompts.prediction import Source
from pancake_langgraph.prompts.tool_order import expected_tools

logger = logging.getLogger(__name__)

_MAX_COMPLAINTS: Final = 4
#: Stands for messages that may still come behind those that are known.
_PROBE: Final = HumanMessage("\x00")


class _Unsure(LookupError):
    """A declared prompt asked for a field that is not certain yet."""


class _CertainState(Mapping[str, Any]):
    """The certain fields of a state, for a declared prompt; asking for another one ends the rendering."""

    def __init__(self, known: Known, *, grown: bool) -> None:
        self._known = known
        self._grown = grown
        self.asked = ""

    def __getitem__(self, name: str) -> Any:
        known = self._known
        if known.sure_of(name):
            return known.fields[name]
        if name in known.growing and isinstance(value := known.fields.get(name), list):
            return [*value, _PROBE] if self._grown else value
        if not known.all_unsure and name not in known.fields and name not in known.unsure:
            raise KeyError(name)  # it is certain that the state does not have it
        self.asked = name
        raise _Unsure(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._known.fields if self._known.sure_of(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, slots=True)
class DeclaredPrompt:
    """A prompt that need not be learned.

    Either `parts` (read from code) or `prompt` (declared): a text (the system prompt), a prompt template, messages, or
    a callable that makes any of these from the state; it must be pure.  `bound_tools` is `None` where only a call can
    tell; `tool_order` is the setting of the model that will send them.
    """

    namespace: str
    source: Source
    prompt: object = None
    parts: tuple[Part, ...] = ()
    bound_tools: tuple[WireObject, ...] | None = None
    tool_order: object = None
    agent_name: str | None = None
    _complaints: list[str] = field(default_factory=list, compare=False, repr=False)

    @property
    def tools(self) -> tuple[WireObject, ...] | None:
        """The tools as they would be sent now; `None` where only a call can tell."""
        return None if self.bound_tools is None else tuple(expected_tools(self.bound_tools, self.tool_order))

    def render(self, known: Known, memo: WireMemo) -> Rendering:
        """Return the prompt as far as it is certain.  Never raises: a declared prompt that fails renders nothing."""
        if self.parts:
            return render(self.parts, known, memo)
        rendering = self._made(known, memo, grown=False)
        if not known.growing or not rendering.messages:
            return rendering
        grown = self._made(known, memo, grown=True)  # what a longer list leaves as it is, is certain
        same = common_messages(rendering.messages, grown.messages)
        if same == len(rendering.messages) == len(grown.messages):
            return rendering
        return Rendering(rendering.messages[:same], stop=f"{', '.join(sorted(known.growing))} may still grow")

    def _made(self, known: Known, memo: WireMemo, *, grown: bool) -> Rendering:
        state = _CertainState(known, grown=grown)
        try:
            wire = memo.wire(_as_messages(self.prompt, state))
        except Exception as exc:  # noqa: BLE001 - the application's own code may raise anything; it must not matter
            if state.asked:
                return Rendering((), stop=f"{state.asked} is not certain yet")
            name = type(exc).__name__
            if name not in self._complaints and len(self._complaints) < _MAX_COMPLAINTS:
                self._complaints.append(name)
                logger.warning("the prompt declared for %s raised %s; it is not used then", self.namespace, name)
            return Rendering((), stop=f"the declared prompt raised {name}")
        return Rendering(wire[: wire.index(NO_FORM)] if NO_FORM in wire else wire, is_complete=True)


def _as_messages(prompt: object, state: Mapping[str, Any]) -> Sequence[BaseMessage]:
    if isinstance(prompt, str):
        return [SystemMessage(prompt)]
    if isinstance(prompt, BaseMessage):
        return [prompt]
    if callable(formatter := getattr(prompt, "format_messages", None)):
        wanted = [*getattr(prompt, "input_variables", ()), *getattr(prompt, "optional_variables", ())]
        partial = getattr(prompt, "partial_variables", {})
        made = formatter(**{name: state[name] for name in wanted if name in state or name not in partial})
        return list(made)
    if callable(prompt):
        make: Callable[[Mapping[str, Any]], object] = prompt
        return _as_messages(make(state), state)
    if callable(to_messages := getattr(prompt, "to_messages", None)):  # a prompt value
        return list(to_messages())
    if isinstance(prompt, list | tuple):
        return convert_to_messages(list(prompt))
    raise TypeError(f"a declared prompt gave {type(prompt).__name__}")
