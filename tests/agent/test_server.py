"""The agent answers its own user, keeps slots and generations apart, and no message can harm it."""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.agents import end_all, gone, kill, status, statuses, until
from tests.forking import forked
from tests.interrupts import interrupted
from tierckpt import _native, config
from tierckpt.agent import client as client_module
from tierckpt.agent.client import Client, Joining
from tierckpt.agent.protocol import FRAME_LIMIT, Channel, document
from tierckpt.agent.runtime import Home, homes, runtime_folder
from tierckpt.errors import (
    AgentLostError,
    AgentSilentError,
    ArenaFullError,
    FencedError,
    IncompleteError,
    IntegrityError,
    StateError,
    StoreError,
    TierckptError,
)
from tierckpt.format import canonical
from tierckpt.format.digest import derive

LAYOUT = b"a layout"
HASH = derive("layout", LAYOUT).hex()
TICKET = 1


def begun(generation: int, chain: str = "a") -> list[tuple[int, str]]:
    """The generations of one chain so far."""
    return [(number, derive(chain, bytes([number])).hex()) for number in range(1, generation + 1)]


def joining(root: Path, generation: int = 1, **more: Any) -> Joining:
    given: dict[str, Any] = {
        "generation": generation,
        "rank": 0,
        "world": 1,
        "locals": [0],
        "root": str(root),
        "roots": 1,
        "origin": None,
        "begun": begun(generation),
        "slots": 3,
        "budget": 1 << 26,
        "idle": 600.0,
        "deadline": 5.0,
    }
    return Joining(**(given | more))


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    client = Client("run", "node", timeout=20.0)
    client.join(joining(tmp_path))
    yield client
    client.close()


def take(client: Client, size: int = 5000, wait: int = 0) -> int:
    with client.request("slot", size=size, wait=wait, ticket=TICKET, held=[]) as reply:
        number = reply.fields["slot"]
    assert type(number) is int
    return number


def seal(client: Client, step: int, slot: int | None, size: int = 5000, layout: bytes = LAYOUT) -> None:
    descriptor = document(layout)
    try:
        client.request(
            "seal",
            [descriptor],
            step=step,
            slot=slot,
            ticket=TICKET,
            size=size,
            header_size=4096 if size else 0,
            header_digest="0" * 64,
            layout=derive("layout", layout).hex(),
            metadata=None,
            due=False,
            pinned=False,
        )
    finally:
        os.close(descriptor)


def test_a_slot_is_sealed_memory_that_both_see(client: Client) -> None:
    with client.request("slot", size=5000, wait=0, ticket=TICKET, held=[]) as reply:
        descriptor = reply.take()
        memory = memoryview(_native.Buffer.of(descriptor, 8192))
        with pytest.raises(OSError):
            os.ftruncate(descriptor, 4096)
        with pytest.raises(OSError):
            os.ftruncate(descriptor, 1 << 20)
        os.close(descriptor)
    memory[:5000] = b"x" * 5000
    seal(client, 1, reply.fields["slot"])  # type: ignore[arg-type]
    with client.request("fetch", generation=1, step=1, rank=0) as reply:
        assert os.pread(reply.descriptors[0], 9999, 0)[:5000] == b"x" * 5000
        with pytest.raises(OSError):
            os.pwrite(reply.descriptors[0], b"y", 0)


def test_slots_are_used_again_but_not_while_they_hold_the_newest_complete_step(client: Client) -> None:
    seen = set()
    for step in range(10):
        slot = take(client)
        seen.add(slot)
        seal(client, step, slot)
        client.request("complete", step=step, due=False)
        assert [held["step"] for held in status()["generations"][0]["steps"]] == [step]
    assert len(seen) <= 3


def test_a_step_that_is_due_stays_until_it_is_settled(client: Client) -> None:
    for step in (1, 2, 3):
        seal(client, step, take(client))
        client.request("complete", step=step, due=step == 1)
    assert [held["step"] for held in status()["generations"][0]["steps"]] == [1, 3]
    client.request("settled", step=1, durable=True)
    assert [held["step"] for held in status()["generations"][0]["steps"]] == [3]


def test_an_incomplete_step_takes_no_place_of_a_complete_one(client: Client, tmp_path: Path) -> None:
    client.join(joining(tmp_path, 2, world=2))
    seal(client, 1, take(client))
    client.request("complete", step=1, due=False)
    seal(client, 2, take(client))
    slot = take(client)
    with pytest.raises(ArenaFullError, match="no slot is free"):
        take(client)
    client.request("release", slot=slot, ticket=TICKET)
    assert take(client) == slot
    client.request("drop", step=2)
    take(client)


def test_the_budget_is_kept_and_named(client: Client) -> None:
    with pytest.raises(ArenaFullError, match=r"134,217,728 bytes are needed, 0 are held.*67,108,864"):
        take(client, size=1 << 27)
    take(client, size=1 << 25)
    with pytest.raises(ArenaFullError, match="no slot is free"):
        take(client, size=(1 << 25) + 1)


def test_who_dies_while_waiting_for_a_slot_is_noticed(client: Client) -> None:
    for _ in range(3):
        take(client)
    (channel,) = client._idle
    channel.send({"op": "slot", "size": 5000, "wait": 600_000, "ticket": TICKET, "held": []})
    client.close()
    until(lambda: status()["generations"][0]["ranks"] == {"0": "dead"})


def test_what_a_reader_uses_is_not_overwritten(client: Client) -> None:
    slot = take(client)
    seal(client, 1, slot)
    client.request("complete", step=1, due=False)
    reader = Client("run", "node", timeout=20.0)
    with reader.request("fetch", generation=1, step=1, rank=0):
        seal(client, 2, take(client))
        client.request("complete", step=2, due=False)
        assert take(client) != slot
    reader.close()
    assert take(client, wait=10_000) == slot


def test_a_newer_generation_fences_the_older_and_shares_no_slot(client: Client, tmp_path: Path) -> None:
    old = take(client)
    seal(client, 7, take(client))
    newer = Client("run", "node", timeout=20.0)
    newer.join(joining(tmp_path, 2))
    for op, fields in (
        ("slot", {"size": 1, "wait": 0, "ticket": TICKET, "held": []}),
        ("release", {"slot": old, "ticket": TICKET}),
        ("write", {"step": 7}),
    ):
        with pytest.raises(FencedError, match="newer generation"):
            client.request(op, **fields)
    with pytest.raises(FencedError):
        seal(client, 8, old)
    with pytest.raises(FencedError):
        Client("run", "node", timeout=20.0).join(joining(tmp_path, 1))
    taken = {take(newer) for _ in range(3)}
    assert old not in taken
    seal(newer, 1, min(taken))
    newer.request("complete", step=1, due=True)
    # What the older one had last stays until there is something newer on the disk.
    assert [held["generation"] for held in status()["generations"]] == [1, 2]
    newer.request("settled", step=1, durable=True)
    assert all(not held["steps"] for held in status()["generations"] if held["generation"] == 1)
    newer.close()


def test_what_the_disk_has_makes_room_for_a_newer_generation(client: Client, tmp_path: Path) -> None:
    seal(client, 7, take(client, size=(1 << 26) - 5000))
    client.request("complete", step=7, due=False)
    newer = Client("run", "node", timeout=20.0)
    newer.join(joining(tmp_path, 2))
    with pytest.raises(ArenaFullError):
        take(newer, size=1 << 25)
    newest = Client("run", "node", timeout=20.0)
    newest.join(joining(tmp_path, 3, origin=(1, 7)))
    take(newest, size=1 << 25)
    newer.close()
    newest.close()


def test_one_process_for_each_rank(client: Client, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="another process"):
        Client("run", "node", timeout=20.0).join(joining(tmp_path))


def test_after_a_good_bye_nothing_is_left(client: Client) -> None:
    pid = status()["pid"]
    take(client)
    client.bye()
    assert gone(pid)
    folder = runtime_folder(make=False)
    assert folder is not None and not list(folder.iterdir())


def test_a_dead_agent_is_noticed_and_replaced(client: Client) -> None:
    take(client)
    kill(status()["pid"])
    with pytest.raises(AgentLostError, match="no agent of run run runs on node node"):
        client.request("complete", (), 0.0, client.epoch, step=1, due=False)
    assert not statuses()  # a new one holds nothing that could be complete
    assert take(client)
    assert client.epoch == 2
    with pytest.raises(AgentLostError, match="died and was replaced"):
        client.request("complete", (), 0.0, 1, step=1, due=False)


def stop(pid: int) -> None:
    """Until all threads of a process stand still: the signal alone comes when it comes."""
    os.kill(pid, signal.SIGSTOP)
    stats = [task / "stat" for task in Path(f"/proc/{pid}/task").iterdir()]
    until(lambda: all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats))


def test_an_agent_that_dies_under_a_request_is_told(client: Client) -> None:
    take(client)
    pid = status()["pid"]
    stop(pid)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(take, client)

        def waits_for_an_answer() -> bool:
            """Whether a thread has sent its request, and waits: a process that is stopped sends nothing."""
            waits, conversing = Channel.waits.__code__, Client._converse.__code__
            callers = [top.f_back for top in sys._current_frames().values() if top.f_code is waits]
            return any(caller is not None and caller.f_code is conversing for caller in callers)

        until(waits_for_an_answer)
        kill(pid)
        with pytest.raises(AgentLostError, match="died or did not answer"):
            asking.result(20)
    assert take(client)


def test_an_agent_that_is_stopped_is_not_waited_for_long(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stands still answers no more than a dead one, but does not end: a save must not stand with it."""
    take(client)
    monkeypatch.setattr(config, "AGENT_ANSWER", 2.0)
    pid = status()["pid"]
    stop(pid)
    try:
        with pytest.warns(RuntimeWarning, match="left alone"), pytest.raises(AgentSilentError):
            client.request("slot", (), 1000.0, size=5000, wait=1_000_000, ticket=TICKET, held=[])
        # Once is enough: nobody waits for it again.
        began = time.monotonic()
        for _ in range(100):
            with pytest.raises(AgentSilentError, match="does not answer"):
                take(client)
        assert not client.connect()
        assert time.monotonic() - began < 20
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: not client.silent)
    monkeypatch.setattr(config, "AGENT_ANSWER", 15.0)
    assert take(client)


def test_an_agent_that_works_for_long_is_waited_for(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers other requests meanwhile: so it is not taken for one that is stopped."""
    monkeypatch.setattr(config, "AGENT_ANSWER", 4.0)
    for _ in range(3):
        slot = take(client)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(client.request, "slot", (), 60.0, size=5000, wait=60_000, ticket=TICKET, held=[])
        with pytest.raises(TimeoutError):
            asking.result(3.0)  # more than a look at whether it is there, and its answer
        client.request("release", slot=slot, ticket=TICKET)
        with asking.result(30) as reply:
            assert reply.fields["slot"] == slot
    assert not client.silent


def test_a_slot_whose_reply_nobody_has_is_given_out_again(client: Client) -> None:
    slots = {take(client) for _ in range(3)}
    with pytest.raises(ArenaFullError):
        client.request("slot", size=5000, wait=0, ticket=TICKET + 1, held=[TICKET])
    with client.request("slot", size=5000, wait=0, ticket=TICKET + 2, held=[]) as reply:
        found = reply.fields["slot"]
        assert found in slots
    # Whoever had it before has it no more.
    for op in ("release", "seal"):
        with pytest.raises(StateError, match="is not one that rank 0 is filling"):
            if op == "release":
                client.request("release", slot=found, ticket=TICKET)
            else:
                seal(client, 1, found)  # type: ignore[arg-type]
    client.request("release", slot=found, ticket=TICKET + 2)


def test_what_was_given_up_before_it_was_begun_is_not_done(client: Client) -> None:
    """A stopped agent finds requests when it goes on; what their senders have done since must not be undone."""
    slot = take(client)
    pid = status()["pid"]
    channel = client._take(start=False)
    stop(pid)
    channel.send({"op": "release", "slot": slot, "ticket": TICKET})
    client._lost(channel)
    os.kill(pid, signal.SIGCONT)
    others = {take(client) for _ in range(2)}
    assert slot not in others
    with pytest.raises(ArenaFullError):
        take(client)
    client.request("release", slot=slot, ticket=TICKET)


def interrupt(client: Client, root: Path) -> None:
    """A KeyboardInterrupt takes the reply from who has asked."""

    def interrupted(_: Channel) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Channel, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.request("held", root=str(root))


def test_an_interrupted_request_takes_no_slot_from_others(client: Client, tmp_path: Path) -> None:
    """Its connection ends, often the only one on which anything was asked; but the process lives and goes on filling."""
    for step in range(10):
        slot = take(client)
        interrupt(client, tmp_path)
        seal(client, step, slot)
        client.request("complete", step=step, due=False)
    kill(status()["pid"])
    for step in range(10):  # nor from those of the agent that takes the dead one's place
        slot = take(client)
        interrupt(client, tmp_path)
        seal(client, step, slot)
        client.request("complete", step=step, due=False)
    assert client.epoch == 2
    client.close()
    until(nobody_is_there)


@pytest.mark.parametrize("says_bye", [True, False])
def test_who_leaves_after_an_interrupt_is_not_taken_to_be_there(client: Client, tmp_path: Path, says_bye: bool) -> None:
    take(client)
    interrupt(client, tmp_path)
    pid = status()["pid"]
    if says_bye:
        client.bye()
        assert gone(pid)
    else:
        client.close()
        until(nobody_is_there)


def test_a_failed_good_bye_leaves_no_connection(client: Client) -> None:
    """The agent would wait for ever for a process that does not come back."""
    client.reach()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(client, "_converse", _fails)
        with pytest.raises(AgentLostError):
            client.bye()
    until(nobody_is_there)


def _fails(*_: object) -> None:
    raise TimeoutError


def test_a_reply_that_was_read_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the agent would take a slot back whose reply has come, because who got it has closed that connection since."""
    ours, theirs = (Channel(sock) for sock in socket.socketpair())
    send_fds = socket.send_fds

    def read_at_once(*arguments: Any) -> int:
        sent = send_fds(*arguments)
        with theirs.receive() as message:
            assert message.fields == {"slot": 1} and len(message.descriptors) == 1
        theirs.close()
        return sent

    monkeypatch.setattr(socket, "send_fds", read_at_once)
    ours.send({"slot": 1}, [0])
    ours.close()


def test_many_that_start_it_at_once_get_one(tmp_path: Path) -> None:
    clients = [Client("run", "node", timeout=20.0) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(Client.reach, clients))
    assert len({client.agent for client in clients}) == 1
    for client in clients:
        client.close()


def test_a_socket_that_a_dead_agent_left_is_replaced(client: Client) -> None:
    (home,) = homes()
    kill(status()["pid"])
    assert home.socket.exists()
    assert take(client)


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "tierckpt").mkdir(mode=0o755)
    with pytest.raises(StoreError, match="closed to others"):
        Client("run", "node", timeout=20.0).connect()


def test_a_deep_runtime_folder_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    client = Client("run", "node", timeout=20.0)
    client.reach()
    assert len(statuses()) == 1
    client.close()
    end_all()  # nobody else looks for it there


def test_sigterm_ends_it(client: Client) -> None:
    pid = status()["pid"]
    os.kill(pid, signal.SIGTERM)
    assert gone(pid)
    assert not homes()


def test_another_version_is_told(client: Client) -> None:
    with raw() as channel:
        channel.send({"node": "node", "op": "hello", "run": "run", "version": 2})
        kind, text = channel.receive().fields["error"]  # type: ignore[misc]
        assert kind == "StateError" and "version 1" in text


# Hostile messages


class raw:  # noqa: N801
    """A connection that says what it likes."""

    def __enter__(self) -> Channel:
        home = Home.of("node", "run", make=False)
        assert home is not None
        sock = home.connect(20.0)
        assert sock is not None
        self.channel = Channel(sock)
        return self.channel

    def __exit__(self, *_: object) -> None:
        self.channel.close()


def refused(channel: Channel) -> None:
    """The agent says IntegrityError and closes."""
    kind, _ = channel.receive().fields["error"]  # type: ignore[misc]
    assert kind == "IntegrityError"
    with pytest.raises((EOFError, ConnectionResetError)):
        channel.receive()


def alive() -> None:
    with raw() as channel:
        channel.send({"node": "node", "op": "hello", "run": "run", "version": 1})
        assert channel.receive().fields["ok"] is True


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**53 - 1) | st.text(max_size=8) | st.just("0" * 64) | st.just("/x"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
KEYS = (
    "size",
    "wait",
    "ticket",
    "held",
    "slot",
    "step",
    "root",
    "hash",
    "generation",
    "rank",
    "due",
    "world",
    "layout",
    "metadata",
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_message_harms_it(client: Client, data: st.DataObject) -> None:
    from tierckpt.agent.server import _OPERATIONS

    op = data.draw(st.sampled_from(sorted(_OPERATIONS)))
    keys = data.draw(st.sampled_from([_OPERATIONS[op][0], KEYS[:2]]))
    fields = {key: data.draw(VALUES) for key in keys if key not in ("wait", "idle", "deadline")}
    fields |= {key: 0 for key in keys if key in ("wait", "idle", "deadline")}
    greets = data.draw(st.booleans())
    with raw() as channel:
        if greets:
            channel.send({"node": "node", "op": "hello", "run": "run", "version": 1})
            channel.receive()
        channel.send({"op": op, **fields})
        with channel.receive() as reply:
            assert ("ok" in reply.fields) != ("error" in reply.fields)
            if "error" in reply.fields:
                kind, text = reply.fields["error"]  # type: ignore[misc]
                assert "the agent failed" not in text, text
                assert issubclass(getattr(__import__("tierckpt").errors, kind), TierckptError)
    alive()


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_harm_it(client: Client, junk: bytes, framed: bool) -> None:
    with raw() as channel:
        channel.sock.sendall(struct.pack(">I", len(junk)) + junk if framed else junk)
        channel.sock.shutdown(socket.SHUT_WR)
        try:
            while True:
                with channel.receive() as reply:
                    assert "error" in reply.fields
        except (EOFError, ConnectionResetError):
            pass
    alive()


def test_a_frame_that_is_too_long_is_refused_before_it_comes(client: Client) -> None:
    with raw() as channel:
        channel.sock.sendall(struct.pack(">I", FRAME_LIMIT + 1))
        refused(channel)


def test_a_deep_message_is_refused(client: Client) -> None:
    with raw() as channel:
        data = b"[" * 100_000 + b"]" * 100_000
        channel.sock.sendall(struct.pack(">I", len(data)) + data)
        refused(channel)


def test_too_many_descriptors_are_refused_and_closed(client: Client) -> None:
    before = len(os.listdir(f"/proc/{status()['pid']}/fd"))
    with raw() as channel:
        data = canonical.encode({"op": "status"})
        socket.send_fds(channel.sock, [struct.pack(">I", len(data)) + data], [0] * 20)
        refused(channel)
    until(lambda: len(os.listdir(f"/proc/{status()['pid']}/fd")) <= before)


def test_a_document_that_is_no_file_blocks_nobody(client: Client) -> None:
    slot = take(client)
    reading, writing = os.pipe()
    try:
        with pytest.raises(IntegrityError, match="regular file"):
            client.request(
                "seal",
                [reading],
                step=1,
                slot=slot,
                ticket=TICKET,
                size=10,
                header_size=0,
                header_digest="0" * 64,
                layout=HASH,
                metadata=None,
                due=False,
                pinned=False,
            )
    finally:
        os.close(reading)
        os.close(writing)
    alive()


def test_who_stops_in_the_middle_of_a_frame_blocks_nobody(client: Client) -> None:
    with raw() as channel:
        channel.sock.sendall(struct.pack(">I", 1000) + b"{")
        alive()
        take(client)


def test_what_was_made_for_another_chain_is_forgotten(client: Client, tmp_path: Path) -> None:
    """The store was removed: its former life has the same run and perhaps a newer generation, but other links."""
    seal(client, 1, take(client))
    client.request("complete", step=1, due=False)
    other = Client("run", "node", timeout=20.0)
    with pytest.raises(StateError, match="another chain"):
        other.join(joining(tmp_path, begun=begun(1, "b")))
    client.close()
    until(nobody_is_there)
    other.join(joining(tmp_path, begun=begun(1, "b")))
    with other.request("held", root=str(tmp_path)) as reply:
        assert reply.fields["snapshots"] == []
    seal(other, 1, take(other))
    with other.request("held", root=str(tmp_path)) as reply:
        assert [held["begin"] for held in reply.fields["snapshots"]] == [begun(1, "b")[0][1]]  # type: ignore[index,union-attr]
    other.close()


def test_layouts_that_nothing_needs_any_more_are_forgotten(client: Client) -> None:
    for step in (1, 2):
        seal(client, step, take(client))
        client.request("complete", step=step, due=False)
    seal(client, 3, take(client), layout=b"another layout")
    client.request("layout", hash=HASH).__exit__(None, None, None)  # step 2 has it
    client.request("complete", step=3, due=False)

    def forgotten() -> bool:
        try:
            client.request("layout", hash=HASH).__exit__(None, None, None)
        except IncompleteError:
            return True
        return False

    until(forgotten)


def test_a_job_on_a_copy_of_the_store_takes_nothing_from_the_original(client: Client, tmp_path: Path) -> None:
    """A copy has the run and the links of the original, and goes on from where that was."""
    seal(client, 1, take(client))
    client.request("complete", step=1, due=False)
    copy = Client("run", "node", timeout=20.0)
    with pytest.raises(StateError, match="another store of the same run, a copy perhaps"):
        copy.join(joining(tmp_path / "copy", 2))
    seal(client, 2, take(client))
    client.request("complete", step=2, due=False)
    with client.request("held", root=str(tmp_path)) as reply:
        assert [held["step"] for held in reply.fields["snapshots"]] == [2]  # type: ignore[index,union-attr]
    copy.close()


def test_what_is_read_of_a_forgotten_chain_takes_nothing_from_the_new_one(client: Client, tmp_path: Path) -> None:
    """Both have a generation of the same number; who reads of the old one, or drains it, ends after the new one has begun."""
    seal(client, 1, take(client))
    client.request("complete", step=1, due=False)
    reader = Client("run", "node", timeout=20.0)
    reader.request("fetch", generation=1, step=1, rank=0).__exit__(None, None, None)
    before = status()["held"]
    client.close()
    until(nobody_is_there)
    other = Client("run", "node", timeout=20.0)
    other.join(joining(tmp_path, begun=begun(1, "b")))
    seal(other, 1, take(other))
    assert status()["held"] == 2 * before
    reader.close()
    until(lambda: status()["held"] == before)
    with other.request("held", root=str(tmp_path)) as reply:
        assert [held["begin"] for held in reply.fields["snapshots"]] == [begun(1, "b")[0][1]]  # type: ignore[index,union-attr]
    other.close()


def nobody_is_there() -> bool:
    return all(rank != "alive" for generation in status()["generations"] for rank in generation["ranks"].values())


def test_an_older_generation_of_another_chain_is_no_reason_to_fence(client: Client, tmp_path: Path) -> None:
    """After a roll-back the numbers begin again below those of the time line that was rolled away."""
    client.close()
    first = Client("run", "node", timeout=20.0)
    first.join(joining(tmp_path, 5))
    first.close()
    second = Client("run", "node", timeout=20.0)
    until(nobody_is_there)
    second.join(joining(tmp_path, 3, begun=[*begun(2), (3, derive("b", b"3").hex())]))
    seal(second, 1, take(second))
    second.close()


def test_a_fork_keeps_no_connection_that_is_just_being_made(client: Client) -> None:
    """Else the agent takes a trainer that was killed for alive as long as its data loaders are there."""
    channel = client._reach(False, time.monotonic() + 10)

    def look() -> None:
        assert channel.sock.fileno() < 0

    assert forked(look) == 0
    assert channel.sock.fileno() >= 0
    channel.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_interrupted_request_leaves_no_connection(client: Client) -> None:
    """It is closed, also where nobody has it in hand."""

    def ask() -> None:
        client.request("settled", step=1, durable=True)

    ask()
    number, before = 0, len(os.listdir("/proc/self/fd"))
    while where := interrupted(number := number + 1, {client_module.__file__}, ask):
        gc.collect()
        assert not client._busy and len(os.listdir("/proc/self/fd")) <= before, where
    assert number > 10
