"""Every kind of file in a store, damaged in every way that files can be: found, named, and never loaded.

For each case ``verify`` (as a function and as a command) must name the file, and ``load`` and ``read`` must bring back the
exact state of a step or raise an error of ours; with O_NONBLOCK forgotten a fifo would hang here.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import tierckpt
from tests.tamper.sample import Sample, same, template
from tierckpt.cli import main
from tierckpt.errors import TierckptError

STEP = "g0001/s000000000030"
OLDER = "g0001/s000000000020"

#: What is damaged, by a short name; "layout" stands for the layout of the newest step.
FILES = {
    "store": "tierckpt.json",
    "begin": "chain/000000000000.json",
    "commit": "chain/000000000003.json",
    "newest-commit": "chain/000000000004.json",
    "key": "chain/000000000005.json",
    "retire": "chain/000000000006.json",
    "layout": "layout",
    "manifest": f"{STEP}/manifest.json",
    "older-manifest": f"{OLDER}/manifest.json",
    "receipt-0": f"{STEP}/shard-00000.receipt.json",
    "receipt-1": f"{STEP}/shard-00001.receipt.json",
    "shard-0": f"{STEP}/shard-00000.safetensors",
    "shard-1": f"{STEP}/shard-00001.safetensors",
    "older-shard": f"{OLDER}/shard-00000.safetensors",
}

#: Files of the same kind with which each can be swapped.
TWINS = {
    "begin": ["chain/000000000001.json"],
    "commit": ["chain/000000000004.json"],
    "key": ["chain/000000000006.json"],
    "layout": ["other-layout"],
    "manifest": [f"{OLDER}/manifest.json"],
    "receipt-0": [f"{OLDER}/shard-00000.receipt.json", f"{STEP}/shard-00001.receipt.json"],
    "receipt-1": [f"{OLDER}/shard-00001.receipt.json"],
    "shard-0": [f"{OLDER}/shard-00000.safetensors", f"{STEP}/shard-00001.safetensors"],
    "shard-1": [f"{OLDER}/shard-00001.safetensors"],
}

Operation = Callable[[Sample, str], None]


def flip(position: float, bit: int) -> Operation:
    """Flip a bit of the byte at ``position``: of the size if it is a fraction, from the end if it is negative."""

    def work(sample: Sample, name: str) -> None:
        path = sample.own(name)
        size = path.stat().st_size
        at = int(size * position) if 0 < position < 1 else int(position) % size
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << bit]))

    return work


def cut(part: float) -> Operation:
    def work(sample: Sample, name: str) -> None:
        path = sample.own(name)
        size = path.stat().st_size
        os.truncate(path, int(size * part) if part < 1 else size - 1)

    return work


def append(sample: Sample, name: str) -> None:
    with sample.own(name).open("ab") as file:
        file.write(b" ")


def remove(sample: Sample, name: str) -> None:
    (sample.root / name).unlink()


def rename(sample: Sample, name: str) -> None:
    path = sample.root / name
    path.rename(path.with_name("moved-" + path.name))


def symlink(sample: Sample, name: str) -> None:
    """The right bytes, but not in the store: they may change after they were looked at."""
    path = sample.root / name
    path.unlink()
    path.symlink_to(sample.pristine(name))


def fifo(sample: Sample, name: str) -> None:
    path = sample.root / name
    path.unlink()
    os.mkfifo(path)


def folder(sample: Sample, name: str) -> None:
    path = sample.root / name
    path.unlink()
    path.mkdir()


def replay(sample: Sample, name: str) -> None:
    """What the same key signed under this name, in a fork of the run."""
    path = sample.root / name
    path.unlink()
    shutil.copyfile(sample.fork / name, path)


EVERYWHERE: dict[str, Operation] = {
    "flip-first": flip(0, 0),
    "flip-middle": flip(0.5, 3),
    "flip-last": flip(-1, 7),
    "empty": cut(0.0),
    "half": cut(0.5),
    "minus-one": cut(1),
    "append": append,
    "remove": remove,
    "rename": rename,
    "symlink": symlink,
    "fifo": fifo,
    "folder": folder,
}

#: Positions that matter in a shard: size of the header, its text, its padding, the first data, both sides of the border
#: between the chunks, the blob, its padding.
SHARD: dict[str, Operation] = {
    f"flip-{name}": flip(position, bit)
    for name, position, bit in (
        ("header-size", 1, 4),
        ("header-text", 100, 0),
        ("header-padding", 4095, 0),
        ("data", 4096, 6),
        ("chunk-0-end", 4194303, 0),
        ("chunk-1-start", 4194304, 0),
        ("blob", -1024, 1),
        ("blob-padding", -2, 5),
    )
}

CASES = [
    *[(file, name, work) for file in FILES for name, work in EVERYWHERE.items()],
    *[("shard-0", name, work) for name, work in SHARD.items()],
    *[("begin", f"flip-{i}", flip(i / 17, i % 8)) for i in range(1, 17)],
    *[("receipt-0", f"flip-{i}", flip(i / 9, i % 8)) for i in range(1, 9)],
    *[("layout", f"flip-{i}", flip(i / 9, i % 8)) for i in range(1, 9)],
    *[(file, "replay", replay) for file in FILES if file not in ("store", "layout")],
]


def name_of(sample: Sample, file: str) -> str:
    name = FILES.get(file, file)
    steps = {"layout": 30, "other-layout": 5}
    return sample.layout(steps[name]) if name in steps else name


def check(root: Path, names: list[str], capsys: pytest.CaptureFixture[str], *, mention: tuple[str, ...] = ()) -> None:
    """One of ``names`` is named by ``verify``, and no load brings back anything that was not saved.

    Args:
        mention: what may stand in a message instead of a name.
    """
    report = tierckpt.verify(root, every=True)
    said = [problem["message"] for problem in report.problems]
    assert any(f"{root}/{name}" in message for name in names for message in said) or any(
        text in message for text in mention for message in said
    ), said
    capsys.readouterr()
    assert main(["verify", "--all", str(root)]) == 1
    out = capsys.readouterr().out
    assert any(name in out for name in (*names, *mention)), out
    loads_exactly_or_not_at_all(root)


def loads_exactly_or_not_at_all(root: Path) -> list[str]:
    """Load and read in all ways; the names of the errors."""
    errors = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # fallbacks say why
        for fallback in (True, False):
            for step in (None, 20):
                found = template()
                try:
                    info = tierckpt.load(found, root, step, fallback=fallback)
                except TierckptError as error:
                    errors.append(f"{type(error).__name__}: {error}")
                else:
                    assert same(found, info.step), f"wrong bytes of step {info.step}"
        try:
            tree = tierckpt.read(root, fallback=False)
        except TierckptError as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            assert same(tree, 30)
    return errors


def test_undamaged(sample: Sample, capsys: pytest.CaptureFixture[str]) -> None:
    """Else everything below would prove nothing."""
    report = tierckpt.verify(sample.root, every=True)
    assert report.ok, report.problems
    assert [step for _, step in report.checked] == [10, 20, 30]
    assert main(["verify", "--all", str(sample.root)]) == 0
    assert "ok" in capsys.readouterr().out
    assert loads_exactly_or_not_at_all(sample.root) == []


@pytest.mark.parametrize(("file", "work"), [pytest.param(f, w, id=f"{f}-{n}") for f, n, w in CASES])
def test_damaged_file(sample: Sample, capsys: pytest.CaptureFixture[str], file: str, work: Operation) -> None:
    name = name_of(sample, file)
    work(sample, name)
    mention: tuple[str, ...] = ()
    if name.startswith("chain/"):
        # The newest link is missed by its number; a link that was exchanged for a valid one, by the next.
        number = int(name[6:18])
        mention = (f"link {number} ", f"chain/{number + 1:012d}.json")
    check(sample.root, [name], capsys, mention=mention)


@pytest.mark.parametrize(
    ("file", "twin"), [pytest.param(f, t, id=f"{f}-with-{t}") for f, twins in TWINS.items() for t in twins]
)
def test_swapped_files(sample: Sample, capsys: pytest.CaptureFixture[str], file: str, twin: str) -> None:
    """Every digest above the chunks binds name and position."""
    names = [name_of(sample, file), name_of(sample, twin)]
    one, other = (sample.root / name for name in names)
    one.rename(sample.root / "aside")
    other.rename(one)
    (sample.root / "aside").rename(other)
    check(sample.root, names, capsys)


STRAY = [
    "notes.txt",
    "g0001/notes.txt",
    f"{STEP}/notes.txt",
    f"{STEP}/deeper/notes.txt",
    f"{STEP}/shard-00002.safetensors",
    f"{STEP}/shard-00002.receipt.json",
    f"{OLDER}/shard-00002.safetensors",
    f"{STEP}/shard-0.safetensors",
    "chain/notes.txt",
    "chain/7.json",
    "layouts/notes.safetensors",
    "g0001/s000000000031/notes.txt",
    "g1/s1/manifest.json",
    ".hidden",
]


@pytest.mark.parametrize("name", STRAY)
@pytest.mark.parametrize("kind", ["file", "symlink", "fifo"])
def test_stray_file(sample: Sample, capsys: pytest.CaptureFixture[str], name: str, kind: str) -> None:
    """A file that belongs to nothing is named; whoever allows it is not told off, and nothing else changes."""
    path = sample.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "file":
        path.write_bytes(b"anything")
    elif kind == "symlink":
        path.symlink_to(sample.pristine(f"{STEP}/shard-00000.safetensors"))
    else:
        os.mkfifo(path)
    check(sample.root, [name], capsys)
    assert loads_exactly_or_not_at_all(sample.root) == []
    assert tierckpt.verify(sample.root, every=True, allow_extra=True).ok
    assert main(["verify", "--all", "--allow-extra", str(sample.root)]) == 0


def test_prune_leaves_stray_files_alone(sample: Sample) -> None:
    """A user's file in the folder of a dead or retired step is not ours to delete."""
    strays = ["g0001/s000000000031/notes.txt", "g0001/s000000000005/notes.txt", "notes.txt"]
    for name in strays:
        path = sample.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"precious")
    tierckpt.prune(sample.root, grace=0.0, key=str(sample.key))
    assert all((sample.root / name).exists() for name in strays)
    assert not (sample.root / "g0001/s000000000005/manifest.json").exists()


@pytest.mark.parametrize("name", ["chain", "g0001", STEP, "layouts"])
@pytest.mark.parametrize("how", ["removed", "file", "fifo", "symlink"])
def test_damaged_folder(sample: Sample, capsys: pytest.CaptureFixture[str], name: str, how: str) -> None:
    """A folder that is gone, or is none any more, or lies elsewhere."""
    path = sample.root / name
    shutil.rmtree(path)
    if how == "file":
        path.write_bytes(b"")
    elif how == "fifo":
        os.mkfifo(path)
    elif how == "symlink":
        path.symlink_to(sample.pristine(name))
    check(sample.root, [name], capsys, mention=("nothing was ever saved",))


def test_a_step_that_was_never_committed_is_no_step(sample: Sample, capsys: pytest.CaptureFixture[str]) -> None:
    """C12: half of a step, a cut one and an empty one beside good ones are not chosen, and say why when asked for."""
    step = sample.root / STEP
    half, short, empty = (sample.root / f"g0001/s{n:012d}" for n in (40, 50, 60))
    for folder_ in (half, short, empty):
        folder_.mkdir()
    for name in ("manifest.json", "shard-00000.receipt.json"):
        shutil.copyfile(step / name, half / name)
    shutil.copytree(step, short, dirs_exist_ok=True)
    os.truncate(short / "shard-00000.safetensors", 2_000_000)
    assert tierckpt.latest(sample.root) == 30
    assert loads_exactly_or_not_at_all(sample.root) == []
    for n in (40, 50, 60):
        with pytest.raises(tierckpt.IncompleteError, match=f"step {n}.*never (committed|saved)"):
            tierckpt.load(template(), sample.root, n)
        assert main(["verify", "--step", str(n), str(sample.root)]) == 2
        assert f"step {n}" in capsys.readouterr().err
    assert main(["verify", "--step", "20", str(sample.root)]) == 0
