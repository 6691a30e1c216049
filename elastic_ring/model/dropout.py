"""Dropout without a generator: a mask is a function of where it is used, so that its bits are the same on every device,
ring and layout, and when a pass or a layer runs again.

A token has a key, of its sequence's seed (run, step, place in the step) and its position there; a call has a word, of
its layer and its number in it. Two channels share a word of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable
pseudorandom number generators"), whose state begins at key xor word: 32 bits each, compared as integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from elastic_ring.model.init import seed_of

GAMMA, FIRST, SECOND = (word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
LIMIT_WORDS = 1 << 23
"""Words of 64 bits that exist at a time."""


def sequence_seed(seed: int, step: int, index_in_batch: int) -> int:
    """The seed of a sequence in a step, a signed number of 64 bits."""
    return seed_of(f"dropout {seed}/{step}/{index_in_batch}")


def token_keys(sequence_seeds: Sequence[int], positions: Tensor) -> Tensor:
    """The key of each token, int64 (S,): `positions` (1, S) are those of a rank's slices of as many sequences, equally
    long and end to end."""
    seeds = torch.tensor(list(sequence_seeds), dtype=torch.int64, device=positions.device)
    return _mix(positions.view(len(sequence_seeds), -1) * GAMMA + seeds.unsqueeze(1)).flatten()


def dropout(x: Tensor, rate: float, keys: Tensor, layer: int, call: int) -> Tensor:
    """As `torch.nn.functional.dropout(x, rate)`, for x (..., C) with as many tokens as `keys` (S,). Backward keeps the
    mask, a byte for each number.

    Raises ValueError for another number of tokens.
    """
    if x.dim() < 2 or x.shape[:-1].numel() != len(keys):
        raise ValueError(
            f"dropout={rate} of a tensor {tuple(x.shape)}, which has not a vector for each of {len(keys)} tokens: set "
            "it to 0.0, or choose another model"
        )
    if rate >= 1:
        return x * 0.0
    zeros = dropped(rate, keys, layer, call, x.size(-1)).view(x.shape)
    return (x * (1 / (1 - rate))).masked_fill(zeros, 0.0)


@torch.no_grad()
def dropped(rate: float, keys: Tensor, layer: int, call: int, num_channels: int) -> Tensor:
    """Which numbers are dropped: bool (S, C)."""
    number = -(-num_channels // 2)
    states = torch.arange(1, number + 1, device=keys.device) * GAMMA
    begins, least = keys ^ _word(layer, call), round(rate * (1 << 32)) - (1 << 31)
    parts = [
        (_mix(part.unsqueeze(1) + states).view(torch.int32) < least)[:, :num_channels]
        for part in begins.split(max(1, LIMIT_WORDS // number))
    ]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


@lru_cache(maxsize=4096)
def _word(layer: int, call: int) -> int:
    return seed_of(f"dropout in layer {layer}, call {call}")


def _mix(words: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place. Shifts of signed words bring the sign in: it is masked."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        words.bitwise_xor_((words >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return words.bitwise_xor_((words >> 31).bitwise_and_((1 << 33) - 1))
