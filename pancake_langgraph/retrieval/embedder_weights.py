"""What an embedder's weights take, so that they count in a `DeviceBudget`.

Devices are named as torch names them: `cpu`, `cuda:0`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from langchain_core.embeddings import Embeddings

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.retrieval.device_budget import DeviceBudget
from pancake_langgraph.retrieval.embedding import BatchedEmbeddings

#: How many embedders may stand around a model, and how long lists of models may be.
_MAX_DEPTH: Final = 4
_MAX_PARTS: Final = 64


@runtime_checkable
class HoldsWeights(Protocol):
    """An embedder, or what it is made of, that says what its weights take."""

    def weight_bytes(self) -> Mapping[str, int]:
        """Return bytes, integers from 0 on, by device."""
        ...


class Weights(NamedTuple):
    """What the weights of one model take, by device; `model` is what they go with."""

    model: object
    num_bytes: Mapping[str, int]


def count_weights(embedder: object, budget: DeviceBudget) -> None:
    """Count what an embedder's weights take now, once for all who ask with it.

    Raises:
        ConfigError: if they cannot be counted.
        DeviceFull: if a limit would be passed.
    """
    name = f"weights of {type(_innermost(embedder)).__name__}"
    for weights in weights_of(embedder):
        budget.take(weights.model, name, weights.num_bytes)


def _innermost(embedder: object) -> object:
    """Return the embedder below all batching."""
    while isinstance(embedder, BatchedEmbeddings):
        embedder = embedder.embedder
    return embedder


def weights_of(embedder: object) -> list[Weights]:
    """Return what the models below an embedder take; nothing where they lie in another process or cannot be seen.

    Seen are those that say it (`HoldsWeights`) and torch modules, as embedders of langchain-huggingface have them: in
    attributes, or in those of embedders below, in lists and behind methods.

    Raises:
        ConfigError: if they cannot be counted.
    """
    try:
        return [*_found(embedder, _MAX_DEPTH, set())]
    except ConfigError:
        raise
    except Exception as exc:
        raise ConfigError(
            f"the weights of {type(embedder).__name__} cannot be counted ({type(exc).__name__}); give it a method "
            "weight_bytes() that returns bytes by device, or leave device_budget out"
        ) from exc


def _found(part: Any, depth: int, seen: set[int]) -> Iterator[Weights]:
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, type):
        return
    if isinstance(part, HoldsWeights):
        yield Weights(part, part.weight_bytes())
    elif hasattr(part, "named_parameters") and hasattr(part, "named_buffers"):
        yield Weights(part, _module_bytes(part))
    elif depth and isinstance(part, list | tuple):
        for item in part[:_MAX_PARTS]:
            yield from _found(item, depth - 1, seen)
    elif depth and (owner := getattr(part, "__self__", None)) is not None:  # a method of an embedder, or of its model
        yield from _found(owner, depth - 1, seen)
    elif depth and (isinstance(part, Embeddings) or depth == _MAX_DEPTH):
        for item in _attributes(part):
            yield from _found(item, depth - 1, seen)


def _attributes(part: object) -> list[object]:
    private = getattr(part, "__pydantic_private__", None) or {}
    return [*tuple(getattr(part, "__dict__", {}).values()), *tuple(private.values())]


def _module_bytes(module: Any) -> Counter[str]:
    """Return what a torch module takes; torch itself is not imported for it."""
    total: Counter[str] = Counter()
    seen: set[tuple[str, int]] = set()
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "meta":  # takes nothing
            continue
        storage, device = tensor.untyped_storage(), str(tensor.device)
        place = device, storage.data_ptr()
        if place[1] == 0 or place not in seen:  # tied weights, and views of others, are held once
            seen.add(place)
            total[device] += storage.nbytes()
    return total
