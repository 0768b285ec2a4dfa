"""A checkpoint as a `Mapping` makes it look: its tree and its tensors under the names of the state.

No bytes are involved: a fused or split tensor is a list of `Part`, boxes of tensors of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from tierckpt.format import names
from tierckpt.format.boxes import Box, whole
from tierckpt.state.live import Branch, Node, OptimizerBranch, StatefulBranch
from tierckpt.state.mapping import Claim, Fuse, Rename, Split, fill
from tierckpt.state.mapping import Mapping as NameMapping
from tierckpt.state.marks import LiveTensor
from tierckpt.state.naming import below
from tierckpt.state.nodes import MAPPINGS, SEQUENCES, SavedNode

Kind = tuple[str, tuple[int, ...]]
"""dtype and global shape of a tensor."""


class Part(NamedTuple):
    """What fills a box of a tensor of the state: ``box`` of the checkpoint's tensor ``name``, put at ``offset``."""

    name: str
    box: Box
    offset: tuple[int, ...]
    is_whole: bool = False
    """Whether the box is all of that tensor."""


@dataclass
class View:
    """A checkpoint under the names of the state.

    Attributes:
        nodes, tensors: as in ``Saved``.
        parts: what each tensor is made of; of those that are not here, all of that of the same name.
        origins: the names that values have in the checkpoint. Several must agree.
        agreeing: single elements made of several (the step counts of fused parameters), which must agree.
        parameters: for each optimizer, what its parameters are called in the checkpoint.
        absent: parts of split tensors that cannot be placed, since this rank has nothing of them; and what has them.
        problems: a line for each thing that does not fit.
    """

    nodes: dict[str, SavedNode] = field(default_factory=dict)
    tensors: dict[str, Kind] = field(default_factory=dict)
    parts: dict[str, list[Part]] = field(default_factory=dict)
    origins: dict[str, list[str]] = field(default_factory=dict)
    agreeing: dict[str, list[str]] = field(default_factory=dict)
    parameters: dict[str, dict[object, tuple[object, ...]]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def is_whole(self, name: str) -> bool:
        """Whether a tensor is all of one of the checkpoint."""
        parts = self.parts.get(name)
        return parts is None or (len(parts) == 1 and parts[0].is_whole)

    def names_of(self, name: str) -> list[str]:
        """The names in the checkpoint of what the state calls ``name``."""
        if name in self.agreeing:
            return self.agreeing[name]
        if name in self.parts:
            return list(dict.fromkeys(part.name for part in self.parts[name]))
        return [self.absent[name]] if name in self.absent else self.origins.get(name, [name])


def view(
    mapping: NameMapping | None, nodes: Mapping[str, SavedNode], tensors: Mapping[str, Kind], root: Node | None
) -> View:
    """What ``mapping`` makes of a checkpoint with these nodes and tensors, for the state of ``root`` (None: for none)."""
    if mapping is None:
        return View(dict(nodes), dict(tensors))
    return _Viewer(mapping, nodes, tensors, _Live(root)).run()


class _Live:
    """What the state calls things, by dotted name."""

    def __init__(self, root: Node | None) -> None:
        self.is_there = root is not None
        self.names: dict[str, str | None] = {}  # None: several are written alike
        self.kinds: dict[str, str] = {}
        self.tensors: dict[str, LiveTensor] = {}
        self.optimizers: dict[str, set[object]] = {}
        if root is not None:
            self._look(root)

    def _look(self, node: Node) -> None:
        if isinstance(node, StatefulBranch):  # its child has its name
            self._look(node.children[0])
            return
        text = dotted(node.name)
        self.kinds[node.name] = node.kind
        self.names[text] = None if text in self.names else node.name
        if isinstance(node, OptimizerBranch):
            self.optimizers[node.name] = {name for group in node.groups.names for name in group}
        elif isinstance(node, Branch):
            for child in node.children:
                self._look(child)
        elif node.kind == "tensor":
            self.tensors[node.name] = node.live


def dotted(name: str) -> str:
    """The dotted form of a name."""
    return name.replace("/", ".") if "~" not in name else names.dotted(names.split(name))


class _Viewer:
    def __init__(
        self, mapping: NameMapping, nodes: Mapping[str, SavedNode], tensors: Mapping[str, Kind], live: _Live
    ) -> None:
        self.mapping, self.nodes, self.saved, self.live = mapping, nodes, tensors, live
        self.view = View()
        self.moved: dict[str, list[str]] = {}  # tensors of the checkpoint -> what they become, if not the same
        self.fused: dict[tuple[int, tuple[str, ...]], dict[int, str]] = {}
        self.used: set[int] = set()

    def run(self) -> View:
        view = self.view
        optimizers = {name for name, node in self.nodes.items() if _is_optimizer(node, self.nodes)}
        theirs: dict[str, list[SavedNode]] = {name: [] for name in optimizers}
        plain: list[SavedNode] = []
        for node in self._leaves():
            owner = next((name for name in optimizers if node.name.startswith(below(name))), None)
            (plain if owner is None else theirs[owner]).append(node)
        homes = {name: _home(self.nodes[name], plain, self.nodes) for name in optimizers}
        for name, candidates in homes.items():
            if not candidates:  # nothing here says what its parameters are
                plain += theirs.pop(name)
        for node in plain:
            self._leaf(node)
        for key, parts in self.fused.items():
            self._fuse(*key, parts)
        for name, leaves in theirs.items():
            _Optimizer(self, self.nodes[name], leaves, homes[name]).run()
        if not self.live.is_there:
            for node in view.nodes.values():
                _settle(node)
        if view.problems:
            view.problems += [
                f"mapping: rule {number} speaks of nothing in the checkpoint: {rule}"
                for number, rule in enumerate(self.mapping.rules)
                if number not in self.used
            ]
        return view

    def problem(self, text: str) -> None:
        self.view.problems.append(f"mapping: {text}")

    def _leaves(self) -> Iterator[SavedNode]:
        return (node for node in self.nodes.values() if node.is_value or not node.children)

    def _leaf(self, node: SavedNode) -> None:
        text = dotted(node.name)
        claim = self.mapping.claim(text)
        if claim is None:
            if self.mapping.claim_after(text) is not None:
                self.problem(
                    f"the checkpoint has {text} already, which in the state is "
                    f"{' and '.join(self.mapping.sources(text))} of the checkpoint"
                )
            else:
                self.put(node.name, node)
            return
        self.used.add(claim.rule)
        rule = self.mapping.rules[claim.rule]
        if isinstance(rule, Rename):
            name = self.renamed(node.name, text, claim, rule.target)
            self.moved[node.name] = [name]
            self.put(name, node)
        elif node.kind != "tensor":
            self.problem(f"{text} is not a tensor, so it cannot be fused or split")
        elif isinstance(rule, Fuse):
            self.fused.setdefault((claim.rule, claim.captures), {})[claim.part] = node.name
        else:
            self._split(node, text, claim, rule)

    def renamed(self, name: str, text: str, claim: Claim, pattern: str) -> str:
        """The name of the state that has the dotted form which ``pattern`` gives."""
        start = fill(pattern, claim.captures)
        rest = text[claim.end :]
        if start + rest in self.live.names:
            found = self.live.names[start + rest]
            if found is not None:
                return found
            self.problem(f"{text} becomes {start + rest}, but several things in the state are written so")
        return _respelled(name, claim.end, start, rest)

    def put(self, name: str, node: SavedNode, *, kind: Kind | None = None, parts: list[Part] | None = None) -> None:
        """A leaf of the state, like ``node`` of the checkpoint unless it is a tensor that has ``parts``."""
        view = self.view
        known = view.nodes.get(name)
        if known is None:
            known = view.nodes[name] = SavedNode(node.kind, name, node.detail)
        elif node.is_value and _holds(known):
            pass  # a container on some ranks, a value without tensors on others
        elif known.is_value and _holds(node):
            known.kind, known.detail = node.kind, node.detail
        elif not (_holds(known) and _holds(node)):
            there = " and ".join(dotted(origin) for origin in view.names_of(name))
            self.problem(f"both {there} and {dotted(node.name)} become {dotted(name)}")
            return
        known.is_value = known.is_value or node.is_value
        known.trees |= node.trees
        if node.kind in ("tensor", "array"):
            view.tensors[name] = kind or self.saved[node.name]
            view.parts[name] = parts or [whole_part(node.name, self.saved[node.name][1])]
        if name != node.name:
            view.origins[name] = [node.name]
        self._hang(name, node.name)

    def _hang(self, name: str, old: str) -> None:
        """Put a node into its container, which is like that of ``old``, and that one into its own."""
        found = self.view.nodes
        while name != names.ROOT:
            node = found[name]
            upper, last = _upper(name)
            old_upper, old_last = _upper(old) if old != names.ROOT else (names.ROOT, last)
            container = found.get(upper)
            fresh = container is None
            like = self.nodes.get(upper)
            if like is None or not like.children:
                like = self.nodes[old_upper]
            if last == old_last and old in self.nodes[old_upper].children:
                key = self.nodes[old_upper].children[old]
            else:
                key = names.split(last)[0]
            if container is None:
                container = found[upper] = SavedNode(*self._container(like, upper, key))
            elif container.kind == "value":
                made = SavedNode(*self._container(like, upper, key))
                container.kind, container.detail = made.kind, made.detail
            elif not _holds(container):
                self.problem(f"{dotted(upper)} is both a {container.kind} and what holds {dotted(name)}")
                return
            had = name in container.children
            container.children.setdefault(name, key)
            container.trees |= node.trees
            if had and not fresh:
                above = upper  # trees may have grown
                while above != names.ROOT:
                    above, _ = _upper(above)
                    found[above].trees |= node.trees
                return
            name, old = upper, old_upper

    def _container(self, like: SavedNode, name: str, key: object) -> tuple[str, str, Any]:
        """What makes a new container called ``name`` that has ``key``: as the state has it, or like that one."""
        live = self.live.kinds.get(name)
        ordered = live in SEQUENCES if live in MAPPINGS or live in SEQUENCES else like.kind in SEQUENCES
        if like.kind == "subclass" and key in like.children.values():
            return like.kind, name, like.detail
        if ordered and type(key) is int:
            return (like.kind, name, like.detail) if like.kind in SEQUENCES else ("list", name, None)
        if live is None and type(key) is int and int not in map(type, like.children.values()):
            return "list", name, None
        return (like.kind, name, None) if like.kind in MAPPINGS else ("dict", name, None)

    # Tensors made of parts

    def _fuse(self, number: int, captures: tuple[str, ...], parts: dict[int, str]) -> None:
        rule = self.mapping.rules[number]
        assert isinstance(rule, Fuse)
        missing = [fill(text, captures) for i, text in enumerate(rule.sources) if i not in parts]
        target = fill(rule.target, captures)
        if missing:
            self.problem(
                f"{target}: the checkpoint has {', '.join(dotted(name) for name in parts.values())}, but not "
                f"{', '.join(missing)}"
            )
            return
        sources = [parts[i] for i in range(len(rule.sources))]
        made = self.concatenated(target, sources, rule.dim, rule.sizes)
        if made is None:
            return
        kind, found = made
        first = self.nodes[sources[0]]
        text = dotted(first.name)
        name = self.renamed(first.name, text, Claim(number, 0, captures, len(text)), rule.target)
        self.put(name, first, kind=kind, parts=found)
        for source in sources:
            self.moved[source] = [name]
            if name in self.view.nodes:
                self.view.nodes[name].trees |= self.nodes[source].trees

    def concatenated(
        self, what: str, sources: Sequence[str], dim: int, sizes: Sequence[int] | None = None
    ) -> tuple[Kind, list[Part]] | None:
        """What ``sources`` make when they are put one after the other along ``dim``; None if they do not fit."""
        kinds = [self.saved[name] for name in sources]
        dtype, first = kinds[0]
        listed = ", ".join(
            f"{dotted(name)} {kind[0]} {list(kind[1])}" for name, kind in zip(sources, kinds, strict=True)
        )
        if not -len(first) <= dim < len(first):
            self.problem(f"{what}: there is no dimension {dim} along which to fuse {listed}")
            return None
        dim %= len(first)
        if any(
            kind != dtype or shape[:dim] != first[:dim] or shape[dim + 1 :] != first[dim + 1 :] for kind, shape in kinds
        ):
            self.problem(f"{what}: these cannot be fused along dimension {dim}: {listed}")
            return None
        lengths = [shape[dim] for _, shape in kinds]
        if sizes is not None and lengths != list(sizes):
            self.problem(f"{what}: sizes={tuple(sizes)} are declared, the checkpoint has {tuple(lengths)}: {listed}")
            return None
        found = []
        at = 0
        for name, (_, shape) in zip(sources, kinds, strict=True):
            found.append(Part(name, whole(shape), (*(0,) * dim, at, *(0,) * (len(shape) - dim - 1))))
            at += shape[dim]
        return (dtype, (*first[:dim], at, *first[dim + 1 :])), found

    def _split(self, node: SavedNode, text: str, claim: Claim, rule: Split) -> None:
        dtype, shape = self.saved[node.name]
        targets = [self.renamed(node.name, text, claim, pattern) for pattern in rule.targets]
        if not -len(shape) <= rule.dim < len(shape):
            self.problem(f"{text} of shape {list(shape)} has no dimension {rule.dim} along which to split it")
            return
        dim = rule.dim % len(shape)
        lives = [self.live.tensors.get(name) for name in targets]
        spans: list[tuple[int, int] | None] = []
        problem = ""
        if any(tensor is not None and len(tensor.shape) != len(shape) for tensor in lives):
            problem = "their numbers of dimensions differ"
        else:
            known = [None if tensor is None else int(tensor.shape[dim]) for tensor in lives]
            spans, problem = _spans(shape[dim], len(targets), rule.sizes, known, self.live.is_there)
        if problem:
            listed = ", ".join(
                dotted(name) + ("" if tensor is None else f" {list(tensor.shape)}")
                for name, tensor in zip(targets, lives, strict=True)
            )
            self.problem(
                f"{text} of shape {list(shape)} cannot be split along dimension {dim} into {listed}: {problem}"
            )
            return
        for name, span in zip(targets, spans, strict=True):
            if span is None:
                self.view.absent[name] = node.name
                continue
            lo, hi = span
            size = (*shape[:dim], hi - lo, *shape[dim + 1 :])
            box = Box((*(0,) * dim, lo, *(0,) * (len(shape) - dim - 1)), size)
            self.moved.setdefault(node.name, []).append(name)
            self.put(name, node, kind=(dtype, size), parts=[Part(node.name, box, (0,) * len(shape))])


def whole_part(name: str, shape: tuple[int, ...]) -> Part:
    """All of a tensor."""
    return Part(name, whole(shape), (0,) * len(shape), True)


def _spans(
    total: int, count: int, sizes: Sequence[int] | None, known: Sequence[int | None], live: bool
) -> tuple[list[tuple[int, int] | None], str]:
    """Where each of ``count`` parts lies in ``total``, None where that is not known, and what is wrong.

    A part lies where those before it, or those behind it, say. Nothing is guessed: where only the state can say, and
    has not all parts here, those that cannot be placed are left out, and are an error only if the state has them.
    """
    if sizes is None and not live:
        if total % count:
            return [], f"{count} equal parts are not possible; give sizes="
        sizes = [total // count] * count
    lengths: list[int | None] = list(known if sizes is None else sizes)
    if lengths.count(None) == 1:
        rest = total - sum(length for length in lengths if length is not None)
        if rest >= 0:
            lengths[lengths.index(None)] = rest
    if None not in lengths and sum(length or 0 for length in lengths) != total:
        return [], f"the sizes {tuple(lengths)} are not {total} together"
    spans: list[tuple[int, int] | None] = [None] * count
    at = 0
    for i, length in enumerate(lengths):
        if length is None:
            break
        spans[i] = (at, at + length)
        at += length
    at = total
    for i in range(count - 1, -1, -1):
        length = lengths[i]
        if length is None:
            break
        spans[i] = (at - length, at)
        at -= length
    if any(span is not None and (span[0] < 0 or span[1] > total) for span in spans):
        return [], f"the sizes {tuple(lengths)} are more than {total} together"
    if any(span is None and length is not None for span, length in zip(spans, known, strict=True)):
        return [], "the state has some of them here, but not those that say where they begin; give sizes="
    return spans, ""


# Optimizers


def _is_optimizer(node: SavedNode, nodes: Mapping[str, SavedNode]) -> bool:
    """Whether this is what an optimizer with named parameters is saved as."""
    if node.kind not in MAPPINGS or set(node.children.values()) != {"state", "param_groups"}:
        return False
    return all(nodes[child].kind in MAPPINGS for child in node.children)


@dataclass
class _Home:
    """Where the parameters of an optimizer are: ``tensors`` has the name of each by what the optimizer calls it."""

    tensors: dict[object, str]
    whole_names: bool = False


def _home(optimizer: SavedNode, leaves: Iterable[SavedNode], nodes: Mapping[str, SavedNode]) -> list[_Home]:
    """Places in the checkpoint that have all the parameters of which there is state, in order.

    A module's parameters are the tensors of one container; of several modules, tensors under their dotted names.
    """
    states = next(nodes[child] for child, key in optimizer.children.items() if key == "state")
    wanted = set(states.children.values())
    containers: dict[str, dict[object, str]] = {}
    everything: dict[object, str] = {}
    for leaf in leaves:
        if leaf.kind == "tensor" and leaf.name != names.ROOT:
            upper, _ = _upper(leaf.name)
            containers.setdefault(upper, {})[nodes[upper].children[leaf.name]] = leaf.name
            everything.setdefault(dotted(leaf.name), leaf.name)
    found = [_Home(tensors) for tensors in containers.values() if wanted <= tensors.keys()]
    if wanted <= everything.keys():
        found.append(_Home(everything, whole_names=True))
    return found


class _Optimizer:
    """The state of an optimizer follows its parameters."""

    def __init__(self, viewer: _Viewer, node: SavedNode, leaves: list[SavedNode], homes: list[_Home]) -> None:
        self.viewer, self.node, self.leaves = viewer, node, leaves
        self.view, self.saved = viewer.view, viewer.saved
        text = dotted(node.name)
        claim = viewer.mapping.claim(text)
        rule = None if claim is None else viewer.mapping.rules[claim.rule]
        self.name = node.name
        if claim is not None and isinstance(rule, Rename):
            self.name = viewer.renamed(node.name, text, claim, rule.target)
            viewer.used.add(claim.rule)
        self.known = viewer.live.optimizers.get(self.name, set())
        # An optimizer's parameters are what the rules are about, where several places have such names (copies for
        # averages); and what the state's optimizer has.
        self.home = max(homes, key=self._rank)
        self.after = self._after(self.home)

    def _rank(self, home: _Home) -> tuple[int, int]:
        after = self._after(home)
        return (
            sum(name in self.known for new in after.values() for name in new),
            sum(name in self.viewer.moved for name in home.tensors.values()),
        )

    def _after(self, home: _Home) -> dict[object, list[object]]:
        """What the state's optimizer calls each parameter."""
        found: dict[object, list[object]] = {}
        for key, name in home.tensors.items():
            found[key] = [self._called(new, home) for new in self.viewer.moved.get(name, [name])]
        return found

    def _called(self, name: str, home: _Home) -> object:
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
            if all(prod(shape) == 1 for _, shape in kinds) and len(set(kinds)) == 1:
                viewer.put(name, first)
                view.agreeing[name] = list(sources)
                return
            if all(shape == self.saved[part.name][1] for part, (_, shape) in zip(parts, kinds, strict=True)):
                shape = _extent(parts)
                moved = [part._replace(name=source) for part, source in zip(parts, sources, strict=True)]
                viewer.put(name, first, kind=(kinds[0][0], shape), parts=moved)
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


# Names and containers


def _holds(node: SavedNode) -> bool:
    """Whether this is a container."""
    return node.kind in MAPPINGS or node.kind in SEQUENCES or node.kind == "subclass"


def _upper(name: str) -> tuple[str, str]:
    """The name of the container of ``name``, and its last component."""
    upper, _, last = name.rpartition("/")
    return upper or names.ROOT, last


def _swapped(name: str, old: str, new: str) -> str:
    """``name``, which lies below ``old``, below ``new``."""
    return name if old == new else below(new) + name[len(below(old)) :]


def _settle(node: SavedNode) -> None:
    """Bring the items of a sequence into order; if some are missing it is a dict."""
    if node.kind in SEQUENCES and node.children:
        items = sorted(node.children.items(), key=lambda item: item[1])
        node.children = dict(items)
        if [key for _, key in items] != list(range(len(items))):
            node.kind, node.detail = "dict", None


def _respelled(name: str, end: int, start: str, rest: str) -> str:
    """The name of what no live state names: ``start + rest`` instead of the first ``end`` characters of the dotted form.

    Components that the rule did not touch stay; so does the depth, where that has a meaning: a qualified name of a
    parameter stays one component, nested dicts stay nested.
    """
    path = names.split(name)
    texts = [str(component) for component in path]
    # The last components lie wholly behind the match.
    kept = 0
    at = sum(map(len, texts)) + len(texts) - 1
    while kept < len(path) - 1 and at - len(texts[-1 - kept]) > end:
        at -= len(texts[-1 - kept]) + 1
        kept += 1
    tail = path[len(path) - kept :]
    middle, words = path[: len(path) - kept], start + rest[: max(at - end, 0)]
    found: list[names.Component] = []
    pieces = words.split(".")
    nested = len(middle) > 1 and all("." not in text for text in texts[: len(middle)])
    for number in range(len(middle)):
        count = len(texts[number].split("."))
        if not nested and (number == len(middle) - 1 or len(pieces) <= count):
            found.append(".".join(pieces))
            pieces = []
            break
        taken, pieces = pieces[:count], pieces[count:]
        found.append(_component(".".join(taken), path))
        if not pieces:
            break
    found += [_component(piece, path) for piece in pieces]
    return names.join((*found, *tail))


def _component(text: str, path: Sequence[names.Component]) -> names.Component:
    """What ``text`` is where it stood before; new integers are keys that are integers."""
    for component in path:
        if str(component) == text:
            return component
    return int(text) if text.isascii() and text.isdigit() and str(int(text)) == text else text
