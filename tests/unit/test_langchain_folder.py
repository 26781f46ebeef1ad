"""Folders that langchain's FAISS store saved are read, and nothing that their pickle says is run."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document

from pancake_langgraph._errors import ConfigError, CorruptIndex
from pancake_langgraph.retrieval.flat_file import read_flat
from pancake_langgraph.retrieval.langchain_folder import read_saved_documents

#: What langchain-community 0.4.2 wrote for the texts one, three and fourteen.
SAVED = Path(__file__).parents[1] / "data" / "langchain_faiss"


class Touches:
    """A pickled object that makes a file when it is unpickled the usual way."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> tuple[Any, ...]:
        return (self.call, self.args)


def pickled(folder: Path, value: object, protocol: int = 4) -> Path:
    path = folder / "index.pkl"
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return path


def test_documents_come_back_with_ids_texts_and_metadata() -> None:
    found = read_saved_documents(SAVED / "index.pkl")
    assert [(d.row, d.id, d.text, d.metadata) for d in found] == [
        (0, "x", "one", {"a": 1}),
        (1, "y", "three", {"b": [1, 2]}),
        (2, "z", "fourteen", {}),
    ]


def test_vectors_come_back() -> None:
    found = read_flat(SAVED / "index.faiss")
    assert found.metric == "distance"
    np.testing.assert_array_equal(found.vectors, [[3, 1], [5, 1], [8, 1]])


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    harm = tmp_path / "harm"
    attacks = [
        Touches(os.system, f"touch {harm}"),
        Touches(os.mkdir, str(harm)),
        Touches(eval, f"open({str(harm)!r}, 'w')"),
        ({"a": Touches(os.mkdir, str(harm))}, {}),
    ]
    for attack in attacks:
        with pytest.raises(CorruptIndex, match=r"index\.pkl is not what .*it names .*nothing of it was run"):
            read_saved_documents(pickled(tmp_path, attack, protocol))
        assert not harm.exists()
    pickle.loads(pickled(tmp_path, attacks[1], protocol).read_bytes())
    assert harm.exists()  # so the attack is one


def test_a_name_that_hides_below_a_known_module_is_refused(tmp_path: Path) -> None:
    # Protocol 4 lets dotted names reach attributes: `InMemoryDocstore.__init__.__globals__`.
    names = (b"langchain_community.docstore.in_memory", b"InMemoryDocstore.__init__")
    data = b"".join(b"\x8c" + bytes([len(name)]) + name for name in names)
    (tmp_path / "index.pkl").write_bytes(b"\x80\x04" + data + b"\x93.")
    with pytest.raises(CorruptIndex, match=r"it names .*InMemoryDocstore\.__init__"):
        read_saved_documents(tmp_path / "index.pkl")


def test_what_fits_no_store_is_refused(tmp_path: Path) -> None:
    for value in ((), [], {"a": 1}, (1, 2), ({}, {}), "text", set()):
        with pytest.raises(CorruptIndex, match="is not what langchain's FAISS store saves"):
            read_saved_documents(pickled(tmp_path, value))


def test_every_cut_of_a_real_file_is_refused(tmp_path: Path) -> None:
    data = (SAVED / "index.pkl").read_bytes()
    path = tmp_path / "index.pkl"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptIndex):
            read_saved_documents(path)


def test_every_flipped_byte_of_a_real_file_gives_documents_or_an_error_of_ours(tmp_path: Path) -> None:
    data = (SAVED / "index.pkl").read_bytes()
    path = tmp_path / "index.pkl"
    for place in range(len(data)):
        for flip in (0x01, 0x20, 0x80, 0xFF):
            path.write_bytes(data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :])
            try:
                found = read_saved_documents(path)
            except CorruptIndex:
                continue
            assert all(isinstance(document.text, str) for document in found)


def test_a_table_with_holes_is_refused(tmp_path: Path) -> None:
    # What the store writes after a failed add: 3 entries, of which the first names row 1.
    data = (SAVED / "index.pkl").read_bytes()
    assert data.count(b"K\x00h") == 1
    (tmp_path / "index.pkl").write_bytes(data.replace(b"K\x00h", b"K\x07h"))
    with pytest.raises(CorruptIndex, match="has holes or repeats itself"):
        read_saved_documents(tmp_path / "index.pkl")


def test_a_missing_file_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name a folder that `save_local` wrote"):
        read_saved_documents(tmp_path / "index.pkl")
    with pytest.raises(ConfigError, match="name a folder that `save_local` wrote"):
        read_flat(tmp_path / "index.faiss")


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "index.faiss").write_bytes(b"IwFl" + bytes(60))
    with pytest.raises(ConfigError, match=r"of the kind b'IwFl', allowed are flat ones"):
        read_flat(tmp_path / "index.faiss")


@pytest.mark.parametrize("length", [4, 20, 44, 45, 68, 70])
def test_a_vector_file_of_another_length_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "index.faiss"
    shutil.copy(SAVED / "index.faiss", path)
    with path.open("r+b") as stream:
        stream.truncate(length)
    with pytest.raises(CorruptIndex, match=r"ends within its header|cut short"):
        read_flat(path)


def test_vectors_without_numbers_are_refused(tmp_path: Path) -> None:
    data = (SAVED / "index.faiss").read_bytes()
    (tmp_path / "index.faiss").write_bytes(data[:-4] + struct.pack("<f", float("nan")))
    with pytest.raises(CorruptIndex, match="NaN or infinity"):
        read_flat(tmp_path / "index.faiss")


def test_metadata_that_name_themselves_over_and_over_are_refused_before_they_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class InMemoryDocstore:
        def __init__(self, documents: dict[str, Document]) -> None:
            self._dict = documents

    name = "langchain_community.docstore.in_memory"
    InMemoryDocstore.__module__, InMemoryDocstore.__qualname__ = name, "InMemoryDocstore"
    for part in ("langchain_community", "langchain_community.docstore", name):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    monkeypatch.setattr(sys.modules[name], "InMemoryDocstore", InMemoryDocstore, raising=False)
    grown: list[Any] = [1]
    for _ in range(12):
        grown = [grown] * 10
    for metadata, fits in (({"k": grown}, False), ({"k": ["a" * 1000] * 50}, True)):
        saved = (InMemoryDocstore({"x": Document("one", metadata=metadata)}), {0: "x"})
        path = pickled(tmp_path, saved)
        if fits:
            assert read_saved_documents(path)[0].metadata == metadata
        else:
            with pytest.raises(CorruptIndex, match="say so much"):
                read_saved_documents(path)
