"""The digest that is computed where a tensor lies: equal for equal bits, another for any other bits."""

from __future__ import annotations

import pytest
import torch

from elastic_ring.state.device_sums import PIECE_WORDS, device_digests


def device_digest(tensor: torch.Tensor) -> bytes:
    return device_digests([tensor])[0]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4096, 2 * PIECE_WORDS + 3])
def test_equal_bits_give_equal_digests_and_one_flipped_bit_another(size):
    generator = torch.Generator().manual_seed(size)
    tensor = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
    assert device_digest(tensor) == device_digest(tensor.clone())
    if size:
        flipped = tensor.clone()
        flipped[size // 2] ^= 1
        assert device_digest(flipped) != device_digest(tensor)


def test_order_and_length_count():
    words = torch.arange(64, dtype=torch.int64)
    assert device_digest(words) != device_digest(words.flip(0))
    assert device_digest(torch.zeros(3, dtype=torch.uint8)) != device_digest(torch.zeros(4, dtype=torch.uint8))


def test_a_view_is_digested_by_its_values():
    whole = torch.randn(6, 8).bfloat16()
    assert device_digest(whole[:, 1:4]) == device_digest(whole[:, 1:4].clone())
    assert device_digest(whole[:, 1:4]) != device_digest(whole[:, 2:5])
