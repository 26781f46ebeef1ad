"""Fingerprints: the same for one embedder however it is run, another for another one."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.embeddings import Embeddings

from pancake_langgraph._errors import EmbedderMismatch, EmbeddingError
from pancake_langgraph.retrieval.embedding import BatchedEmbeddings
from pancake_langgraph.retrieval.fingerprint import Fingerprint, are_of_one_embedder, fingerprint


class Model(Embeddings):
    """Vectors made of a text and the model's name, with a common part as real models have, and noise on demand."""

    def __init__(self, name: str, *, dim: int = 384, noise: float = 0.0, scale: float = 1.0, query: str = "") -> None:
        self.name, self.dim, self.noise, self.scale, self.query = name, dim, noise, scale, query
        self.calls = 0

    def _normal(self, text: str) -> np.ndarray:
        seed = int.from_bytes(hashlib.blake2b(f"{self.name}|{text}".encode(), digest_size=8).digest())
        found = np.random.default_rng(seed).standard_normal(self.dim)
        return found / np.linalg.norm(found)

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([self.query + text])[0]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.calls += 1
        found = []
        for position, text in enumerate(texts):
            vector = self._normal("what all share") + self._normal(text)
            error = np.random.default_rng([self.calls, position]).standard_normal(self.dim) / self.dim**0.5
            vector = vector / np.linalg.norm(vector) + self.noise * error
            found.append((vector * self.scale).tolist())
        return found


@pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-3, 1e-2])
def test_one_embedder_is_the_same_in_spite_of_noise(noise: float) -> None:
    model = Model("a", noise=noise)
    one, other = fingerprint(model), fingerprint(model)
    assert one.is_same(other)
    one.check(str(other))


def test_another_embedder_of_the_same_size_differs() -> None:
    one, other = fingerprint(Model("a")), fingerprint(Model("b"))
    assert 1.2 < one.distance(other) < 1.6
    with pytest.raises(EmbedderMismatch, match=r"384 numbers .* 384 .* apart, allowed is 0\.05"):
        one.check(str(other))


@pytest.mark.parametrize(
    "other", [Model("a", dim=383), Model("a", scale=2.0), Model("a", query="query: "), Model("a", noise=0.2)]
)
def test_another_size_length_prefix_or_version_differs(other: Model) -> None:
    assert not fingerprint(Model("a")).is_same(fingerprint(other))
    assert not fingerprint(other).is_same(fingerprint(Model("a")))


def test_names_of_embedders_are_compared_as_fingerprints_where_they_are_some() -> None:
    model = Model("a", noise=1e-3)
    one, again, other = str(fingerprint(model)), str(fingerprint(model)), str(fingerprint(Model("b")))
    assert one != again
    assert are_of_one_embedder(one, again)
    assert not are_of_one_embedder(one, other)
    assert are_of_one_embedder("my model", "my model")
    assert not are_of_one_embedder("my model", one)


def test_batching_does_not_change_a_fingerprint() -> None:
    with BatchedEmbeddings(Model("a", query="query: ")) as embeddings:
        assert embeddings.fingerprint().is_same(fingerprint(Model("a", query="query: ")))
        assert embeddings.fingerprint() is embeddings.fingerprint()


def test_the_text_is_always_the_same_and_short() -> None:
    text = str(fingerprint(Model("a", dim=8)))
    assert text == str(fingerprint(Model("a", dim=8)))
    assert text.isascii()
    assert text.startswith("e1:8:1:")
    assert len(text) < 400


@given(
    st.integers(1, 65_536),
    st.floats(1e-6, 1e6),
    st.lists(st.integers(-32_767, 32_767), min_size=128, max_size=128),
)
def test_a_fingerprint_comes_back_from_its_text(dim: int, length: float, sketch: list[int]) -> None:
    one = Fingerprint(dim, float(f"{length:.6g}"), tuple(sketch))
    assert Fingerprint.parse(str(one)) == one


@pytest.mark.parametrize("text", ["", "e1", "e2:8:1:AAAA", "e1:8:1:AAAA", "e1:x:1:AAAA", "e1:8:1:%%", "a:b:c:d:e"])
def test_a_text_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(EmbedderMismatch, match="allowed is a fingerprint of version e1"):
        Fingerprint.parse(text)
    with pytest.raises(EmbedderMismatch):
        fingerprint(Model("a", dim=8)).check(text)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([[float("nan")] * 3] * 6, "NaN"),
        ([[1.0]] * 5, r"shape"),
        ([[1.0], [1.0, 2.0], *[[1.0]] * 4], "inhomogeneous"),
        ([[]] * 6, "shape"),
    ],
)
def test_answers_without_a_fingerprint_are_refused(
    monkeypatch: pytest.MonkeyPatch, answers: list[list[float]], message: str
) -> None:
    model = Model("a", dim=3)
    monkeypatch.setattr(model, "embed_documents", lambda texts: answers)
    monkeypatch.setattr(model, "embed_query", lambda text: answers[0])
    with pytest.raises(EmbeddingError, match=message):
        fingerprint(model)


def test_an_embedder_that_answers_zeros_has_one() -> None:
    model = Model("a", scale=0.0)
    assert fingerprint(model).is_same(fingerprint(model))
