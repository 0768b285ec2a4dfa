"""What messages say reads as English does."""

from __future__ import annotations

from collections import OrderedDict

from tierckpt.telling import a


def test_classes_have_their_article() -> None:
    assert [a(value) for value in (1, "", OrderedDict(), None)] == ["an int", "a str", "an OrderedDict", "a NoneType"]
