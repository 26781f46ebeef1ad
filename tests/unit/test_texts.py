"""Text folders: what is read of them, and how it is cut."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench import corpus as corpus_module
from pancake_langgraph.bench.corpus import load_corpus
from pancake_langgraph.retrieval.texts import Document, chunks, read_documents, text_files

PAGE = (
    "<html><head><title>no</title><style>b{}</style></head><body><script>x()</script>"
    "<p>Fish &amp; chips</p><p>today</p></body></html>"
)


def texts_of(folder: Path) -> dict[str, str]:
    return {document.name: document.text for document in read_documents(folder)}


def test_text_markup_and_manual_pages_are_read_as_people_read_them(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("one\n\n  two")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.html").write_text(PAGE)
    (tmp_path / "ls.1.gz").write_bytes(gzip.compress(b".TH LS 1\n.SH NAME\nls \\- list \\fBall\\fR files\n"))
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress("grün".encode()))
    assert texts_of(tmp_path) == {
        "a.md": "one two",
        "b/c.html": "Fish & chips today",
        "d.txt.gz": "grün",
        "ls.1.gz": "ls list all files",
    }


def test_hidden_files_links_and_other_kinds_are_left_out(tmp_path: Path) -> None:
    inside = tmp_path / "in"
    (inside / ".git").mkdir(parents=True)
    (inside / ".git" / "a.txt").write_text("secret")
    (inside / "b.png").write_bytes(b"\x89PNG")
    (tmp_path / "outside.txt").write_text("secret")
    (inside / "link.txt").symlink_to(tmp_path / "outside.txt")
    (inside / "empty.txt").write_text(" \n")
    (inside / "c.txt").write_text("seen")
    assert texts_of(inside) == {"c.txt": "seen"}


def test_a_damaged_file_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text " * 1000)[:-12])
    (tmp_path / "b.txt").write_text("whole")
    assert texts_of(tmp_path) == {"b.txt": "whole"}
    assert [record.getMessage() for record in caplog.records] == ["left out a.txt.gz: EOFError"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere, allowed is a folder with text files \(\.adoc"):
        text_files(tmp_path / "nowhere")


def test_chunks_hold_every_word_once_and_in_order() -> None:
    words = [f"w{number}" for number in range(25)]
    found = list(chunks(Document("a", " ".join(words)), words=10))
    assert [len(chunk.text.split()) for chunk in found] == [10, 10, 5]
    assert [chunk.number for chunk in found] == [0, 1, 2]
    assert " ".join(chunk.text for chunk in found).split() == words
    with pytest.raises(ConfigError, match="words of a chunk: got 0"):
        list(chunks(Document("a", "b"), words=0))


def a_corpus_folder(folder: Path, *, documents: int, words: int = 500) -> Path:
    for number in range(documents):
        text = " ".join(f"d{number}w{word}" for word in range(words))
        (folder / f"{number:02d}.txt").write_text(text)
    (folder / "again.txt").write_text((folder / "00.txt").read_text())
    return folder


def test_a_corpus_has_different_chunks_in_the_order_of_documents(tmp_path: Path) -> None:
    folder = a_corpus_folder(tmp_path, documents=5)
    found = load_corpus(25, lambda _: None, folder=folder)
    assert len(set(found.texts)) == len(found.texts) == 25
    assert list(found.documents) == sorted(found.documents)
    assert found == load_corpus(25, lambda _: None, folder=folder)
    assert found.digest != load_corpus(24, lambda _: None, folder=folder).digest


def test_too_little_text_says_how_much_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"got 30 different chunks.*asked for were 31; ask for less with --chunks"):
        load_corpus(31, lambda _: None, folder=a_corpus_folder(tmp_path, documents=5))


def test_without_packages_what_is_installed_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    folder = a_corpus_folder(tmp_path, documents=2)
    monkeypatch.setattr(corpus_module.shutil, "which", lambda _: None)
    monkeypatch.setattr(corpus_module, "_installed_documents", lambda: corpus_module._mixed(folder))
    found = load_corpus(3, said.append, cache_dir=tmp_path / "cache")
    assert found.source == "documentation on this machine"
    assert "apt-get cannot fetch packages here" in said[0]
