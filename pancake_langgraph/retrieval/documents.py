"""How documents are laid out as items: who builds an index and who searches it agree on this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pancake_langgraph.retrieval.base import Item, Namespace
from pancake_langgraph.retrieval.filters import compile_filter

#: Where documents are if nothing else was said.
DOCUMENTS: Namespace = ("documents",)

_TEXT, _METADATA = "text", "metadata"


def document_value(text: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of the item that holds a document."""
    return {_TEXT: text, _METADATA: dict(metadata)}


def text_of(item: Item) -> str:
    """Return a document's text; items that were stored otherwise have none."""
    text = item.value.get(_TEXT)
    return text if isinstance(text, str) else ""


def metadata_of(item: Item) -> dict[str, Any]:
    """Return a document's metadata; items that were stored otherwise have none."""
    metadata = item.value.get(_METADATA)
    return dict(metadata) if isinstance(metadata, Mapping) else {}


def metadata_filter(where: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the filter over items that is this filter over their metadata.

    Raises:
        InvalidQuery: if it is no filter.
    """
    if where is not None:
        compile_filter(where)
    return {_METADATA: dict(where)} if where else {}
