"""Answers what LangChain's standard suite asks for, in the shapes that vLLM was recorded with.

The text comes piece by piece as in the recording; tool calls come as an id and name first and arguments character by
character; structured output is text that fits the schema.  The recorded events are templates: only what the suite
looks at is filled in.
"""

import copy
import itertools
import json
from collections.abc import Mapping
from typing import Any

from pancake_langgraph.testing.wire_replies import Recording, Reply, Step

#: Values for the suite's own schemas, by property name; anything else gets the first value its type allows.
KNOWN = {
    "input": 3,
    "a": 1,
    "b": 2,
    "setup": "Why did the cat sit on the computer?",
    "punchline": "To keep an eye on the mouse.",
    "location": "San Francisco, CA",
    "customer_name": "你好啊集团",
    "name": "chloe",
}
SIMPLE = {"string": "text", "integer": 1, "number": 1.5, "boolean": True, "null": None, "array": [], "object": {}}


class StandardBrain:
    def __init__(self, recording: Recording) -> None:
        self.text = events(recording.reply("chat"))
        self.tool = events(recording.reply("tool_required"))
        self.numbers = itertools.count()

    def __call__(self, path: str, body: Mapping[str, Any]) -> Reply:
        messages = body["messages"]
        names = [tool["function"]["name"] for tool in body.get("tools") or ()]
        choice = body.get("tool_choice")
        if isinstance(choice, dict):
            names = [choice["function"]["name"]]
        answered = messages[-1]["role"] == "tool"
        if names and choice != "none" and (choice not in (None, "auto") or not answered):
            schema = next(t["function"] for t in body["tools"] if t["function"]["name"] == names[0])
            return self.call(body, names[0], example(schema.get("parameters") or {}, prompt_of(messages)))
        wanted = body.get("response_format") or {}
        if wanted.get("type") == "json_schema":
            schema = wanted["json_schema"]["schema"]
            return self.say(body, json.dumps(example(schema, prompt_of(messages)), ensure_ascii=False))
        if wanted.get("type") == "json_object":
            return self.say(body, json.dumps({key: KNOWN[key] for key in ("setup", "punchline")}))
        return self.say(body, "Hello! How can I help you today?")

    def say(self, body: Mapping[str, Any], text: str) -> Reply:
        stops = body.get("stop") or []
        for stop in [stops] if isinstance(stops, str) else stops:
            text = text.partition(stop)[0]
        first, piece, last, usage = self.text[0], self.text[1], self.text[-2], self.text[-1]
        pieces = [fill(piece, content=part) for part in split(text)]
        return self.stream(body, [first, *pieces, end(last, "stop"), usage])

    def call(self, body: Mapping[str, Any], name: str, arguments: Mapping[str, Any]) -> Reply:
        first, named, piece, last, usage = self.tool[0], self.tool[1], self.tool[2], self.tool[-2], self.tool[-1]
        named = copy.deepcopy(named)
        entry = named["choices"][0]["delta"]["tool_calls"][0]
        entry["id"] = f"chatcmpl-tool-{next(self.numbers):016x}"
        entry["function"]["name"] = name
        pieces = []
        for char in json.dumps(arguments, ensure_ascii=False) if arguments else "":
            part = copy.deepcopy(piece)
            part["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"] = char
            pieces.append(part)
        return self.stream(body, [first, named, *pieces, end(last, "tool_calls"), usage])

    def stream(self, body: Mapping[str, Any], steps: list[dict[str, Any]]) -> Reply:
        made: list[Step] = [{**step, "model": body["model"]} for step in steps]
        if not (body.get("stream_options") or {}).get("include_usage"):
            made.pop()
        return Reply.stream(*made)


def events(reply: Reply) -> list[dict[str, Any]]:
    """Return the recorded events without the end mark."""
    texts = [step.decode().removeprefix("data: ") for step in reply.steps if isinstance(step, bytes)]
    return [json.loads(text) for text in texts if text.strip() != "[DONE]"]


def fill(event: Mapping[str, Any], **delta: Any) -> dict[str, Any]:
    filled = copy.deepcopy(dict(event))
    filled["choices"][0]["delta"] = delta
    filled["choices"][0]["finish_reason"] = None
    return filled


def end(event: Mapping[str, Any], reason: str) -> dict[str, Any]:
    ended = fill(event)
    ended["choices"][0]["finish_reason"] = reason
    return ended


def split(text: str) -> list[str]:
    return [text[start : start + 5] for start in range(0, len(text), 5)]


def prompt_of(messages: list[dict[str, Any]]) -> str:
    return json.dumps(messages, ensure_ascii=False)


def example(schema: Mapping[str, Any], prompt: str) -> dict[str, Any]:
    """Return an object that fits a JSON schema."""
    return {name: value(name, part, prompt) for name, part in (schema.get("properties") or {}).items()}


def value(name: str, schema: Mapping[str, Any], prompt: str) -> Any:
    if name == "customer_name" and "こんにちは" in prompt:
        return "こんにちは株式会社"
    if schema.get("enum"):
        return schema["enum"][0]
    if schema.get("type") == "object" or "properties" in schema:
        return example(schema, prompt)
    if name in KNOWN:
        return KNOWN[name]
    options = schema.get("anyOf") or [schema]
    return SIMPLE[str(options[0].get("type", "string"))]
