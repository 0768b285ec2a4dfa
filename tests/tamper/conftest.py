"""The store that all tests here tamper with."""

from __future__ import annotations

from tests.tamper.sample import made, sample

__all__ = ["made", "sample"]
