"""Which implementation runs where, and that bench and card say what they measured."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pancake_kernels.kv_codec import bench, card, codec_for, registry
from pancake_kernels.kv_codec.backend import Backend, Plane
from pancake_kernels.kv_codec.cpu import CpuBackend
from pancake_kernels.kv_codec.samples import synthetic_sample


@pytest.fixture
def fresh() -> Iterator[None]:
    registry._probed.cache_clear()
    yield
    registry._probed.cache_clear()


class Broken(CpuBackend):
    """Restores one bit too many."""

    def dequantize(self, plane: Plane, out: torch.Tensor) -> None:
        super().dequantize(plane, out)
        out[-1, -1, -1] += 1


def run_python(*argv: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def unavailable() -> Backend:
    raise RuntimeError("no driver")


@pytest.mark.usefixtures("fresh")
class TestDispatch:
    def test_the_cpu_has_a_path_of_its_own(self) -> None:
        assert codec_for("cpu").backend.name == "cpu"
        assert codec_for(torch.device("cpu")) is codec_for("cpu")

    def test_other_devices_get_the_reference(self) -> None:
        assert codec_for("meta").backend.name == "reference"

    def test_what_cannot_run_is_replaced(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setitem(registry._TRIED, "cpu", unavailable)
        with caplog.at_level(logging.WARNING):
            assert codec_for("cpu").backend.name == "reference"
        assert "does not run here (RuntimeError)" in caplog.text

    def test_what_gives_other_numbers_is_replaced(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setitem(registry._TRIED, "cpu", Broken)
        with caplog.at_level(logging.WARNING):
            assert codec_for("cpu").backend.name == "reference"
        assert "differs from the reference" in caplog.text


def test_importing_the_codec_imports_neither_triton_nor_a_cache_server() -> None:
    # torch itself may look whether Triton is there; the kernels' module is what must not be loaded.
    code = "import sys, pancake_kernels; print('torch' in sys.modules); import pancake_kernels.kv_codec.bench; "
    code += "print([n for n in ('lmcache', 'vllm', 'transformers', 'pancake_kernels.kv_codec.triton_kernel') "
    code += "if n in sys.modules])"
    assert run_python("-c", code).split("\n")[:2] == ["False", "[]"]


def test_the_card_says_what_the_bench_measured(tmp_path: Path) -> None:
    report, written = tmp_path / "report.json", tmp_path / "CARD.md"
    # A process of its own: LMCache, which is measured beside, changes logging and warns on import.
    argv = ["pancake_kernels.kv_codec.bench", "--json", str(report), "--tokens", "256", "--repeats", "1"]
    assert "int4, cpu" in run_python("-m", *argv)
    assert card.main([str(report), "--out", str(written)]) == 0
    text = written.read_text(encoding="utf-8")
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["machine"] in text
    assert found["date"] in text
    rows = {row["name"]: row for row in found["rows"]}
    assert {"copy", "exact, cpu", "int8, cpu", "int4, cpu", "int8, reference", "int4, reference"} <= set(rows)
    for name, row in rows.items():
        assert f"| {name} | {row['size_ratio']:.4f} | {row['encode_gb_s']:.2f} | {row['decode_gb_s']:.2f} |" in text
    assert rows["exact, cpu"]["key_max"] == 0
    assert rows["int8, cpu"]["size_ratio"] <= 0.53
    assert rows["int4, cpu"]["size_ratio"] <= 0.30
    assert rows["int8, cpu"]["key_rms"] < rows["int4, cpu"]["key_rms"] < 0.2


def test_a_file_that_is_no_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"rows": [{"name": "copy"}]}')
    with pytest.raises(ValueError, match="not a report of this bench"):
        card.read_report(tmp_path / "r.json")


def test_a_sample_is_cut_into_whole_chunks() -> None:
    chunks = synthetic_sample(600).chunks()
    assert [tuple(keys.shape) for keys, _ in chunks] == [(30, 256, 192)] * 2


@pytest.mark.parametrize("argv", [["--model", "m"], ["--tokens", "5"], ["--repeats", "0"]])
def test_a_bench_that_cannot_be_run_is_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(argv)
