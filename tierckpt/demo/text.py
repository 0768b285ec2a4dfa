"""Real text that every machine with Python has: the sources of the standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def library_sources(limit: int = 2_000_000) -> Tensor:
    """The first ``limit`` bytes of the standard library's modules in the order of their names: uint8 [n]."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


class Windows:
    """Hands out windows of the text, in a new random order each time that all have been seen.

    Where it stands is one number, the same on all ranks: a checkpoint of it is exact in any world.
    """

    def __init__(self, text: Tensor, length: int, seed: int) -> None:
        self.count = (len(text) - 1) // length
        self.text = text
        self.length = length
        self.seed = seed
        self.position = 0
        self._order: tuple[int, Tensor] | None = None

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def next(self, rank: int, world: int, batch: int) -> tuple[Tensor, Tensor]:
        """This rank's share of the next ``world * batch`` windows: tokens, targets, int64 [batch, length]."""
        first = self.position + rank * batch
        self.position += world * batch
        rows = torch.stack([self._window(index) for index in range(first, first + batch)])
        return rows[:, :-1], rows[:, 1:]

    def _window(self, index: int) -> Tensor:
        epoch, within = divmod(index, self.count)
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._order = epoch, torch.randperm(self.count, generator=generator)
        begin = int(self._order[1][within]) * self.length
        return self.text[begin : begin + self.length + 1].long()
