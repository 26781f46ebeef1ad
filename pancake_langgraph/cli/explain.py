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
from typing import Any

import click

from pancake_langgraph._errors import ConfigError, PancakeError
from pancake_langgraph._types import Candidate, NodeId
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
from pancake_langgraph.topology.graph import START, Edge, Topology
from pancake_langgraph.topology.lint import LintNote, lint
from pancake_langgraph.topology.mermaid import to_mermaid

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
    if output == "json":
        click.echo(json.dumps({**_as_json(topology, forecasts), "plan": plan.to_json()}, indent=2))
    elif output == "mermaid":
        click.echo(to_mermaid(topology, _declared_chances(topology, forecasts)), nl=False)
    else:
        click.echo("\n".join(_in_words(topology, forecasts)))
        click.echo("\n" + "\n".join(plan_in_words(plan)))
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


def _in_words(topology: Topology, forecasts: dict[NodeId, tuple[Candidate, ...]]) -> list[str]:
    num_open = len(topology.unknown_sources)
    sizes = f"{len(topology.nodes)} nodes, {len(topology.edges)} declared edges, {num_open} with undeclared jumps"
    lines = [
        f"Graph {topology.name}: {sizes} (fingerprint {topology.fingerprint})",
        f"Starts with: {', '.join(topology.entry) or 'not declared'}",
    ]
    to_end = topology.steps_to("__end__")
    for node in topology.nodes:
        traits: list[str] = [node.kind if node.kind != "unknown" else "kind not known"]
        traits += ["deferred: waits until all others are done"] if node.deferred else []
        lines.append(f"\n{node.id} ({', '.join(traits)})")
        lines += [f"  {_edge_in_words(edge)}" for edge in topology.edges_from(node.id)]
        if node.id in topology.unknown_sources:
            lines.append("  may jump elsewhere: its targets are not declared, they are learnt from runs")
        if node.id in to_end:
            lines.append(f"  at least {to_end[node.id]} step(s) before the end")
        lines += [
            f"  expect {c.node} in {c.steps} step(s), p={c.p_next:.2f} ({c.reason})" for c in forecasts.get(node.id, ())
        ]
    notes = lint(topology)
    lines += ["", "Notes:" if notes else "Notes: none"]
    lines += [f"  {note.node} {note.text} [{note.code}]" for note in notes]
    return lines


def _edge_in_words(edge: Edge) -> str:
    level, _, name = edge.target.rpartition("|")
    target = edge.target if name != "__end__" else f"the end of {level}" if level else "the end"
    label = f" ({edge.label})" if edge.label else ""
    return {
        "plain": f"then always {target}" if edge.is_certain else f"then {target}, unless control is handed over",
        "join": f"then {target}, once all its sources are done",
        "send": f"may fan out to {target}{label}",
        "conditional": f"may go to {target}{label}",
        "command": f"may jump to {target}{label}",
        "handoff": f"hands over to {target} by tool {edge.label}",
        "unknown": f"perhaps to {target}: the name stands in the code that decides",
    }[edge.kind]


def _as_json(topology: Topology, forecasts: dict[NodeId, tuple[Candidate, ...]]) -> dict[str, Any]:
    to_end = topology.steps_to("__end__")
    return {
        "name": topology.name,
        "fingerprint": topology.fingerprint,
        "entry": list(topology.entry),
        "nodes": [
            {
                "id": node.id,
                "kind": node.kind,
                "deferred": node.deferred,
                "tools": list(node.tools),
                "handoffs": {handoff.tool: handoff.target for handoff in node.handoffs},
                "steps_to_end": to_end.get(node.id),
            }
            for node in topology.nodes
        ],
        "edges": [
            {"source": e.source, "target": e.target, "kind": e.kind, "label": e.label, "certain": e.is_certain}
            for e in topology.edges
        ],
        "unknown_sources": sorted(topology.unknown_sources),
        "forecast": {
            source: [
                {"node": c.node, "p_next": round(c.p_next, 4), "steps": c.steps, "reason": c.reason} for c in found
            ]
            for source, found in forecasts.items()
        },
        "notes": [_note_as_json(note) for note in lint(topology)],
    }


def _note_as_json(note: LintNote) -> dict[str, str]:
    return {"code": note.code, "node": note.node, "text": note.text}
