"""The twin of `tests/unit/attention/test_recomputation.py`, where leaving is a copy beside the computation."""

from __future__ import annotations

import torch

from elastic_ring.attention.recomputation import OffloadedTensor
from tests.unit.attention.test_recomputation import is_itself_until_it_leaves_and_equal_every_time_it_comes_back


def test_it_is_itself_until_it_leaves_and_equal_every_time_it_comes_back() -> None:
    is_itself_until_it_leaves_and_equal_every_time_it_comes_back("cuda")


def test_memory_that_was_left_is_not_used_again_before_the_copy_is_done() -> None:
    for number in range(50):
        tensor = torch.full((4 << 20,), float(number), device="cuda")
        offloaded = OffloadedTensor(tensor)
        offloaded.leave()
        del tensor
        torch.full((4 << 20,), -1.0, device="cuda")  # would take the same memory
        assert float(offloaded.tensor().min()) == number
