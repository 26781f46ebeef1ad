"""Checks of a bench result's JSON object; each returns what is wrong, in words, with its place."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pancake_langgraph._types import Outcome
from pancake_langgraph.bench.metrics import METRICS, PERCENTILES

_RATIO_KEY = re.compile(r"(?P<metric>\w+)\.(?P<percentile>\w+) (?P<first>[^/ ]+)/(?P<second>[^/ ]+)")
_ARM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


def check_document(
    document: object, *, required: Sequence[str], optional: Sequence[str], machine_keys: Sequence[str]
) -> list[str]:
    """Return every problem of `document`, empty when there is none."""
    if not isinstance(document, Mapping):
        return [f"top level: got {type(document).__name__}, allowed: an object"]
    problems = [f"{key}: missing" for key in required if key not in document]
    problems += [
        f"{key}: not a known key, allowed: {', '.join([*required, *optional])}"
        for key in document
        if key not in required and key not in optional
    ]
    if problems:
        return problems
    return [
        *_texts(document),
        *_machine(document["machine"], machine_keys),
        *_arms(document["arms"]),
        *_ratios(document["ratios"], document["arms"]),
        *_outcomes(document["outcomes"]),
        *_free_form(document),
    ]


def _texts(document: Mapping[str, Any]) -> Iterator[str]:
    for key in ("workload", "version"):
        if not isinstance(document[key], str) or not document[key]:
            yield f"{key}: got {document[key]!r}, allowed: a text that is not empty"
    if not _is_iso_date(document["date"]):
        yield f"date: got {document['date']!r}, allowed: ISO 8601 such as 2025-01-31 or 2025-01-31T12:00:00+00:00"
    if not _is_count(document["repeats"]) or document["repeats"] < 1:
        yield f"repeats: got {document['repeats']!r}, allowed: a whole number of at least 1"
    notes = document["notes"]
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        yield f"notes: got {type(notes).__name__}, allowed: a list of texts"


def _machine(machine: object, keys: Sequence[str]) -> Iterator[str]:
    if not isinstance(machine, Mapping):
        yield f"machine: got {type(machine).__name__}, allowed: an object"
        return
    if set(machine) != set(keys):
        yield f"machine: got the keys {sorted(machine)}, allowed: {sorted(keys)}"
        return
    for key in ("cpu", "system", "python"):
        if not isinstance(machine[key], str):
            yield f"machine.{key}: got {machine[key]!r}, allowed: a text"
    if not _is_count(machine["cores"]) or machine["cores"] < 1:
        yield f"machine.cores: got {machine['cores']!r}, allowed: a whole number of at least 1"
    if not _is_amount(machine["memory_gib"]):
        yield f"machine.memory_gib: got {machine['memory_gib']!r}, allowed: a finite number of at least 0"
    if machine["accelerator"] is not None and not isinstance(machine["accelerator"], str):
        yield f"machine.accelerator: got {machine['accelerator']!r}, allowed: a text or null"
    packages = machine["packages"]
    if not isinstance(packages, Mapping) or not all(isinstance(version, str) for version in packages.values()):
        yield "machine.packages: allowed: an object from package name to version"


def _arms(arms: object) -> Iterator[str]:
    if not isinstance(arms, Mapping) or not arms:
        yield f"arms: got {arms!r}, allowed: an object with at least one arm"
        return
    for arm, metrics in arms.items():
        if not _ARM_NAME.fullmatch(arm):
            yield f"arms.{arm}: allowed in an arm's name: letters, digits and _ . + -"
        if not isinstance(metrics, Mapping):
            yield f"arms.{arm}: got {type(metrics).__name__}, allowed: an object from metric to figures"
            continue
        for name, stats in metrics.items():
            if name not in METRICS:
                yield f"arms.{arm}.{name}: not a known metric, allowed: {', '.join(METRICS)}"
            yield from _figures(f"arms.{arm}.{name}", stats)


def _figures(place: str, stats: object) -> Iterator[str]:
    if not isinstance(stats, Mapping) or set(stats) != {*PERCENTILES, "n"}:
        yield f"{place}: got {stats!r}, allowed: an object with p50, p90, p99 and n"
        return
    values = [stats[name] for name in PERCENTILES]
    if not all(_is_amount(value) for value in values):
        yield f"{place}: got {values}, allowed: finite numbers of at least 0"
    elif values != sorted(values):
        yield f"{place}: got p50, p90, p99 = {values}, allowed: in ascending order"
    if not _is_count(stats["n"]) or stats["n"] < 1:
        yield f"{place}.n: got {stats['n']!r}, allowed: a whole number of at least 1"


def _ratios(ratios: object, arms: object) -> Iterator[str]:
    if not isinstance(ratios, Mapping):
        yield f"ratios: got {type(ratios).__name__}, allowed: an object"
        return
    known = arms if isinstance(arms, Mapping) else {}
    for key, ratio in ratios.items():
        match = _RATIO_KEY.fullmatch(key)
        if match is None or match["metric"] not in METRICS or match["percentile"] not in PERCENTILES:
            yield f"ratios.{key}: allowed: `metric.percentile first/second`, for example `ttft_s.p50 plain/pancake`"
        elif match["first"] not in known or match["second"] not in known:
            yield f"ratios.{key}: names an arm that is not there, allowed: {', '.join(known)}"
        if not isinstance(ratio, Mapping) or set(ratio) != {"median", "min", "max"}:
            yield f"ratios.{key}: got {ratio!r}, allowed: an object with median, min and max"
        elif not all(_is_amount(value) for value in ratio.values()):
            yield f"ratios.{key}: got {list(ratio.values())}, allowed: finite numbers of at least 0"
        elif not ratio["min"] <= ratio["median"] <= ratio["max"]:
            yield f"ratios.{key}: allowed: min <= median <= max"


def _outcomes(outcomes: object) -> Iterator[str]:
    if not isinstance(outcomes, Mapping):
        yield f"outcomes: got {type(outcomes).__name__}, allowed: an object from outcome to count"
        return
    for name, count in outcomes.items():
        if name not in list(Outcome):
            yield f"outcomes.{name}: not a known outcome, allowed: {', '.join(Outcome)}"
        if not _is_count(count):
            yield f"outcomes.{name}: got {count!r}, allowed: a whole number of at least 0"


def _free_form(document: Mapping[str, Any]) -> Iterator[str]:
    if "summary" in document and not isinstance(document["summary"], Mapping):
        yield f"summary: got {type(document['summary']).__name__}, allowed: an object"
    if "sweep" in document:
        sweep = document["sweep"]
        if not isinstance(sweep, list) or not all(isinstance(point, Mapping) for point in sweep):
            yield f"sweep: got {type(sweep).__name__}, allowed: a list of objects"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_iso_date(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        datetime.datetime.fromisoformat(value)
    except ValueError:
        return False
    return True
