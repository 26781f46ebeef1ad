"""What every store promises about single calls, over a file, memory, a server, a cluster."""

from __future__ import annotations

import itertools

import pytest

from pancake_langgraph._errors import ThreadDeleted
from pancake_langgraph.checkpoint.rows import Removal, Spot, ThreadContent
from pancake_langgraph.checkpoint.store import StaleNeed, Store
from tests.contract.store_kit import (
    NOTHING,
    THREAD_IDS,
    MakeStore,
    digest,
    filled,
    is_empty,
    listed,
    put,
    put_writes,
    row,
    write,
)

# -- round trips ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_comes_back_as_it_was_given(store: Store) -> None:
    for given in (
        row("1", None, body=b"\x00\xff", run_id="run"),
        row("2", "1", ns="a|b:c"),
        row("3", "", ns="\x00\x01", body=b""),
        row("4", "3", hidden=True),
    ):
        put(store, "t", given)
        assert store.get_checkpoint("t", *given.spot) == given


def test_a_missing_checkpoint_is_none(store: Store) -> None:
    assert store.get_checkpoint("t", "", None) is None
    assert store.get_checkpoint("t", "", "1") is None
    put(store, "t", row("1"))
    assert store.get_checkpoint("t", "", "2") is None
    assert store.get_checkpoint("t", "ns", None) is None
    assert store.get_checkpoint("u", "", None) is None


def test_the_same_spot_again_replaces_the_row(store: Store) -> None:
    put(store, "t", row("1", body=b"old"))
    put(store, "t", row("1", "0", body=b"new"))
    assert store.get_checkpoint("t", "", None) == row("1", "0", body=b"new")
    assert listed(store, "t") == ["1"]


@pytest.mark.parametrize("size", [0, 1, 100_000, 5_000_000])
def test_bodies_and_elements_of_any_size(store: Store, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    put(store, "t", row("1", body=data[:size]), {digest(1): data[:size]})
    put_writes(store, "t", write("1", "task", 0, body=data[:size]))
    assert store.get_checkpoint("t", "", "1") == row("1", body=data[:size])
    assert store.get_elements("t", [digest(1)]) == {digest(1): data[:size]}
    assert store.get_writes("t", Spot("", "1")) == (write("1", "task", 0, body=data[:size]),)


def test_what_is_stored_survives_closing(shared: MakeStore) -> None:
    first = shared()
    put(first, "t", row("1"), {digest(1): b"e"})
    put_writes(first, "t", write("1", "task", 0))
    first.close()
    first.close()
    second = shared()
    assert second.read_thread("t") == ThreadContent((row("1"),), (write("1", "task", 0),), {digest(1): b"e"})


def test_open_may_be_called_more_than_once(store: Store) -> None:
    store.open()
    store.open()
    put(store, "t", row("1"))
    store.open()
    assert listed(store, "t") == ["1"]


# -- thread ids -------------------------------------------------------------------------------------------------------


def test_no_thread_sees_another_whatever_its_id(store: Store) -> None:
    for number, thread_id in enumerate(THREAD_IDS):
        put(store, thread_id, row("1", body=b"%d" % number), {digest(number): b"%d" % number})
        put_writes(store, thread_id, write("1", "task", 0, body=b"%d" % number))
    assert sorted(store.threads()) == sorted(THREAD_IDS)
    for number, thread_id in enumerate(THREAD_IDS):
        expected = ThreadContent(
            (row("1", body=b"%d" % number),),
            (write("1", "task", 0, body=b"%d" % number),),
            {digest(number): b"%d" % number},
        )
        assert store.read_thread(thread_id) == expected
    for number, thread_id in enumerate(THREAD_IDS):
        store.delete_thread(thread_id, deletion_id="5")
        assert sorted(store.threads()) == sorted(THREAD_IDS[number + 1 :])


def test_namespaces_and_ids_may_hold_anything(store: Store) -> None:
    names = ["", "a", "a\x00", "a\x00b", "a\x01", "ab", "a|b:c", "ä", "😀", "n", "%", "'"]
    for ns, checkpoint_id in itertools.product(names, names[1:]):
        put(store, "t", row(checkpoint_id, ns=ns, body=repr((ns, checkpoint_id)).encode()))
    for ns in names:
        assert listed(store, "t", ns) == sorted(names[1:], reverse=True)
        latest = store.get_checkpoint("t", ns, None)
        assert latest is not None
        assert latest.spot == Spot(ns, max(names[1:]))
    for spot in itertools.product(names, names[1:]):
        found = store.get_checkpoint("t", *spot)
        assert found is not None
        assert found.body == repr(spot).encode()


# -- order ------------------------------------------------------------------------------------------------------------


def test_the_latest_is_the_greatest_id_however_they_arrive(store: Store) -> None:
    for checkpoint_id in ("2", "10", "3", "1", "29"):
        put(store, "t", row(checkpoint_id))
    latest = store.get_checkpoint("t", "", None)
    assert latest is not None
    assert latest.spot.checkpoint_id == "3"
    assert listed(store, "t", "") == ["3", "29", "2", "10", "1"]


def test_a_prefix_of_an_id_is_smaller(store: Store) -> None:
    for checkpoint_id in ("a", "aa", "a-", "a" * 36):
        put(store, "t", row(checkpoint_id))
    assert listed(store, "t") == ["a" * 36, "aa", "a-", "a"]
    assert listed(store, "t", before="aa") == ["a-", "a"]
    assert listed(store, "t", "", before="a-") == ["a"]


def test_the_root_is_not_all_namespaces(store: Store) -> None:
    for checkpoint_id, ns in (("1", ""), ("2", "sub"), ("3", ""), ("4", "sub|deep"), ("5", "su")):
        put(store, "t", row(checkpoint_id, ns=ns))
    assert listed(store, "t", "") == ["3", "1"]
    assert listed(store, "t", "sub") == ["2"]
    assert listed(store, "t", "su") == ["5"]
    assert listed(store, "t", "s") == []
    assert listed(store, "t", None) == ["5", "4", "3", "2", "1"]


def test_before_and_limit(store: Store) -> None:
    for number in range(25):
        put(store, "t", row(f"{number:02}", ns="" if number % 2 else "sub"))
    every = [f"{number:02}" for number in reversed(range(25))]
    assert listed(store, "t") == every
    assert listed(store, "t", limit=7) == every[:7]
    assert listed(store, "t", before="10") == every[15:]
    assert listed(store, "t", before="10", limit=3) == ["09", "08", "07"]
    assert listed(store, "t", "sub", before="10", limit=3) == ["08", "06", "04"]
    assert listed(store, "t", "", before="10", limit=1) == ["09"]
    assert listed(store, "t", before="00") == []
    assert listed(store, "t", before="zz", limit=1) == ["24"]
    assert listed(store, "t", before="095", limit=1) == ["09"]


def test_equal_ids_come_by_namespace_ascending_across_limits(store: Store) -> None:
    spaces = ["", "a", "a\x00", "ab", "b", "b|c", "ä"]
    for ns in reversed(spaces):
        put(store, "t", row("1", ns=ns))
        put(store, "t", row("0", ns=ns))
    for limit in (1, 3, 7, 9, 14):
        found = store.list_checkpoints("t", None, before_id=None, limit=limit)
        expected = [Spot(ns, checkpoint_id) for checkpoint_id in ("1", "0") for ns in spaces]
        assert [each.spot for each in found] == expected[:limit]
    assert listed(store, "t", None, before="1") == ["0"] * 7


# -- hidden rows ------------------------------------------------------------------------------------------------------


def test_a_hidden_row_is_found_by_its_id_only(store: Store) -> None:
    put(store, "t", row("1"))
    put(store, "t", row("2", "1", hidden=True))
    put(store, "t", row("3", "2", ns="sub", hidden=True))
    assert store.get_checkpoint("t", "", "2") == row("2", "1", hidden=True)
    assert store.get_checkpoint("t", "", None) == row("1")
    assert store.get_checkpoint("t", "sub", None) is None
    assert listed(store, "t") == listed(store, "t", "") == ["1"]
    assert {each.spot.checkpoint_id for each in store.read_thread("t").rows} == {"1", "2", "3"}


def test_a_row_may_become_hidden_and_visible_again(store: Store) -> None:
    for hidden in (False, True, False, True):
        put(store, "t", row("1", hidden=hidden))
        assert listed(store, "t") == ([] if hidden else ["1"])
        assert store.get_checkpoint("t", "", "1") == row("1", hidden=hidden)


# -- writes -----------------------------------------------------------------------------------------------------------


def test_writes_come_ordered_by_path_task_and_index(store: Store) -> None:
    given = [
        write("1", "b", 10, path="~a"),
        write("1", "b", 9, path="~a"),
        write("1", "z", 0, path=""),
        write("1", "a", 2, path="~b"),
        write("1", "a", -1, path="~b"),
        write("1", "c", -4, path="~a"),
        write("1", "\x00", 0, path="~a"),
    ]
    for each in given:
        put_writes(store, "t", each)
    expected = sorted(given, key=lambda each: (each.task_path, each.task_id, each.idx))
    assert list(store.get_writes("t", Spot("", "1"))) == expected


def test_writes_belong_to_one_checkpoint(store: Store) -> None:
    put_writes(store, "t", write("1", "t", 0), write("1", "t", 0, ns="sub"), write("10", "t", 0))
    put_writes(store, "t", write("1", "t", 0, ns="su"), write("1\x00", "t", 0))
    assert store.get_writes("t", Spot("", "1")) == (write("1", "t", 0),)
    assert store.get_writes("t", Spot("sub", "1")) == (write("1", "t", 0, ns="sub"),)
    assert store.get_writes("t", Spot("", "2")) == ()
    assert store.get_writes("u", Spot("", "1")) == ()


def test_ordinary_writes_stay_as_they_were_first_written(store: Store) -> None:
    put_writes(store, "t", write("1", "task", 0, body=b"first"))
    put_writes(store, "t", write("1", "task", 0, body=b"second", path="other"), write("1", "task", 1, body=b"new"))
    assert store.get_writes("t", Spot("", "1")) == (
        write("1", "task", 0, body=b"first"),
        write("1", "task", 1, body=b"new"),
    )


def test_special_writes_replace(store: Store) -> None:
    put_writes(store, "t", write("1", "task", -3, body=b"first"))
    put_writes(store, "t", write("1", "task", -3, body=b"second", path="p"))
    assert store.get_writes("t", Spot("", "1")) == (write("1", "task", -3, body=b"second", path="p"),)


def test_writes_may_come_before_their_checkpoint(store: Store) -> None:
    put_writes(store, "t", write("1", "task", 0), elements={digest(1): b"e"})
    put(store, "t", row("1"))
    assert list(store.threads()) == ["t"]
    assert store.get_writes("t", Spot("", "1")) == (write("1", "task", 0),)
    assert store.get_elements("t", [digest(1)]) == {digest(1): b"e"}


# -- elements ---------------------------------------------------------------------------------------------------------


def test_elements_that_exist_are_left_as_they_are(store: Store) -> None:
    put(store, "t", row("1"), {digest(1): b"first"})
    put(store, "t", row("2"), {digest(1): b"second", digest(2): b"two"})
    put_writes(store, "t", write("2", "task", 0), elements={digest(2): b"again", digest(3): b"three"})
    wanted = [digest(number) for number in range(5)]
    assert store.get_elements("t", wanted) == {digest(1): b"first", digest(2): b"two", digest(3): b"three"}


def test_elements_are_of_one_thread(store: Store) -> None:
    put(store, "t", row("1"), {digest(1): b"e"})
    assert store.get_elements("u", [digest(1)]) == {}
    assert store.get_elements("t", []) == {}


def test_thousands_of_elements_and_rows(store: Store) -> None:
    elements = {digest(number): b"%d" % number for number in range(3_000)}
    put(store, "t", row("0"), elements)
    assert store.get_elements("t", elements.keys()) == elements
    rows = tuple(row(f"{number:05}") for number in range(1_200))
    writes = tuple(write("00000", f"{number:05}", 0) for number in range(1_200))
    store.write_thread("big", ThreadContent(rows, writes, {}), expires_at_s=None)
    assert listed(store, "big", limit=10_000) == [each.spot.checkpoint_id for each in reversed(rows)]
    assert store.get_writes("big", Spot("", "00000")) == writes


def test_a_put_whose_need_is_gone_stores_nothing(store: Store) -> None:
    put(store, "t", row("1", ns="other"), {digest(1): b"one"})
    before = store.read_thread("t")
    with pytest.raises(StaleNeed):
        put(store, "t", row("2"), {digest(2): b"two"}, needs=Spot("", "1"))
    with pytest.raises(StaleNeed):
        put(store, "u", row("2"), {digest(2): b"two"}, needs=Spot("", "1"))
    assert store.read_thread("t") == before
    assert is_empty(store, "u")
    put(store, "t", row("2"), needs=Spot("other", "1"))
    assert store.get_checkpoint("t", "", "2") == row("2")


# -- copies -----------------------------------------------------------------------------------------------------------


def test_a_written_thread_equals_what_was_read(store: Store) -> None:
    filled(store)
    put(store, "u", row("99"), {digest(99): b"old"})
    put_writes(store, "u", write("99", "task", 0))
    content = store.read_thread("t")
    store.write_thread("u", content, expires_at_s=None)
    assert store.read_thread("u") == content
    assert store.read_thread("t") == content
    assert listed(store, "u") == ["3", "2"]
    assert store.get_writes("u", Spot("", "2")) == (write("2", "task", 0),)
    assert sorted(store.threads()) == ["t", "u"]
    assert sorted(store.threads_of_run("r")) == ["t", "u"]


def test_a_written_thread_is_not_deleted_any_more(store: Store) -> None:
    filled(store)
    content = store.read_thread("t")
    store.delete_thread("t", deletion_id="5")
    with pytest.raises(ThreadDeleted):
        put(store, "t", row("6", "3"))
    store.write_thread("t", content, expires_at_s=None)
    assert store.read_thread("t") == content
    put(store, "t", row("4", "2"))
    put_writes(store, "t", write("6", "task", 0))
    assert listed(store, "t") == ["4", "3", "2"]


def test_a_thread_overwritten_by_nothing_is_gone(store: Store) -> None:
    filled(store)
    store.write_thread("t", NOTHING, expires_at_s=None)
    assert is_empty(store, "t")
    put(store, "t", row("1"))
    assert listed(store, "t") == ["1"]


# -- which threads there are ------------------------------------------------------------------------------------------


def test_all_threads_come_once_each(store: Store) -> None:
    names = [f"thread-{number}" for number in range(1_200)]
    content = ThreadContent((row("1"),), (), {})
    for name in names:
        store.write_thread(name, content, expires_at_s=None)
    found = list(store.threads())
    assert sorted(found) == sorted(names)


def test_a_paused_walk_over_the_threads_blocks_nobody(shared: MakeStore) -> None:
    first, second = shared(), shared()
    put(first, "t", row("1"))
    walk = first.threads()
    assert next(walk) == "t"
    put(first, "t", row("2"))
    put(second, "t", row("3"))
    second.delete_thread("t", deletion_id="5")
    assert list(walk) == []


def test_threads_are_found_by_run(store: Store) -> None:
    put(store, "t", row("1", run_id="r"))
    put(store, "u", row("2", run_id="r"))
    put(store, "u", row("3", run_id="it's {b}* "))
    put(store, "v", row("4"))
    assert sorted(store.threads_of_run("r")) == ["t", "u"]
    assert sorted(store.threads_of_run("it's {b}* ")) == ["u"]
    assert list(store.threads_of_run("r*")) == []
    assert list(store.threads_of_run("")) == []


def test_a_run_is_found_after_other_runs_were_pruned(store: Store) -> None:
    put(store, "t", row("1", run_id="r"))
    put(store, "t", row("2", run_id="s"))
    store.rewrite_thread("t", lambda _: Removal(frozenset({Spot("", "1")}), frozenset(), frozenset()))
    assert list(store.threads_of_run("s")) == ["t"]
    put(store, "t", row("3", run_id="r"))
    assert list(store.threads_of_run("r")) == ["t"]
