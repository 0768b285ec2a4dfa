"""How much memory there is: a job that may use less than the machine has must not be killed for taking what is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierckpt import machine
from tierckpt.agent.slots import Memory
from tierckpt.errors import ArenaFullError
from tierckpt.snapshot.arena import Arena

MIB = 1 << 20
PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Machine:
    """Files as the kernel shows them."""

    def __init__(self, root: Path) -> None:
        self.root, self.own, self.meminfo = root, root / "proc", root / "meminfo"
        self.own.mkdir()
        self._mounts: list[str] = ["22 1 0:5 / /proc rw - proc proc rw"]

    def is_in(self, *lines: str) -> None:
        (self.own / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def mount(self, kind: str, top: str, root: str = "/", options: str = "rw") -> Path:
        folder = self.root / top
        folder.mkdir(parents=True, exist_ok=True)
        shown = str(folder).replace(" ", "\\040")
        self._mounts.append(f"30 23 0:26 {root} {shown} rw,nosuid shared:9 - {kind} {kind} {options}")
        (self.own / "mountinfo").write_text("\n".join(self._mounts) + "\n")
        return folder

    @staticmethod
    def group(folder: Path, **files: int | str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name.replace("memory_", "memory.")).write_text(f"{value}\n")

    @property
    def memory(self) -> int:
        return machine.memory(self.own)

    @property
    def available(self) -> int:
        return machine.available(self.own, self.meminfo)


@pytest.fixture
def box(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_limit_counts_wherever_it_is_between_the_process_and_the_root(box: Machine) -> None:
    box.is_in("0::/slurm/job 7/step")
    top = box.mount("cgroup2", "sys")
    box.group(top / "slurm/job 7/step", memory_max="max", memory_high="max", memory_current=3 * MIB)
    assert box.memory == PHYSICAL
    box.group(top / "slurm", memory_max=900 * MIB, memory_current=500 * MIB, memory_stat="anon 1\ninactive_file 0")
    box.group(top / "slurm/other", memory_max=MIB, memory_current=MIB)
    assert (box.memory, box.available) == (900 * MIB, 400 * MIB)
    files = f"active_file {30 * MIB}\ninactive_file {20 * MIB}\nslab_reclaimable {10 * MIB}\nshmem {40 * MIB}"
    box.group(top / "slurm/job 7", memory_max=300 * MIB, memory_current=200 * MIB, memory_stat=files)
    assert (box.memory, box.available) == (300 * MIB, 160 * MIB)
    box.group(top / "slurm/job 7/step", memory_high=100 * MIB, memory_current=120 * MIB, memory_stat="")
    assert (box.memory, box.available) == (100 * MIB, 0)


@pytest.mark.parametrize(
    ("path", "root"),
    [("/", "/"), ("/docker/ab", "/docker/ab"), ("/docker/ab", "/"), ("/../..", "/"), ("/elsewhere", "/docker/ab")],
    ids=["own namespace", "path as outside", "path that is not to be seen", "above the namespace", "moved"],
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_container_sees_its_group_as_the_root(box: Machine, version: int, path: str, root: str) -> None:
    if version == 2:
        box.is_in(f"0::{path}")
        box.group(box.mount("cgroup2", "my sys", root), memory_max=64 * MIB, memory_current=10 * MIB)
    else:
        box.is_in(f"4:cpu,memory:{path}", "0::/")
        box.mount("cgroup2", "unified")
        top = box.mount("cgroup", "my sys", root, "rw,cpu,memory")
        box.group(top, memory_limit_in_bytes=64 * MIB, memory_usage_in_bytes=10 * MIB)
    assert (box.memory, box.available) == (64 * MIB, 54 * MIB)


def test_the_first_version_has_a_folder_for_each_controller(box: Machine) -> None:
    box.is_in("9:name=systemd:/a", "4:memory:/job/step", "1:cpu:/", "0::/x")
    box.mount("cgroup", "sys/cpu", options="rw,cpu")
    box.mount("cgroup", "sys/systemd", options="rw,name=systemd")
    top = box.mount("cgroup", "sys/memory", options="rw,memory")
    box.group(top, memory_limit_in_bytes=(1 << 63) - 4096, memory_usage_in_bytes=PHYSICAL // 2)
    assert box.memory == PHYSICAL
    stat = f"inactive_file 1\ntotal_inactive_file {30 * MIB}\ntotal_active_file 0"
    box.group(top / "job", memory_limit_in_bytes=200 * MIB, memory_usage_in_bytes=150 * MIB, memory_stat=stat)
    box.group(top / "job/step", memory_limit_in_bytes=(1 << 63) - 4096)
    assert (box.memory, box.available) == (200 * MIB, 80 * MIB)


def test_without_groups_the_machine_itself_counts(box: Machine) -> None:
    assert box.memory == box.available == PHYSICAL
    box.meminfo.write_text("MemTotal: 10 kB\nMemAvailable:   2048 kB\nSwapFree: 1024 kB\nHugePages_Total: 0\n")
    assert box.available == 3 * MIB
    box.is_in("garbage of a kernel to come", "0::/")
    assert box.memory == PHYSICAL


def test_this_machine() -> None:
    assert 0 < machine.available() <= PHYSICAL * 2
    assert 0 < machine.memory() <= PHYSICAL


# Slots


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What is free, to be set by the test."""
    found = [64 * MIB]
    monkeypatch.setattr(machine, "available", lambda: found[0])
    yield found


def test_the_agent_makes_no_slot_that_the_memory_has_no_room_for(free: list[int]) -> None:
    memory = Memory()
    memory.budget = PHYSICAL
    slot = memory.make(20 * MIB)
    free[0] = 39 * MIB
    assert not memory.fits(20 * MIB) and memory.fits(10 * MIB)
    with pytest.raises(ArenaFullError, match=r"20,971,520 bytes is needed.*40,894,464 are free in the memory that"):
        memory.make(20 * MIB)
    assert memory.held == 20 * MIB
    free[0] = 40 * MIB
    memory.close(memory.make(20 * MIB))
    memory.close(slot)
    assert memory.held == 0


def test_nor_does_a_process_without_an_agent(free: list[int]) -> None:
    arena = Arena(2)
    free[0] = 39 * MIB
    with pytest.raises(ArenaFullError, match=r"20,971,520 bytes for a slot are needed, 40,894,464 are free"):
        arena.acquire(20 * MIB, 0)
    free[0] = 40 * MIB
    slot = arena.acquire(20 * MIB, 0)
    free[0] = 0
    # One that is in use is waited for, where no other can be made.
    with pytest.raises(ArenaFullError, match=r"still being drained \(1 of 2, 0 bytes of memory are free\)"):
        arena.acquire(20 * MIB, 0)
    slot.release()
    arena.acquire(20 * MIB, 0).release()
    with pytest.raises(ArenaFullError, match="are needed, 0 are free"):
        arena.acquire(30 * MIB, 0)


# With limits of the kernel

_JOB = """
import os, sys
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
import torch, tierckpt
from tierckpt import machine
from tierckpt.config import Ram
assert machine.memory() == 600 << 20, machine.memory()
assert Ram().budget_bytes == 300 << 20
state = {"w": torch.ones(int(sys.argv[3]) << 18)}
ckpt = tierckpt.Checkpointer(sys.argv[2], agent=sys.argv[4], timeout=5)
told = []
for step in range(4):
    handle = ckpt.save(step, state)
    try:
        handle.wait()
    except tierckpt.TierckptError as error:
        told.append(f"{type(error).__name__}: {error}")
    state["w"] += 1  # training goes on
ckpt.close()
print("steps", tierckpt.steps(sys.argv[2]), *sorted(set(told)), flush=True)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """The file that takes a process into a control group that may use 600 MiB."""
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    v1 = [path for _, controllers, path in own if "memory" in controllers.split(",")]
    if v1:
        folder, limit = Path("/sys/fs/cgroup/memory" + v1[0]), "memory.limit_in_bytes"
    else:
        folder, limit = Path("/sys/fs/cgroup"), "memory.max"
        controllers = folder / "cgroup.subtree_control"
        if not controllers.exists() or "memory" not in controllers.read_text():
            pytest.skip("this machine lets nobody limit memory in a control group")
    folder = folder / f"tierckpt-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"this machine lets nobody make control groups: {error}")
    try:
        (folder / limit).write_text(str(600 << 20))
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


@pytest.mark.acceptance
@pytest.mark.limit(120)
@pytest.mark.parametrize("agent", ["auto", "off"])
@pytest.mark.parametrize(("mebibytes", "fits"), [(40, True), (240, False)])
def test_training_goes_on_where_the_memory_has_no_room(
    tmp_path: Path, group: Path, agent: str, mebibytes: int, fits: bool
) -> None:
    """Nobody is killed: a save that does not fit says so."""
    arguments = [str(group), str(tmp_path / "s"), str(mebibytes), agent]
    job = subprocess.run([sys.executable, "-c", _JOB, *arguments], capture_output=True, text=True, timeout=100)
    assert job.returncode == 0, job.stderr
    if fits:
        assert job.stdout.startswith("steps [0, 1, 2, 3]\n"), job.stdout
    else:
        assert "steps []" in job.stdout and "ArenaFullError" in job.stdout and "are free" in job.stdout, job.stdout
