"""Streamed tool calls: every shape that servers were seen to send, split anywhere."""

import contextlib
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessageChunk
from langchain_core.utils.json import parse_partial_json

from pancake_langgraph._errors import MalformedStream
from pancake_langgraph.wire.deltas import JoinedCall, SurrogateJoiner, ToolCallJoiner, ToolPiece

A = '{"volume": 30, "name": "añ你🙂"}'
B = '{"city": "Oslo", "days": [1, 2]}'


def entry(
    arguments: str | None = None, *, index: int | None = None, call_id: str | None = None, name: str | None = None
) -> dict[str, Any]:
    function = {k: v for k, v in (("name", name), ("arguments", arguments)) if v is not None}
    return {"function": function} | {k: v for k, v in (("index", index), ("id", call_id)) if v is not None}


def join(
    deltas: list[list[dict[str, Any]]], reason: str | None = "tool_calls"
) -> tuple[list[JoinedCall], list[ToolPiece]]:
    joiner = ToolCallJoiner(id_seed="seed")
    pieces = [piece for delta in deltas for piece in joiner.feed(delta)]
    last, calls = joiner.finish(reason)
    return calls, pieces + last


def merged(pieces: list[ToolPiece]) -> AIMessageChunk:
    """Merge as LangChain does."""
    chunks = [
        AIMessageChunk(
            content="",
            tool_call_chunks=[
                {"type": "tool_call_chunk", "index": p.index, "id": p.id, "name": p.name, "args": p.arguments}
            ],
        )
        for p in pieces
    ]
    return chunks[0] + chunks[1:] if len(chunks) > 1 else chunks[0]


def parts(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


cuts = st.lists(st.integers(0, 200), max_size=8)


@given(cuts, cuts, st.sampled_from(["repeated", "once"]), st.booleans(), st.booleans())
def test_two_interleaved_calls_come_out_byte_equal(
    cuts_a: list[int], cuts_b: list[int], ids: str, with_index: bool, name_again: bool
) -> None:
    if ids == "once" and not with_index:
        with_index = True  # nothing at all would tell the two apart
    streams = []
    for number, (text, where) in enumerate(((A, cuts_a), (B, cuts_b))):
        steps = []
        for nth, part in enumerate(parts(text, where)):
            steps.append(
                entry(
                    part,
                    index=number if with_index else None,
                    call_id=f"id{number}" if nth == 0 or ids == "repeated" else None,
                    name=f"tool{number}" if nth == 0 or name_again else None,
                )
            )
        streams.append(steps)
    longest = max(map(len, streams))
    deltas = [[stream[k]] for k in range(longest) for stream in streams if k < len(stream)]
    calls, pieces = join(deltas)
    assert [(call.id, call.name, call.arguments, call.problem) for call in calls] == [
        ("id0", "tool0", A, None),
        ("id1", "tool1", B, None),
    ]
    whole = merged(pieces)
    assert [(call["name"], call["args"], call["id"]) for call in whole.tool_calls] == [
        ("tool0", json.loads(A), "id0"),
        ("tool1", json.loads(B), "id1"),
    ]


def test_a_number_split_between_its_digits_stays_whole() -> None:
    calls, _ = join([[entry('{"volume": 3', index=0, call_id="a", name="set")], [entry("0}", index=0)]])
    assert json.loads(calls[0].arguments) == {"volume": 30}


def test_parallel_calls_that_all_use_index_0_stay_apart() -> None:
    calls, _ = join(
        [
            [entry("", index=0, call_id="a", name="one")],
            [entry('{"x": 1}', index=0)],
            [entry("", index=0, call_id="b", name="two")],
            [entry('{"y": 2}', index=0)],
        ]
    )
    assert [(call.id, call.arguments) for call in calls] == [("a", '{"x": 1}'), ("b", '{"y": 2}')]


def test_whole_calls_without_ids_and_indexes_in_one_delta_stay_apart() -> None:
    calls, _ = join([[entry('{"x": 1}', name="one"), entry('{"x": 2}', name="one"), entry(name="one")]])
    assert [(call.name, call.arguments) for call in calls] == [("one", '{"x": 1}'), ("one", '{"x": 2}'), ("one", "{}")]
    assert len({call.id for call in calls}) == 3


def test_whole_calls_without_ids_in_several_deltas_stay_apart() -> None:
    calls, _ = join([[entry('{"x": 1}', index=0, name="one")], [entry('{"x": 2}', index=0, name="one")]])
    assert [call.arguments for call in calls] == ['{"x": 1}', '{"x": 2}']


@pytest.mark.parametrize("arguments", [None, "", "  "])
def test_a_call_without_arguments_gets_an_empty_object(arguments: str | None) -> None:
    calls, pieces = join([[entry(arguments, index=0, call_id="a", name="ping")]])
    assert calls == [JoinedCall(0, "a", "ping", "{}")]
    assert merged(pieces).tool_calls[0]["args"] == {}


def test_an_id_that_changes_with_every_piece_does_not_split_the_call() -> None:
    calls, _ = join([[entry('{"a"', index=0, call_id="x1", name="t")], [entry(": 1}", index=0, call_id="x2")]])
    assert [(call.id, call.arguments) for call in calls] == [("x1", '{"a": 1}')]


def test_a_name_after_the_first_piece_is_taken() -> None:
    calls, _ = join([[entry(index=0, call_id="a")], [entry('{"a": 1}', index=0, name="late")]])
    assert calls == [JoinedCall(0, "a", "late", '{"a": 1}')]


def test_arguments_as_an_object_become_text() -> None:
    calls, _ = join([[{"index": 0, "id": "a", "function": {"name": "t", "arguments": {"a": "ü"}}}]])
    assert calls[0].arguments == '{"a": "ü"}'


def test_a_missing_id_is_made_from_the_seed() -> None:
    calls, pieces = join([[entry('{"a": 1}', index=0, name="t")]])
    assert calls[0].id == "seed-0"
    assert merged(pieces).tool_calls[0]["id"] == "seed-0"


@given(st.integers(0, len(A) - 1))
def test_a_call_cut_anywhere_is_invalid_and_never_executable(cut: int) -> None:
    calls, pieces = join([[entry(A[:cut], index=0, call_id="a", name="t")]], "length")
    assert "cut short" in str(calls[0].problem)
    assert calls[0].arguments == A[:cut]
    whole = merged(pieces)
    assert whole.tool_calls == []
    assert len(whole.invalid_tool_calls) == 1


@given(st.text(alphabet='{}[]",:\\ a1', max_size=30))
def test_nothing_broken_is_completed_by_a_lenient_parser(text: str) -> None:
    calls, pieces = join([[entry(text, index=0, call_id="a", name="t")]], "stop")
    spoiled = "".join(piece.arguments for piece in pieces)
    if calls[0].problem is None:
        assert isinstance(json.loads(calls[0].arguments), dict)
        return
    with contextlib.suppress(ValueError):
        assert not isinstance(parse_partial_json(spoiled), dict)
    assert merged(pieces).tool_calls == []


def test_only_the_last_call_is_cut_short() -> None:
    calls, _ = join(
        [[entry(index=0, call_id="a", name="ping")], [entry('{"x": 1', index=1, call_id="b", name="t")]], "length"
    )
    assert [call.problem is None for call in calls] == [True, False]


def test_arguments_that_are_no_object_make_an_invalid_call() -> None:
    calls, pieces = join([[entry('"nil"', index=0, call_id="a", name="t")]])
    assert "not a JSON object" in str(calls[0].problem)
    assert merged(pieces).tool_calls == []


def test_a_call_without_a_name_is_invalid() -> None:
    calls, pieces = join([[entry('{"a": 1}', index=0, call_id="a")]])
    assert "no tool name" in str(calls[0].problem)
    assert merged(pieces).tool_calls == []


@pytest.mark.parametrize(
    "deltas",
    [
        [[entry("{}", index=0, call_id="a", name="t")], [entry("{}", index=1, call_id="a", name="t")]],
        [[entry('{"a"', index=0, name="t")], [entry(": 1}", index=0, name="other")]],
        [[entry('{"a": 1}', index=0, name="t")], [entry("more", index=0)]],
        [
            [entry("{}", call_id="a", name="t")],
            [entry("{}", call_id="b", name="u")],
            [entry("{}", call_id="c")],
        ],
        [
            [entry('{"x": 1}', index=0, call_id="a", name="t")],
            [entry('{"y"', index=0, call_id="b", name="u")],
            [entry(": 1}", index=0, call_id="c")],
        ],
    ],
)
def test_what_cannot_be_joined_with_certainty_raises(deltas: list[list[dict[str, Any]]]) -> None:
    with pytest.raises(MalformedStream, match="without guessing"):
        join(deltas)


@pytest.mark.parametrize(
    "bad",
    ["text", {"function": "text"}, {"index": "0", "function": {}}, {"index": 0, "function": {"arguments": 3}}],
)
def test_an_entry_of_a_wrong_type_raises(bad: Any) -> None:
    with pytest.raises(MalformedStream):
        ToolCallJoiner().feed([bad])


@given(st.text(), cuts)
def test_text_escaped_in_halves_is_joined(text: str, where: list[int]) -> None:
    halves = text.encode("utf-16-le", "surrogatepass")
    units = [halves[k : k + 2].decode("utf-16-le", "surrogatepass") for k in range(0, len(halves), 2)]
    joiner = SurrogateJoiner()
    assert "".join(joiner.feed(part) for part in units) + joiner.finish() == text


def test_a_lonely_half_becomes_a_replacement_character() -> None:
    joiner = SurrogateJoiner()
    assert joiner.feed("a\ud83d") + joiner.finish() == "a�"


def test_the_table_of_calls_is_bounded() -> None:
    entries = [entry("{}", index=number, call_id=str(number), name="t") for number in range(257)]
    with pytest.raises(MalformedStream, match="more than 256"):
        ToolCallJoiner().feed(entries)
