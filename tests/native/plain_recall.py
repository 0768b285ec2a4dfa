"""The slow and obvious form of `Recall.find` and `Looks.look`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Differs(Exception):
    """The state is not as the steps say."""


class PlainRecall:
    """As ``tierckpt._native.Recall``, with the same arguments."""

    def __init__(
        self, steps: Any, scalars: Any, is_value: Any, is_sharded: Any, *, leaves: int, values: int, per_rank: int
    ) -> None:
        self._steps, self._scalars, self._is_value, self._is_sharded = steps, scalars, is_value, is_sharded
        self._counts = leaves, values, per_rank

    def find(self, state: Any) -> Any:
        self.leaves, self.values, self.per_rank = ([None] * count for count in self._counts)
        self._parameters: list[tuple[Any, int]] = []
        try:
            self._match(self._steps, state, 0)
            self._compare_parameters()
        except Exception:  # what the asked functions raise means no, too
            return None
        return self.leaves, self.values, self.per_rank

    def _need(self, condition: object) -> None:
        if not condition:
            raise Differs

    def _put(self, where: list[Any], index: int, value: Any) -> None:
        if index >= 0:
            where[index] = value

    def _match(self, step: Any, value: Any, depth: int) -> None:
        kind = step[0]
        if kind in ("tensor", "per_rank"):
            self._need(type(value) is step[1])
            self._put(self.leaves if kind == "tensor" else self.per_rank, step[2], value)
        elif kind == "value":
            self._need(self._value(value, depth))
            self._put(self.values, step[1], value)
        elif kind == "mapping":
            self._need(type(value) is step[1] and len(value) == len(step[2]))
            for (key, item), known, child in zip(list(value.items()), step[2], step[3], strict=True):
                self._need(same_key(key, known))
                self._match(child, item, depth + 1)
            self._put(self.values, step[4], value)
        elif kind == "sequence":
            self._need(type(value) is step[1] and len(value) == len(step[2]))
            for item, child in zip(list(value), step[2], strict=True):
                self._match(child, item, depth + 1)
        elif kind == "module":
            self._module(step, value, depth)
        elif kind == "wrapper":
            self._need(type(value) is step[1])
            self._match(step[3], getattr(value, step[2]), depth)
        elif kind == "call":
            self._need(type(value) is step[1])
            state = step[2](value)
            self._need(state is not NotImplemented)
            self._match(step[3], state, depth + 1)
        elif kind == "optimizer":
            self._optimizer(step, value, depth)
        elif kind == "parameters":
            self._need(type(value) is list and len(value) == len(step[1]))
            self._parameters += zip(value, step[1], strict=True)
        elif kind == "names":
            self._need(type(value) is list and len(value) == len(step[1]))
            self._need(all(map(same_key, value, step[1])))
        elif kind == "none":
            self._need(value is None)
        elif kind == "empty":
            self._need(type(value) is dict and not value)
        else:
            assert kind == "anything"

    def _module(self, step: Any, module: Any, depth: int) -> None:
        _, kind, hooks, parameters, buffers, modules, persistent = step
        self._need(type(module) is kind)
        own = module.__dict__
        self._need("state_dict" not in own and "load_state_dict" not in own)
        names = (
            "_state_dict_hooks",
            "_state_dict_pre_hooks",
            "_load_state_dict_pre_hooks",
            "_load_state_dict_post_hooks",
        )
        if hooks == 0:
            self._need(not any(own[name] for name in names))
        elif hooks == 1:
            self._need(self._is_sharded(module) is True)
        self._match(parameters, own["_parameters"], depth)
        hidden = own["_non_persistent_buffers_set"]
        self._need([name not in hidden for name in buffers[2]] == list(map(bool, persistent)))
        self._match(buffers, own["_buffers"], depth)
        self._match(modules, own["_modules"], depth)

    def _optimizer(self, step: Any, optimizer: Any, depth: int) -> None:
        _, kind, ask, index, groups, states = step
        self._need(type(optimizer) is kind and ask(optimizer) is True)
        first = len(self._parameters)
        self._match(groups, optimizer.param_groups, depth)
        _, kind, numbers, children = states
        self._need(type(optimizer.state) is kind and len(optimizer.state) == len(children))
        for (key, entry), number, child in zip(list(optimizer.state.items()), numbers, children, strict=True):
            self._need(number < 0 or self._parameters[first + number][0] is key)
            self._match(child, entry, depth + 1)
        self._put(self.values, index, optimizer)

    def _value(self, value: Any, depth: int) -> bool:
        if type(value) in self._scalars:
            return True
        if depth >= 64:
            return False
        if type(value) in (list, tuple):
            return all(self._value(item, depth + 1) for item in value)
        if type(value) is dict:
            return all(self._value(item, depth + 1) for item in value.values())
        return self._is_value(value, depth) is True

    def _compare_parameters(self) -> None:
        strangers = [parameter for parameter, leaf in self._parameters if leaf < 0]
        self._need(len({id(each) for each in strangers}) == len(strangers))
        for each in strangers:
            self._need(not any(each is leaf for leaf in self.leaves))
        self._need(all(leaf < 0 or self.leaves[leaf] is parameter for parameter, leaf in self._parameters))


def same_key(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) in (str, int, bytes):
        return bool(a == b)
    return type(a) is tuple and len(a) == len(b) and all(map(same_key, a, b))


def look(first: Sequence[torch.Tensor], now: Sequence[torch.Tensor]) -> list[int] | None:
    """The addresses of plain tensors, all with elements, that look as they did at first; None if they do not."""

    def form(tensor: torch.Tensor) -> tuple[Any, ...]:
        return (
            type(tensor),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_cpu,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def pattern(tensors: Sequence[torch.Tensor], key: Any) -> list[int]:
        keys = [key(tensor) for tensor in tensors]
        return [keys.index(each) for each in keys]

    if list(map(form, first)) != list(map(form, now)):
        return None
    for key in (torch.Tensor.data_ptr, id):
        if pattern(first, key) != pattern(now, key):
            return None
    found = [tensor.data_ptr() for tensor in now]
    return found if all(found) else None
