"""Runs a function in N processes that form one gloo group on 127.0.0.1.

Processes are forked from one server per pytest process, which has imported torch and all that FSDP2 pulls in
and has no threads; so a group of four costs a tenth of a second instead of four imports of torch. Every rank
dies with the server, and the server with pytest: nothing is left behind, whatever happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

# torch._dynamo is what the first fully_shard imports behind one's back (0.6 s).
PRELOAD = [
    "numpy",
    "pytest",
    "hypothesis",
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "tierckpt.functional",
]
# One thread each, and no look-up of the machine's own name, which fails or hangs in many containers.
RANK_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

PR_SET_PDEATHSIG = 1

Environment = Mapping[str, str] | Sequence[Mapping[str, str]] | None


class RankTimeoutError(Exception):
    """The rank was still running at the deadline and was killed; its stacks are in the output."""


class RankError(Exception):
    """Stands for an exception that cannot be pickled; the message is its text."""


@dataclass(frozen=True)
class Result:
    """What became of one rank.

    ``value``: what the function returned. ``error``: what it raised (or RankTimeoutError). ``exitcode``: of
    the process; -9 when it was killed by SIGKILL. ``output``: all that it wrote to stdout and stderr.
    """

    rank: int
    value: Any
    error: BaseException | None
    traceback: str
    exitcode: int | None
    output: str

    @property
    def ok(self) -> bool:
        return self.error is None and self.exitcode == 0

    def describe(self) -> str:
        how = self.traceback or f"exit code {self.exitcode}, no exception"
        return f"--- rank {self.rank}: {how.rstrip()}\n{self.output.rstrip()}"


@cache
def _server() -> ForkServerContext:
    for name, value in RANK_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _environment(env: Environment, rank: int, world: int) -> dict[str, str]:
    own = env[rank] if isinstance(env, Sequence) else (env or {})
    launcher = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    return {**os.environ, **RANK_ENVIRONMENT, **launcher, **own}


def _portable(error: BaseException) -> BaseException:
    try:
        copy = pickle.loads(pickle.dumps(error))
        return copy if isinstance(copy, BaseException) else RankError(repr(error))
    except Exception:
        return RankError(f"{type(error).__name__}: {error}")


def _rank_main(
    job: bytes,
    reply: connection.Connection,
    output: str,
    environment: dict[str, str],
    port: int,
    timeout: float,
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    faulthandler.dump_traceback_later(max(timeout - 1.0, timeout * 0.8), file=sys.stderr)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    try:
        fn, args = pickle.loads(job)
        if port:
            # The master is pytest, as it is torchrun's agent in a real job: the store outlives any rank.
            store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        answer = (fn(rank, *args), None, "")
        message = pickle.dumps(answer)
    except BaseException as error:
        message = pickle.dumps((None, _portable(error), traceback.format_exc()))
    # Bytes, not objects: multiprocessing would pass tensors as shared memory that dies with this process.
    reply.send_bytes(message)
    reply.close()
    if port and dist.is_initialized():
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def spawn(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 50.0,
    env: Environment = None,
    group: bool = True,
) -> list[Result]:
    """Runs ``fn(rank, *args)`` in ``world`` processes and returns one Result per rank, in rank order.

    ``fn`` must be a top-level function of an importable module. ``env`` is added to the environment of all
    ranks, or, as a sequence, to that of each. ``group=False`` starts no process group. A rank's failure
    raises nothing: see ``run_ranks``. After ``timeout`` seconds all that is left of the ranks is killed.
    """
    job = pickle.dumps((fn, args))
    context = _server()
    store = None
    if group:
        import torch.distributed as dist

        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
    port = store.port if store is not None else 0
    deadline = time.monotonic() + timeout
    messages: dict[int, bytes] = {}
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        outputs = [Path(folder, str(rank)) for rank in range(world)]
        processes, readers = [], []
        try:
            for rank in range(world):
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(job, writer, str(outputs[rank]), _environment(env, rank, world), port, timeout),
                    daemon=False,
                )
                process.start()
                writer.close()
                processes.append(process)
                readers.append(reader)

            open_readers = {reader: rank for rank, reader in enumerate(readers)}
            alive = {process.sentinel: process for process in processes}
            while alive and (left := deadline - time.monotonic()) > 0:
                for ready in connection.wait([*open_readers, *alive], left):
                    if isinstance(ready, connection.Connection):
                        rank = open_readers.pop(ready)
                        with contextlib.suppress(EOFError, ConnectionError):
                            messages[rank] = ready.recv_bytes()
                    elif isinstance(ready, int):
                        alive.pop(ready).join()
            timed_out = {process.pid for process in alive.values()}
        finally:
            for process in processes:
                _kill(process.pid)
                process.join()
            for reader in readers:
                reader.close()

        results = []
        for rank, process in enumerate(processes):
            output = outputs[rank].read_text(errors="replace") if outputs[rank].exists() else ""
            value, error, trace = pickle.loads(messages[rank]) if rank in messages else (None, None, "")
            if process.pid in timed_out:
                error = RankTimeoutError(f"rank {rank} was still running after {timeout} s")
                trace = f"{error}\n{trace}"
            results.append(Result(rank, value, error, trace, process.exitcode, output))
    return results


def _kill(pid: int | None) -> None:
    """Kills the rank, if it still runs, and whatever it has started in its process group."""
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 50.0,
    env: Environment = None,
    group: bool = True,
    dies: Collection[int] = (),
) -> list[Any]:
    """``spawn`` that fails unless every rank returns, but for those in ``dies``, which must die of a signal.

    Returns the ranks' values (None for those that died).
    """
    results = spawn(fn, world, *args, timeout=timeout, env=env, group=group)
    wrong = [
        result
        for result in results
        if (result.rank in dies) != (result.exitcode is not None and result.exitcode < 0)
        or result.error
        or (result.rank not in dies and not result.ok)
    ]
    if wrong:
        raise AssertionError(
            f"{len(wrong)} of {world} ranks went wrong\n" + "\n".join(result.describe() for result in results)
        )
    return [result.value for result in results]
