"""A checkpoint as a `Mapping` makes it look.

No bytes are involved: a fused or split tensor is a list of `Part`, boxes of tensors of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tierckpt.format import names
from tierckpt.format.boxes import Box, whole
from tierckpt.state.direction import Direction
from tierckpt.state.live import Branch, ModuleBranch, Node, OptimizerBranch, StatefulBranch
from tierckpt.state.mapped_optimizer import MappedOptimizer, homes_of, is_optimizer
from tierckpt.state.mapping import Claim, Fuse, Rename, Split, befores, fill
from tierckpt.state.mapping import Mapping as NameMapping
from tierckpt.state.marks import LiveTensor
from tierckpt.state.naming import below
from tierckpt.state.nodes import MAPPINGS, SEQUENCES, SavedNode
from tierckpt.state.spelling import dotted, parent_of, respelled
from tierckpt.state.view import Kind, Part, View, whole_part


def view(
    mapping: NameMapping | None,
    nodes: Mapping[str, SavedNode],
    tensors: Mapping[str, Kind],
    root: Node | None,
    *,
    strict: bool = True,
    named: bool = True,
) -> View:
    """What ``mapping`` makes of a checkpoint with these nodes and tensors, for the state of ``root`` (None: for none).

    ``strict``: rules that speak of nothing are problems. ``named``: the caller has named the checkpoint, and so says
    that it has the names of before the rules, should its own names not tell.
    """
    if mapping is None:
        return View(dict(nodes), dict(tensors))
    return Viewer(mapping, nodes, tensors, _Live(root), strict=strict, named=named).run()


class _Live:
    """What the state calls things, by dotted name."""

    def __init__(self, root: Node | None) -> None:
        self.is_there = root is not None
        self.names: dict[str, str | None] = {}  # None: several are written alike
        self.kinds: dict[str, str] = {}
        self.tensors: dict[str, LiveTensor] = {}
        self.optimizers: dict[str, set[object]] = {}
        self._by_identity: dict[int, list[str]] = {}  # of tensors
        self._modules: list[dict[object, str]] = []
        self._found: list[OptimizerBranch] = []
        if root is not None:
            self._look(root)
        # What the state calls the parameters of each optimizer, as tensors that have a place in it.
        self.trained = {node.name: self._trained(node) for node in self._found}

    def _look(self, node: Node) -> None:
        if isinstance(node, StatefulBranch):  # its child has its name
            self._look(node.children[0])
            return
        text = dotted(node.name)
        self.kinds[node.name] = node.kind
        self.names[text] = None if text in self.names else node.name
        if isinstance(node, OptimizerBranch):
            self.optimizers[node.name] = {name for group in node.groups.names for name in group}
            self._found.append(node)
        elif isinstance(node, Branch):
            if isinstance(node, ModuleBranch):
                self._modules.append({key: child.name for key, child in zip(node.keys, node.children, strict=True)})
            for child in node.children:
                self._look(child)
        elif node.kind == "tensor":
            self.tensors[node.name] = node.live
            self._by_identity.setdefault(id(node.live), []).append(node.name)

    def _trained(self, optimizer: OptimizerBranch) -> set[str]:
        parameters = [parameter for group in optimizer.live.param_groups for parameter in group["params"]]
        found = {name for parameter in parameters for name in self._by_identity.get(id(parameter), ())}
        if not found:
            # A module that shows other tensors than its parameters (flattened ones): the only one with such names.
            called = self.optimizers[optimizer.name]
            having = [module for module in self._modules if called <= module.keys()]
            found = {having[0][name] for name in called} if len(having) == 1 else found
        return found


class Viewer:
    def __init__(
        self,
        mapping: NameMapping,
        nodes: Mapping[str, SavedNode],
        tensors: Mapping[str, Kind],
        live: _Live,
        *,
        strict: bool,
        named: bool,
    ) -> None:
        self.mapping, self.nodes, self.saved, self.live = mapping, nodes, tensors, live
        self.strict = strict
        self.view = View()
        self.moved: dict[str, list[str]] = {}  # tensors of the checkpoint -> what they become, if not the same
        self.fused: dict[tuple[int, tuple[str, ...]], dict[int, str]] = {}
        self.used: set[int] = set()
        self.direction = Direction(mapping, live.names if live.is_there else None, named=named)
        self._flat: dict[str, bool] = {}

    def run(self) -> View:
        view, rules = self.view, self.mapping.rules
        optimizers = {name for name, node in self.nodes.items() if is_optimizer(node, self.nodes)}
        theirs: dict[str, list[SavedNode]] = {name: [] for name in optimizers}
        plain: list[SavedNode] = []
        for node in self._leaves():
            owner = next((name for name in optimizers if node.name.startswith(below(name))), None)
            (plain if owner is None else theirs[owner]).append(node)
        homes = {name: homes_of(self.nodes[name], plain, self.nodes) for name in optimizers}
        for name, candidates in homes.items():
            if not candidates:  # nothing here says what its parameters are
                plain += theirs.pop(name)
        self.direction.decide([dotted(node.name) for node in plain], [dotted(name) for name in theirs])
        view.problems += [f"mapping: {line}" for line in self.direction.undecided]
        self.used |= self.direction.past
        for node in plain:
            self._leaf(node)
        for key, parts in self.fused.items():
            self._fuse(*key, parts)
        for name, leaves in theirs.items():
            MappedOptimizer(self, self.nodes[name], leaves, homes[name]).run()
        self._refuse_inside_values(plain)
        if not self.live.is_there:
            for node in view.nodes.values():
                _settle(node)
        if view.problems or self.strict:
            written = {dotted(node.name): node for node in self.nodes.values()} if len(self.used) < len(rules) else {}
            for number, rule in enumerate(rules):
                if number not in self.used:
                    why = "".join(sorted({_why_nothing(text, written) for text in befores(rule)}))
                    self.problem(f"a rule speaks of nothing in the checkpoint: {rule}{why}")
        return view

    def _refuse_inside_values(self, leaves: Sequence[SavedNode]) -> None:
        """A container without tensors is one value: what a rule puts into it would take its place."""
        for leaf in leaves:
            # On other ranks it may be a container.
            trees = leaf.trees & ~union(self.nodes[child].trees for child in leaf.children)
            for name in self.moved.get(leaf.name, [leaf.name]) if leaf.is_value and trees else ():
                node = self.view.nodes.get(name)
                into = (
                    [] if node is None else [child for child in node.children if self.view.nodes[child].trees & trees]
                )
                if into:
                    self.problem(
                        f"{dotted(leaf.name)} has no tensors in the checkpoint, and is one value there: "
                        f"{', '.join(map(dotted, into))} cannot be put into it"
                    )

    def problem(self, text: str) -> None:
        self.view.problems.append(f"mapping: {text}")

    def _leaves(self) -> Iterator[SavedNode]:
        return (node for node in self.nodes.values() if node.is_value or not node.children)

    def _leaf(self, node: SavedNode) -> None:
        text = dotted(node.name)
        claim = self.direction.claim(text)
        if claim is None:
            if self.direction.claim_after(text) is not None:
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
        return respelled(name, claim.end, start, rest, self._is_flat(parent_of(name)[0]))

    def _is_flat(self, container: str) -> bool:
        """Whether its keys are qualified names, as those of a module's state dict."""
        found = self._flat.get(container)
        if found is None:
            node = self.nodes[container]
            found = node.kind == "OrderedDict" or any(type(key) is str and "." in key for key in node.children.values())
            self._flat[container] = found
        return found

    def put(self, name: str, node: SavedNode, *, kind: Kind | None = None, parts: list[Part] | None = None) -> None:
        """A leaf of the state, like ``node`` of the checkpoint unless it is a tensor that has ``parts``."""
        view = self.view
        known = view.nodes.get(name)
        if known is None:
            known = view.nodes[name] = SavedNode(node.kind, name, node.detail)
        elif node.is_value and holds(known):
            pass  # a container on some ranks, a value without tensors on others
        elif known.is_value and holds(node):
            known.kind, known.detail = node.kind, node.detail
        elif not (holds(known) and holds(node)):
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
            upper, last = parent_of(name)
            old_upper, old_last = parent_of(old) if old != names.ROOT else (names.ROOT, last)
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
            elif not holds(container):
                self.problem(f"{dotted(upper)} is both a {container.kind} and what holds {dotted(name)}")
                return
            had = name in container.children
            container.children.setdefault(name, key)
            container.trees |= node.trees
            if had and not fresh:
                above = upper  # trees may have grown
                while above != names.ROOT:
                    above, _ = parent_of(above)
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


def union(sets: Iterable[int]) -> int:
    """Of sets of trees, each given by its bits."""
    found = 0
    for each in sets:
        found |= each
    return found


def _why_nothing(pattern: str, written: Mapping[str, SavedNode]) -> str:
    """What there is where a rule's pattern speaks of something else; "" if nothing."""
    node = written.get(pattern)
    if node is not None and node.kind == "subclass":
        return f"; {pattern} is a {node.detail[0]}, whose tensors are {', '.join(map(dotted, node.children))}"
    end = len(pattern)
    while (end := pattern.rfind(".", 0, end)) > 0:
        node = written.get(pattern[:end])
        if node is not None and node.is_value:
            return f"; {pattern[:end]} has no tensors, and is one value"
        if node is not None and {*node.children.values()} == {"state", "param_groups"}:
            return f"; the state of {pattern[:end]} follows its parameters"
    return ""


def holds(node: SavedNode) -> bool:
    """Whether this is a container."""
    return node.kind in MAPPINGS or node.kind in SEQUENCES or node.kind == "subclass"


def _settle(node: SavedNode) -> None:
    """Bring the items of a sequence into order; if some are missing it is a dict."""
    if node.kind in SEQUENCES and node.children:
        items = sorted(node.children.items(), key=lambda item: item[1])
        node.children = dict(items)
        if [key for _, key in items] != list(range(len(items))):
            node.kind, node.detail = "dict", None
