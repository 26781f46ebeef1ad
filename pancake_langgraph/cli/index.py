"""`pancake index`: make and look after indexes of text."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from pancake_langgraph._errors import ConfigError, EmbeddingError, PancakeError
from pancake_langgraph.cli._embedders import chosen_embedder, embedder_options
from pancake_langgraph.cli._index_vectors import answering, check_embedder, comparable
from pancake_langgraph.cli._progress import show_progress
from pancake_langgraph.retrieval.extra import require_retrieval

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

    from pancake_langgraph.retrieval.base import Item, ItemId, VectorEngine
    from pancake_langgraph.retrieval.texts import Chunk

_PROGRESS_S: Final = 2.0
#: Texts that are embedded and stored at once.
_BATCH: Final = 128
#: Of a fingerprint; all of it is in the JSON.
_SHOWN_CHARS: Final = 24
_NAMESPACE: Final = "documents"
#: In the value of a piece: the folder it was found below, so that a later build sees which files are gone.
_FOLDER: Final = "folder"
_INDEX = click.argument("path", metavar="INDEX", type=click.Path(path_type=Path, file_okay=False))
_NAMESPACE_OPTION = click.option(
    "--namespace", default=_NAMESPACE, show_default=True, help="Where the documents go; labels with slashes."
)


@click.group()
def index() -> None:
    """Make indexes of text, and look after them."""


@index.command(short_help="Put text files into INDEX.")
@_INDEX
@click.argument("folders", metavar="FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--chunk-words", default=90, show_default=True, type=click.IntRange(1, 10_000), help="Words of a piece.")
@_NAMESPACE_OPTION
@embedder_options
def build(
    path: Path,
    folders: Sequence[Path],
    chunk_words: int,
    namespace: str,
    embedder: str | None,
    embedder_url: str | None,
    model: str | None,
) -> None:
    """Put the text files below each FOLDER into INDEX, which is made if there is none.

    Files that were put in before are put in again as they are now; what they no longer have goes, and so does what came
    from files that are gone from FOLDER.  They are known by their names below FOLDER: use another --namespace for a
    folder with the same names in it.
    """
    from pancake_langgraph.retrieval.texts import chunks, has_no_text, read_documents, text_files

    with _one_line():
        labels = _labels(namespace)
        files = {folder: text_files(folder) for folder in folders}
        named = _named(files)
        if not named:
            raise ConfigError(
                f"there is no text file in {', '.join(map(str, folders))}; allowed are .txt, .md, .html …"
            )
        pieces = (
            chunk
            for folder in folders
            for document in read_documents(folder, files[folder], say=lambda line: click.echo(line, err=True))
            for chunk in chunks(document, words=chunk_words, folder=str(folder.resolve()))
        )
        used = chosen_embedder(embedder, embedder_url, model)
        with closing(_open(path, used)) as engine:
            before = _stored(engine, labels)
            written = _store_chunks(engine, used, pieces, labels)
            documents = {document for document, _ in written.values()}
            stored_names = {origin.document for origin in before.values()}
            emptied = {name for name in stored_names - documents if name in named and has_no_text(named[name])}
            changed = documents | emptied
            roots = {str(folder.resolve()) for folder in folders}
            gone = {one for one in before.values() if one.folder in roots and one.document not in named}
            stale = [
                item
                for item, origin in before.items()
                if item not in written and (origin.document in changed or origin in gone)
            ]
            engine.delete(stale)
    click.echo(
        f"{len(written):,} pieces of {len(documents):,} documents put into {path}, {len(stale):,} old ones removed"
        + (f" ({len(gone):,} files are gone)" if gone else "")
    )


@index.command("import", short_help="Take a langchain FAISS folder into INDEX.")
@_INDEX
@click.option(
    "--from-langchain",
    "folder",
    required=True,
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="A folder that `save_local` of langchain's FAISS store wrote.",
)
@click.option("--name", default="index", show_default=True, help="Name of the files in it, without their endings.")
@_NAMESPACE_OPTION
@embedder_options
def import_index(
    path: Path,
    folder: Path,
    name: str,
    namespace: str,
    embedder: str | None,
    embedder_url: str | None,
    model: str | None,
) -> None:
    """Take the documents of a langchain FAISS folder into INDEX, with their vectors.

    Its pickle is read without running it.  The embedder has to be the one that made the vectors; it is asked for one
    of the texts to see that.
    """
    from pancake_langgraph.retrieval.base import Item, ItemId
    from pancake_langgraph.retrieval.documents import document_value
    from pancake_langgraph.retrieval.flat_file import read_flat
    from pancake_langgraph.retrieval.langchain_folder import read_saved_documents

    with _one_line():
        labels = _labels(namespace)
        documents = read_saved_documents(folder / f"{name}.pkl")
        flat = read_flat(folder / f"{name}.faiss")
        if len(documents) != len(flat.vectors):
            raise ConfigError(
                f"{folder}: its two files do not belong together: got {len(flat.vectors)} vectors and "
                f"{len(documents)} documents"
            )
        used = chosen_embedder(embedder, embedder_url, model)
        vectors, is_changed = comparable(flat.vectors, flat.metric)
        if documents:
            check_embedder(used, documents[0].text, vectors[0])
        tick = _ticker("imported")
        with closing(_open(path, used)) as engine:
            for batch in _batches(documents):
                engine.put(
                    [
                        Item(
                            ItemId(labels, document.id),
                            document_value(document.text, document.metadata),
                            (vectors[document.row],),
                            created_at_s=time.time(),
                            updated_at_s=time.time(),
                        )
                        for document in batch
                    ]
                )
                tick(len(batch))
    click.echo(f"{len(documents):,} documents imported into {path}")
    if is_changed:
        click.echo(
            "vectors were brought to length one: they are now compared by angle, no longer by distance", err=True
        )


@index.command()
@_INDEX
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(path: Path, as_json: bool) -> None:
    """Show what INDEX holds, and what searches of it run on here."""
    from pancake_langgraph.retrieval.devices import coarse_device
    from pancake_langgraph.retrieval.inspection import describe

    with _one_line():
        facts = asdict(describe(path))
        coarse = coarse_device()
    if as_json:
        facts["coarse_search"] = {"device": coarse.device, "reason": coarse.reason}
        click.echo(json.dumps(facts, indent=1))
        return
    segments = facts.pop("segments")
    if facts["fingerprint"] and len(facts["fingerprint"]) > _SHOWN_CHARS:
        facts["fingerprint"] = f"{facts['fingerprint'][:_SHOWN_CHARS]}…"
    click.echo(_in_line(facts))
    for segment in segments:
        click.echo(f"segment {_in_line(segment)}")
    click.echo(str(coarse))


@index.command(short_help="Read all of INDEX and say what is damaged.")
@_INDEX
def verify(path: Path) -> None:
    """Read all of INDEX and say what is damaged; the exit status is 1 if anything is."""
    from pancake_langgraph.retrieval.inspection import torn_end
    from pancake_langgraph.retrieval.inspection import verify as read_all

    with _one_line():
        findings = read_all(path)
        torn = None if findings else torn_end(path)
    for finding in findings:
        click.echo(str(finding), err=True)
    if findings:
        raise click.ClickException(
            f"{len(findings)} files of {path} are damaged; restore them from a copy, or run `pancake index repair "
            f"{path}`, which keeps what can be read"
        )
    if torn is not None:
        click.echo(f"{torn}; whoever writes next puts them aside")
    click.echo(f"{path} is whole")


@index.command(short_help="Make a damaged INDEX usable again.")
@_INDEX
def repair(path: Path) -> None:
    """Write anew what can be read of INDEX, and name what is lost.

    What was damaged is kept in its folder `lost`.  Nobody may write to INDEX meanwhile.
    """
    from pancake_langgraph.retrieval.repair import repair as write_anew

    with _one_line():
        done = write_anew(path)
    if done.kept_in is None:
        click.echo(f"{path} is whole; it was left as it is")
        return
    for line in done.lost:
        click.echo(f"lost: {line}")
    click.echo(f"{path} is whole now and has {done.num_items:,} items; what was damaged is kept in {done.kept_in}")


@index.command()
@_INDEX
def compact(path: Path) -> None:
    """Merge the parts of INDEX and give back what deleted items take."""
    from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine
    from pancake_langgraph.retrieval.inspection import describe

    started_s = time.monotonic()
    with _one_line():
        before = describe(path).num_bytes  # where there is no index, none is begun
        with closing(DiskVectorEngine(path)) as engine:
            show_progress("merging", 0.0)
            engine.compact()
        after = describe(path).num_bytes
    click.echo(f"{before:,} bytes before, {after:,} bytes now ({time.monotonic() - started_s:.1f} s)")


# -- what the commands share ----------------------------------------------------------------------------------------


@contextmanager
def _one_line() -> Iterator[None]:
    """End the command with one line at an error of ours."""
    try:
        require_retrieval()
        yield
    except PancakeError as exc:
        raise click.ClickException(str(exc)) from exc


def _named(files: Mapping[Path, Sequence[Path]]) -> dict[str, Path]:
    """Return files by their names below their folders, by which their pieces are told apart."""
    found: dict[str, Path] = {}
    for folder, paths in files.items():
        for path in paths:
            name = path.relative_to(folder).as_posix()
            if name in found:
                raise ConfigError(
                    f"{found[name]} and {path} have one name below their folders, {name!r}, and one would replace the "
                    "other; name a folder above both, or put one of them in with another --namespace"
                )
            found[name] = path
    return found


def _open(path: Path, embedder: Embeddings) -> VectorEngine:
    """Open or make the index for what an embedder makes."""
    from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine
    from pancake_langgraph.retrieval.fingerprint import fingerprint
    from pancake_langgraph.retrieval.manifest import exists, read_current

    with answering():
        made_by = fingerprint(embedder)
    kept = str(made_by)
    if exists(path) and (stored := read_current(path).fingerprint) is not None:
        made_by.check(stored)
        kept = stored  # two sketches of one embedder differ in their last digits
    return DiskVectorEngine(path, dim=made_by.dim, fingerprint=kept)


def _in_line(facts: Mapping[str, Any]) -> str:
    shown = (f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in facts.items())
    return ", ".join(shown)


def _labels(namespace: str) -> tuple[str, ...]:
    labels = tuple(namespace.split("/"))
    if not all(labels):
        raise ConfigError(f"--namespace: got {namespace!r}, allowed are labels with single slashes between them")
    return labels


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a piece is from: its file, and the folder below which that was found, if it was said."""

    document: str
    folder: str | None


def _stored(engine: VectorEngine, labels: tuple[str, ...]) -> dict[ItemId, _Origin]:
    """Return what a namespace holds, and where each is from."""
    from pancake_langgraph.retrieval.base import View
    from pancake_langgraph.retrieval.documents import metadata_of

    return {
        item.id: _Origin(str(metadata_of(item).get("source", "")), item.value.get(_FOLDER))
        for item in engine.items(View((labels,)))
        if item.id.namespace == labels
    }


def _store_chunks(
    engine: VectorEngine, embedder: Embeddings, pieces: Iterable[Chunk], labels: tuple[str, ...]
) -> dict[ItemId, tuple[str, int]]:
    """Embed and store, batch by batch; return document and number of each item."""
    import numpy as np

    from pancake_langgraph.retrieval.base import Item, ItemId
    from pancake_langgraph.retrieval.documents import document_value

    written: dict[ItemId, tuple[str, int]] = {}
    tick = _ticker("embedded")
    for batch in _batches(pieces):
        with answering():
            vectors = np.asarray(embedder.embed_documents([chunk.text for chunk in batch]), dtype=np.float32)
            if len(vectors) != len(batch):
                raise EmbeddingError(
                    f"the embedder gave {len(vectors)} vectors for {len(batch)} texts; use another one"
                )
        items: dict[ItemId, Item] = {}
        for chunk, vector in zip(batch, vectors, strict=True):
            name = ItemId(labels, f"{chunk.document}#{chunk.number}")
            value = document_value(chunk.text, {"source": chunk.document, "chunk": chunk.number})
            value[_FOLDER] = chunk.folder  # beside the metadata, which retrievers show
            now_s = time.time()
            items[name] = Item(name, value, (vector,), created_at_s=now_s, updated_at_s=now_s)
            written[name] = (chunk.document, chunk.number)
        engine.put(list(items.values()))
        tick(len(batch))
    return written


def _batches(values: Iterable[Any]) -> Iterator[list[Any]]:
    source = iter(values)
    while batch := list(itertools.islice(source, _BATCH)):
        yield batch


def _ticker(verb: str) -> Callable[[int], None]:
    """Return what is told how many more are done; it writes a line every two seconds."""
    started_s = last_s = time.monotonic()
    count = 0

    def tick(more: int) -> None:
        nonlocal count, last_s
        count += more
        now_s = time.monotonic()
        if now_s - last_s >= _PROGRESS_S:
            last_s = now_s
            show_progress(f"{count:,} texts {verb}", now_s - started_s)

    return tick
