"""A checkpoint as one file for ``torch.load(…, weights_only=True)``. The only part of ``export`` that imports torch."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import Any

import numpy
import torch

import tierckpt
from tierckpt.cli.safetensors_file import Exported
from tierckpt.errors import LayoutError, StoreError
from tierckpt.format import names
from tierckpt.format.layout_plan import ranges
from tierckpt.format.values import shown
from tierckpt.telling import a
from tierckpt.tiers.content import Content

NAME = "checkpoint.pt"

#: What ``torch.load(…, weights_only=True)`` takes as it is.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device)


def export(content: Content, folder: Path, *, keys: Sequence[str] | None, notes: list[str]) -> Exported:
    """Write the state as :func:`tierckpt.read` nests it; what was converted is added to ``notes``.

    Raises:
        IntegrityError, IncompleteError, UntrustedError: the checkpoint is damaged, or not to be believed.
        StoreError: nothing matches, or the state holds what cannot be written; all of it is listed.
    """
    store, manifest = content.store, content.manifest
    try:
        state = tierckpt.read(store.url, manifest.step, keys, fallback=False, run=store.run)
    except LayoutError as error:
        raise StoreError(str(error)) from None
    _note_other_ranks(content, keys, notes)
    plain = _Plain(notes)
    state = plain.of(state, ())
    if plain.refused:
        raise StoreError(
            "torch.load(…, weights_only=True) could not read these, and there is no plain form of them; leave them out "
            f"with --keys: {', '.join(plain.refused)}"
        )
    with open(folder / NAME, "xb") as out:
        torch.save(state, out)
        out.flush()
        os.fsync(out.fileno())
    torch.load(folder / NAME, map_location="cpu", weights_only=True, mmap=True)  # reads no tensor
    return Exported([NAME], len(plain.tensors), sum(plain.tensors.values()))


def _note_other_ranks(content: Content, keys: Sequence[str] | None, notes: list[str]) -> None:
    """Of values that are a rank's own, a process that reads alone gets those of rank 0: say which others there are."""
    of: dict[str, list[int]] = {}
    for rank, known in content.own.items():
        for name in known:
            of.setdefault(name, []).append(rank)
    for name, ranks in of.items():
        if ranks != [0] and (keys is None or names.matches(names.split(name), keys)):
            others = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges([rank for rank in ranks if rank]))
            told = f"that of rank 0 is written, not those of ranks {others}"
            if ranks[0] != 0:
                told = f"left out: rank 0 has none, but ranks {others}"
            notes.append(f"{names.dotted(names.split(name))}: a PerRank value; {told}")


_REFUSED: Any = object()
"""Stands where something has no plain form."""


class _Plain:
    """Converts a state to types that ``torch.load`` takes with ``weights_only=True``."""

    def __init__(self, notes: list[str]) -> None:
        self.refused: list[str] = []
        #: Bytes of every tensor, by identity: tied ones count once.
        self.tensors: dict[int, int] = {}
        self._notes = notes

    def of(self, value: Any, path: tuple[Any, ...]) -> Any:
        """``value``, or what stands for it."""
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value.nbytes
            return value
        if kind in _PLAIN:
            return value
        if kind is list:
            return [self.of(item, (*path, i)) for i, item in enumerate(value)]
        if kind is tuple:
            return tuple([self.of(item, (*path, i)) for i, item in enumerate(value)])
        if kind in (dict, OrderedDict, Counter):
            keys = self._keys(value, path)
            items = {keys[key]: self.of(item, (*path, key)) for key, item in value.items()}
            # A dict: of pairs, a Counter would be how often there is each.
            return items if kind is dict else kind(items)
        if kind in (set, frozenset):
            if kind is frozenset:
                self._note(path, "a frozenset, as a set")
            return set(self._keys(value, path).values())
        return self._converted(value, path)

    def _keys(self, found: Iterable[Any], path: tuple[Any, ...]) -> dict[Any, Any]:
        """What stands for each key of a dict or item of a set. Those that become the same are refused."""
        keys = {key: self._key(key, path) for key in found}
        alike: dict[Any, list[Any]] = {}
        for key, plain in keys.items():
            alike.setdefault(plain, []).append(key)
        for plain, several in alike.items():
            if len(several) > 1 and plain is not _REFUSED:
                self.refused.append(
                    f"{_dotted(path)} ({' and '.join(map(shown, several))} would both be {shown(plain)})"
                )
        return keys

    def _key(self, key: Any, path: tuple[Any, ...]) -> Any:
        found = self.of(key, (*path, key))
        try:
            hash(found)
        except TypeError:
            self.refused.append(f"{_dotted(path)} ({type(key).__name__} as a key)")
            return _REFUSED
        return found

    def _converted(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, (datetime, date, time)):
            self._note(path, f"{a(value)}, as text")
            return value.isoformat()
        if isinstance(value, timedelta):
            self._note(path, "a timedelta, as seconds")
            return value.total_seconds()
        if isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in "biufcUS":
            if value.dtype.kind in "US" or isinstance(value, numpy.generic):
                self._note(path, f"numpy {value.dtype}, as plain values")
                return value.tolist()
            self._note(path, f"a numpy array of {value.dtype}, as a tensor")
            tensor = torch.from_numpy(
                numpy.ascontiguousarray(value, value.dtype.newbyteorder("=")).reshape(value.shape)
            )
            self.tensors[id(tensor)] = tensor.nbytes
            return tensor
        what = f"numpy {value.dtype}" if isinstance(value, (numpy.ndarray, numpy.generic)) else type(value).__name__
        self.refused.append(f"{_dotted(path)} ({what})")
        return _REFUSED

    def _note(self, path: tuple[Any, ...], what: str) -> None:
        self._notes.append(f"{_dotted(path)}: {what}")


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path)) or "the state"
