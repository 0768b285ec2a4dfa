"""Every error that tierckpt raises on purpose. All derive from ``TierckptError``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence


class TierckptError(Exception):
    """Base of all errors of this package."""


class IntegrityError(TierckptError):
    """Bytes are not what they should be. The message names file, chunk, what was expected and what was found."""


class UntrustedError(TierckptError):
    """A signature, a key or the head of a chain is not one that is trusted."""


class IncompleteError(TierckptError):
    """There is nothing complete to restore. The message says what is missing."""


class AbsentError(IncompleteError):
    """There is no checkpoint of the step that was asked for. The message says why, and which there are."""


class LayoutError(TierckptError):
    """Keys, shapes, dtypes or pieces do not fit. The message lists every one."""


class StateError(TierckptError):
    """A value cannot be encoded, or a template cannot take a value. The message names its path."""


class OutOfStepError(StateError):
    """Ranks came to different saves. ``tags`` has what each rank said of the one that it was at."""

    def __init__(self, text: str, tags: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.tags = list(tags)


class StoreError(TierckptError):
    """Storage refused an operation. The message names the path and the cause."""


class LostContactError(StoreError):
    """Another rank died or did not come in time. What it was about to do may or may not have happened."""


class AgentLostError(StoreError):
    """The agent has died, or was replaced: what it held is gone."""


class AgentSilentError(AgentLostError):
    """The agent is there but does not answer: it is stopped, or its memory is swapped out. It may come back with all it held."""


class DeviceError(TierckptError):
    """A GPU refused a copy. The message says what its driver said."""


class ArenaFullError(TierckptError):
    """No slot is free. The message says what is needed, what is held and the budget."""


class RanksBehindError(ArenaFullError):
    """No memory is free, since other ranks have not come to the saves that hold it."""


class FencedError(TierckptError):
    """A newer generation of the run exists; this process can commit nothing any more."""


class TornSnapshotError(TierckptError):
    """State changed while it was being copied; the snapshot was discarded."""


class SkippedError(TierckptError):
    """The step will never reach this tier: it was skipped or overtaken."""


class StepExistsError(TierckptError):
    """This generation has already saved this step."""


def of_system(error: OSError) -> bool:
    """Whether the operating system said it. Else a signal handler raised it, as a TimeoutError say, and it is the caller's."""
    return error.errno is not None


@contextlib.contextmanager
def tolerating(*kinds: type[Exception]) -> Iterator[None]:
    """Nothing of these kinds is raised, unless a signal handler raised it (see :func:`of_system`)."""
    try:
        yield
    except kinds as error:
        if isinstance(error, OSError) and not of_system(error):
            raise


def named_kind(name: object) -> type[TierckptError]:
    """The class that has this name, as :func:`kind_of` gives it to other processes; `StoreError` if none has."""
    found = globals().get(name) if isinstance(name, str) else None
    return found if isinstance(found, type) and issubclass(found, TierckptError) else StoreError


def kind_of(error: BaseException) -> str:
    """What another process is to raise for ``error``: its class, or the nearest one that stands here."""
    names = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)
    return next(names, StoreError.__name__ if isinstance(error, OSError) else TierckptError.__name__)
