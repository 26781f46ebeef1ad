"""What is put on devices is counted once, refused where a limit would be passed, and forgotten with its owner."""

from __future__ import annotations

import gc
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings
from pydantic import BaseModel, PrivateAttr

from pancake_langgraph import DeviceBudget, DeviceFull, PancakeStore, PancakeVectorStore
from pancake_langgraph._errors import ConfigError
from pancake_langgraph.plan.device_budget import Taken
from pancake_langgraph.retrieval.coarse import GPU, CoarseDevice, CoarseSearch, Floats, Near, nearest_on_cpu
from pancake_langgraph.retrieval.embedder_weights import weight_bytes
from pancake_langgraph.retrieval.embedding import BatchedEmbeddings
from tests.plain_vectors import DIM, HashedEmbeddings


class Owner:
    """Something that lies on a device."""


def test_a_limit_holds_and_the_error_says_what_is_where() -> None:
    budget = DeviceBudget({"cuda:0": 1_000})
    first, second = Owner(), Owner()
    budget.take(first, "weights of A", {"cuda:0": 700})
    with pytest.raises(
        DeviceFull, match=r"cuda:0: weights of B needs 400 bytes, allowed are 1,000 .* 300 are left .*weights of A 700"
    ):
        budget.take(second, "weights of B", {"cpu": 50, "cuda:0": 400})
    assert budget.taken() == (Taken("cuda:0", "weights of A", 700),)  # nothing of the second one
    assert budget.left_bytes("cuda:0") == 300
    assert budget.left_bytes("cpu") is None
    budget.take(second, "weights of B", {"cuda:0": 300})
    assert budget.left_bytes("cuda:0") == 0


def test_an_owner_counts_once_and_as_long_as_it_is_there() -> None:
    budget = DeviceBudget({"cpu": 100})
    owner, other = Owner(), Owner()
    for _ in range(3):
        budget.take(owner, "it", {"cpu": 60})
    budget.take(other, "the other", {"cpu": 40})
    assert budget.left_bytes("cpu") == 0
    del owner
    gc.collect()
    assert budget.taken() == (Taken("cpu", "the other", 40),)
    budget.give_back(other)
    budget.give_back(other)
    assert budget.left_bytes("cpu") == 100


def test_what_is_given_back_can_be_taken_by_the_same_owner_again() -> None:
    budget = DeviceBudget({"cpu": 100})
    owner = Owner()
    for _ in range(3):
        budget.take(owner, "it", {"cpu": 100})
        budget.give_back(owner)
    budget.take(owner, "it", {"cpu": 100})
    del owner
    gc.collect()
    assert budget.taken() == ()


def test_an_owner_that_cannot_be_watched_counts_until_it_gives_back() -> None:
    budget = DeviceBudget({})
    owner = (1, 2)
    budget.take(owner, "a tuple", {"cpu": 5})
    assert budget.taken() == (Taken("cpu", "a tuple", 5),)
    budget.give_back(owner)
    assert budget.taken() == ()


@pytest.mark.parametrize("limit", [-1, 1.5, True, "1", None])
def test_limits_are_whole_bytes(limit: Any) -> None:
    with pytest.raises(ConfigError, match=r"limit of cpu: got .*, allowed are bytes, integers from 0 on"):
        DeviceBudget({"cpu": limit})


def test_many_threads_never_pass_a_limit() -> None:
    budget = DeviceBudget({"cpu": 50})
    kept: list[Owner] = []
    refused: list[DeviceFull] = []

    def work() -> None:
        for _ in range(20):
            owner = Owner()
            try:
                budget.take(owner, "it", {"cpu": 1})
            except DeviceFull as exc:
                refused.append(exc)
            else:
                kept.append(owner)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(kept), len(refused)) == (50, 110)


# -- embedders ------------------------------------------------------------------------------------------------------


class Tensor:
    """What is asked of a torch tensor."""

    def __init__(self, count: int, device: str, place: int) -> None:
        self.count, self.device, self.place = count, device, place

    def numel(self) -> int:
        return self.count

    def element_size(self) -> int:
        return 2

    def data_ptr(self) -> int:
        return self.place


class Module:
    """What is asked of a torch module; the real one is in tests/integration/test_minilm_real.py."""

    def __init__(self, device: str = "cuda:0") -> None:
        self.weights = [Tensor(100, device, 1), Tensor(10, device, 2), Tensor(10, device, 2)]  # two are tied

    def parameters(self) -> list[Tensor]:
        return self.weights

    def buffers(self) -> list[Tensor]:
        return [Tensor(4, "cpu", 3)]

    named_parameters = named_buffers = parameters


class Holder(HashedEmbeddings):
    """An embedder with a model as an attribute."""

    def __init__(self, model: object) -> None:
        super().__init__()
        self.client = model


class Private(BaseModel, HashedEmbeddings):
    """As the embedder of langchain-huggingface keeps it."""

    _client: Any = PrivateAttr(default_factory=Module)


class Sayer(HashedEmbeddings):
    """Says it itself."""

    def weight_bytes(self) -> dict[str, int]:
        return {"cuda:0": 7}


def test_the_weights_of_embedders_are_found() -> None:
    assert weight_bytes(Holder(Module())) == {"cuda:0": 220, "cpu": 8}
    assert weight_bytes(Private()) == {"cuda:0": 220, "cpu": 8}
    assert weight_bytes(Sayer()) == {"cuda:0": 7}
    assert weight_bytes(HashedEmbeddings()) == {}  # a client of a server, say
    assert weight_bytes(Holder(Module)) == {}  # a class is no model


@pytest.mark.parametrize("wrap", [lambda embedder: embedder, BatchedEmbeddings])
def test_a_store_counts_its_embedder_when_it_opens_and_two_stores_count_one_once(wrap: Any) -> None:
    budget = DeviceBudget({"cuda:0": 250})
    embedder = wrap(Holder(Module()))
    store = PancakeVectorStore(embedder, device_budget=budget)
    assert budget.taken() == ()  # a constructor does nothing
    store.add_texts(["where the river bends"])
    other = PancakeVectorStore(embedder, device_budget=budget)
    other.add_texts(["where the river ends"])
    assert budget.taken() == (Taken("cuda:0", "weights of Holder", 220), Taken("cpu", "weights of Holder", 8))
    with pytest.raises(DeviceFull, match="weights of Holder needs 220 bytes"):
        PancakeVectorStore(Holder(Module()), device_budget=budget).add_texts(["no room"])
    store.close()
    other.close()
    assert budget.left_bytes("cuda:0") == 30  # the embedder still lies there


def test_a_memory_store_without_room_for_its_embedder_raises_and_stores_nothing(tmp_path: Path) -> None:
    budget = DeviceBudget({"cpu": 4})
    embedder: Embeddings = Holder(Module("cpu"))
    index: Any = {"dims": DIM, "embed": embedder}
    with (
        PancakeStore(index=index, path=tmp_path / "memory", device_budget=budget) as store,
        pytest.raises(DeviceFull, match="raise the limit of the DeviceBudget"),
    ):
        store.put(("a",), "1", {"text": "it rains"})
    assert not (tmp_path / "memory").exists()
    assert budget.taken() == ()


# -- centroids ------------------------------------------------------------------------------------------------------


class Codes:
    """Codes in partitions."""

    def __init__(self, seed: int) -> None:
        rows = np.random.default_rng(seed).standard_normal((16, 8)).astype(np.float32)
        self.centroids: Floats = rows / np.linalg.norm(rows, axis=1, keepdims=True)


class Held:
    """Centroids on a GPU that there is not."""

    max_count = 16

    def __init__(self, centroids: Floats, asked: list[int]) -> None:
        self._centroids, self._asked = centroids, asked

    def nearest(self, queries: Floats, count: int) -> Near:
        self._asked.append(count)
        return nearest_on_cpu(self._centroids, queries, count)


def test_centroids_beyond_the_budget_stay_on_the_cpu_and_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []
    budget = DeviceBudget({GPU: 16 * 8 * 4 + 10})
    device = CoarseDevice("gpu", "a test", hold=lambda centroids: Held(centroids, asked))
    search = CoarseSearch(lambda: device, budget=budget)
    first, second = Codes(1), Codes(2)
    queries = Codes(3).centroids
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        for codes, count in ((first, 3), (second, 4)):
            near, truth = search.nearest(codes, queries, count), nearest_on_cpu(codes.centroids, queries, count)
            np.testing.assert_array_equal(np.sort(near[0], axis=1), np.sort(truth[0], axis=1))
    assert asked == [3, 3]
    assert budget.taken() == (Taken(GPU, "centroids of partitions", 512),)
    assert search.device.device == "gpu"
    assert search.device.num_failures == 0
    [said] = [record.getMessage() for record in caplog.records]
    assert "stay on the CPU: cuda:0: centroids of partitions needs 512 bytes" in said
    del first, codes
    gc.collect()
    assert budget.taken() == ()


def test_a_gpu_that_fails_gives_back_what_lay_there() -> None:
    class Broken(Held):
        def nearest(self, queries: Floats, count: int) -> Near:
            raise RuntimeError("CUDA error")

    budget = DeviceBudget({GPU: 1 << 20})
    device = CoarseDevice("gpu", "a test", hold=lambda centroids: Broken(centroids, []))
    search = CoarseSearch(lambda: device, budget=budget)
    codes = Codes(1)
    search.nearest(codes, Codes(2).centroids, 3)
    assert search.device.device == "cpu"
    assert budget.taken() == ()
