"""The random number generators of a process, as a leaf of the state."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from tierckpt.state.marks import PerRank
from tierckpt.telling import a


def rng_state() -> PerRank:
    """A leaf that saves the state of this rank's generators and restores it on load.

    Covers Python's ``random``, numpy's global generator where numpy is imported, torch's CPU generator and,
    once CUDA is initialised, those of all CUDA devices.
    """
    return PerRank(Generators())


class Generators:
    """The global generators; live, so it captures when saved and not when made."""

    def __repr__(self) -> str:
        return "rng_state()"

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = numpy.random.get_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def misfit(self, state: object) -> str | None:
        """Why this is no state for `load_state_dict`, None if it is one. A load asks before it touches anything."""
        if not isinstance(state, dict):
            return f"expected the state of generators, found {a(state)}"
        try:
            random.Random().setstate(state["python"])
            torch.Generator().set_state(state["torch"])
            if "numpy" in state:
                import numpy

                numpy.random.RandomState().set_state(state["numpy"])
        except Exception as error:
            return f"not the state of generators: {type(error).__name__}: {error}"
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            # A rank may see fewer devices than when it saved; those it has continue.
            for device, cuda in enumerate(state["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(cuda, device)
