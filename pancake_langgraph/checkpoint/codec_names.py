"""What LangGraph means when it names a class by module and `__name__` only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import cast


def classes_named(module: str, name: str) -> tuple[type, ...]:
    """Return the classes of a loaded module whose `__name__` this is, at its top or inside its other classes.

    Nothing is imported; without the module there are none.  Classes made inside functions cannot be found.
    """
    home = sys.modules.get(module)
    top = tuple(vars(home).values()) if home is not None else ()
    return tuple(kind for kind in _own_classes(top, module, set()) if kind.__name__ == name)


def _own_classes(values: tuple[object, ...], module: str, seen: set[int]) -> Iterator[type]:
    for value in values:
        # `isinstance` would ask the object what it is, and a lazy stand-in would import what it stands for.
        if not issubclass(type(value), type):
            continue
        kind = cast("type", value)
        if kind.__module__ == module and id(kind) not in seen:
            seen.add(id(kind))
            yield kind
            yield from _own_classes(tuple(vars(kind).values()), module, seen)
