"""Runs the demo and shows what came of it.

One training job of four FSDP2 processes runs to its end undisturbed. The same job runs again and loses a
process to SIGKILL in the middle of a save, which ends the others too. The newest complete step is in the memory of the
agent, which outlives them; its files on the disk are removed, to prove it; and the job is started again and goes on from
there. All losses and the final state of the two are compared bit for bit. Then the last checkpoint is loaded on two
processes and on one.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tierckpt.agent.listing import agents
from tierckpt.agent.protocol import Channel
from tierckpt.agent.runtime import homes
from tierckpt.cli.output import size
from tierckpt.demo.digest import Digests, combined

WORLD = 4
STEPS = 30
EVERY = 5
# The first save in which the victim may be killed.
KILL_FROM = 14
VICTIM = 2
# Seconds between the stop of the victim and the last look, in which the agent reads what it was sent before.
LOOK_AGAIN = 0.3
# Seconds after which a training run counts as hung.
LIMIT = 240.0


class DemoError(Exception):
    """The demo could not be carried through; the message says where."""


@dataclass(frozen=True)
class Kill:
    """A rank that was killed in the middle of a save, and the newest step that was complete."""

    rank: int
    step: int
    complete: int


@dataclass(frozen=True)
class Run:
    """What a training job left behind.

    Attributes:
        attempts: for each (re)start, the loss of each step, as hex.
        restored: what each rank of the restart says of its restore.
    """

    attempts: list[dict[int, str]]
    digests: Digests
    restored: tuple[dict[str, Any], ...] = ()

    @property
    def sources(self) -> list[str]:
        """The tiers from which the ranks restored."""
        return sorted({tier for told in self.restored for tier in told["sources"]})

    @property
    def seconds(self) -> float:
        """That the slowest rank took to restore."""
        return max((told["seconds"] for told in self.restored), default=0.0)


def main(folder: Path | None = None, *, keep: bool = False) -> int:
    """Runs the demo in ``folder`` (which must be empty or absent, and stays), else in a temporary one.

    ``keep`` leaves the temporary folder too. Returns the exit status: 0 when all is equal, 1 when something
    differs, 2 when the demo could not run.
    """
    console = Console(highlight=False)
    try:
        with _workspace(folder, keep, console) as space:
            (space / "runtime" / "tierckpt").mkdir(mode=0o700, parents=True)
            try:
                return 0 if _demo(space, console) else 1
            finally:
                _end_agents(space)
    except DemoError as error:
        console.print(f"[red]the demo could not run:[/red] {escape(str(error))}", soft_wrap=True)
        return 2


def _demo(space: Path, console: Console) -> bool:
    begun = time.monotonic()
    console.print(
        f"\n[bold]1[/bold]  a small GPT on {WORLD} FSDP2 processes, {STEPS} steps; saves to memory, every {EVERY}th to the disk"
    )
    calm = _attempt(space, "undisturbed")

    console.print(f"[bold]2[/bold]  the same again, and rank {VICTIM} gets SIGKILL in the middle of a save")
    kill = _killed(space, "killed")
    console.print(f"   killed in the save of step {kill.step}: begun, not sealed; the others ended too")
    removed = _remove(space / "killed", kill.complete)
    console.print(f"   removed from the disk: step {kill.complete}, {size(removed)}; the agent's memory has it still")
    hit = _attempt(space, "killed", attempt=1)
    resumed = min(hit.attempts[1], default=0)
    console.print(f"   started again, the job went on after step {resumed - 1}\n")

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
            note = ", restarted" if step == resumed else ""
            table.add_row(str(step), f"{float.fromhex(expected):.10f}", losses, _verdict(same) + note)
    table.add_row("all", f"{STEPS} losses", f"{sum(map(len, hit.attempts))} losses", _verdict(equal))
    same = calm.digests == hit.digests
    table.add_row("end", combined(calm.digests)[:12] + "…", combined(hit.digests)[:12] + "…", _verdict(same))
    from_memory = hit.sources == ["ram"]
    source = (
        f"[green]from {', '.join(hit.sources)}[/green]" if from_memory else f"[red]from {', '.join(hit.sources)}[/red]"
    )
    table.add_row("restored", "", f"step {resumed - 1} in {hit.seconds:.2f} s", source)
    return table, equal and same and from_memory


def _verdict(same: bool) -> str:
    return "[green]bit-equal[/green]" if same else "[red]DIFFERENT[/red]"


def _name_differences(expected: Digests, found: Digests, console: Console) -> None:
    names = [n for n in sorted(expected.keys() | found.keys()) if expected.get(n) != found.get(n)]
    for name in names[:5]:
        console.print(f"   [red]differs:[/red] {name}")
    if len(names) > 5:
        console.print(f"   … and {len(names) - 5} more")


def _attempt(space: Path, name: str, attempt: int = 0) -> Run:
    """Runs the job to its end."""
    with _job(space, name, attempt) as (job, log):
        output = log / f"output-{attempt}"
        try:
            status = job.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise DemoError(f"training took longer than {LIMIT:.0f} s\n{_head(output)}") from None
    if status:
        raise DemoError(f"training ended with status {status}\n{_head(output)}")
    attempts: list[dict[int, str]] = []
    for number in range(attempt + 1):
        pairs = (line.split() for line in (log / f"steps-{number}-0").read_text().splitlines())
        attempts.append({int(step): loss for step, loss in pairs})
    restored = [json.loads(path.read_text()) for path in sorted(log.glob(f"restored-{attempt}-*"))]
    return Run(attempts, json.loads((log / "digests.json").read_text()), tuple(restored))


def _killed(space: Path, name: str) -> Kill:
    """Runs the job until a process was killed in the middle of a save, and waits for what the others and the agent do then."""
    with _job(space, name, 0) as (job, log):
        output = log / "output-0"
        kill = _kill_in_save(job, space, log, VICTIM)
        if kill is None:
            raise DemoError(f"no save was caught before its end: the machine is too busy; try again\n{_head(output)}")
        try:
            job.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise DemoError(f"the other ranks did not end within {LIMIT:.0f} s\n{_head(output)}") from None
    # The agent drains what is newest as soon as the last trainer is gone. Files that come later would spoil the proof.
    deadline = time.monotonic() + LIMIT
    while (complete := _settled(space)) is None:
        if time.monotonic() > deadline:
            raise DemoError(f"the agent did not bring the newest step to the disk: {agents(_runtime(space))}")
        time.sleep(0.05)
    if complete >= kill.step:
        raise DemoError(
            f"rank {kill.rank} had sealed step {kill.step} when it was killed: the machine is too busy; try again"
        )
    return replace(kill, complete=complete)


def _settled(space: Path) -> int | None:
    """The newest complete step, once all trainers are gone and the agent has brought it to the disk."""
    for one in agents(_runtime(space)):
        for generation in one.get("generations", ()):
            durable = generation["durable"]
            if (
                set(generation["ranks"].values()) == {"dead"}
                and durable is not None
                and durable == generation["sealed"]
            ):
                return int(durable)
    return None


def _remove(root: Path, step: int) -> int:
    """Removes the files of a step; their bytes."""
    (folder,) = root.glob(f"g*/s{step:012}")
    removed = sum(path.stat().st_size for path in [*folder.iterdir(), *(root / "layouts").iterdir()])
    shutil.rmtree(folder)
    shutil.rmtree(root / "layouts")
    return removed


@contextmanager
def _job(space: Path, name: str, attempt: int) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The training job, which ends with the block, and the folder of its notes."""
    root, log = space / name, space / f"{name}-log"
    log.mkdir(exist_ok=True)
    arguments = [
        str(root),
        "--folder",
        str(log),
        "--steps",
        str(STEPS),
        "--every",
        str(EVERY),
        "--attempt",
        str(attempt),
    ]
    with open(log / f"output-{attempt}", "wb") as output:
        job = subprocess.Popen(_torchrun(WORLD) + arguments, stdout=output, stderr=output, env=_environment(space))
        try:
            yield job, log
        finally:
            _end(job)


def _kill_in_save(job: subprocess.Popen[bytes], space: Path, log: Path, rank: int) -> Kill | None:
    """Kills the rank while it saves: it fills a slot of the agent, and has not sealed it.

    The rank is stopped first, so that nothing moves between the look and the kill; when it was already too
    late it goes on, until the next save. Returns None when no save was caught.
    """
    deadline = time.monotonic() + LIMIT
    with _status(job, space, deadline) as status:
        while job.poll() is None and time.monotonic() < deadline:
            sealed = _filling(status(), rank)
            if sealed is None or sealed + 1 < KILL_FROM:
                time.sleep(0.0005)
                continue
            pid = int((log / f"pid-0-{rank}").read_text())
            os.kill(pid, signal.SIGSTOP)
            while not _stopped(pid):
                if time.monotonic() > deadline:  # it has ended, and nobody has asked how
                    return None
                time.sleep(0.0001)
            # What it had told the agent before it was stopped counts.
            time.sleep(LOOK_AGAIN)
            sealed = _filling(status(), rank)
            if sealed is not None:
                os.kill(pid, signal.SIGKILL)
                return Kill(rank, sealed + 1, sealed)
            os.kill(pid, signal.SIGCONT)
    return None


def _filling(status: dict[str, Any], rank: int) -> int | None:
    """The step that the rank sealed last, if it is filling a slot for the next one."""
    for generation in status["generations"]:
        if any(slot["rank"] == rank and slot["state"] == "filling" for slot in generation["slots"]):
            return max((step["step"] for step in generation["steps"] if rank in step["sealed_by"]), default=None)
    return None


@contextmanager
def _status(job: subprocess.Popen[bytes], space: Path, deadline: float) -> Iterator[Callable[[], dict[str, Any]]]:
    """Asks the job's agent how it is, on one connection: a save takes milliseconds."""
    while True:
        sock = next((sock for home in homes(_runtime(space)) if (sock := home.connect(LIMIT)) is not None), None)
        if sock is not None:
            break
        if job.poll() is not None or time.monotonic() > deadline:
            raise DemoError("the job has no agent")
        time.sleep(0.01)
    with closing(Channel(sock)) as channel:

        def ask() -> dict[str, Any]:
            channel.send({"op": "status"})
            with channel.receive() as reply:
                status: Any = reply.fields["status"]
            return dict(status)

        yield ask


def _runtime(space: Path) -> Path:
    """Where the demo's agents have their sockets."""
    return space / "runtime" / "tierckpt"


def _end_agents(space: Path) -> None:
    """Ends the agents that the demo has left behind when it went wrong; after a good end there are none."""
    for one in agents(_runtime(space)):
        if "pid" not in one:
            continue
        for number, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(one["pid"])
                try:
                    signal.pidfd_send_signal(descriptor, number)
                    if select.select([descriptor], [], [], seconds)[0]:
                        break
                finally:
                    os.close(descriptor)


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


def _torchrun(processes: int) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes=1", f"--nproc-per-node={processes}", "--max-restarts=0"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
        *("-m", "tierckpt.demo.train"),
    ]


def _environment(space: Path) -> dict[str, str]:
    """The user's, but with keys, pins and settings of the demo's own: nothing is left in the home folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TIERCKPT_")}
    folders = {"XDG_CONFIG_HOME": str(space / "config"), "XDG_STATE_HOME": str(space / "config")}
    folders["XDG_RUNTIME_DIR"] = str(_runtime(space).parent)
    launch = {
        "OMP_NUM_THREADS": "1",
        # Many containers cannot resolve their own name.
        "GLOO_SOCKET_IFNAME": "lo",
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
            try:
                yield Path(temporary)
            finally:  # the command that was shown names it
                console.print(f"{escape(temporary)} is removed; tierckpt demo --keep leaves it", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
