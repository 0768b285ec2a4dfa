"""Saving and loading as plain calls, without an object to keep."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from tierckpt import config
from tierckpt.agent.handle import Handle, SaveInfo
from tierckpt.checkpointer import Checkpointer, Key
from tierckpt.group import Group
from tierckpt.restore import load as restoring
from tierckpt.restore.load import LoadInfo
from tierckpt.state.mapping import Mapping
from tierckpt.tiers import trust as trusting
from tierckpt.tiers.disk import DiskPlace
from tierckpt.tiers.store import Store

#: Functional saves of one process group to one root share a generation.
_sessions: dict[tuple[str, int, tuple[int, int], int], Checkpointer] = {}
_lock = threading.Lock()


def save(
    state: Any,
    root: str | os.PathLike[str],
    step: int,
    *,
    metadata: Any = None,
    pin: bool = False,
    group: Any = None,
    run: str | None = None,
    key: Key | None = None,
    timeout: float | None = None,
) -> SaveInfo:
    """Save ``state`` as ``step`` and return when it is durable and committed. Collective; ``state`` must not change meanwhile.

    Args:
        state: nested containers of tensors and values, modules, optimizers, anything with ``state_dict()``.
        root: a folder.
        step: names the checkpoint.
        metadata: any encodable value, stored beside the checkpoint.
        pin: never retire it.
        group: the process group whose ranks save together; by default all.
        run: the run's name; by default that of the store, or a new one.
        key: the private key that signs, or its path.
        timeout: seconds for which ranks wait for each other.

    Raises:
        StateError, LayoutError: the state cannot be saved; the message names the path.
        StepExistsError: this process has saved this step before.
        StoreError: storage refused. Nothing of the step is left, unless it failed in its very last action, when it had
            been published.
        FencedError: another process has begun a newer generation of this run.
    """
    session = _session(root, group, run, key, timeout)
    handle = session._save(step, state, metadata=metadata, pin=pin, live=True)
    info = handle.wait()
    assert info is not None
    return info


def async_save(
    state: Any,
    root: str | os.PathLike[str],
    step: int,
    *,
    metadata: Any = None,
    pin: bool = False,
    group: Any = None,
    run: str | None = None,
    key: Key | None = None,
    timeout: float | None = None,
) -> Handle:
    """Copy ``state`` and return; the copy becomes durable in the background. Arguments as for :func:`save`.

    Returns:
        A handle; ``wait()`` raises what went wrong.
    """
    session = _session(root, group, run, key, timeout)
    return session._save(step, state, metadata=metadata, pin=pin, live=False, always=True)


def load(
    state: Any,
    root: str | os.PathLike[str],
    step: int | None = None,
    keys: Sequence[str] | str | None = None,
    strict: bool = True,
    cast: bool = False,
    fallback: bool = True,
    mapping: Mapping | None = None,
    trust: Any = None,
    expect_head: str | None = None,
    staged: bool = False,
    *,
    group: Any = None,
    run: str | None = None,
    timeout: float | None = None,
) -> LoadInfo:
    """Fill ``state`` in place from a checkpoint, whatever layout it was saved in. Collective.

    Args:
        state: as for :func:`save`; its tensors are filled, its values replaced.
        root: the folder of the store.
        step: which checkpoint; by default the newest that is complete and verified.
        keys: a glob over dotted names (``"model.*"``), or several: only leaves that match one are loaded.
        strict: keys missing from the checkpoint or from ``state`` are errors.
        cast: convert tensors whose dtype differs; integers that do not fit are refused.
        fallback: take an older checkpoint if the newest is damaged; never with ``step=``.
        mapping: a :class:`tierckpt.Mapping`: what has other names in ``state``, tensors to fuse or to split. Not applied to a
            checkpoint that was saved under the new names; one that exchanges names needs ``step=``.
        trust: public keys (hex or paths) to trust instead of those pinned.
        expect_head: digest of a link that the chain must contain; detects that the store was rolled back.
        staged: fill nothing before everything was read and verified, at the cost of memory for a second copy. Only what an
            object's own ``load_state_dict()`` raises comes later, when the tensors are filled.
        group, run, timeout: as for :func:`save`.

    Raises:
        LayoutError: the state does not fit; lists everything, nothing was touched.
        IncompleteError: nothing complete to restore; says what is missing.
        IntegrityError: bytes are damaged; names file and chunk.
        UntrustedError: the store is not to be believed.
    """
    with _reading(group, timeout) as ranks:
        info = restoring.load(
            ranks,
            DiskPlace.at(root),
            state,
            step=step,
            keys=keys,
            strict=strict,
            cast=cast,
            fallback=fallback,
            staged=staged,
            mapping=mapping,
            believe=_believe(trust, expect_head),
            run=run,
        )
    assert info is not None
    return info


def read(
    root: str | os.PathLike[str],
    step: int | None = None,
    keys: Sequence[str] | str | None = None,
    *,
    fallback: bool = True,
    mapping: Mapping | None = None,
    trust: Any = None,
    expect_head: str | None = None,
    group: Any = None,
    run: str | None = None,
    timeout: float | None = None,
) -> Any:
    """The state of a checkpoint without a template: whole tensors in private memory, nested as saved. Collective.

    Arguments and errors as for :func:`load`; with a ``mapping`` the names are those that it gives. Where only a template knows
    the class, enums are their values, named tuples are tuples, defaultdicts are dicts.

    All ranks get the same, but for what stood in a :class:`PerRank`: of that each rank gets its own. Where the states of
    the ranks that saved had different things under one name, dicts, and lists, are united; of values without tensors the
    one of the lowest rank counts, and gives way to anything else (a dict then adds what a dict of tensors lacks); other
    things do not fit into one state.

    Raises:
        LayoutError: ranks had different things under one name that ``keys`` includes, say a tensor and a dict of tensors.
    """
    with _reading(group, timeout) as ranks:
        return restoring.read(
            ranks,
            DiskPlace.at(root),
            step=step,
            keys=keys,
            fallback=fallback,
            mapping=mapping,
            believe=_believe(trust, expect_head),
            run=run,
        )


def _believe(trust: Any, expect_head: str | None) -> Any:
    keys = trusting.trusted_keys(trust)

    def believe(store: Store) -> None:
        held = trusting.held_keys(store.run, None)
        trusting.Trust(keys, held, expect_head).check(store)

    return believe


class _reading:  # noqa: N801
    """Ranks for one load."""

    def __init__(self, group: Any, timeout: float | None) -> None:
        self._group = Group(group, timeout=config.timeout(timeout))

    def __enter__(self) -> Group:
        return self._group

    def __exit__(self, *_: object) -> None:
        self._group.close()


def _session(
    root: str | os.PathLike[str], group: Any, run: str | None, key: Key | None, timeout: float | None
) -> Checkpointer:
    ranks = _ranks(group)
    name = (str(DiskPlace.at(root).root.resolve()), id(group) if group is not None else 0, ranks, os.getpid())
    with _lock:
        session = _sessions.get(name)
        if session is None or session.closed:
            session = _sessions[name] = Checkpointer(root, run=run, group=group, key=key, agent="off", timeout=timeout)
    session.must_hold(run)
    return session


def _ranks(group: Any) -> tuple[int, int]:
    """This process's rank and the number of ranks: a session of before ``init_process_group`` is another one."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)
