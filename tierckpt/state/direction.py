"""Whether a checkpoint has the names of before a mapping's rules, or was saved by a state that was mapped already."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from tierckpt.state.mapping import Claim, Mapping, Rename


class _Both(NamedTuple):
    """A name of which rules speak on both sides."""

    name: str
    before: Claim
    after: Claim


class Direction:
    """Tells for each rule whether it is still to be applied to a checkpoint with these names.

    A script that restores through a mapping saves under the new names, and is started again. Rules that meet in a name
    (``a`` becomes ``b``, ``b`` becomes ``c``) share their fate. They have been applied if there are names that only they
    can have made, and none that they would have taken away. Where all names are possible on both sides (an exchange, a
    prefix that is added or removed), it counts which of them the state has, then whether the pattern of one side says
    more of the name than that of the other. An exchange stays undecided; it is for the caller to say, by naming the
    checkpoint.

    ``past``: numbers of the rules that have been applied. ``undecided``: a line for each set of rules of which it is not
    known.
    """

    def __init__(self, mapping: Mapping, live: Collection[str] | None, *, named: bool) -> None:
        """``live``: dotted names of the state; None: there is none. ``named``: the caller has named the checkpoint."""
        self._mapping, self._live, self._named = mapping, live, named
        self.past: set[int] = set()
        self.undecided: list[str] = []

    def claim(self, name: str) -> Claim | None:
        """The rule that is to be applied to this dotted name of the checkpoint."""
        found = self._mapping.claim(name)
        return None if found is not None and found.rule in self.past else found

    def claim_after(self, name: str) -> Claim | None:
        """The rule, if it is to be applied, that makes this dotted name."""
        found = self._mapping.claim_after(name)
        return None if found is not None and found.rule in self.past else found

    def decide(self, leaves: Iterable[str], optimizers: Iterable[str]) -> None:
        """From the dotted names of a checkpoint. Optimizers are moved as a whole, so only by a `Rename`."""
        rules = self._mapping.rules
        met = list(range(len(rules)))  # rules that meet: each points to another of them, one to itself
        only_before: set[int] = set()
        only_after: set[int] = set()
        both: list[_Both] = []
        for name, before, after in self._claims(leaves, optimizers):
            if before is not None and after is not None:
                if self._mapping.targets(name) != (name,):
                    both.append(_Both(name, before, after))
                    met[_root(met, before.rule)] = _root(met, after.rule)
            elif before is not None:
                only_before.add(before.rule)
            elif after is not None:
                only_after.add(after.rule)
        taken = {_root(met, rule) for rule in only_before}
        made = {_root(met, rule) for rule in only_after} - taken
        open_: dict[int, list[_Both]] = {}
        for each in both:
            root = _root(met, each.before.rule)
            if root not in taken and root not in made:
                open_.setdefault(root, []).append(each)
        for root, names in open_.items():
            applied = self._applied(names)
            if applied:
                made.add(root)
            elif applied is None and not self._named:
                concerned = [rule for rule in range(len(rules)) if _root(met, rule) == root]
                self.undecided.append(_line(concerned, names))
        seen = {rule for each in both for rule in (each.before.rule, each.after.rule)} | only_after
        self.past = {rule for rule in seen if _root(met, rule) in made}

    def _claims(
        self, leaves: Iterable[str], optimizers: Iterable[str]
    ) -> Iterator[tuple[str, Claim | None, Claim | None]]:
        mapping = self._mapping
        for name in leaves:
            yield name, mapping.claim(name), mapping.claim_after(name)
        for name in optimizers:
            found = [
                claim if claim is not None and isinstance(mapping.rules[claim.rule], Rename) else None
                for claim in (mapping.claim(name), mapping.claim_after(name))
            ]
            yield name, found[0], found[1]

    def _applied(self, names: list[_Both]) -> bool | None:
        """Whether the rules have been applied to these names, all of which are possible on both sides; None: undecided."""
        if self._live is not None:
            here = any(each.name in self._live for each in names)
            to_come = any(target in self._live for each in names for target in self._mapping.targets(each.name))
            if here != to_come:
                return here
            if not here:
                return False  # the state has nothing of it
        if all(each.before.rule == each.after.rule for each in names):
            if all(each.after.end > each.before.end for each in names):
                return True
            if all(each.after.end < each.before.end for each in names):
                return False
        return None


def _root(met: list[int], rule: int) -> int:
    while met[rule] != rule:
        rule = met[rule]
    return rule


def _line(rules: list[int], names: list[_Both]) -> str:
    listed = ", ".join(each.name for each in names[:4]) + (", …" if len(names) > 4 else "")
    which = f"rule {rules[0]} has" if len(rules) == 1 else f"rules {', '.join(map(str, rules))} have"
    return (
        f"{which} names of the checkpoint ({listed}) among the old ones and among the new ones, so whether it was saved before "
        "or after them cannot be seen. If before, name the checkpoint with step=; if after, leave these rules out"
    )
