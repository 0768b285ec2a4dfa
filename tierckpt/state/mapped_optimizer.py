"""The state of an optimizer under a `Mapping`: it follows the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from tierckpt.format import names
from tierckpt.state.mapping import Rename
from tierckpt.state.naming import below
from tierckpt.state.nodes import MAPPINGS, SavedNode
from tierckpt.state.spelling import dotted, parent_of
from tierckpt.state.view import Part

if TYPE_CHECKING:
    from tierckpt.state.mapped import Viewer


def is_optimizer(node: SavedNode, nodes: Mapping[str, SavedNode]) -> bool:
    """Whether this is what an optimizer with named parameters is saved as."""
    if node.kind not in MAPPINGS or set(node.children.values()) != {"state", "param_groups"}:
        return False
    return all(nodes[child].kind in MAPPINGS for child in node.children)


@dataclass
class Home:
    """Where the parameters of an optimizer are: ``tensors`` has the name of each by what the optimizer calls it."""

    tensors: dict[object, str]
    whole_names: bool = False

    @property
    def label(self) -> str:
        """What to call it in messages."""
        if self.whole_names:
            return "the whole checkpoint"
        return dotted(parent_of(next(iter(self.tensors.values())))[0]) or "the top"


def _best(homes: list[Home], score: Callable[[Home], int]) -> list[Home]:
    """Those with the highest score, in order."""
    scores = [score(home) for home in homes]
    return [home for home, each in zip(homes, scores, strict=True) if each == max(scores)]


def homes_of(optimizer: SavedNode, leaves: Iterable[SavedNode], nodes: Mapping[str, SavedNode]) -> list[Home]:
    """Places in the checkpoint that have all the parameters of which there is state, in order.

    A module's parameters are the tensors of one container; of several modules, tensors under their dotted names.
    """
    states = next(nodes[child] for child, key in optimizer.children.items() if key == "state")
    wanted = set(states.children.values())
    containers: dict[str, dict[object, str]] = {}
    everything: dict[object, str] = {}
    for leaf in leaves:
        if leaf.kind == "tensor" and leaf.name != names.ROOT:
            upper, _ = parent_of(leaf.name)
            containers.setdefault(upper, {})[nodes[upper].children[leaf.name]] = leaf.name
            everything.setdefault(dotted(leaf.name), leaf.name)
    found = [Home(tensors) for tensors in containers.values() if wanted <= tensors.keys()]
    if wanted <= everything.keys():
        found.append(Home(everything, whole_names=True))
    return found


class MappedOptimizer:
    """The state of an optimizer follows its parameters.

    Which these are a checkpoint says by their names alone, and copies of a module (averages) have the same. The state
    knows: what its optimizer trains has a place in it. Where there is no state, or that has not all of it, places
    of which the rules make different names are a doubt, and nothing is guessed.
    """

    def __init__(self, viewer: Viewer, node: SavedNode, leaves: list[SavedNode], homes: list[Home]) -> None:
        self.viewer, self.node, self.leaves = viewer, node, leaves
        self.view, self.saved = viewer.view, viewer.saved
        text = dotted(node.name)
        claim = viewer.direction.claim(text)
        rule = None if claim is None else viewer.mapping.rules[claim.rule]
        self.name = node.name
        if claim is not None and isinstance(rule, Rename):
            self.name = viewer.renamed(node.name, text, claim, rule.target)
            viewer.used.add(claim.rule)
        self.known = viewer.live.optimizers.get(self.name, set())
        states = next(viewer.nodes[child] for child, key in node.children.items() if key == "state")
        self._wanted = set(states.children.values())
        self._named: dict[int, dict[object, list[object]]] = {}
        self._everything = next((home for home in homes if home.whole_names), None)
        self.home = self._choose(homes)
        self.after = self._after(self.home)

    def _choose(self, homes: list[Home]) -> Home:
        """The place of its parameters; a doubt is told if there are several of which the rules make different names."""
        trained = self.viewer.live.trained.get(self.name, set())
        homes = _best(homes, lambda home: self._count(home, trained))
        # Names with dots are those of an optimizer of several modules, which no module alone has.
        homes = [home for home in homes if not home.whole_names] or homes
        homes = _best(
            homes,
            lambda home: sum(
                called in self.known for key, new in self._after(home).items() if self._asks(key) for called in new
            ),
        )
        # Of places that do not contradict each other, that of which the rules speak.
        moved = self.viewer.moved
        first = max(homes, key=lambda home: sum(name in moved for name in home.tensors.values()))
        other = next((home for home in homes if self._contradict(first, home)), None)
        if other is not None:
            text = (
                f"{dotted(self.node.name)}: the parameters of this optimizer may be those of {first.label} or of "
                f"{other.label}, of which the mapping makes different names, and "
            )
            if not self.viewer.live.is_there:
                self.view.doubts[self.name] = (
                    f"mapping: {text}the checkpoint does not say which; map both alike, or leave the optimizer out with keys="
                )
            elif self.name in self.viewer.live.kinds:
                self.viewer.problem(f"{text}nothing says which; put the module that it trains beside it into the state")
        return first

    def _asks(self, key: object) -> bool:
        return not self._wanted or key in self._wanted

    def _count(self, home: Home, trained: set[str]) -> int:
        """How many parameters become what the state's optimizer trains."""
        moved = self.viewer.moved
        return sum(
            any(new in trained for new in moved.get(name, (name,)))
            for key, name in home.tensors.items()
            if self._asks(key)
        )

    def _contradict(self, one: Home, other: Home) -> bool:
        """Whether the rules make different names of the same parameter."""
        first, second = self._after(one), self._after(other)
        if any(first[key] != second[key] for key in first.keys() & second.keys()):
            return True
        if self._wanted:
            return False
        # Without state any module may be it.
        changes = [{key: new for key, new in after.items() if new != [key]} for after in (first, second)]
        return all(changes) and changes[0] != changes[1]

    def _after(self, home: Home) -> dict[object, list[object]]:
        """What the state's optimizer calls each parameter."""
        known = self._named.get(id(home))
        if known is not None:
            return known
        found: dict[object, list[object]] = {}
        self._named[id(home)] = found
        for key, name in home.tensors.items():
            found[key] = [self._called(new, home) for new in self.viewer.moved.get(name, [name])]
        return found

    def _called(self, name: str, home: Home) -> object:
        last, text = names.split(name)[-1], dotted(name)
        first, second = (text, last) if home.whole_names else (last, text)
        return second if second in self.known and first not in self.known else first

    def run(self) -> None:
        viewer, view = self.viewer, self.view
        made: dict[object, tuple[str, list[object]]] = {}  # what the state calls it -> the tensor, what it is made of
        for key, name in self.home.tensors.items():
            for new, called in zip(viewer.moved.get(name, [name]), self.after[key], strict=True):
                there, keys = made.setdefault(called, (new, []))
                keys.append(key)
                if there != new:
                    viewer.problem(f"{dotted(self.name)}: {dotted(there)} and {dotted(new)} are both called {called}")
        origin = {name: key for key, name in self.home.tensors.items()}
        for called, (new, _) in made.items():
            if new in view.parts:
                made[called] = new, [origin[part.name] for part in view.parts[new] if part.name in origin]
        view.parameters[self.name] = {called: tuple(keys) for called, (_, keys) in made.items()}
        if not self._wanted and not viewer.live.is_there and self._everything is not None:
            # Nothing but its groups, which are not read yet, tells whether it has one module or several.
            whole: dict[object, tuple[object, ...]] = {}
            for key, called_after in self._after(self._everything).items():
                for called in called_after:
                    whole[called] = (*whole.get(called, ()), key)
            view.parameters[self.name] = {**whole, **view.parameters[self.name]}

        prefix, states = below(self.node.name), below(self.node.name) + "state/"
        by_parameter: dict[object, dict[str, SavedNode]] = {}
        called_before = viewer.nodes[prefix + "state"].children
        for leaf in self.leaves:
            if not leaf.name.startswith(states):
                viewer.put(_swapped(leaf.name, self.node.name, self.name), leaf)
                continue
            component, _, rest = leaf.name[len(states) :].partition("/")
            by_parameter.setdefault(called_before[states + component], {})[rest] = leaf
        done: set[object] = set()
        for key, entries in by_parameter.items():
            for called in self.after[key]:
                new, sources = made[called]
                if called in done:
                    continue
                done.add(called)
                target = below(self.name) + "state/" + names.join((called,))  # type: ignore[arg-type]
                if view.is_whole(new):
                    for rest, leaf in entries.items():
                        viewer.put(f"{target}/{rest}" if rest else target, leaf)
                else:
                    self._parted(target, new, [by_parameter.get(source, {}) for source in sources], sources)
        for name in (prefix + "state", prefix + "param_groups"):
            moved = _swapped(name, self.node.name, self.name)
            if moved not in view.nodes:  # a container even without tensors
                viewer.put(moved, viewer.nodes[name])

    def _parted(
        self, target: str, parameter: str, entries: list[dict[str, SavedNode]], sources: Sequence[object]
    ) -> None:
        """The state of a parameter that was fused or split."""
        viewer, view = self.viewer, self.view
        parts = view.parts[parameter]
        if len(sources) != len(parts):
            pieces = ", ".join(dotted(part.name) for part in parts)
            viewer.problem(
                f"{dotted(target)}: the optimizer has some of these, which become one, but not all: {pieces}"
            )
            return
        for rest in dict.fromkeys(rest for entry in entries for rest in entry):
            name = f"{target}/{rest}" if rest else target
            lacking = [str(source) for source, entry in zip(sources, entries, strict=True) if rest not in entry]
            if lacking:
                viewer.problem(f"{dotted(name)}: the checkpoint has no {rest} for {', '.join(lacking)}")
                continue
            leaves = [entry[rest] for entry in entries]
            listed = [leaf.name for leaf in leaves]
            first = leaves[0]
            if any(leaf.kind != first.kind or leaf.kind not in ("tensor", "value") for leaf in leaves):
                viewer.problem(f"{dotted(name)}: this state of fused or split parameters cannot be mapped: {listed}")
            elif first.kind == "value":
                viewer.put(name, first)
                view.origins[name] = listed
            else:
                self._parted_tensor(name, parts, listed)

    def _parted_tensor(self, name: str, parts: Sequence[Part], sources: Sequence[str]) -> None:
        viewer, view = self.viewer, self.view
        kinds = [self.saved[source] for source in sources]
        first = viewer.nodes[sources[0]]
        if len({dtype for dtype, _ in kinds}) == 1:
            # Its shape first: parameters, too, can have one element.
            if all(shape == self.saved[part.name][1] for part, (_, shape) in zip(parts, kinds, strict=True)):
                shape = _extent(parts)
                moved = [part._replace(name=source) for part, source in zip(parts, sources, strict=True)]
                viewer.put(name, first, kind=(kinds[0][0], shape), parts=moved)
                return
            if all(prod(shape) == 1 for _, shape in kinds) and len(set(kinds)) == 1:
                viewer.put(name, first)
                view.agreeing[name] = list(sources)
                return
        listed = ", ".join(
            f"{dotted(s)} {dtype} {list(shape)}" for s, (dtype, shape) in zip(sources, kinds, strict=True)
        )
        viewer.problem(
            f"{dotted(name)}: optimizer state that has not the shape of its parameter cannot be fused or split: {listed}"
        )


def _extent(parts: Sequence[Part]) -> tuple[int, ...]:
    """The shape of what ``parts`` make."""
    ends = [[o + n for o, n in zip(part.offset, part.box.size, strict=True)] for part in parts]
    return tuple(max(sizes) for sizes in zip(*ends, strict=True))


def _swapped(name: str, old: str, new: str) -> str:
    """``name``, which lies below ``old``, below ``new``."""
    return name if old == new else below(new) + name[len(below(old)) :]
