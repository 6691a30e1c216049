"""Sums over tensors on the device that holds them: digests of their bits, and the squared norm of a gradient.

A digest is two sums modulo 2**64 over all 64-bit words, each word hashed with its index (splitmix64's finaliser, Steele
et al. 2014) under two constants. Integer sums are independent of order, so equal bits give equal digests on every
device. It detects corruption and mix-ups, not adversaries. The host reads 16 bytes per tensor, for all at once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from elastic_ring.state.safetensors import byte_view

PIECE_WORDS = 1 << 22
_WORD_BYTES = 8


_SECRETS = (0x243F6A8885A308D3, 0x13198A2E03707344)
_GOLDEN, _FIRST, _SECOND = (word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def device_digests(tensors: Sequence[Tensor], device: torch.device | None = None) -> list[bytes]:
    """The digests of several tensors, with one synchronisation. Tensors on other devices are copied to `device` (by
    default the first tensor's), one at a time."""
    if not tensors:
        return []
    device = device or tensors[0].device
    sums = torch.zeros(len(tensors), len(_SECRETS), dtype=torch.int64, device=device)
    for tensor, lanes in zip(tensors, sums, strict=True):
        raw = byte_view(tensor.to(device))
        padding = -raw.numel() % _WORD_BYTES
        if padding or raw.data_ptr() % _WORD_BYTES:
            raw = torch.cat([raw, raw.new_zeros(padding)])
        words = raw.view(torch.int64)
        if words.is_cuda and (kernels := _triton_kernels()) is not None:
            kernels.add_sums(words, lanes, _SECRETS, (_GOLDEN, _FIRST, _SECOND))
        else:
            eager_sums(words, lanes)
    return [struct.pack("<qqq", t.nbytes, *lanes) for t, lanes in zip(tensors, sums.tolist(), strict=True)]


def eager_sums(words: Tensor, sums: Tensor) -> None:
    """Add both sums over `words` (int64) to `sums` (2,)."""
    for start in range(0, words.numel(), PIECE_WORDS):
        piece = words[start : start + PIECE_WORDS]
        places = torch.arange(start, start + piece.numel(), dtype=torch.int64, device=words.device)
        for lane, secret in enumerate(_SECRETS):
            sums[lane] += _mix(_mix(places + secret) ^ piece).sum()


def _mix(words: Tensor) -> Tensor:
    words = words + _GOLDEN
    words = (words ^ _shifted(words, 30)) * _FIRST
    words = (words ^ _shifted(words, 27)) * _SECOND
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, num_bits: int) -> Tensor:
    """Logical right shift; torch's shift of a signed integer is arithmetic."""
    return (words >> num_bits) & ((1 << (64 - num_bits)) - 1)


PIECE_ELEMENTS = 16 << 20


def squared_norm(flat: Tensor) -> Tensor:
    """The fp64 sum of squares of a flat fp32 tensor, 0-dim; equal tensors give equal bits. Squares of finite fp32
    numbers cannot overflow fp64."""
    if flat.is_cuda and flat.numel() and (kernels := _triton_kernels()) is not None:
        squares: Tensor = kernels.squares(flat)
        return squares
    return eager_squared_norm(flat)


def eager_squared_norm(flat: Tensor) -> Tensor:
    """As `squared_norm`, in parts, because the fp64 copy of a part takes twice its memory."""
    parts = [torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in flat.split(PIECE_ELEMENTS)]
    return torch.stack(parts).sum()


@lru_cache(maxsize=1)
def _triton_kernels() -> ModuleType | None:
    try:
        from elastic_ring.state import device_sums_kernels
    except ImportError:
        return None
    return device_sums_kernels
