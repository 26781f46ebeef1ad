"""Drawing a topology as a Mermaid flow chart."""

from __future__ import annotations

from collections.abc import Mapping

from pancake_langgraph.topology.graph import END, START, Edge, NodeInfo, OpenReason, Topology

_ARROWS = {"plain": "-->", "join": "==>", "unknown": "-.->"}
#: Words on the arrow to the question mark.
_OPEN: Mapping[OpenReason, str] = {
    "branch": "no path map",
    "command": "undeclared command",
    "tool": "a tool's command",
    "leaves": "command to a graph around it",
    "handler": "error handler",
    "functional": "functional API",
    "start": "undeclared start",
    "unread": "not read to its end",
}
_MAX_TOOLS = 4


def to_mermaid(topology: Topology, probabilities: Mapping[tuple[str, str], float] | None = None) -> str:
    """Return Mermaid text, one box per node and sub-graphs as nested boxes.

    `probabilities` maps (source, target) to a value in [0, 1] and is written on the edges it has.  Solid arrows always
    fire, thick ones wait for all their sources, dotted ones are decided at run time.  A node whose jumps are not all
    declared points to a question mark.
    """
    known = probabilities or {}
    lines = ["flowchart TD"]
    ids: dict[str, str] = {}
    _draw_level(topology, "", "  ", lines, ids)
    lines += [f"  {_name(e.source, ids)} {_arrow(e, known)} {_name(e.target, ids)}" for e in topology.edges]
    for index, source in enumerate(sorted(topology.unknown_sources)):
        reasons = ", ".join(_OPEN[reason] for reason in topology.open_reasons.get(source, ()))
        arrow = f'-.->|"{reasons}"|' if reasons else "-.->"
        lines.append(f'  {_name(source, ids)} {arrow} unknown{index}{{"?"}}')
    looping = [ids[node] for members in topology.loops for node in sorted(members) if node in ids]
    if looping:
        lines += ["  classDef cycle stroke-width:3px", f"  class {','.join(looping)} cycle"]
    return "\n".join(_collect_missing(topology, ids, lines)) + "\n"


def _draw_level(topology: Topology, prefix: str, indent: str, lines: list[str], ids: dict[str, str]) -> None:
    for node_id, shape in ((f"{prefix}{START}", '(["start"])'), (f"{prefix}{END}", '(["end"])')):
        used = any(node_id in (edge.source, edge.target) for edge in topology.edges)
        if used or node_id in topology.unknown_sources:
            lines.append(f"{indent}{_name(node_id, ids)}{shape}")
    for node in topology.nodes:
        if not node.id.startswith(prefix) or "|" in node.id[len(prefix) :]:
            continue
        if any(other.id.startswith(f"{node.id}|") for other in topology.nodes):
            caption = _escape(node.id) if node.kind == "subgraph" else _caption(node, prefix)
            lines.append(f'{indent}subgraph {_name(node.id, ids)}["{caption}"]')
            _draw_level(topology, f"{node.id}|", indent + "  ", lines, ids)
            lines.append(f"{indent}end")
        else:
            lines.append(f'{indent}{_name(node.id, ids)}["{_caption(node, prefix)}"]')


def _collect_missing(topology: Topology, ids: dict[str, str], lines: list[str]) -> list[str]:
    """Name targets that edges mention but the graph does not declare, so that they are readable."""
    declared = {node.id for node in topology.nodes}
    missing = [node_id for node_id in ids if node_id not in declared and not node_id.endswith((START, END))]
    return [lines[0], *(f'  {ids[node_id]}["{_escape(node_id)} (not declared)"]' for node_id in missing), *lines[1:]]


def _caption(node: NodeInfo, prefix: str) -> str:
    notes: list[str] = [node.kind] if node.kind not in ("plain", "unknown") else []
    notes += [call for call in node.calls if call not in (node.kind, "graph")]
    notes += ["deferred"] if node.deferred else []
    notes += [f"may stop {' and '.join(node.stops)}"] if node.stops else []
    lines = [_escape(node.id[len(prefix) :]), ", ".join(notes), _escape(", ".join(node.tools[:_MAX_TOOLS]))]
    if len(node.tools) > _MAX_TOOLS:
        lines[-1] += f" and {len(node.tools) - _MAX_TOOLS} more"
    return "<br/>".join(line for line in lines if line)


def _arrow(edge: Edge, probabilities: Mapping[tuple[str, str], float]) -> str:
    arrow = _ARROWS.get(edge.kind, "-.->") if edge.is_certain or edge.kind == "unknown" else "-.->"
    parts = ["sends"] if edge.kind == "send" else []
    parts += [edge.label] if edge.label else []
    p_next = probabilities.get((edge.source, edge.target))
    if p_next is not None:
        parts.append(f"p={p_next:.2f}")
    return f'{arrow}|"{_escape(" ".join(parts))}"|' if parts else arrow


def _name(node_id: str, ids: dict[str, str]) -> str:
    """Return a Mermaid-safe identifier; names are free text, identifiers are not."""
    return ids.setdefault(node_id, f"n{len(ids)}")


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")
