"""The front door: one object that saves and restores a run."""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import re
import reprlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

from tierckpt import config, signals
from tierckpt.agent.calls import Calls, Mark
from tierckpt.agent.coordinator import Coordinator
from tierckpt.agent.drain import Drain, Job, Staged
from tierckpt.agent.handle import SAVED_ONCE, Handle
from tierckpt.agent.roots import level
from tierckpt.agent.sealing import again
from tierckpt.agent.writing import OwnWriter
from tierckpt.agreement import Agreement, Place
from tierckpt.arguments import flags, one_of, patterns, takes
from tierckpt.clock import Clock
from tierckpt.config import Cadence, Disk, Ram, Tier
from tierckpt.errors import (
    ArenaFullError,
    FencedError,
    LayoutError,
    LostContactError,
    RanksBehindError,
    SkippedError,
    StateError,
    StepExistsError,
    StoreError,
    TierckptError,
    UntrustedError,
)
from tierckpt.format import canonical, values
from tierckpt.format.canonical import JSON, MAX_INTEGER
from tierckpt.format.chain import Chain, CheckpointRef
from tierckpt.format.keys import SigningKey
from tierckpt.format.store import RUN_ID, is_run_id
from tierckpt.group import Group
from tierckpt.restore.load import LoadInfo, load, must_be_right
from tierckpt.restore.settle import settle, settle_newest
from tierckpt.snapshot import fence
from tierckpt.snapshot.arena import Arena, OwnMemory
from tierckpt.snapshot.ram import AgentMemory, RamTier
from tierckpt.snapshot.staging import Memory, Staging
from tierckpt.state import stepping
from tierckpt.state.mapping import Mapping
from tierckpt.state.planner import Planned, Planner
from tierckpt.stop import Stop
from tierckpt.telling import a, by_rank, warn
from tierckpt.threads import Signal
from tierckpt.tiers.disk import DiskPlace
from tierckpt.tiers.trust import trusted_keys

_log = logging.getLogger("tierckpt")

Key = str | os.PathLike[str] | SigningKey

#: Errors of the call itself, which no later attempt will cure: raised whatever ``on_error`` says.
_MISTAKES = (StateError, LayoutError, StepExistsError, FencedError, UntrustedError)


class Checkpointer:
    """Saves and restores the state of one run. All ranks of ``group`` make the same calls in the same order.

    Args:
        root: a folder, on a shared file system or on each node's own disk; the same one for all ranks of a node.
        tiers: what lies below: ``[Ram(…), Disk(every=…, keep=…)]``; a ``Ram()`` that is not named has its defaults. The disk
            alone with ``agent="off"``.
        run: the run's name; by default that of the store, or a new one.
        group: the process group whose ranks save together; by default all.
        key: the private key that signs, or its path (default: ``TIERCKPT_KEY``, else one made in the user's folder).
        trust: public keys (hex or paths) to trust instead of those pinned (default: ``TIERCKPT_TRUST``).
        expect_head: digest of a link that the chain must contain.
        agent: ``"auto"``: snapshots lie in the memory of the node's agent, a process that outlives this one and is started when
            it is not there. ``"off"``: the same drain runs in threads of this process, and ends with it.
        on_error: what a failed save does besides showing on its handle: ``"report"`` warns at the next call,
            ``"raise"`` raises there.
        on_disagreement: what happens when ranks hold different replicas of the same: ``"report"`` warns and saves that
            of the writer, ``"refuse"`` raises. Small tensors and values are compared at every save, large ones in turns.
        save_on_signal: True for SIGTERM, or signals (numbers or names). When one of them comes to any rank, the newest complete
            step goes to the disk whatever the cadence says, and :attr:`should_stop` becomes True at one of the next saves, the
            same on all ranks. A handler that was there before is still called; :meth:`close` gives it back.
        max_restarts: after so many restarts in a row from one checkpoint without progress, an older one is taken.
        fresh: begin from nothing even if there are checkpoints.
        timeout: seconds for which ranks wait for each other (default: ``TIERCKPT_TIMEOUT``, else 1,800).
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        tiers: Sequence[Tier] | Tier | None = None,
        run: str | None = None,
        group: Any = None,
        key: Key | None = None,
        trust: Any = None,
        expect_head: str | None = None,
        agent: str = "auto",
        on_error: str = "report",
        on_disagreement: str = "report",
        save_on_signal: bool | int | str | Iterable[int | str] = False,
        max_restarts: int = config.MAX_RESTARTS,
        fresh: bool = False,
        timeout: float | None = None,
    ) -> None:
        one_of("agent", agent, ("auto", "off"))
        one_of("on_error", on_error, ("report", "raise"))
        one_of("on_disagreement", on_disagreement, ("report", "refuse"))
        takes("run", run, run is None or run == "" or _is_name(run), f"a name: {RUN_ID}")
        takes("key", key, key is None or isinstance(key, (str, os.PathLike, SigningKey)), "the path of a private key")
        takes("max_restarts", max_restarts, type(max_restarts) is int and max_restarts > 0, "a number, 1 at least")
        flags(fresh=fresh)
        listened = signals.numbers(save_on_signal)
        self._on_disagreement, self._given_key = on_disagreement, key
        self._ram, self._disk = _tiers(tiers, agent)
        self._on_error, self._fresh, self._max_restarts = on_error, fresh, max_restarts
        self._timeout = config.timeout(timeout)
        self._place = DiskPlace.at(root)
        self._group = Group(group, timeout=self._timeout)
        self._group.agree(
            f"the Checkpointer at {self._place.url}",
            root=self._place.identity,
            tiers=repr((self._ram, self._disk)),
            run=run,
            on_disagreement=on_disagreement,
            max_restarts=max_restarts,
            fresh=fresh,
            save_on_signal=listened,
        )
        self._trusted, self._expect_head = trusted_keys(trust), expect_head
        self._coordinator = Coordinator(
            self._place,
            run=run,
            key=key,
            trusted=self._trusted,
            expect_head=expect_head,
            retention=self._disk.retention,
            grace=self._disk.grace,
        )
        self._channels = self._group.clone()
        # All ranks count the same calls, whatever comes of them.
        self._numbers = Calls()
        self._drain = Drain(self._channels, self._coordinator, self._numbers)
        self._arena = Arena(config.SLOTS)
        # With an agent, from the beginning of a generation on.
        self._ram_tier: RamTier | None = None
        # That of the generation before, until this one has its own.
        self._older_tier: RamTier | None = None
        # For changing it: another thread may just be handing over to it.
        self._tier_lock = threading.Lock()
        self._sealing_channels = self._group
        self._planner = Planner(self._group)
        self._handles: list[Handle] = []
        # Whether there is a generation to save in.
        self._has_begun = False
        # Steps of this generation that are under way, and those that are done.
        self._steps: dict[int, Handle] = {}
        self._done: set[int] = set()
        # No step of this generation's lineage is above it; whether somebody was told that steps are saved below the newest.
        self._highest, self._told_of_lower = -1, False
        #: Why memory had no room for the last step that was to be only there, of which somebody was told.
        self._lacking = ""
        # Training may save from a thread while another restores: one call at a time.
        self._calls = threading.RLock()
        self._pid = os.getpid()
        self._last_due: dict[str, int] = {}
        self._closed = self._failed = False
        # How far the end has come.
        self._ended, self._ending = 0, threading.RLock()
        # What was hastened last: whether the thread that seals has come to it.
        self._hastened: Signal | None = None
        self._stop: Stop | None = None
        self._agree(listened)
        _open.add(self)
        # One that is forgotten without close() gives its thread back; saves under way keep it alive until they end.
        weakref.finalize(self, self._drain.stop).atexit = False

    def _agree(self, listened: tuple[int, ...]) -> None:
        """What only some rank knows, and all do at the same call."""
        group, numbers = self._group, self._numbers
        seconds = {tier.name: tier.cadence.seconds for tier in self._all_tiers if tier.cadence.seconds is not None}
        self._clock = Clock(seconds, leads=group.rank == 0, alone=group.size == 1)
        asks = bool(listened) or (bool(seconds) and group.size > 1)
        self._agreement = Agreement(group.clone() if asks else group, Place(lambda: numbers.made), self._clock)
        if listened:
            me = weakref.ref(self)
            self._stop = Stop(
                listened,
                self._agreement.wake,
                numbers.meetings,
                hasten=lambda after: found._hasten(after) if (found := me()) is not None else None,
                lacks=lambda: (found := me()) is not None and found._lacks,
            )
            self._agreement.add(self._stop)
        if asks:
            weakref.finalize(self, _forget, self._agreement, self._stop).atexit = False
            self._agreement.start()

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], **more: Any) -> Checkpointer:
        """A checkpointer described in a file; ``more`` overrides it. Keys are the arguments, tiers ``[[tiers]]`` tables.

        Raises:
            StateError: the file cannot be read, or names what does not exist.
            TierckptError: as the constructor; it names the file, too.
        """
        where = os.fspath(path)
        written = config.from_toml(path)
        arguments = written | more
        every = inspect.signature(cls).parameters
        known = [name for name in every if name != "group"]
        unknown = sorted({*(written.keys() - set(known)), *(more.keys() - every.keys())})
        if unknown or "root" not in arguments:
            said = f"unknown keys {', '.join(unknown)}" if unknown else "no key root"
            if "group" in unknown:
                said += " (a process group is no value of a file: from_toml(…, group=…))"
            raise StateError(f"{where}: {said}; it takes {', '.join(known)}")
        try:
            return cls(**arguments)
        except LostContactError:  # no fault of the file
            raise
        except TierckptError as error:
            error.args = (f"{where}: {error}",)
            raise
        except (TypeError, ValueError) as error:
            raise StateError(f"{where}: an argument does not take what is written there: {error}") from error

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(failed=kind is not None)

    # Restore

    def restore(
        self,
        state: Any,
        *,
        step: int | None = None,
        keys: Sequence[str] | str | None = None,
        strict: bool = True,
        cast: bool = False,
        fallback: bool = True,
        mapping: Mapping | None = None,
        staged: bool = False,
    ) -> LoadInfo | None:
        """Fill ``state`` in place from the newest checkpoint that is complete and verified, and begin a generation there.

        Collective. Arguments are those of :func:`tierckpt.load`.

        Returns:
            What was restored; None only if nothing was ever committed (or ``fresh``).

        Raises:
            LayoutError, StateError: the state does not fit; nothing was touched.
            IncompleteError, IntegrityError: no checkpoint could be restored.
            UntrustedError: the store is not to be believed.
        """
        how = {"strict": strict, "cast": cast, "fallback": fallback, "staged": staged}
        self._must_be_open()
        with self._calls, self._together(lambda: False):
            # Before it counts as a call; and here, so that a start with nothing to load refuses what the next one would.
            must_be_right(step, mapping, **how)
            named = patterns(keys)
            call = self._agreement.begin(None, self._numbers.mark)
            return self._restore(call, state, step=step, keys=named, mapping=mapping, **how)

    def _restore(
        self, call: int, state: Any, *, step: int | None, mapping: Mapping | None, keys: Any, **how: bool
    ) -> LoadInfo | None:
        # What is still being drained belongs to the generation that ends here.
        self._meet(call)
        self.wait()
        self._surface()
        info = None
        if not self._fresh:
            info = load(
                self._group,
                self._place,
                state,
                step=step,
                keys=keys,
                mapping=mapping,
                **how,
                believe=self._coordinator.believe,
                run=self._coordinator.run,
                max_restarts=self._max_restarts,
                may_be_empty=step is None,
            )
        ref = None if info is None else CheckpointRef(info.generation, info.step, info.id)
        if ref is None or info is None or self._settled(ref, info):
            self._begin(ref, chosen=True)
        else:
            self._begin(None, chosen=False, looks=False)
        if info is not None:
            self._last_due = {tier.name: info.step for tier in self._all_tiers}
            self._clock.restart(self._last_due)
            try:
                self._prepare(state)
            except (StateError, LayoutError) as error:
                # What is saved later may be another state; if it is this one, its save says the same.
                _log.debug("the state that was restored cannot be saved: %s", error)
        return info

    def _settled(self, ref: CheckpointRef, info: LoadInfo) -> bool:
        """Whether the chain can say that we go on from what was restored: what is only in memory is committed first."""
        if "ram" not in info.sources:
            return True
        return self._try_settling(
            lambda: settle(self._group, self._place, ref, run=info.run, key=self._given_key, grace=self._disk.grace)
        )

    def _try_settling(self, commit: Callable[[], None]) -> bool:
        """Whether what is only in memory could be committed; if not, the chain says that the run goes on from an older step."""
        try:
            commit()
        except (FencedError, LostContactError, UntrustedError):
            raise
        except TierckptError as error:
            warn(
                "the newest step is only in memory and could not be made durable; until the next save the newest durable "
                f"checkpoint is an older one: {error}",
            )
            return False
        return True

    # Save

    def prepare(self, state: Any) -> None:
        """Plan and warm up for ``state`` ahead of the first save. Collective."""
        self._must_be_open()
        with self._calls, self._together(lambda: self._planner.is_planned):
            self._prepare(state)

    @contextmanager
    def _together(self, is_over: Callable[[], bool]) -> Iterator[None]:
        """Around what all ranks do together. An interrupt of it costs contact at once, unless ``is_over``: nobody must wait for a
        rank that has left, nor go on as if it had not."""
        try:
            yield
        except LostContactError:
            self._lose_contact()
            raise
        except Exception:
            raise  # on all ranks
        except BaseException:
            if not is_over():
                self._lose_contact()
            raise

    def _lose_contact(self) -> None:
        for channels in (self._group, self._channels, self._sealing_channels):
            channels.close()

    @property
    def _is_alone(self) -> bool:
        """Whether a save is nothing that the ranks do together: the first is."""
        return self._has_begun and self._planner.is_planned

    def _prepare(self, state: Any) -> None:
        size = self._planner.prepare(state)
        if self._ram_tier is not None and size:
            self._ram_tier.arena.prepare(size)

    def save(self, step: int, state: Any, *, metadata: Any = None, pin: bool = False) -> Handle:
        """Copy ``state`` and have the copy carried to the store while training goes on. Collective.

        Args:
            step: names the checkpoint; each step once. The newest checkpoint is that with the highest.
            state: nested containers of tensors and values, modules, optimizers, anything with ``state_dict()``.
            metadata: any encodable value, stored beside the checkpoint.
            pin: never retire it. It goes to the disk whatever the cadence says.

        Raises:
            StateError, LayoutError: the state cannot be saved; the message names the path.
            StepExistsError: this step was saved before; where an agent may hold it, also if that save failed.
            FencedError: a newer generation of the run has begun.
        """
        handle = self._save(step, state, metadata=metadata, pin=pin, live=False)
        self._surface()
        return handle

    def _save(self, step: int, state: Any, *, metadata: Any, pin: bool, live: bool, always: bool = False) -> Handle:
        """With ``live``, the state is read while it is drained: the caller must not let it change before the end."""
        began = time.perf_counter()
        valid = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < MAX_INTEGER
        self._must_be_open()
        with self._calls:
            call = self._agreement.begin(step if valid else -1, self._numbers.next)
            last = self._stop is not None and self._stop.now
            if not valid:
                self._refuse(
                    call, StateError(f"step={reprlib.repr(step)}: a step is an integer from 0 to {MAX_INTEGER - 1}")
                )
            handle = self._take(call, step, state, metadata=metadata, pin=pin, live=live, always=always, last=last)
        handle.timings["stall"] = time.perf_counter() - began
        return handle

    def _take(
        self, call: int, step: int, state: Any, *, metadata: Any, pin: bool, live: bool, always: bool, last: bool
    ) -> Handle:
        """``last``: all ranks stop here, so this step goes down to the disk."""
        self._surface()
        names = [tier.name for tier in self._all_tiers]
        handle = Handle(step, names, names)
        try:
            with nullcontext() if self._is_alone else self._together(lambda: self._is_alone):
                # What is never to be retired must be where nothing but that ends it.
                due = [
                    tier.name
                    for tier in self._all_tiers
                    if self._is_due(tier, step, always=live or always or last) or pin
                ]
                if not due:
                    return Handle(step, names, ())
                # What goes to the disk is in memory first.
                handle = Handle(step, names, names if self._disk.name in due else due)
                self._handles.append(handle)
                if not self._has_begun:
                    self._begin(None, chosen=False, unread=None if live or always else step)
                self._must_be_new(call, step)
                if not (live or always):
                    self._look_below(step)
                fenced = not (live or always or stepping.is_under_way())
                self._snapshot(call, handle, step, state, metadata, pin=pin, live=live, fenced=fenced, last=last)
        except _MISTAKES:
            self._handles = [other for other in self._handles if other is not handle]
            raise
        except _Raised as raised:
            # All ranks raise in this call, whoever knew of the failure first.
            for other in self._handles:
                other._told = True
            self._handles.remove(handle)
            raise raised.error from raised.error.__cause__
        except Exception as error:
            handle._finish(None, error)
        except BaseException:
            if not handle._handed_over:
                handle._finish(None, StoreError(f"step {step}: the save was interrupted"))  # nobody else would
            raise
        return handle

    def _must_be_new(self, call: int, step: int) -> None:
        before = self._steps.get(step)
        if step in self._done or (before is not None and before.error is None):
            self._refuse(
                call,
                StepExistsError(
                    f"{self._place.url}: this process has already saved step {step}; each step is saved once"
                ),
            )
        if self._ram_tier is not None and self._ram_tier.sealing.has(step):
            self._refuse(call, StepExistsError(f"{self._place.url}: step {step} {SAVED_ONCE}"))

    def _snapshot(
        self,
        call: int,
        handle: Handle,
        step: int,
        state: Any,
        metadata: Any,
        *,
        pin: bool,
        live: bool,
        fenced: bool,
        last: bool,
    ) -> None:
        """The first time all ranks meet, and what is wrong is raised on all of them. Later each goes on by itself, and what
        is wrong on one fails on all when their drains meet."""
        note: list[Any] = []

        def mine() -> bytes:
            self._raise_failures()
            note.append(_encoded(metadata))
            return str(step).encode()

        begun: list[Staging] = []
        alone = self._planner.is_planned and self._group.size > 1
        # The other ranks hand this step to their drains, whatever happens here: so must we.
        staged: Staged | BaseException = StoreError(f"step {step}: the save was interrupted")
        must_tell = alone
        try:
            try:
                planned = self._planner.plan(state, f"the save of step {step}", mine, self._numbers.made)
            except TierckptError as error:
                if _FAILED_BEFORE in str(error):
                    raise _Raised(error) from error
                raise
            if len(set(planned.told)) > 1:
                steps = by_rank([f"step {int(told)}" for told in planned.told])
                raise StateError(f"the ranks pass different steps to the same save ({steps})")
            self._steps[step] = handle
            handle._owner, handle._lend = self, fence.wait
            must_tell = True
            staged = self._stage(
                planned, note[0], live=live, fenced=fenced, handle=handle, pinned=pin, last=last, begun=begun
            )
        except _Raised as raised:
            staged = raised.error
            raise
        except Exception as error:
            staged = error
            if not must_tell:
                raise
        finally:
            if must_tell:
                if isinstance(staged, BaseException):
                    # An interrupt may come anywhere: what was taken for this step is given back.
                    for staging in begun:
                        staging.release(False)
                    handle._set_staged()
                job = Job(call, step, pin, staged, handle, due=self._disk.name in handle.due)
                self._hand_over(job)

    def _hand_over(self, job: Job) -> None:
        if self._ram_tier is not None:
            self._ram_tier.sealing.put(job)
        else:
            job.handle._skip(Ram.name, "no agent could be started here")
            self._drain.put(job)
        job.handle._handed_over = True

    def _meet(self, call: int) -> None:
        """Let all ranks give up what only some of them have handed over: those would wait for the others. Nothing of before is
        hastened after that."""
        if self._planner.is_planned and (self._group.size > 1 or self._ram_tier is not None):
            fence.wait()  # who stands here must not be waited for
            mark = Mark(self._numbers, call)
            if self._ram_tier is not None:
                self._ram_tier.sealing.put(mark)
            else:
                self._drain.put(mark)
            mark.passed.wait()

    def _refuse(self, call: int, error: TierckptError) -> NoReturn:
        """Raise what is wrong with a call. The other ranks may be in a save: their drains must not wait for this one."""
        if self._group.size > 1 and self._planner.is_planned:
            # Under a number that no step has: nothing of a step that exists may be taken for what has failed.
            self._hand_over(Job(call, MAX_INTEGER, False, error, Handle(MAX_INTEGER, (), ())))
        raise error

    def _stage(
        self,
        planned: Planned,
        metadata: Any,
        *,
        live: bool,
        fenced: bool,
        handle: Handle,
        pinned: bool,
        last: bool,
        begun: list[Staging],
    ) -> Staging:
        """``begun``: what is returned is put into it before anything is taken for it."""
        began = time.perf_counter()
        prepared = self._planner.prepared(planned)
        # What is on GPUs cannot be read piece by piece.
        live = live and not prepared.has_devices and not planned.has_devices
        memory: Memory | None = None
        waits = last or (self._ram is not None and self._ram.on_full == "wait")
        # In any case not for so long that the ranks lose contact.
        patience = self._timeout / 2 if waits else min(config.BEHIND_SECONDS, self._timeout / 4)
        behind = functools.partial(self._numbers.behind, patience)
        if not live and self._ram_tier is not None:
            due = self._disk.name in handle.due
            memory = AgentMemory(
                self._ram_tier, handle.step, due=due, pinned=pinned, must=last or pinned, behind=behind
            )
        elif not live:
            memory = OwnMemory(self._arena, self._timeout, behind)
        refuse = self._on_disagreement == "refuse"
        staging = Staging(self._planner, memory, planned, prepared, metadata, refuse=refuse)
        begun.append(staging)
        if memory is None:
            handle._set_staged()
        else:
            try:
                staging.stage(handle._set_staged, overlap=fenced)
            except SkippedError:
                raise
            except Exception as error:
                staging.fail(error)
                handle._set_staged()
        handle.timings["copy"] = time.perf_counter() - began
        return staging

    @property
    def _all_tiers(self) -> list[Tier]:
        return [self._ram, self._disk] if self._ram is not None else [self._disk]

    def _is_due(self, tier: Tier, step: int, *, always: bool) -> bool:
        """Whether a tier is due; no rank waits for another to know."""
        if always:
            return True
        cadence: Cadence = tier.cadence
        last = self._last_due.get(tier.name)
        if last is None:
            self._clock.restart([tier.name])
            due = True
        elif cadence.steps is None:
            due = tier.name in self._clock.due
        else:
            due = cadence.due(step, last)
        if due:
            self._last_due[tier.name] = step
        return due

    def fence(self) -> None:
        """Wait until nothing is being copied from live state any more: to be called before it changes in another way than by
        the ``step()`` of a ``torch.optim.Optimizer``, which waits by itself."""
        fence.wait()

    @property
    def should_stop(self) -> bool:
        """Whether the training loop is to end: a signal of ``save_on_signal=`` came to some rank, and this step is safe.

        Becomes True inside :meth:`save`, at the same save on all ranks, and never anywhere else: ranks that ask between the
        same two saves get the same answer. That save goes to all tiers, whatever their cadences say, so a loop that asks after
        it loses nothing. Saves of steps that are not due count too: call it at every step.
        """
        return self._stop is not None and self._stop.stops

    def _hasten(self, after: int) -> None:
        """The newest complete step that is only in memory goes to the disk, after so many meetings of the ranks."""
        with self._tier_lock:
            if self._ram_tier is not None:
                self._hastened = self._ram_tier.sealing.hasten(after)

    @property
    def _lacks(self) -> bool:
        """Whether there is such a step."""
        tier = self._ram_tier
        return tier is not None and self._numbers.meetings.saved and tier.sealing.lacks

    # Generations

    def _begin(self, ref: CheckpointRef | None, *, chosen: bool, unread: int | None = None, looks: bool = True) -> None:
        """Claim the next generation: from ``ref`` if that was chosen, else from the newest checkpoint.

        ``unread``: the step that is saved though nothing was restored. ``looks``: whether the newest may be in memory.
        """

        def choose(chain: Chain) -> CheckpointRef | None:
            if chosen or self._fresh:
                return ref
            if chain.newest is not None and unread is not None and unread < chain.newest.step:
                self._told_of_lower = True
                warn(
                    f"{self._place.url} has checkpoints up to step {chain.newest.step}, and step {unread} is saved without "
                    "restore(): the older ones stay the newest, which means the highest step number. Call restore() first, or "
                    "pass fresh=True to begin anew",
                )
            return chain.newest

        self._has_begun = False  # until all of this has been done
        self._leave_tier()
        self._steps.clear()
        self._done.clear()
        self._told_of_lower = False
        if looks and not chosen and not self._fresh and self._ram is not None:
            self._try_settling(
                lambda: settle_newest(
                    self._group,
                    self._place,
                    believe=self._coordinator.believe,
                    run=self._coordinator.run,
                    key=self._given_key,
                    grace=self._disk.grace,
                )
            )
        level(self._group, self._place)

        def part() -> bytes:
            return self._coordinator.begin(choose) if self._group.rank == 0 else b""

        what = f"the start of a generation at {self._place.url} (to read without writing: tierckpt.load)"
        told = self._group.vote(what, part)
        self._coordinator.follow(told[0], self._group)
        self._highest = self._continued
        if self._ram is not None:
            self._join(self._ram)
        self._agreement.continues(self._coordinator.generation)
        self._has_begun = True

    @property
    def _continued(self) -> int:
        """The step that this generation continues, −1: none. Nothing above it is in its lineage."""
        origin = self._coordinator.origin
        return -1 if origin is None else origin[1]

    def _look_below(self, step: int) -> None:
        """Warn, once in a generation, of a step below the newest: the next start would not restore it, but that one."""
        if step >= self._highest:
            self._highest = step
            return
        if self._told_of_lower or self._group.rank:
            return
        # What failed is nowhere.
        saved = (other for other, handle in self._steps.items() if handle.error is None)
        self._highest = max((*saved, *self._done, self._continued))
        if step < self._highest:
            self._told_of_lower = True
            warn(
                f"{self._place.url}: step {step} is saved although there is step {self._highest}: the newest checkpoint is that "
                f"with the highest step number, so the next start restores step {self._highest}, and keep= lets lower ones go "
                "first. Go on counting from info.step + 1 over all epochs and starts; to go back, call restore(step=…) first, "
                "or begin anew with fresh=True"
            )

    def _leave_tier(self) -> None:
        """What is in memory of the generation before is its agent's from here on: nothing of it goes down under the name of the
        next one, even if that never comes to begin."""
        with self._tier_lock:
            if self._ram_tier is not None:
                self._older_tier, self._ram_tier = self._ram_tier, None
        if self._older_tier is not None:
            self._older_tier.finish()

    def _join(self, policy: Ram) -> None:
        """Take part in the generation with the node's agent; where one node has none, all do without. Collective."""
        if self._sealing_channels is self._group:
            self._sealing_channels = self._group.clone()
        memory = RamTier(policy, self._group, self._sealing_channels, self._coordinator, self._drain)
        try:
            memory.join()
        except (FencedError, LostContactError):
            raise
        except (TierckptError, OSError) as error:
            warn(f"snapshots do not outlive this process, as with agent='off': {error}")
            self._ram = self._ram_tier = None
            self._drain.writer, self._drain.overtakes = OwnWriter(), False
        else:
            self._ram_tier = memory
            weakref.finalize(self, memory.sealing.stop).atexit = False
        if self._older_tier is not None:
            self._older_tier.replaced()
            self._older_tier = None

    # The end

    def wait(self) -> None:
        """Wait until every save so far is done or has failed."""
        fence.wait()
        self._take_hastened(wait=True)
        for handle in list(self._handles):
            handle._ended.wait()

    def _take_hastened(self, *, wait: bool) -> None:
        """What a signal has sent to the disk is one of our saves."""
        if wait and self._hastened is not None:
            self._hastened.wait()
        if self._ram_tier is not None:
            hastened = self._ram_tier.sealing.hastened
            while hastened:
                self._handles.append(hastened.popleft())

    def close(self) -> None:
        """Finish what is under way, report what failed, give everything back. Called twice it does nothing; after an interrupt
        it goes on where it was.

        The newest complete step that is only in memory goes to the disk; then the agent ends, if no other process needs it.
        """
        self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        if not self._closed:
            self._failed, self._closed = failed, True
        if self._pid != os.getpid():
            return  # a forked child has none of the threads: what is under way is its parent's
        with self._ending:
            while self._ended < len(_ENDS):
                number = self._ended
                _ENDS[number](self)
                self._ended = max(self._ended, number + 1)
        _open.discard(self)

    def _end_calls(self) -> None:
        fence.wait()
        self._agreement.settle(failed=self._failed)

    def _end_sealing(self) -> None:
        last = self._ram_tier.finish() if self._ram_tier is not None else None
        if last is not None and not self._failed:
            # All ranks close after the same saves: they take the newest step to the disk as they do any other.
            if not last.due:
                self._handles.append(again(last))
            if last not in self._drain.pending and not last.handle._ended.is_set():
                self._drain.put(last)

    def _end_drain(self) -> None:
        self._take_hastened(wait=True)
        self._drain.close()

    def _end_memory(self) -> None:
        for tier in (self._ram_tier, self._older_tier):
            if tier is not None:
                tier.close(failed=self._failed)
        self._arena.close()

    def _end_links(self) -> None:
        self._coordinator.close()
        self._channels.close()
        self._sealing_channels.close()
        self._group.close()
        if self._stop is not None:
            self._stop.close()

    def _surface(self) -> None:
        """Tell of saves that have failed and that nobody has been told of yet."""
        self._take_hastened(wait=False)
        ended = [handle for handle in self._handles if handle._ended.is_set()]
        raising = self._on_error == "raise" and not self._closed
        kept = [
            handle
            for handle in ended
            if handle.error is not None
            and not handle._told
            and self._raises(handle, raising)
            and _FAILED_BEFORE not in str(handle.error)
        ]
        self._handles = [handle for handle in self._handles if handle not in ended or handle in kept]
        for handle in ended:
            if self._steps.get(handle.step) is handle:
                del self._steps[handle.step]
                if handle.error is None:
                    self._done.add(handle.step)
            if handle.error is not None and not handle._told and handle not in kept:
                handle._told = True
                self._report(handle)
            elif handle.error is None and Ram.name in handle._at:
                self._lacking = ""

    def _report(self, handle: Handle) -> None:
        """Warn of a failed save. Where memory has no room that may be every save which is not due on the disk: of those once,
        until one had room or the reason is another."""
        lacking = _lacking(handle)
        if lacking and lacking == self._lacking:
            return
        self._lacking = lacking or self._lacking
        more = "; further saves that fail for this reason tell it on their handles only" if lacking else ""
        warn(f"{_failure(handle)}{more}")

    def _raises(self, handle: Handle, raising: bool) -> bool:
        return raising or (isinstance(handle.error, FencedError) and not self._closed)

    def _raise_failures(self) -> None:
        """Raise what is not only to be reported: inside a vote, so that all ranks raise in the same call."""
        for handle in self._handles:
            error = handle.error
            if error is not None and _FAILED_BEFORE in str(error):
                # Another rank has just raised what this one raises by itself: one failure must not make another.
                handle._told = True
                continue
            if handle._ended.is_set() and error is not None and self._raises(handle, self._on_error == "raise"):
                kind = type(error) if isinstance(error, TierckptError) else StoreError
                raise kind(f"{_FAILED_BEFORE}: {_failure(handle)}") from error

    def must_hold(self, run: str | None) -> None:
        """Raise StoreError if this is another run's than ``run`` (None: any)."""
        if run and self._coordinator.run not in ("", run):
            raise StoreError(
                f"{self._place.url} holds run {self._coordinator.run!r}, not {run!r}: each run needs a root of its own"
            )

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._closed

    def _must_be_open(self) -> None:
        """Before any lock is taken: in a forked child it may be held by a thread that is not there."""
        if self._closed:
            raise StateError("this Checkpointer has been closed")
        if self._pid != os.getpid():
            raise StateError("this Checkpointer belongs to the process that this one was forked from; make a new one")


def _forget(agreement: Agreement, stop: Stop | None) -> None:
    """Of a Checkpointer that nobody has closed: its thread ends, and signals do again what they did."""
    agreement.stop()
    if stop is not None:
        stop.close()


#: What a Checkpointer does at its end, one after the other; each may be begun again after an interrupt.
_ENDS: Sequence[Callable[[Checkpointer], None]] = (
    Checkpointer._end_calls,
    Checkpointer._end_sealing,
    Checkpointer._end_drain,
    Checkpointer._end_memory,
    Checkpointer._end_links,
    Checkpointer._surface,
)

_open: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Saves under way at the end of a script are finished, not lost."""
    # After an error that nobody caught somebody is likely to start again soon.
    failed = getattr(sys, "last_value", None) is not None
    for checkpointer in list(_open):
        checkpointer._close(failed=failed)


#: Bytes that a checkpoint's metadata may take once encoded: they stand in its manifest, which everybody reads.
_METADATA_LIMIT = 1 << 20


def _encoded(metadata: Any) -> JSON:
    encoded = values.encode(metadata, path="metadata") if metadata is not None else None
    size = len(canonical.encode(encoded))
    if size > _METADATA_LIMIT:
        raise StateError(
            f"metadata of {size:,} bytes: at most {_METADATA_LIMIT:,} are kept beside a checkpoint; put it into the state"
        )
    return encoded


_FAILED_BEFORE = "an earlier save had failed"


class _Raised(Exception):
    """An earlier failure that all ranks raise now."""

    def __init__(self, error: TierckptError) -> None:
        super().__init__(str(error))
        self.error = error


def _failure(handle: Handle) -> str:
    text = str(handle.error)
    return text if text.startswith("the save of step") else f"the save of step {handle.step} failed: {text}"


def _lacking(handle: Handle) -> str:
    """Why memory had no room for a step that was due nowhere else, but for what differs from save to save; else empty."""
    error = handle.error
    if handle.due != (Ram.name,) or not isinstance(error, ArenaFullError) or isinstance(error, RanksBehindError):
        return ""
    return re.sub(r"\d[\d,.]*", "…", str(error))


def _is_name(run: object) -> bool:
    return isinstance(run, str) and is_run_id(run)


def _tiers(tiers: Sequence[Tier] | Tier | None, agent: str) -> tuple[Ram | None, Disk]:
    """The tiers, of each kind at most one; without an agent there is none of memory."""
    given: list[Any] = [Ram(), Disk()]
    if tiers is not None:
        given = list(tiers) if isinstance(tiers, Iterable) and not isinstance(tiers, str) else [tiers]
    rams = [tier for tier in given if isinstance(tier, Ram)]
    disks = [tier for tier in given if isinstance(tier, Disk)]
    others = [f"{tier!r} is {a(tier)}, no tier; " for tier in given if not isinstance(tier, (Ram, Disk))]
    if len(rams) > 1 or len(disks) != 1 or others:
        raise StateError(
            f"tiers={tiers!r}: {''.join(others)}this version takes exactly one Disk(…), and at most one Ram(…)"
        )
    return (None if agent == "off" else rams[0] if rams else Ram()), disks[0]
