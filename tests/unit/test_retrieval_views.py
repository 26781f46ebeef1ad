"""What views cover of the namespaces of a segment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pancake_langgraph.retrieval.base import Namespace, View
from pancake_langgraph.retrieval.checks import checked_view
from pancake_langgraph.retrieval.segment_view import covered_by

NAMESPACES = st.lists(st.sampled_from(["a", "ab", "a\x00", "b", "é", "\U0010ffff"]), max_size=3).map(tuple)


@given(st.sets(NAMESPACES, max_size=12), st.lists(NAMESPACES, max_size=3))
def test_sorted_namespaces_are_covered_as_each_alone_is(found: set[Namespace], prefixes: list[Namespace]) -> None:
    view = checked_view(View(tuple(prefixes)))
    namespaces = sorted(found)
    assert covered_by(view, namespaces).tolist() == [view.covers(one) for one in namespaces]
