"""What the golden stores hold. Change nothing that a store which is checked in was made of: add.

Each function gives the state as it was saved (``live``) or as a reader finds it, who has no template: classes of the
user come back as plain values.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn

from tierckpt.format.shard import DTYPES

# Steps of the store "chain", of which 10 was retired.
STEPS = (20, 30, 40)


class Color(Enum):
    RED = "red"


Point = namedtuple("Point", "x y")
NAN = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]


def pattern(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Bytes 11, 48, 85, …; bools are every third."""
    count = prod(shape) * dtype.itemsize
    data = bytes((i * 37 + 11) % 256 if dtype != torch.bool else i % 3 == 0 for i in range(count))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def numbers(*shape: int, start: int = 1) -> torch.Tensor:
    return torch.arange(start, start + prod(shape), dtype=torch.float32).reshape(shape)


def plain(live: bool) -> dict[str, Any]:
    """One rank: every dtype, every kind of value, odd names."""
    tied = pattern(torch.float32, 4, 3)
    return {
        "dtypes": {name: pattern(getattr(torch, name), 3, 5) for name in DTYPES if hasattr(torch, name)},
        "shapes": [pattern(torch.int16), torch.empty(0, 3), pattern(torch.int64, 1, 2, 3, 4), tied.t(), tied[:, ::2]],
        "bits": torch.tensor([0x7FC00001, -0x400000, -(2**31), 1], dtype=torch.int32).view(torch.float32),
        "conj": torch.tensor([1 + 2j, -3.5j]).conj(),
        "tied": (tied, tied),
        "odd keys": {
            "a/b": numbers(1),
            "~#": numbers(2),
            "": numbers(3),
            "7": numbers(4),
            7: numbers(5),
            "é": numbers(6),
        },
        "typed keys": OrderedDict([(True, numbers(1)), (None, 1), ((1, "x"), numbers(2)), (-2, numbers(3)), (2.5, 2)]),
        "named": Point(numbers(2), 1) if live else (numbers(2), 1),
        "values": values(live),
        "array": np.arange(300, dtype=np.int64).reshape(3, 100),
        "empty": {"dict": {}, "list": [], "tuple": (), "set": set(), "OrderedDict": OrderedDict()},
    }


def values(live: bool) -> dict[str, Any]:
    return {
        "simple": [None, True, False, 0, -1, 2**53 - 1, "text \u2028 \U0001f600", ""],
        "int": [2**53, -(2**53), 10**40, -(10**40)],
        "float": [0.1, -0.0, 1e308, 5e-324, math.inf, -math.inf, math.nan, NAN],
        "complex": [1 + 2j, complex(-0.0, math.nan)],
        "bytes": (b"\0\xff", bytearray(b"abc"), b""),
        "sets": [{1, 2, "x"}, frozenset({(1, 2)})],
        "mappings": [{1: 2, "1": 3}, OrderedDict(b=1, a=2), Counter("abca")],
        "default": defaultdict(list, a=[1]) if live else {"a": [1]},
        "numpy": [np.float32(1.5), np.int8(-1), np.bool_(True), np.arange(6, dtype=">i4").reshape(2, 3)],
        "numpy texts": [np.array(["a", "bc"]), np.array([b"x"]), np.datetime64("2026-01-02"), np.array(7)],
        "torch": [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])],
        "times": [
            datetime(2026, 1, 2, 3, 4, 5, 6),
            datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=5, minutes=45)), fold=1),
            date(1, 1, 1),
            time(23, 59, 59),
            timedelta(days=-1, seconds=1, microseconds=2),
        ],
        "enum": Color.RED if live else "red",
        "named": Point(1, "y") if live else (1, "y"),
    }


class Model(nn.Module):
    """Sizes that neither two nor four ranks divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 13)
        self.down = nn.Linear(13, 7)
        self.norm = nn.LayerNorm(3)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(numbers(*parameter.shape, start=1000 * number))


def mesh() -> dict[str, Any]:
    """Four ranks, FSDP2 × tensor parallelism: all parameters, and what AdamW keeps of each."""
    model = Model().state_dict()
    state = {
        name: {"step": torch.tensor(7.0), "exp_avg": values + 0.25, "exp_avg_sq": values + 0.5}
        for name, values in model.items()
    }
    return {"model": dict(model), "state": state, "data": {"epoch": 3, "seen": [1, 2]}, "lr": 0.125}


FUSED = (8, 3)


def pieces() -> dict[str, Any]:
    """Two ranks with pieces of their own: two of ``fused`` each, and rows of all sizes."""
    return {"fused": numbers(*FUSED), "rows": pattern(torch.bfloat16, 5, 2), "both": numbers(4)}


def boxes(rank: int) -> dict[str, list[tuple[int, int]]]:
    """First row and number of rows of each piece of a rank."""
    return {"fused": [(4 + 2 * rank, 2), (2 * rank, 2)], "rows": [(0, 1)] if rank == 0 else [(1, 4)]}


def own(rank: int) -> dict[str, Any]:
    """What a rank of "pieces" has for itself."""
    return {"name": f"rank {rank}", "tensor": pattern(torch.uint8, 3 + rank), "list": [rank] * rank}


METADATA = {"loss": 0.5, "commit": "abc"}


def chain(step: int) -> dict[str, Any]:
    return {"w": numbers(3, start=step), "step": step}
