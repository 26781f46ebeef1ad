"""What is put on devices is counted once, refused where a limit would be passed, and forgotten with its owner."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings
from langgraph.store.base.embed import ensure_embeddings
from pydantic import BaseModel, PrivateAttr

from pancake_langgraph import DeviceBudget, DeviceFull, PancakeStore, PancakeVectorStore
from pancake_langgraph._errors import ConfigError
from pancake_langgraph.retrieval import coarse
from pancake_langgraph.retrieval.coarse import GPU, SCRATCH, CoarseDevice, CoarseSearch, Floats, Near, nearest_on_cpu
from pancake_langgraph.retrieval.device_budget import Taken
from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine
from pancake_langgraph.retrieval.embedder_weights import weights_of
from pancake_langgraph.retrieval.embedding import BatchedEmbeddings
from tests.plain_vectors import DIM, HashedEmbeddings, hashed


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


def test_an_owner_that_cannot_be_watched_is_kept_until_it_gives_back() -> None:
    budget = DeviceBudget({})
    budget.take([1], "a list", {"cpu": 5})  # nobody else holds it, and no other list may take its place
    others = [[number] for number in range(100)]
    for other in others:
        budget.take(other, "a list", {"cpu": 1})
    assert sum(part.num_bytes for part in budget.taken()) == 105
    budget.give_back(others[0])
    assert sum(part.num_bytes for part in budget.taken()) == 104


def test_what_is_taken_again_replaces_what_was_and_other_names_add_up() -> None:
    budget = DeviceBudget({"cpu": 100})
    owner = Owner()
    budget.take(owner, "model", {"cpu": 60})
    budget.take(owner, "model", {"cpu": 90})
    with pytest.raises(DeviceFull, match=r"cache needs 20 bytes, .* 10 are left \(taken: model 90\)"):
        budget.take(owner, "cache", {"cpu": 20})
    with pytest.raises(DeviceFull, match="model needs 101 bytes"):
        budget.take(owner, "model", {"cpu": 101})
    assert budget.taken() == (Taken("cpu", "model", 90),)
    budget.take(owner, "model", {"cpu": 10})
    budget.take(owner, "cache", {"cpu": 20})
    budget.give_back(owner, "model")
    assert budget.taken() == (Taken("cpu", "cache", 20),)
    budget.take(owner, "cache", {})
    assert budget.taken() == ()


def test_garbage_in_a_cycle_makes_room() -> None:
    budget = DeviceBudget({"cpu": 10})
    gc.disable()
    try:
        owner = Owner()
        owner.itself = owner  # type: ignore[attr-defined] # only the collector finds it
        budget.take(owner, "old", {"cpu": 10})
        del owner
        other = Owner()
        budget.take(other, "new", {"cpu": 10})
    finally:
        gc.enable()
    assert budget.taken() == (Taken("cpu", "new", 10),)


def test_an_owner_may_give_back_when_the_collector_finds_it_in_the_middle_of_a_call() -> None:
    budget = DeviceBudget({"cpu": 1 << 30})

    class Ending(Owner):
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            budget.give_back(self)
            budget.taken()

    done = threading.Event()

    def work() -> None:
        for _ in range(3_000):
            budget.take(Ending(), "it", {"cpu": 1})
        done.set()

    threads = gc.get_threshold()
    gc.set_threshold(5, 1_000, 1_000)  # only what is young, or it takes minutes
    try:
        threading.Thread(target=work, daemon=True).start()
        assert done.wait(60)  # a lock that is not its own would wait for ever
    finally:
        gc.set_threshold(*threads)
    gc.collect()
    assert budget.taken() == ()


@pytest.mark.parametrize("amount", [-1, 1.5, True, "1", None])
def test_amounts_are_whole_bytes(amount: Any) -> None:
    with pytest.raises(ConfigError, match=r"limits_bytes of cpu: got .*, allowed are bytes, integers from 0 on"):
        DeviceBudget({"cpu": amount})
    with pytest.raises(ConfigError, match=r"needs_bytes of cpu: got "):
        DeviceBudget({}).take(Owner(), "it", {"cpu": amount})


@pytest.mark.parametrize("given", [2_000, {0: 5}, {"": 5}, None])
def test_devices_have_names(given: Any) -> None:
    with pytest.raises(ConfigError, match="limits_bytes: got "):
        DeviceBudget(given)


def test_a_device_without_a_number_is_the_first_one() -> None:
    budget = DeviceBudget({"cuda": 100})
    with pytest.raises(DeviceFull, match="cuda:0: it needs 101 bytes"):
        budget.take(Owner(), "it", {"cuda:0": 101})
    owner = Owner()
    budget.take(owner, "it", {"cuda": 40})
    assert budget.left_bytes("cuda:0") == budget.left_bytes("cuda") == 60


class Slow(Mapping[str, int]):
    """Needs that let another thread go first while they are looked at."""

    def __getitem__(self, device: str) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        time.sleep(0)
        yield "cpu"

    def __len__(self) -> int:
        return 1


def test_many_threads_never_pass_a_limit() -> None:
    budget = DeviceBudget({"cpu": 400})
    kept: list[Owner] = []
    refused: list[DeviceFull] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        for _ in range(55):
            owner = Owner()
            try:
                budget.take(owner, "it", Slow())
            except DeviceFull as exc:
                refused.append(exc)
            else:
                kept.append(owner)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert (len(kept), len(refused)) == (400, 40)


# -- embedders ------------------------------------------------------------------------------------------------------


class Storage:
    """What is asked of the storage of a torch tensor."""

    def __init__(self, size: int, place: int) -> None:
        self.size, self.place = size, place

    def nbytes(self) -> int:
        return self.size

    def data_ptr(self) -> int:
        return self.place


class Device:
    """What is asked of a torch device."""

    def __init__(self, name: str) -> None:
        self.name, self.type = name, name.partition(":")[0]

    def __str__(self) -> str:
        return self.name


class Tensor:
    """What is asked of a torch tensor."""

    def __init__(self, size: int, device: str, place: int) -> None:
        self.device, self.storage = Device(device), Storage(size, place)

    def untyped_storage(self) -> Storage:
        return self.storage


class Module:
    """What is asked of a torch module; the real one is in tests/integration/test_minilm_real.py."""

    def __init__(self, device: str = "cuda:0") -> None:
        self.weights = [
            Tensor(200, device, 1),
            Tensor(20, device, 2),
            Tensor(20, device, 2),  # tied
            Tensor(5, device, 0),  # quantized ones hide where they are
            Tensor(5, device, 0),
            Tensor(999, "meta", 7),  # not there
        ]

    def parameters(self) -> list[Tensor]:
        return self.weights

    def buffers(self) -> list[Tensor]:
        return [Tensor(8, "cpu", 3)]

    def encode(self, texts: list[str]) -> list[list[float]]:
        return hashed(texts).tolist()

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


class Broken(HashedEmbeddings):
    """Cannot say it."""

    def weight_bytes(self) -> dict[str, int]:
        raise ValueError("not loaded yet")


def total_of(embedder: object) -> dict[str, int]:
    total: Counter[str] = Counter()
    for weights in weights_of(embedder):
        total.update(weights.num_bytes)
    return dict(total)


def test_the_weights_of_embedders_are_found() -> None:
    whole = {"cuda:0": 230, "cpu": 8}
    assert total_of(Holder(Module())) == total_of(Private()) == whole
    assert total_of(Holder(Holder(Module()))) == whole  # a cache around it, say
    assert total_of(BatchedEmbeddings(Holder(Module()))) == whole
    assert total_of(ensure_embeddings(Holder(Module()).embed_documents)) == whole
    assert total_of(ensure_embeddings(Module().encode)) == whole
    assert total_of(Holder([Module(), Module()])) == {"cuda:0": 460, "cpu": 16}
    assert total_of(Sayer()) == {"cuda:0": 7}
    assert total_of(HashedEmbeddings()) == {}  # a client of a server, say
    assert total_of(Holder(Module)) == {}  # a class is no model


def test_weights_that_cannot_be_counted_are_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"weights of Broken cannot be counted \(ValueError\); give it a method"):
        weights_of(Broken())


@pytest.mark.parametrize("wrap", [lambda embedder: embedder, BatchedEmbeddings])
def test_a_store_counts_its_embedder_when_it_opens_and_two_stores_count_one_once(wrap: Any) -> None:
    budget = DeviceBudget({"cuda:0": 260})
    embedder = wrap(Holder(Module()))
    store = PancakeVectorStore(embedder, device_budget=budget)
    assert budget.taken() == ()  # a constructor does nothing
    store.add_texts(["where the river bends"])
    other = PancakeVectorStore(embedder, device_budget=budget)
    other.add_texts(["where the river ends"])
    assert budget.taken() == (Taken("cuda:0", "weights of Holder", 230), Taken("cpu", "weights of Holder", 8))
    with pytest.raises(DeviceFull, match="weights of Holder needs 230 bytes"):
        PancakeVectorStore(Holder(Module()), device_budget=budget).add_texts(["no room"])
    store.close()
    other.close()
    assert budget.left_bytes("cuda:0") == 30  # the embedder still lies there


def test_two_embedders_over_one_model_count_it_once() -> None:
    budget, model = DeviceBudget({"cuda:0": 230}), Module()
    for _ in range(2):
        with PancakeVectorStore(Holder(model), device_budget=budget) as store:
            store.add_texts(["where the river bends"])
    del store
    gc.collect()
    assert budget.left_bytes("cuda:0") == 0  # the model outlives both


def test_a_store_without_room_embeds_nothing() -> None:
    class Counting(Holder):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            raise AssertionError("embedded")

    store = PancakeVectorStore(Counting(Module()), device_budget=DeviceBudget({"cuda:0": 100}))
    for _ in range(2):
        with pytest.raises(DeviceFull):
            store.add_texts(["a long import"] * 1_000)
    store.close()


def test_weights_that_are_loaded_later_count_when_the_store_opens_again() -> None:
    budget = DeviceBudget({})
    embedder = Holder(None)
    store = PancakeVectorStore(embedder, device_budget=budget)
    assert store.get_by_ids(["none"]) == []
    assert budget.taken() == ()
    embedder.client = Module()
    with PancakeVectorStore(embedder, device_budget=budget) as other:
        other.add_texts(["where the river bends"])
    assert budget.taken() != ()
    store.close()


@pytest.mark.parametrize("given", [{"cpu": 5}, 5, "cpu"])
def test_a_budget_that_is_none_is_refused_at_once(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device_budget: got "):
        PancakeVectorStore(HashedEmbeddings(), device_budget=given)
    with pytest.raises(ConfigError, match="device_budget: got "):
        PancakeStore(device_budget=given)
    with pytest.raises(ConfigError, match="device_budget: got "):
        DiskVectorEngine(tmp_path / "index", dim=4, device_budget=given)


def test_a_memory_store_without_room_for_its_embedder_raises_and_stores_nothing(tmp_path: Path) -> None:
    budget = DeviceBudget({"cpu": 4})
    embedder: Embeddings = Holder(Module("cpu"))
    index: Any = {"dims": DIM, "embed": embedder}
    with (
        PancakeStore(index=index, path=tmp_path / "memory", device_budget=budget) as store,
        pytest.raises(DeviceFull, match="Raise the limit of the DeviceBudget"),
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


class Gpu:
    """Holds centroids on a GPU that there is not; `fails` makes it fail."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.fails = ""

    def hold(self, centroids: Floats) -> Held:
        if self.fails == "hold":
            raise MemoryError("no room on the GPU")
        return Held(centroids, self)

    def search(self, budget: DeviceBudget, scratch_bytes: int = 0) -> CoarseSearch:
        device = CoarseDevice("gpu", "a test", hold=self.hold)
        return CoarseSearch(lambda: device, budget=budget, scratch_bytes=scratch_bytes)


class Held:
    """Centroids on it."""

    max_count = 16

    def __init__(self, centroids: Floats, gpu: Gpu) -> None:
        self._centroids, self._gpu = centroids, gpu

    def nearest(self, queries: Floats, count: int) -> Near:
        if self._gpu.fails == "nearest":
            raise RuntimeError("CUDA error")
        self._gpu.asked.append(count)
        return nearest_on_cpu(self._centroids, queries, count)


QUERIES = Codes(3).centroids


def check(search: CoarseSearch, codes: Codes, count: int) -> None:
    near, truth = search.nearest(codes, QUERIES, count), nearest_on_cpu(codes.centroids, QUERIES, count)
    np.testing.assert_array_equal(np.sort(near[0], axis=1), np.sort(truth[0], axis=1))


def test_centroids_beyond_the_budget_stay_on_the_cpu_until_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    gpu, budget = Gpu(), DeviceBudget({GPU: 512 + 10})
    search = gpu.search(budget)
    first, second, third = Codes(1), Codes(2), Codes(4)
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        check(search, first, 3)
        check(search, second, 4)
        check(search, third, 5)
    assert gpu.asked == [3, 3]
    assert budget.taken() == (Taken(GPU, "centroids of partitions", 512),)
    assert str(search.device) == "coarse search on gpu (a test; 2 segments had no room there)"
    [said] = [record.getMessage() for record in caplog.records]
    assert "stay on the CPU: cuda:0: centroids of partitions needs 512 bytes" in said
    del first
    gc.collect()
    check(search, second, 6)
    assert gpu.asked == [3, 3, 6]


def test_what_faiss_takes_for_itself_counts_once() -> None:
    budget = DeviceBudget({GPU: 512 + 512 + 100})
    gpu, one, other = Gpu(), Codes(1), Codes(2)
    check(gpu.search(budget, 100), one, 3)
    check(gpu.search(budget, 100), other, 3)
    assert [part.num_bytes for part in budget.taken()] == [100, 512, 512]
    assert budget.taken()[0].name == SCRATCH


def test_what_was_refused_is_asked_for_again_only_when_more_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, budget, codes, other = Gpu(), DeviceBudget({GPU: 1_000}), Codes(1), Owner()
    budget.take(other, "another model", {GPU: 100})
    search, asked = gpu.search(budget, 900), []
    monkeypatch.setattr("pancake_langgraph.retrieval.device_budget.gc.collect", lambda: asked.append("collector"))
    for _ in range(5):  # there is room for what Faiss takes, or for the centroids, and not for both
        check(search, codes, 3)
    assert (asked, gpu.asked, search.device.num_refused) == (["collector"], [], 1)
    del other  # leaves 100, which is not enough
    check(search, codes, 3)
    budget.give_back(coarse._SCRATCH_OWNER)
    check(search, codes, 3)
    assert gpu.asked == []
    small = Gpu().search(DeviceBudget({GPU: 600}), 900)
    for _ in range(5):
        check(small, codes, 3)
    assert len(asked) == 4


@pytest.mark.parametrize("fails", ["hold", "nearest"])
def test_a_gpu_that_fails_gives_back_what_lay_there(fails: str) -> None:
    gpu, budget = Gpu(), DeviceBudget({GPU: 1 << 20})
    search, codes = gpu.search(budget), Codes(1)
    gpu.fails = fails
    check(search, codes, 3)
    check(search, codes, 3)
    assert search.device.device == "cpu"
    assert budget.taken() == ()
