"""Node-local roots: each node's folder has the whole chain beside its own shards, and any layout loads from them.

Nodes are simulated by TIERCKPT_NODE; each rank's root is a folder of its own.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import tierckpt
from tests.harness import run_ranks
from tests.second_reader import verify_store
from tierckpt import Checkpointer, StoreError
from tierckpt.agent import roots


def _state(value: float) -> dict[str, Any]:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    rank = dist.get_rank()
    full = torch.arange(21, dtype=torch.float32).reshape(7, 3) + value
    rows = full.chunk(world)
    local = rows[rank].clone() if rank < len(rows) else full[:0].clone()
    sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(7, 3), stride=(3, 1))
    return {"w": sharded, "b": torch.full((1500, 1000), value), "step": int(value)}


def _exact(state: dict[str, Any], value: float) -> bool:
    full = torch.arange(21, dtype=torch.float32).reshape(7, 3) + value
    return (
        torch.equal(state["w"].full_tensor(), full)
        and bool((state["b"] == value).all())
        and state["step"] == int(value)
    )


def _train(rank: int, base: str, steps: list[int]) -> tuple[int | None, bool]:
    roots.PROBE_SECONDS = 0.1
    root = f"{base}/node{rank}"
    state = _state(0.0)
    with Checkpointer(root, agent="off") as ckpt:
        info = ckpt.restore(state)
        fine = info is None or _exact(state, float(info.step))
        for step in steps:
            ckpt.save(step, _state(float(step)))
    return (info.step if info else None), fine


def _nodes(world: int) -> list[dict[str, str]]:
    return [{"TIERCKPT_NODE": f"n{rank}"} for rank in range(world)]


def _files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_each_node_has_the_chain_and_its_own_shards(tmp_path: Path) -> None:
    assert run_ranks(_train, 3, str(tmp_path), [1, 2], env=_nodes(3)) == [(None, True)] * 3
    files = [_files(tmp_path / f"node{rank}") for rank in range(3)]
    common = set.intersection(*files)
    assert {name for name in common if name.startswith("chain/")} == {f"chain/{n:012d}.json" for n in range(3)}
    for rank in range(3):
        own = set(files[rank] - common)
        assert {name for name in own if f"shard-{rank:05d}" not in name} == set(), own
        assert tierckpt.steps(tmp_path / f"node{rank}") == [1, 2]
        report = tierckpt.verify(tmp_path / f"node{rank}", every=True)
        assert report.ok, report.problems
        assert any("held by other nodes" in note for note in report.notes)
        assert verify_store(tmp_path / f"node{rank}") == []
    assert run_ranks(_train, 3, str(tmp_path), [3], env=_nodes(3)) == [(2, True)] * 3


def test_another_layout_gets_the_shards_of_other_nodes(tmp_path: Path) -> None:
    run_ranks(_train, 3, str(tmp_path), [1], env=_nodes(3))
    # Two nodes are left of three in number, but with the folders of all.
    shutil.copytree(tmp_path / "node2/g0001", tmp_path / "node1/g0001", dirs_exist_ok=True)
    assert run_ranks(_train, 2, str(tmp_path), [2], env=_nodes(2)) == [(1, True)] * 2


def test_a_new_node_gets_the_chain_and_what_it_needs(tmp_path: Path) -> None:
    run_ranks(_train, 2, str(tmp_path), [1, 2], env=_nodes(2))
    # Nodes change places, and rank 0 is on a new, empty one.
    (tmp_path / "node0").rename(tmp_path / "node2")
    assert run_ranks(_train, 3, str(tmp_path), [3], env=_nodes(3)) == [(2, True)] * 3
    assert tierckpt.steps(tmp_path / "node0") == [1, 2, 3]


def _pruned_between(rank: int, base: str) -> list[int]:
    roots.PROBE_SECONDS = 0.1
    root = f"{base}/node{rank}"
    with Checkpointer(root, agent="off") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, _state(float(step))).wait()
            if rank == 0:
                tierckpt.prune(root, keep=1, grace=0)
            dist.barrier()
    return tierckpt.steps(root)


def test_links_of_others_reach_every_root(tmp_path: Path) -> None:
    # The last prune comes after the last save: only rank 0's root has it until the next generation begins.
    assert run_ranks(_pruned_between, 2, str(tmp_path), env=_nodes(2)) == [[3], [2, 3]]
    assert verify_store(tmp_path / "node1") == []
    assert run_ranks(_train, 2, str(tmp_path), [4], env=_nodes(2)) == [(3, True)] * 2
    assert tierckpt.steps(tmp_path / "node1") == [3, 4]


def test_a_shard_missing_from_its_own_node_is_no_shard_held_elsewhere(tmp_path: Path) -> None:
    run_ranks(_train, 2, str(tmp_path), [1], env=_nodes(2))
    (tmp_path / "node1/g0001/s000000000001/shard-00001.safetensors").unlink()
    report = tierckpt.verify(tmp_path / "node1")
    assert [problem["kind"] for problem in report.problems] == ["incomplete"]
    assert "shard-00001.safetensors is missing" in report.problems[0]["message"]


def test_what_no_node_has_is_named(tmp_path: Path) -> None:
    run_ranks(_train, 2, str(tmp_path), [1], env=_nodes(2))
    shutil.rmtree(tmp_path / "node1")
    results = run_ranks(_failing, 2, str(tmp_path), env=_nodes(2))
    assert all("no rank has the shards of step 1 of ranks [1]" in text for text in results)


def _failing(rank: int, base: str) -> str:
    try:
        tierckpt.load(_state(0.0), f"{base}/node{rank}")
    except tierckpt.IncompleteError as error:
        return str(error)
    return "loaded"


def test_one_folder_seen_by_several_nodes_is_one_root(tmp_path: Path) -> None:
    results = run_ranks(_shared, 3, str(tmp_path / "shared"), env=_nodes(3))
    assert results == [[0]] * 3
    assert tierckpt.verify(tmp_path / "shared").ok


def _is_refused_once(rank: int, base: str) -> list[str]:
    """The chain cannot be written to for a moment, on rank 0's node."""
    roots.PROBE_SECONDS = 0.1
    told = []
    with Checkpointer(f"{base}/node{rank}", agent="off") as ckpt:
        ckpt.save(0, _state(0.0)).wait()
        link = ckpt._coordinator._commit_link

        def refused(*_: Any, **__: Any) -> Any:
            raise StoreError("read-only for a moment")

        for value, commit in ((1.0, refused), (2.0, link)):
            ckpt._coordinator._commit_link = commit  # type: ignore[method-assign]
            try:
                ckpt.save(1, _state(value)).wait()
            except StoreError as error:
                told.append(str(error))
    return told


def test_what_was_not_published_is_gone_from_every_root(tmp_path: Path) -> None:
    for told in run_ranks(_is_refused_once, 2, str(tmp_path), env=_nodes(2)):
        assert len(told) == 1 and "read-only for a moment" in told[0]
    for rank in range(2):
        assert tierckpt.steps(tmp_path / f"node{rank}") == [0, 1]
        assert tierckpt.verify(tmp_path / f"node{rank}", every=True).ok
    assert run_ranks(_train, 2, str(tmp_path), [], env=_nodes(2)) == [(1, False)] * 2  # the values of the second


def _shared(rank: int, root: str) -> list[int]:
    with Checkpointer(root, agent="off") as ckpt:
        ckpt.save(1, _state(1.0)).wait()
        return list(ckpt._coordinator.roots.leaders)
