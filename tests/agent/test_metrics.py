"""An agent tells Prometheus how it is, where somebody asked for it: over real HTTP, on this machine alone."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.agent.job import state
from tests.agents import kill, status
from tests.cli.test_agent import service
from tierckpt import Checkpointer, Disk, Ram, StateError, StoreError
from tierckpt.agent.metrics import Figures

prometheus = pytest.importorskip("prometheus_client.parser")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _figures(port: int) -> dict[str, float]:
    """By name and label ``state``; the other labels are the same in all."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    found = {}
    for family in prometheus.text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["run"] == "train-7" and sample.labels["node"], sample
            state = sample.labels.get("state")
            found[sample.name.removeprefix("tierckpt_agent_") + (f" {state}" if state else "")] = sample.value
    return found


def test_what_it_tells_is_what_is_so(tmp_path: Path) -> None:
    port = _free_port()
    with Checkpointer(tmp_path / "s", run="train-7", tiers=[Ram(metrics=port), Disk(every=10)]) as ckpt:
        ckpt.save(0, state(0)).wait()
        first = _figures(port)
        assert (first["newest_step durable"], first["lag_steps"], first["lag_seconds"]) == (0, 0, 0)
        ckpt.save(3, state(3)).wait("ram")
        ckpt.save(4, state(4)).wait("ram")
        found = _figures(port)
        assert [found[f"newest_step {state}"] for state in ("sealed", "complete", "durable")] == [4, 4, 0]
        assert found["lag_steps"] == 4 and found["lag_seconds"] > 0
        told = status()
        assert found["held_bytes"] == told["held"] > 0 and found["budget_bytes"] == told["budget"]
        assert sum(found[f"slots {state}"] for state in ("free", "filling", "sealed")) == len(
            told["generations"][0]["slots"]
        )
        assert found["slots sealed"] >= 1
        assert found["trainers alive"] == 1 and found["trainers dead"] == 0 and found["generation"] == 1
        assert found["drained_shards_total"] == 1 and found["drain_failures_total"] == found["errors_total"] == 0
        assert found["drained_bytes_total"] > 80_000 and found["drain_seconds_total"] > 0
        assert told["metrics"] == port
        ckpt.save(10, state(10)).wait()
        after = _figures(port)
        assert after["drained_shards_total"] == 2 and after["lag_steps"] == after["lag_seconds"] == 0


def test_it_listens_on_the_loopback_only(tmp_path: Path) -> None:
    with service("--run", "train-7", "--metrics", "0") as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("metrics at http://127.0.0.1:"), line
        port = int(line.rpartition(":")[2].partition("/")[0])
        found = _figures(port)
        assert found["held_bytes"] == 0 and "newest_step sealed" not in found
        listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        assert [one for one in listening if one.endswith(f":{port:04X}")][:1] == [f"0100007F:{port:04X}"]
        assert not [one for one in Path("/proc/net/tcp6").read_text().splitlines() if f":{port:04X} " in one]


def test_a_taken_port_is_told_and_does_no_harm(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with Checkpointer(tmp_path / "s", run="train-7", tiers=[Ram(metrics=port), Disk()]) as ckpt:
            with pytest.warns(RuntimeWarning, match=f"nowhere .*not on port {port}"):
                ckpt.save(0, state(0)).wait()
            ckpt.save(1, state(1)).wait()
            (error,) = status()["errors"]
            assert str(port) in error and status()["errors_total"] == 1
        command = [sys.executable, "-m", "tierckpt", "agent", "--run", "train-7", "--metrics", str(port)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert ran.returncode == 2 and f"127.0.0.1:{port}" in ran.stderr, ran.stderr


def test_a_new_agent_serves_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = _free_port()
    monkeypatch.setenv("TIERCKPT_METRICS", str(port))
    with Checkpointer(tmp_path / "s", run="train-7", tiers=[Ram(), Disk()]) as ckpt:
        ckpt.save(0, state(0)).wait()
        kill(status()["pid"])
        for step in range(1, 4):
            with contextlib.suppress(StoreError):  # the first may find out that the agent is gone
                ckpt.save(step, state(step)).wait()
        assert _figures(port)["newest_step sealed"] >= 1


@pytest.mark.parametrize("given", [0, -1, 70_000, True, "9100"])
def test_what_is_no_port_is_refused(given: object) -> None:
    with pytest.raises(StateError, match="port from 1 to 65535"):
        Ram(metrics=given)  # type: ignore[arg-type]


def test_what_is_no_port_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCKPT_METRICS", "many")
    with pytest.raises(StateError, match="TIERCKPT_METRICS='many'"):
        _ = Ram().metrics_port


def test_nobody_imports_it_unasked(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", run="train-7") as ckpt:
        ckpt.save(0, state(0)).wait()
        maps = Path(f"/proc/{status()['pid']}/maps").read_text()
        assert "_ssl" not in maps
    code = (
        "import sys, tierckpt, tierckpt.agent.server, tierckpt.agent.metrics, tierckpt.cli.agent; print(*sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [name for name in ran.stdout.split() if name.startswith(("prometheus", "http.server"))]


def test_without_the_package_it_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['prometheus_client'] = None; from tierckpt.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "agent", "--run", "train-7", "--metrics", "0"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ran.returncode == 2 and "pip install 'tierckpt[metrics]'" in ran.stderr, ran.stderr


def test_a_status_without_generations_has_figures() -> None:
    told = {
        "run": "r",
        "node": "n",
        "seconds": 1,
        "held": 0,
        "budget": 0,
        "generations": [],
        "drained": {"bytes": 0, "failures": 0, "milliseconds": 0, "shards": 0},
        "errors_total": 0,
    }
    assert json.dumps([family.name for family in Figures(lambda: told).collect()])
