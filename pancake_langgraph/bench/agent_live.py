"""The part of bench `agent-memory` with a model: agents at once, which embed what they ask and note.

Each step embeds a question, searches, calls a model with what was found, embeds a note and inserts it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

import httpx
from langchain_core.embeddings import Embeddings

from pancake_langgraph.bench.agent_memory import AGENTS, Notes
from pancake_langgraph.bench.corpus import Progress
from pancake_langgraph.bench.memory_arms import FETCH_K
from pancake_langgraph.bench.other_stores import langchain_faiss
from pancake_langgraph.bench.retrieval import Samples
from pancake_langgraph.bench.search_arms import K, OpenEngine, fill_engine, missing_package, recall
from pancake_langgraph.bench.vector_sets import VectorSet, nearest
from pancake_langgraph.retrieval.base import Item, ItemId, Query, View
from pancake_langgraph.retrieval.embedding import BatchedEmbeddings

#: Found texts that are shown to the model, and words of each; characters of any text, for in some texts a word is long.
_SHOWN, _SHOWN_WORDS = 3, 30
_SHOWN_CHARS: Final = 400


class LiveArm(StrEnum):
    """Names of the arms, in the order they are printed."""

    LANGCHAIN_FAISS = "langchain-faiss-live"
    PANCAKE = "pancake-live"


LIVE_ARM_TEXT: Final[Mapping[LiveArm, str]] = {
    LiveArm.LANGCHAIN_FAISS: f"FAISS of langchain-community behind a lock, fetch_k {FETCH_K}, each text embedded alone",
    LiveArm.PANCAKE: "DiskVectorEngine, and BatchedEmbeddings over the same embedder",
}
_NEEDED: Final = {
    LiveArm.LANGCHAIN_FAISS: (("faiss", "faiss-cpu"), ("langchain_community.vectorstores", "langchain-community")),
    LiveArm.PANCAKE: (("faiss", "faiss-cpu"),),
}
#: Calls a model with a prompt and waits for its answer; from all agents at once.
CallModel = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LivePlan:
    """`repeats` runs of `run_s` seconds of each arm."""

    repeats: int = 5
    run_s: float = 30.0


class LiveMemory(Protocol):
    """A memory that takes text; its calls block and come from all agents at once."""

    def search(self, agent: int, text: str) -> Sequence[int]:
        """Return the nearest rows of what is shared and of what the agent inserted."""
        ...

    def insert(self, agent: int, row: int, text: str) -> None:
        """Insert a note."""
        ...

    def close(self) -> None:
        """Release files."""
        ...


def missing_for(arm: LiveArm) -> str | None:
    """Return the distribution that an arm needs and that is not there; `None` when it can run."""
    return missing_package(_NEEDED[arm])


def run_live(
    plan: LivePlan,
    vectors: VectorSet,
    arms: Sequence[LiveArm],
    on_progress: Progress,
    *,
    embedder: Embeddings,
    call_model: CallModel,
    open_engine: OpenEngine,
    folder: Path,
) -> Samples:
    """Run the arms by turns; return figures by arm, metric and repeat.

    `search_s` is from the text of a question to what was found, `searches_per_s` counts all agents over wall time.
    """
    found = nearest(vectors.base, vectors.queries, K, on_progress)
    shared = dict(enumerate(found))
    samples: Samples = {arm: {} for arm in arms}
    with ExitStack() as stack:
        crews: dict[LiveArm, _Crew] = {}
        for arm in arms:
            on_progress(f"{vectors.name}: building {arm} over {len(vectors.base):,} vectors")
            memory: LiveMemory
            if arm is LiveArm.LANGCHAIN_FAISS:
                memory = _Langchain(vectors, embedder)
            else:
                memory = _Pancake(vectors, embedder, open_engine, folder / arm, on_progress)
            stack.callback(memory.close)
            crews[arm] = _Crew(memory, vectors, Notes(vectors, shared), call_model)
        for repeat in range(plan.repeats):
            shift = repeat % len(arms)
            for arm in [*arms[shift:], *arms[:shift]]:
                on_progress(f"agent-memory: repeat {repeat + 1} of {plan.repeats}, {arm}, {plan.run_s:g} s")
                for metric, values in crews[arm].work(plan.run_s).items():
                    samples[arm].setdefault(metric, []).append(values)
    return samples


class _Crew:
    """The agents of one arm; each goes through places of its own, and goes on where it was in the repeat before."""

    def __init__(self, memory: LiveMemory, vectors: VectorSet, notes: Notes, call_model: CallModel) -> None:
        self._memory, self._set, self._notes, self._call_model = memory, vectors, notes, call_model
        self._steps = [0] * AGENTS

    def work(self, run_s: float) -> dict[str, list[float]]:
        """Let all agents work for a time; a step that has begun is finished and counts."""
        started_s = time.perf_counter()
        with ThreadPoolExecutor(AGENTS, thread_name_prefix="agent") as pool:
            done = list(pool.map(lambda agent: self._agent(agent, started_s + run_s), range(AGENTS)))
        wall_s = time.perf_counter() - started_s
        searches = [search for agent in done for search in agent]
        return {
            "search_s": [search_s for search_s, _ in searches],
            "recall": [share for _, share in searches],
            "searches_per_s": [len(searches) / wall_s],
        }

    def _agent(self, agent: int, until_s: float) -> list[tuple[float, float]]:
        done: list[tuple[float, float]] = []
        every = len(self._set.queries)
        own_places = max(1, every // AGENTS)
        while time.perf_counter() < until_s or not done:
            place = (agent * own_places + self._steps[agent] % own_places) % every
            row = len(self._set.base) + place
            started_s = time.perf_counter()
            found = self._memory.search(agent, self._set.query_texts[place])
            search_s = time.perf_counter() - started_s
            done.append((search_s, recall(found, self._notes.nearest(agent, place))))
            self._call_model(self._prompt(place, found))
            self._memory.insert(agent, row, self._set.insert_texts[place])
            if row not in self._notes.own[agent]:
                self._notes.own[agent].append(row)
            self._steps[agent] += 1
        return done

    def _prompt(self, place: int, found: Sequence[int]) -> str:
        shown = [self._set.texts[row] for row in found if row < len(self._set.texts)][:_SHOWN]
        parts = [" ".join(text.split()[:_SHOWN_WORDS])[:_SHOWN_CHARS] for text in shown]
        return "\n".join([*parts, f"Where is more about: {self._set.query_texts[place][:_SHOWN_CHARS]}?"])


class _Pancake:
    """Our engine with our batches; nobody waits for another's search."""

    def __init__(
        self, vectors: VectorSet, embedder: Embeddings, open_engine: OpenEngine, path: Path, on_progress: Progress
    ) -> None:
        self._engine, self._embedder = open_engine(path, vectors.dim), BatchedEmbeddings(embedder)
        fill_engine(self._engine, vectors, on_progress)

    def search(self, agent: int, text: str) -> Sequence[int]:
        view = View((("shared",), ("agent", str(agent))))
        [hits] = self._engine.search([Query(self._embedder.query_vector(text), view, K)])
        return [int(hit.item.id.key) for hit in hits]

    def insert(self, agent: int, row: int, text: str) -> None:
        [vector] = self._embedder.document_vectors([text])
        self._engine.put([Item(ItemId(("agent", str(agent)), str(row)), {"row": row}, (vector,))])

    def close(self) -> None:
        self._embedder.close()
        self._engine.close()


class _Langchain:
    """langchain's store: embedding goes on beside it, but two threads in it at once corrupt it."""

    def __init__(self, vectors: VectorSet, embedder: Embeddings) -> None:
        self._store, self._embedder = langchain_faiss(vectors.base, vectors.dim), embedder
        self._lock = threading.Lock()

    def search(self, agent: int, text: str) -> Sequence[int]:
        vector = self._embedder.embed_query(text)
        with self._lock:
            found = self._store.similarity_search_with_score_by_vector(
                vector,
                k=K,
                filter=lambda metadata: metadata["agent"] in ("shared", str(agent)),
                fetch_k=FETCH_K,
            )
        return [document.metadata["row"] for document, _ in found]

    def insert(self, agent: int, row: int, text: str) -> None:
        [vector] = self._embedder.embed_documents([text])
        with self._lock:
            self._store.add_embeddings([(text, vector)], [{"row": row, "agent": str(agent)}])

    def close(self) -> None:
        del self._store


def model_at(base_url: str, model: str, *, max_tokens: int) -> CallModel:
    """Return what calls an OpenAI-compatible server, with answers of exactly `max_tokens` where it can."""
    client = httpx.Client(base_url=base_url, timeout=300.0, trust_env=False)

    def call(prompt: str) -> None:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        client.post("chat/completions", json=body).raise_for_status()

    return call
