"""Protects the chain: each rule of docs/format.md, section 3, is broken once, and a bad link changes nothing."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.errors import IntegrityError, TierckptError, UntrustedError
from tierckpt.format import canonical, links
from tierckpt.format.chain import Begin, Chain, CheckpointRef, Commit, KeyLink, Link, Retire, Retired
from tierckpt.format.keys import SigningKey
from tierckpt.format.links import from_ranges, to_ranges

RUN, STORE, TIME = "run-1", "5e" * 32, "2026-01-02T03:04:05.000006Z"
KEY, OTHER, THIRD = (SigningKey.generate() for _ in range(3))


def ref(step: int, generation: int = 1) -> CheckpointRef:
    return CheckpointRef(generation, step, f"{generation:032x}{step:032x}")


def add(chain: Chain, link: Link, key: SigningKey = KEY) -> Link:
    return chain.append(link.sign(key).encode())


def begun(chain: Chain | None = None, origin: CheckpointRef | None = None) -> Chain:
    chain = chain or Chain(RUN)
    add(chain, chain.begin(store=STORE, origin=origin, time=TIME))
    return chain


def test_what_is_kept_of_each_link_is_little_and_exact() -> None:
    chain = begun()
    said = [add(chain, chain.introduce(OTHER.public))]
    for step in range(50):
        key = OTHER if step % 3 else KEY
        said.append(add(chain, chain.commit(ref(step), time=TIME.replace("05.0", f"{step:02}.0")), key))
    found = chain.links[1:]
    assert [(one.number, one.action, one.key, one.time) for one in found] == [
        (link.number, link.action, link.key, link.time) for link in said
    ]
    assert found[-1] == chain.links[-1] == chain.links[51] and len(chain.links) == 52
    assert [one.digest for one in chain.links] == [*(link.previous for link in said), chain.head.digest]  # type: ignore[union-attr]
    assert len(chain.links._records) == 64 * 52
    with pytest.raises(IndexError):
        chain.links[52]


def committed(*steps: int) -> Chain:
    """Generation 1 with these steps committed."""
    chain = begun()
    for step in steps:
        add(chain, chain.commit(ref(step), time=TIME))
    return chain


def state(chain: Chain) -> dict[str, Any]:
    return copy.deepcopy(vars(chain))


def refused(chain: Chain, link: Link | bytes, error: type[TierckptError], message: str, key: SigningKey = KEY) -> None:
    before = state(chain)
    with pytest.raises(error, match=message):
        chain.append(link if isinstance(link, bytes) else link.sign(key).encode())
    assert state(chain) == before


def test_golden() -> None:
    link = Link(
        number=7,
        previous="0a" * 32,
        run=RUN,
        live=((2, 3), (7, 7)),
        time=TIME,
        body=Commit(CheckpointRef(1, 1200, "1d" * 32), pinned=True),
        key="19bf44096984cdfe8541bac167dc3b96c85086aa30b6b6cb0c5c38ad703166e1",
        signature=bytes(64),
    )
    assert link.encode().decode() == (
        '{"body":{"action":"commit","checkpoint":{"generation":1,"id":"' + "1d" * 32 + '","step":1200},'
        '"key":"19bf44096984cdfe8541bac167dc3b96c85086aa30b6b6cb0c5c38ad703166e1","live":[[2,3],[7,7]],"number":7,'
        '"pinned":true,"previous":"' + "0a" * 32 + '","roots":[],"run":"run-1","time":"2026-01-02T03:04:05.000006Z"},'
        '"format":1,"kind":"link","signature":"' + "A" * 86 + '=="}'
    )
    assert link.signed_bytes().startswith(b'tierckpt 1 link\0{"action":"commit","checkpoint":{"generation":1,')
    assert link.digest == "867609fcad72ffc3a98efb2c77324d692b867272d1186718b5ae12ee84fbdf02"


BODIES = [
    Begin(2, None, STORE),
    Begin(3, ref(5), STORE),
    Commit(ref(1)),
    Commit(ref(1), roots=(((0, 1), (4, 4)), ((2, 3),))),
    Retire((ref(1), ref(2))),
    KeyLink("ab" * 32),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_links_come_back(body: links.Body) -> None:
    link = Link(5, "0a" * 32, RUN, ((1, 2), (4, 4)), TIME, body).sign(KEY)
    data = link.encode()
    found = Link.decode(data, what="x")
    assert found == link and found.encode() == data
    found.check_signature(what="x")
    with pytest.raises(ValueError, match="signed"):
        replace(link, signature=b"").encode()


def test_history_is_kept() -> None:
    chain = committed(10, 20, 30)
    add(chain, chain.commit(ref(40), pinned=True, time=TIME))
    add(chain, chain.retire([ref(10), ref(30)], time=TIME))
    assert list(chain.live.items()) == [(2, ref(20)), (4, ref(40))]
    assert chain.pinned == {ref(40)}
    assert chain.retired == {ref(10): Retired(5, TIME), ref(30): Retired(5, TIME)}
    assert chain.committed == {(1, step): ref(step).id for step in (10, 20, 30, 40)}
    assert [link.action for link in chain.links] == ["begin", *["commit"] * 4, "retire"]
    assert chain.run == RUN and chain.store == STORE and chain.generation == 1
    assert chain.head == (5, chain.links[-1].digest)
    add(chain, chain.retire([ref(40)], time=TIME))
    assert chain.pinned == set()


def test_numbers_in_the_middle_and_at_the_ends_leave_the_ranges() -> None:
    chain = committed(*range(10))
    add(chain, chain.retire([ref(step) for step in (0, 1, 4, 5, 9)]))
    assert add(chain, chain.commit(ref(10))).live == ((3, 4), (7, 9), (12, 12))
    assert add(chain, chain.commit(ref(11))).live == ((3, 4), (7, 9), (12, 13))
    assert add(chain, chain.retire([ref(step) for step in (2, 3, 6, 7, 8, 10, 11)])).live == ()


@given(st.lists(st.integers(0, 30), max_size=25), st.randoms(use_true_random=False))
def test_live_is_that_of_a_plain_set(choices: list[int], random: Any) -> None:
    chain = begun()
    expected: dict[int, CheckpointRef] = {}
    for choice in choices:
        if choice < 18 or not expected:
            number = len(chain.links)
            link = chain.commit(ref(number), time=TIME)
            expected[number] = ref(number)
        else:
            gone = random.sample(sorted(expected), random.randint(1, len(expected)))
            link = chain.retire([expected.pop(number) for number in gone], time=TIME)
        chain.append(link.sign(KEY).encode(), check_signature=False)
        assert chain.live == expected and list(chain.live) == sorted(expected)
        assert link.live == to_ranges(expected)


@given(st.sets(st.integers(0, 60)))
def test_ranges(numbers: set[int]) -> None:
    ranges = to_ranges(numbers)
    assert list(from_ranges(ranges)) == sorted(numbers)
    assert links.decode_ranges(links.encode_ranges(ranges), what="x", below=61) == ranges


OTHER_RANGES: list[Any] = [None, {}, [[1]], [[1, 2, 3]], [[2, 1]], [[1, 2], [3, 4]], [[1, 3], [3, 4]], [[5, 9]]]
OTHER_RANGES += [[[-1, 0]], [[True, 2]], [[0, None]], ["ab"]]


@pytest.mark.parametrize("value", OTHER_RANGES, ids=str)
def test_other_ranges_are_refused(value: Any) -> None:
    with pytest.raises(IntegrityError, match="the ranges"):
        links.decode_ranges(value, what="the ranges", below=9)


def test_lineage_follows_the_begin_links() -> None:
    chain = committed(10, 20, 30)
    begun(chain, ref(20))  # 30 is abandoned
    for step in (25, 30):
        add(chain, chain.commit(ref(step, 2)))
    assert chain.lineage() == [ref(30, 2), ref(25, 2), ref(20), ref(10)]
    add(chain, chain.commit(ref(15)))  # a coordinator saves what the dead one had sealed
    begun(chain, ref(20))  # from the older generation again: 2 is abandoned as a whole
    assert chain.lineage() == [ref(20), ref(15), ref(10)] and chain.newest == ref(20)
    add(chain, chain.commit(ref(20, 3)))
    assert chain.newest == ref(20, 3)
    begun(chain, None)
    assert chain.lineage() == [] and chain.newest is None


def test_lineage_goes_through_retired_checkpoints() -> None:
    chain = committed(10, 20)
    begun(chain, ref(20))
    add(chain, chain.retire([ref(20)]))
    assert chain.lineage() == [ref(10)]


def test_restarts_without_progress_are_counted() -> None:
    chain = committed(10)
    assert chain.trailing_begins() == 0
    begun(chain, ref(10))
    begun(chain, ref(10))
    assert chain.trailing_begins() == 2
    begun(chain, None)
    assert chain.trailing_begins() == 1
    add(chain, chain.introduce(OTHER.public))
    begun(chain, None)
    assert chain.trailing_begins() == 2
    add(chain, chain.commit(ref(5, 5)))
    assert chain.trailing_begins() == 0


# Rules, each broken once


def test_numbers_are_in_order() -> None:
    chain = committed(10)
    link = chain.commit(ref(20))
    refused(chain, replace(link, number=3), IntegrityError, r"chain/000000000002\.json: holds link 3")
    refused(chain, replace(link, number=1, live=((1, 1),)), IntegrityError, "holds link 1")


def test_each_follows_the_one_before_it() -> None:
    chain = committed(10)
    refused(chain, replace(chain.commit(ref(20)), previous="00" * 32), UntrustedError, "follows a link of digest 0000")
    empty = Chain(RUN)
    first = empty.begin(store=STORE, origin=None)
    refused(chain, replace(chain.commit(ref(20)), previous=None), IntegrityError, "previous")
    refused(empty, replace(first, previous="00" * 32), UntrustedError, "follows")


def test_links_belong_to_one_run() -> None:
    chain = committed(10)
    refused(chain, replace(chain.commit(ref(20)), run="run-2"), UntrustedError, "belongs to run run-2")
    pinned = Chain("run-2")
    refused(pinned, replace(pinned.begin(store=STORE, origin=None), run=RUN), UntrustedError, "not to run-2")
    taken = Chain()
    add(taken, Chain(RUN).begin(store=STORE, origin=None))
    assert taken.run == RUN


def test_a_chain_starts_with_a_begin_link() -> None:
    chain = Chain(RUN)
    for body in (Commit(ref(1)), KeyLink(KEY.public)):
        live = ((0, 0),) if isinstance(body, Commit) else ()
        refused(chain, Link(0, None, RUN, live, TIME, body), IntegrityError, "starts with a begin")
    with pytest.raises(IntegrityError, match="starts with a begin"):
        chain.commit(ref(1))


def test_signatures_are_checked() -> None:
    chain = committed(10)
    link = chain.commit(ref(20)).sign(KEY)
    refused(chain, replace(link, signature=bytes(64)).encode(), UntrustedError, "signature is not that of key")
    refused(chain, replace(link, time="2027-01-02T03:04:05.000006Z").encode(), UntrustedError, "signature")
    refused(chain, replace(link, key=OTHER.public).encode(), UntrustedError, "no link before it introduces")
    chain.append(replace(link, signature=bytes(64)).encode(), check_signature=False)


def test_keys_must_be_introduced() -> None:
    chain = committed(10)
    refused(chain, chain.commit(ref(20)), UntrustedError, "which no link before it introduces", OTHER)
    refused(chain, chain.introduce(THIRD.public), UntrustedError, "no link before it introduces", OTHER)
    add(chain, chain.introduce(OTHER.public))
    add(chain, chain.commit(ref(20)), OTHER)
    assert chain.keys == {KEY.public: True, OTHER.public: True}


def test_a_lost_key_is_replaced_unendorsed() -> None:
    chain = committed(10)
    add(chain, chain.introduce(OTHER.public), OTHER)
    add(chain, chain.introduce(THIRD.public), OTHER)
    assert chain.keys == {KEY.public: True, OTHER.public: False, THIRD.public: False}
    assert chain.trusted_by([THIRD.public]) == {THIRD.public}
    assert chain.trusted_by([OTHER.public]) == {OTHER.public, THIRD.public}
    refused(chain, chain.introduce(OTHER.public), IntegrityError, "introduced before", OTHER)
    add(chain, chain.commit(ref(20)), THIRD)
    add(chain, chain.introduce(OTHER.public))  # the first key has been found again
    assert chain.keys == dict.fromkeys([KEY.public, OTHER.public, THIRD.public], True)
    refused(chain, chain.introduce(KEY.public), IntegrityError, "introduced before")


def test_generations_count_up() -> None:
    chain = begun()
    link = chain.begin(store=STORE, origin=None)
    for generation in (1, 3):
        refused(
            chain, replace(link, body=Begin(generation, None, STORE)), IntegrityError, f"begins generation {generation}"
        )
    empty = Chain(RUN)
    first = empty.begin(store=STORE, origin=None)
    refused(empty, replace(first, body=Begin(2, None, STORE)), IntegrityError, "begins generation 2 after 0")


def test_a_generation_continues_what_is_live() -> None:
    chain = committed(10, 20)
    add(chain, chain.retire([ref(10)]))
    for origin in (ref(10), ref(30), CheckpointRef(1, 20, "ff" * 32)):
        with pytest.raises(IntegrityError, match="not live"):
            chain.begin(store=STORE, origin=origin)
        link = replace(chain.begin(store=STORE, origin=None), body=Begin(2, origin, STORE))
        refused(chain, link, IntegrityError, "continues step .* not live")
    empty = Chain(RUN)
    first = replace(empty.begin(store=STORE, origin=None), body=Begin(1, ref(1), STORE))
    refused(empty, first, IntegrityError, "not live")


def test_all_begins_bind_one_store() -> None:
    chain = begun()
    with pytest.raises(IntegrityError, match="store digest"):
        chain.begin(store="6f" * 32, origin=None)
    link = replace(chain.begin(store=STORE, origin=None), body=Begin(2, None, "6f" * 32))
    refused(chain, link, IntegrityError, "store digest")


def test_a_step_is_committed_once_for_ever() -> None:
    chain = committed(10, 20)
    add(chain, chain.retire([ref(10)]))
    for again in (ref(10), ref(20), CheckpointRef(1, 20, "ff" * 32)):
        with pytest.raises(IntegrityError, match="committed before"):
            chain.commit(again)
        link = replace(chain.commit(ref(30)), body=Commit(again))
        refused(chain, link, IntegrityError, "committed before")


def test_generations_to_come_commit_nothing() -> None:
    chain = begun()
    link = replace(chain.commit(ref(1)), body=Commit(ref(1, 2)))
    refused(chain, link, IntegrityError, "before that generation has begun")


def test_what_is_retired_was_live() -> None:
    chain = committed(10, 20)
    add(chain, chain.retire([ref(10)]))
    good = chain.retire([ref(20)])
    for gone in ((ref(10),), (ref(30),), (ref(20), ref(10)), (CheckpointRef(1, 20, "ff" * 32),)):
        refused(chain, replace(good, body=Retire(gone)), IntegrityError, "not live")
    refused(chain, replace(good, body=Retire((ref(20), ref(20)))), IntegrityError, "twice")
    refused(chain, replace(good, body=Retire(())), IntegrityError, "non-empty")
    with pytest.raises(IntegrityError, match="needs a checkpoint"):
        chain.retire([])


def test_live_is_recomputed() -> None:
    chain = committed(10, 20)
    good = chain.commit(ref(30))
    for live in ((), ((1, 1), (3, 3)), ((2, 3),), ((0, 3),), ((1, 2),)):
        refused(chain, replace(good, live=live), IntegrityError, "live is not what")
    refused(chain, replace(good, live=((1, 4),)), IntegrityError, "ranges below 4")


def test_links_cannot_be_swapped_replayed_or_dropped() -> None:
    chain = committed()
    datas = [Chain(RUN).begin(store=STORE, origin=None, time=TIME).sign(KEY).encode()]
    datas.append(add(chain, chain.commit(ref(1))).encode())
    datas.append(add(chain, chain.commit(ref(2))).encode())
    datas.append(add(chain, chain.retire([ref(1)])).encode())
    for order in ((0, 2), (0, 1, 1), (0, 1, 3), (1,), (0, 0)):
        other = Chain(RUN)
        with pytest.raises((IntegrityError, UntrustedError)):
            for i in order:
                other.append(datas[i])


# Hostile bytes

GOOD = committed(10).commit(ref(20), time=TIME).sign(KEY)


def changed(edit: Callable[[dict[str, Any]], None]) -> bytes:
    value: Any = canonical.decode(GOOD.encode(), what="x")
    edit(value)
    return canonical.encode(value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("action", "delete"),
        ("action", ["commit"]),
        ("action", "begin"),
        ("key", "AB" * 32),
        ("key", 5),
        ("live", [[1, 1], [2, 2]]),
        ("number", -1),
        ("number", True),
        ("previous", None),
        ("previous", "x"),
        ("run", "../.."),
        ("time", "2026-13-02T03:04:05.000006Z"),
        ("time", "2026-01-02T03:04:05Z"),
        ("time", "2026-01-02T03:04:05.000006+00:00"),
        ("time", "२०२६-01-02T03:04:05.000006Z"),
        ("time", None),
        ("pinned", 1),
        ("roots", None),
        ("roots", [[[0, 3]]]),
        ("roots", [[[0, 3]], [[3, 4]]]),
        ("roots", [[[0, 3]], []]),
        ("checkpoint", {"generation": 0, "step": 1, "id": "ab" * 32}),
        ("checkpoint", {"generation": 1, "step": -1, "id": "ab" * 32}),
        ("checkpoint", {"generation": 1, "step": 1, "id": "ab"}),
        ("checkpoint", {"generation": 1, "step": 1}),
        ("more", 1),
    ],
)
def test_malformed_bodies_are_refused(key: str, value: Any) -> None:
    with pytest.raises(IntegrityError, match="the link"):
        Link.decode(changed(lambda link: link["body"].update({key: value})), what="the link")


@pytest.mark.parametrize(
    "signature", ["", "A" * 88, "A" * 86 + "B=", "A" * 84 + "====", None, "A" * 87 + "\n", "é" * 88]
)
def test_malformed_signatures_are_refused(signature: Any) -> None:
    with pytest.raises(IntegrityError, match="signature"):
        Link.decode(changed(lambda link: link.update(signature=signature)), what="the link")


@given(st.data())
def test_mutated_links_are_refused(data: st.DataObject) -> None:
    original = GOOD.encode()
    at, end = data.draw(st.integers(0, len(original) - 1)), data.draw(st.integers(0, 2))
    mutated = original[:at] + data.draw(st.binary(max_size=2)) + original[at + end :]
    chain = PREPARED
    if mutated == original:
        return
    with pytest.raises((IntegrityError, UntrustedError)):
        chain.append(mutated)


PREPARED = committed(10)


def test_times() -> None:
    zone = timezone(timedelta(hours=2))
    assert links.timestamp(datetime(2026, 1, 2, 5, 4, 5, 6, zone)) == TIME
    assert links.parse_time(TIME) == datetime(2026, 1, 2, 3, 4, 5, 6, timezone.utc)
    assert links.timestamp(datetime(1, 2, 3, tzinfo=timezone.utc)) == "0001-02-03T00:00:00.000000Z"
    now = links.parse_time(links.timestamp())
    assert abs(now - datetime.now(timezone.utc)) < timedelta(minutes=5)


def test_long_chains_are_not_quadratic() -> None:
    chain = begun()
    datas = []
    for number in range(4000):
        # Twenty stay, as retention would have it.
        link = (
            chain.retire([next(iter(chain.live.values()))])
            if number % 2 and len(chain.live) > 20
            else chain.commit(ref(number))
        )
        datas.append(replace(link, key=KEY.public, signature=bytes(64)).encode())
        chain.append(datas[-1], check_signature=False)
    again = begun()  # Ed25519 is deterministic and the time is fixed: the same link 0
    start = time.process_time()
    for data in datas:
        again.append(data, check_signature=False)
    assert time.process_time() - start < 2  # about 0.15 s
    assert again.head == chain.head
