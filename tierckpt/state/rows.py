"""Rows of a copy table that are local tensors: learned once, then only their addresses are looked up."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import compress
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy
import torch

from tierckpt.errors import LayoutError
from tierckpt.format.boxes import Box
from tierckpt.state.devices import COPIED, HOST, place
from tierckpt.state.layout import PLAIN, Described, is_contiguous, local
from tierckpt.tiers.rows import Rows, strides

if TYPE_CHECKING:
    from tierckpt import _native
    from tierckpt.state.layout import Value


Places: TypeAlias = "tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]]"
"""For each row the index of an address, and the bytes from there to its first element."""


class Wanted(NamedTuple):
    """A row to be: ``box`` of a tensor (None: all of the piece), at byte ``offset``; ``number``: of the local piece."""

    name: str
    number: int
    offset: int
    box: Box | None


class Part(NamedTuple):
    """Rows that are copied together.

    Attributes:
        place: where their memory is: ``HOST`` or the number of a device.
        late: whether only an optimizer's step changes it.
        rows: which rows of the whole table they are.
    """

    place: int
    late: bool
    table: _native.CopyTable
    rows: list[bool]

    def pointers(self, every: array[int]) -> array[int]:
        """Of the addresses of all rows those of these."""
        return array("Q", compress(every, self.rows))


class _Form(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    place: int


class LocalRows:
    """Args:
    described: what this rank holds.
    wanted: the rows, in any order.
    """

    def __init__(self, described: Mapping[str, Described], wanted: Iterable[Wanted]) -> None:
        self.rows = Rows()
        # Equal shapes, strides and dtypes are the same objects.
        self.names: list[str] = []
        self.numbers: list[int] = []
        self._forms: list[_Form] = []
        self._add(described, wanted)

    def _add(self, described: Mapping[str, Described], wanted: Iterable[Wanted]) -> None:
        """First those of dense tensors, which are many and simple, then the others."""
        known: dict[_Form, _Form] = {}
        offsets, sizes, others = [], [], []
        for one in wanted:
            held, tensor = described[one.name].pieces[one.number]
            form = _Form(tensor.shape, tensor.stride(), tensor.dtype, place(tensor))
            form = known.setdefault(form, form)
            if is_contiguous(tensor) and form.place != COPIED and (one.box is None or one.box == held):
                offsets.append(one.offset)
                sizes.append(tensor.nbytes)
                self._know(one, form)
            else:
                others.append((one, form, held))
        self.rows.runs(offsets, sizes, [0] * len(sizes))
        for one, form, held in others:
            item, box = form.dtype.itemsize, one.box or held
            # What torch copies is in row-major order.
            steps = strides(held.size, item) if form.place == COPIED else [item * n for n in form.stride]
            # The pointers of the rows are the distances from the first element of the local tensor.
            self.rows.add(one.offset, item, box, box, held, 0, steps)
            self._know(one, form)

    def _know(self, one: Wanted, form: _Form) -> None:
        self.names.append(one.name)
        self.numbers.append(one.number)
        self._forms.append(form)

    def __len__(self) -> int:
        return len(self.names)

    def late(self, names: Container[str]) -> list[bool]:
        """Which rows are memory itself of the tensors ``names``."""
        return [name in names and form.place != COPIED for name, form in zip(self.names, self._forms, strict=True)]

    def places(self) -> list[int]:
        """Where the memory of each row is; what torch copies is at the host."""
        return [max(form.place, HOST) for form in self._forms]

    def pointers(self, tensors: Mapping[str, Value]) -> tuple[array[int], list[object]]:
        """The address of the first element of each row as it is now, and what must be kept alive while they are used.

        Raises ``LayoutError`` naming a tensor that is not there any more or looks different from when these were made.
        """
        keep: list[object] = []
        found = array("Q")
        lists: dict[str, list[torch.Tensor]] = {}
        for name, number, form in zip(self.names, self.numbers, self._forms, strict=True):
            value = tensors.get(name)
            if value is None:
                raise LayoutError(f"{name}: it is not in the state any more; plan anew")
            if type(value) in PLAIN:
                tensor = cast(torch.Tensor, value)
            else:
                if name not in lists:
                    lists[name] = local(value)
                tensor = lists[name][number]
            now = _Form(tensor.shape, tensor.stride(), tensor.dtype, place(tensor))
            if now != form:
                raise LayoutError(
                    f"{name}: planned as {form.dtype} {list(form.shape)} with strides {list(form.stride)}, now it is "
                    f"{now.dtype} {list(now.shape)} with {list(now.stride)}; plan anew"
                )
            if form.place == COPIED:
                tensor = host(tensor)
                keep.append(tensor)
            found.append(tensor.data_ptr())
        return array("Q", map(add, found, self.rows.pointers)), keep

    def at(self, rows: Mapping[tuple[str, int], int]) -> Places:
        """For `pointers_at`: where in a column of addresses those of these rows stand.

        ``rows``: the index of each local tensor, by name and by its number in ``Described.pieces``.
        """
        numbers = [rows[key] for key in zip(self.names, self.numbers, strict=True)]
        steps = numpy.array(self.rows.pointers[: len(self)], dtype=numpy.uint64)
        return numpy.array(numbers, dtype=numpy.int64), steps

    @staticmethod
    def pointers_at(addresses: array[int], places: Places) -> array[int]:
        """The same as `pointers`, of tensors that are known to look as they did."""
        numbers, steps = places
        found = array("Q")
        found.frombytes((numpy.frombuffer(addresses, dtype=numpy.uint64)[numbers] + steps).tobytes())
        return found


def parts(rows: Rows, places: Sequence[int], late: Sequence[bool]) -> list[Part]:
    """``rows`` in parts, by where their memory is and whether it may be copied late; those of devices come first."""
    kinds = sorted(set(zip(places, late, strict=True)), key=lambda kind: (kind[1], -kind[0]))
    found = []
    for kind in kinds:
        chosen = [each == kind for each in zip(places, late, strict=True)]
        found.append(Part(*kind, rows.table(chosen), chosen))
    return found


def host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's values in memory of the host, in row-major order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
