"""A process's way to the agent of its node, which is started when it is not there."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tierckpt import config
from tierckpt.agent.protocol import VERSION, Channel, Message, raise_refusal
from tierckpt.agent.runtime import Home
from tierckpt.errors import AgentLostError, AgentSilentError, IntegrityError, StoreError, TierckptError
from tierckpt.format.canonical import JSON
from tierckpt.telling import warn
from tierckpt.threads import Signal

#: Requests that wait for a disk, or for digests.
_LONG = frozenset({"bye", "carry", "discard", "fetch", "held", "write"})
#: Requests for which an agent is started. Every other one is about what one holds.
_STARTING = frozenset({"discard", "slot"})
#: Seconds before an agent that has just hung up is tried once more.
_PAUSE = 0.02
#: Seconds between two looks whether an agent that does not answer is still needed.
_LOOK = 0.5


@dataclass(frozen=True)
class Joining:
    """How this process takes part in a generation; see ``join`` in docs/agent-protocol.md. Times are in seconds."""

    generation: int
    rank: int
    world: int
    locals: Sequence[int]
    root: str
    roots: int
    origin: tuple[int, int] | None
    begun: Sequence[tuple[int, str]]
    slots: int
    budget: int
    idle: float
    deadline: float
    metrics: int = 0
    signing: tuple[str, int, list[str]] | None = None


class Client:
    """Requests to the agent of ``run`` on ``node``; any thread may make them, several at once.

    An agent that did not answer once is waited for by a thread of its own. Until that has heard of it every request fails at
    once: nobody waits for it twice.

    Args:
        timeout: seconds for which an answer is waited for.
    """

    def __init__(self, run: str, node: str, *, timeout: float) -> None:
        self.run, self.node = run, node
        self._timeout = timeout
        self._client = secrets.token_hex(16)
        self._joining: Joining | None = None
        #: The agent that this process knows, and how often it was another one.
        self.agent = ""
        self.epoch = 0
        #: The port on which it serves figures, 0: none.
        self.metrics = 0
        self._idle: list[Channel] = []
        #: Weak: one that an interrupt loses on its way closes itself.
        self._busy: weakref.WeakSet[Channel] = weakref.WeakSet()
        #: The first connection to this agent as a trainer, never used to ask: an interrupted request closes the one that it was
        #: made on, and where that was the last the agent would take this process for dead and its slots from the other saves.
        self._life: Channel | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        #: Whether it did not answer; called when it does again.
        self.silent = False
        self.heard: Callable[[], object] = bool
        self._closed = Signal()
        _clients.add(self)

    def connect(self) -> bool:
        """Whether the agent is there.

        Raises:
            StoreError: it cannot be used.
        """
        try:
            self._put(self._take(start=False))
        except (_NoAgentError, AgentSilentError):
            return False
        return True

    def reach(self) -> None:
        """Have an agent there; one that has died is started anew.

        Raises:
            AgentLostError: none can be.
        """
        self._put(self._reached(start=True))

    def is_there(self, epoch: int) -> bool:
        """Whether this agent is still the one that answers."""
        try:
            self._put(self._take(start=False))
        except StoreError:
            return False
        return epoch == self.epoch

    def _reached(self, *, start: bool, why: str = "") -> Channel:
        try:
            return self._take(start=start)
        except AgentLostError:
            raise
        except StoreError as error:
            raise AgentLostError(f"{error}{why}") from error

    def join(self, joining: Joining) -> None:
        """Take part in a generation, on connections from now on; those open before are closed.

        Raises:
            FencedError: a newer one has begun on this node.
            StoreError: the agent cannot be started, or does not answer.
        """
        self.close()
        self._closed = Signal()
        self._joining = joining
        self._put(self._take(start=True))

    def request(
        self,
        op: str,
        descriptors: Sequence[int] = (),
        patience: float = 0.0,
        epoch: int | None = None,
        /,
        **fields: JSON,
    ) -> Message:
        """Ask; the reply, whose descriptors are the caller's.

        Args:
            patience: seconds that the answer may take beyond the usual.
            epoch: which agent is asked, if no other one will do.

        Raises:
            AgentSilentError: the agent does not answer.
            AgentLostError: the agent has died, or none can be started; the next slot comes from a new one.
            TierckptError: the agent refuses.
        """
        starts = op in _STARTING
        lost = "" if starts else f" ({op}); what one held and had not yet written is lost"
        channel = self._reached(start=starts, why=lost)
        if epoch is not None and epoch != self.epoch:
            self._put(channel)
            raise AgentLostError(
                f"the agent of run {self.run} on node {self.node} died and was replaced ({op}); what it held and had not yet "
                "written is lost"
            )
        try:
            usual = self._timeout if op in _LONG else min(self._timeout, config.AGENT_ANSWER)
            message = self._converse(channel, {"op": op, **fields}, descriptors, usual + patience)
        except AgentSilentError:
            self._lost(channel)
            raise
        except (EOFError, OSError) as error:
            self._lost(channel)
            with self._lock:  # the others led to the same one
                others, self._idle = self._idle, []
            for other in others:
                other.close()
            raise AgentLostError(
                f"the agent of run {self.run} on node {self.node} died or did not answer ({op}: {str(error) or 'it hung up'}); "
                "what it held and had not yet written is lost"
            ) from error
        except BaseException:
            self._lost(channel)
            raise
        self._put(channel)
        with message:
            raise_refusal(message.fields)
            if message.fields.get("ending") is True:
                raise AgentSilentError(f"the agent of run {self.run} on node {self.node} was told to end ({op})")
            taken, message.descriptors = message.descriptors, []
        return Message(message.fields, taken)

    def _converse(
        self, channel: Channel, fields: dict[str, JSON], descriptors: Sequence[int], seconds: float
    ) -> Message:
        """Send a request and wait for the reply; whether the agent is there at all is asked meanwhile, beside."""
        deadline, look = time.monotonic() + seconds, self._patience / 2
        channel.sock.settimeout(self._patience)
        channel.send(fields, descriptors)
        while not channel.waits(max(0.0, min(look, deadline - time.monotonic()))):
            if self.silent or not self._is_there(look):
                self._fall_silent()
                raise AgentSilentError(self._silence)
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no answer within {seconds:g} s")
        return channel.receive()

    @property
    def _patience(self) -> float:
        """Seconds in which it answers what takes it no time."""
        return min(self._timeout, config.AGENT_ANSWER)

    @property
    def _silence(self) -> str:
        return f"the agent of run {self.run} on node {self.node} does not answer: it is stopped, or swapped out"

    def _is_there(self, seconds: float) -> bool:
        """Whether the agent answers on another connection, or its end is told otherwise."""
        try:
            home = Home.of(self.node, self.run, make=False)
            sock = home.connect(seconds) if home is not None else None
            if sock is None:
                return True  # it has died, as whoever waits is about to see
            with contextlib.closing(Channel(sock)) as channel:
                channel.send(self._hello)
                return channel.waits(seconds)
        except (OSError, TierckptError):
            return False

    def _fall_silent(self) -> None:
        with self._lock:
            if self.silent or self._closed.is_set():
                return
            self.silent = True
        warn(f"{self._silence}; until it does it is left alone")
        thread = threading.Thread(target=self._listen, args=(self._closed,), name="tierckpt-agent-listen", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread is to be had: the next request asks again
            self.silent = False

    def _listen(self, closed: Signal) -> None:
        """Until it answers, or has died, so that the next request finds another one; or nobody needs it any more."""
        while not closed.is_set():
            try:
                home = Home.of(self.node, self.run, make=False)
                sock = home.connect(self._patience) if home is not None else None
            except StoreError:  # so many wait to be heard that there is no room for one more
                closed.wait(self._patience)
                continue
            if sock is None:
                break
            with contextlib.closing(Channel(sock)) as channel, contextlib.suppress(OSError):
                channel.send(self._hello)
                while not closed.is_set() and not channel.waits(_LOOK):
                    pass
            break
        self.silent = False
        if not closed.is_set():
            self.heard()

    def _put(self, channel: Channel) -> None:
        with self._lock:
            self._busy.discard(channel)
            self._idle.append(channel)

    def _take(self, *, start: bool) -> Channel:
        if self.silent:
            raise AgentSilentError(self._silence)
        while True:
            with self._lock:
                if not self._idle:
                    break
                channel = self._idle.pop()
                self._busy.add(channel)
            if not channel.ended:
                return channel
            self._lost(channel)
        channel = self._open(start)
        with self._lock:
            self._busy.add(channel)
        return channel

    def _open(self, start: bool) -> Channel:
        deadline = time.monotonic() + config.AGENT_START
        while True:
            channel = self._reach(start, deadline)
            try:
                channel.sock.settimeout(self._patience)
                if self._greet(channel):
                    return channel
            except TimeoutError as error:
                channel.close()
                self._fall_silent()
                raise AgentSilentError(self._silence) from error
            except (EOFError, OSError) as error:
                channel.close()
                # One that was just ending takes no more connections: the next one will.
                if time.monotonic() >= deadline:
                    raise _NoAgentError(f"the agent of run {self.run} does not answer: {error}") from error
                self._closed.wait(_PAUSE)
            except BaseException:
                if channel is not self._life:  # of which others may know by now
                    channel.close()
                raise

    def _reach(self, start: bool, deadline: float) -> Channel:
        home = Home.of(self.node, self.run, make=start)
        sock = home.connect(self._timeout) if home is not None else None
        if sock is None:
            if not start or home is None:
                raise _NoAgentError(f"no agent of run {self.run} runs on node {self.node}")
            try:
                with home.locked(max(0.0, deadline - time.monotonic())):
                    sock = home.connect(self._timeout)
                    if sock is None:
                        launch(home, self.node, self.run)
            except OSError as error:
                raise StoreError(f"the agent of run {self.run} cannot be started: {error}") from error
            sock = sock or home.connect(self._timeout)
            if sock is None:
                raise _NoAgentError(f"the agent of run {self.run} ended as soon as it was started: {home.last_words()}")
        channel = Channel(sock)
        _channels.add(channel)
        if channel.user != os.getuid():
            channel.close()
            raise StoreError(f"{home.socket if home else ''} belongs to user {channel.user}: it is not used")
        return channel

    @property
    def _hello(self) -> dict[str, JSON]:
        return {"node": self.node, "op": "hello", "run": self.run, "version": VERSION}

    def _greet(self, channel: Channel) -> bool:
        """Join on it; whether it is there to ask, not to say that this process lives."""
        said = _ask(channel, self._hello)
        agent = said.get("agent")
        if type(agent) is not str:
            raise IntegrityError("the agent's socket: a greeting without a name")
        with self._lock:
            if agent != self.agent:
                self.agent = agent
                self.epoch += 1
                stale, self._idle = self._idle, []
                if self._life is not None:
                    stale.append(self._life)
                    self._life = None
            else:
                stale = []
        for old in stale:
            old.close()
        joining = self._joining
        if joining is not None:
            origin = joining.origin
            joined = _ask(
                channel,
                {
                    "begun": [[number, digest] for number, digest in joining.begun],
                    "budget": joining.budget,
                    "client": self._client,
                    "deadline": int(joining.deadline * 1000),
                    "generation": joining.generation,
                    "idle": int(joining.idle * 1000),
                    "locals": list(joining.locals),
                    "metrics": joining.metrics,
                    "op": "join",
                    "rank": joining.rank,
                    "root": joining.root,
                    "roots": joining.roots,
                    "origin": None if origin is None else {"generation": origin[0], "step": origin[1]},
                    "slots": joining.slots,
                    "world": joining.world,
                },
            )
            served = joined.get("metrics")
            self.metrics = served if type(served) is int else 0
            if joining.signing is not None:
                key, since, keys = joining.signing
                _ask(channel, {"key": key, "keys": list(keys), "op": "coordinate", "since": since})
            with self._lock:
                # Meanwhile others may have come to know another agent, or another generation.
                if self._life is None and agent == self.agent and joining is self._joining:
                    self._life = channel
                    return False
        return True

    def _lost(self, channel: Channel) -> None:
        with self._lock:
            self._busy.discard(channel)
        channel.close()

    def close(self) -> None:
        """Close all connections. A trainer that has not said ``bye`` is then taken for dead."""
        self._closed.set()
        with self._lock:
            channels, self._idle = [*self._idle, *self._busy], []
            self._busy = weakref.WeakSet()
            if self._life is not None:
                channels.append(self._life)
                self._life = None
        for channel in channels:
            channel.close()

    def bye(self) -> None:
        """Take leave; the last trainer of the node waits until what was to be drained is."""
        patience = self._joining.deadline if self._joining is not None else 0.0
        with self._lock:
            if self._life is not None:
                if self._life not in self._idle:  # where an interrupt came before it was forgotten here
                    self._idle.insert(0, self._life)
                self._life = None
        try:
            while self._idle and not self.silent:
                self._take_leave(self._timeout + patience)
        except TierckptError:
            self.close()  # the agent must not wait for who does not come back; after an interrupt he does
            raise
        silent = self.silent
        self.close()
        if silent:
            raise AgentSilentError(self._silence)

    def _take_leave(self, seconds: float) -> None:
        with self._lock:
            channel = self._idle.pop()
            self._busy.add(channel)
        try:
            if channel.ended:
                raise EOFError("it has ended")
            with self._converse(channel, {"op": "bye"}, (), seconds) as message:
                raise_refusal(message.fields)
        except (EOFError, OSError) as error:
            raise AgentLostError(f"the agent of run {self.run} was gone before this process: {error}") from error
        finally:
            self._lost(channel)


class _NoAgentError(StoreError):
    """There is none, and none was to be started or stayed."""


def _ask(channel: Channel, fields: dict[str, JSON]) -> dict[str, JSON]:
    channel.send(fields)
    with channel.receive() as message:
        raise_refusal(message.fields)
        return message.fields


def launch(home: Home, node: str, run: str) -> None:
    """Start an agent in a session of its own; its socket takes connections when this returns. Under the lock.

    Raises:
        OSError, StoreError: it cannot be started.
    """
    environment = dict(os.environ)
    # Its modules are where ours are, whatever made them so.
    environment["PYTHONPATH"] = os.pathsep.join(path for path in map(os.path.abspath, sys.path) if path)
    for name in ("PYTHONSTARTUP", "PYTHONINSPECT"):
        environment.pop(name, None)
    names = ["--folder", str(home.folder), "--name", home.name, "--node", node, "--run", run]
    with contextlib.ExitStack() as opened:
        log = home.open_log()
        opened.callback(os.close, log)
        listener = opened.enter_context(home.listen())
        try:
            process: Any = subprocess.Popen(
                [sys.executable, "-m", "tierckpt.agent", "--listener", str(listener.fileno()), *names],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=(listener.fileno(),),
                start_new_session=True,
                cwd="/",
                env=environment,
            )
        except OSError:
            with contextlib.suppress(OSError):
                home.socket.unlink()
            raise
    # It outlives us as a rule; should it end first, somebody must take note of it.
    threading.Thread(target=process.wait, name="tierckpt-agent-wait", daemon=True).start()


_clients: weakref.WeakSet[Client] = weakref.WeakSet()
#: All that are open, also those that are just being made and known to nobody else.
_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _forked() -> None:
    """A forked child must not keep its parent's connections open: the agent would take the parent for alive."""
    for channel in list(_channels):
        channel.close()
    for client in list(_clients):
        client._idle, client._busy, client._life = [], weakref.WeakSet(), None
        client.silent = False
        client._lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)
