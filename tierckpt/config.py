"""Every tunable, with its unit, and the descriptions of tiers that a user writes down."""

from __future__ import annotations

import math
import os
import socket
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tierckpt.errors import StateError
from tierckpt.machine import memory

#: Threads that gather and hash (or read and verify) chunks.
IO_THREADS = 4
#: Writes of chunks under way at once. They end in bursts: fewer leave the disk idle now and then.
WRITES = 4
#: Chunks that may be anywhere between their source and the disk: those being written, and as many ready to be.
CHUNKS_AHEAD = 2 * WRITES
#: Threads that copy state into a slot.
COPY_THREADS = max(1, min(4, len(os.sched_getaffinity(0))))
#: Bytes that a thread copies at once while training goes on; whoever waits at the fence takes turns with it.
COPY_BLOCK = 16 << 20
#: Of so many bytes 64 are compared after a copy with where they were copied from.
COMPARE_EVERY = 64 << 10
#: Lines of 64 bytes that are remembered when a save returns, and compared after the copy.
COMPARE_LINES = 1024
#: Seconds between two looks at whether the thread that saved has gone on to another instruction.
CONFIRM_SECONDS = 0.002
#: Seconds without using a core after which the thread that saved waits for something, and is inside of no kernel that writes.
ASLEEP_SECONDS = 0.5
#: Seconds that such a kernel takes at most.
KERNEL_SECONDS = 10.0
#: Slots of staged shards held at once by one process: one being drained, one being filled.
SLOTS = 2
#: Seconds for which files of a retired checkpoint stay, for readers that have begun to read it.
READERS_GRACE = 600.0
#: Seconds that a collective step may take before the save or load fails.
TIMEOUT = 1800.0
#: Seconds for which a rank that has lost contact waits for the others to say that they are still there.
ANSWER_SECONDS = 3.0
#: Seconds for which training stands since no slot is free, where all wait for ranks that have not come to those saves.
BEHIND_SECONDS = 15.0
#: Seconds between two looks whether ranks have anything to agree on; more where there are many ranks.
AGREE_SECONDS = 0.25
AGREE_SECONDS_PER_RANK = 0.001
#: Attempts at a write that failed for a passing reason, and the seconds before the first retry (doubled each time).
WRITE_ATTEMPTS = 5
WRITE_BACKOFF = 0.1
#: Seconds for which a rank looks for the files of other ranks before it takes its root for node-local.
PROBE_SECONDS = 3.0
#: Restarts in a row from one checkpoint without progress after which an older one is taken.
MAX_RESTARTS = 3
#: Free bytes to leave on a file system beyond what a save needs.
FREE_MARGIN = 1 << 20
#: Slots that the agent keeps for each rank: draining, newest complete, filling.
AGENT_SLOTS = 3
#: Part of the memory of the machine, or of the control group, that all slots of an agent may take.
AGENT_BUDGET = 0.5
#: Bytes of memory to leave beside a new slot, but not more than it has itself.
MEMORY_MARGIN = 64 << 20
#: Seconds without a trainer after which the agent gives up what it holds and ends.
AGENT_IDLE = 600.0
#: Seconds for which an agent whose trainers are gone looks for the receipts of other nodes.
DRAIN_DEADLINE = 120.0
#: Seconds after which an agent whose trainers are gone tries again to drain what they left, at first and at most.
DRAIN_PAUSE, DRAIN_PAUSE_LIMIT = 2.0, 60.0
#: Seconds within which an agent must have started and answered.
AGENT_START = 30.0
#: Seconds in which an agent answers what takes it no time: one that is stopped must not stop training for longer.
AGENT_ANSWER = 15.0
#: Bytes per second at which a slot is made at least.
AGENT_SLOT_RATE = 100e6
#: Connections of one agent, and bytes of its log.
AGENT_CONNECTIONS = 1024
AGENT_LOG_BYTES = 64 << 10


def timeout(given: float | None = None) -> float:
    """Seconds for collective waits: the argument, else ``TIERCKPT_TIMEOUT``, else :data:`TIMEOUT`."""
    if given is None:
        text = os.environ.get("TIERCKPT_TIMEOUT")
        try:
            given = float(text) if text else TIMEOUT
        except ValueError:
            raise StateError(f"TIERCKPT_TIMEOUT={text!r} is not a number of seconds") from None
    if not (_is_number(given) and given > 0):
        raise StateError(f"timeout={given!r}: it takes a number of seconds above 0")
    return given


def config_dir() -> Path:
    """The user's folder for keys and pins: ``$XDG_CONFIG_HOME/tierckpt`` or ``~/.config/tierckpt``."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path(os.path.expanduser("~")) / ".config") / "tierckpt"


def node() -> str:
    """What tells this machine from others: ``TIERCKPT_NODE``, else its name and the identity of its kernel."""
    given = os.environ.get("TIERCKPT_NODE")
    if given:
        return given
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


@dataclass(frozen=True)
class KeepLast:
    """Retention: the ``count`` newest checkpoints stay."""

    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 1:
            raise StateError(f"keep={self.count!r}: at least one checkpoint is always kept")

    def keep(self, steps: list[int]) -> set[int]:
        """Of ``steps`` (ascending), those to keep."""
        return set(steps[-self.count :])


@dataclass(frozen=True)
class KeepEvery:
    """Retention: the ``count`` newest stay, and for ever those whose step is a multiple of ``every``."""

    every: int
    count: int = 1

    def __post_init__(self) -> None:
        if self.every < 1 or self.count < 1:
            raise StateError(f"KeepEvery(every={self.every!r}, count={self.count!r}): both are at least 1")

    def keep(self, steps: list[int]) -> set[int]:
        """Of ``steps`` (ascending), those to keep."""
        return set(steps[-self.count :]) | {step for step in steps if step % self.every == 0}


Retention = KeepLast | KeepEvery


def retention(keep: int | Retention | None) -> Retention | None:
    """The policy that ``keep`` stands for: a number is :class:`KeepLast`, None keeps all."""
    if keep is not None and not isinstance(keep, int) and not callable(getattr(keep, "keep", None)):
        raise StateError(f"keep={keep!r}: it takes a number of checkpoints, or a policy such as KeepEvery(…)")
    return KeepLast(keep) if isinstance(keep, int) else keep


_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Cadence:
    """When a step is due at a tier: each time ``step // steps`` changes, or when ``seconds`` have passed."""

    steps: int | None
    seconds: float | None

    @staticmethod
    def of(every: int | str) -> Cadence:
        """From ``every=10`` (steps) or ``every="30s"``, ``"10min"``, ``"1h"`` (durations)."""
        if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
            return Cadence(every, None)
        if isinstance(every, str):
            number = every.rstrip("abcdefghijklmnopqrstuvwxyz ")
            unit = every[len(number) :].strip()
            try:
                seconds = float(number) * _UNITS[unit]
            except (ValueError, KeyError):
                seconds = 0.0
            if seconds > 0:
                return Cadence(None, seconds)
        raise StateError(
            f"every={every!r}: it takes a number of steps (≥ 1) or a duration such as '30s', '10min', '1h'"
        )

    def due(self, step: int, last_step: int) -> bool:
        """Whether ``step`` is due by its number when the last one taken was ``last_step``."""
        assert self.steps is not None
        # A drop (training was set back) is due as a rise is; the same step again is for the caller to refuse.
        return step == last_step or step // self.steps != last_step // self.steps


@dataclass(frozen=True)
class Disk:
    """The disk tier: local NVMe or a shared file system.

    Args:
        every: cadence, a number of steps or a duration.
        keep: how many checkpoints stay, or a policy; None keeps all.
        grace: seconds for which files of a retired checkpoint stay for readers.
    """

    every: int | str = 1
    keep: int | Retention | None = None
    grace: float = READERS_GRACE
    cadence: Cadence = field(init=False, repr=False, compare=False)
    retention: Retention | None = field(init=False, repr=False, compare=False)

    name = "disk"

    def __post_init__(self) -> None:
        object.__setattr__(self, "cadence", Cadence.of(self.every))
        object.__setattr__(self, "retention", retention(self.keep))
        if not _is_number(self.grace) or self.grace < 0:
            raise StateError(f"grace={self.grace!r}: it takes a number of seconds, 0 or more")


@dataclass(frozen=True)
class Ram:
    """The RAM tier: memory of the node's agent, which outlives the trainer.

    Args:
        every: cadence, a number of steps or a duration. Steps that are due on disk come through here in any case.
        copies: of each shard, on so many nodes. More than one takes a peer tier, which this version does not have.
        budget: what all slots of the agent may take: bytes, an integer, or a fraction (a float, at most 1.0) of the memory of
            the machine or of the control group that the job may use; None: half of it.
        slots: for each rank: draining, newest complete, filling. At least 2.
        on_full: when no slot is free: ``"overtake"`` lets a newer step take the place of one that waits for the disk,
            ``"wait"`` makes ``save`` wait, ``"skip"`` skips the step.
        idle: seconds without a trainer after which the agent gives up what it holds and ends.
        drain_deadline: seconds for which an agent whose trainers are gone waits for other nodes.
        metrics: port of this machine on which the agent serves figures for Prometheus (default: ``TIERCKPT_METRICS``, else
            none); needs ``tierckpt[metrics]``.
    """

    every: int | str = 1
    copies: int = 1
    budget: int | float | None = None
    slots: int = AGENT_SLOTS
    on_full: str = "overtake"
    idle: float = AGENT_IDLE
    drain_deadline: float = DRAIN_DEADLINE
    metrics: int | None = None
    cadence: Cadence = field(init=False, repr=False, compare=False)

    name = "ram"

    def __post_init__(self) -> None:
        object.__setattr__(self, "cadence", Cadence.of(self.every))
        if self.copies != 1:
            raise StateError(f"Ram(copies={self.copies!r}): this version keeps one copy, in the node's own memory")
        if not isinstance(self.slots, int) or self.slots < 2:
            raise StateError(f"Ram(slots={self.slots!r}): it takes at least 2, the newest complete step and the next")
        if self.on_full not in ("overtake", "wait", "skip"):
            raise StateError(f"Ram(on_full={self.on_full!r}) is not one of 'overtake', 'wait', 'skip'")
        # 1.5 may be meant as a fraction or as gigabytes, and is neither.
        most = 1.0 if isinstance(self.budget, float) else math.inf
        if self.budget is not None and not (_is_number(self.budget) and 0 < self.budget <= most):
            raise StateError(
                f"Ram(budget={self.budget!r}): it takes bytes as an integer, or a fraction of the machine's memory as a float "
                "above 0 and at most 1.0"
            )
        if not (_is_number(self.idle) and _is_number(self.drain_deadline)) or self.idle < 0 or self.drain_deadline <= 0:
            raise StateError(f"Ram(idle={self.idle!r}, drain_deadline={self.drain_deadline!r}): both are seconds")
        if self.metrics is not None and not _is_port(self.metrics):
            raise StateError(f"Ram(metrics={self.metrics!r}): it takes a port from 1 to 65535")

    @property
    def metrics_port(self) -> int:
        """The port for figures, 0 for none."""
        text = os.environ.get("TIERCKPT_METRICS")
        if self.metrics is not None or not text:
            return self.metrics or 0
        if not text.isdecimal() or not _is_port(int(text)):
            raise StateError(f"TIERCKPT_METRICS={text!r}: it takes a port from 1 to 65535")
        return int(text)

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes on this machine."""
        given = AGENT_BUDGET if self.budget is None else self.budget
        return int(given * memory()) if isinstance(given, float) else given


def _is_number(given: object) -> bool:
    """Whether this is a number, and none that is equal to no other."""
    return isinstance(given, (int, float)) and not isinstance(given, bool) and given == given


def _is_port(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= 65535


Tier = Ram | Disk


def from_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Keyword arguments of ``Checkpointer`` from a TOML file.

    Top-level keys are arguments; each ``[[tiers]]`` table is one tier, its ``tier`` key says which (``"ram"``, ``"disk"``).

    Raises:
        StateError: the file cannot be read, or does not describe its tiers. It names the file.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    where = os.fspath(path)
    try:
        with open(path, "rb") as file:
            table: dict[str, Any] = tomllib.load(file)
    except OSError as error:
        raise StateError(f"{where}: cannot read it: {error.strerror}") from error
    except ValueError as error:  # no TOML, or not even UTF-8
        raise StateError(f"{where}: {error}") from error
    tiers = table.pop("tiers", None)
    if tiers is not None:
        if not (isinstance(tiers, list) and all(isinstance(entry, dict) for entry in tiers)):
            said = "[tiers]" if isinstance(tiers, dict) else f"tiers = {tiers!r}"
            raise StateError(
                f'{where}: {said}: each tier is a table [[tiers]], in double brackets, with tier = "disk" or tier = "ram"'
            )
        table["tiers"] = [_tier(entry, where) for entry in tiers]
    return table


_TIERS: dict[str, type[Ram] | type[Disk]] = {"ram": Ram, "disk": Disk}


def _tier(entry: dict[str, Any], where: str) -> Tier:
    entry = dict(entry)
    kind = entry.pop("tier", None)
    if not isinstance(kind, str) or kind not in _TIERS:
        said = "no key tier" if kind is None else f"tier = {kind!r}"
        raise StateError(f'{where}: a [[tiers]] table has {said}; write tier = "disk" or tier = "ram"')
    where = f"{where}: [[tiers]] {kind}"
    known = [each.name for each in fields(_TIERS[kind]) if each.init]
    unknown = sorted(set(entry) - set(known))
    if unknown:
        raise StateError(f"{where}: unknown keys {', '.join(unknown)}; it takes {', '.join(known)}")
    try:
        return _TIERS[kind](**entry)
    except StateError as error:
        raise StateError(f"{where}: {error}") from error
