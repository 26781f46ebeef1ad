"""Texts that a model writes are told by their first words, each time there are twice as many."""

import json
from typing import Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pancake_langgraph.wire.drafts import MAX_CHARS, AnswerDrafts, JsonDrafts, TextDrafts, draft_in

WORDS = [f"w{number}" for number in range(1, 21)]


class Drafts(Protocol):
    def feed(self, piece: str) -> str | None: ...


def told(drafts: Drafts, *pieces: str) -> list[str]:
    return [text for piece in pieces if (text := drafts.feed(piece)) is not None]


def first(*counts: int) -> list[str]:
    return [" ".join(WORDS[:count]) for count in counts]


def test_a_plain_text_is_told_at_two_four_eight_and_sixteen_words() -> None:
    assert told(TextDrafts(), *(f" {word}" for word in WORDS)) == first(2, 4, 8, 16)
    assert told(TextDrafts(), *(f"{word}\n" for word in WORDS)) == ["\n".join(WORDS[:n]) for n in (2, 4, 8, 16)]


def test_a_word_that_may_go_on_is_not_told() -> None:
    drafts = TextDrafts()
    assert told(drafts, "how", " do") == []
    assert told(drafts, "es") == []
    assert told(drafts, " it w") == ["how does it"]


def test_an_argument_is_told_by_its_first_words_and_as_a_whole_when_it_ends() -> None:
    pieces = ['{"limit": 3, "query": "', *(f"{word} " for word in WORDS[:9]), "w10", '"']
    assert told(JsonDrafts(), *pieces) == first(2, 4, 8, 10)
    assert told(JsonDrafts(), '{"q":"a"}') == ["a"]


def test_of_several_arguments_the_longest_one_counts() -> None:
    assert told(JsonDrafts(), '{"query": "', "w1 w2 w3 ", 'w4"', ', "kind": "news', '"}') == first(3, 4)
    assert told(JsonDrafts(), '{"kind": "news"', ', "query": "w1 ', "w2 ", 'w3"}') == ["news", *first(2, 3)]


def test_a_list_of_queries_is_read_and_names_are_not() -> None:
    text = '{"the first of the names": ["w1 w2", {"another very long name": "w1 w2 w3"}], "a": "no"}'
    assert told(JsonDrafts(), *text)[-1] == "w1 w2 w3"
    assert set(told(JsonDrafts(), *text)) <= {*first(2, 3)}


@pytest.mark.parametrize(
    ("answer", "last"),
    [
        ("  the key\n", "the key"),
        ("", None),
        (" \n", None),
        ('```json\n{"query": "where is it"}\n```', "where is it"),
        ('{"n": 1}', None),
        ("`code` and more text", None),
        ("[]", None),
        ("x" * 3000, "x" * MAX_CHARS),
    ],
)
def test_a_whole_answer_has_one_last_draft(answer: str, last: str | None) -> None:
    assert draft_in(answer) == last


def test_an_answer_is_read_as_what_it_begins_like() -> None:
    assert told(AnswerDrafts(), " ", *(f"{word} " for word in WORDS[:4])) == first(2, 4)
    assert told(AnswerDrafts(), "\n{", '"query": "', *(f"{word} " for word in WORDS[:4]), '"}') == first(2, 4)
    assert told(AnswerDrafts(), '```json\n{"queries": ["w1 w2', '"]}') == first(2)


def test_escaped_characters_are_read() -> None:
    text = json.dumps({"q": 'the "key" \\ \n 🙂 é'})
    assert told(JsonDrafts(), *text)[-1] == 'the "key" \\ \n 🙂 é'
    assert told(JsonDrafts(), '{"q": "a b c \\ud83d', '\\ude42 d"}') == ["a b c", "a b c 🙂 d"]


def test_a_script_without_spaces_is_told_too() -> None:
    text = "図書館はどこですか" * 6
    assert told(TextDrafts(), *text) == [text[:24], text[:48]]


def test_an_endless_text_is_told_a_few_times_and_not_kept() -> None:
    texts = told(TextDrafts(), *["word "] * 50_000)
    assert len(texts) <= 10
    assert max(map(len, texts)) <= MAX_CHARS
    drafts = JsonDrafts()
    arguments = told(drafts, '{"q": "', *["word "] * 50_000, '"}')
    assert len(arguments) <= 11
    assert max(map(len, arguments)) <= MAX_CHARS


def size(text: str) -> int:
    words = text.split()
    return max(len(words), sum(map(len, words)) // 12)


#: In ASCII others are written in two halves, which are counted as two.
TEXTS = st.text(st.characters(exclude_categories=("Cs",), max_codepoint=0xFFFF), max_size=30)


@given(st.dictionaries(st.text(max_size=8), TEXTS, min_size=1, max_size=5), st.data(), st.booleans())
def test_the_last_draft_is_the_longest_value_however_the_stream_is_split(
    value: dict[str, str], data: st.DataObject, is_ascii: bool
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    drafts = told(JsonDrafts(), *pieces)
    values = [found.strip() for found in value.values() if found.strip()]
    assert bool(drafts) == bool(values)
    assert all(any(found.startswith(draft) for found in values) for draft in drafts)
    if drafts:
        assert drafts[-1] in values
        assert size(drafts[-1]) == max(map(size, values))


@given(st.lists(st.text(alphabet='{}[]",:\\ udae1\n`', max_size=12), max_size=12))
def test_no_text_makes_it_raise(pieces: list[str]) -> None:
    for drafts in (JsonDrafts(), AnswerDrafts(), TextDrafts()):
        assert all(text.strip() for text in told(drafts, *pieces))
    draft_in("".join(pieces))
