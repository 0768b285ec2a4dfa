"""Protects what makes the demo's resume exact: the data goes on where it stood, from one number."""

from __future__ import annotations

import torch

from tierckpt.demo.text import Windows, library_sources


def _windows() -> Windows:
    return Windows(torch.arange(0, 101, dtype=torch.uint8), length=10, seed=1)


def test_a_restored_position_goes_on_with_the_same_windows() -> None:
    walked, fresh = _windows(), _windows()
    for _ in range(3):
        walked.next(rank=0, world=2, batch=2)
    fresh.load_state_dict(walked.state_dict())
    for ours, theirs in zip(walked.next(1, 2, 2), fresh.next(1, 2, 2), strict=True):
        assert torch.equal(ours, theirs)


def test_ranks_share_an_epoch_without_overlap_and_targets_are_the_next_bytes() -> None:
    seen = []
    for rank in range(2):
        tokens, targets = _windows().next(rank, world=2, batch=5)
        assert torch.equal(targets, tokens + 1)
        seen += tokens[:, 0].tolist()
    assert sorted(seen) == list(range(0, 100, 10))


def test_the_text_is_there_and_the_same_each_time() -> None:
    text = library_sources(100_000)
    assert len(text) == 100_000 and torch.equal(text, library_sources(100_000))
