"""A compiled plan for people: in words and as a Mermaid chart."""

from __future__ import annotations

from pancake_langgraph.plan.compiled import CompiledPlan, Expected, Step, Suspension

_SHAPES = {"reasoning": ("{{", "}}"), "generation": ("([", "])"), "io": ("[/", "/]")}
_PAUSES = {
    ("before", "join"): "before it, while other branches work",
    ("before", "interrupt"): "before it, at an interrupt",
    ("during", "tool"): "while it waits for its tool",
    ("during", "interrupt"): "inside it, at an interrupt",
    ("after", "interrupt"): "after it, at an interrupt",
}


def plan_in_words(plan: CompiledPlan) -> list[str]:
    """Return lines of text: each step with kind, duration, what it needs, and where its thread may rest."""
    lines = [f"Plan: {_count(len(plan.steps), 'step')}, {_count(len(plan.loops), 'way')} back"]
    for number, step in enumerate(plan.steps, 1):
        lines.append(f"\n{number}. {step.id}: {step.kind} ({step.kind_source}), {seconds_in_words(step.seconds)}")
        lines += [f"   {line}" for line in _about(step)]
    if plan.loops:
        lines += ["", "Ways back:", *(f"  {loop.source} may lead back to {loop.target}" for loop in plan.loops)]
    if plan.notes:
        lines += ["", "Plan notes:", *(f"  {note}" for note in plan.notes)]
    return lines


def plan_mermaid(plan: CompiledPlan) -> str:
    """Return Mermaid text: shapes tell the kind, thick arrows wait for all their sources, dotted ones are hints.

    Dotted arrows lead back, or to what was declared in `may_need` where no other arrow leads there.
    """
    ids = {step.id: f"s{index}" for index, step in enumerate(plan.steps)}
    lines = ["flowchart TD"]
    for step in plan.steps:
        opening, closing = _SHAPES.get(step.kind, ("[", "]"))
        caption = f"{_escape(step.id)}<br/>{step.kind}, {seconds_in_words(step.seconds)}"
        lines.append(f'  {ids[step.id]}{opening}"{caption}"{closing}')
    drawn = {(source, step.id) for step in plan.steps for source in step.needs}
    for step in plan.steps:
        arrow = "==>" if step.needs_all and len(step.needs) > 1 else "-->"
        lines += [f"  {ids[source]} {arrow} {ids[step.id]}" for source in step.needs]
    lines += [f'  {ids[loop.source]} -.->|"again"| {ids[loop.target]}' for loop in plan.loops]
    drawn |= {(loop.source, loop.target) for loop in plan.loops}
    for step in plan.steps:
        wanted = [name for name in step.may_need if name in ids and (step.id, name) not in drawn]
        lines += [f'  {ids[step.id]} -.->|"may need"| {ids[name]}' for name in wanted]
    return "\n".join(lines) + "\n"


def seconds_in_words(expected: Expected) -> str:
    """Return a duration with its source, such as "2.0 s (declared)"."""
    if expected.p50_s is None:
        return "duration not known"
    if expected.source != "learnt":
        return f"{_number(expected.p50_s)} s ({expected.source})"
    low, high = _number(expected.p10_s or 0.0), _number(expected.p90_s or 0.0)
    return f"{_number(expected.p50_s)} s (learnt from {_count(expected.num_samples, 'run')}, {low} to {high})"


def _about(step: Step) -> list[str]:
    lines: list[str] = []
    if step.needs:
        how = "" if len(step.needs) == 1 else "all of " if step.needs_all else "any of "
        first = "at the start, or " if step.after_steps == 1 else ""
        lines.append(f"{first}after {how}{', '.join(step.needs)}")
    elif step.after_steps == 1:
        lines.append("at the start")
    else:
        lines.append("no declared way leads here")
    if step.starts_s is not None and step.needs:
        lines.append(f"usually starts {_number(step.starts_s)} s after the start")
    lines += ["several may run at once"] if step.repeats else []
    lines += [f"tool {t.name}: {t.kind}, {seconds_in_words(t.seconds)}" for t in step.tools]
    lines += [f"may need {', '.join(step.may_need)} (declared)"] if step.may_need else []
    lines += [] if step.blocking else [f"not waited for ({step.blocking_source})"]
    lines += ["its prompt is declared"] if step.has_prompt else []
    lines += [f"may rest {_pause(point)}" for point in step.suspensions]
    lines += ["may jump where nobody declared"] if step.jumps else []
    lines += ["the run may end with it"] if step.ends else []
    return lines


def _pause(point: Suspension) -> str:
    return _PAUSES.get((point.when, point.reason), f"{point.when} it ({point.reason})")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _number(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")
