"""Protects the suite: whatever hangs, in any phase and after any failure, is told and ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent

CASE = """
import signal, threading
import pytest
from tests import conftest

conftest.HARD_STOP = 0.3
# No signal gets through: only the end of the process is left.
DEAF = {deaf}

def hang():
    if DEAF:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    threading.Event().wait()

@pytest.fixture
def held():
    {phase} == "setup" and hang()
    yield
    {phase} == "teardown" and hang()

@pytest.mark.limit(0.3)
def test_it(held):
    {phase} == "call" and hang()
    assert not {fails}
"""


@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize("phase,fails", [("setup", False), ("call", False), ("teardown", False), ("teardown", True)])
def test_what_hangs_is_ended(tmp_path: Path, phase: str, fails: bool, deaf: bool) -> None:
    """A failure of the test itself takes no limit away from what follows."""
    (tmp_path / "test_case.py").write_text(CASE.format(phase=repr(phase), fails=fails, deaf=deaf))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", ".", "."],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "in hang" in done.stdout + done.stderr
    if deaf:
        assert "Timeout (" in done.stderr
    else:
        assert "longer than its limit of 0.3 s" in done.stdout
