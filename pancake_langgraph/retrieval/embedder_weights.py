"""What an embedder's weights take, so that they count in a `DeviceBudget`.

Devices are named as torch names them: `cpu`, `cuda:0`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class HoldsWeights(Protocol):
    """A model that says what its weights take."""

    def weight_bytes(self) -> Mapping[str, int]:
        """Return bytes by device."""
        ...


def weight_bytes(model: object) -> Mapping[str, int]:
    """Return what a model's weights take, by device; nothing where they lie in another process or cannot be seen.

    A model that `HoldsWeights` says it itself.  Of others the torch modules that it is, or has as attributes, are
    counted, as they are in the embedders of langchain-huggingface.
    """
    if isinstance(model, HoldsWeights):
        return model.weight_bytes()
    total: Counter[str] = Counter()
    seen: set[int] = set()
    for part in _parts(model):
        for tensor in _tensors(part):
            if (place := tensor.data_ptr()) not in seen:  # tied weights are held once
                seen.add(place)
                total[str(tensor.device)] += tensor.numel() * tensor.element_size()
    return total


def _parts(model: object) -> Iterator[object]:
    yield model
    yield from getattr(model, "__dict__", {}).values()
    yield from (getattr(model, "__pydantic_private__", None) or {}).values()


def _tensors(part: Any) -> Iterable[Any]:
    """Return the tensors of a torch module; torch itself is not imported for it."""
    if not (hasattr(part, "named_parameters") and hasattr(part, "named_buffers")) or isinstance(part, type):
        return ()
    return (*part.parameters(), *part.buffers())
