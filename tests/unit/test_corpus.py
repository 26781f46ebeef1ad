from __future__ import annotations

import os
from pathlib import Path

import pytest

from examples.research_team import corpus as corpus_module
from examples.research_team.corpus import (
    Corpus,
    CorpusError,
    Document,
    load_corpus,
    project_docs,
    split_paragraphs,
)
from examples.research_team.prompts import EXCERPT_CHARS, Role, system_prompt
from examples.research_team.tools import MAX_LISTED_IDS, research_tools


def a_folder(tmp_path: Path, **files: str) -> Path:
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def test_files_of_all_kinds_are_read_in_name_order(tmp_path: Path):
    folder = a_folder(tmp_path, b_md="two\n\nthree", a_txt="one", sub__c_rst="four", d_py="x = 5", e_bin="no")
    corpus = load_corpus(folder)
    assert [(d.doc_id, d.name) for d in corpus.documents] == [
        ("d1", "a.txt"), ("d2", "b.md"), ("d3", "d.py"), ("d4", "sub/c.rst"),
    ]  # fmt: skip
    assert corpus.documents[1].paragraphs == ("two", "three")


def test_hidden_files_and_folders_are_left_out(tmp_path: Path):
    folder = a_folder(tmp_path, a_md="one")
    for hidden in (".x.md", ".git/y.md"):
        path = folder / hidden
        path.parent.mkdir(exist_ok=True)
        path.write_text("secret", encoding="utf-8")
    assert [d.name for d in load_corpus(folder).documents] == ["a.md"]


def test_a_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(CorpusError, match=r"not found: got .*nowhere"):
        load_corpus(tmp_path / "nowhere")


def test_a_file_is_no_folder(tmp_path: Path):
    with pytest.raises(CorpusError, match="not a folder"):
        load_corpus(a_folder(tmp_path, a_md="one") / "a.md")


def test_a_folder_without_text_files_says_which_are_allowed(tmp_path: Path):
    with pytest.raises(CorpusError, match=r"no text files.*\.md, \.py, \.rst, \.txt"):
        load_corpus(a_folder(tmp_path, a_png="x"))


def test_a_folder_of_empty_files_has_no_text(tmp_path: Path):
    with pytest.raises(CorpusError, match="no text"):
        load_corpus(a_folder(tmp_path, a_md=" \n\n "))


@pytest.mark.parametrize(("data", "said"), [(b"ab\xff", "not UTF-8 text: byte 2"), (b"a\x00b", "NUL")])
def test_a_binary_file_is_named(tmp_path: Path, data: bytes, said: str):
    (tmp_path / "bad.txt").write_bytes(data)
    with pytest.raises(CorpusError, match=f"bad.txt.*{said}"):
        load_corpus(tmp_path)


def test_a_byte_order_mark_is_no_text(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert load_corpus(tmp_path).documents[0].paragraphs == ("hello",)


def test_files_that_are_too_many_or_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = a_folder(tmp_path, a_md="one", b_md="two")
    monkeypatch.setattr(corpus_module, "MAX_FILES", 1)
    with pytest.raises(CorpusError, match=r"too many files.*got 2"):
        load_corpus(folder)
    monkeypatch.setattr(corpus_module, "MAX_FILES", 2)
    monkeypatch.setattr(corpus_module, "MAX_FILE_BYTES", 2)
    with pytest.raises(CorpusError, match="too large"):
        load_corpus(folder)


def test_a_dangling_link_is_left_out(tmp_path: Path):
    folder = a_folder(tmp_path, a_md="one")
    os.symlink(folder / "gone.md", folder / "link.md")
    assert len(load_corpus(folder).documents) == 1


def test_paragraphs_split_at_blank_lines_only():
    assert split_paragraphs("a\nb\r\n\r\nc\n \n\n d ") == ("a\nb", "c", "d")


LIBRARY = Corpus(
    [
        Document("d1", "cats", ("The cat sat on the mat.", "Cats sleep a lot; a cat is a cat.")),
        Document("d2", "dogs", ("The dog sat on the mat.", "An axolotl is neither cat nor dog, and the text is long.")),
    ]
)


def test_rare_words_find_their_paragraph():
    assert LIBRARY.search("the axolotl")[0].paragraph.startswith("An axolotl")


def test_more_occurrences_in_less_text_rank_higher():
    hits = LIBRARY.search("cat")
    assert [hit.doc_id for hit in hits] == ["d1", "d1", "d2"]
    assert hits[0].paragraph.startswith("Cats sleep")
    assert hits[0].score > hits[1].score > hits[2].score > 0


@pytest.mark.parametrize("query", ["", "...", "zebra"])
def test_a_query_without_a_match_finds_nothing(query: str):
    assert LIBRARY.search(query) == ()


def test_searching_ignores_case_and_punctuation_and_respects_the_limit():
    assert LIBRARY.search("CAT!") == LIBRARY.search("cat")
    assert len(LIBRARY.search("the cat", limit=1)) == 1


def test_an_excerpt_begins_at_its_part_wraps_around_and_never_repeats():
    text = LIBRARY.excerpt(part=1, parts=2, max_chars=10_000)
    assert text.startswith("The dog")
    assert text.endswith("a cat is a cat.")
    assert text.count("The cat sat") == 1


def test_an_excerpt_keeps_to_its_length():
    assert LIBRARY.excerpt(part=0, parts=1, max_chars=30) == "The cat sat on the mat."
    assert LIBRARY.excerpt(part=0, parts=1, max_chars=7) == "The cat"


def test_the_tools_search_and_read():
    search, read = research_tools(LIBRARY)
    assert search.invoke({"query": "axolotl"}).startswith("[d2] dogs: An axolotl")
    assert search.invoke({"query": "zebra"}) == "Nothing found. Documents: [d1] cats, [d2] dogs"
    assert read.invoke({"doc_id": "d1"}).startswith("[d1] cats\nThe cat sat")


def test_read_lists_the_ids_of_a_small_corpus_and_not_of_a_large_one():
    small = research_tools(LIBRARY)[1].args["doc_id"]
    assert small["enum"] == ["d1", "d2"]
    documents = [Document(f"d{n}", f"n{n}", ("text",)) for n in range(1, MAX_LISTED_IDS + 2)]
    read = research_tools(Corpus(documents))[1]
    assert "enum" not in read.args["doc_id"]
    assert read.invoke({"doc_id": "d999"}).startswith("There is no document d999")


def test_a_negative_delay_is_refused():
    with pytest.raises(ValueError, match="delay"):
        research_tools(LIBRARY, delay_s=-1.0)


def test_every_role_has_its_own_long_prompt_from_the_projects_docs():
    corpus = load_corpus(project_docs())
    prompts = {role: system_prompt(role, corpus) for role in Role}
    assert prompts == {role: system_prompt(role, load_corpus(project_docs())) for role in Role}
    assert len({prompt[:200] for prompt in prompts.values()}) == len(Role)
    for prompt in prompts.values():
        # 4.0 to 4.9 characters make a token of English here, so this is 1,200 to 2,000 tokens.
        assert 0.7 * EXCERPT_CHARS + 1_800 < len(prompt) < EXCERPT_CHARS + 3_200


def test_an_excerpt_passes_over_a_paragraph_that_would_take_most_of_it(tmp_path):
    (tmp_path / "a.md").write_text(f"First words.\n\n{'a long table ' * 50}\n\nLast words.\n", encoding="utf-8")
    assert load_corpus(tmp_path).excerpt(part=0, parts=1, max_chars=200) == "First words.\n\nLast words."
