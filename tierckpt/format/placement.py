"""Where the pieces of a layout lie in a shard, by the numbers of their tensors."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from tierckpt.errors import IntegrityError
from tierckpt.format.layout import Layout
from tierckpt.format.shard import Header


@dataclass(frozen=True)
class Placement:
    """Bytes of the shard at which pieces begin.

    Attributes:
        first: by tensor, of the only piece or of piece 0; -1 where the shard has none.
        more: by tensor and k, of the others.
        blob: where the blob begins and ends; None if there is none.
    """

    layout: Layout
    first: array[int]
    more: dict[tuple[int, int], int]
    blob: tuple[int, int] | None

    @staticmethod
    def of(layout: Layout, header: Header) -> Placement:
        """That of the shard of ``layout`` which has this header."""
        numbers = layout.numbers
        first = array("q", [-1]) * len(layout)
        more: dict[tuple[int, int], int] = {}
        for (tensor, k, _, _), offset in zip(header.pieces, header.offsets, strict=False):
            if k > 0:
                more[numbers[tensor], k] = offset
            else:
                first[numbers[tensor]] = offset
        blob = None if header.blob is None else (header.offsets[-1], header.size)
        return Placement(layout, first, more, blob)

    def offset(self, tensor: int, k: int) -> int:
        """Where piece ``k`` (-1: the only one) of a tensor begins.

        Raises:
            IntegrityError: it is not in this shard.
        """
        found = self.more.get((tensor, k), -1) if k > 0 else self.first[tensor]
        if found < 0:
            raise IntegrityError(f"there is no piece {k} of {self.layout.name(tensor)!r} in the shard")
        return found
