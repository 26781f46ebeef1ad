"""`pancake index`: folders and langchain's stores become indexes; what is damaged is named."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from langchain_core.embeddings import Embeddings

from pancake_langgraph.cli import _embedders
from pancake_langgraph.cli import index as index_module
from pancake_langgraph.cli.main import pancake
from pancake_langgraph.retrieval.base import Item, ItemId, View
from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine
from pancake_langgraph.retrieval.documents import metadata_of, text_of
from pancake_langgraph.retrieval.fingerprint import fingerprint
from pancake_langgraph.retrieval.inspection import describe
from tests.plain_vectors import DIM, HashedEmbeddings

SAVED = Path(__file__).parents[1] / "data" / "langchain_faiss"


class LengthEmbeddings(Embeddings):
    """What made the vectors of the saved store."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[float(len(text)), 1.0] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def items_of(path: Path) -> dict[ItemId, Item]:
    """Return what an index holds, with vectors."""
    with closing(DiskVectorEngine(path, read_only=True)) as engine:
        found = engine.get([item.id for item in engine.items(View())])
    return {item.id: item for item in found if item is not None}


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Embeddings], None]:
    def _use(embedder: Embeddings) -> None:
        monkeypatch.setattr(index_module, "chosen_embedder", lambda *_: embedder)

    _use(HashedEmbeddings())
    return _use


def run(*args: object) -> Result:
    return CliRunner().invoke(pancake, ["index", *map(str, args)])


def a_folder(tmp_path: Path, **files: str) -> Path:
    folder = tmp_path / "text"
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


# -- build ----------------------------------------------------------------------------------------------------------


def test_a_folder_becomes_items_with_text_source_and_vector(tmp_path: Path, use: Callable[[Embeddings], None]) -> None:
    folder = a_folder(tmp_path, a="one two three four five", b="six")
    done = run("build", tmp_path / "i", folder, "--chunk-words", 2, "--embedder", "minilm")
    assert (done.exit_code, done.output) == (
        0,
        f"4 pieces of 2 documents put into {tmp_path / 'i'}, 0 old ones removed\n",
    )
    found = {name.key: item for name, item in items_of(tmp_path / "i").items()}
    assert [(key, text_of(item)) for key, item in sorted(found.items())] == [
        ("a.txt#0", "one two"),
        ("a.txt#1", "three four"),
        ("a.txt#2", "five"),
        ("b.txt#0", "six"),
    ]
    item = found["a.txt#1"]
    assert item.id.namespace == ("documents",)
    assert metadata_of(item) == {"source": "a.txt", "chunk": 1}
    np.testing.assert_allclose(item.vectors[0], HashedEmbeddings().embed_query("three four"), rtol=1e-6)
    assert item.created_at_s == item.updated_at_s > 1e9
    assert describe(tmp_path / "i").fingerprint == str(fingerprint(HashedEmbeddings()))


def test_building_again_replaces_documents_and_keeps_others(tmp_path: Path, use: Callable[[Embeddings], None]) -> None:
    folder = a_folder(tmp_path, a="one two three four", b="six")
    options = ("--chunk-words", 2, "--embedder", "minilm", "--namespace", "team/docs")
    run("build", tmp_path / "i", folder, *options)
    (folder / "b.txt").unlink()
    a_folder(tmp_path, a="seven")
    done = run("build", tmp_path / "i", folder, *options)
    assert "1 pieces of 1 documents" in done.output
    assert "2 old ones removed (1 files are gone)" in done.output
    kept = {name: text_of(item) for name, item in items_of(tmp_path / "i").items()}
    assert kept == {ItemId(("team", "docs"), "a.txt#0"): "seven"}
    done = run("build", tmp_path / "i", folder, *options)
    assert "0 old ones removed\n" in done.output


def test_what_came_from_another_folder_or_namespace_stays(
    tmp_path: Path, use: Callable[[Embeddings], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name)
        (tmp_path / name / f"{name}-more.txt").write_text(f"{name} more")
        run("build", tmp_path / "i", tmp_path / name, "--embedder", "minilm")
        run("build", tmp_path / "i", tmp_path / name, "--embedder", "minilm", "--namespace", "other")
    (tmp_path / "one" / "one.txt").unlink()
    (tmp_path / "two" / "two.txt").unlink()
    monkeypatch.chdir(tmp_path)
    done = run("build", tmp_path / "i", "one", "--embedder", "minilm")
    assert "1 old ones removed (1 files are gone)" in done.output
    found = items_of(tmp_path / "i")
    assert {text_of(item) for name, item in found.items() if name.namespace == ("documents",)} == {
        *("one more", "two", "two more")
    }
    assert len(found) == 3 + 4


def test_what_is_no_text_is_left_out_with_a_line(tmp_path: Path, use: Callable[[Embeddings], None]) -> None:
    folder = a_folder(tmp_path, a="one")
    (folder / "bad.txt").write_bytes(b"\xff\xfe\x00")
    (folder / "zero.txt").write_bytes(b"ab\x00cd")
    (folder / "noise.txt").write_bytes(bytes(range(128, 256)))
    (folder / "wide.txt").write_bytes("breit ü".encode("utf-16"))
    (folder / "old.txt").write_bytes("ein großer Baum".encode("latin-1"))
    done = run("build", tmp_path / "i", folder, "--embedder", "minilm")
    lines = [line for line in done.output.splitlines() if line.startswith("left out")]
    assert lines == [f"left out {name}.txt: it is no text in UTF-8 or UTF-16" for name in ("bad", "noise", "zero")]
    assert sorted(text_of(item) for item in items_of(tmp_path / "i").values()) == [
        *("breit ü", "ein gro\ufffder Baum", "one")
    ]


def test_many_texts_go_in_batches(tmp_path: Path, use: Callable[[Embeddings], None]) -> None:
    sizes: list[int] = []

    class Counts(HashedEmbeddings):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            sizes.append(len(texts))
            return super().embed_documents(texts)

    use(Counts())
    run("build", tmp_path / "i", a_folder(tmp_path, a="w " * 300), "--chunk-words", 1, "--embedder", "minilm")
    assert sizes[-3:] == [128, 128, 44]
    assert len(items_of(tmp_path / "i")) == 300


def test_another_embedder_is_refused_before_anything_is_stored(
    tmp_path: Path, use: Callable[[Embeddings], None]
) -> None:
    folder = a_folder(tmp_path, a="one")
    run("build", tmp_path / "i", folder, "--embedder", "minilm")
    use(LengthEmbeddings())
    done = run("build", tmp_path / "i", folder, "--embedder", "minilm")
    assert done.exit_code == 1
    assert "this embedder is another one than the index was made with" in done.output
    assert {text_of(item) for item in items_of(tmp_path / "i").values()} == {"one"}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--embedder", "minilm", "--namespace", "a//b"), "--namespace: got 'a//b'"),
        ((), "give one of --embedder minilm and --embedder-url"),
        (("--embedder-url", "http://127.0.0.1:1/v1"), "--embedder-url and --model go together"),
        (("--embedder", "minilm", "--model", "x"), "--embedder-url and --model go together"),
        (("--embedder", "other"), "Invalid value for '--embedder'"),
    ],
)
def test_wrong_options_are_said_in_one_line(tmp_path: Path, args: tuple[str, ...], said: str) -> None:
    if "--namespace" in args:
        (tmp_path / "x").mkdir()
    done = run("build", tmp_path / "i", a_folder(tmp_path, a="one"), *args)
    assert done.exit_code != 0
    assert said in done.output
    assert not (tmp_path / "i").exists() or not items_of(tmp_path / "i")


def test_a_folder_without_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = run("build", tmp_path / "i", tmp_path / "empty", "--embedder", "minilm")
    assert (done.exit_code, "there is no text file in" in done.output) == (1, True)
    done = run("build", tmp_path / "i", tmp_path / "nowhere", "--embedder", "minilm")
    assert (done.exit_code, "nowhere, allowed is a folder with text files" in done.output) == (1, True)


def test_a_server_is_asked_for_text_with_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k1")
    found: Any = _embedders.chosen_embedder(None, "http://127.0.0.1:1/v1", "m")
    assert (found.openai_api_base, found.model, found.check_embedding_ctx_length) == (
        "http://127.0.0.1:1/v1",
        "m",
        False,
    )
    assert found.openai_api_key.get_secret_value() == "k1"


# -- import ---------------------------------------------------------------------------------------------------------


def test_a_langchain_folder_is_imported_with_its_vectors(tmp_path: Path, use: Callable[[Embeddings], None]) -> None:
    use(LengthEmbeddings())
    done = run("import", tmp_path / "i", "--from-langchain", SAVED, "--embedder", "minilm")
    assert done.exit_code == 0, done.output
    assert f"3 documents imported into {tmp_path / 'i'}" in done.output
    assert "brought to length one" in done.output  # the saved ones are longer and were compared by distance
    kept = items_of(tmp_path / "i")
    assert {name.key: (text_of(item), metadata_of(item)) for name, item in kept.items()} == {
        "x": ("one", {"a": 1}),
        "y": ("three", {"b": [1, 2]}),
        "z": ("fourteen", {}),
    }
    vector = kept[ItemId(("documents",), "y")].vectors[0]
    np.testing.assert_allclose(vector, np.array([5, 1]) / np.sqrt(26), rtol=1e-6)


def test_the_embedder_has_to_be_the_one_that_made_the_vectors(
    tmp_path: Path, use: Callable[[Embeddings], None]
) -> None:
    done = run("import", tmp_path / "i", "--from-langchain", SAVED, "--embedder", "minilm")
    assert "the embedder makes vectors of 16 numbers, those to import have 2" in done.output

    class Turned(LengthEmbeddings):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [[1.0, float(len(text))] for text in texts]

    use(Turned())
    done = run("import", tmp_path / "i", "--from-langchain", SAVED, "--embedder", "minilm")
    assert (done.exit_code, "says something else of the first text" in done.output) == (1, True)
    assert not (tmp_path / "i").exists()


def test_a_folder_whose_pickle_would_run_something_is_refused(
    tmp_path: Path, use: Callable[[Embeddings], None]
) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "harm"),))

    folder = tmp_path / "saved"
    shutil.copytree(SAVED, folder)
    (folder / "index.pkl").write_bytes(pickle.dumps(Attack()))
    done = run("import", tmp_path / "i", "--from-langchain", folder, "--embedder", "minilm")
    assert (done.exit_code, "it names posix.mkdir" in done.output) == (1, True)
    assert not (tmp_path / "harm").exists()
    assert not (tmp_path / "i").exists()


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, use: Callable[[Embeddings], None]) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(SAVED, folder)
    data = bytearray((folder / "index.faiss").read_bytes()[:-8])
    data[8] = 2  # vectors
    data[37] = 4  # numbers
    (folder / "index.faiss").write_bytes(data)
    done = run("import", tmp_path / "i", "--from-langchain", folder, "--embedder", "minilm")
    assert (done.exit_code, "got 2 vectors and 3 documents" in done.output) == (1, True)


# -- trouble --------------------------------------------------------------------------------------------------------


def test_two_files_of_one_name_are_refused_before_one_replaces_the_other(
    tmp_path: Path, use: Callable[[Embeddings], None]
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name)
    done = run("build", tmp_path / "i", tmp_path / "a", tmp_path / "b", "--embedder", "minilm")
    assert done.exit_code == 1
    assert f"{tmp_path}/a/x.txt and {tmp_path}/b/x.txt have one name" in done.output
    assert not (tmp_path / "i").exists()
    above = run("build", tmp_path / "i", tmp_path, "--embedder", "minilm")
    assert above.exit_code == 0, above.output
    assert len(items_of(tmp_path / "i")) == 2


def test_a_file_that_was_emptied_leaves_nothing_behind_and_one_that_cannot_be_read_is_kept(
    tmp_path: Path, use: Callable[[Embeddings], None]
) -> None:
    folder = a_folder(tmp_path, a="one two", b="three")
    (folder / "c.txt.gz").write_bytes(gzip.compress(b"four"))
    assert run("build", tmp_path / "i", folder, "--embedder", "minilm").exit_code == 0
    (folder / "a.txt").write_text("")
    (folder / "c.txt.gz").write_bytes(b"no archive")
    done = run("build", tmp_path / "i", folder, "--embedder", "minilm")
    assert "1 old ones removed" in done.output
    assert sorted(text_of(item) for item in items_of(tmp_path / "i").values()) == ["four", "three"]


class FailingEmbeddings(HashedEmbeddings):
    """Fails, or forgets a text, when it is asked for one that says so."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        if "fail" in texts:
            raise ConnectionError("nobody answers")
        return super().embed_documents([text for text in texts if text != "forget"])


@pytest.mark.parametrize(("text", "said"), [("fail", "ConnectionError: nobody answers"), ("forget", "0 vectors for 1")])
def test_an_embedder_that_fails_ends_the_command_with_one_line(
    tmp_path: Path, use: Callable[[Embeddings], None], text: str, said: str
) -> None:
    use(FailingEmbeddings())
    done = run("build", tmp_path / "i", a_folder(tmp_path, a=text), "--embedder", "minilm")
    assert done.exit_code == 1
    assert said in done.output
    assert "Traceback" not in done.output
    assert len(done.output.splitlines()) == 1


# -- info, verify, compact ------------------------------------------------------------------------------------------


def test_info_says_what_there_is(tmp_path: Path, use: Callable[[Embeddings], None]) -> None:
    run("build", tmp_path / "i", a_folder(tmp_path, a="one", b="two"), "--embedder", "minilm")
    facts = json.loads(run("info", tmp_path / "i", "--json").output)
    assert (facts["dim"], facts["num_items"], facts["num_waiting"]) == (DIM, 2, 2)
    run("build", tmp_path / "i", tmp_path / "text", "--embedder", "minilm")
    facts = json.loads(run("info", tmp_path / "i", "--json").output)
    assert (facts["num_items"], facts["num_waiting"]) == (2, 2)
    run("compact", tmp_path / "i")
    coarse = json.loads(run("info", tmp_path / "i", "--json").output)["coarse_search"]
    [line, segment, device] = run("info", tmp_path / "i").output.splitlines()
    assert device == f"coarse search on {coarse['device']} ({coarse['reason']})"
    assert f"dim {DIM}, " in line
    assert segment.startswith("segment name ")
    assert "num_items 2, num_dead 0, num_vectors 2" in segment


def test_verify_names_what_is_damaged_and_fails(tmp_path: Path, use: Callable[[Embeddings], None]) -> None:
    run("build", tmp_path / "i", a_folder(tmp_path, a="one", b="two"), "--embedder", "minilm")
    run("compact", tmp_path / "i")
    assert run("verify", tmp_path / "i").output == f"{tmp_path / 'i'} is whole\n"
    [*_, file] = sorted((tmp_path / "i" / "seg").rglob("*.*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = run("verify", tmp_path / "i")
    assert done.exit_code == 1
    assert f"{file}: its checksum does not fit" in done.output
    assert f"1 files of {tmp_path / 'i'} are damaged" in done.output
    assert f"run `pancake index repair {tmp_path / 'i'}`" in done.output


def test_repair_keeps_what_can_be_read_and_names_the_rest(tmp_path: Path, use: Callable[[Embeddings], None]) -> None:
    run("build", tmp_path / "i", a_folder(tmp_path, a="one", b="two"), "--chunk-words", 1, "--embedder", "minilm")
    assert run("repair", tmp_path / "i").output == f"{tmp_path / 'i'} is whole; it was left as it is\n"
    run("compact", tmp_path / "i")
    [file] = (tmp_path / "i" / "seg").rglob("docs.bin")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = run("repair", tmp_path / "i")
    assert done.exit_code == 0, done.output
    assert f"lost: {file}: the document at byte" in done.output
    assert f"has 1 items; what was damaged is kept in {tmp_path / 'i' / 'lost' / '001'}" in done.output
    assert run("verify", tmp_path / "i").output == f"{tmp_path / 'i'} is whole\n"
    assert len(items_of(tmp_path / "i")) == 1


def test_verify_says_that_a_crash_left_a_torn_record(tmp_path: Path, use: Callable[[Embeddings], None]) -> None:
    run("build", tmp_path / "i", a_folder(tmp_path, a="one", b="two"), "--embedder", "minilm")
    [log] = (tmp_path / "i" / "wal").iterdir()
    with log.open("ab") as file:
        file.write(b"torn")
    done = run("verify", tmp_path / "i")
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, f"{tmp_path / 'i'} is whole")
    assert f"{log}: its last 4 bytes are no whole record, as a crash leaves them" in done.output


def test_compact_gives_back_what_deleted_items_took(tmp_path: Path, use: Callable[[Embeddings], None]) -> None:
    folder = a_folder(tmp_path, a="w " * 500)
    run("build", tmp_path / "i", folder, "--chunk-words", 1, "--embedder", "minilm")
    run("compact", tmp_path / "i")
    a_folder(tmp_path, a="w")
    run("build", tmp_path / "i", folder, "--chunk-words", 1, "--embedder", "minilm")
    before = describe(tmp_path / "i").num_bytes
    done = run("compact", tmp_path / "i")
    assert (done.exit_code, "bytes now" in done.output) == (0, True)
    assert describe(tmp_path / "i").num_bytes < before / 2
    assert len(items_of(tmp_path / "i")) == 1


@pytest.mark.parametrize("command", ["info", "verify", "compact", "repair"])
def test_where_there_is_no_index_one_line_says_so(tmp_path: Path, command: str) -> None:
    done = run(command, tmp_path / "nowhere")
    assert done.exit_code == 1
    assert done.output.startswith("Error: ")
    assert "nowhere" in done.output
    assert not (tmp_path / "nowhere").exists()
