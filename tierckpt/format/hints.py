"""What to store instead of a value that cannot be stored, for messages."""

from __future__ import annotations

import sys

_SUPPORTED = (
    "supported are None, bool, int, float, complex, str, bytes, lists, tuples, sets, dicts, dates, enums, named tuples, "
    "plain values of numpy and torch; in dicts, lists and tuples of a state also tensors, modules, and objects with both "
    "state_dict() and load_state_dict()"
)

_CODE = "code is not stored: leave it out, or store the name by which the program knows it"
_BASE = "store {}(…) of it"
#: By module and class, of which none is imported here: what has a value of it has imported them. The first one counts.
_INSTEAD = (
    ("argparse", "Namespace", "store vars(…) of it"),
    ("types", "SimpleNamespace", "store vars(…) of it"),
    ("pathlib", "PurePath", "store str(…) of it"),
    ("random", "Random", "store its getstate(), and set it after the load"),
    ("torch", "Generator", "store its get_state(), and set it after the load"),
    ("numpy.random", "Generator", "store its bit_generator.state, and set it after the load"),
    ("numpy.random", "RandomState", "store its get_state(), and set it after the load"),
    ("torch.utils.data", "DataLoader", "it has no position to save: a tierckpt.DataPosition in the state is one"),
    ("types", "FunctionType", _CODE),
    ("types", "BuiltinFunctionType", _CODE),
    ("types", "MethodType", _CODE),
    ("types", "ModuleType", _CODE),
    ("functools", "partial", _CODE),
    ("builtins", "type", _CODE),
    ("collections", "deque", _BASE.format("list")),
    ("builtins", "range", _BASE.format("list")),
    *(("builtins", base, _BASE.format(base)) for base in ("dict", "list", "tuple", "set", "frozenset")),
    *(("builtins", base, _BASE.format(base)) for base in ("str", "bytes", "int", "float")),
)


def instead_of(value: object) -> str:
    """What to do about ``value``, else what could be stored."""
    if not isinstance(value, type):
        there, missing = "state_dict", "load_state_dict"
        if not callable(getattr(value, there, None)):
            there, missing = missing, there
        if callable(getattr(value, there, None)) and not callable(getattr(value, missing, None)):
            return f"it has {there}() but no {missing}(); with both it is saved as its state_dict()"
    for module, name, hint in _INSTEAD:
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and isinstance(value, kind):
            return hint
    return _SUPPORTED
