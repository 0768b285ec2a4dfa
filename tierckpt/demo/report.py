"""Runs the demo and shows what came of it.

One training job of four FSDP2 processes runs to its end undisturbed. The same job runs again and loses a
process to SIGKILL in the middle of a save; torchrun restarts it, and it goes on from the newest checkpoint.
All losses and the final state of the two are compared bit for bit. Then the last checkpoint is loaded on two
processes and on one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tierckpt.demo.digest import Digests, combined

WORLD = 4
STEPS = 30
EVERY = 5
# The first save in which the victim may be killed: two older checkpoints are there by then.
KILL_FROM = 14
VICTIM = 2
# Seconds after which a training run counts as hung.
LIMIT = 240.0


class DemoError(Exception):
    """The demo could not be carried through; the message says where."""


@dataclass(frozen=True)
class Kill:
    """A rank that was killed in the middle of a save."""

    rank: int
    step: int
    shard: Path


@dataclass(frozen=True)
class Run:
    """What a training job left behind. ``attempts``: for each (re)start, the loss of each step, as hex."""

    attempts: list[dict[int, str]]
    digests: Digests


def main(folder: Path | None = None, *, keep: bool = False) -> int:
    """Runs the demo in ``folder`` (which must be empty or absent, and stays), else in a temporary one.

    ``keep`` leaves the temporary folder too. Returns the exit status: 0 when all is equal, 1 when something
    differs, 2 when the demo could not run.
    """
    console = Console(highlight=False)
    try:
        with _workspace(folder, keep, console) as space:
            return 0 if _demo(space, console) else 1
    except DemoError as error:
        console.print(f"[red]the demo could not run:[/red] {escape(str(error))}", soft_wrap=True)
        return 2


def _demo(space: Path, console: Console) -> bool:
    begun = time.monotonic()
    console.print(f"\n[bold]1[/bold]  a small GPT on {WORLD} FSDP2 processes, {STEPS} steps, a save every {EVERY}")
    calm, _ = _train(space, "undisturbed")

    console.print(f"[bold]2[/bold]  the same again, and rank {VICTIM} gets SIGKILL in the middle of a save")
    hit, kill = _train(space, "killed", victim=VICTIM)
    if kill is None:
        raise DemoError("no save was caught before its end: the machine is too busy; try again")
    if len(hit.attempts) != 2 or not hit.attempts[1]:
        raise DemoError(f"expected one restart, saw {len(hit.attempts) - 1}")
    resumed = min(hit.attempts[1])
    console.print(f"   killed in the save of step {kill.step}: its shard was there, the receipt was not")
    console.print(f"   torchrun restarted the job, which went on after step {resumed - 1}\n")

    table, equal = _compare(calm, hit, resumed)
    console.print(table)

    console.print(f"\n[bold]3[/bold]  the checkpoint of step {STEPS - 1}, loaded into other layouts")
    layouts = Table("processes", "digest of the whole state", "", box=None, padding=(0, 2))
    layouts.add_row(f"{WORLD}, as trained", combined(hit.digests)[:32], "")
    for processes, text in ((2, "2, FSDP2"), (1, "1, plain")):
        digests = _load(space, processes)
        equal &= digests == hit.digests
        layouts.add_row(text, combined(digests)[:32], _verdict(digests == hit.digests))
        _name_differences(hit.digests, digests, console)
    console.print(layouts)

    root = space / "killed"
    console.print(f"\n[bold]4[/bold]  tierckpt verify {escape(str(root))}", soft_wrap=True)
    verify = _run([sys.executable, "-m", "tierckpt", "verify", str(root)], space)
    console.print(verify.stdout.decode(errors="replace").rstrip(), markup=False, soft_wrap=True)
    equal &= verify.returncode == 0

    seconds = time.monotonic() - begun
    if equal:
        console.print(f"\n[green]Nothing was lost and nothing differs.[/green]  {seconds:.0f} s")
    else:
        console.print(f"\n[red]Something differs: see above.[/red]  {seconds:.0f} s")
    return equal


def _compare(calm: Run, hit: Run, resumed: int) -> tuple[Table, bool]:
    table = Table("step", "undisturbed", "killed, resumed", "", box=None, padding=(0, 2))
    equal = True
    shown = {*range(EVERY - 1, STEPS, EVERY), *range(resumed - 1, resumed + 2)}
    for step in range(STEPS):
        expected = calm.attempts[0][step]
        # Steps between the checkpoint and the kill were done twice: both times count.
        found = [attempt[step] for attempt in hit.attempts if step in attempt]
        same = bool(found) and all(loss == expected for loss in found)
        equal &= same
        if step in shown or not same:
            losses = " and ".join(dict.fromkeys(f"{float.fromhex(loss):.10f}" for loss in found))
            note = ", first after restart" if step == resumed else ""
            table.add_row(str(step), f"{float.fromhex(expected):.10f}", losses, _verdict(same) + note)
    table.add_row("all", f"{STEPS} losses", f"{sum(map(len, hit.attempts))} losses", _verdict(equal))
    same = calm.digests == hit.digests
    table.add_row("end", combined(calm.digests)[:12] + "…", combined(hit.digests)[:12] + "…", _verdict(same))
    return table, equal and same


def _verdict(same: bool) -> str:
    return "[green]bit-equal[/green]" if same else "[red]DIFFERENT[/red]"


def _name_differences(expected: Digests, found: Digests, console: Console) -> None:
    names = [n for n in sorted(expected.keys() | found.keys()) if expected.get(n) != found.get(n)]
    for name in names[:5]:
        console.print(f"   [red]differs:[/red] {name}")
    if len(names) > 5:
        console.print(f"   … and {len(names) - 5} more")


def _train(space: Path, name: str, victim: int | None = None) -> tuple[Run, Kill | None]:
    root, log = space / name, space / f"{name}-log"
    log.mkdir()
    arguments = [str(root), "--folder", str(log), "--steps", str(STEPS), "--every", str(EVERY)]
    kill = None
    with open(log / "output", "wb") as output:
        job = subprocess.Popen(
            _torchrun(WORLD, restarts=1) + arguments, stdout=output, stderr=output, env=_environment(space)
        )
        try:
            if victim is not None:
                kill = _kill_in_save(job, root, log, victim)
            status = job.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise DemoError(f"training took longer than {LIMIT:.0f} s\n{_head(log / 'output')}") from None
        finally:
            _end(job)
    if status:
        raise DemoError(f"training ended with status {status}\n{_head(log / 'output')}")
    attempts: list[dict[int, str]] = []
    while (path := log / f"steps-{len(attempts)}-0").exists():
        pairs = (line.split() for line in path.read_text().splitlines())
        attempts.append({int(step): loss for step, loss in pairs})
    return Run(attempts, json.loads((log / "digests.json").read_text())), kill


def _kill_in_save(job: subprocess.Popen[bytes], root: Path, log: Path, rank: int) -> Kill | None:
    """Kills the rank while a save is under way: its shard exists, its receipt does not.

    The rank is stopped first, so that nothing moves between the look and the kill; when it was already too
    late it goes on, until the next save. Returns None when no save was caught.
    """
    for step in range(KILL_FROM, STEPS, EVERY):
        shard = root / "g0001" / f"s{step:012}" / f"shard-{rank:05}.safetensors"
        deadline = time.monotonic() + LIMIT
        while not shard.exists():
            if job.poll() is not None or time.monotonic() > deadline:
                return None
            time.sleep(0.0005)
        pid = int((log / f"pid-0-{rank}").read_text())
        os.kill(pid, signal.SIGSTOP)
        while not _stopped(pid):
            time.sleep(0.0001)
        if not shard.with_name(f"shard-{rank:05}.receipt.json").exists():
            os.kill(pid, signal.SIGKILL)
            return Kill(rank, step, shard)
        os.kill(pid, signal.SIGCONT)
    return None


def _stopped(pid: int) -> bool:
    """Whether all threads of the process have stopped."""
    states = (path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat"))
    return all(state == "T" for state in states)


def _load(space: Path, processes: int) -> Digests:
    log = space / f"loaded-on-{processes}-log"
    log.mkdir()
    module = _torchrun(processes) if processes > 1 else [sys.executable, "-m", "tierckpt.demo.train"]
    done = _run([*module, str(space / "killed"), "--folder", str(log), "--steps", str(STEPS), "--load"], space)
    if done.returncode:
        raise DemoError(f"loading on {processes} failed\n{done.stdout.decode(errors='replace')[:4000]}")
    digests: Digests = json.loads((log / "digests.json").read_text())
    return digests


def _run(command: list[str], space: Path) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(space),
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DemoError(f"{' '.join(command)} took longer than {LIMIT:.0f} s") from None


def _torchrun(processes: int, restarts: int = 0) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes=1", f"--nproc-per-node={processes}", f"--max-restarts={restarts}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
        *("-m", "tierckpt.demo.train"),
    ]


def _environment(space: Path) -> dict[str, str]:
    """The user's, but with keys, pins and settings of the demo's own: nothing is left in the home folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TIERCKPT_")}
    folders = {"XDG_CONFIG_HOME": str(space / "config"), "XDG_STATE_HOME": str(space / "config")}
    launch = {
        "OMP_NUM_THREADS": "1",
        # Many containers cannot resolve their own name.
        "GLOO_SOCKET_IFNAME": "lo",
        # Else a restarted group meets the addresses of the dead one in torchrun's store (pytorch#135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return {**inherited, **folders, **launch}


def _end(job: subprocess.Popen[bytes]) -> None:
    """Ends torchrun, which ends its workers; kills it when it does not obey."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(40)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()


def _head(path: Path) -> str:
    """Where the first error is; torchrun's own report of it comes last and says less."""
    return path.read_text(errors="replace")[:4000]


@contextmanager
def _workspace(folder: Path | None, keep: bool, console: Console) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise DemoError(f"{folder} is not empty: name a new folder")
        yield folder.resolve()
    elif keep:
        space = Path(tempfile.mkdtemp(prefix="tierckpt-demo-"))
        try:
            yield space
        finally:
            console.print(f"kept in {escape(str(space))}", soft_wrap=True)
    else:
        with tempfile.TemporaryDirectory(prefix="tierckpt-demo-") as temporary:
            yield Path(temporary)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
