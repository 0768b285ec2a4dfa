"""K18: file systems that show things late, fill up, or are shared with colleagues.

Two nodes whose root is on their own disks each wait for node-local roots (tested with them); here a root is shared. A
private mode (no bits for the group and others) cannot be asked for yet: C111 checks that the umask is respected.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.cases.common import blank, files, files_of, holds, shard_of, sharded, state
from tests.harness import run_ranks
from tierckpt import StoreError
from tierckpt.config import config_dir
from tierckpt.tiers.disk import DiskPlace

# C107


def _new_roots(rank: int, base: str, count: int) -> list[int]:
    """Folders that another host makes at the same moment are neither ours nor to be seen at once."""
    mkdir, isdir = os.mkdir, os.path.isdir
    fooled: dict[str, float] = {}
    rng = random.Random(rank)

    def late_mkdir(path: Any, mode: int = 0o777, **more: Any) -> None:
        name = os.fspath(path)
        if not name.startswith(base) or name in fooled:
            mkdir(path, mode, **more)
            return
        fooled[name] = time.monotonic() + 0.5
        time.sleep(rng.random() * 0.002)
        try:
            mkdir(path, mode, **more)
        except FileNotFoundError:
            del fooled[name]
            raise
        except FileExistsError:
            pass
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)

    def late_isdir(path: Any) -> bool:
        return time.monotonic() >= fooled.get(os.fspath(path), 0.0) and isdir(path)

    os.mkdir, os.path.isdir = late_mkdir, late_isdir  # type: ignore[assignment]
    return [tierckpt.save(sharded(float(n)), f"{base}/a/b/root{n}", 1).step for n in range(count)]


@pytest.mark.parametrize(("world", "count"), [(16, 2), (4, 18)])
def test_c107_all_ranks_make_the_same_new_folders_at_once(tmp_path: Path, world: int, count: int) -> None:
    assert run_ranks(_new_roots, world, str(tmp_path), count) == [[1] * count] * world
    for n in range(count):
        report = tierckpt.verify(tmp_path / f"a/b/root{n}")
        assert report.ok and not report.notes, (report.problems, report.notes)


# C109


def _renames_fail(rank: int, root: str) -> tuple[list[str], list[int], list[float]]:
    """No rename of the store's is to be relied on; a link that was made may be answered with 'exists'."""
    link, links = os.link, []

    def refused(*args: Any, **more: Any) -> None:
        if any(os.fspath(path).startswith(root) for path in args):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), *args[:1])
        rename(*args, **more)

    rename, replace = os.rename, os.replace

    def replaced(*args: Any, **more: Any) -> None:
        if any(os.fspath(path).startswith(root) for path in args):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), *args[:1])
        replace(*args, **more)

    def repeated(old: Any, new: Any, **more: Any) -> None:
        """What NFS does when the answer was lost and the client asks again."""
        link(old, new, **more)
        links.append(os.path.relpath(new, root))
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)

    os.rename, os.replace, os.link = refused, replaced, repeated  # type: ignore[assignment]
    for step in (1, 2, 3):
        tierckpt.save(sharded(float(step)), root, step)
    template = sharded(-1.0)
    steps = [tierckpt.load(template, root).step]
    return links, steps, template["w"].to_local().unique().tolist()


def test_c109_one_publisher_no_rename_nothing_left(tmp_path: Path) -> None:
    root = tmp_path / "store"
    env = [{"TIERCKPT_NODE": "one"}, {"TIERCKPT_NODE": "two"}]
    first, second = run_ranks(_renames_fail, 2, str(root), env=env)
    assert first[1:] == second[1:] == ([3], [3.0])
    assert len([name for name in first[0] if name.startswith("chain/")]) == 4
    # The other node publishes nothing but its own shards and their receipts.
    assert all(Path(name).name.startswith("shard-00001.") for name in second[0])
    assert not [name for name in files(root) if name.endswith(".tmp")]
    report = tierckpt.verify(root, every=True)
    assert report.ok and not report.notes, (report.problems, report.notes)
    assert report.checked == [(1, 1), (1, 2), (1, 3)]


# C111


@pytest.mark.parametrize(("umask", "file_mode", "dir_mode"), [(0o022, 0o644, 0o755), (0o002, 0o664, 0o775)])
def test_c111_the_umask_is_respected(tmp_path: Path, umask: int, file_mode: int, dir_mode: int) -> None:
    parent = tmp_path / "shared"
    parent.mkdir()
    parent.chmod(0o2775)
    before = os.umask(umask)
    try:
        tierckpt.save(state(1), parent / "new" / "store", 1)
    finally:
        os.umask(before)
    found = list(parent.rglob("*"))
    assert len(found) > 8
    for path in found:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            assert stat.S_IMODE(mode) == dir_mode | stat.S_ISGID, path  # new folders inherit it
        else:
            assert stat.S_IMODE(mode) == file_mode, path
    keys = list(config_dir().rglob("*.pem"))
    assert len(keys) == 1 and stat.S_IMODE(keys[0].stat().st_mode) == 0o600


# C113


def _saves(rank: int, root: str, tree: Any, step: int) -> int:
    return tierckpt.save(tree, root, step).generation


def test_c113_what_was_read_is_private_memory(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    big = torch.arange(3_000_000, dtype=torch.int32)
    tree = {"x": big.clone(), "small": torch.arange(5.0)}
    tierckpt.save(tree, root, 1)
    kept = tierckpt.read(root, step=1)
    loaded = {"x": torch.zeros_like(big), "small": torch.zeros(5)}
    tierckpt.load(loaded, root)
    with pytest.raises(tierckpt.StepExistsError):
        tierckpt.save(kept, root, 1)
    # A later process may save the step again, from what it has read of it.
    assert run_ranks(_reads_and_saves_again, 1, root, group=False) == [2]
    assert tierckpt.steps(root) == [1]
    tierckpt.prune(root, keep=1, grace=0)
    assert not shard_of(root, 1).exists()
    assert run_ranks(_saves, 1, root, kept, 2, group=False) == [3]
    assert tierckpt.verify(root, every=True).checked == [(2, 1), (3, 2)]
    for step, generation in ((1, 2), (2, 3)):
        again = tierckpt.read(root, step=step)
        assert torch.equal(again["x"], big) and torch.equal(again["small"], torch.arange(5.0))
        script = f"import os; os.truncate({str(shard_of(root, step, generation=generation))!r}, 0)"
        subprocess.run([sys.executable, "-c", script], check=True)
        assert torch.equal(again["x"], big)
    for found in (kept, loaded):
        assert torch.equal(found["x"], big) and torch.equal(found["small"], torch.arange(5.0))
        found["x"] += 1
        assert torch.equal(found["x"], big + 1)


def _reads_and_saves_again(rank: int, root: str) -> int:
    found = tierckpt.read(root, step=1)
    generation = tierckpt.save(found, root, 1).generation
    assert torch.equal(found["x"], torch.arange(3_000_000, dtype=torch.int32))
    return generation


# C115

_MB = 1 << 20


def _megabytes(count: int, value: float) -> dict[str, Any]:
    return state(value, size=count * _MB // 12)


def _file_too_large(rank: int, root: str) -> str:
    tierckpt.save(_megabytes(1, 1), root, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * _MB, resource.RLIM_INFINITY))
    with pytest.raises(StoreError) as caught:
        tierckpt.save(_megabytes(6, 2), root, 2)
    assert tierckpt.latest(root) == 1
    assert not files_of(root, 2)
    tierckpt.save(_megabytes(1, 3), root, 3)
    return str(caught.value)


def test_c115_a_file_that_may_not_grow_fails_the_save_and_no_more(tmp_path: Path) -> None:
    text = run_ranks(_file_too_large, 1, str(tmp_path), group=False)[0]
    assert str(shard_of(tmp_path, 2)) in text and os.strerror(errno.EFBIG) in text
    assert tierckpt.steps(tmp_path) == [1, 3]
    report = tierckpt.verify(tmp_path, every=True)
    assert report.ok and not report.notes, (report.problems, report.notes)
    found = _megabytes(1, -1)
    tierckpt.load(found, tmp_path, step=1)
    assert holds(found, 1)


def test_c115_space_is_looked_at_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tierckpt.save(_megabytes(1, 1), tmp_path, 1)
    before = files(tmp_path)
    monkeypatch.setattr(DiskPlace, "free", lambda self: 5 * _MB)
    expected = f"{tmp_path}: no space for step 2.*needs 6,.*1,048,576 that stay free, 5,242,880 are free"
    with pytest.raises(StoreError, match=expected):
        tierckpt.save(_megabytes(6, 2), tmp_path, 2)
    assert files(tmp_path) == before
    tierckpt.save(_megabytes(3, 3), tmp_path, 3)
    found = _megabytes(3, -1)
    assert tierckpt.load(found, tmp_path).step == 3 and holds(found, 3)


def _no_room(rank: int, root: str) -> str:
    tierckpt.save(sharded(1.0), root, 1)
    if rank == 0:
        DiskPlace.free = lambda self: 100  # type: ignore[method-assign]
    with pytest.raises(StoreError) as caught:
        tierckpt.save(sharded(2.0), root, 2)
    if rank == 0:
        DiskPlace.free = lambda self: None  # type: ignore[method-assign]
    tierckpt.save(sharded(3.0), root, 3)
    return str(caught.value)


def test_c115_no_space_is_told_on_all_ranks(tmp_path: Path) -> None:
    texts = run_ranks(_no_room, 4, str(tmp_path))
    assert len(set(texts)) == 1 and "no space for step 2" in texts[0] and str(tmp_path) in texts[0]
    assert tierckpt.steps(tmp_path) == [1, 3]
    assert not files_of(tmp_path, 2)


_SMALL_DISK = """
import sys
from pathlib import Path
import tierckpt
from tests.cases.test_k18_file_system import _megabytes
from tests.cases.common import files_of, holds
from tierckpt.tiers.disk import DiskPlace

root = sys.argv[1]
if sys.argv[2] == "unforeseen":
    DiskPlace.free = lambda self: None
tierckpt.save(_megabytes(3, 1), root, 1)
free = Path(root).stat() and DiskPlace(root)
import os
def left():
    info = os.statvfs(root)
    return info.f_bavail * info.f_frsize
before = left()
try:
    tierckpt.save(_megabytes(6, 2), root, 2)
except tierckpt.StoreError as error:
    print(error)
else:
    raise SystemExit("6 MB fitted into 8 beside 3")
assert abs(left() - before) < 1 << 16, (left(), before)
assert not files_of(root, 2)
assert tierckpt.verify(root).ok
tierckpt.save(_megabytes(3, 3), root, 3)
assert tierckpt.verify(root, every=True).ok
found = _megabytes(3, -1)
for step in (1, 3):
    tierckpt.load(found, root, step=step)
    assert holds(found, step)
"""


@pytest.mark.acceptance
@pytest.mark.parametrize("how", ["foreseen", "unforeseen"])
def test_c115_a_disk_that_is_full(tmp_path: Path, how: str) -> None:
    root = tmp_path / "small"
    root.mkdir()
    mount = f'mount -t tmpfs -o size=8m tmpfs {root} && exec {sys.executable} -c "$1" {root} {how}'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, "sh", _SMALL_DISK],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert str(root) in done.stdout
    assert ("no space for step 2" if how == "foreseen" else os.strerror(errno.ENOSPC)) in done.stdout


def test_a_thread_of_saves_and_a_reader_share_a_folder(tmp_path: Path) -> None:
    """A reader in the middle of retention sees whole checkpoints or a reason, never a mixture."""
    stop = threading.Event()
    seen: list[float] = []

    def look() -> None:
        while not stop.is_set():
            try:
                found = tierckpt.read(tmp_path)
            except tierckpt.IncompleteError:
                continue
            seen.append(found["step"])
            assert holds(found, found["step"])

    thread = threading.Thread(target=look)
    thread.start()
    with tierckpt.Checkpointer(tmp_path, tiers=[tierckpt.Disk(keep=1)], agent="off") as ckpt:
        for step in range(1, 8):
            ckpt.save(step, state(step)).wait()
    stop.set()
    thread.join()
    assert seen == sorted(seen)
    found = blank()
    assert tierckpt.load(found, tmp_path).step == 7
