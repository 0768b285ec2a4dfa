"""K06: what fails on one rank fails the save on all of them, soon, with the reason, and harms nothing else.

The arm with an object store that throttles waits for that.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tierckpt
from tests.agents import status, until
from tests.cases.common import Faults, blank, fails_for, files_of, folder_of, holds, on_write, shard_of, sharded, state
from tests.harness import run_ranks
from tierckpt import Checkpointer, Disk, StoreError, config, group
from tierckpt.errors import LostContactError
from tierckpt.snapshot.remote import RemoteArena


def test_c25_a_failed_save_raises_at_wait_and_harms_nothing(tmp_path: Path, agent: str, faults: Faults) -> None:
    root = tmp_path / "s"
    with Checkpointer(root, tiers=[Disk(keep=1, grace=0)], agent=agent) as ckpt:
        ckpt.save(1, state(1)).wait()
        faults.fail(folder_of(2), errno=errno.EIO)
        handle = ckpt.save(2, state(2))
        with pytest.raises(StoreError, match=f"{shard_of(root, 2)}.*{os.strerror(errno.EIO)}") as caught:
            handle.wait()
        faults.clear()
        if agent == "off":  # from another process comes the text alone
            cause = caught.value.__cause__
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__
            assert isinstance(cause, OSError) and cause.errno == errno.EIO
        assert isinstance(handle.error, StoreError) and not handle.done()
        assert tierckpt.steps(root) == [1]
        assert not files_of(root, 2)
        assert tierckpt.verify(root).ok
        ckpt.save(3, state(3)).wait()  # no warning: wait() has told
        assert tierckpt.steps(root) == [3]
    found = blank()
    assert tierckpt.load(found, root).step == 3 and holds(found, 3)


def test_c25_a_failure_nobody_waited_for_surfaces_at_the_next_save(tmp_path: Path, agent: str, faults: Faults) -> None:
    root = tmp_path / "s"
    ckpt = Checkpointer(root, tiers=[Disk(keep=1, grace=0)], agent=agent)
    ckpt.save(1, state(1)).wait()
    faults.fail(folder_of(2), errno=errno.EIO)
    ckpt.save(2, state(2))
    ckpt.wait()
    faults.clear()
    assert tierckpt.steps(root) == [1]
    with pytest.warns(RuntimeWarning, match=f"step 2 failed.*{os.strerror(errno.EIO)}"):
        handle = ckpt.save(3, state(3))
    handle.wait()
    assert tierckpt.steps(root) == [3]
    ckpt.close()


def test_c25_a_failure_of_the_last_save_surfaces_at_close(tmp_path: Path, agent: str, faults: Faults) -> None:
    root = tmp_path / "s"
    ckpt = Checkpointer(root, agent=agent)
    ckpt.save(1, state(1)).wait()
    faults.fail(folder_of(2), errno=errno.EIO)
    ckpt.save(2, state(2))
    with pytest.warns(RuntimeWarning, match="step 2 failed"):
        ckpt.close()
    faults.clear()
    assert tierckpt.latest(root) == 1


def test_c25_on_error_raise_raises_at_the_next_save(tmp_path: Path, agent: str, faults: Faults) -> None:
    root = tmp_path / "s"
    ckpt = Checkpointer(root, agent=agent, on_error="raise")
    faults.fail(folder_of(1), errno=errno.EIO)
    ckpt.save(1, state(1))
    ckpt.wait()
    faults.clear()
    with pytest.raises(StoreError, match=f"step 1 failed.*{os.strerror(errno.EIO)}"):
        ckpt.save(2, state(2))
    ckpt.save(3, state(3)).wait()
    assert tierckpt.steps(root) == [3]
    ckpt.close()


def test_c25_a_functional_async_save_that_failed_is_told_of_too(tmp_path: Path) -> None:
    tierckpt.save(state(1), tmp_path, 1)
    undo = on_write(fails_for(2, errno.EIO))
    handle = tierckpt.async_save(state(2), tmp_path, 2)
    assert handle._ended.wait(50) and handle.error is not None
    undo()
    with pytest.warns(RuntimeWarning, match="step 2 failed"):
        tierckpt.save(state(3), tmp_path, 3)
    assert tierckpt.steps(tmp_path) == [1, 3]


def _no_space_on_rank_2(rank: int, root: str) -> dict[str, Any]:
    tierckpt.save(sharded(1.0), root, 1)
    undo = on_write(fails_for(2, errno.ENOSPC)) if rank == 2 else lambda: None
    began = time.monotonic()
    try:
        tierckpt.save(sharded(2.0), root, 2)
    except Exception as error:
        told = {"type": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}
    undo()
    told["steps"] = tierckpt.steps(root)
    told["generation"] = tierckpt.save(sharded(3.0), root, 3).generation
    template = sharded(-1.0)
    told["loaded"] = tierckpt.load(template, root).step, template["w"].to_local().unique().tolist()
    return told


def test_c27_one_rank_out_of_space_fails_the_save_on_all(tmp_path: Path) -> None:
    for told in run_ranks(_no_space_on_rank_2, 4, str(tmp_path)):
        assert told["type"] == "StoreError"
        assert "rank 2" in told["text"] and os.strerror(errno.ENOSPC) in told["text"], told
        assert str(shard_of(tmp_path, 2, rank=2)) in told["text"]
        assert told["seconds"] < 10
        assert told["steps"] == [1]
        assert told["generation"] == 1
        assert told["loaded"] == (3, [3.0])
    assert tierckpt.steps(tmp_path) == [1, 3]
    assert not files_of(tmp_path, 2)
    report = tierckpt.verify(tmp_path, every=True)
    assert report.ok and not report.notes, (report.problems, report.notes)


def _no_space_in_the_agent(rank: int, root: str, rules: str) -> dict[str, Any]:
    """The agent of rank 2, which may be that of all ranks, finds no room for its shard of step 2."""
    faults = Faults(rules)
    told: dict[str, Any] = {}
    with Checkpointer(root) as ckpt:
        ckpt.save(1, sharded(1.0)).wait()
        if rank == 2:
            faults.fail(folder_of(2), "shard-00002", errno=errno.ENOSPC)
        dist.barrier()
        began = time.monotonic()
        try:
            ckpt.save(2, sharded(2.0)).wait()
        except Exception as error:
            told = {"type": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}
        told["steps"] = tierckpt.steps(root)
        dist.barrier()
        faults.clear()
        ckpt.save(3, sharded(3.0)).wait()
        template = sharded(-1.0)
        told["loaded"] = tierckpt.load(template, root).step, template["w"].to_local().unique().tolist()
    return told


@pytest.mark.parametrize("nodes", [1, 4])
def test_c27_an_agent_out_of_space_fails_the_save_on_all(tmp_path: Path, nodes: int) -> None:
    root, rules = tmp_path / "s", tmp_path / "rules"
    env = [{"TIERCKPT_NODE": f"node {rank % nodes}"} for rank in range(4)]
    for told in run_ranks(_no_space_in_the_agent, 4, str(root), str(rules), env=env):
        assert told["type"] == "StoreError"
        assert "rank 2" in told["text"] and os.strerror(errno.ENOSPC) in told["text"], told
        assert told["seconds"] < 10
        assert told["steps"] == [1]
        assert told["loaded"] == (3, [3.0])
    assert tierckpt.steps(root) == [1, 3]
    assert not files_of(root, 2)
    report = tierckpt.verify(root, every=True)
    assert report.ok, report.problems


def _rank_dies_beside_its_agent(rank: int, root: str, dead: int) -> tuple[str, str, float]:
    vars(group)["ANSWER_SECONDS"] = 1.0
    ckpt = Checkpointer(root)
    ckpt.save(1, sharded(1.0)).wait()
    if rank == dead:
        # Everything is in the slot, and nobody knows.
        RemoteArena.seal = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, misc, assignment]
    began = time.monotonic()
    try:
        ckpt.save(2, sharded(2.0)).wait()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    raise AssertionError("saved without one of the ranks")


def _restarted_with_agents(rank: int, root: str) -> tuple[int, list[float], int]:
    template = sharded(-1.0)
    with Checkpointer(root) as ckpt:
        info = ckpt.restore(template)
        assert info is not None
        found = template["w"].to_local().unique().tolist()
        saved = ckpt.save(2, sharded(2.0)).wait()
        assert saved is not None
        return info.step, found, saved.generation


@pytest.mark.parametrize("dead", [0, 2])
@pytest.mark.parametrize("nodes", [1, 4])
def test_c27_a_rank_killed_before_its_seal_fails_the_save_on_the_others(tmp_path: Path, dead: int, nodes: int) -> None:
    env = [{"TIERCKPT_TIMEOUT": "20", "TIERCKPT_NODE": f"node {rank % nodes}"} for rank in range(4)]
    told = run_ranks(_rank_dies_beside_its_agent, 4, str(tmp_path / "s"), dead, dies={dead}, env=env)
    for rank in {0, 1, 2, 3} - {dead}:
        kind, text, seconds = told[rank]
        assert kind == "LostContactError"
        assert f"lost contact with rank {dead};" in text, text
        assert seconds < 10
    assert tierckpt.steps(tmp_path / "s") == [1]
    assert tierckpt.verify(tmp_path / "s").ok
    assert run_ranks(_restarted_with_agents, 4, str(tmp_path / "s"), env=env) == [(1, [1.0], 2)] * 4
    assert tierckpt.steps(tmp_path / "s") == [1, 2]
    assert tierckpt.verify(tmp_path / "s", every=True).ok


def _rank_dies(rank: int, root: str, dead: int, when: str) -> tuple[str, str, float]:
    vars(group)["ANSWER_SECONDS"] = 1.0
    tierckpt.save(sharded(1.0), root, 1)

    def die(path: str = "/s000000000002/") -> None:
        if "/s000000000002/" in path:
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == dead:
        if when == "before":
            die()
        on_write(die)
    began = time.monotonic()
    try:
        if when == "async":
            tierckpt.async_save(sharded(2.0), root, 2).wait()
        else:
            tierckpt.save(sharded(2.0), root, 2)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    raise AssertionError("saved without one of the ranks")


@pytest.mark.parametrize(("dead", "when"), [(2, "writing"), (2, "before"), (0, "async")])
def test_c27_a_killed_rank_fails_the_save_on_the_others(tmp_path: Path, dead: int, when: str) -> None:
    told = run_ranks(_rank_dies, 4, str(tmp_path), dead, when, dies={dead}, env={"TIERCKPT_TIMEOUT": "20"})
    for rank in {0, 1, 2, 3} - {dead}:
        kind, text, seconds = told[rank]
        assert kind == "LostContactError"
        assert f"lost contact with rank {dead};" in text, text
        assert seconds < 10
    assert tierckpt.steps(tmp_path) == [1]
    assert tierckpt.verify(tmp_path).ok
    # The restarted job goes on.
    assert run_ranks(_restarted, 4, str(tmp_path)) == [(1, [1.0], 2)] * 4
    assert tierckpt.steps(tmp_path) == [1, 2]
    assert not [name for name in files_of(tmp_path, 2) if name.startswith("g0001/")]
    assert tierckpt.verify(tmp_path, every=True).ok


def _restarted(rank: int, root: str) -> tuple[int, list[float], int]:
    template = sharded(-1.0)
    step = tierckpt.load(template, root).step
    return step, template["w"].to_local().unique().tolist(), tierckpt.save(sharded(2.0), root, 2).generation


def _comes_late(rank: int, root: str, gate: str) -> str:
    vars(group)["ANSWER_SECONDS"] = 1.0
    tierckpt.save(sharded(1.0), root, 1, timeout=1.0)
    if rank == 1:
        until(Path(gate).exists)
    try:
        tierckpt.save(sharded(2.0), root, 2, timeout=1.0)
    except StoreError as error:
        Path(gate).touch()
        return str(error)
    return "saved"


def test_c27_a_rank_that_does_not_come_is_named_after_the_timeout(tmp_path: Path) -> None:
    first, late = run_ranks(_comes_late, 2, str(tmp_path / "store"), str(tmp_path / "gate"))
    assert "lost contact with rank 1;" in first and "1 s (TIERCKPT_TIMEOUT)" in first
    assert late != "saved"
    assert tierckpt.steps(tmp_path / "store") == [1]


def _hears_nothing_back(rank: int, root: str) -> tuple[str, str]:
    """Rank 1 has told that its shard is durable, but loses contact before it hears the others; rank 0 hears all."""
    from tierckpt.agent.drain import Drain

    tierckpt.save(sharded(1.0), root, 1)
    write = Drain._write

    def written(drain: Any, *job: Any) -> bytes:
        exchange = drain._ranks.exchange

        def deaf(payload: bytes) -> list[bytes]:
            exchange(payload)
            raise LostContactError("rank 1: lost contact")

        if rank == 1:
            drain._ranks.exchange = deaf
        return write(drain, *job)

    setattr(Drain, "_write", written)  # noqa: B010
    vars(group)["ANSWER_SECONDS"] = 0.2
    try:
        return "saved", str(tierckpt.save(sharded(2.0), root, 2, timeout=5.0).step)
    except LostContactError as error:
        return "lost", str(error)


def test_a_rank_that_lost_contact_leaves_its_shard_to_whoever_commits(tmp_path: Path) -> None:
    """A vote may succeed on some ranks and break on others: then nobody may take back what the others count on."""
    run_ranks(_hears_nothing_back, 2, str(tmp_path))
    assert tierckpt.latest(tmp_path) == 2
    report = tierckpt.verify(tmp_path, every=True)
    assert report.ok, report.problems


def _late_folder(rank: int, root: str, agent: str, rules: str) -> tuple[int, bool]:
    """The destination is there for rank 0 only, for a while; the first write of rank 3 fails for a passing reason."""
    seen = time.monotonic() + 1.0
    faults = Faults(rules)
    if rank == 3:
        faults.fail(os.path.basename(root), "shard-00003", errno=errno.EAGAIN, once=True)
    dist.barrier()
    if rank:
        stat, lstat, exists, isdir = os.stat, os.lstat, os.path.exists, os.path.isdir

        def late(path: Any) -> bool:
            name = str(path)
            return name.startswith(root) and time.monotonic() < seen

        def blind(original: Any) -> Any:
            def look(path: Any, *args: Any, **more: Any) -> Any:
                if not isinstance(path, int) and late(os.fspath(path)):
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
                return original(path, *args, **more)

            return look

        os.stat, os.lstat = blind(stat), blind(lstat)
        os.path.exists = lambda path: not late(path) and exists(path)
        os.path.isdir = lambda path: not late(path) and isdir(path)  # type: ignore[assignment]

    with Checkpointer(root, agent=agent) as ckpt:
        info = ckpt.save(1, sharded(1.0)).wait()
    assert info is not None
    return info.step, faults.left


@pytest.mark.parametrize("nodes", [1, 4])
def test_c29_ranks_decide_together_about_retries_and_folders(tmp_path: Path, agent: str, nodes: int) -> None:
    root = tmp_path / "store"
    root.mkdir()
    env = [{"TIERCKPT_NODE": f"node {rank % nodes}"} for rank in range(4)]
    told = run_ranks(_late_folder, 4, str(root), agent, str(tmp_path / "rules"), timeout=30, env=env)
    assert told == [(1, False)] * 4
    report = tierckpt.verify(root)
    assert report.ok and not report.notes
    template = tierckpt.read(root)
    assert bool((template["w"] == 1).all())


def _never_gets_better(rank: int, root: str) -> str:
    from tierckpt.tiers import chunks

    vars(chunks)["WRITE_BACKOFF"] = 0.001
    if rank == 3:
        on_write(fails_for(1, errno.EAGAIN))
    with pytest.raises(StoreError) as caught:
        tierckpt.save(sharded(1.0), root, 1)
    return str(caught.value)


def test_c29_retries_end(tmp_path: Path) -> None:
    texts = run_ranks(_never_gets_better, 4, str(tmp_path), timeout=30)
    assert len(set(texts)) == 1 and "rank 3" in texts[0] and os.strerror(errno.EAGAIN) in texts[0]
    assert tierckpt.latest(tmp_path) is None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("then", ["goes on", "fails"])
def test_an_agent_that_stands_still_in_the_middle_of_a_write_spoils_nothing_when_it_goes_on(
    tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """The trainer has written the same step in its place meanwhile."""
    root, size = tmp_path / "s", 3 << 20  # more chunks than are written at once
    with Checkpointer(root, agent="auto") as ckpt:
        ckpt.save(1, state(1, size=size)).wait()
        begun = faults.hold(folder_of(2))
        handle = ckpt.save(2, state(2, size=size))
        until(begun)
        monkeypatch.setattr(config, "AGENT_ANSWER", 2.0)
        pid = int(status()["pid"])
        os.kill(pid, signal.SIGSTOP)
        faults.clear()
        assert handle.wait() is not None
        if then == "fails":
            faults.fail(folder_of(2), "shard", errno=errno.EIO)
        os.kill(pid, signal.SIGCONT)
        assert ckpt._ram_tier is not None
        until(lambda: ckpt._ram_tier.arena.answers)  # type: ignore[union-attr]
        drained = "failures" if then == "fails" else "shards"
        before = {"failures": 0, "shards": 1}[drained]
        until(lambda: status()["drained"][drained] > before)
        faults.clear()
        monkeypatch.setattr(config, "AGENT_ANSWER", 15.0)
        assert tierckpt.verify(root, every=True).ok
        for step in range(3, 8):
            ckpt.save(step, state(step, size=size)).wait()
    found = blank(size=size)
    assert tierckpt.load(found, root, step=2).sources.keys() == {"disk"} and holds(found, 2)
    assert tierckpt.steps(root) == list(range(1, 8)) and tierckpt.verify(root, every=True).ok
