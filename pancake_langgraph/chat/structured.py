"""Structured output that is a value or a typed error, never a quiet `None`."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final, cast

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableLambda
from langchain_core.utils.function_calling import convert_to_openai_function, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass, is_pydantic_v1_subclass
from pydantic import ValidationError

from pancake_langgraph._errors import StructuredOutputError
from pancake_langgraph.wire.json_text import decoded

_THINK: Final = re.compile(r"^\s*<think>.*?</think>", re.DOTALL)
_OPEN_THINK: Final = re.compile(r"^\s*<think>(?!.*</think>)", re.DOTALL)
_FENCE: Final = re.compile(r"^\s*```(?:json)?\s*(.*?)\s*```\s*$", re.DOTALL | re.IGNORECASE)


def is_pydantic(schema: Any) -> bool:
    """Say whether `schema` is a pydantic class, of either generation."""
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def described(schema: Any, *, method: str) -> Any:
    """Return `schema` in a form that `method` takes: pydantic's first generation as JSON schema."""
    if method == "json_schema" and isinstance(schema, type) and is_pydantic_v1_subclass(schema):
        return cast("Any", schema).schema()
    return schema


def response_format(schema: Any, *, strict: bool | None) -> dict[str, Any]:
    """Return the `response_format` object for a schema in any of LangChain's forms."""
    if isinstance(schema, dict) and schema.get("type") == "json_schema" and "json_schema" in schema:
        return schema
    if isinstance(schema, dict) and schema.get("type") in ("json_object", "text"):
        return schema
    if isinstance(schema, dict) and "name" in schema and "schema" in schema:
        return {"type": "json_schema", "json_schema": schema}
    function = convert_to_openai_function(schema, strict=strict)
    form: dict[str, Any] = {"name": function["name"], "schema": function.get("parameters") or {"type": "object"}}
    if function.get("description"):
        form["description"] = function["description"]
    form["strict"] = True if strict is None else strict
    return {"type": "json_schema", "json_schema": form}


def parser_for(schema: Any, *, method: str, tools_allowed: bool) -> Runnable[Any, Any]:
    """Return what turns an answer into the structured value.

    Dictionaries are streamed as they grow; pydantic objects come once, whole.

    Raises (when run):
        StructuredOutputError: if the answer is empty, cut short, no JSON, or does not fit the schema.
    """
    if method == "function_calling":
        name = convert_to_openai_tool(schema)["function"]["name"]
        guard = _Guard(tool_name=name, tools_allowed=tools_allowed)
        if is_pydantic(schema):
            return guard.runnable() | RunnableLambda(_Whole(PydanticToolsParser(tools=[schema], first_tool_only=True)))
        return guard.runnable() | JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    guard = _Guard(tool_name=None, tools_allowed=tools_allowed)
    if is_pydantic(schema):
        return guard.runnable() | RunnableLambda(_Whole(PydanticOutputParser(pydantic_object=schema)))
    return guard.runnable() | JsonOutputParser()


class _Whole:
    """Parses a whole message, naming the finish reason when it does not fit."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser

    def __call__(self, message: BaseMessage) -> Any:
        if not message.text and getattr(message, "tool_calls", None) and not self._reads_tools:
            return None  # the application allowed a tool call instead
        try:
            return self._parser.invoke(message)
        except (OutputParserException, ValidationError, ValueError) as exc:
            raise StructuredOutputError(
                f"the answer does not fit the schema ({type(exc).__name__}; finish_reason {_reason(message)!r}); "
                "loosen the schema, or use a server that enforces it (method='json_schema')"
            ) from exc

    @property
    def _reads_tools(self) -> bool:
        return isinstance(self._parser, PydanticToolsParser)


class _Guard:
    """Lets pieces pass, without a thinking block in front, and checks the whole at the end."""

    def __init__(self, *, tool_name: str | None, tools_allowed: bool) -> None:
        self._tool_name = tool_name
        self._tools_allowed = tools_allowed

    def runnable(self) -> Runnable[Any, Any]:
        return RunnableGenerator(self._pass, self._apass)

    def _pass(self, messages: Iterator[BaseMessage]) -> Iterator[BaseMessage]:
        seen: list[BaseMessage] = []
        gate = _ThinkGate()
        for message in messages:
            seen.append(message)
            yield from gate.feed(message)
        self._check(seen)

    async def _apass(self, messages: AsyncIterator[BaseMessage]) -> AsyncIterator[BaseMessage]:
        seen: list[BaseMessage] = []
        gate = _ThinkGate()
        async for message in messages:
            seen.append(message)
            for passed in gate.feed(message):
                yield passed
        self._check(seen)

    def _check(self, seen: Sequence[BaseMessage]) -> None:
        whole = _sum(seen)
        if whole is None:
            raise StructuredOutputError("the model gave no answer at all; ask again, or check the server's log")
        if self._tool_name is not None:
            if not any(call["name"] == self._tool_name for call in whole.tool_calls):
                raise StructuredOutputError(
                    f"the model made no valid call of {self._tool_name!r} (finish_reason {_reason(whole)!r}, "
                    f"{len(whole.invalid_tool_calls)} invalid calls); {_remedy(whole)}"
                )
            return
        if whole.tool_calls and self._tools_allowed and not whole.text.strip():
            return
        if not whole.text.strip():
            raise StructuredOutputError(f"the answer is empty (finish_reason {_reason(whole)!r}); {_remedy(whole)}")
        if not _is_json(whole.text):
            raise StructuredOutputError(
                f"the answer is no complete JSON (finish_reason {_reason(whole)!r}); {_remedy(whole)}"
            )


class _ThinkGate:
    """Holds text back while it may belong to a thinking block at the start."""

    def __init__(self) -> None:
        self._held = ""
        self._open = False

    def feed(self, message: BaseMessage) -> Iterator[BaseMessage]:
        text = message.text
        if self._open or not text:
            yield message
            return
        self._held += text
        start = self._held.lstrip()
        if _OPEN_THINK.match(self._held) or (len(start) < len("<think>") and "<think>".startswith(start)):
            return
        self._open = True
        yield message.model_copy(update={"content": _THINK.sub("", self._held, count=1)})


def strip_wrapping(text: str) -> str:
    """Return `text` without a thinking block in front and without a code fence around it."""
    text = _THINK.sub("", text, count=1)
    fenced = _FENCE.match(text)
    return fenced.group(1) if fenced else text


def _is_json(text: str) -> bool:
    try:
        decoded(strip_wrapping(text), strict=False)
    except ValueError:
        fenced = re.search(r"```(?:json)?\s*(.*?)```", text, re.DOTALL)
        if fenced is None:
            return False
        try:
            decoded(fenced.group(1), strict=False)
        except ValueError:
            return False
    return True


def _sum(seen: Sequence[BaseMessage]) -> AIMessage | None:
    if not seen:
        return None
    first, *rest = seen
    if isinstance(first, AIMessageChunk):
        return first + [message for message in rest if isinstance(message, AIMessageChunk)] if rest else first
    return first if isinstance(first, AIMessage) else None


def _reason(message: BaseMessage) -> str | None:
    reason = message.response_metadata.get("finish_reason")
    return reason if isinstance(reason, str) else None


def _remedy(message: BaseMessage) -> str:
    if _reason(message) == "length":
        return "raise max_tokens, since the output limit cut it short"
    if message.additional_kwargs.get("reasoning_content"):
        return "the model only reasoned; raise max_tokens or switch its thinking off"
    return "ask again, or use method='json_schema', which the server enforces"
