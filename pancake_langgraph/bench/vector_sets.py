"""Sets of vectors for benches of retrieval: real text, and as many more as wanted that lie around it.

Both are made once and kept in the cache folder; a file is taken again when the digest of its bytes is the recorded one.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench.corpus import Corpus, Progress
from pancake_langgraph.weights._folder import file_sha256, folder_lock

#: What embeds texts: vectors of length one, float32, in the order of the texts.  See `name_of`.
Embed = Callable[[Sequence[str]], NDArray[np.float32]]
Vectors = NDArray[np.float32]

QUERY_WORDS: Final = 26
#: Of the chunks, those that are held out: one is what a query is taken of, the one behind it is inserted.
HELD_OUT_SHARE: Final = 0.12
#: Queries that follow each other in a document.
_WALK: Final = 4
#: Texts, or mixes, between two looks at the clock, and between two files.
_PART_TEXTS, _PART_MIXES = 256, 65_536
#: A block of products is 128 MB.
_BLOCK_QUERIES, _BLOCK_ROWS = 512, 65_536
_PROGRESS_S: Final = 2.0
#: Length of the noise on a mix of two vectors of length one.
_NOISE: Final = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class VectorSet:
    """`base` is what is searched, row by row; `queries[i]` and `inserts[i]` belong together.

    `key` names `base` and nothing else, for what is made of it and kept.

    `texts`, `query_texts` and `insert_texts` are what the vectors were made of;
    `texts` has only those rows that come from text.  `documents[i]` numbers the document of query `i`; queries of one
    document are neighbors, in its order.
    """

    name: str
    key: str
    base: Vectors
    queries: Vectors
    inserts: Vectors
    texts: Sequence[str]
    query_texts: Sequence[str]
    insert_texts: Sequence[str]
    documents: NDArray[np.int64]
    source: str

    @property
    def dim(self) -> int:
        """Length of every vector."""
        return int(self.base.shape[1])


def real_set(corpus: Corpus, embed: Embed, on_progress: Progress, *, folder: Path) -> VectorSet:
    """Return a corpus as vectors; `folder` keeps what was embedded."""
    name = name_of(embed)
    base_rows, query_rows = _roles(corpus)
    query_texts = [first_words(corpus.texts[row], QUERY_WORDS) for row in query_rows]
    every = [*corpus.texts, *query_texts]
    digest = hashlib.sha256("\n".join([corpus.digest, *query_texts]).encode()).hexdigest()[:16]
    vectors = embedded(every, embed, on_progress, folder=folder, digest=digest)
    texts = len(corpus.texts)
    return VectorSet(
        name="real",
        key=f"real-{name}-{digest}",
        base=np.ascontiguousarray(vectors[base_rows]),
        queries=np.ascontiguousarray(vectors[texts:]),
        inserts=np.ascontiguousarray(vectors[query_rows + 1]),
        texts=[corpus.texts[row] for row in base_rows],
        query_texts=query_texts,
        insert_texts=[corpus.texts[row + 1] for row in query_rows],
        documents=np.array(corpus.documents, dtype=np.int64)[query_rows],
        source=f"{len(base_rows):,} chunks of {corpus.source}, embedded by {name}",
    )


def name_of(embed: Embed) -> str:
    """Return what tells an embedder's vectors from those of another one: its `name`, or that of the function."""
    name = getattr(embed, "name", None) or f"{embed.__module__}.{getattr(embed, '__qualname__', type(embed).__name__)}"
    return re.sub(r"[^\w.-]+", "-", str(name))


def embedded(
    texts: Sequence[str], embed: Embed, on_progress: Progress, *, folder: Path, digest: str | None = None
) -> Vectors:
    """Return texts as vectors, embedded now or before; `folder` is that of `real_set`.

    `digest` tells these texts from others; by default it is taken from them.
    """
    digest = digest or hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    return _kept(
        folder / f"{name_of(embed)}-{digest}",
        len(texts),
        lambda start, stop: embed(texts[start:stop]),
        on_progress,
        what="embedding",
        part=_PART_TEXTS,
    )


def first_words(text: str, count: int) -> str:
    """Return a text's first words."""
    return " ".join(text.split()[:count])


def _roles(corpus: Corpus) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows that are searched, and those that queries are taken of; the row behind each is inserted."""
    documents = np.array(corpus.documents)
    pairs = np.flatnonzero(documents[:-1] == documents[1:])
    chosen: list[int] = []
    wanted = max(1, round(len(documents) * HELD_OUT_SHARE))
    # Runs of neighboring pairs, so that an agent can walk through a document.
    for start in np.random.default_rng(1).permutation(pairs[:: 2 * _WALK]):
        chosen.extend(
            row
            for row in range(start, start + 2 * _WALK, 2)
            if row + 1 < len(documents) and documents[row] == documents[row + 1] == documents[start]
        )
        if len(chosen) >= wanted:
            break
    query_rows = np.unique(np.array(chosen, dtype=np.int64))
    held = np.zeros(len(documents), dtype=bool)
    held[query_rows] = held[query_rows + 1] = True
    return np.flatnonzero(~held), query_rows


def clustered_set(real: VectorSet, rows: int, on_progress: Progress, *, folder: Path, seed: int = 2) -> VectorSet:
    """Return a set of `rows` vectors: the real ones, then mixes of two near ones with noise; queries are the real ones.

    The noise has length 0.25 before a mix is brought to length one.
    """
    base = real.base
    if rows > len(base):
        path = folder / f"clustered-{real.key}-{seed}-{_NOISE}"
        more = rows - len(base)
        base = _kept(
            path,
            more,
            lambda a, b: _mixes(real.base, a, b, seed),
            on_progress,
            what="mixing",
            part=_PART_MIXES,
            head=base,
        )
    return VectorSet(
        name="clustered",
        key=f"clustered-{rows}-{real.key}",
        base=base[:rows],
        queries=real.queries,
        inserts=real.inserts,
        texts=real.texts,
        query_texts=real.query_texts,
        insert_texts=real.insert_texts,
        documents=real.documents,
        source=f"{real.source}, and {max(0, rows - len(real.base)):,} mixes of neighbors with noise",
    )


def _mixes(base: Vectors, start: int, stop: int, seed: int) -> Vectors:
    # Rows of one document stand together, so that a near row is mostly one of the same document.
    rng = np.random.default_rng((seed, start))
    first = rng.integers(0, len(base), stop - start)
    second = np.clip(first + rng.integers(1, 9, stop - start), 0, len(base) - 1)
    share = rng.uniform(0.2, 0.8, (stop - start, 1)).astype(np.float32)
    mixed = share * base[first] + (1 - share) * base[second]
    noise = rng.standard_normal(mixed.shape, dtype=np.float32)
    mixed += noise * np.float32(_NOISE / np.sqrt(base.shape[1]))
    return mixed / np.linalg.norm(mixed, axis=1, keepdims=True)  # type: ignore[no-any-return] # numpy says Any


def nearest(base: Vectors, queries: Vectors, k: int, on_progress: Progress | None = None) -> NDArray[np.int64]:
    """Return the rows with the largest inner products, best first, computed without an index; equal ones by row."""
    ticker = _Ticker(on_progress, "exact neighbors of queries", len(queries))
    found: list[NDArray[np.int64]] = [np.empty((0, min(k, len(base))), dtype=np.int64)]
    for start in range(0, len(queries), _BLOCK_QUERIES):
        found.append(_nearest(base, queries[start : start + _BLOCK_QUERIES], min(k, len(base))))
        ticker.at(start + len(found[-1]))
    return np.concatenate(found)


def _nearest(base: Vectors, queries: Vectors, k: int) -> NDArray[np.int64]:
    best: NDArray[np.int64] = np.empty((len(queries), 0), dtype=np.int64)
    scores: Vectors = np.empty((len(queries), 0), dtype=np.float32)
    for start in range(0, len(base), _BLOCK_ROWS):
        block = queries @ base[start : start + _BLOCK_ROWS].T
        rows = np.broadcast_to(np.arange(start, start + block.shape[1]), block.shape)
        if block.shape[1] > k:
            kept = np.argpartition(-block, k - 1, axis=1)[:, :k]
            block, rows = np.take_along_axis(block, kept, 1), np.take_along_axis(rows, kept, 1)
        scores, best = np.concatenate([scores, block], 1), np.concatenate([best, rows], 1)
        order = np.lexsort((best, -scores), axis=1)[:, :k]
        scores, best = np.take_along_axis(scores, order, 1), np.take_along_axis(best, order, 1)
    return best


def _kept(
    path: Path,
    rows: int,
    make: Callable[[int, int], Vectors],
    on_progress: Progress,
    *,
    what: str,
    part: int,
    head: Vectors | None = None,
) -> Vectors:
    """Return `head` and `rows` vectors behind it, part by part from files below `path`.

    Parts that are missing or damaged are made.
    """
    path.mkdir(parents=True, exist_ok=True)
    before = 0 if head is None else len(head)
    ticker = _Ticker(on_progress, what, rows)
    every: Vectors | None = None
    with folder_lock(path.with_name(f".{path.name}.lock")):
        for start in range(0, rows, part):
            stop = min(start + part, rows)
            made = _part(path / f"{start}-{stop}.npy", partial(make, start, stop))
            if every is None:
                every = np.empty((before + rows, made.shape[1]), dtype=np.float32)
            every[before + start : before + stop] = made
            ticker.at(stop)
    if every is None:
        raise ConfigError(f"{what}: got {rows} vectors to make, allowed is 1 or more; ask for more with --chunks")
    if head is not None:
        every[:before] = head
    return every


def _part(file: Path, make: Callable[[], Vectors]) -> Vectors:
    record = file.with_suffix(".json")
    try:
        if json.loads(record.read_text())["sha256"] == file_sha256(file):
            return np.load(file, allow_pickle=False)  # type: ignore[no-any-return] # numpy says Any
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not made yet, or damaged
    made = np.ascontiguousarray(make(), dtype=np.float32)
    with file.open("wb") as stream:
        np.save(stream, made)
    record.write_text(json.dumps({"sha256": file_sha256(file), "shape": list(made.shape)}))
    return made


class _Ticker:
    """Says how far something is, every two seconds."""

    def __init__(self, on_progress: Progress | None, what: str, total: int) -> None:
        self._say, self._what, self._total = on_progress, what, total
        self._last_s = time.monotonic()

    def at(self, done: int) -> None:
        if self._say is not None and time.monotonic() - self._last_s >= _PROGRESS_S:
            self._last_s = time.monotonic()
            self._say(f"{self._what}: {done:,} of {self._total:,}")


def by_turns(vectors: VectorSet, agents: int, turns: int, *, seed: int) -> list[int]:
    """Return the queries of agents that ask by turns: the one at place `p` is asked by agent `p % agents`."""
    return [query for turn in zip(*walks(vectors, agents, turns, seed=seed), strict=True) for query in turn]


def walks(vectors: VectorSet, agents: int, steps: int, *, seed: int) -> list[Any]:
    """Return for each agent the queries that it asks one after the other, `steps` each.

    An agent walks through the held-out places of a document, then goes on to one of the ten nearest documents, or, one
    time in five, to any.
    """
    rng = np.random.default_rng(seed)
    numbers, first = np.unique(vectors.documents, return_inverse=True)
    centers = np.zeros((len(numbers), vectors.dim), dtype=np.float32)
    np.add.at(centers, first, vectors.queries)
    centers /= np.linalg.norm(centers, axis=1, keepdims=True) + 1e-9
    members = [np.flatnonzero(first == place) for place in range(len(numbers))]
    found: list[Any] = []
    for _ in range(agents):
        place = int(rng.integers(len(numbers)))
        walk: list[int] = []
        while len(walk) < steps:
            walk.extend(int(query) for query in members[place])
            near = np.argsort(-(centers @ centers[place]))[1:11]
            place = int(rng.choice(near)) if len(near) and rng.random() < 0.8 else int(rng.integers(len(numbers)))
        found.append(walk[:steps])
    return found
