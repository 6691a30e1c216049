"""A digest of a tensor's bits that is computed where the tensor lies.

Two sums modulo 2**64 over all 64-bit words, each word mixed with its place (splitmix64's finaliser, Steele et al.
2014), under two secrets. Integer sums do not depend on their order, so equal bits give equal digests however the
device adds up. It finds damage and mix-ups, not an adversary. The host reads 16 bytes.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

PIECE_WORDS = 1 << 22
_SECRETS = (0x243F6A8885A308D3, 0x13198A2E03707344)
_WORD_BYTES = 8


def device_digest(tensor: Tensor) -> bytes:
    """16 bytes plus the tensor's size in bytes, for a tensor of any type and shape on any device."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    num_bytes = raw.numel()
    padding = -num_bytes % _WORD_BYTES
    if padding or raw.data_ptr() % _WORD_BYTES:
        raw = torch.cat([raw, raw.new_zeros(padding)])
    words = raw.view(torch.int64)
    sums = torch.zeros(len(_SECRETS), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), PIECE_WORDS):
        piece = words[start : start + PIECE_WORDS]
        places = torch.arange(start, start + piece.numel(), dtype=torch.int64, device=tensor.device)
        for lane, secret in enumerate(_SECRETS):
            sums[lane] += _mix(_mix(places + _signed(secret)) ^ piece).sum()
    return struct.pack("<qqq", num_bytes, *sums.tolist())


def _mix(words: Tensor) -> Tensor:
    words = words + _signed(0x9E3779B97F4A7C15)
    words = (words ^ _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, num_bits: int) -> Tensor:
    """Logical right shift; torch's shift of a signed word copies the sign."""
    return (words >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
