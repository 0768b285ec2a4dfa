"""Agents that are told to end, and what of the trainers' work they must not take with them."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tierckpt
from tests.agent.job import state, values
from tests.agents import at_the_next_write, end_all, gone, slot_ahead, status, statuses, tell, until
from tests.harness import run_ranks, spawn
from tierckpt import Checkpointer, Disk, Ram, SkippedError, config
from tierckpt.agent import orphans
from tierckpt.agent.runtime import Home
from tierckpt.agent.server import Server
from tierckpt.agent.snapshots import Generation, Signing, Snapshot
from tierckpt.agent.writing import Title
from tierckpt.errors import AgentLostError
from tierckpt.format.receipt import Receipt
from tierckpt.tiers.disk import DiskPlace

RARELY = Disk(every=1000)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """An agent in this process, for what is a matter of moments."""
    with socket.socket(socket.AF_UNIX) as listener:
        yield Server(Home(tmp_path, "x"), listener, node="n", run="r")


def joined(server: Server, root: Path) -> Generation:
    """A generation whose trainer is there."""
    place = DiskPlace(str(root))
    generation = Generation(1, {1: "b"}, 1, str(root), place, roots=1, slots=3, locals=frozenset({0}))
    return server.holdings.join(generation, 0, "client", 1 << 20, None)


def test_it_does_not_end_between_the_signal_and_the_look_at_what_is_to_be_drained(
    server: Server, tmp_path: Path
) -> None:
    generation = joined(server, tmp_path)
    assert server._left() is None
    server._stopped(signal.SIGTERM, None)
    server._deadline = 0.0
    assert server._left() != 0.0
    server.gone(generation)
    until(lambda: server._left() == 0.0)
    assert generation.settled


def test_a_step_that_is_complete_late_is_written_too(server: Server, tmp_path: Path) -> None:
    """Its last rank says so when what was there before is already on the disk."""
    generation = joined(server, tmp_path)
    title = Title("r", 1, 5, 0, 1)
    nothing = Snapshot(
        generation, title, None, 0, header_size=0, header_digest="", layout="l", metadata=None, due=False, pinned=False
    )
    server.holdings.seal(generation, 0, 5, None, 0, lambda slot: nothing)
    server._stopped(signal.SIGTERM, None)
    server.gone(generation)
    until(lambda: generation.settled)
    server.holdings.complete(generation, 0, 5, due=False)
    assert not generation.settled and not server._close()
    server.gone(generation)
    until(server._close)
    with pytest.raises(AgentLostError):
        server.holdings.complete(generation, 0, 5, due=False)


def test_the_last_attempt_comes_when_its_time_is_over(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room may have been made on a full disk since the one before."""
    attempts: list[float] = []
    monkeypatch.setattr(config, "DRAIN_PAUSE", 1000.0)
    monkeypatch.setattr(orphans, "settle", lambda *_: attempts.append(server._patience))
    generation = joined(server, tmp_path)
    server._deadline = 0.2
    server._stopped(signal.SIGTERM, None)
    server.gone(generation)
    until(lambda: generation.settled)
    assert len(attempts) == 2 and attempts[0] > 0.0 == attempts[1]


def test_it_finishes_although_no_thread_is_to_be_had(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    generation = joined(server, tmp_path)
    server.holdings.leave(generation, 0, bye=False)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    server.gone(generation)
    assert generation.settled and not server._settling


def obstacle(root: Path, step: int) -> Path:
    """A step cannot be written until this is out of the way."""
    path = root / f"g0001/s{step:012d}"
    path.write_bytes(b"")
    return path


def told_to_end() -> int:
    """The only agent, which has just been."""
    pid: int = status()["pid"]
    os.kill(pid, signal.SIGTERM)
    until(lambda: status()["ending"])
    return pid


def test_what_could_not_be_drained_at_a_good_end_stays_and_is_tried_again(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with Checkpointer(root, tiers=[Ram(), RARELY]) as ckpt:
        for step in range(3):
            ckpt.save(step, state(step)).wait("ram" if step else None)
        blocked = obstacle(root, 2)
        with pytest.warns(RuntimeWarning, match="the save of step 2 failed"):
            ckpt.close()
    assert [step["step"] for step in status()["generations"][0]["steps"]] == [2]
    blocked.unlink()
    until(lambda: tierckpt.steps(root) == [0, 2])
    until(lambda: not statuses())


def test_an_agent_that_is_told_to_end_takes_nothing_new(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with Checkpointer(root, tiers=[Ram(), Disk(every=10)]) as ckpt:
        for step in range(2):
            ckpt.save(step, state(step)).wait("ram" if step else None)
        blocked = obstacle(root, 1)
        pid = told_to_end()
        with pytest.raises(SkippedError, match="agent"):
            ckpt.save(2, state(2)).wait("ram")
        due = ckpt.save(10, state(10))  # from the memory of this process
        with pytest.raises(SkippedError, match="agent"):
            due.wait("ram")
        due.wait("disk")
        blocked.unlink()
        assert gone(pid)
        ckpt.save(11, state(11)).wait("ram")
        assert status()["pid"] != pid
    assert set(tierckpt.steps(root)) - {1} == {0, 10, 11}
    assert tierckpt.verify(root, every=True).ok


def test_an_agent_that_is_told_to_end_writes_what_is_due_first(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with Checkpointer(root, tiers=[Ram(), Disk()]) as ckpt:
        ckpt.save(1, state(1)).wait()
        pids: list[int] = []
        at_the_next_write(ckpt, lambda: pids.append(told_to_end()))
        handle = ckpt.save(2, state(2))
        handle.wait("ram")
        handle.wait("disk")
        assert gone(pids[0])
        ckpt.save(3, state(3)).wait()
    assert tierckpt.steps(root) == [1, 2, 3] and tierckpt.verify(root, every=True).ok


def test_files_that_others_may_be_writing_are_not_cleaned_up(tmp_path: Path) -> None:
    """After a failure a trainer looks for left-overs: an agent may be writing for the same generation."""
    root = tmp_path / "s"
    with Checkpointer(root, agent="off") as ckpt:
        ckpt.save(0, state(0)).wait()
        being_written = root / "g0001/s000000000011/shard-00000.safetensors"
        being_written.parent.mkdir()
        being_written.write_bytes(b"x")
        ckpt._coordinator._littered = True
        ckpt.save(1, state(1)).wait()
        assert being_written.exists()


@pytest.mark.parametrize(("written", "hours", "stays"), [(True, 1, True), (False, 1, False), (True, 30, False)])
def test_prune_leaves_alone_what_the_next_start_may_put_together(
    tmp_path: Path, written: bool, hours: int, stays: bool
) -> None:
    root = tmp_path / "s"
    with Checkpointer(root, agent="off") as ckpt:
        ckpt.save(0, state(0)).wait()
    names = ["shard-00000.safetensors", *(["shard-00000.receipt.json"] if written else [])]
    paths = [root / "g0001/s000000000007" / name for name in names]
    paths[0].parent.mkdir()
    for path in paths:
        path.write_bytes(b"x")
        os.utime(path, (then := time.time() - 3600 * hours, then))
    tierckpt.prune(root, grace=0)
    assert [path.exists() for path in paths] == [stays] * len(paths)


def test_a_step_that_arrives_while_older_ones_are_sealed_drops_none(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", tiers=[Ram(), Disk(every=2)]) as ckpt:
        handles = [ckpt.save(step, state(step)) for step in (0, 3, 2, 5, 4, 7, 6, 9, 8)]
        ckpt.wait()
        wrong = [handle.error for handle in handles if handle.error is not None]
        assert all(isinstance(error, SkippedError) for error in wrong), wrong


def _seal_copy(server: Server, generation: Generation, step: int) -> None:
    """What step 0 is on the disk, as the only rank's part of another one."""
    folder = Path(generation.root, "g0001/s000000000000")
    data = (folder / "shard-00000.safetensors").read_bytes()
    receipt = Receipt.decode((folder / "shard-00000.receipt.json").read_bytes(), what="the receipt")
    slot = server.holdings.slot(generation, 0, len(data), 0.0, lambda: False, step, set())
    slot.memory[: len(data)] = data

    def make(slot: Any) -> Snapshot:
        return Snapshot(
            generation,
            Title("r", generation.number, step, 0, 1),
            slot,
            len(data),
            header_size=receipt.header_size,
            header_digest=receipt.header_digest,
            layout=receipt.layout,
            metadata=receipt.metadata,
            due=False,
            pinned=False,
        )

    layout = Path(generation.root, "layouts", f"{receipt.layout}.safetensors").read_bytes()
    server.holdings.keep_layout(generation, 0, receipt.layout, layout)
    server.holdings.seal(generation, 0, step, slot.number, step, make)
    server.holdings.complete(generation, 0, step, due=False)


@pytest.mark.parametrize("first", ["commit", "discard"])
def test_files_of_a_failed_step_go_before_it_is_committed_or_stay(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """An agent that is told to end makes durable what its living trainers could not, while these clean up after the failure."""
    root = tmp_path / "s"
    with Checkpointer(root, run="r", agent="off") as ckpt:
        ckpt.save(0, state(0)).wait()
        begin, key = ckpt._coordinator.begun[-1][1], ckpt._coordinator.signing
    generation = Generation(1, {1: begin}, 1, str(root), DiskPlace(str(root)), roots=1, slots=3, locals=frozenset({0}))
    generation = server.holdings.join(generation, 0, "client", 1 << 20, None)
    generation.signing = Signing(*key)
    _seal_copy(server, generation, 5)
    there, cleaning = [], threading.Thread(target=orphans.discard, args=(generation, [5]))

    def look(store: Any, manifest: Any) -> None:
        if first == "commit":
            cleaning.start()  # who is committing goes first
        there.append(Path(root, "g0001/s000000000005/shard-00000.safetensors").exists())
        check(store, manifest)

    check = orphans.check_present
    monkeypatch.setattr(orphans, "check_present", look)
    receipts = orphans._receipts

    def seen(*args: Any) -> Any:
        found = receipts(*args)
        if first == "discard":
            cleaning.run()
        return found

    monkeypatch.setattr(orphans, "_receipts", seen)
    done = orphans.settle(server.holdings, generation, 0.0)
    if first == "commit":
        cleaning.join()
    assert done == (first == "commit") and there == [first == "commit"], list(server.holdings.errors)
    assert tierckpt.steps(root) == ([0, 5] if done else [0])
    assert tierckpt.verify(root, every=True).ok
    assert Path(root, "g0001/s000000000005").exists() == done


NODES = [{"TIERCKPT_NODE": "a"}, {"TIERCKPT_NODE": "b"}]


def _first_agent_ends_first(rank: int, root: str, last: int) -> None:
    """The agent of rank 0's node is told to end, and has, while all ranks live; then these die."""
    ckpt = Checkpointer(root, tiers=[Ram(drain_deadline=0.5), RARELY])
    ckpt.restore(state(-1, rank))
    for step in range(last + 1):
        ckpt.save(step, state(step, rank)).wait("ram" if step else None)
    dist.barrier()
    if rank == 0:
        (pid,) = (one["pid"] for one in statuses() if one["node"] == "a")
        os.kill(pid, signal.SIGTERM)
        assert gone(pid)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _goes_on(rank: int, root: str, restores: bool) -> tuple[int, set[float], set[str]]:
    found = state(-1, rank)
    with Checkpointer(root, tiers=[Ram(), RARELY]) as ckpt:
        info = ckpt.restore(found) if restores else None
        ckpt.save(10, state(10, rank)).wait()
    return (info.step, values(found, rank), set(info.sources)) if info is not None else (-1, set(), set())


def _of_node(root: str) -> str:
    return f"{root}/{os.environ['TIERCKPT_NODE']}"


def _first_agent_ends_first_local(rank: int, root: str, last: int) -> None:
    _first_agent_ends_first(rank, _of_node(root), last)


def _goes_on_local(rank: int, root: str, restores: bool) -> tuple[int, set[float], set[str]]:
    return _goes_on(rank, _of_node(root), restores)


@pytest.mark.limit(120)
@pytest.mark.parametrize("restores", [True, False])
def test_what_an_agent_wrote_before_it_ended_is_put_together_with_what_others_hold(
    tmp_path: Path, restores: bool
) -> None:
    root = tmp_path / "s"
    spawn(_first_agent_ends_first, 2, str(root), 3, env=NODES)
    assert tierckpt.steps(root) == [0]
    told = run_ranks(_goes_on, 2, str(root), restores, env=NODES)
    if restores:
        assert [(step, found) for step, found, _ in told] == [(3, {3.0})] * 2
        assert all("ram" in sources for *_, sources in told) and any("disk" in sources for *_, sources in told)
    assert tierckpt.steps(root) == [0, 3, 10]
    report = tierckpt.verify(root, every=True)
    assert report.ok and not report.notes, (report.problems, report.notes)


@pytest.mark.limit(120)
def test_so_it_is_where_each_node_has_its_root(tmp_path: Path) -> None:
    spawn(_first_agent_ends_first_local, 2, str(tmp_path), 3, env=NODES)
    told = run_ranks(_goes_on_local, 2, str(tmp_path), True, env=NODES)
    assert [(step, found) for step, found, _ in told] == [(3, {3.0})] * 2
    for node in "ab":
        assert tierckpt.steps(tmp_path / node) == [0, 3, 10]
        report = tierckpt.verify(tmp_path / node, every=True)
        assert report.ok, report.problems


@pytest.mark.limit(120)
@pytest.mark.parametrize("what", ["shard-00000.safetensors", "shard-00000.receipt.json"])
def test_nothing_is_put_together_of_which_a_part_is_not_whole(tmp_path: Path, what: str) -> None:
    root = tmp_path / "s"
    spawn(_first_agent_ends_first, 2, str(root), 3, env=NODES)
    path = root / "g0001/s000000000003" / what
    path.write_bytes(path.read_bytes()[:4096] if what.endswith("safetensors") else b"{}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = run_ranks(_goes_on, 2, str(root), True, env=NODES)
    assert [(step, found) for step, found, _ in told] == [(0, {0.0})] * 2
    assert tierckpt.steps(root) == [0, 10] and tierckpt.verify(root, every=True).ok


@pytest.mark.limit(120)
def test_receipts_of_which_no_agent_knows_are_not_believed(tmp_path: Path) -> None:
    """They are not signed: whoever can write to the store could have made them."""
    root = tmp_path / "s"
    spawn(_first_agent_ends_first, 2, str(root), 3, env=NODES)
    until(lambda: all((root / f"g0001/s000000000003/shard-0000{rank}.receipt.json").exists() for rank in range(2)))
    end_all()
    told = run_ranks(_goes_on, 2, str(root), True, env=NODES)
    assert [(step, found) for step, found, _ in told] == [(0, {0.0})] * 2
    assert tierckpt.steps(root) == [0, 10] and tierckpt.verify(root, every=True).ok


def test_an_agent_writes_nothing_into_a_store_of_another_life(server: Server, tmp_path: Path) -> None:
    """Who signs looks; what the others write may be put together with it."""
    root = tmp_path / "s"
    with Checkpointer(root, agent="off") as ckpt:
        ckpt.save(1, state(1)).wait()
    generation = Generation(1, {1: "b"}, 2, str(root), DiskPlace(str(root)), roots=1, slots=3, locals=frozenset({1}))
    server.holdings.join(generation, 1, "client", 1 << 20, None)
    title = Title("r", 1, 7, 1, 2)
    server.holdings.seal(
        generation,
        1,
        7,
        None,
        0,
        lambda slot: Snapshot(
            generation,
            title,
            slot,
            1,
            header_size=0,
            header_digest="",
            layout="",
            metadata=None,
            due=False,
            pinned=False,
        ),
    )
    assert not orphans.settle(server.holdings, generation, 0.0)
    assert "removed, replaced or rolled back" in server.holdings.errors[-1]


def _seals_more_than_the_other_node(rank: int, root: str) -> None:
    ckpt = Checkpointer(root, run="r", tiers=[Ram(drain_deadline=3, idle=30, slots=6), RARELY])
    for step in range(4):
        ckpt.save(step, state(step, rank)).wait("ram" if step else None)
    assert ckpt._ram_tier is not None
    arena = ckpt._ram_tier.arena
    assert slot_ahead(ckpt)
    if rank == 1:
        (mine,) = (one["pid"] for one in statuses() if one["node"] == "b")
        os.kill(mine, signal.SIGSTOP)
        tell(Path(root).with_name("stopped"), str(mine))
    dist.barrier()
    ckpt.save(4, state(4, rank))
    if rank == 0:

        def sealed() -> bool:
            with arena._client.request("held", root=root) as reply:
                held: Any = reply.fields["snapshots"]
                return any(one["step"] == 4 for one in held)

        until(sealed)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_newest_step_that_all_nodes_have_is_drained(tmp_path: Path) -> None:
    """Trainers may die when one node has sealed a step that another has not."""
    root = tmp_path / "s"
    spawn(_seals_more_than_the_other_node, 2, str(root), env=NODES)
    os.kill(int((tmp_path / "stopped").read_text()), signal.SIGCONT)
    until(lambda: tierckpt.steps(root)[-1:] in ([3], [4]))
    assert tierckpt.verify(root, every=True).ok
