"""Rules between the names of a checkpoint and those of a state, declared once and good for both directions.

Names are written with dots, as in ``keys=``. A ``*`` stands for one or more characters that are no dots, at most
one between two dots; what it stands for is carried over, in order. Nothing here knows tensors: what the rules make of
a checkpoint is in `tierckpt.state.mapped`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from tierckpt.errors import StateError


@dataclass(frozen=True)
class Rename:
    """What the checkpoint calls ``source`` the state calls ``target``, and so with everything below that name.

    It may be any leaf or container: ``Rename("model.layers.*.attn.wo", "model.blocks.*.proj")`` moves the weight and
    the bias of a layer.
    """

    source: str
    target: str


@dataclass(frozen=True)
class Fuse:
    """The checkpoint's tensors ``sources``, one after the other along ``dim``, are the state's ``target``.

    ``sizes``: how long each is along ``dim``; None: as the checkpoint says.
    """

    sources: tuple[str, ...]
    target: str
    dim: int = 0
    sizes: tuple[int, ...] | None = None

    def __init__(self, sources: Sequence[str], target: str, dim: int = 0, sizes: Sequence[int] | None = None) -> None:
        object.__setattr__(self, "sources", _texts(sources))
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "sizes", None if sizes is None else tuple(sizes))


@dataclass(frozen=True)
class Split:
    """The checkpoint's tensor ``source``, cut along ``dim``, is the state's ``targets``.

    ``sizes``: how long each is along ``dim``; None: as the state's tensors are; where there is no state (in ``read``)
    all the same.
    """

    source: str
    targets: tuple[str, ...]
    dim: int = 0
    sizes: tuple[int, ...] | None = None

    def __init__(self, source: str, targets: Sequence[str], dim: int = 0, sizes: Sequence[int] | None = None) -> None:
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "targets", _texts(targets))
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "sizes", None if sizes is None else tuple(sizes))


Rule: TypeAlias = Rename | Fuse | Split


class Claim(NamedTuple):
    """A name that a rule speaks of.

    ``rule``: its number; ``part``: which of its sources or targets; ``captures``: what the stars stand for;
    ``end``: where in the name the pattern ends (what follows is below it).
    """

    rule: int
    part: int
    captures: tuple[str, ...]
    end: int


@dataclass(frozen=True)
class Mapping:
    """How names of a checkpoint become names of a state. Names that no rule speaks of are the same in both.

    The state of optimizers follows its parameters, and so do the lists of parameters in their groups. Tensors are
    read straight to where they belong; nothing is put together in between. A container without tensors is one value:
    it can be renamed, but not its keys, and no tensor can be put into it. What else the names of a checkpoint leave open
    (which of two modules of the same names an optimizer trains) is refused where there is no state that tells.

    A mapping is good for checkpoints of before and after it, so that a script which restores through it can be started
    again. Rules whose new names are in the checkpoint, and whose old names are not, have been applied: they do nothing.
    Where names are possible on both sides, those that the state has tell. Rules that exchange names (``a`` becomes ``b``,
    ``b`` becomes ``a``) leave no trace: a load through them is refused, unless ``step=`` names the checkpoint that they are
    to be applied to. A rule of whose names the checkpoint has none, old or new, is an error (not with ``strict=False``).

    Raises ``StateError`` listing all that is wrong: patterns of one rule with different numbers of stars, names that
    two rules claim on the same side, fewer than two tensors to fuse, sizes that do not fit. So the mapping is one to
    one: ``inverse()`` undoes it on every name that it covers.
    """

    rules: tuple[Rule, ...]
    _before: _Side = field(init=False, repr=False, compare=False)
    _after: _Side = field(init=False, repr=False, compare=False)

    def __init__(self, rules: Iterable[Rule]) -> None:
        object.__setattr__(self, "rules", tuple(rules))
        problems = [f"rule {n}: {problem}" for n, rule in enumerate(self.rules) for problem in _problems(rule)]
        if not problems:
            object.__setattr__(self, "_before", _Side((n, befores(rule), rule) for n, rule in enumerate(self.rules)))
            object.__setattr__(self, "_after", _Side((n, afters(rule), rule) for n, rule in enumerate(self.rules)))
            problems += [f"in the checkpoint, {line}" for line in self._before.overlaps()]
            problems += [f"in the state, {line}" for line in self._after.overlaps()]
        if problems:
            raise StateError("the mapping is wrong:" + "".join(f"\n  {problem}" for problem in problems))

    def inverse(self) -> Mapping:
        """The mapping that goes back: a checkpoint of the state's names into a state of the checkpoint's."""
        return Mapping(_inverse(rule) for rule in self.rules)

    def claim(self, name: str) -> Claim | None:
        """The rule that speaks of this dotted name of the checkpoint."""
        return self._before.claim(name)

    def claim_after(self, name: str) -> Claim | None:
        """The rule that speaks of this dotted name of the state."""
        return self._after.claim(name)

    def targets(self, name: str) -> tuple[str, ...]:
        """What the state calls that which the checkpoint calls ``name``: several when it is split."""
        return _carry(name, self.claim(name), self.rules, afters)

    def sources(self, name: str) -> tuple[str, ...]:
        """What the checkpoint calls that which the state calls ``name``: several when it is fused."""
        return _carry(name, self.claim_after(name), self.rules, befores)


def befores(rule: Rule) -> tuple[str, ...]:
    """The patterns of a rule for names of the checkpoint."""
    return rule.sources if isinstance(rule, Fuse) else (rule.source,)


def afters(rule: Rule) -> tuple[str, ...]:
    """The patterns of a rule for names of the state."""
    return rule.targets if isinstance(rule, Split) else (rule.target,)


def fill(pattern: str, captures: Sequence[str]) -> str:
    """The name that a pattern stands for."""
    first, *rest = pattern.split("*")
    return first + "".join(text + literal for text, literal in zip(captures, rest, strict=True))


def _carry(
    name: str, claim: Claim | None, rules: Sequence[Rule], patterns: Callable[[Rule], tuple[str, ...]]
) -> tuple[str, ...]:
    if claim is None:
        return (name,)
    rest = name[claim.end :]
    return tuple([fill(pattern, claim.captures) + rest for pattern in patterns(rules[claim.rule])])


def _inverse(rule: Rule) -> Rule:
    if isinstance(rule, Rename):
        return Rename(rule.target, rule.source)
    if isinstance(rule, Fuse):
        return Split(rule.target, rule.sources, rule.dim, rule.sizes)
    return Fuse(rule.targets, rule.source, rule.dim, rule.sizes)


def _texts(patterns: Sequence[str]) -> tuple[str, ...]:
    # One string is a sequence of strings, too, but never meant so.
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _problems(rule: Rule) -> Iterator[str]:
    if not isinstance(rule, (Rename, Fuse, Split)):
        yield f"{rule!r} is not a Rename, a Fuse or a Split"
        return
    patterns = [*befores(rule), *afters(rule)]
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern or any(not part for part in pattern.split(".")):
            yield f"{pattern!r} is not a name with dots"
            return
        if any(part.count("*") > 1 for part in pattern.split(".")):
            yield f"{pattern!r} has several stars between two dots, so what each stands for is not clear"
            return
    counts = {pattern.count("*") for pattern in patterns}
    if len(counts) > 1:
        listed = ", ".join(f"{pattern!r} has {pattern.count('*')}" for pattern in patterns)
        yield f"its patterns have different numbers of stars: {listed}"
    if isinstance(rule, Rename):
        return
    several = rule.sources if isinstance(rule, Fuse) else rule.targets
    if len(several) < 2:
        yield f"{rule!r} needs at least two tensors that make one; use Rename"
    if type(rule.dim) is not int:
        yield f"dim={rule.dim!r} is not an integer"
    if rule.sizes is not None and (
        len(rule.sizes) != len(several) or any(type(size) is not int or size < 0 for size in rule.sizes)
    ):
        yield f"sizes={rule.sizes!r} must be {len(several)} integers, one for each of {', '.join(several)}"


class _Pattern(NamedTuple):
    text: str
    parts: tuple[str, ...]
    prefix: bool  # names below it belong to it, too
    rule: int
    part: int


class _Side:
    """The patterns of all rules for one side's names. Those without stars are looked up, however many they are."""

    def __init__(self, rules: Iterable[tuple[int, tuple[str, ...], Rule]]) -> None:
        self._literals: dict[str, _Pattern] = {}
        self._globs: list[tuple[re.Pattern[str], _Pattern]] = []
        self._twice: list[tuple[_Pattern, _Pattern]] = []
        for number, patterns, rule in rules:
            for part, text in enumerate(patterns):
                pattern = _Pattern(text, tuple(text.split(".")), isinstance(rule, Rename), number, part)
                if "*" in text:
                    self._globs.append((_regex(pattern), pattern))
                elif text in self._literals:
                    self._twice.append((self._literals[text], pattern))
                else:
                    self._literals[text] = pattern

    def claim(self, name: str) -> Claim | None:
        literals = self._literals
        if literals:
            found = literals.get(name)
            end = len(name)
            while found is None or (end < len(name) and not found.prefix):
                end = name.rfind(".", 0, end)
                if end < 0:
                    found = None
                    break
                found = literals.get(name[:end])
            if found is not None:
                return Claim(found.rule, found.part, (), end)
        for regex, pattern in self._globs:
            match = regex.match(name)
            if match is not None:
                return Claim(pattern.rule, pattern.part, match.groups(), match.end())
        return None

    def overlaps(self) -> Iterator[str]:
        """A line for each two patterns that can speak of the same name."""
        for a, b in self._twice:
            yield _clash(a, b)
        for text, pattern in self._literals.items():
            end = text.rfind(".")
            while end > 0:
                above = self._literals.get(text[:end])
                if above is not None and above.prefix:
                    yield _clash(above, pattern)
                end = text.rfind(".", 0, end)
        for i, (_, glob) in enumerate(self._globs):
            for other in [*self._literals.values(), *(pattern for _, pattern in self._globs[:i])]:
                if _meet(glob, other):
                    yield _clash(other, glob)


def _regex(pattern: _Pattern) -> re.Pattern[str]:
    text = re.escape(pattern.text).replace(r"\*", r"([^.]+)")
    return re.compile(text + (r"(?=\.|\Z)" if pattern.prefix else r"\Z"), re.DOTALL)


def _meet(a: _Pattern, b: _Pattern) -> bool:
    """Whether some name belongs to both patterns."""
    if len(a.parts) != len(b.parts) and not (a if len(a.parts) < len(b.parts) else b).prefix:
        return False
    return all(_parts_meet(x, y) for x, y in zip(a.parts, b.parts, strict=False))


def _parts_meet(x: str, y: str) -> bool:
    if "*" not in x:
        x, y = y, x
    if "*" not in x:
        return x == y
    head, tail = x.split("*")
    if "*" not in y:
        return len(y) > len(head) + len(tail) and y.startswith(head) and y.endswith(tail)
    other_head, other_tail = y.split("*")
    heads = head.startswith(other_head) or other_head.startswith(head)
    return heads and (tail.endswith(other_tail) or other_tail.endswith(tail))


def _clash(a: _Pattern, b: _Pattern) -> str:
    a, b = sorted((a, b), key=lambda pattern: (pattern.rule, pattern.part))
    return f"rule {a.rule} ({a.text!r}) and rule {b.rule} ({b.text!r}) speak of the same names"
