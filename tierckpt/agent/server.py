"""The agent's process: answers its node's trainers, and finishes their work when they are gone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from tierckpt import config
from tierckpt.agent import orphans
from tierckpt.agent.holdings import Holdings
from tierckpt.agent.protocol import VERSION, Channel, Message, document, read_document, refusal
from tierckpt.agent.runtime import Home
from tierckpt.agent.slots import Slot
from tierckpt.agent.snapshots import Generation, Signing, Snapshot, Step
from tierckpt.agent.writing import Title
from tierckpt.errors import IntegrityError, StateError, TierckptError
from tierckpt.format.canonical import JSON, Fields
from tierckpt.format.digest import derive
from tierckpt.tiers.disk import DiskPlace

#: Signals that ask an agent to end. Held back from before there is a socket, so that it is always taken away.
ENDS = (signal.SIGTERM, signal.SIGINT)

Reply = tuple[dict[str, JSON], list[int]]

#: Seconds before the next attempt to take a connection, when the machine had no room for one; and the shortest wait.
_PAUSE = 0.1


class Server:
    """Args:
    home: where its socket is.
    listener: bound and listening.
    node, run: whose agent it is.
    stays: it does not end by itself (run as a service).
    """

    def __init__(self, home: Home, listener: socket.socket, *, node: str, run: str, stays: bool = False) -> None:
        self.home, self.node, self.run, self.stays = home, node, run, stays
        self.holdings = Holdings(run)
        self.id = secrets.token_hex(16)
        self.began = time.time()
        self._listener = listener
        self._idle = config.AGENT_IDLE
        self._deadline = config.DRAIN_DEADLINE
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._connections: set[Connection] = set()
        self._settling: set[int] = set()
        #: The port on which figures are served, and the one that could not be had.
        self.metrics = self._refused = 0
        self._asked = threading.Lock()
        #: When it was told to end, by the monotonic clock.
        self._stopped_at: float | None = None

    def serve(self) -> None:
        """Until told to end, or until nobody has needed it for long enough."""
        signal.signal(signal.SIGTERM, self._stopped)
        signal.signal(signal.SIGINT, self._stopped if self.stays else signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)  # what has come since there is a socket is served now
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake_r, select.POLLIN)
        self._listener.setblocking(False)
        # What goes wrong is kept where ``tierckpt status`` shows it, and takes no more room with time.
        warnings.showwarning = lambda message, category, *_: self.holdings.note(f"{category.__name__}: {message}")
        threading.excepthook = lambda broken: self.holdings.note(f"{broken.exc_type.__name__}: {broken.exc_value}")
        while True:
            if self.ending:
                with self.holdings.change:
                    self.holdings.change.notify_all()
                for generation in list(self.holdings.generations.values()):
                    if not self._is_awaited(generation):
                        self.gone(generation)
            left = self._left()
            if left is not None and left <= 0:
                with self.home.locked(config.AGENT_START):
                    if not self._waiting() and self._close():
                        self.home.clear()
                        break
            poll.poll(None if left is None else left * 1000 + 1)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_r, 4096)
            try:
                self._accept()
            except BlockingIOError:
                continue
            except (OSError, RuntimeError) as error:  # no descriptor or no thread is left: others may give some back
                self.holdings.note(f"a connection could not be taken: {error}")
                time.sleep(_PAUSE)
        self._listener.close()

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(True)
        channel = Channel(sock)
        if channel.user != os.getuid() or len(self._connections) >= config.AGENT_CONNECTIONS:
            sock.close()
            return
        connection = Connection(self, channel)
        self._connections.add(connection)
        try:
            threading.Thread(target=connection.run, name="tierckpt-connection", daemon=True).start()
        except RuntimeError:
            self._connections.discard(connection)
            sock.close()
            raise

    def _waiting(self) -> bool:
        """Whether somebody is about to connect."""
        return bool(select.select([self._listener], [], [], 0)[0])

    def _stopped(self, number: int, frame: object) -> None:
        self._stopped_at = self._stopped_at or time.monotonic()

    @property
    def ending(self) -> bool:
        """Whether it was told to end: it takes nothing new."""
        return self._stopped_at is not None

    def _is_awaited(self, generation: Generation) -> bool:
        """Whether trainers are having it write what is due on the disk, and will commit that: it is told to end, and waits."""
        with self.holdings.change:
            return generation.has_due and self._patience > 0

    @property
    def _patience(self) -> float:
        """Seconds for which it waits for trainers before it ends."""
        return max(0.0, (self._stopped_at or 0.0) + self._deadline - time.monotonic())

    def _left(self) -> float | None:
        """Seconds until the agent may end; None while it is needed."""
        with self.holdings.change:
            if self._settling or self.holdings.undone:
                return None
            # Who says good-bye is answered first.
            if any(connection.bye for connection in list(self._connections)):
                return None
            if self.ending:
                # It may have been told so, or have waited long enough, since it looked at what is to be drained.
                seen_to = all(one.settled or one.fenced for one in self.holdings.generations.values())
                return 0.0 if seen_to else max(self._patience, _PAUSE)
            left = float("inf") if self.stays else self.holdings.needed(self._idle)
        return None if left == float("inf") else left

    def _close(self) -> bool:
        """Whether nothing is left to do; from then on nothing is taken on."""
        with self.holdings.change:
            self.holdings.closed = self._left() == 0.0
            return self.holdings.closed

    def wake(self) -> None:
        """Look again whether there is still something to do."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"x")

    def gone(self, generation: Generation) -> None:
        """The last trainer of a generation has left: finish what it has left."""
        with self.holdings.change:
            if generation.fenced or generation.number in self._settling or generation.settled:
                return
            self._settling.add(generation.number)
        try:
            threading.Thread(target=self._settle, args=(generation,), name="tierckpt-orphans").start()
        except RuntimeError:  # no thread is to be had
            self._settle(generation)

    def _settle(self, generation: Generation) -> None:
        """Until it is done, or nobody needs it any more: a full disk may be made larger, a node come back."""
        try:
            pause = config.DRAIN_PAUSE
            while True:
                with self.holdings.change:
                    newest = generation.newest_complete()
                if orphans.settle(self.holdings, generation, self._deadline) or not self._pause(generation, pause):
                    break
                pause = min(2 * pause, config.DRAIN_PAUSE_LIMIT)
            self.holdings.end(generation, newest, final=self.ending)
        finally:
            with self.holdings.change:
                self._settling.discard(generation.number)
                again = not (generation.alive or generation.settled or generation.fenced)
                self.holdings.change.notify_all()
            if again:  # trainers have come and gone meanwhile
                self.gone(generation)
            self.wake()

    def _pause(self, generation: Generation, seconds: float) -> bool:
        """Whether to try again after so many seconds, or at once when it is told to end."""

        def is_over() -> bool:
            return generation.fenced or (generation.alive and not self.ending)

        with self.holdings.change:
            generation.attempted = True
            self.holdings.change.notify_all()
            ending = self.ending
            left = self._patience if ending else self.holdings.seen + self._idle - time.monotonic()
            if left <= 0:
                return False
            # The last attempt is made when there is no more time.
            self.holdings.change.wait_for(lambda: is_over() or self.ending != ending, min(seconds, left))
            return not is_over()

    def ended(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self.wake()

    def status(self) -> dict[str, JSON]:
        return {
            **self.holdings.status(),
            "agent": self.id,
            "ending": self.ending,
            "node": self.node,
            "metrics": self.metrics or None,
            "pid": os.getpid(),
            "seconds": int(time.time() - self.began),
            "service": self.stays,
            "version": VERSION,
        }

    def configure(self, idle: int, deadline: int, metrics: int) -> None:
        """What the newest trainer asks for, times in milliseconds. Metrics are served on the port that was asked for first."""
        self._idle, self._deadline = idle / 1000, deadline / 1000
        with self._asked:
            if metrics and not self.metrics and metrics != self._refused:
                try:
                    self.serve_metrics(metrics)
                except TierckptError as error:  # training goes on without
                    self._refused = metrics
                    self.holdings.note(str(error))

    def serve_metrics(self, port: int) -> None:
        """Serve figures for Prometheus on ``port`` of this machine (0: any).

        Raises:
            TierckptError: it is taken, or what it takes is not installed.
        """
        from tierckpt.agent import metrics

        self.metrics = metrics.serve(port, self.status)


@dataclass(eq=False)
class Connection:
    """One connection and the thread that answers on it."""

    server: Server
    channel: Channel
    greeted: bool = False
    generation: Generation | None = None
    rank: int = -1
    bye: bool = False
    held: list[Snapshot] = field(default_factory=list)

    def run(self) -> None:
        """Answer until the other end is gone."""
        try:
            while not self.bye:
                with self.channel.receive() as message:
                    if self.channel.hung_up:
                        return  # who asked has given it up, while this process was stopped: it must not be done after all
                    answer = self._request(message)
                    try:
                        reply, descriptors = answer()
                    except Exception as error:
                        if not isinstance(error, TierckptError):
                            self.server.holdings.note(f"{type(error).__name__}: {error}")
                        reply, descriptors = refusal(error), []
                try:
                    self.channel.send(reply, descriptors)
                except BaseException:
                    self._untold(reply)
                    raise
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
        except EOFError:
            return  # as every connection ends
        except IntegrityError as error:
            with contextlib.suppress(OSError, TierckptError):
                self.channel.send(refusal(error))
        except (OSError, TierckptError) as error:
            if not isinstance(error, (BrokenPipeError, ConnectionResetError)):
                self.server.holdings.note(f"a connection ended: {error}")
        finally:
            self._end()

    def _untold(self, reply: dict[str, JSON]) -> None:
        """Nobody has heard the reply: a slot that it gives is free again."""
        slot, ticket = reply.get("slot"), reply.get("ticket")
        if type(slot) is int and type(ticket) is int and self.generation is not None:
            with contextlib.suppress(TierckptError):  # the last connection is gone, and with it the slot
                self.server.holdings.give_back(self.generation, self.rank, slot, ticket)

    def _end(self) -> None:
        try:
            self.channel.close()
            for snapshot in self.held:
                self.server.holdings.let_go(snapshot)
            self.held.clear()
            generation = self.generation
            if generation is not None and not self.bye and self.server.holdings.leave(generation, self.rank, bye=False):
                self.server.gone(generation)
        finally:
            self.server.ended(self)

    def _request(self, message: Message) -> Callable[[], Reply]:
        """What answers a message. Raises IntegrityError if it is no request: that ends the connection."""
        op = message.fields.get("op")
        if type(op) is not str or op not in _OPERATIONS:
            raise IntegrityError(f"the agent's socket: no request is called {str(op)[:40]!r}")
        keys, answer, needs = _OPERATIONS[op]
        fields = message.only("op", *keys)
        if op not in ("hello", "status") and not self.greeted:
            raise IntegrityError("the agent's socket: the first request must be hello")

        def reply() -> Reply:
            if needs:
                if self.generation is None:
                    raise StateError(f"{op}: this connection has not joined a generation")
                self.generation.must_be_current()
            return answer(self, fields, message)

        return reply

    @property
    def _own(self) -> Generation:
        assert self.generation is not None
        return self.generation

    # Requests of any process

    def _hello(self, fields: Fields, message: Message) -> Reply:
        version = fields.integer("version")
        if version != VERSION:
            raise StateError(
                f"the agent of run {self.server.run} speaks version {VERSION} of its protocol, this process {version}: end the "
                "agent (tierckpt status shows its process) or use the same tierckpt"
            )
        if (fields.string("node"), fields.string("run")) != (self.server.node, self.server.run):
            raise StateError(f"this is the agent of run {self.server.run} on node {self.server.node}")
        self.greeted = True
        return {"agent": self.server.id, "generation": self.server.holdings.newest, "ok": True, "version": VERSION}, []

    def _held(self, fields: Fields, message: Message) -> Reply:
        holdings, found = self.server.holdings, []
        listed = holdings.of_store(fields.string("root"))
        try:
            for generation, number, step in listed:
                found.append(_listing(generation, number, step))
        finally:
            for _, _, step in listed:
                for snapshot in step.snapshots.values():
                    holdings.let_go(snapshot)
        return {"ok": True, "snapshots": list(found)}, []

    def _fetch(self, fields: Fields, message: Message) -> Reply:
        key = fields.integer("generation"), fields.integer("step"), fields.integer("rank")
        snapshot = self.server.holdings.find(*key)
        self.held.append(snapshot)
        if snapshot.slot is None:
            raise StateError(f"rank {key[2]} wrote nothing in step {key[1]}")
        receipt = document(snapshot.receipt().encode())
        try:
            memory = os.open(f"/proc/self/fd/{snapshot.slot.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(receipt)
            raise
        return {"ok": True, "size": snapshot.size}, [memory, receipt]

    def _layout(self, fields: Fields, message: Message) -> Reply:
        return {"ok": True}, [document(self.server.holdings.layout(fields.hex("hash")))]

    def _carry(self, fields: Fields, message: Message) -> Reply:
        number, step = fields.integer("generation"), fields.integer("step")
        holdings = self.server.holdings
        with holdings.change:
            generation = holdings.generations.get(number)
            held = generation.steps.get(step) if generation else None
            snapshots = sorted(held.snapshots.items()) if held else []
            for _, snapshot in snapshots:
                snapshot.holds += 1
        try:
            entries: list[JSON] = [[rank, holdings.write(snapshot).decode()] for rank, snapshot in snapshots]
        finally:
            for _, snapshot in snapshots:
                holdings.let_go(snapshot)
        return {"entries": entries, "ok": True}, []

    def _status(self, fields: Fields, message: Message) -> Reply:
        return {"ok": True, "status": self.server.status()}, []

    # Requests of a trainer

    def _join(self, fields: Fields, message: Message) -> Reply:
        if self.generation is not None:
            raise StateError("this connection has joined a generation already")
        world = fields.integer("world", low=1)
        root = fields.string("root")
        locals_ = fields.array("locals")
        if not all(type(rank) is int and 0 <= rank < world for rank in locals_) or not root.startswith("/"):
            raise IntegrityError(f"the agent's socket: join: locals={locals_!r:.80}, root={root!r:.80}")
        generation = Generation(
            number=fields.integer("generation", low=1),
            begun=_begun(fields),
            world=world,
            root=root,
            place=DiskPlace(root),
            roots=fields.integer("roots", low=1),
            slots=fields.integer("slots", low=1),
            locals=frozenset(rank for rank in locals_ if type(rank) is int),
        )
        origin = None
        if fields.value("origin") is not None:
            began = fields.fields("origin", ("generation", "step"))
            origin = began.integer("generation", low=1), began.integer("step")
        rank = fields.integer("rank", high=world - 1)
        client, budget = fields.string("client"), fields.integer("budget")
        self.server.configure(fields.integer("idle"), fields.integer("deadline"), fields.integer("metrics", high=65535))
        self.generation, self.rank = self.server.holdings.join(generation, rank, client, budget, origin), rank
        return {"metrics": self.server.metrics, "ok": True}, []

    def _coordinate(self, fields: Fields, message: Message) -> Reply:
        keys = fields.array("keys")
        self._own.signing = Signing(fields.hex("key"), fields.integer("since"), [str(key) for key in keys])
        return {"ok": True}, []

    def _slot(self, fields: Fields, message: Message) -> Reply:
        if self.server.ending:
            return _ENDING
        wait = fields.integer("wait") / 1000
        size, ticket = fields.integer("size", low=1), fields.integer("ticket")
        held = {one for one in fields.array("held") if type(one) is int}
        slot = self.server.holdings.slot(self._own, self.rank, size, wait, lambda: self.channel.ended, ticket, held)
        live: list[JSON] = list(self.server.holdings.numbers(self._own, self.rank))
        descriptor = fcntl.fcntl(slot.descriptor, fcntl.F_DUPFD_CLOEXEC, 0)
        given: dict[str, JSON] = {"capacity": slot.capacity, "live": live, "slot": slot.number, "ticket": ticket}
        return {**given, "ok": True}, [descriptor]

    def _release(self, fields: Fields, message: Message) -> Reply:
        self.server.holdings.give_back(self._own, self.rank, fields.integer("slot"), fields.integer("ticket"))
        return {"ok": True}, []

    def _seal(self, fields: Fields, message: Message) -> Reply:
        if self.server.ending:
            return _ENDING
        generation, rank, step = self._own, self.rank, fields.integer("step")
        size, layout = fields.integer("size"), fields.hex("layout")
        number = None if fields.value("slot") is None else fields.integer("slot")
        if message.descriptors:
            descriptor = message.take()
            try:
                data = read_document(descriptor)
            finally:
                os.close(descriptor)
            if derive("layout", data).hex() != layout:
                raise IntegrityError("the agent's socket: seal: the layout file is not the one that is named")
            self.server.holdings.keep_layout(generation, rank, layout, data)
        if layout not in generation.layouts:
            raise StateError(f"the agent does not have layout {layout}")

        def make(slot: Slot | None) -> Snapshot:
            if (slot is None) != (size == 0) or (slot is not None and size > slot.capacity):
                raise StateError(f"step {step}: {size} bytes cannot be in this slot")
            return Snapshot(
                generation,
                Title(self.server.run, generation.number, step, rank, generation.world),
                slot,
                size,
                header_size=fields.integer("header_size", high=size),
                header_digest=fields.hex("header_digest") if size else "",
                layout=layout,
                metadata=fields.value("metadata"),
                due=fields.boolean("due"),
                pinned=fields.boolean("pinned"),
            )

        self.server.holdings.seal(generation, rank, step, number, fields.integer("ticket"), make)
        return {"ok": True}, []

    def _complete(self, fields: Fields, message: Message) -> Reply:
        self.server.holdings.complete(self._own, self.rank, fields.integer("step"), due=fields.boolean("due"))
        self._look_again()
        return {"ok": True}, []

    def _write(self, fields: Fields, message: Message) -> Reply:
        generation = self._own
        snapshot = self.server.holdings.find(generation.number, fields.integer("step"), self.rank)
        try:
            written = self.server.holdings.write(snapshot)
        finally:
            self.server.holdings.let_go(snapshot)
        generation.must_be_current()
        return {"entry": written.decode(), "ok": True}, []

    def _settled(self, fields: Fields, message: Message) -> Reply:
        self.server.holdings.settle(self._own, self.rank, fields.integer("step"), durable=fields.boolean("durable"))
        self._look_again()
        return {"ok": True}, []

    def _drop(self, fields: Fields, message: Message) -> Reply:
        self.server.holdings.drop(self._own, self.rank, fields.integer("step"))
        self._look_again()
        return {"ok": True}, []

    def _discard(self, fields: Fields, message: Message) -> Reply:
        steps = fields.array("steps")
        if not all(type(step) is int for step in steps):
            raise IntegrityError(f"the agent's socket: discard: steps={steps!r:.80}")
        orphans.discard(self._own, [step for step in steps if type(step) is int])
        return {"ok": True}, []

    def _look_again(self) -> None:
        """An agent that is to end may be waiting for what was just said."""
        if self.server.ending:
            self.server.wake()

    def _bye(self, fields: Fields, message: Message) -> Reply:
        """The last one to leave waits until what was to be drained is."""
        self.bye = True
        generation = self._own
        if self.server.holdings.leave(generation, self.rank, bye=True):
            self.server.gone(generation)
            with self.server.holdings.change:
                self.server.holdings.change.wait_for(
                    lambda: generation.settled or generation.attempted or generation.fenced, self.server._deadline
                )
        return {"ok": True}, []


#: What is said to who asks an agent that was told to end to take something new.
_ENDING: Reply = {"ending": True, "ok": True}, []


def _begun(fields: Fields) -> dict[int, str]:
    """Generations and the digests of the links that began them; the last is the generation itself."""
    found: dict[int, str] = {}
    for pair in fields.array("begun"):
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not int or type(pair[1]) is not str:
            raise IntegrityError(f"the agent's socket: join: begun has {pair!r:.80}")
        found[pair[0]] = pair[1]
    if fields.integer("generation", low=1) not in found:
        raise IntegrityError("the agent's socket: join: begun does not have the generation")
    return found


def _listing(generation: Generation, number: int, step: Step) -> JSON:
    shards: list[JSON] = []
    for rank, snapshot in sorted(step.snapshots.items()):
        digest = snapshot.receipt().shard_digest if snapshot.size else ""
        shards.append([rank, snapshot.size, digest])
    first = next(iter(step.snapshots.values()))
    zero = step.snapshots.get(0)
    return {
        "begin": generation.begin,
        "complete": step.complete,
        "generation": generation.number,
        "layout": first.layout,
        "metadata": zero.metadata if zero is not None else None,
        "pinned": first.pinned,
        "shards": shards,
        "step": number,
        "world": generation.world,
    }


_Answer = Callable[[Connection, Fields, Message], Reply]
#: For each request its fields, who answers it, and whether only a trainer of the current generation may ask.
_OPERATIONS: dict[str, tuple[tuple[str, ...], _Answer, bool]] = {
    "hello": (("version", "node", "run"), Connection._hello, False),
    "held": (("root",), Connection._held, False),
    "fetch": (("generation", "step", "rank"), Connection._fetch, False),
    "layout": (("hash",), Connection._layout, False),
    "carry": (("generation", "step"), Connection._carry, False),
    "status": ((), Connection._status, False),
    "join": (
        (
            "client",
            "generation",
            "rank",
            "world",
            "locals",
            "root",
            "roots",
            "origin",
            "begun",
            "slots",
            "budget",
            "idle",
            "deadline",
            "metrics",
        ),
        Connection._join,
        False,
    ),
    "coordinate": (("key", "since", "keys"), Connection._coordinate, True),
    "slot": (("size", "wait", "ticket", "held"), Connection._slot, True),
    "release": (("slot", "ticket"), Connection._release, True),
    "seal": (
        (
            "step",
            "slot",
            "ticket",
            "size",
            "header_size",
            "header_digest",
            "layout",
            "metadata",
            "due",
            "pinned",
        ),
        Connection._seal,
        True,
    ),
    "complete": (("step", "due"), Connection._complete, True),
    "write": (("step",), Connection._write, True),
    "settled": (("step", "durable"), Connection._settled, True),
    "drop": (("step",), Connection._drop, True),
    "discard": (("steps",), Connection._discard, True),
    "bye": ((), Connection._bye, True),
}
