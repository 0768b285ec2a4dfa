"""How much memory this process may use, and how much of it is to be had now: the machine's, less what control groups allow.

A job in a container, a Slurm step or a systemd unit may use less than the machine has; whoever takes more is killed, and that
may be the trainer. Limits count at every level, from the process's own group upwards, in both versions of control groups.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SELF = Path("/proc/self")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class _Files:
    """What the files of a control group are called. ``prefix``: of the counters that count the groups inside as well."""

    limits: tuple[str, ...]
    usage: str
    prefix: str


# Above memory.high the kernel does not kill, but lets the process stand still.
_V2 = _Files(("memory.max", "memory.high"), "memory.current", "")
_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")
#: Caches, which the kernel gives back when a group comes to its limit.
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")


def memory(own: Path = _SELF) -> int:
    """Bytes of memory that this process may use: the machine's, or less where a control group says so."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([found, *(limit for limit, _, _ in _limits(own))])


def available(own: Path = _SELF, meminfo: Path = _MEMINFO) -> int:
    """Bytes that are to be had now without anybody being killed for them."""
    found = [max(0, limit - _used(folder, files)) for limit, folder, files in _limits(own)]
    free = _table(meminfo)
    if "MemAvailable:" in free:
        found.append((free["MemAvailable:"] + free.get("SwapFree:", 0)) * 1024)
    return min(found, default=memory(own))


def has_room(nbytes: int, margin: int, taken: int = 0) -> bool:
    """Whether so many bytes are to be had beside ``taken`` others, and ``margin`` more, or as many again if that is less."""
    return nbytes + min(nbytes, margin) <= available() - taken


def _limits(own: Path) -> Iterator[tuple[int, Path, _Files]]:
    """Each limit, the folder of the group that has it, and what its files are called."""
    for folder, files in _groups(own):
        for name in files.limits:
            text = _text(folder / name)
            if text.isdecimal():  # else "max", or there is no such file
                yield int(text), folder, files


def _groups(own: Path) -> Iterator[tuple[Path, _Files]]:
    """The groups that bound this process's memory, the innermost first."""
    inside: dict[bool, Path] = {}  # by whether it is version 2
    for line in _text(own / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0" or "memory" in controllers.split(","):
            inside[number == "0"] = Path(name)
    for line in _text(own / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, *_, options) = before.split(), after.split() or ["", ""]
        is_v2 = kind == "cgroup2"
        path = inside.get(is_v2)
        if path is None or not (is_v2 or (kind == "cgroup" and "memory" in options.split(","))):
            continue
        root, top = Path(_unescaped(fields[3])), Path(_unescaped(fields[4]))
        # A container often sees its own group as the root, or the path as it is outside.
        is_below = path.is_relative_to(root) and ".." not in path.parts
        folder = top / path.relative_to(root) if is_below else top
        while True:
            if folder.is_dir():
                yield folder, _V2 if is_v2 else _V1
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent


def _used(folder: Path, files: _Files) -> int:
    """Bytes that a group uses and cannot give back."""
    usage, counters = _text(folder / files.usage), _table(folder / "memory.stat")
    if not usage.isdecimal():
        return 0
    return max(0, int(usage) - sum(counters.get(files.prefix + name, 0) for name in _RECLAIMABLE))


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    rows = [line.split() for line in _text(path).splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _text(path: Path) -> str:
    """Nothing, where there is no such file: not every system has all of them."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _unescaped(path: str) -> str:
    """Of mountinfo, where blanks are written in octal."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path
