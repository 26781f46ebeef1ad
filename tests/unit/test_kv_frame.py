"""Stored KV objects: what was sealed comes back, and nothing else does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pancake_lmcache import frame as frame_module
from pancake_lmcache.frame import (
    CODEC_INT8,
    CODEC_RAW,
    VERSION,
    Identity,
    Refusal,
    Refused,
    Sealer,
    read_header,
    read_key_file,
)

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
CHUNK = Identity(model="/models/small", kv_rank=0x01000100, object_group=0, chunk_hash=b"\x01" * 32, salt="tenant a")

identities = st.builds(
    Identity,
    model=st.text(max_size=40),
    kv_rank=st.integers(0, 2**32 - 1),
    object_group=st.integers(0, 300),
    chunk_hash=st.binary(max_size=40),
    salt=st.text(max_size=20),
)
sealers = st.sampled_from([Sealer(), Sealer(KEY)])


def opened(sealer: Sealer, identity: Identity, whole: bytes) -> bytes:
    split = sealer.header_bytes(identity)
    return bytes(sealer.open(identity, whole[:split], whole[split:]))


def sealed(sealer: Sealer, identity: Identity, payload: bytes) -> bytes:
    return b"".join(sealer.seal(identity, payload))


def refusal(sealer: Sealer, identity: Identity, whole: bytes) -> Refusal:
    with pytest.raises(Refused) as caught:
        opened(sealer, identity, whole)
    return caught.value.refusal


@given(sealers, identities, st.binary(max_size=300))
def test_what_was_sealed_comes_back(sealer: Sealer, identity: Identity, payload: bytes) -> None:
    whole = sealed(sealer, identity, payload)
    assert opened(sealer, identity, whole) == payload
    assert read_header(whole).raw_bytes == len(payload)


@given(sealers, identities, st.binary(min_size=1, max_size=60), st.data())
def test_no_changed_bit_is_let_through(sealer: Sealer, identity: Identity, payload: bytes, data: st.DataObject) -> None:
    whole = bytearray(sealed(sealer, identity, payload))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    assert refusal(sealer, identity, bytes(whole)) in Refusal


@given(sealers, identities, identities)
def test_an_object_opens_under_its_own_identity_only(sealer: Sealer, one: Identity, other: Identity) -> None:
    whole = sealed(sealer, one, b"kv")
    if one == other:
        assert opened(sealer, other, whole) == b"kv"
        assert one.name() == other.name()
    else:
        assert refusal(sealer, other, whole) in (Refusal.IDENTITY, Refusal.SIZE)
        assert one.name() != other.name()


@pytest.mark.parametrize("sealer", [Sealer(), Sealer(KEY)], ids=["checksum", "key"])
@pytest.mark.parametrize(
    "other",
    [
        replace(CHUNK, salt="tenant b"),
        replace(CHUNK, salt=""),
        replace(CHUNK, model="/models/smaLl"),
        replace(CHUNK, kv_rank=CHUNK.kv_rank + 1),
        replace(CHUNK, object_group=1),
        replace(CHUNK, chunk_hash=b"\x02" * 32),
    ],
    ids=["salt", "no salt", "model", "rank", "group", "chunk"],
)
def test_each_part_of_the_identity_counts(sealer: Sealer, other: Identity) -> None:
    assert refusal(sealer, other, sealed(sealer, CHUNK, b"kv" * 9)) is Refusal.IDENTITY


@pytest.mark.parametrize("sealer", [Sealer(), Sealer(KEY)], ids=["checksum", "key"])
def test_shorter_longer_zeroed_and_foreign_objects_say_what_they_are(sealer: Sealer) -> None:
    whole = sealed(sealer, CHUNK, bytes(range(200)))
    assert refusal(sealer, CHUNK, whole[:-1]) is Refusal.SIZE
    assert refusal(sealer, CHUNK, whole + b"\0") is Refusal.SIZE
    assert refusal(sealer, CHUNK, whole[:20]) is Refusal.SIZE
    assert refusal(sealer, CHUNK, b"") is Refusal.SIZE
    assert refusal(sealer, CHUNK, bytes(len(whole))) is Refusal.FOREIGN
    assert refusal(sealer, CHUNK, b"\x7fELF" + whole) is Refusal.FOREIGN
    split = sealer.header_bytes(CHUNK)
    assert refusal(sealer, CHUNK, whole[:split] + bytes(200)) is Refusal.DAMAGED


def test_other_versions_codecs_and_keys_are_told_apart_from_damage() -> None:
    whole = bytearray(sealed(Sealer(), CHUNK, b"kv"))
    newer, packed, strange = bytearray(whole), bytearray(whole), bytearray(whole)
    newer[8:10] = (VERSION + 1).to_bytes(2, "little")
    packed[11] = 7
    strange[10] = 9
    assert refusal(Sealer(), CHUNK, bytes(newer)) is Refusal.VERSION
    assert refusal(Sealer(), CHUNK, bytes(packed)) is Refusal.CODEC
    assert refusal(Sealer(), CHUNK, bytes(strange)) is Refusal.DAMAGED
    assert refusal(Sealer(KEY), CHUNK, bytes(whole)) is Refusal.KEY
    for reader in (Sealer(), Sealer(OTHER_KEY)):
        assert refusal(reader, CHUNK, sealed(Sealer(KEY), CHUNK, b"kv")) is Refusal.KEY
    kept = {kind for kind in Refusal if kind.may_be_of_use}
    assert kept == {Refusal.VERSION, Refusal.CODEC, Refusal.KEY}


@pytest.mark.parametrize("key", [None, bytes(32)], ids=["checksum", "key"])
def test_a_packed_body_is_for_those_who_ask_for_its_codec_and_shorter_than_what_it_holds(key: bytes | None) -> None:
    sealer, one = Sealer(key), Identity("m", 1, 0, b"h", "s")
    split = sealer.header_bytes(one)
    whole = b"".join(sealer.seal(one, b"packed", codec=CODEC_INT8, raw_bytes=7))
    assert refusal(sealer, one, whole) is Refusal.CODEC
    both = (CODEC_RAW, CODEC_INT8)
    assert bytes(sealer.open(one, whole[:split], whole[split:], codecs=both)) == b"packed"
    assert read_header(whole).raw_bytes == 7
    for raw_bytes in (0, 6):
        odd = b"".join(sealer.seal(one, b"packed", codec=CODEC_INT8, raw_bytes=raw_bytes))
        with pytest.raises(Refused) as caught:
            sealer.check_header(one, odd[:split], total_bytes=len(odd), codecs=both)
        assert caught.value.refusal is Refusal.SIZE


def test_an_encrypted_object_shows_nothing_of_its_payload_and_never_looks_the_same() -> None:
    payload = b"the same bytes again and again " * 4
    one, two = sealed(Sealer(KEY), CHUNK, payload), sealed(Sealer(KEY), CHUNK, payload)
    assert payload[:16] not in one
    assert one != two


def test_a_forged_header_over_a_right_body_is_refused_with_a_key() -> None:
    """Whoever has no key can compute everything but the tag."""
    whole, other = sealed(Sealer(KEY), CHUNK, b"kv"), replace(CHUNK, salt="tenant b")
    forged = bytearray(whole)
    forged[40:72] = other.digest()
    assert read_header(forged).identity == other.digest()
    assert refusal(Sealer(KEY), other, bytes(forged)) is Refusal.DAMAGED


def test_a_long_model_name_is_cut_in_the_header_only() -> None:
    one, two = replace(CHUNK, model="m" * 5000), replace(CHUNK, model="m" * 4999 + "x")
    whole = sealed(Sealer(), one, b"kv")
    assert opened(Sealer(), one, whole) == b"kv"
    assert refusal(Sealer(), two, whole) is Refusal.IDENTITY
    assert read_header(whole).model == "m" * 1024


def test_a_key_file_holds_32_bytes_or_64_digits_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "key"
    for good in (KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n"):
        path.write_bytes(good)
        assert read_key_file(path) == KEY
    for bad in (b"", KEY[:-1], KEY + b"x", b"z" * 64, KEY.hex().encode()[:-2]):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="openssl rand"):
            read_key_file(path)
    with pytest.raises(ValueError, match="cannot read"):
        read_key_file(tmp_path / "none")
    with pytest.raises(ValueError, match="got 5 bytes"):
        Sealer(b"short")


def test_a_key_without_the_package_that_encrypts_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pancake-langgraph\[encrypt\]"):
        Sealer(bytes(range(32)))
    assert not Sealer().encrypts
