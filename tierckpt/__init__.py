"""tierckpt: tiered, verified, signed checkpoints for training large models.

Nothing here imports torch until something that needs it is used, so that stores can be listed and verified without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierckpt.agent.handle import Handle, SaveInfo
    from tierckpt.checkpointer import Checkpointer
    from tierckpt.config import Disk, KeepEvery, KeepLast, Ram
    from tierckpt.errors import (
        ArenaFullError,
        DeviceError,
        FencedError,
        IncompleteError,
        IntegrityError,
        LayoutError,
        LostContactError,
        OutOfStepError,
        RanksBehindError,
        SkippedError,
        StateError,
        StepExistsError,
        StoreError,
        TierckptError,
        TornSnapshotError,
        UntrustedError,
    )
    from tierckpt.functional import async_save, load, read, save
    from tierckpt.inspection import latest, prune, steps, verify
    from tierckpt.restore.load import LoadInfo
    from tierckpt.state.adapters import pieces_of
    from tierckpt.state.mapping import Fuse, Mapping, Rename, Split
    from tierckpt.state.marks import PerRank, Pieces
    from tierckpt.state.position import DataPosition
    from tierckpt.state.rng import rng_state

__version__ = "0.1.0"

_HOMES = {
    "agent.handle": ("Handle", "SaveInfo"),
    "checkpointer": ("Checkpointer",),
    "config": ("Disk", "KeepEvery", "KeepLast", "Ram"),
    "errors": (
        "ArenaFullError",
        "DeviceError",
        "FencedError",
        "IncompleteError",
        "IntegrityError",
        "LayoutError",
        "LostContactError",
        "OutOfStepError",
        "RanksBehindError",
        "SkippedError",
        "StateError",
        "StepExistsError",
        "StoreError",
        "TierckptError",
        "TornSnapshotError",
        "UntrustedError",
    ),
    "functional": ("async_save", "load", "read", "save"),
    "inspection": ("latest", "prune", "steps", "verify"),
    "restore.load": ("LoadInfo",),
    "state.adapters": ("pieces_of",),
    "state.mapping": ("Fuse", "Mapping", "Rename", "Split"),
    "state.marks": ("PerRank", "Pieces"),
    "state.position": ("DataPosition",),
    "state.rng": ("rng_state",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_NEED_TORCH = frozenset({"checkpointer", "functional", "restore.load", "state.adapters", "state.marks", "state.rng"})

__all__ = [
    "ArenaFullError",
    "Checkpointer",
    "DataPosition",
    "DeviceError",
    "Disk",
    "FencedError",
    "Fuse",
    "Handle",
    "IncompleteError",
    "IntegrityError",
    "KeepEvery",
    "KeepLast",
    "LayoutError",
    "LoadInfo",
    "LostContactError",
    "Mapping",
    "OutOfStepError",
    "PerRank",
    "Pieces",
    "Ram",
    "RanksBehindError",
    "Rename",
    "SaveInfo",
    "SkippedError",
    "Split",
    "StateError",
    "StepExistsError",
    "StoreError",
    "TierckptError",
    "TornSnapshotError",
    "UntrustedError",
    "async_save",
    "latest",
    "load",
    "pieces_of",
    "prune",
    "read",
    "rng_state",
    "save",
    "steps",
    "verify",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f".{home}", __name__)
    except ModuleNotFoundError as error:
        if error.name != "torch" or home not in _NEED_TORCH:
            raise
        raise ImportError(
            f"tierckpt.{name} needs PyTorch, which is not installed: install torch 2.6 or newer (pip install 'tierckpt[torch]')"
        ) from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
