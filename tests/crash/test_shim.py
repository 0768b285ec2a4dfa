"""The shim sees every call that changes the disk: strace, which sees all, agrees.

Protects all other tests here from a call that escapes them: whatever touches the store and is not known to be
harmless counts, new kinds of calls too.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.crash.conftest import Benches
from tests.crash.losses import read_log
from tests.crash.scenarios import INTERRUPTED
from tests.crash.workshop import Workshop

#: Calls that change nothing, whatever their arguments.
HARMLESS = re.compile(
    "read|pread64|readv|preadv2?|lseek|close|fstat|newfstatat|l?stat|statx|access|faccessat2?|getdents64|readlink(at)?"
    "|fcntl|ioctl|f?statfs|getcwd|f?chdir|fadvise64|cachestat|flock|dup[23]?|p?poll|p?select6?|epoll_ctl|execve|readahead"
)
NAMES = {
    "pwrite64": "write",
    "fdatasync": "fsync",
    "ftruncate": "truncate",
    "fallocate": "allocate",
    "linkat": "link",
    "unlinkat": "unlink",
    "mkdirat": "mkdir",
    "renameat": "rename",
    "renameat2": "rename",
}
_LINE = re.compile(r"^(\d+) +(?:<\.\.\. (\w+) resumed>|(\w+)\()(.*)$")


def _calls(trace: str) -> list[tuple[str, str]]:
    """(name, arguments and result) of each call in the output of ``strace -f -y``."""
    found, begun = [], {}
    for line in trace.splitlines():
        match = _LINE.match(line)
        if match is None:  # a signal or an exit
            continue
        thread, resumed, name, rest = match.groups()
        if rest.endswith("<unfinished ...>"):
            begun[thread] = rest.removesuffix("<unfinished ...>")
        else:
            found.append((resumed or name, begun.pop(thread, "") + rest if resumed else rest))
    return found


def _changes(name: str, rest: str) -> bool:
    if name in ("open", "openat", "openat2"):
        return "O_CREAT" in rest or "O_TRUNC" in rest
    if name == "mmap":
        return "MAP_SHARED" in rest and "PROT_WRITE" in rest
    return HARMLESS.fullmatch(name) is None


def _path(name: str, rest: str) -> str:
    """The first path: of the descriptor, or as named, below a descriptor or not."""
    descriptor = re.match(r"\d+<([^>]*)>", rest)
    if descriptor is not None and not name.rstrip("2").endswith("at"):
        return descriptor[1]
    named = re.search(r'"([^"]*)"', rest)
    assert named is not None, rest
    return f"{descriptor[1]}/{named[1]}" if descriptor is not None and named[1][0] != "/" else named[1]


@pytest.mark.acceptance
@pytest.mark.limit(300)
def test_the_shim_sees_what_strace_sees(benches: Benches, shim: Path, tmp_path: Path) -> None:
    assert shutil.which("strace"), "strace is missing: apt-get install strace"
    output = tmp_path / "trace"
    options = ("-f", "-y", "-s", "1000", "-e", "trace=%file,%desc", "-o", str(output))
    traced = Workshop(tmp_path, shim, prefix=("strace", *options))
    try:
        for scenario in INTERRUPTED:
            bench, log = benches(scenario), tmp_path / scenario
            before = output.stat().st_size if output.exists() else 0
            bench.reset()
            traced.do(
                "perform",
                user=bench.base / "user",
                base=str(bench.base),
                scenario=scenario,
                large=False,
                log=str(log),
                sync=True,
                timeout=120.0,
            )
            base = str(bench.base)
            calls = [
                (_kind(name, rest), _path(name, rest))
                for name, rest in _calls(output.read_bytes()[before:].decode(errors="replace"))
                if base in rest and _changes(name, rest)
            ]
            seen = Counter(
                (kind, path.removeprefix(base).lstrip("/") or ".")
                for kind, path in calls
                if Path(path).is_relative_to(base)  # not the log, in which such paths are written
            )
            logged = Counter((one.name, one.path) for one in read_log(log) if one.name != "close")
            assert logged == seen, scenario
            assert sum(seen.values()) == len([one for one in bench.operations if one.name != "close"]), scenario
    finally:
        traced.close()


def _kind(name: str, rest: str) -> str:
    if name in ("open", "openat"):
        return "create"
    if name == "unlinkat" and "AT_REMOVEDIR" in rest:
        return "rmdir"
    return NAMES.get(name, name)
