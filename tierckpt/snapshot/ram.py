"""The RAM tier as a trainer sees it: its slots in the agent, and the thread that knows which steps are complete."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tierckpt import config
from tierckpt.agent.client import Client, Joining
from tierckpt.agent.coordinator import Coordinator
from tierckpt.agent.drain import Drain, Job
from tierckpt.agent.sealing import Sealing
from tierckpt.agent.writing import Shard
from tierckpt.config import Ram
from tierckpt.errors import (
    AgentLostError,
    AgentSilentError,
    ArenaFullError,
    FencedError,
    RanksBehindError,
    SkippedError,
    TierckptError,
)
from tierckpt.group import Group
from tierckpt.snapshot.arena import Arena, Slot, patiently
from tierckpt.snapshot.remote import RemoteArena, RemoteSlot
from tierckpt.telling import warn

_log = logging.getLogger("tierckpt")


class RamTier:
    """This rank's part in one generation, from :meth:`join` to :meth:`close`.

    Args:
        policy: the user's.
        group: its ranks save together.
        channels: between these ranks, for the thread that finds out what is complete.
    """

    def __init__(self, policy: Ram, group: Group, channels: Group, coordinator: Coordinator, drain: Drain) -> None:
        self._policy, self._group, self._coordinator, self._drain = policy, group, coordinator, drain
        client = self._client = Client(coordinator.run, config.node(), timeout=group.timeout)
        self.arena = RemoteArena(client, coordinator.fenced)
        # For one step at a time, while the agent does not answer.
        self._own = Arena(1)
        self._warned: set[type[TierckptError]] = set()
        client.heard = self._heard
        self.sealing = Sealing(channels, drain, slots=policy.slots, complete=self.arena.complete, drop=self.arena.drop)

    def join(self) -> None:
        """Take part in the coordinator's generation, which fences older ones; the drain's shards are written by the agent.

        Collective.

        Raises:
            FencedError: a newer generation has begun.
            StoreError: some node has no agent and could start none.
        """
        group, coordinator, policy = self._group, self._coordinator, self._policy
        here = group.node_of[group.rank]
        joining = Joining(
            generation=coordinator.generation,
            rank=group.rank,
            world=group.size,
            locals=[rank for rank, leader in enumerate(group.node_of) if leader == here],
            root=coordinator.place.url,
            roots=len(coordinator.roots.leaders),
            origin=coordinator.origin,
            begun=coordinator.begun,
            slots=policy.slots,
            budget=policy.budget_bytes,
            idle=policy.idle,
            deadline=policy.drain_deadline,
            metrics=policy.metrics_port,
            signing=coordinator.signing if group.rank == 0 else None,
        )

        def part() -> bytes:
            self._client.join(joining)
            return b""

        try:
            group.vote(f"joining the agent of run {coordinator.run}", part)
        except BaseException:
            self._leave()
            raise
        wanted, served = policy.metrics_port, self._client.metrics
        if wanted and served != wanted and group.rank == here:
            where = f"on port {served}" if served else "nowhere (tierckpt status says why)"
            warn(f"metrics: the agent of run {coordinator.run} serves its figures {where}, not on port {wanted}")
        self._drain.writer, coordinator.discards = self.arena, self.arena.discard
        self._drain.overtakes = policy.on_full == "overtake"

    def acquire(self, size: int, *, must: bool, behind: Callable[[], str]) -> RemoteSlot:
        """A slot of the agent.

        Args:
            must: the step is not skipped.
            behind: see :func:`tierckpt.snapshot.arena.patiently`.

        Raises:
            ArenaFullError: no slot became free, or the budget has no room.
            SkippedError: no slot is free, and such steps are skipped.
            AgentSilentError: the agent does not answer.
            AgentLostError: the agent died, and no new one can be started.
        """
        skips = self._policy.on_full == "skip" and not must
        try:
            return patiently(lambda wait: self.arena.acquire(size, wait), 0.0 if skips else self._group.timeout, behind)
        except RanksBehindError as error:
            if must or self._policy.on_full == "wait":
                raise
            raise SkippedError(str(error)) from error
        except ArenaFullError as error:
            if skips:
                raise SkippedError("no slot was free") from error
            raise

    def acquire_here(self, size: int, why: str, *, must: bool) -> Slot:
        """Memory of this process, for a step that goes to the disk while the agent has none for it, and ``why``.

        Raises:
            SkippedError: the step before is still in there.
            ArenaFullError: this process has none either.
        """
        try:
            return self._own.acquire(size, self._group.timeout if must else 0.0)
        except ArenaFullError as error:
            if not self._own.held:
                raise
            raise SkippedError(f"{why}, and the step before is not on the disk yet,") from error

    def warn_of(self, why: ArenaFullError | AgentLostError) -> None:
        """Once of each kind: the disk gets its steps, but memory does not hold what it is there for."""
        if type(why) in self._warned:
            return
        self._warned.add(type(why))
        if isinstance(why, ArenaFullError):
            text = f"the agent has no room for two steps of this rank: {why}; steps that are due on the disk go there from the "
            warn(f"{text}memory of this process, others fail")
        elif not isinstance(why, AgentSilentError):  # of which its client tells
            text = f"no agent keeps the steps of this rank: {why}; those that are due on the disk go there from the memory of "
            warn(f"{text}this process, others are skipped. Each save tries again to start one")

    def _heard(self) -> None:
        """The agent answers again."""
        self.arena.tell_all()
        own, self._own = self._own, Arena(1)
        own.close()

    def replaced(self) -> None:
        """Another one has joined a newer generation: what is held stays until that has something durable."""
        self.sealing.close()
        self.arena.close()
        self._own.close()

    def finish(self) -> Job | None:
        """Find out of every sealed step whether it is complete; the newest if it is only in memory."""
        return self.sealing.close()

    def close(self, *, failed: bool) -> None:
        """Take leave of the agent; after a failure without a word, so that it keeps what it has for the next start."""
        self._own.close()
        if failed:
            self.arena.close()
        else:
            self._leave()

    def _leave(self) -> None:
        try:
            self.arena.bye()
        except FencedError:
            self.arena.close()  # a newer generation has it now
        except TierckptError as error:
            warn(str(error))


class AgentMemory:
    """Where one step of this rank is kept in the agent (see :class:`tierckpt.snapshot.staging.Memory`).

    Args:
        due: whether the step is due on the disk.
        pinned: whether it is never to be retired.
        must: whether it is saved even where it takes time to get a slot.
        behind: see :func:`tierckpt.snapshot.arena.patiently`.
    """

    def __init__(
        self, tier: RamTier, step: int, *, due: bool, pinned: bool, must: bool, behind: Callable[[], str]
    ) -> None:
        self._tier, self._step, self._due, self._pinned, self._must = tier, step, due, pinned, must
        self._behind = behind
        self._here = False

    @property
    def seals(self) -> bool:
        """Whether it lies in the agent, and that answers."""
        return not self._here and self._tier.arena.answers

    def acquire(self, size: int) -> Slot | RemoteSlot:
        """A slot of the agent; of this process, for a step that goes to the disk, while that does not answer or has no room.

        See :meth:`RamTier.acquire`.
        """
        try:
            return self._tier.acquire(size, must=self._must, behind=self._behind)
        except AgentLostError as error:
            self._here = True
            self._tier.warn_of(error)
            why = "the agent does not answer" if isinstance(error, AgentSilentError) else str(error)
            if not self._due:
                raise SkippedError(why) from error
            return self._tier.acquire_here(size, why, must=self._must)
        except RanksBehindError:
            raise
        except ArenaFullError as error:
            if not self._due:
                raise
            self._here = True
            self._tier.warn_of(error)
            return self._tier.acquire_here(size, "the agent has no room for it", must=self._must)

    def larger(self, size: int) -> RemoteSlot | None:
        """A slot of the agent, if one is free; else what this step has become stays in this process."""
        try:
            return self._tier.arena.acquire(size, 0.0)
        except (ArenaFullError, AgentLostError) as error:
            _log.debug("step %d stays in its trainer: %s", self._step, error)
            self._here = True
            return None

    def seal(self, slot: Slot | RemoteSlot | None, shard: Shard) -> None:
        """From then on this process may die.

        Raises:
            AgentSilentError: it does not answer, or did not when memory was asked for.
            AgentLostError: the agent died; the next save goes on with a new one.
        """
        if self._here or isinstance(slot, Slot):
            raise AgentSilentError(f"step {self._step} is in the memory of its trainer")
        self._tier.arena.seal(self._step, slot, shard, due=self._due, pinned=self._pinned)

    def drop(self) -> None:
        """What was sealed is of no use."""
        self._tier.arena.drop(self._step)

    def settled(self, durable: bool) -> None:
        """Nothing more is written of it."""
        self._tier.arena.settled(self._step, durable)
