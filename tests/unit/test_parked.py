"""A parked tensor: itself until it leaves, then let go of and brought back with the same bits."""

from __future__ import annotations

import weakref

import pytest
import torch

from elastic_ring.attention.parked import Parked


def is_itself_until_it_leaves_and_equal_every_time_it_comes_back(device: str) -> None:
    tensor = torch.randn(3, 5, device=device).requires_grad_()
    wanted, there = tensor.detach().cpu().clone(), weakref.ref(tensor)
    parked = Parked(tensor)
    assert parked.tensor() is tensor
    parked.leave()
    del tensor
    assert there() is None
    for _ in range(2):
        back = parked.tensor()
        assert back.requires_grad
        assert back.device.type == device
        assert torch.equal(back.detach().cpu(), wanted)
        back.detach().zero_()  # whoever brought it back may do with it as they please


def test_it_is_itself_until_it_leaves_and_equal_every_time_it_comes_back() -> None:
    is_itself_until_it_leaves_and_equal_every_time_it_comes_back("cpu")


def test_without_a_gradient_it_comes_back_without_one() -> None:
    parked = Parked(torch.ones(2, dtype=torch.int64))
    parked.leave()
    assert not parked.tensor().requires_grad
    with pytest.raises(AssertionError, match="left already"):
        parked.leave()
