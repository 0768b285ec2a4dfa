"""Protects store, receipt and manifest: one spelling each, digests that bind everything, and strict readers."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.errors import IntegrityError, StoreError, TierckptError
from tierckpt.format import canonical, digest, values
from tierckpt.format.digest import CHUNK
from tierckpt.format.manifest import Manifest, ShardRef
from tierckpt.format.receipt import Receipt
from tierckpt.format.store import StoreInfo, check_run_id

STORE = StoreInfo("run-1")


def receipt(rank: int = 0, **changes: Any) -> Receipt:
    made = Receipt(
        run="run-1",
        generation=3,
        step=1200,
        rank=rank,
        world=4,
        layout="1a" * 32,
        size=CHUNK + 5000,
        header_size=4096,
        header_digest="2b" * 32,
        chunks=bytes(range(64)),
        metadata=values.encode({"loss": 0.5, "tags": ("a",)}) if rank == 0 else None,
    )
    return replace(made, **changes)


def test_golden_store() -> None:
    assert STORE.encode() == (
        b'{"chunk":4194304,"digest":"blake3-256","format":1,"kind":"store","requires":[],"run":"run-1"}'
    )
    assert STORE.digest == "deb0c7a86985c1cf3847aefebba6e9920e335cc0621744a01ad66e2d05d288a6"


def test_golden_receipt() -> None:
    assert receipt().encode().decode() == (
        '{"chunks":"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4OTo7PD0+Pw==",'
        '"format":1,"generation":3,"header":{"digest":"' + "2b" * 32 + '","size":4096},"kind":"receipt",'
        '"layout":"' + "1a" * 32 + '","metadata":["dict",[["loss",["float","0.5"]],["tags",["tuple",["a"]]]]],'
        '"name":"g0003/s000000001200/shard-00000.safetensors","rank":0,"run":"run-1","size":4199304,"step":1200,'
        '"stored":{"form":"plain"},"world":4}'
    )
    assert receipt().shard_digest == "63990beb75ed789fa10be5a4e8e41fed3623640261ae10d9b058989d7565c519"


def test_golden_manifest() -> None:
    manifest = Manifest.of([receipt(2), receipt(0)])
    assert manifest.encode().decode() == (
        '{"format":1,"generation":3,"kind":"manifest","layout":"' + "1a" * 32 + '",'
        '"metadata":["dict",[["loss",["float","0.5"]],["tags",["tuple",["a"]]]]],"requires":[],"run":"run-1",'
        '"shards":[{"digest":"63990beb75ed789fa10be5a4e8e41fed3623640261ae10d9b058989d7565c519","rank":0,"size":4199304},{"digest":"038bf0d257433cb5bd8f41af3653e41247290546219dc730c9a3240c2712deb6","rank":2,"size":4199304}],'
        '"step":1200,"world":4}'
    )
    assert manifest.id == "3972bd8f8fafe91b920da777e6062ae95a3776eefb27ea95d895d331878f245a"


def test_round_trips() -> None:
    assert StoreInfo.decode(STORE.encode(), what="x") == STORE
    for rank in (0, 3):
        assert Receipt.decode(receipt(rank).encode(), what="x") == receipt(rank)
    manifest = Manifest.of([receipt(0), receipt(3)])
    assert Manifest.decode(manifest.encode(), what="x") == manifest


@pytest.mark.parametrize("run", ["", "a" * 129, "-a", ".", "..", "a/b", "a b", "é", "a\n", "a\0"])
def test_run_ids_that_could_leave_the_folder_are_refused(run: str) -> None:
    with pytest.raises(StoreError, match="run id"):
        check_run_id(run)
    with pytest.raises(IntegrityError, match="run"):
        StoreInfo.decode(canonical.encode(json.loads(STORE.encode()) | {"run": run}), what="x")


def test_the_shard_digest_binds_everything_it_covers() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"generation": 4},
        {"step": 1201},
        {"rank": 1, "metadata": None},
        {"size": CHUNK + 5001},
        {"header_size": 8192},
        {"header_digest": "2c" * 32},
        {"chunks": bytes(range(1, 65))},
    ]
    assert len({receipt(**change).shard_digest for change in changes}) == len(changes)


def test_chunks_are_found_by_number() -> None:
    assert receipt().chunk(1) == bytes(range(32, 64))
    for index in (-1, 2):
        with pytest.raises(IndexError):
            receipt().chunk(index)


WRONG_RECEIPTS: dict[str, Any] = {
    "chunks": [None, "", "AAAA", base64.b64encode(bytes(32)).decode(), base64.b64encode(bytes(96)).decode(), "é" * 88,
               "A" * 86 + "B="],
    "generation": [0, -1, True, "3", None],
    "step": [-1, 1201, None],
    "rank": [4, 1, -1],
    "world": [0, None],
    "layout": ["", "1A" * 32, 5],
    "size": [0, CHUNK, 2 * CHUNK + 1, None],
    "header": [None, {"digest": "2b" * 32}, {"digest": "2b" * 32, "size": 4095}, {"digest": "2b" * 32, "size": 2**40},
               {"digest": "2b" * 32, "size": 0}, {"digest": "", "size": 4096}],
    "metadata": [{}, [], ["nope"], ["bytes", "!"], ["list", [["x"]]]],
    "name": ["g0003/s000000001200/shard-00001.safetensors", "../x", None],
    "run": ["other run", ""],
    "stored": [None, {}, {"form": "zstd"}, {"form": "plain", "x": 1}, "plain"],
    "format": [2, True],
    "kind": ["manifest"],
}  # fmt: skip


@pytest.mark.parametrize("key", WRONG_RECEIPTS)
def test_receipts_that_are_wrong_are_refused(key: str) -> None:
    good = json.loads(receipt().encode())
    for value in WRONG_RECEIPTS[key]:
        with pytest.raises(IntegrityError, match="the receipt"):
            Receipt.decode(canonical.encode(good | {key: value}), what="the receipt")
    del good[key]
    with pytest.raises(IntegrityError, match="the receipt"):
        Receipt.decode(canonical.encode(good), what="the receipt")


def test_only_rank_0_has_metadata() -> None:
    with pytest.raises(IntegrityError, match="metadata"):
        Receipt.decode(receipt(1, metadata=5).encode(), what="x")


def test_metadata_needs_no_package() -> None:
    """An auditor's laptop has neither numpy nor torch, whatever is in the metadata."""
    made = receipt(metadata=["list", [["numpy", "<f4", "AACAPw=="], ["torch.dtype", "float99"]]])
    assert Receipt.decode(made.encode(), what="x") == made


def shard_ref(rank: int) -> dict[str, Any]:
    return {"digest": "3c" * 32, "rank": rank, "size": 1}


WRONG_MANIFESTS: dict[str, Any] = {
    "shards": [[], None, [shard_ref(1)], [shard_ref(0), shard_ref(0)], [shard_ref(0), shard_ref(2), shard_ref(1)],
               [shard_ref(0), shard_ref(4)], [shard_ref(0) | {"size": 0}], [shard_ref(0) | {"x": 1}], [[]]],
    "generation": [0, None],
    "step": [-1],
    "world": [0],
    "layout": ["x"],
    "metadata": [{}],
    "requires": [["compression"], None, {}],
    "run": ["."],
}  # fmt: skip


@pytest.mark.parametrize("key", WRONG_MANIFESTS)
def test_manifests_that_are_wrong_are_refused(key: str) -> None:
    good = json.loads(Manifest.of([receipt(0), receipt(1)]).encode())
    for value in WRONG_MANIFESTS[key]:
        with pytest.raises(IntegrityError, match="the manifest"):
            Manifest.decode(canonical.encode(good | {key: value}), what="the manifest")


@pytest.mark.parametrize(
    ("receipts", "message"),
    [
        ([], "rank 0"),
        ([receipt(1)], "rank 0"),
        ([receipt(0), receipt(1), receipt(1)], "two receipts of rank 1"),
        ([receipt(0), receipt(1, step=1201)], "ranks 0 and 1 disagree in step: 1200 and 1201"),
        ([receipt(0), receipt(1, layout="2b" * 32)], "layout"),
        ([receipt(0), receipt(1, world=5)], "world"),
        ([receipt(0), receipt(1, run="other")], "run"),
        ([receipt(0), receipt(1, generation=4)], "generation"),
    ],
)
def test_receipts_of_different_saves_make_no_manifest(receipts: list[Receipt], message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        Manifest.of(receipts)


def test_a_manifest_knows_its_receipts() -> None:
    manifest = Manifest.of([receipt(0), receipt(1)])
    manifest.check(receipt(0))
    manifest.check(receipt(1))
    assert manifest.shard(1) == ShardRef(1, CHUNK + 5000, receipt(1).shard_digest)
    assert manifest.shard(2) is None
    for other, message in [
        (receipt(2), "rank 2 is not in the manifest"),
        (receipt(1, run="other"), "run is other, the manifest says run-1"),
        (receipt(1, step=1201), "step is 1201"),
        (receipt(1, size=CHUNK + 5001), "size"),
        (receipt(1, chunks=bytes(64)), "shard digest"),
        (receipt(1, header_digest="3c" * 32), "shard digest"),
        (receipt(0, metadata=None), "metadata"),
    ]:
        with pytest.raises(IntegrityError, match=message):
            manifest.check(other)


def test_true_and_1_are_different_metadata() -> None:
    manifest = Manifest.of([receipt(0, metadata=["list", [1]])])
    with pytest.raises(IntegrityError, match="metadata"):
        manifest.check(receipt(0, metadata=["list", [True]]))


DECODERS: list[tuple[bytes, Callable[..., Any]]] = [
    (STORE.encode(), StoreInfo.decode),
    (receipt().encode(), Receipt.decode),
    (Manifest.of([receipt(0), receipt(1)]).encode(), Manifest.decode),
]


@given(st.sampled_from(DECODERS), st.data())
def test_mutations_are_refused_or_are_other_documents(case: Any, data: st.DataObject) -> None:
    original, decode = case
    at, end = data.draw(st.integers(0, len(original) - 1)), data.draw(st.integers(0, 3))
    new = data.draw(st.binary(max_size=3) | st.sampled_from([b"1", b"null", b"[]", b"{}", b"-", b"0"]))
    mutated = original[:at] + new + original[at + end :]
    try:
        found = decode(mutated, what="x")
    except TierckptError as error:
        assert isinstance(error, IntegrityError)
        return
    assert found.encode() == mutated


def test_a_receipt_of_many_chunks_is_read_quickly() -> None:
    count = 100_000
    large = receipt(size=count * CHUNK, chunks=digest.derive("x", b"y") * count)
    assert Receipt.decode(large.encode(), what="x").chunk(count - 1) == digest.derive("x", b"y")
