"""Coarse searches run on a GPU only where it finds what the CPU finds, and on the CPU whenever anything is wrong."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pancake_langgraph._errors import RetrievalError
from pancake_langgraph.retrieval import coarse, device_memory, devices, faiss_codes
from pancake_langgraph.retrieval.base import Item, ItemId, Query
from pancake_langgraph.retrieval.coarse import CoarseDevice, CoarseSearch, Floats, Near, agrees, nearest_on_cpu
from pancake_langgraph.retrieval.devices import FaissGpu, coarse_device, coarse_search, probe
from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine
from pancake_langgraph.retrieval.faiss_codes import IvfCodes
from tests.index_children import Unsynced

DIM, LISTS, ROWS = 16, 32, 2000
ON_CPU = CoarseSearch(lambda: CoarseDevice("cpu", "a test"))
FOUND = coarse_device()


def directions(count: int, seed: int) -> Floats:
    rows = np.random.default_rng(seed).standard_normal((count, DIM))
    found: Floats = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return found


CENTROIDS, QUERIES = directions(LISTS, 1), directions(6, 2)


def as_it_is(near: Near) -> Near:
    return near


@dataclass
class Held:
    """What a GPU would hold; `spoil` changes what it answers."""

    centroids: Floats
    spoil: Callable[[Near], Near]
    max_count: int = 2048
    asked: int = 0

    def nearest(self, queries: Floats, count: int) -> Near:
        self.asked += 1
        lists, products = nearest_on_cpu(self.centroids, queries, count)
        order = np.argsort(-products, axis=1)  # another order than the CPU's, as Faiss gives it
        return self.spoil((np.take_along_axis(lists, order, 1), np.take_along_axis(products, order, 1)))


@dataclass
class FakeGpu:
    """A GPU without one."""

    spoil: Callable[[Near], Near] = as_it_is
    lacks: str | None = None
    free: int | None = 1 << 40
    max_count: int = 2048
    held: list[Held] = field(default_factory=list)

    def lack(self) -> str | None:
        return self.lacks

    def free_bytes(self) -> int | None:
        return self.free

    def hold(self, centroids: Floats) -> Held:
        self.held.append(Held(centroids.copy(), self.spoil, self.max_count))
        return self.held[-1]


def fail(near: Near) -> Near:
    raise RuntimeError("CUDA error 700\nat a place in a file")


def other_lists(near: Near) -> Near:
    return (near[0] + 1) % LISTS, near[1]


def all_alike(near: Near) -> Near:
    return np.repeat(near[0][:, :1], near[0].shape[1], 1), np.repeat(near[1][:, :1], near[0].shape[1], 1)


def halves(near: Near) -> Near:
    return near[0], (near[1] * 1.001).astype(np.float32)


def none_found(near: Near) -> Near:
    return np.full_like(near[0], -1), near[1]


def too_few(near: Near) -> Near:
    return near[0][:, 1:], near[1][:, 1:]


@pytest.fixture(scope="module")
def codes() -> IvfCodes:
    rows = directions(ROWS, 3)
    lists = nearest_on_cpu(CENTROIDS, rows, 1)[0][:, 0]
    made = IvfCodes.train("sq8", CENTROIDS, rows, lists)
    made.add(rows, np.arange(ROWS), lists)
    return made


def likely(codes: IvfCodes, search: CoarseSearch, probes: int = 4) -> list[list[int]]:
    found = codes.best(QUERIES, count=20, probes=probes, bits=None, coarse=search)
    return [sorted(row) for row in found.tolist()]


# -- the choice -----------------------------------------------------------------------------------------------------


def test_a_build_of_faiss_without_gpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = faiss_codes._faiss()
    fields = {name: getattr(real, name) for name in ("IndexFlatIP", "get_num_gpus")}
    monkeypatch.setattr(faiss_codes, "_faiss", lambda: SimpleNamespace(**fields))
    assert probe(FaissGpu()) == CoarseDevice("cpu", "no GPU build of faiss")
    assert str(probe(FaissGpu())) == "coarse search on cpu (no GPU build of faiss)"
    fields |= {"StandardGpuResources": object, "get_num_gpus": lambda: 0}
    assert probe(FaissGpu()) == CoarseDevice("cpu", "faiss finds no GPU")


def test_what_is_installed_here_is_told_with_a_reason(tmp_path: Path) -> None:
    has_gpus = hasattr(faiss_codes._faiss(), "StandardGpuResources")
    assert has_gpus or CoarseDevice("cpu", "no GPU build of faiss") == FOUND
    engine = DiskVectorEngine(tmp_path / "index", dim=DIM, disk=Unsynced())
    assert engine.coarse_device == FOUND
    engine.close()
    engine = DiskVectorEngine(tmp_path / "index", device="cpu", disk=Unsynced())
    assert engine.coarse_device == CoarseDevice("cpu", "as it was asked for")
    engine.close()


def test_a_gpu_that_is_asked_for_and_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_probed", lambda pid: CoarseDevice("cpu", "no GPU build of faiss"))
    with pytest.raises(
        RetrievalError, match=r"got 'gpu', .*no GPU build of faiss; allowed .* auto and cpu\. To mend: "
    ):
        DiskVectorEngine(tmp_path / "index", dim=DIM, device="gpu")
    assert not (tmp_path / "index").exists()
    with pytest.raises(RetrievalError, match="device: got 'tpu', allowed are auto, cpu, gpu"):
        DiskVectorEngine(tmp_path / "index", dim=DIM, device="tpu")  # type: ignore[arg-type]


def test_a_gpu_that_finds_the_same_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert coarse_device("auto", gpu=FakeGpu()).device == "gpu"
    assert coarse_device("gpu", gpu=FakeGpu(free=None)).device == "gpu"
    assert coarse_device("cpu", gpu=FakeGpu()).device == "cpu"
    monkeypatch.setattr(devices, "_probed", lambda pid: probe(FakeGpu()))
    assert coarse_search("gpu").device.device == coarse_search("auto").device.device == "gpu"


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        (FakeGpu(spoil=other_lists), "in a trial the GPU found other partitions"),
        (FakeGpu(spoil=all_alike), "in a trial the GPU found other partitions"),
        (FakeGpu(spoil=halves), "in a trial the GPU found other partitions"),
        (FakeGpu(spoil=none_found), "in a trial the GPU found other partitions"),
        (FakeGpu(spoil=too_few), "in a trial the GPU found other partitions"),
        (FakeGpu(spoil=fail), "the GPU cannot be used: RuntimeError: CUDA error 700"),
        (
            FakeGpu(free=1000),
            "the GPU cannot be used: MemoryError: 1,000 bytes of the GPU are free, 67,121,152 are wanted",
        ),
    ],
)
def test_a_gpu_that_fails_its_trial_is_not_used(gpu: FakeGpu, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert probe(gpu) == CoarseDevice("cpu", reason, num_failures=1)
    assert [record.message for record in caplog.records] == [f"coarse search on cpu ({reason})"]
    with pytest.raises(RetrievalError, match="coarse searches cannot run on one here"):
        coarse_device("gpu", gpu=gpu)


def test_a_forked_process_leaves_the_gpu_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(StandardGpuResources=object, get_num_gpus=lambda: 1)
    monkeypatch.setattr(faiss_codes, "_faiss", lambda: fake)
    monkeypatch.setattr(faiss_codes, "_gpu_pid", 1)
    assert "forked" in str(faiss_codes.gpu_lack())
    monkeypatch.setattr(faiss_codes, "_gpu_pid", None)
    assert faiss_codes.gpu_lack() is None


def test_a_driver_that_ends_the_process_ends_another_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert devices.ended_elsewhere() is None
    monkeypatch.setattr(faiss_codes, "is_gpu_build", lambda: True)
    monkeypatch.setattr(devices, "probe", lambda gpu: CoarseDevice("gpu", "it was tried"))
    ended = devices.ended_elsewhere
    monkeypatch.setattr(devices, "ended_elsewhere", lambda: ended("import os; os.abort()"))
    devices._probed.cache_clear()
    try:
        found = coarse_device()
        assert found.reason == "the GPU cannot be used: a trial of it ended its process (-6)"
        assert (found.device, found.num_failures) == ("cpu", 1)
        assert coarse_device() is found
        assert len(caplog.records) == 1
        monkeypatch.setattr(devices, "ended_elsewhere", lambda: ended("pass"))
        devices._probed.cache_clear()
        assert coarse_device().device == "gpu"
    finally:
        devices._probed.cache_clear()


def test_a_trial_that_does_not_come_back_is_given_up() -> None:
    ended = devices.ended_elsewhere("import time; time.sleep(600)", limit_s=0.05)
    assert ended is not None
    assert "TimeoutExpired" in ended


# -- the same as on the CPU -----------------------------------------------------------------------------------------


def test_of_partitions_that_are_equally_near_any_will_do() -> None:
    twice = np.concatenate([CENTROIDS[:4], CENTROIDS[:4]])
    near = nearest_on_cpu(twice, QUERIES, 3)
    assert agrees(twice, QUERIES, 3, near)
    assert agrees(twice, QUERIES, 3, ((near[0] + 4) % 8, near[1]))
    assert agrees(twice, QUERIES, 8, nearest_on_cpu(twice, QUERIES, 8))
    assert not agrees(twice, QUERIES, 3, (near[0], near[1] + np.float32(2 * coarse.TOLERANCE)))
    assert not agrees(twice, QUERIES, 2, near)


def test_searches_find_the_same_rows_on_both(codes: IvfCodes) -> None:
    gpu = FakeGpu()
    search = CoarseSearch(lambda: probe(gpu))
    for _ in range(2):
        assert likely(codes, search) == likely(codes, ON_CPU)
    _trial, held = gpu.held
    assert held.asked == 2
    np.testing.assert_array_equal(held.centroids, CENTROIDS)


def test_an_engine_finds_the_same_on_both(tmp_path: Path) -> None:
    rows = directions(ROWS, 4)
    options: dict[str, Any] = {"merge": "manual", "coded_rows": 1000, "exact_rows": 50, "disk": Unsynced()}
    engine = DiskVectorEngine(tmp_path / "index", dim=DIM, ack="none", **options)
    engine.put([Item(ItemId(("n",), str(at)), {}, (row,)) for at, row in enumerate(rows)])
    engine.compact()
    asked = [Query(query, limit=5) for query in QUERIES]
    expected = [[(hit.item.id.key, hit.score) for hit in hits] for hits in engine.search(asked)]
    gpu = FakeGpu()
    engine._settings = replace(engine._settings, coarse=CoarseSearch(lambda: probe(gpu)))
    assert [[(hit.item.id.key, hit.score) for hit in hits] for hits in engine.search(asked)] == expected
    assert engine.coarse_device.device == "gpu"
    assert gpu.held[-1].asked
    engine.close()


# -- trouble later on -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", [fail, none_found, too_few])
def test_a_gpu_that_fails_later_is_left_alone(
    spoil: Callable[[Near], Near], codes: IvfCodes, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = FakeGpu()
    search = CoarseSearch(lambda: probe(gpu))
    assert likely(codes, search) == likely(codes, ON_CPU)
    gpu.held[-1].spoil = spoil
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert likely(codes, search) == likely(codes, ON_CPU)
    assert gpu.held[-1].asked == 2
    assert (search.device.device, search.device.num_failures) == ("cpu", 1)
    assert search.device.reason.startswith("the GPU failed: ")
    assert len(caplog.records) == 1


def test_centroids_that_no_longer_fit_are_searched_on_the_cpu(codes: IvfCodes) -> None:
    gpu = FakeGpu()
    search = CoarseSearch(lambda: probe(gpu))
    assert search.device.device == "gpu"
    gpu.free = 1000
    assert likely(codes, search) == likely(codes, ON_CPU)
    assert "MemoryError" in search.device.reason


def test_more_partitions_than_a_gpu_can_choose_are_no_failure(codes: IvfCodes) -> None:
    gpu = FakeGpu(max_count=12)
    search = CoarseSearch(lambda: probe(gpu))
    assert likely(codes, search, probes=13) == likely(codes, ON_CPU, probes=13)
    assert gpu.held[-1].asked == 0
    assert likely(codes, search, probes=12) == likely(codes, ON_CPU, probes=12)
    assert gpu.held[-1].asked == 1
    assert search.device.num_failures == 0


# -- Faiss's side ---------------------------------------------------------------------------------------------------


def test_what_faiss_holds_on_a_gpu_is_bounded_takes_turns_and_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = faiss_codes._faiss()
    scratch: list[int] = []
    freed: list[int] = []

    class Index:
        def __init__(self, resources: Any, dim: int, metric: int) -> None:
            assert faiss_codes._gpu_lock.locked()
            self.index = real.IndexFlat(dim, metric)
            self.add = self.index.add

        def search(self, queries: Floats, count: int) -> Any:
            assert faiss_codes._gpu_lock.locked()
            return self.index.search(queries, count)

        def __del__(self) -> None:
            freed.append(1)
            assert faiss_codes._gpu_lock.locked()

    fake = SimpleNamespace(
        StandardGpuResources=lambda: SimpleNamespace(setTempMemory=scratch.append),
        get_num_gpus=lambda: 1,
        GpuIndexFlat=Index,
        METRIC_INNER_PRODUCT=real.METRIC_INNER_PRODUCT,
    )
    monkeypatch.setattr(faiss_codes, "_faiss", lambda: fake)
    monkeypatch.setattr(faiss_codes, "_gpu_pid", None)
    faiss_codes._gpu_resources.cache_clear()
    try:
        assert probe(FaissGpu()).device == "gpu"
        assert scratch == [faiss_codes.GPU_SCRATCH_BYTES]
        held = faiss_codes.GpuCentroids(CENTROIDS)
        freed.clear()
        other = faiss_codes.GpuCentroids(CENTROIDS)
        del other
        gc.collect()
        assert freed == []
        assert agrees(CENTROIDS, QUERIES, 4, held.nearest(QUERIES, 4))
        assert freed == [1]
    finally:
        del held
        with faiss_codes._gpu_lock:
            faiss_codes._gpu_gone.clear()
        faiss_codes._gpu_resources.cache_clear()


class Driver:
    """As much of a GPU's driver as is asked."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuMemGetInfo_v2":
                arguments[0]._obj.value = 12345
            return 2 if name == self.fails else 0

        return call


def test_the_driver_tells_how_much_is_free() -> None:
    driver = Driver()
    assert device_memory.free_device_bytes(load=lambda name: driver) == 12345
    assert driver.calls[-2:] == ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]


@pytest.mark.parametrize(
    "name", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuMemGetInfo_v2"]
)
def test_a_driver_that_refuses_tells_nothing_and_is_left_as_it_was(name: str) -> None:
    driver = Driver(fails=name)
    assert device_memory.free_device_bytes(load=lambda name: driver) is None
    did = driver.calls.count
    assert did("cuCtxPopCurrent_v2") == (name == "cuMemGetInfo_v2")
    assert did("cuDevicePrimaryCtxRelease_v2") == (name in ("cuCtxPushCurrent_v2", "cuMemGetInfo_v2"))


def test_without_a_driver_nothing_is_known() -> None:
    def load(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    assert device_memory.free_device_bytes(load=load) is None


# -- a real GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(FOUND.device != "gpu", reason=f"needs a GPU that Faiss can use; here: {FOUND}")
def test_a_real_gpu_finds_the_same_from_several_threads(codes: IvfCodes) -> None:
    search = coarse_search("gpu")
    assert device_memory.free_device_bytes()
    expected = likely(codes, ON_CPU)
    found: list[list[list[int]]] = []
    threads = [
        threading.Thread(target=lambda: found.extend(likely(codes, search) for _ in range(20))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 80
    near = faiss_codes.GpuCentroids(CENTROIDS).nearest(QUERIES, 5)
    assert agrees(CENTROIDS, QUERIES, 5, near)
    assert search.device == FOUND
