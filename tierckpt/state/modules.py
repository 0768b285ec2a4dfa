"""What an ``nn.Module`` saves: a direct walk of its parameters and persistent buffers.

Submodules that customise their state dict (hooks, overridden methods, extra state) take their own
``state_dict()`` and get their own ``load_state_dict()``; the rest of the model is still walked. FSDP2's hooks
only bring a module into its sharded state, so they are called and do not count. What FSDP1 has flattened is saved
under the names and shapes that it had before (see `fsdp1`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tierckpt.errors import StateError
from tierckpt.state import fsdp1
from tierckpt.state.adapters import FlatPart

# Children of wrappers that leave no trace in names: torch.compile and activation checkpointing.
TRANSPARENT = ("_orig_mod", "_checkpoint_wrapped_module")
_HOOKS = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_SAVERS = ("state_dict", "_save_to_state_dict", "get_extra_state", "set_extra_state", "load_state_dict")
_FSDP2 = "torch.distributed.fsdp._fully_shard"


@dataclass
class Part:
    """A submodule that loads its own state dict. ``entries``: its keys, and where in ``Contents.keys``."""

    module: nn.Module
    entries: list[tuple[str, int]]
    metadata: Any

    def state(self, items: list[Any]) -> OrderedDict[str, Any]:
        """The state dict to load, with ``items``, one for each entry."""
        state: OrderedDict[str, Any] = OrderedDict(zip([key for key, _ in self.entries], items, strict=True))
        if self.metadata is not None:
            state._metadata = self.metadata  # type: ignore[attr-defined]
        return state


@dataclass
class Contents:
    """Qualified names and what stands under each, in the order of ``state_dict()``.

    ``parameters``: by id, the first name of each. ``flat``: by id, what this rank holds of those that FSDP1 has
    flattened.
    """

    keys: list[str] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    parameters: dict[int, str] = field(default_factory=dict)
    flat: dict[int, FlatPart] = field(default_factory=dict)


def contents(module: nn.Module, *, what: Callable[[], str]) -> Contents:
    """What ``module`` saves. Tied parameters appear under all their names.

    Raises ``StateError`` (``what`` says where the module stands) for names that collide, and for modules with state
    dicts of their own, and other things that cannot be taken apart, in FSDP1.
    """
    found = Contents()
    _Walk(found, what).visit(module, "")
    if len(set(found.keys)) != len(found.keys):
        twice = sorted({key for key in found.keys if found.keys.count(key) > 1})
        raise StateError(f"{what()}: several parameters or buffers are called {', '.join(twice[:5])}")
    return found


class _Walk:
    def __init__(self, found: Contents, what: Callable[[], str]) -> None:
        self._found, self._what = found, what
        self._open: set[int] = set()  # modules on the way from the root, by id
        self._flat: dict[int, list[fsdp1.Flattened]] = {}  # by id of the module that has them

    def visit(self, module: nn.Module, prefix: str) -> None:
        kind: Any = type(module)
        how = trait(kind)
        if how == "wrapper":
            self.visit(module.module, prefix)  # type: ignore[arg-type]
            return
        if how == "fsdp1":
            for flattened in fsdp1.flattened(module, what=self._what):
                self._flat.setdefault(id(flattened.module), []).append(flattened)
            self.visit(module._fsdp_wrapped_module, prefix)  # type: ignore[arg-type]
            return
        if id(module) in self._open:
            name = prefix.rstrip(".") or type(module).__name__
            raise StateError(f"{self._what()}: module {name} contains itself")
        if has_foreign_hooks(module) or how == "custom" or _patched(module):
            if any(id(part) in self._flat for part in module.modules()) or _has_fsdp1(module):
                raise StateError(
                    f"{self._what()}: {prefix.rstrip('.') or kind.__name__} has a state dict of its own, with parameters "
                    "that FSDP1 has flattened; use fully_shard"
                )
            _take_state_dict(module, prefix, self._found)
            return
        self._take(module, prefix)
        if module._modules:
            self._open.add(id(module))
            for name, child in module._modules.items():
                if child is not None:
                    self.visit(child, prefix if name in TRANSPARENT else f"{prefix}{name}.")
            self._open.discard(id(module))

    def _take(self, module: nn.Module, prefix: str) -> None:
        """The parameters and buffers that the module itself has."""
        found = self._found
        keys, items = found.keys, found.items
        flat = self._flat.get(id(module), ())
        for flattened in flat:
            key = prefix + flattened.name
            keys.append(key)
            items.append(flattened.value)
            if flattened.parameter is not None:
                found.parameters.setdefault(id(flattened.parameter), key)
                if flattened.part is not None:
                    found.flat[id(flattened.parameter)] = flattened.part
        hidden = {fsdp1.FLAT_PARAMETER, *(flattened.name for flattened in flat)} if self._flat else ()
        for name, parameter in module._parameters.items():
            if parameter is not None and name not in hidden:
                key = prefix + name
                keys.append(key)
                items.append(parameter)
                found.parameters.setdefault(id(parameter), key)
        transient = module._non_persistent_buffers_set
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in transient:
                keys.append(prefix + name)
                items.append(buffer)


def _has_fsdp1(module: nn.Module) -> bool:
    kinds: set[Any] = set(map(type, module.modules()))
    return any(trait(kind) == "fsdp1" for kind in kinds)


@lru_cache(maxsize=4096)
def trait(kind: type[nn.Module]) -> str:
    """One of "wrapper", "fsdp1", "transparent", "custom" (its class customises the state dict), "plain"."""
    if issubclass(kind, (DistributedDataParallel, DataParallel)):
        return "wrapper"
    if any(base.__name__ == "FullyShardedDataParallel" for base in kind.__mro__):
        return "fsdp1"
    if any(base.__name__ in ("OptimizedModule", "ActivationWrapper") for base in kind.__mro__):
        return "transparent"
    if any(getattr(kind, name) is not getattr(nn.Module, name) for name in _SAVERS):
        return "custom"
    # torch's own overrides of this one only upgrade old versions.
    loader = kind._load_from_state_dict
    if loader is not nn.Module._load_from_state_dict and not loader.__module__.startswith("torch.nn.modules."):
        return "custom"
    return "plain"


def _patched(module: nn.Module) -> bool:
    return "state_dict" in module.__dict__ or "load_state_dict" in module.__dict__


def has_hooks(module: nn.Module) -> bool:
    """Whether there are state-dict hooks, of whatever kind."""
    return bool(module._state_dict_hooks) or any(getattr(module, stage) for stage in _HOOKS)


def has_foreign_hooks(module: nn.Module) -> bool:
    """Whether there are state-dict hooks but FSDP2's. Those are called, which shards the parameters."""
    kind: Any = type(module)
    if trait(kind) == "transparent":
        return False  # their hooks only do to names what we do
    if module._state_dict_hooks:
        return True
    foreign = False
    for stage in _HOOKS:
        hooks = getattr(module, stage)
        if not hooks:
            continue
        for hook in hooks.values():
            hook = getattr(hook, "hook", hook)
            if not getattr(hook, "__module__", "").startswith(_FSDP2):
                foreign = True
            elif stage == "_state_dict_pre_hooks":
                hook(module, "", True)
    return foreign


def _take_state_dict(module: nn.Module, prefix: str, found: Contents) -> None:
    if type(module).state_dict is nn.Module.state_dict or prefix:
        state: Any = module.state_dict(prefix=prefix, keep_vars=True)
    else:  # an override need not take arguments, unless it is called for a submodule
        state = module.state_dict()
    entries = []
    for key, item in state.items():
        entries.append((key[len(prefix) :] if key.startswith(prefix) else key, len(found.keys)))
        found.keys.append(_strip(key))
        found.items.append(item)
    found.parts.append(Part(module, entries, getattr(state, "_metadata", None)))
    for key, parameter in module.named_parameters(prefix=prefix.rstrip("."), remove_duplicate=False):
        found.parameters.setdefault(id(parameter), _strip(key))


def _strip(key: str) -> str:
    for name in TRANSPARENT:
        key = key.replace(name + ".", "")
    return key
