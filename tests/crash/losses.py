"""A disk that may lose what was not synced: from a log of operations, all states after a loss of power.

What a file system promises is little: the bytes and the size of a file are safe once that file was fsynced, a name
in a folder once that folder was; whatever came later or was never synced may be there or not, each independently of
the others.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: How an unsynced write may be lost: not at all, wholly (the file stays short or has a hole), its bytes but not its
#: length, its second half.
KEPT, GONE, ZEROS, HALF = "kept", "gone", "zeros", "half"


@dataclass(frozen=True)
class Operation:
    """One call that changed the disk, as the shim logged it; paths are relative to the root, ``.`` is the root.

    Attributes:
        result: what it returned; negative: an errno, and then it changed nothing.
    """

    name: str
    ino: int
    path: str
    other: str
    offset: int
    result: int
    data: bytes

    def __str__(self) -> str:
        more = f" {self.other}" if self.other else f" +{self.offset}" if self.data else ""
        return f"{self.name} {self.path}{more}"


def read_log(path: Path) -> list[Operation]:
    """The operations in a log of the shim, in order."""
    content, found, position = path.read_bytes(), [], 0
    while position < len(content):
        end = content.index(b"\n", position)
        name, ino, first, other, offset, result, size = content[position:end].decode().split("\t")
        position = end + 1 + int(size)
        data = content[end + 1 : position]
        found.append(Operation(name, int(ino), first, other, int(offset), int(result), data))
    return found


#: What a folder holds, by name: the number of a node. What a file holds: its bytes.
Content = dict[str, int] | bytearray


@dataclass
class Tree:
    """Files and folders by number; 0 is the root."""

    nodes: dict[int, Content] = field(default_factory=dict)

    @classmethod
    def scan(cls, root: Path) -> Tree:
        """What is below ``root`` now."""
        tree = cls()

        def add(path: Path) -> int:
            number = len(tree.nodes)
            tree.nodes[number] = {}
            if path.is_dir():
                tree.nodes[number] = {child.name: add(child) for child in sorted(path.iterdir())}
            else:
                tree.nodes[number] = bytearray(path.read_bytes())
            return number

        add(root)
        return tree

    def copy(self) -> Tree:
        return Tree({number: content.copy() for number, content in self.nodes.items()})

    def folder(self, number: int) -> dict[str, int]:
        content = self.nodes[number]
        assert isinstance(content, dict)
        return content

    def find(self, path: str) -> int:
        """The node of a path relative to the root."""
        number = 0
        for part in [] if path == "." else path.split("/"):
            number = self.folder(number)[part]
        return number

    def files(self) -> dict[str, bytes | None]:
        """All paths with their bytes; folders with None."""
        found: dict[str, bytes | None] = {}
        stack = [("", 0)]
        while stack:
            prefix, number = stack.pop()
            for name, child in self.folder(number).items():
                content = self.nodes[child]
                if isinstance(content, dict):
                    found[prefix + name] = None
                    stack.append((f"{prefix}{name}/", child))
                else:
                    found[prefix + name] = bytes(content)
        return found

    def build(self, root: Path) -> None:
        """Make ``root`` hold exactly this tree."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        for path, data in sorted(self.files().items()):
            if data is None:
                (root / path).mkdir()
            else:
                (root / path).write_bytes(data)
                if path.endswith(".pem"):
                    (root / path).chmod(0o600)


@dataclass(frozen=True)
class _Change:
    """An operation with its paths resolved to nodes.

    Attributes:
        index: of the operation in the log.
        synced_by: nodes (file or folders) whose fsync makes it safe.
        names: (folder, name, node) set by it; node None: removed.
        file: the node whose content it changes, None if it changes names only.
    """

    index: int
    operation: Operation
    synced_by: tuple[int, ...]
    names: tuple[tuple[int, str, int | None], ...] = ()
    file: int | None = None
    makes: Content | None = None

    def apply(self, tree: Tree, fate: str = KEPT) -> None:
        if self.makes is not None and self.file is not None:
            tree.nodes.setdefault(self.file, self.makes.copy())
        if fate == GONE:
            return
        for folder, name, node in self.names:
            if node is None:
                tree.folder(folder).pop(name, None)
            else:
                tree.folder(folder)[name] = node
        if self.file is not None and self.makes is None:
            content = tree.nodes[self.file]
            assert isinstance(content, bytearray)
            if self.operation.name == "write":
                _write(content, self.operation, fate)
            elif self.operation.name != "allocate" or len(content) < self.operation.offset:
                _resize(content, self.operation.offset)


def _resize(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))


def _write(content: bytearray, operation: Operation, fate: str) -> None:
    data, start = operation.data, operation.offset
    if fate == HALF:
        data = data[: len(data) // 2]
    if len(content) < start + len(data):
        _resize(content, start + len(data))
    if fate != ZEROS:
        content[start : start + len(data)] = data


class Record:
    """A tree and what was done to it.

    Args:
        before: the tree, all of it safe.
        log: the operations.
    """

    def __init__(self, before: Tree, log: list[Operation]) -> None:
        self.before, self.log = before, log
        self.changes: list[_Change] = []
        #: (index, node) of each fsync.
        self.syncs: list[tuple[int, int]] = []
        #: Which node each inode is that was made meanwhile. What was there before is known by its path.
        self._numbers: dict[int, int] = {}
        now = before.copy()
        for index, operation in enumerate(log):
            if operation.result < 0 or operation.name == "close":
                continue
            if operation.name == "fsync":
                self.syncs.append((index, self._node(now, operation)))
                continue
            for change in self._resolve(now, index, operation):
                self.changes.append(change)
                change.apply(now)
        self.after = now

    def _node(self, now: Tree, operation: Operation) -> int:
        node = self._numbers.get(operation.ino)
        return now.find(operation.path) if node is None else node

    def _resolve(self, now: Tree, index: int, operation: Operation) -> list[_Change]:
        if operation.name in ("write", "truncate", "allocate"):
            node = self._node(now, operation)
            return [_Change(index, operation, (node,), file=node)]
        folder, name = _entry(now, operation.path)
        if operation.name in ("create", "mkdir", "open"):
            old = now.folder(folder).get(name)
            if old is not None:  # opened with O_TRUNC (or not even that)
                cut = _Change(index, operation, (old,), file=old)
                return [cut] if operation.name == "create" else []
            # The kernel gives the number of a removed file to the next one.
            node = self._numbers[operation.ino] = max(now.nodes) + 1
            makes: Content = {} if operation.name == "mkdir" else bytearray()
            return [_Change(index, operation, (folder,), ((folder, name, node),), node, makes)]
        if operation.name in ("unlink", "rmdir"):
            return [_Change(index, operation, (folder,), ((folder, name, None),))]
        assert operation.name in ("link", "rename"), operation
        node = now.folder(folder)[name]
        to, new = _entry(now, operation.other)
        if operation.name == "link":
            return [_Change(index, operation, (to,), ((to, new, node),))]
        names = ((folder, name, None), (to, new, node))
        return [_Change(index, operation, tuple({folder, to}), names)]

    def pending(self, length: int, within: str = "") -> list[_Change]:
        """The changes below ``within`` among the first ``length`` operations that a loss of power may undo."""
        found = []
        for change in self.changes:
            if change.index < length and change.operation.path.startswith(within):
                synced = {node for index, node in self.syncs if change.index < index < length}
                if not synced.issuperset(change.synced_by):
                    found.append(change)
        return found

    def state(self, length: int, fates: dict[int, str]) -> Tree:
        """The tree after the first ``length`` operations, of which some meet a fate (by index)."""
        tree = self.before.copy()
        for change in self.changes:
            if change.index < length:
                change.apply(tree, fates.get(change.index, KEPT))
        return tree

    def losses(self, length: int, within: str, rng: random.Random, samples: int) -> Iterator[tuple[str, Tree]]:
        """States after a loss of power when the first ``length`` operations were done, each with its description.

        Only what is below ``within`` may be lost. Nothing lost, each single loss, everything lost, and ``samples``
        random ones.
        """
        pending = self.pending(length, within)
        choices = [(change.index, fate) for change in pending for fate in _fates(change)]
        cases: list[dict[int, str]] = [{}, *({index: fate} for index, fate in choices)]
        cases += [{change.index: fate for change in pending} for fate in (GONE, ZEROS)]
        for _ in range(samples if len(choices) > 1 else 0):
            share = rng.random()
            cases.append({index: fate for index, fate in choices if rng.random() < share})
        for case in cases:
            told = ", ".join(f"[{index}] {self.log[index]} {fate}" for index, fate in case.items()) or "nothing"
            yield f"after {length} of {len(self.log)} operations, lost: {told}", self.state(length, case)


def _fates(change: _Change) -> tuple[str, ...]:
    return (GONE, ZEROS, HALF) if change.operation.name == "write" else (GONE,)


def _entry(now: Tree, path: str) -> tuple[int, str]:
    folder, _, name = path.rpartition("/")
    return now.find(folder or "."), name


def fingerprint(tree: Tree) -> int:
    """Equal for trees that hold the same."""
    return hash(frozenset(tree.files().items()))


def mirror(source: Path, target: Path) -> None:
    """Make ``target`` a copy of the folder ``source``."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)


def walk(root: Path) -> list[str]:
    """All files below ``root``, relative to it."""
    return sorted(
        os.path.relpath(os.path.join(folder, name), root) for folder, _, names in os.walk(root) for name in names
    )
