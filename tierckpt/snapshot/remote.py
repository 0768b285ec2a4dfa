"""Slots in the memory of the node's agent, as a trainer sees them."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence

from tierckpt import _native, config
from tierckpt.agent.client import Client
from tierckpt.agent.protocol import document
from tierckpt.agent.writing import OwnWriter, Shard, Title
from tierckpt.errors import AgentLostError, AgentSilentError, FencedError, StoreError, TierckptError
from tierckpt.format.canonical import JSON
from tierckpt.snapshot.device import pin_ahead
from tierckpt.threads import Worker
from tierckpt.tiers.base import Place

_log = logging.getLogger("tierckpt")


class _Ticket:
    """What a request for a slot is called, as long as somebody has it or its slot: an interrupt may take both from whoever
    asked at any moment, and then the agent is told by what is no longer there."""

    numbers = itertools.count(1)

    def __init__(self) -> None:
        self.number = next(self.numbers)


class _Asking:
    """Somebody asks for a slot, as long as this is there."""


class RemoteSlot:
    """Memory of the agent that this process fills."""

    def __init__(self, arena: RemoteArena, number: int, buffer: _native.Buffer, epoch: int, ticket: _Ticket) -> None:
        self._arena: RemoteArena | None = arena
        self._ticket: _Ticket | None = ticket
        self.number, self.buffer, self.epoch = number, buffer, epoch

    def release(self) -> None:
        """Give it back unsealed."""
        arena, self._arena = self._arena, None
        ticket, self._ticket = self._ticket, None
        if arena is not None and ticket is not None:
            arena._tell("release", self.epoch, slot=self.number, ticket=ticket.number)


class RemoteArena:
    """Slots of this rank, and what becomes of them. Maps each once.

    Args:
        client: joined.
        fenced: why this process can commit nothing any more, empty if it can: asked when another agent than before answers,
            which knows of no newer generation.
    """

    def __init__(self, client: Client, fenced: Callable[[], str]) -> None:
        self._client, self._fenced = client, fenced
        # Slots are asked for by who saves, sealed by the thread that finds out what is complete.
        self._lock = threading.RLock()
        # The next slot: to make and map a new one takes far longer than to fill it, and even to ask for one takes as long as
        # the rest of a save of a thousand tensors.
        self._ahead: _Ahead | None = None
        self._asking: weakref.WeakSet[_Asking] = weakref.WeakSet()
        self._epoch = -1
        self._mapped: dict[int, _native.Buffer] = {}
        #: The layout of what was sealed last, which the agent has.
        self._layout = ""
        #: Which agent holds each sealed step; and the tickets of those of which it was not told what becomes of them.
        self._sealed: dict[int, int] = {}
        self._open: dict[int, _Ticket] = {}
        #: The newest complete step that was due only in memory, −1: none.
        self._resting = -1
        self._tickets: weakref.WeakValueDictionary[int, _Ticket] = weakref.WeakValueDictionary()
        #: What the agent could not be told while it did not answer.
        self._untold: list[tuple[str, int | None, dict[str, JSON]]] = []

    @property
    def answers(self) -> bool:
        """Whether the agent answers, as far as is known."""
        return not self._client.silent

    def prepare(self, size: int) -> None:
        """Begin to make and map a slot of ``size`` bytes, for the next :meth:`acquire`."""
        with self._lock:
            # Whoever waits for a slot would not hear of one that was got ready meanwhile.
            if self._ahead is None and not self._asking:
                self._ahead = _Ahead(lambda: self._acquire(size, 0.0))

    def acquire(self, size: int, wait: float) -> RemoteSlot:
        """A slot of at least ``size`` bytes; waits at most ``wait`` seconds until one is free.

        Raises:
            ArenaFullError: none became free, or the budget has no room for it.
            FencedError: a newer generation has begun.
        """
        asking = _Asking()
        ahead = slot = None
        try:
            with self._lock:
                ahead, self._ahead = self._ahead, None
                self._asking.add(asking)
            if ahead is not None:
                ahead.wait()
                slot = ahead.slot
            if slot is not None:
                if len(slot.buffer) >= size and self._client.is_there(slot.epoch):
                    return slot
                slot.release()
            try:
                return self._acquire(size, wait)
            except AgentSilentError:
                raise
            except AgentLostError:
                # Nothing of this save was in the agent that died: a new one does.
                return self._acquire(size, wait)
        except BaseException:
            # Whoever keeps its traceback keeps all that the frames in it refer to.
            if ahead is not None:
                slot = slot or ahead.slot
                ahead.dropped, ahead.slot = True, None
            self._give_up(None if slot is None else slot._ticket)
            raise
        finally:
            with self._lock:
                self._asking.discard(asking)

    def _acquire(self, size: int, wait: float) -> RemoteSlot:
        patience = wait + size / config.AGENT_SLOT_RATE
        ticket = _Ticket()
        try:
            with self._lock:  # so that it knows of all before it
                self._tickets[ticket.number] = ticket
                held: list[JSON] = list(self._tickets)
            asked: dict[str, JSON] = {"size": size, "wait": int(wait * 1000), "ticket": ticket.number, "held": held}
            with self._client.request("slot", (), patience, **asked) as reply, self._lock:
                self._must_know_agent()
                number, capacity = reply.fields["slot"], reply.fields["capacity"]
                if type(number) is not int or type(capacity) is not int:
                    raise StoreError("the agent gave a slot without a number")
                live = reply.fields["live"]
                if type(live) is list:
                    for gone in self._mapped.keys() - set(live):
                        del self._mapped[gone]
                buffer = self._mapped.get(number)
                if buffer is None or len(buffer) != capacity:
                    descriptor = reply.take()
                    try:
                        buffer = self._mapped[number] = _native.Buffer.of(descriptor, capacity)
                    finally:
                        os.close(descriptor)
                    pin_ahead(buffer)
            return RemoteSlot(self, number, buffer, self._epoch, ticket)
        except BaseException:
            self._give_up(ticket)
            raise

    def _give_up(self, ticket: _Ticket | None) -> None:
        """Whoever has it, it counts no more."""
        if ticket is not None:
            self._tickets.pop(ticket.number, None)

    def _must_know_agent(self) -> None:
        if self._client.epoch != self._epoch:
            fenced = self._fenced() if self._epoch >= 0 else ""
            if fenced:
                raise FencedError(fenced)
            self._epoch = self._client.epoch
            self._mapped.clear()
            self._layout = ""

    def seal(self, step: int, slot: RemoteSlot | None, shard: Shard, *, due: bool, pinned: bool) -> None:
        """From here on this process may die. ``slot`` is None when this rank writes nothing."""
        if slot is None:
            self._client.reach()  # who writes nothing asks for no slot, and has a new agent started here
            with self._lock:
                self._must_know_agent()
        epoch = self._epoch if slot is None else slot.epoch
        new = shard.layout_hash != self._layout
        descriptors = [document(shard.layout)] if new else []
        ticket = None if slot is None else slot._ticket
        if new:
            self._layout = ""  # until it is known that it has arrived
        try:
            self._client.request(
                "seal",
                descriptors,
                0.0,
                epoch,
                step=step,
                slot=None if slot is None else slot.number,
                ticket=0 if ticket is None else ticket.number,
                size=shard.size,
                header_size=shard.header_size,
                header_digest=shard.header_digest,
                layout=shard.layout_hash,
                metadata=shard.metadata,
                due=due,
                pinned=pinned,
            )
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        with self._lock:
            self._layout = shard.layout_hash
            self._sealed[step] = epoch
            if slot is None:
                return
            if ticket is not None:
                self._open[step] = ticket
            slot._arena = slot._ticket = None
            self.prepare(shard.size)

    def complete(self, step: int, due: bool) -> None:
        """All ranks have sealed ``step``; ``due``: it is to be written to the disk."""
        self._client.request("complete", (), 0.0, self._sealed.get(step), step=step, due=due)
        self._open.pop(step, None)
        if self._resting == step:
            self._resting = -1  # it is due after all
        if not due:
            # Of what is due nowhere else nobody will say more once a newer one has taken its place.
            older, self._resting = sorted((self._resting, step))
            self._sealed.pop(older, None)

    def settled(self, step: int, durable: bool) -> None:
        """Nothing more is to be written of ``step``."""
        self._tell("settled", self._sealed.pop(step, None), step=step, durable=durable)
        self._open.pop(step, None)

    def drop(self, step: int) -> None:
        """The save of ``step`` has failed."""
        self._tell("drop", self._sealed.pop(step, None), step=step)
        self._open.pop(step, None)

    def discard(self, steps: Sequence[int]) -> None:
        """Have the files of steps removed whose saves have failed, but for what it has made durable all the same."""
        self._client.request("discard", steps=list(steps))

    def write(self, place: Place, title: Title, shard: Shard) -> bytes:
        """Have the agent make this rank's shard durable (see :class:`tierckpt.agent.writing.Writer`).

        If it does not answer, or has died, we do so: the bytes are the same, and there is a whole file of that name whoever ends
        first.
        """
        try:
            reply = self._client.request("write", (), 0.0, self._sealed.get(title.step), step=title.step)
        except AgentLostError:
            return OwnWriter().write(place, title, shard)
        entry = reply.fields.get("entry")
        if type(entry) is not str:
            raise StoreError("the agent did not say what it wrote")
        return entry.encode()

    def _tell(self, op: str, epoch: int | None, **fields: JSON) -> None:
        """What the agent is told so that it can give something up: one that died has given up everything."""
        try:
            self._client.request(op, (), 0.0, epoch, **fields)
        except AgentSilentError:
            with self._lock:
                self._untold.append((op, epoch, fields))
        except TierckptError as error:
            _log.debug("%s: %s", op, error)

    def tell_all(self) -> None:
        """What the agent was not told while it did not answer."""
        with self._lock:
            untold, self._untold = self._untold, []
        for op, epoch, fields in untold:
            self._tell(op, epoch, **fields)

    def bye(self) -> None:
        """This rank saves no more; the last one of the node waits until what was to be drained is."""
        self._forget()
        self._client.bye()

    def close(self) -> None:
        """Let go without a good-bye: the agent drains what is left and keeps it for the next start."""
        self._forget()
        self._client.close()

    def _forget(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.wait()
        self._mapped.clear()


class _Ahead:
    """A slot that is got ready while training goes on."""

    def __init__(self, get: Callable[[], RemoteSlot]) -> None:
        self._get = get
        #: Once it is ready, if there was one to be had.
        self.slot: RemoteSlot | None = None
        #: Nobody wants it any more.
        self.dropped = False
        self._thread = Worker(self._run, "tierckpt-slot")
        self._thread.start()

    def _run(self) -> None:
        try:
            self.slot = self._get()
        except TierckptError as error:
            _log.debug("no slot ahead: %s", error)  # who needs it will ask, and be told
        if self.dropped:
            self.slot = None

    def wait(self) -> None:
        """Until it is ready, or known that there is none."""
        self._thread.finish()
