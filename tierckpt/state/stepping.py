"""Whether an optimizer's next step will be heard of before it changes anything: only then may its state be copied while
training goes on.

torch calls the hooks that come before a step in a wrapper that it puts around the ``step`` of the optimizer's class. They are
not called where something else stands in its place (a function put into the instance, a decorator that looks like the wrapper) or
where the step was compiled: then what was traced runs, without them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch.optim import Optimizer


def _hooking_code() -> object:
    """The code of torch's wrapper; None if this torch has another way."""
    wrap: Any = getattr(Optimizer, "profile_hook_step", None)
    return None if wrap is None else wrap(_hooking_code).__code__


_HOOKING = _hooking_code()
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")

# Steps were compiled in this process: whichever they are, they do not say.
_compiled = False


def is_heard(optimizer: Optimizer) -> bool:
    """Whether hooks run before the next step of ``optimizer``, as far as anybody can see."""
    if _compiled or _HOOKING is None:
        return False
    function = type(optimizer).step
    own: Any = optimizer.__dict__.get("step")
    if own is not None and _inner(own, function) is not function:
        return False
    return getattr(_inner(function, None), "__code__", None) is _HOOKING


def _inner(function: Any, wanted: Any) -> Any:
    """``wanted``, or what calls the hooks, where only wrappers of torch itself stand before it: LR schedulers count steps."""
    function = getattr(function, "__func__", function)
    while function is not wanted:
        code = getattr(function, "__code__", None)
        if code is None or code is _HOOKING or not code.co_filename.startswith(_TORCH):
            break
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            break
        function = inner
    return function


def compiled() -> None:
    """A step is being traced, and what comes of it will run without hooks."""
    global _compiled
    _compiled = True


def is_under_way() -> bool:
    """Whether the calling thread is inside of an optimizer's step: in a closure, or in another hook."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code is _HOOKING:
            return True
        frame = frame.f_back
    return False


__all__ = ["compiled", "is_heard", "is_under_way"]
