"""Names of leaves: the path from the root of a state to a leaf, written so that different paths differ."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, TypeAlias

from tierckpt.errors import IntegrityError, StateError
from tierckpt.format import canonical, values

Component: TypeAlias = str | int | bool | float | tuple[Any, ...] | bytes | None
"""A list index, a key of a dict or an attribute. Other keys that `values.encode` takes work as well."""

ROOT = "~r"
"""The name of the root itself: a state that is one tensor or one value."""

_PLAIN = re.compile(r"[^~/#\x00-9\ud800-\udfff][^~/#\x00\ud800-\udfff]*")  # written as it is; most are
_ALL_PLAIN = re.compile(rf"{_PLAIN.pattern}(?:\0{_PLAIN.pattern})*")  # with NUL, which none has, between them
_INTEGER = re.compile(r"-?[0-9]+")
_METADATA = "__metadata__"


def join(path: Sequence[Component]) -> str:
    """The name of the leaf at ``path``. Raises ``StateError`` for components that cannot be written."""
    if not path:
        return ROOT
    return "/".join(map(component, path))


def components(parts: Iterable[Component]) -> list[str]:
    """Each as :func:`component` writes it. Those of large containers are plain strings: all are looked at at once."""
    parts = list(parts)
    if len(parts) > 1 and set(map(type, parts)) == {str}:
        texts: list[str] = parts  # type: ignore[assignment]
        text = "\0".join(texts)
        if text.count("\0") < len(texts) and _ALL_PLAIN.fullmatch(text) and _METADATA not in texts:
            return texts
    return list(map(component, parts))


def component(part: Component) -> str:
    """One component as it stands in a name. Raises ``StateError`` if it cannot be written."""
    return _string(part) if type(part) is str else _other(part)


def split(name: str) -> tuple[Component, ...]:
    """The path that has this name. Raises ``IntegrityError`` for anything that `join` does not return.

    Keys whose class only a template can supply (members of enums, named tuples) come back as `values.decode`
    returns them without one.
    """
    if name == ROOT:
        return ()
    return tuple([_component(text, name) for text in name.split("/")])


def dotted(path: Sequence[Component]) -> str:
    """The path as users write it in ``keys=``: ``model.layers.0.weight``. Different paths can look alike."""
    return ".".join(map(str, path))


def matches(path: Sequence[Component], patterns: Sequence[str]) -> bool:
    """Whether the dotted form matches one of the shell patterns (``*`` crosses dots; case counts)."""
    text = dotted(path)
    return any(fnmatchcase(text, pattern) for pattern in patterns)


@lru_cache(maxsize=1 << 16)
def _string(text: str) -> str:
    if _PLAIN.fullmatch(text) and text != _METADATA:
        return text
    if "\0" in text:
        raise StateError(f"key {text!r} contains NUL; rename it")
    if not text:
        return "~e"
    if text == _METADATA or _INTEGER.fullmatch(text):
        return "~s" + text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise StateError(f"key {text!r} contains a lone surrogate, which is not text; rename it") from None
    return text.replace("~", "~0").replace("/", "~1").replace("#", "~2")


def _other(key: object) -> str:
    if type(key) is int:
        try:
            return str(key)
        except ValueError as error:  # more digits than Python converts
            raise StateError(f"an integer is too large for a key: {error}") from None
    _must_be_plain(key, key)
    encoded = canonical.encode(values.encode(key, path=f"key {values.shown(key)}"))
    return "~k" + base64.urlsafe_b64encode(encoded).rstrip(b"=").decode("ascii")


_PLAIN_KEYS = (bool, float, type(None), bytes, int, str)


def _must_be_plain(part: object, key: object) -> None:
    """Keys of containers of tensors must come back as they were, without a template, and be equal to themselves."""
    if type(part) is tuple:
        for item in part:
            _must_be_plain(item, key)
    elif type(part) not in _PLAIN_KEYS or part != part:
        raise StateError(
            f"key {values.shown(key)} of type {type(key).__name__} cannot name tensors; use a str, int, bool, None, bytes, "
            "a float that is a number, or a tuple of these"
        )


def _component(text: str, name: str) -> Component:
    if _INTEGER.fullmatch(text):
        return _same(_integer(text, name), text, name)
    if text.startswith("~k"):
        return _key(text, name)
    if text.startswith("~s"):
        return _same(text[2:], text, name)
    if text == "~e":
        return ""
    return _same(text.replace("~2", "#").replace("~1", "/").replace("~0", "~"), text, name)


def _integer(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:  # more digits than Python converts
        raise _malformed(name, text) from None


def _key(text: str, name: str) -> Component:
    try:
        encoded = base64.urlsafe_b64decode(text[2:] + "=" * (-len(text[2:]) % 4))
    except (ValueError, binascii.Error):
        raise _malformed(name, text) from None
    what = f"name {name[:200]!r}"
    json = canonical.decode(encoded, what=what, depth=values.DEPTH_LIMIT)
    value = values.decode(json, what=what)
    written = "~k" + base64.urlsafe_b64encode(encoded).rstrip(b"=").decode("ascii")
    try:
        hash(value)
    except TypeError:
        raise _malformed(name, text) from None
    large = type(json) is list and json[0] == "int"
    if written != text or type(json) is str or type(json) is int or large:
        raise _malformed(name, text)
    key: Component = value
    return key


def _same(component: Component, text: str, name: str) -> Component:
    """The component, if it is written like that."""
    try:
        written = join((component,))
    except StateError:
        raise _malformed(name, text) from None
    if written != text:
        raise _malformed(name, text)
    return component


def _malformed(name: str, text: str) -> IntegrityError:
    return IntegrityError(f"name {name[:200]!r}: {text[:80]!r} is not how a component of a path is written")
