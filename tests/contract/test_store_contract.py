"""What every store promises (`pancake_langgraph.checkpoint.store.Store`), over a file, memory, a server, a cluster."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from pancake_langgraph._errors import ThreadDeleted
from pancake_langgraph.checkpoint.redis_link import CONNECT_COMMANDS
from pancake_langgraph.checkpoint.redis_store import COMMANDS, RedisStore
from pancake_langgraph.checkpoint.rows import (
    CheckpointRow,
    PutCheckpoint,
    PutWrites,
    Removal,
    Spot,
    ThreadContent,
    WriteRow,
)
from pancake_langgraph.checkpoint.sqlite_store import SqliteStore
from pancake_langgraph.checkpoint.store import StaleNeed, Store

NOTHING = ThreadContent((), (), {})
NO_REMOVAL = Removal(frozenset(), frozenset(), frozenset())
THREAD_IDS = [
    "",
    "a",
    "a*",
    "a:b",
    "a?",
    "a[b]",
    "{a}",
    "{a}:c",
    "}{",
    "a%7B",
    "a b",
    "ä€😀",
    'O\'Neil "quoted" \\',
    "line\nbreak\ttab\x01",
    "x" * 2_000,
    "7",
]
KINDS = ["sqlite_file", "sqlite_memory", "redis", "redis_restricted", "redis_cluster"]

MakeStore = Callable[[], Store]


def restricted_url(server: object) -> str:
    """Add a user who may call what the store needs and nothing else; return a URL with its name."""
    with server.client() as client:
        rights = [f"+{command}" for command in (*COMMANDS, *CONNECT_COMMANDS)]
        client.execute_command("ACL", "SETUSER", "app", "reset", "on", ">secret", "~pancake:*", *rights)
    return server.url.replace("unix://", "unix://app@") + "?password=secret"


@contextmanager
def opened(kind: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[MakeStore]:
    """Yield what opens stores on one empty database (`:memory:` gives each store its own); close them at the end."""
    if kind.startswith("sqlite"):
        path = ":memory:" if kind == "sqlite_memory" else str(folder / "threads.db")
        build: MakeStore = partial(SqliteStore, path)
    else:
        server = request.getfixturevalue("valkey_cluster" if kind == "redis_cluster" else "valkey")
        server.reset()
        url = restricted_url(server) if kind == "redis_restricted" else server.url
        build = partial(RedisStore, url, timeout_s=60.0)
    with ExitStack() as stack:

        def make() -> Store:
            store = build()
            stack.callback(store.close)
            return store

        yield make


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with opened(request.param, request, tmp_path) as make:
        yield make()


@pytest.fixture(params=[kind for kind in KINDS if kind != "sqlite_memory"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeStore]:
    """Makes stores that all see the same threads."""
    with opened(request.param, request, tmp_path) as make:
        yield make


def digest(number: int) -> bytes:
    return number.to_bytes(20, "big")


def row(
    checkpoint_id: str,
    parent_id: str | None = None,
    *,
    ns: str = "",
    body: bytes = b"body",
    run_id: str = "",
    hidden: bool = False,
) -> CheckpointRow:
    return CheckpointRow(Spot(ns, checkpoint_id), parent_id, run_id, body, is_hidden=hidden)


def write(
    checkpoint_id: str, task_id: str, idx: int, *, path: str = "", body: bytes = b"write", ns: str = ""
) -> WriteRow:
    return WriteRow(Spot(ns, checkpoint_id), path, task_id, idx, "channel", body)


def put(
    store: Store,
    thread_id: str,
    what: CheckpointRow,
    elements: dict[bytes, bytes] | None = None,
    *,
    needs: Spot | None = None,
    expires_at_s: float | None = None,
) -> None:
    store.put_checkpoint(PutCheckpoint(thread_id, what, elements or {}, needs), expires_at_s=expires_at_s)


def put_writes(
    store: Store,
    thread_id: str,
    *rows: WriteRow,
    elements: dict[bytes, bytes] | None = None,
    expires: float | None = None,
) -> None:
    store.put_writes(PutWrites(thread_id, rows, elements or {}), expires_at_s=expires)


def listed(
    store: Store, thread_id: str, ns: str | None = None, *, before: str | None = None, limit: int = 100
) -> list[str]:
    return [each.spot.checkpoint_id for each in store.list_checkpoints(thread_id, ns, before_id=before, limit=limit)]


def is_empty(store: Store, thread_id: str) -> bool:
    return store.read_thread(thread_id) == NOTHING and thread_id not in list(store.threads())


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
    assert list(store.threads()) == ["t"]
    put(store, "t", row("1"))
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


# -- deletion ---------------------------------------------------------------------------------------------------------


def filled(store: Store, thread_id: str = "t") -> None:
    """A thread with the checkpoints 1 to 3, one of them hidden, writes and elements."""
    put(store, thread_id, row("1", hidden=True), {digest(1): b"one"})
    put(store, thread_id, row("2", "1", run_id="r"), {digest(2): b"two"})
    put(store, thread_id, row("3", "2", ns="sub", run_id="s"))
    put_writes(store, thread_id, write("2", "task", 0), write("3", "task", -1), elements={digest(3): b"three"})


def test_delete_leaves_nothing_and_touches_no_other_thread(store: Store) -> None:
    filled(store)
    filled(store, "u")
    before = store.read_thread("u")
    store.delete_thread("t", deletion_id="5")
    assert is_empty(store, "t")
    assert store.get_checkpoint("t", "", None) is None
    assert store.get_checkpoint("t", "", "2") is None
    assert store.get_writes("t", Spot("", "2")) == ()
    assert store.get_elements("t", [digest(1)]) == {}
    assert listed(store, "t") == []
    assert store.read_thread("u") == before


@pytest.mark.parametrize(
    ("late", "why"),
    [
        (row("4"), "older than the deletion"),
        (row("5"), "equal to the deletion"),
        (row("4", "3"), "older, and its parent is gone"),
        (row("6", "3"), "its parent is gone"),
        (row("6", "2", ns="sub"), "its parent is in another namespace, and gone"),
    ],
)
def test_a_late_put_is_refused_and_stores_nothing(store: Store, late: CheckpointRow, why: str) -> None:
    filled(store)
    store.delete_thread("t", deletion_id="5")
    with pytest.raises(ThreadDeleted, match="'t' was deleted"):
        put(store, "t", late, {digest(9): b"late"})
    assert is_empty(store, "t"), why
    with pytest.raises(ThreadDeleted):  # whatever else holds: its id is dead
        put_writes(store, "t", write(late.spot.checkpoint_id, "task", 0, ns=late.spot.checkpoint_ns))
    assert is_empty(store, "t"), why


def test_deleted_goes_before_a_missing_need(store: Store) -> None:
    filled(store)
    store.delete_thread("t", deletion_id="5")
    with pytest.raises(ThreadDeleted):
        put(store, "t", row("6", "3"), needs=Spot("", "3"))


def test_a_thread_that_never_was_can_be_deleted_too(store: Store) -> None:
    store.delete_thread("t", deletion_id="5")
    assert is_empty(store, "t")
    with pytest.raises(ThreadDeleted):
        put(store, "t", row("4"))


def test_a_new_run_may_use_the_id_again(store: Store) -> None:
    filled(store)
    store.delete_thread("t", deletion_id="5")
    put(store, "t", row("6"), {digest(6): b"six"})
    put(store, "t", row("7", "6"), needs=Spot("", "6"))
    put_writes(store, "t", write("7", "task", 0))
    assert listed(store, "t") == ["7", "6"]
    assert list(store.threads()) == ["t"]
    assert store.get_elements("t", [digest(1), digest(6)]) == {digest(6): b"six"}
    with pytest.raises(ThreadDeleted):
        put(store, "t", row("8", "3"))
    with pytest.raises(ThreadDeleted):
        put(store, "t", row("4"))
    assert listed(store, "t") == ["7", "6"]


def test_late_writes_are_refused_by_the_age_of_their_checkpoint(store: Store) -> None:
    filled(store)
    store.delete_thread("t", deletion_id="5")
    for checkpoint_id in ("2", "4", "5"):
        with pytest.raises(ThreadDeleted, match="'t' was deleted"):
            put_writes(store, "t", write(checkpoint_id, "task", 0), elements={digest(9): b"late"})
    with pytest.raises(ThreadDeleted):  # one late row spoils all
        put_writes(store, "t", write("6", "task", 0), write("4", "task", 0))
    assert is_empty(store, "t")
    put_writes(store, "t", write("6", "task", 0))
    assert store.get_writes("t", Spot("", "6")) == (write("6", "task", 0),)


def test_writes_to_a_dead_id_are_taken_once_it_exists(store: Store) -> None:
    store.delete_thread("t", deletion_id="5")
    with pytest.raises(ThreadDeleted):
        put(store, "t", row("6", "3"))
    put(store, "t", row("6"))
    put_writes(store, "t", write("6", "task", 0))
    assert store.get_writes("t", Spot("", "6")) == (write("6", "task", 0),)


def test_writes_that_came_before_a_refused_put_go_with_it(store: Store) -> None:
    filled(store)
    store.delete_thread("t", deletion_id="5")
    put_writes(store, "t", write("6", "task", 0), write("6", "task", -1))
    with pytest.raises(ThreadDeleted):
        put(store, "t", row("6", "3"))
    assert store.get_writes("t", Spot("", "6")) == ()
    assert list(store.threads()) == []


def test_deleting_again_moves_the_mark(store: Store) -> None:
    store.delete_thread("t", deletion_id="5")
    put(store, "t", row("6"))
    store.delete_thread("t", deletion_id="8")
    with pytest.raises(ThreadDeleted):
        put(store, "t", row("7"))
    put(store, "t", row("9"))
    assert listed(store, "t") == ["9"]


def test_deletion_holds_for_other_stores_too(shared: MakeStore) -> None:
    first, second = shared(), shared()
    filled(first)
    put(second, "t", row("3", "2"))
    first.delete_thread("t", deletion_id="5")
    with pytest.raises(ThreadDeleted):
        put(second, "t", row("6", "3"), needs=Spot("", "3"))
    with pytest.raises(ThreadDeleted):
        put_writes(second, "t", write("3", "task", 0))
    assert is_empty(first, "t")


# -- rewriting --------------------------------------------------------------------------------------------------------


def test_a_rewrite_sees_everything_and_takes_out_what_is_decided(store: Store) -> None:
    filled(store)
    before = store.read_thread("t")
    seen: list[ThreadContent] = []

    def decide(content: ThreadContent) -> Removal:
        seen.append(content)
        return Removal(frozenset({Spot("", "1")}), frozenset({Spot("", "2")}), frozenset({digest(1), digest(9)}))

    store.rewrite_thread("t", decide)
    assert seen == [before]
    assert len(before.rows) == 3
    assert len(before.writes) == 2
    after = store.read_thread("t")
    assert set(after.rows) == {row("2", "1", run_id="r", hidden=True), row("3", "2", ns="sub", run_id="s")}
    assert after.elements == {digest(2): b"two", digest(3): b"three"}
    assert after.writes == before.writes
    assert listed(store, "t") == ["3"]
    assert store.get_checkpoint("t", "", None) is None
    assert store.get_checkpoint("t", "", "2") == row("2", "1", run_id="r", hidden=True)


def test_writes_of_removed_checkpoints_go_with_them(store: Store) -> None:
    put(store, "t", row("1"))
    put(store, "t", row("2"))
    put_writes(store, "t", write("1", "task", 0), write("2", "task", 0), write("1", "task", 0, ns="sub"))
    store.rewrite_thread("t", lambda _: Removal(frozenset({Spot("", "1")}), frozenset(), frozenset()))
    assert store.get_writes("t", Spot("", "1")) == ()
    assert store.get_writes("t", Spot("", "2")) == (write("2", "task", 0),)
    assert store.get_writes("t", Spot("sub", "1")) == (write("1", "task", 0, ns="sub"),)


def test_a_put_leans_on_nothing_that_a_rewrite_took(store: Store) -> None:
    filled(store)
    store.rewrite_thread("t", lambda _: Removal(frozenset({Spot("", "2")}), frozenset(), frozenset({digest(2)})))
    with pytest.raises(StaleNeed):
        put(store, "t", row("4", "2"), needs=Spot("", "2"))
    put(store, "t", row("4", "2"), {digest(2): b"two"})  # the thread was not deleted: a gone parent is all right


def test_where_nothing_is_left_the_thread_is_as_if_it_had_never_been(store: Store) -> None:
    filled(store)
    spots = frozenset({Spot("", "1"), Spot("", "2"), Spot("sub", "3"), Spot("", "3")})
    store.rewrite_thread("t", lambda content: Removal(spots, frozenset(), frozenset(content.elements)))
    assert is_empty(store, "t")
    put(store, "t", row("0", "nowhere"))
    assert listed(store, "t") == ["0"]


def test_a_rewrite_that_decides_nothing_changes_nothing(store: Store) -> None:
    filled(store)
    before = store.read_thread("t")
    store.rewrite_thread("t", lambda _: NO_REMOVAL)
    assert store.read_thread("t") == before
    store.rewrite_thread("nobody", lambda _: NO_REMOVAL)
    assert is_empty(store, "nobody")


def test_an_error_while_deciding_changes_nothing(store: Store) -> None:
    filled(store)
    before = store.read_thread("t")

    def fail(_: ThreadContent) -> Removal:
        raise LookupError("no decision")

    with pytest.raises(LookupError, match="no decision"):
        store.rewrite_thread("t", fail)
    assert store.read_thread("t") == before
    put(store, "t", row("9"))


def test_a_rewrite_does_not_lift_a_deletion(store: Store) -> None:
    filled(store)
    store.delete_thread("t", deletion_id="5")
    put(store, "t", row("6"))
    put(store, "t", row("7"))
    store.rewrite_thread("t", lambda _: Removal(frozenset({Spot("", "6")}), frozenset(), frozenset()))
    with pytest.raises(ThreadDeleted):
        put(store, "t", row("4"))
    assert listed(store, "t") == ["7"]


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


# -- expiry -----------------------------------------------------------------------------------------------------------


def gone_at_once(store: Store, thread_id: str) -> None:
    assert is_empty(store, thread_id)
    assert store.get_checkpoint(thread_id, "", None) is None
    assert store.get_elements(thread_id, [digest(1), digest(2)]) == {}
    assert store.get_writes(thread_id, Spot("", "2")) == ()
    assert listed(store, thread_id) == []


def test_a_thread_whose_time_has_come_is_gone_as_a_whole(store: Store) -> None:
    filled(store)
    filled(store, "u")
    store.touch("t", expires_at_s=time.time() - 1)
    gone_at_once(store, "t")
    store.expire(now_s=time.time())
    gone_at_once(store, "t")
    assert list(store.threads()) == ["u"]
    put(store, "t", row("4", "nowhere"))  # it was not deleted
    assert listed(store, "t") == ["4"]


def test_a_put_moves_the_expiry_of_the_whole_thread(store: Store) -> None:
    filled(store)
    put(store, "t", row("4"), expires_at_s=time.time() - 1)
    gone_at_once(store, "t")
    put(store, "t", row("5"), expires_at_s=time.time() + 3_600)
    assert listed(store, "t") == ["5"]
    put_writes(store, "t", write("5", "task", 0), expires=time.time() - 1)
    gone_at_once(store, "t")


def test_a_written_thread_expires_as_told(store: Store) -> None:
    filled(store)
    content = store.read_thread("t")
    store.write_thread("u", content, expires_at_s=time.time() + 3_600)
    assert store.read_thread("u") == content
    store.write_thread("u", content, expires_at_s=time.time() - 1)
    gone_at_once(store, "u")


def test_a_touch_keeps_a_thread_alive(store: Store) -> None:
    now_s = time.time()
    filled(store)
    store.touch("t", expires_at_s=now_s + 1_000)
    store.touch("t", expires_at_s=now_s + 3_000)
    assert store.expire(now_s=now_s + 2_000) == 0
    assert len(store.read_thread("t").rows) == 3


def test_a_thread_expires_by_itself(store: Store) -> None:
    filled(store)
    store.touch("t", expires_at_s=time.time() + 0.2)
    while store.read_thread("t") != NOTHING:
        time.sleep(0.02)
    gone_at_once(store, "t")


def test_touching_nobody_makes_no_thread(store: Store) -> None:
    store.touch("nobody", expires_at_s=time.time() + 3_600)
    assert is_empty(store, "nobody")


# -- many at once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_one_thread", [True, False])
def test_eight_writers_lose_nothing(store: Store, is_one_thread: bool) -> None:
    def work(number: int) -> None:
        thread_id = "t" if is_one_thread else f"t{number}"
        for step in range(50):
            checkpoint_id = f"{step:03}-{number}"
            put(store, thread_id, row(checkpoint_id, run_id=f"r{number}"), {digest(step): b"%d" % step})
            put_writes(store, thread_id, write(checkpoint_id, "task", 0))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    names = ["t"] if is_one_thread else [f"t{number}" for number in range(8)]
    assert sorted(store.threads()) == names
    every = {(f"{step:03}-{number}") for step in range(50) for number in range(8)}
    contents = [store.read_thread(name) for name in names]
    assert {each.spot.checkpoint_id for content in contents for each in content.rows} == every
    assert {each.spot.checkpoint_id for content in contents for each in content.writes} == every
    assert all(len(content.elements) == 50 for content in contents)
    assert [sorted(store.threads_of_run(f"r{number}")) for number in range(8)] == [
        ["t"] if is_one_thread else [f"t{number}"] for number in range(8)
    ]


def test_two_stores_write_to_one_thread(shared: MakeStore) -> None:
    stores = [shared(), shared()]

    def work(number: int) -> None:
        for step in range(50):
            put(stores[number], "t", row(f"{step:03}-{number}"))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert len(listed(stores[0], "t", limit=1_000)) == 100


def test_stores_that_open_a_new_file_at_one_moment_wait_for_each_other(tmp_path: Path) -> None:
    for number in range(50):
        stores = [SqliteStore(str(tmp_path / f"{number}.db")) for _ in range(4)]
        together = threading.Barrier(len(stores))

        def write_first(each: int, stores: list[SqliteStore] = stores, together: threading.Barrier = together) -> None:
            together.wait()
            put(stores[each], "t", row(f"{each:03}"))

        with ThreadPoolExecutor(len(stores)) as pool:
            list(pool.map(write_first, range(len(stores))))
        assert len(listed(stores[0], "t")) == len(stores)
        for store in stores:
            store.close()


def window(number: int) -> list[bytes]:
    return [digest(each) for each in range(max(0, number - 9), number + 1)]


def test_a_reader_sees_old_or_new_and_never_half(store: Store) -> None:
    num_puts, done = 300, threading.Event()

    def write_all() -> None:
        try:
            for number in range(num_puts):
                needs = Spot("", f"{number - 1:05}") if number else None
                put(store, "t", row(f"{number:05}", body=b"%d" % number), {digest(number): b"e"}, needs=needs)
        finally:
            done.set()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write_all)
        last = -1
        while not done.is_set():
            latest = store.get_checkpoint("t", "", None)
            if latest is not None:
                number = int(latest.body)
                assert number >= last
                last = number
                assert set(store.get_elements("t", window(number))) == set(window(number))
            some = [int(each) for each in listed(store, "t", None, limit=20)]
            assert some == list(range(some[0], some[-1] - 1, -1)) if some else True
            content = store.read_thread("t")
            assert len(content.rows) == len(content.elements)
        writing.result()
    assert len(listed(store, "t", limit=1_000)) == num_puts


def test_rewrites_and_puts_at_once_lose_nothing(store: Store) -> None:
    """Every put leans on the one before; a rewriter keeps cutting the tail with the elements that only it needed."""
    done = threading.Event()

    def write_all() -> None:
        try:
            for number in range(150):
                new, needs = {digest(number): b"e"}, Spot("", f"{number - 1:05}") if number else None
                try:
                    put(store, "t", row(f"{number:05}", body=b"%d" % number), new, needs=needs)
                except StaleNeed:
                    every = dict.fromkeys(window(number), b"e")
                    put(store, "t", row(f"{number:05}", body=b"%d" % number), every)
        finally:
            done.set()

    def decide(content: ThreadContent) -> Removal:
        newest = max(each.spot.checkpoint_id for each in content.rows)
        gone = frozenset(each.spot for each in content.rows if each.spot.checkpoint_id != newest)
        return Removal(gone, frozenset(), frozenset(content.elements) - set(window(int(newest))))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write_all)
        while not done.is_set():
            store.rewrite_thread("t", decide)
            latest = store.get_checkpoint("t", "", None)
            if latest is not None:
                found = store.read_thread("t")
                for each in found.rows:
                    assert set(window(int(each.body))) <= set(found.elements)
            done.wait(0.01)
        writing.result()
    store.rewrite_thread("t", decide)
    assert listed(store, "t") == ["00149"]
    assert set(store.get_elements("t", window(149))) == set(window(149))


def test_deleting_during_a_run_leaves_nothing(store: Store) -> None:
    started = threading.Event()

    def run() -> int:
        for number in range(1, 10_000):
            try:
                put(store, "t", row(f"{number:05}", f"{number - 1:05}" if number > 1 else None), {digest(number): b"e"})
                put_writes(store, "t", write(f"{number:05}", "task", 0))
            except ThreadDeleted:
                return number
            if number == 5:
                started.set()
        return -1

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        started.wait()
        store.delete_thread("t", deletion_id="99999")
        assert running.result() > 5
    assert is_empty(store, "t")
