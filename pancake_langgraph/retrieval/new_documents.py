"""LangChain's documents: made of texts, and of items."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document

from pancake_langgraph._errors import InvalidItem
from pancake_langgraph.retrieval.base import Item
from pancake_langgraph.retrieval.documents import metadata_of, text_of


def new_documents(
    texts: Iterable[str], metadatas: Sequence[Mapping[str, Any]] | None, ids: Sequence[str | None] | None
) -> list[Document]:
    """Return documents that all have an id of their own.

    Raises:
        InvalidItem: if an id stands twice, a text is none, or the counts differ.
    """
    contents = list(texts)
    for name, given in (("metadatas", metadatas), ("ids", ids)):
        if given is not None and len(given) != len(contents):
            raise InvalidItem(f"{name}: got {len(given)} for {len(contents)} texts, allowed is one for each")
    for position, text in enumerate(contents):
        if not isinstance(text, str):
            raise InvalidItem(f"text {position}: got {type(text).__name__}, allowed are texts; nothing was stored")
    given_ids = [one for one in ids or () if one]
    if len(set(given_ids)) < len(given_ids):
        raise InvalidItem(
            f"ids: got {len(given_ids) - len(set(given_ids))} that stand more than once in one call, "
            "allowed is each once; nothing was stored"
        )
    return [
        Document(id=given or str(uuid.uuid4()), page_content=text, metadata=dict(metadata or {}))
        for text, metadata, given in zip(
            contents, metadatas or [{}] * len(contents), ids or [None] * len(contents), strict=True
        )
    ]


def document_of(item: Item) -> Document:
    """Return the document that an item holds."""
    return Document(id=item.id.key, page_content=text_of(item), metadata=metadata_of(item))
