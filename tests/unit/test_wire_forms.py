"""Event streams, token counts, request bodies, calls written as text."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pancake_langgraph._errors import MalformedStream
from pancake_langgraph._types import Usage
from pancake_langgraph.wire.bodies import deep_merge, flatten, prompt_texts, stable_tools
from pancake_langgraph.wire.call_text import looks_like_tool_call
from pancake_langgraph.wire.sse import EventDecoder
from pancake_langgraph.wire.usage import read_usage, usage_metadata

# -- events ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.text(), min_size=1, max_size=6), st.integers(1, 7), st.sampled_from(["\n", "\r\n"]))
def test_events_survive_any_split_of_the_bytes(texts: list[str], size: int, newline: str) -> None:
    """Also inside multi-byte characters, and with Unicode line separators inside a JSON string."""
    sent = [json.dumps({"t": text + "é\u2028\x85🙂"}, ensure_ascii=False) for text in texts]
    raw = "".join(f"data: {line}{newline}{newline}" for line in sent).encode("utf-8", "surrogatepass")
    decoder = EventDecoder()
    got = [event for start in range(0, len(raw), size) for event in decoder.feed(raw[start : start + size])]
    assert got + decoder.finish() == sent


def test_comments_and_other_fields_are_skipped() -> None:
    assert EventDecoder().feed(b": ping\n\nevent: x\nid: 3\ndata:1\ndata: 2\n\n") == ["1\n2"]


def test_an_event_that_is_not_closed_is_given_at_the_end() -> None:
    decoder = EventDecoder()
    assert decoder.feed(b"data: [DONE]") == []
    assert decoder.finish() == ["[DONE]"]


def test_bytes_that_are_no_text_raise() -> None:
    with pytest.raises(MalformedStream, match="UTF-8"):
        EventDecoder().feed(b"data: \xff\xfe\n\n")


# -- usage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("details", "cached"),
    [
        ({"prompt_tokens_details": None}, None),
        ({}, None),
        ({"prompt_tokens_details": {"cached_tokens": None}}, None),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, 0),
        ({"prompt_tokens_details": {"cached_tokens": 512}}, 512),
    ],
)
def test_unknown_cached_tokens_are_never_zero(details: dict[str, Any], cached: int | None) -> None:
    usage = {"prompt_tokens": 600, "completion_tokens": 5, **details}
    assert read_usage(usage) == Usage(600, 5, cached)
    metadata = usage_metadata(usage)
    assert metadata is not None
    assert metadata.get("input_token_details") == (None if cached is None else {"cache_read": cached})


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None}, "text"])
def test_absent_usage_is_unknown(usage: Any) -> None:
    assert read_usage(usage) is None
    assert usage_metadata(usage) is None


# -- bodies ---------------------------------------------------------------------------------------------------------


def test_extras_are_merged_not_replaced() -> None:
    base = {"vllm_xargs": {"a": 1}, "cache_salt": "s"}
    assert deep_merge(base, {"vllm_xargs": {"b": 2}}) == {"vllm_xargs": {"a": 1, "b": 2}, "cache_salt": "s"}
    assert base == {"vllm_xargs": {"a": 1}, "cache_salt": "s"}


def test_the_flat_body_holds_no_sdk_keys() -> None:
    payload = {"model": "m", "extra_body": {"priority": 3}, "extra_headers": {"a": "b"}, "timeout": 3, "stop": None}
    assert flatten(payload) == {"model": "m", "priority": 3}


def test_prompt_texts_finds_every_text() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "b"}}]},
    ]
    assert prompt_texts({"messages": messages, "prompt": "c"}) == ("a", "b", "c")


ORDER = """
import itertools, json
from pancake_langgraph.wire.bodies import stable_tools
def tool(name, keys):
    return {"type": "function", "function": {"name": name, "parameters": {"properties": {k: {} for k in keys}}}}
tools = [tool("b", list({"x", "y", "z"})), tool("a", ["q"]), tool("c", [])]
orders = {json.dumps(stable_tools(order)) for order in itertools.permutations(tools)}
print(len(orders), *orders)
"""


def test_tools_are_the_same_bytes_in_any_order_and_under_any_hash_seed() -> None:
    root = str(Path(__file__).parents[2])
    printed = set()
    for seed in ("0", "1"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root}
        printed.add(subprocess.run([sys.executable, "-c", ORDER], env=env, capture_output=True, check=True).stdout)
    assert len(printed) == 1
    assert printed.pop().startswith(b"1 ")


def test_lists_in_schemas_keep_their_order() -> None:
    tool = {"function": {"name": "t", "parameters": {"required": ["b", "a"], "enum": [2, 1]}}}
    assert stable_tools([tool])[0]["function"]["parameters"] == {"enum": [2, 1], "required": ["b", "a"]}


# -- calls written as text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "add"}\n</tool_call>',
        "[TOOL_CALLS][]",
        "<function=add>",
        'Sure:\n```json\n{"name": "add", "arguments": {"a": 1}}\n```',
        '{"name": "add", "parameters": {}}',
    ],
)
def test_call_shaped_text_is_recognized(text: str) -> None:
    assert looks_like_tool_call(text, ["add"])


@pytest.mark.parametrize(
    "text", ["", "I could call add.", '{"name": "Paris", "arguments": 3}', '{"name": "add"}', "a function of two"]
)
def test_ordinary_text_is_not(text: str) -> None:
    assert not looks_like_tool_call(text, ["add"])
