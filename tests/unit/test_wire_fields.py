"""Fields of streamed JSON are told as soon as they are complete, however the stream is split."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pancake_langgraph.wire.fields import MAX_CHARS, MAX_FIELDS, FieldScanner


def scan(*pieces: str) -> list[tuple[str, str]]:
    scanner = FieldScanner()
    return [field for piece in pieces for field in scanner.feed(piece)]


def test_a_value_is_told_when_its_closing_quote_comes_and_not_before() -> None:
    scanner = FieldScanner()
    assert scanner.feed('{"next": "wri') == []
    assert scanner.feed('ter"') == [("next", "writer")]
    assert scanner.feed(', "why": "because"}') == [("why", "because")]
    assert scanner.is_done


VALUES = st.one_of(
    st.text(max_size=20), st.booleans(), st.integers(), st.floats(allow_nan=False), st.none(),
    st.lists(st.text(max_size=5), max_size=3), st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)  # fmt: skip


@given(st.dictionaries(st.text(min_size=1, max_size=10), VALUES, max_size=6), st.data(), st.booleans())
def test_all_short_texts_and_switches_of_the_top_level_are_told_in_order(
    value: dict[str, object], data: st.DataObject, is_ascii: bool
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=data.draw(st.sampled_from([None, 2])))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = [
        (name, found if isinstance(found, str) else json.dumps(found))
        for name, found in value.items()
        if isinstance(found, bool) or (isinstance(found, str) and found)
    ]
    assert scan(*pieces) == expected


@pytest.mark.parametrize(
    "text",
    [
        "The next agent is writer.",
        "[1, 2]",
        '"next"',
        "",
        "{",
        '{"next',
        '{"next"}',
        '{"a" "b"}',
        "{next: 1}",
        '{"a": }',
    ],
)
def test_what_is_no_object_tells_nothing(text: str) -> None:
    assert scan(text) == []


def test_prose_is_given_up_at_once() -> None:
    scanner = FieldScanner()
    scanner.feed("Well, ")
    assert scanner.is_done


def test_a_fenced_object_is_read() -> None:
    assert scan('```json\n{"next": "writer"}\n```') == [("next", "writer")]


def test_nested_values_and_braces_in_texts_are_skipped() -> None:
    text = '{"plan": {"next": "no", "s": "}]\\""}, "list": ["}", {"next": "no"}], "next": "yes"}'
    assert scan(text) == [("next", "yes")]
    assert scan(*text) == [("next", "yes")]


def test_long_values_and_names_are_not_kept_and_do_not_end_the_scan() -> None:
    long = "x" * (MAX_CHARS + 1)
    scanner = FieldScanner()
    for _ in range(1000):
        scanner.feed('{"text": "' if not scanner._in_text else "lorem ipsum " * 10)
    assert len(scanner._text) < 20 * MAX_CHARS
    assert scanner.feed('", "next": "a"}') == [("next", "a")]
    assert scan(json.dumps({"a": long, long: "b", "c": "x" * MAX_CHARS})) == [("c", "x" * MAX_CHARS)]


def test_only_a_few_fields_are_told() -> None:
    assert len(scan(json.dumps({f"f{n}": "v" for n in range(50)}))) == MAX_FIELDS


@given(st.lists(st.text(alphabet='{}[]",:\\ aetrue1\n', max_size=12), max_size=12))
def test_no_text_makes_it_raise(pieces: list[str]) -> None:
    for name, value in scan(*pieces):
        assert len(name) <= MAX_CHARS
        assert len(value) <= MAX_CHARS
