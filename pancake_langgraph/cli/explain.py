"""`pancake explain GRAPH`: what a graph declares, its compiled plan, and what can be expected, before it ever ran."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import click

from pancake_langgraph._errors import ConfigError, PancakeError
from pancake_langgraph._types import Candidate, NodeId
from pancake_langgraph.cli._explain_facts import facts_of
from pancake_langgraph.cli._explain_text import as_json, in_words
from pancake_langgraph.forecast.topology_prior import TopologyPrior
from pancake_langgraph.plan import (
    GraphPhases,
    compile_plan,
    declared_for,
    plan_in_words,
    plan_mermaid,
    read_phases,
)
from pancake_langgraph.topology.extract import read_topology
from pancake_langgraph.topology.graph import START, Topology
from pancake_langgraph.topology.mermaid import to_mermaid

#: Nodes up to which words are followed by charts.
_MAX_DRAWN: Final = 100
_ALLOWED = "allowed are module:attr and path/to/file.py:attr, with attr a compiled graph or a factory without arguments"


@click.command("explain")
@click.argument("graph", metavar="GRAPH")
@click.option(
    "--format",
    "output",
    type=click.Choice(["text", "mermaid", "json"]),
    default="text",
    show_default=True,
    help="Words, a Mermaid flow chart, or JSON.",
)
@click.option(
    "--plan",
    "plan_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the compiled plan as JSON to FILE.",
)
def explain(graph: str, output: str, plan_file: Path | None) -> None:
    """Say who runs after whom in GRAPH (module:attr or file.py:attr), how sure, and what is not declared.

    Each node with what it calls, where it may stop, its loop, what it waits for, and how far the end is.

    The compiled plan shows the steps with kind, duration, needs, and where a thread may rest.
    """
    try:
        found = load_graph(graph)
        topology, phases = read_topology(found), read_phases(found)
    except PancakeError as exc:
        raise click.ClickException(str(exc)) from exc
    plan = compile_plan(topology, phases)
    if plan_file is not None:
        plan_file.write_text(json.dumps(plan.to_json(), indent=2) + "\n", encoding="utf-8")
    forecasts = _forecasts(topology, phases)
    facts = facts_of(topology)
    if output == "json":
        click.echo(json.dumps({**as_json(topology, facts, forecasts), "plan": plan.to_json()}, indent=2))
        return
    if output == "mermaid":
        click.echo(to_mermaid(topology, _declared_chances(topology, forecasts)), nl=False)
        return
    click.echo("\n".join(in_words(topology, facts, forecasts)))
    click.echo("\n" + "\n".join(plan_in_words(plan)))
    if len(topology.nodes) > _MAX_DRAWN:
        click.echo(f"\nNot drawn here, with over {_MAX_DRAWN} nodes; --format mermaid draws the graph.")
        return
    click.echo("\nAs Mermaid:\n" + to_mermaid(topology, _declared_chances(topology, forecasts)), nl=False)
    click.echo("\nThe plan as Mermaid:\n" + plan_mermaid(plan), nl=False)


def load_graph(spec: str) -> object:
    """Import what `module:attr` or `path.py:attr` names, and call it when it is a factory without arguments.

    Raises:
        ConfigError: if the text has another form, the file or attribute is missing, the code raises while it is
            imported or called, or the factory needs arguments.
    """
    where, separator, attribute = spec.rpartition(":")
    if not separator or not where or not attribute:
        raise ConfigError(f"cannot find a graph: got {spec!r}, {_ALLOWED}. Example: my_app.graphs:graph")
    module = _load_module(where)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = ", ".join(sorted(n for n in vars(module) if not n.startswith("_"))[:20]) or "nothing"
            raise ConfigError(f"cannot find a graph: {where} has no {attribute!r}. It defines: {names}.")
        found = getattr(found, part)
    if callable(found) and not hasattr(found, "invoke") and not hasattr(found, "compile"):
        return _call_factory(spec, found)
    return found


def _load_module(where: str) -> ModuleType:
    with _importable(Path.cwd()), _explained(where):
        if not where.endswith(".py"):
            return importlib.import_module(where)
        path = Path(where)
        if not path.is_file():
            raise ConfigError(f"cannot find a graph: there is no file {where}. Check the path; {_ALLOWED}.")
        module_spec = importlib.util.spec_from_file_location(f"_pancake_explain_{path.stem}", path)
        if module_spec is None or module_spec.loader is None:
            raise ConfigError(f"cannot find a graph: {where} cannot be loaded as Python; {_ALLOWED}.")
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_spec.name] = module
        with _importable(path.resolve().parent):
            try:
                module_spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[module_spec.name]
                raise
        return module


def _call_factory(spec: str, factory: Any) -> object:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        parameters = {}.values()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind in plain]
    if needed or inspect.iscoroutinefunction(factory) or inspect.isasyncgenfunction(factory):
        got = f"needs arguments ({', '.join(needed)})" if needed else "is asynchronous"
        raise ConfigError(
            f"cannot build a graph: the factory {spec} {got}. "
            "Name a plain function without required arguments that returns the compiled graph."
        )
    with _explained(spec):
        made: object = factory()
        return made


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let imports find `folder` for a while, as `python -m` does for the working directory."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn whatever the user's code raises into one error with file and line."""
    try:
        yield
    except PancakeError:
        raise
    except (Exception, SystemExit) as exc:
        raise ConfigError(
            f"cannot load {what}: it raised {type(exc).__name__}: {exc}{_place_of(exc)}. "
            "Mend that line, install what it imports, or run from the folder that makes it importable."
        ) from exc


def _place_of(exc: BaseException) -> str:
    """Return file and line of the last frame that is neither ours nor the import system's; nothing without one."""
    for frame in reversed(traceback.extract_tb(exc.__traceback__)):
        if frame.filename != __file__ and not frame.filename.startswith(("<frozen", importlib.__file__)):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


def _forecasts(topology: Topology, phases: GraphPhases) -> dict[NodeId, tuple[Candidate, ...]]:
    forecaster = TopologyPrior()
    forecaster.add_graph("explain", topology)
    forecaster.declare("explain", declared_for(topology, phases))
    sources = [START, *(node.id for node in topology.nodes if node.kind != "subgraph" or not topology.hops(node.id))]
    return {source: forecaster.candidates("explain", source) for source in sources}


def _declared_chances(
    topology: Topology, forecasts: dict[NodeId, tuple[Candidate, ...]]
) -> dict[tuple[str, str], float]:
    """Return chances for the declared edges that decide something; a fixed edge needs no label."""
    chances = {(source, c.node): c.p_next for source, found in forecasts.items() for c in found if c.steps == 1}
    decided = {(edge.source, edge.target) for edge in topology.edges if not edge.is_certain}
    return {pair: p_next for pair, p_next in chances.items() if pair in decided}
