"""What a torch that the package takes may lack itself. Tests that need it are left out there, and say why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

_FSDP2 = Path(torch.__file__).parent / "distributed" / "fsdp" / "_fully_shard" / "_fsdp_param.py"

#: 2.6
fsdp2_trains_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of this torch trains on GPUs only"
)
#: 2.6
fsdp2_cuts_unevenly = pytest.mark.skipif(
    "FSDP+TP sharding does not support uneven sharding" in _FSDP2.read_text(),
    reason="FSDP2 of this torch takes no sizes that do not divide over tensor parallelism",
)


def dtype(*names: str) -> pytest.MarkDecorator:
    """These dtypes of torch."""
    missing = [name for name in names if not hasattr(torch, name)]
    return pytest.mark.skipif(bool(missing), reason=f"this torch has no {', '.join(missing)}")
