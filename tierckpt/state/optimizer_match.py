"""How a checkpoint's optimizer state gets into a live optimizer. ``step()`` is never called.

* Parameters match by name, never by position (unless both sides have positions only, and the same shapes).
* A parameter without any state in the checkpoint never had a gradient: it has no state after the load either;
  what the live optimizer has for it is removed. State that is only partly there is refused.
* A group gets the hyperparameters of the saved group of its parameters, types included. Groups of several
  pipeline stages may be merged into one if their hyperparameters agree, and a saved group may be spread over
  stages; but parameters that one process had in different groups are not merged, nor the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tierckpt.format import names, values
from tierckpt.state import optimizers
from tierckpt.state.live import Branch, Node, OptimizerBranch
from tierckpt.state.marks import LiveTensor
from tierckpt.state.naming import below, readable
from tierckpt.state.nodes import MAPPINGS, SavedNode

if TYPE_CHECKING:
    from tierckpt.state.matching import Decoded, Matcher, Plan


def match(matcher: Matcher, node: OptimizerBranch) -> Plan | None:
    """Fit an optimizer; the checkpoint decides what state there is."""
    return _Match(matcher, node).run()


@dataclass
class _Group:
    """One group of the live optimizer."""

    number: int
    live: dict[str, Any]
    names: list[optimizers.ParameterName]
    hyper: Plan | None = None


@dataclass
class _Match:
    matcher: Matcher
    node: OptimizerBranch
    groups: list[_Group] = field(default_factory=list)
    installs: list[Callable[[Decoded], None]] = field(default_factory=list)
    removals: list[tuple[torch.Tensor, optimizers.ParameterName]] = field(default_factory=list)
    saved_names: set[optimizers.ParameterName] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.prefix = below(self.node.name)
        self.origins = self.matcher.parameters.get(self.node.name, {})
        self.groups = [
            _Group(number, live, named)
            for number, (live, named) in enumerate(
                zip(self.node.live.param_groups, self.node.groups.names, strict=True)
            )
        ]

    def _before(self, names: list[optimizers.ParameterName]) -> list[optimizers.ParameterName]:
        """What the checkpoint calls these parameters; each once, fused ones one after the other."""
        if not self.origins:
            return names
        return list(dict.fromkeys(before for name in names for before in self.origins.get(name, (name,))))

    def run(self) -> Plan | None:
        matcher, node = self.matcher, self.node
        if not any(matcher.wanted(path) for path in self._paths()):
            return None
        saved = matcher.nodes.get(node.name)
        groups = matcher.nodes.get(self.prefix + "param_groups")
        if saved is None:
            if matcher.strict:
                matcher.problem(node.name, "missing in the checkpoint, the state has an optimizer there")
            else:
                matcher.untouched.append(node.name)
            return None
        if saved.kind not in MAPPINGS or groups is None or groups.kind not in MAPPINGS:
            matcher.see_below(saved)
            matcher.problem(node.name, "saved as something else, the state has an optimizer there")
            return None
        if not self._same_naming(saved):
            return None
        matcher.see_below(groups)
        self._match_states()
        self._match_groups(groups)

        def load(got: Decoded) -> Any:
            for install in self.installs:
                install(got)
            for parameter, name in self.removals:
                if name in self.saved_names:
                    node.live.state.pop(parameter, None)
            for group in self.groups:
                if group.hyper is not None:
                    found = group.hyper(got)
                    group.live.update({k: v for k, v in found.items() if k not in optimizers.NOT_HYPER})
            optimizers.place_steps(node.live)
            return node.live

        return load

    def _paths(self) -> list[str]:
        """Names of all that belongs to the live optimizer or to what was saved in its place."""
        found = [leaf.name for leaf in _leaves(self.node)]
        saved = self.matcher.nodes.get(self.node.name)
        return found if saved is None else [*found, *self.matcher.leaves_below(saved)]

    def _same_naming(self, saved: SavedNode) -> bool:
        """Names fit names, positions fit positions of the same shapes."""
        matcher, name = self.matcher, self.node.name
        positions = self.prefix + "positions"
        saved_by_position = positions in saved.children
        if saved_by_position != self.node.groups.by_position:
            matcher.see_below(saved)
            words = ("position", "name") if saved_by_position else ("name", "position")
            matcher.problem(
                name,
                f"its parameters were saved by {words[0]}, the state has them by {words[1]}; "
                "put their module beside the optimizer, as when saving",
            )
            return False
        if saved_by_position:
            matcher.seen.add(positions)
            plan = matcher.need(positions, None)
            expected = optimizers.positions(self.node.live)

            def check(got: Decoded) -> list[str]:
                if plan(got) == expected:
                    return []
                return [
                    f"{readable(name)}: the optimizer's parameters were saved by position, with shapes "
                    f"{plan(got)}; the state has {expected}"
                ]

            matcher.checks.append(check)
        return True

    def _match_states(self) -> None:
        matcher = self.matcher
        prefix = below(self.prefix + "state")
        states = self.node.children[0]
        assert isinstance(states, Branch)
        live = {child.name: child for child in states.children}
        for group in self.groups:
            found: dict[str, SavedNode] = {}
            for parameter, name in zip(group.live["params"], group.names, strict=True):
                path = prefix + names.join((name,))
                saved = matcher.nodes.get(path)
                if saved is not None:
                    found[path] = saved
                    self._match_state(parameter, path, live.get(path), saved)
                elif path in live and any(matcher.wanted(leaf.name) for leaf in _leaves(live[path])):
                    self.removals.append((parameter, name))
            self._refuse_partial(found, live)

    def _match_state(self, parameter: torch.Tensor, path: str, live: Node | None, saved: SavedNode) -> None:
        matcher = self.matcher
        if matcher.keys is not None and not any(map(matcher.wanted, matcher.leaves_below(saved))):
            return
        if isinstance(live, Branch) and {child.name for child in live.children} == saved.children.keys():
            before = len(matcher.problems)
            plan = matcher.match(live)
            if plan is not None and len(matcher.problems) == before:
                self.installs.append(plan)
            return

        flat = self.node.groups.flat.get(id(parameter))

        def allocate(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> LiveTensor:
            return optimizers.new_state_tensor(parameter, saved.children.get(name), dtype, shape, flat)

        grown = matcher.grow(path, live, allocate, fixed=True)
        state = self.node.live.state

        def install(got: Decoded) -> None:
            entry = grown(got)
            state[parameter].clear()
            state[parameter].update(entry)

        self.installs.append(install)

    def _refuse_partial(self, found: Mapping[str, SavedNode], live: Mapping[str, Node]) -> None:
        """Report state that lacks what the live state, or that of another parameter of the group, has.

        Others are looked at for torch's own optimizers only: elsewhere small parameters may rightly have
        less.
        """
        ours = type(self.node.live).__module__.startswith("torch.optim.")
        sets = {frozenset(saved.children.values()) for saved in found.values() if saved.children} if ours else set()
        for path, saved in found.items():
            if not saved.children:
                continue
            keys = frozenset(saved.children.values())
            expected: set[Any] = set()
            for other in sets:
                if keys < other:
                    expected |= other
            now = live.get(path)
            if isinstance(now, Branch):
                expected |= {key for key, child in zip(now.keys, now.children, strict=True) if child.kind != "value"}
            for key in sorted(expected - keys, key=str):
                self.matcher.problem(
                    below(path) + names.join((key,)),
                    "missing in the checkpoint: this parameter's optimizer state is only partly there",
                )

    def _match_groups(self, saved: SavedNode) -> None:
        matcher = self.matcher
        written = self.node.children[1]
        assert isinstance(written, Branch)
        prefix = below(saved.name)
        rest: list[_Group] = []
        keys = self.node.groups.keys
        if self.origins:
            keys = optimizers.group_keys([self._before(group.names) for group in self.groups])
        for group, key, live in zip(self.groups, keys, written.children, strict=True):
            if not any(matcher.wanted(path) for path in (live.name, *(leaf.name for leaf in _leaves(live)))):
                continue
            if prefix + key in matcher.nodes:
                group.hyper = matcher.grow(prefix + key, live, matcher.allocate_cpu)
                self.saved_names.update(group.names)
            elif group.names:
                rest.append(group)
        if rest:
            self._match_other_groups(rest, [matcher.nodes[child] for child in saved.children])
        matcher.checks.append(self._same_kind)

    def _same_kind(self, got: Decoded) -> list[str]:
        """Hyperparameters come and go with versions of torch, but not both at once: that is another optimizer."""
        for group in self.groups:
            if group.hyper is None:
                continue
            saved = {str(key) for key in group.hyper(got)} - _BY_OTHERS
            live = {str(key) for key in group.live} - _BY_OTHERS
            if saved - live and live - saved:
                return [
                    f"{readable(self.node.name)}: it was saved from another kind of optimizer: the checkpoint has "
                    f"{_few(sorted(saved - live))}, this {type(self.node.live).__name__} has {_few(sorted(live - saved))}"
                ]
        return []

    def _match_other_groups(self, rest: list[_Group], saved: list[SavedNode]) -> None:
        """Groups that are not exactly saved ones; only the values can tell whose parameters they have."""
        matcher, name = self.matcher, self.node.name
        plans: list[tuple[SavedNode, Plan, bool]] = []
        for node in saved:
            params = below(node.name) + "params"
            if node.is_value:
                plans.append((node, matcher.need(node.name, None), True))
            elif params in node.children:
                plans.append((node, matcher.need(params, None), False))

        def check(got: Decoded) -> list[str]:
            found = []
            for node, plan, whole in plans:
                value = plan(got)
                found.append(_SavedGroup(node, value if whole else {"params": value}, whole))
            return self._assign(rest, found, readable(name))

        matcher.checks.append(check)

    def _assign(self, rest: list[_Group], saved: list[_SavedGroup], what: str) -> list[str]:
        owner = {name: group for group in reversed(saved) for name in group.value["params"]}
        lives = {name: group.number for group in self.groups for name in self._before(group.names)}
        problems: list[str] = []
        for group in rest:
            before = self._before(group.names)
            absent = [str(name) for name in before if name not in owner]
            if absent and self.matcher.strict:
                problems.append(
                    f"{what}: group {group.number}: parameters in no group of the checkpoint: {_few(absent)}"
                )
            sources = list({id(owner[name]): owner[name] for name in before if name in owner}.values())
            if not sources:
                continue
            others = {
                lives[name]
                for source in sources
                for name in source.value["params"]
                if lives.get(name, group.number) != group.number
            }
            if others:
                problems.append(
                    f"{what}: group {group.number}: the checkpoint has its parameters in one group with "
                    f"those of group {', '.join(map(str, sorted(others)))}"
                )
            problems += self._agree(sources, f"{what}: group {group.number}")
            group.hyper = _constant(sources[0].value)
            self.saved_names.update(
                name for name in group.names if all(before in owner for before in self._before([name]))
            )
        return problems

    @staticmethod
    def _agree(sources: list[_SavedGroup], what: str) -> list[str]:
        if not all(source.whole for source in sources):
            return [
                f"{what}: its hyperparameters are tensors, and its parameters are not those of one group of "
                "the checkpoint; form the groups as when saving"
            ]
        for index, source in enumerate(sources):
            for other in sources[:index]:
                if source.node.trees & other.node.trees:
                    return [f"{what}: the checkpoint has its parameters in several groups"]
        first = sources[0].hyper
        for source in sources[1:]:
            differing = sorted(
                str(key) for key in first.keys() | source.hyper.keys() if first.get(key) != source.hyper.get(key)
            )
            if differing:
                return [f"{what}: the groups it is to be merged from differ in {', '.join(differing)}"]
        return []


@dataclass
class _SavedGroup:
    node: SavedNode
    value: dict[str, Any]
    whole: bool  # a value with all hyperparameters; else some are tensors

    @property
    def hyper(self) -> dict[str, Any]:
        """Encoded, so that the comparison tells 1 from 1.0 and nan equals nan."""
        return {key: values.encode(value) for key, value in self.value.items() if key not in optimizers.NOT_HYPER}


#: Entries of groups that are no optimizer's own: schedulers add them.
_BY_OTHERS = {"params", "param_names", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}


def _constant(value: dict[str, Any]) -> Plan:
    # Each group its own copy: mutable hyperparameters must not be shared by groups.
    return lambda got: values.decode(values.encode(value), what="hyperparameters", template=value)


def _leaves(node: Node) -> list[Any]:
    if not isinstance(node, Branch):
        return [node]
    return [leaf for child in node.children for leaf in _leaves(child)]


def _few(words: list[str]) -> str:
    return ", ".join(words[:10]) + (f" and {len(words) - 10} more" if len(words) > 10 else "")
