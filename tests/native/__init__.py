"""Tests of the C++ module."""
