"""Keeps every test away from the user's own keys, pins and settings, and from running for ever."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import settings

# Before anything imports torch or numpy: all tests together have two cores.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
for _name in [name for name in os.environ if name.startswith("TIERCKPT_")]:
    del os.environ[_name]

# A loaded machine is no failure; on CI hypothesis chooses its own profile, which repeats the same examples.
settings.register_profile("tierckpt", deadline=None, print_blob=True)
if "CI" not in os.environ:
    settings.load_profile("tierckpt")

DEFAULT_LIMIT = 60.0
# How long after its limit what never comes back to Python takes the whole process with it.
HARD_STOP = 20.0
REAL_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    # At this moment pytest captures nothing; later the stacks would go down with the process.
    config.stash[REAL_STDERR] = os.dup(2)
    # A shell has what it runs in the background ignore it; tests of interrupts send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _isolated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Own, empty folders for configuration and sockets; the test may set TIERCKPT_* itself.

    Afterwards the second reader reads what the test has stored.
    """
    stored: Path | None = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    home = tmp_path_factory.mktemp("user")
    for variable, folder in (
        ("XDG_CONFIG_HOME", "config"),
        ("XDG_RUNTIME_DIR", "runtime"),
        ("XDG_STATE_HOME", "state"),
        ("XDG_CACHE_HOME", "cache"),
    ):
        path: Path = home / folder
        path.mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(path))
    yield
    if (home / "runtime" / "tierckpt").exists():
        from tests.agents import end_all

        end_all()
    for name in [name for name in os.environ if name.startswith("TIERCKPT_")]:
        monkeypatch.delenv(name)
    if stored is not None:
        _read_again(stored)


#: Bytes of a store up to which the second reader, which is slow, reads it too.
SECOND_READER_LIMIT = 16 << 20


def _read_again(folder: Path) -> None:
    """Every store in which the package finds nothing wrong must be right for the second reader as well."""
    from tests.second_reader import verify_store
    from tierckpt.errors import TierckptError
    from tierckpt.tiers.disk import DiskPlace
    from tierckpt.tiers.verify import verify

    for found in [*folder.glob("tierckpt.json"), *folder.glob("*/tierckpt.json"), *folder.glob("*/*/tierckpt.json")]:
        root = found.parent
        try:
            if sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) > SECOND_READER_LIMIT:
                continue
            report = verify(DiskPlace(root), every=True, allow_extra=True)
        except (TierckptError, OSError):
            continue
        problems = [line for line in verify_store(root) if "belongs to nothing" not in line] if report.ok else []
        assert not problems, f"the second reader does not agree about {root}: {problems}"


def _limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("limit")
    return float(marker.args[0]) if marker else DEFAULT_LIMIT


@contextlib.contextmanager
def _limited(item: pytest.Item) -> Iterator[None]:
    """A phase of a test that takes too long fails; where that does not get through (native code, a lock), all stacks are
    told and the process ends. Armed anew for each phase: pytest disarms the latter whenever a phase has failed."""
    limit = _limit(item)

    def expired(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=2)
        pytest.fail(f"the test ran longer than its limit of {limit:g} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, limit)
    faulthandler.dump_traceback_later(limit + HARD_STOP, exit=True, file=item.config.stash[REAL_STDERR])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    with _limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with _limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    with _limited(item):
        return (yield)
