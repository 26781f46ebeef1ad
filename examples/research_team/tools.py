"""The researcher's two tools.  Their time is real; `delay_s` adds what a remote service would take."""

from __future__ import annotations

import time
from typing import Any, Literal

from langchain_core.tools import BaseTool, tool
from pydantic import BaseModel, Field, create_model

from examples.research_team.corpus import Corpus

#: Up to this many documents, `read` lists the allowed ids in its schema, so that no model can name a wrong one.
MAX_LISTED_IDS = 64
_MAX_READ_CHARS = 1_200
_MAX_HIT_CHARS = 280
_MAX_SUGGESTED = 8


class SearchArguments(BaseModel):
    """What to search for."""

    query: str = Field(description="A few words of the topic.", max_length=40)


def research_tools(corpus: Corpus, *, delay_s: float = 0.0) -> tuple[BaseTool, BaseTool]:
    """Make `search(query)` and `read(doc_id)` over a corpus.

    Raises:
        ValueError: if `delay_s` is negative.
    """
    if delay_s < 0:
        raise ValueError(f"tool delay: got {delay_s} s, allowed: 0 or more")

    @tool("search", args_schema=SearchArguments)
    def search(query: str) -> str:
        """Find the paragraphs that match a query best."""
        time.sleep(delay_s)
        hits = corpus.search(query)
        if not hits:
            listed = corpus.documents[:_MAX_SUGGESTED]
            return "Nothing found. Documents: " + ", ".join(f"[{each.doc_id}] {each.name}" for each in listed)
        return "\n".join(f"[{hit.doc_id}] {hit.name}: {_first_words(hit.paragraph)}" for hit in hits)

    @tool("read", args_schema=_read_arguments(corpus))
    def read(doc_id: str) -> str:
        """Open one document."""
        time.sleep(delay_s)
        document = corpus.document(doc_id)
        if document is None:
            return f"There is no document {doc_id}. Ids go from d1 to d{len(corpus.documents)}."
        text = corpus.opening(doc_id, max_chars=_MAX_READ_CHARS)
        return f"[{doc_id}] {document.name}\n{text}"

    return search, read


def _read_arguments(corpus: Corpus) -> type[BaseModel]:
    ids = tuple(document.doc_id for document in corpus.documents)
    description = "Id of the document, as the search gave it."
    if len(ids) > MAX_LISTED_IDS:
        return create_model("ReadArguments", doc_id=(str, Field(description=description, max_length=8)))
    allowed: Any = Literal[ids]  # built from values, which no type checker follows
    return create_model("ReadArguments", doc_id=(allowed, Field(description=description)))


def _first_words(paragraph: str) -> str:
    line = " ".join(paragraph.split())
    return line if len(line) <= _MAX_HIT_CHARS else line[:_MAX_HIT_CHARS].rsplit(" ", 1)[0] + " ..."
