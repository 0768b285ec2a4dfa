"""A user's state, taken apart into named leaves and put back: the front of the modules that do it."""

from tierckpt.state.flat import Flat, flatten
from tierckpt.state.nodes import build, names_of
from tierckpt.state.target import Saved, Target, unexpected_problems

__all__ = ["Flat", "Saved", "Target", "build", "flatten", "names_of", "unexpected_problems"]
