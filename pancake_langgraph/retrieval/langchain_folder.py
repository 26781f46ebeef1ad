"""Reads what langchain's FAISS store saved, without running what its pickle says.

`index.pkl` is a pickle of `(docstore, index_to_docstore_id)`.  Unpickling calls whatever a file names; here a file may
name only what such a store consists of, each name gets a stand-in that does nothing but hold what it is given, and
anything else ends the import before it is called.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pancake_langgraph._errors import ConfigError, CorruptIndex
from pancake_langgraph.retrieval.checks import MAX_VALUE_DEPTH

#: Larger files are refused: all of it has to fit into memory at once.
MAX_PICKLE_BYTES: Final = 8_000_000_000

#: A pickle may say one thing a million times by naming it once; what metadata become may be so much larger than it.
_MAX_GROWTH: Final = 64
_FREE_GROWTH: Final = 1_000_000

#: What reading a damaged or foreign pickle ends in.
_DAMAGE: Final = (
    pickle.UnpicklingError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    EOFError,
    ArithmeticError,
    AssertionError,
    struct.error,
    RecursionError,
    MemoryError,
)


class _Held:
    """Stands for an object of a known class: holds its state, has no behavior."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict):
            raise pickle.UnpicklingError(f"the state of an object is a {type(state).__name__}, allowed is a dict")
        self.state = state


class _Docstore(_Held):
    """Stands for `InMemoryDocstore`."""


class _Document(_Held):
    """Stands for `Document`."""


#: What such a file may name.  Modules have moved over the years.
_KNOWN: Final[Mapping[tuple[str, str], type]] = {
    ("langchain_community.docstore.in_memory", "InMemoryDocstore"): _Docstore,
    ("langchain.docstore.in_memory", "InMemoryDocstore"): _Docstore,
    ("langchain_classic.docstore.in_memory", "InMemoryDocstore"): _Docstore,
    ("langchain_core.documents.base", "Document"): _Document,
    ("langchain.schema.document", "Document"): _Document,
    ("langchain.schema", "Document"): _Document,
    ("langchain.docstore.document", "Document"): _Document,
    # How sets are written: pydantic keeps the names of fields that were given in one.
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
}


class _Reader(pickle._Unpickler):
    """Knows the names of `_KNOWN` and no other.

    It is the reader in Python: the one in C reserves as much memory as a damaged file asks for.
    """

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return the stand-in for a name."""
        try:
            return _KNOWN[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it names {module_name}.{global_name}, which is neither part of such a store nor JSON"
            ) from None

    def get_extension(self, code: int) -> None:
        """Refuse names that a process has given numbers to."""
        raise pickle.UnpicklingError(f"it names extension {code}, which no store of langchain consists of")

    def persistent_load(self, pid: Any) -> Any:
        """Refuse what points outside of the file."""
        raise pickle.UnpicklingError(f"it refers to something outside of it ({type(pid).__name__})")


@dataclass(frozen=True, slots=True)
class SavedDocument:
    """One document of a saved store: the number of its vector, its id, its text and its metadata, which is JSON."""

    row: int
    id: str
    text: str
    metadata: Mapping[str, Any]


def read_saved_documents(path: Path) -> list[SavedDocument]:
    """Return the documents of an `index.pkl`, by the numbers of their vectors.

    Raises:
        ConfigError: if there is no such file, or it is too large.
        CorruptIndex: if it is no pickle, names anything that does not belong in it, or its parts do not fit together.
    """
    try:
        size = path.stat().st_size
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}; name a folder that `save_local` wrote") from exc
    if size > MAX_PICKLE_BYTES:
        raise ConfigError(f"{path.name}: got {size:,} bytes, allowed are {MAX_PICKLE_BYTES:,}")
    try:
        loaded = _Reader(io.BytesIO(path.read_bytes())).load()
        documents = list(_documents(loaded, _Room(_FREE_GROWTH + _MAX_GROWTH * size)))
    except _DAMAGE as exc:
        raise CorruptIndex(
            f"{path.name} is not what langchain's FAISS store saves ({exc}); nothing of it was run. "
            "Allowed is a folder that its `save_local` wrote"
        ) from exc
    return documents


class _Room:
    """How much metadata may still become as JSON."""

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self, value: object, depth: int = 0) -> None:
        """Count a value with all that is in it, as often as it is in it."""
        self._left -= 1 + (len(value) if isinstance(value, str) else 0)
        if self._left < 0 or depth > MAX_VALUE_DEPTH:
            raise ValueError("its metadata say so much, or are nested so deeply, that no store holds them")
        if isinstance(value, dict):
            for key, one in value.items():
                self.take(key, depth + 1)
                self.take(one, depth + 1)
        elif isinstance(value, list | tuple):
            for one in value:
                self.take(one, depth + 1)


def _documents(loaded: Any, room: _Room) -> Iterator[SavedDocument]:
    if not isinstance(loaded, tuple) or len(loaded) != 2:
        raise ValueError("it does not hold a docstore and a table of ids")
    docstore, ids = loaded
    if not isinstance(docstore, _Docstore) or not isinstance(ids, dict):
        raise ValueError("it does not hold a docstore and a table of ids")
    kept = docstore.state["_dict"]
    if sorted(ids) != list(range(len(ids))) or len(set(ids.values())) != len(ids):
        raise ValueError("its table of ids has holes or repeats itself, so vectors would get others' texts")
    for row in range(len(ids)):
        yield _document(row, ids[row], kept[ids[row]], room)


def _document(row: int, name: object, document: object, room: _Room) -> SavedDocument:
    if not isinstance(document, _Document) or not isinstance(name, str):
        raise ValueError(f"entry {row} is no document")
    # pydantic writes its fields below `__dict__`, the older version too.
    fields = document.state.get("__dict__", document.state)
    text, metadata = fields["page_content"], fields.get("metadata") or {}
    if not isinstance(text, str) or not isinstance(metadata, dict):
        raise ValueError(f"document {row} has no text, or no metadata")
    room.take(metadata)
    return SavedDocument(row, name, text, _as_json(metadata))


def _as_json(metadata: dict[Any, Any]) -> Mapping[str, Any]:
    """Return metadata as JSON allows it."""
    return json.loads(json.dumps(metadata, allow_nan=False))  # type: ignore[no-any-return] # a dict goes in
