"""An offloaded tensor: itself until it is copied out, then freed, and copied back with the same bits."""

from __future__ import annotations

import weakref

import pytest
import torch

from elastic_ring.attention.recomputation import OffloadedTensor


def is_itself_until_it_leaves_and_equal_every_time_it_comes_back(device: str) -> None:
    tensor = torch.randn(3, 5, device=device).requires_grad_()
    wanted, there = tensor.detach().cpu().clone(), weakref.ref(tensor)
    offloaded = OffloadedTensor(tensor)
    assert offloaded.tensor() is tensor
    offloaded.leave()
    del tensor
    assert there() is None
    for _ in range(2):
        back = offloaded.tensor()
        assert back.requires_grad
        assert back.device.type == device
        assert torch.equal(back.detach().cpu(), wanted)
        back.detach().zero_()  # whoever brought it back may do with it as they please


def test_it_is_itself_until_it_leaves_and_equal_every_time_it_comes_back() -> None:
    is_itself_until_it_leaves_and_equal_every_time_it_comes_back("cpu")


def test_without_a_gradient_it_comes_back_without_one() -> None:
    offloaded = OffloadedTensor(torch.ones(2, dtype=torch.int64))
    offloaded.leave()
    assert not offloaded.tensor().requires_grad
    with pytest.raises(AssertionError, match="left already"):
        offloaded.leave()
