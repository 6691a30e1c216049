"""The sums of `device_sums` in one pass over memory, as Triton kernels. Imported only for tensors on a GPU.

`eager_sums` and `eager_squared_norm` are the references. Both kernels repeat their bits: integer sums do not depend on
order, and each program of the squares adds the same numbers in the same order, as does the sum over programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_WORDS = 2048
WORD_BLOCKS = 8
BLOCK_ELEMENTS = 1024
ELEMENT_BLOCKS = 16


@triton.jit
def _mixed(words, golden, first, second):  # type: ignore[no-untyped-def]
    words = words + golden
    words = (words ^ ((words >> 30) & 0x3FFFFFFFF)) * first
    words = (words ^ ((words >> 27) & 0x1FFFFFFFFF)) * second
    return words ^ ((words >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["num_words"])
def _digest_kernel(  # type: ignore[no-untyped-def]
    words_ptr,
    sums_ptr,
    num_words,
    secret_a,
    secret_b,
    golden,
    first,
    second,
    block: tl.constexpr,
    num_blocks: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * block * num_blocks
    total_a = tl.zeros((block,), dtype=tl.int64)
    total_b = tl.zeros((block,), dtype=tl.int64)
    for index in range(num_blocks):
        places = begin + index * block + tl.arange(0, block).to(tl.int64)
        inside = places < num_words
        words = tl.load(words_ptr + places, mask=inside, other=0)
        mixed_a = _mixed(_mixed(places + secret_a, golden, first, second) ^ words, golden, first, second)
        mixed_b = _mixed(_mixed(places + secret_b, golden, first, second) ^ words, golden, first, second)
        total_a += tl.where(inside, mixed_a, 0)
        total_b += tl.where(inside, mixed_b, 0)
    # Atomics are deterministic here: integer sums do not depend on order.
    tl.atomic_add(sums_ptr, tl.sum(total_a, axis=0))
    tl.atomic_add(sums_ptr + 1, tl.sum(total_b, axis=0))


def add_sums(words: Tensor, sums: Tensor, secrets: tuple[int, int], constants: tuple[int, int, int]) -> None:
    """Add both sums over `words` (int64, contiguous) to `sums` (2,) int64 on the same device."""
    if words.numel() == 0:
        return
    grid = (triton.cdiv(words.numel(), BLOCK_WORDS * WORD_BLOCKS),)
    with torch.cuda.device(words.device):
        _digest_kernel[grid](
            words, sums, words.numel(), *secrets, *constants, block=BLOCK_WORDS, num_blocks=WORD_BLOCKS
        )


@triton.jit(do_not_specialize=["num_elements"])
def _squares_kernel(  # type: ignore[no-untyped-def]
    flat_ptr, partials_ptr, num_elements, block: tl.constexpr, num_blocks: tl.constexpr
):
    begin = tl.program_id(0).to(tl.int64) * block * num_blocks
    total = tl.zeros((block,), dtype=tl.float64)
    for index in range(num_blocks):
        places = begin + index * block + tl.arange(0, block).to(tl.int64)
        values = tl.load(flat_ptr + places, mask=places < num_elements, other=0.0).to(tl.float64)
        total += values * values
    tl.store(partials_ptr + tl.program_id(0), tl.sum(total, axis=0))


def squares(flat: Tensor) -> Tensor:
    """The fp64 sum of squares, 0-dim, of a contiguous, non-empty fp32 tensor."""
    num_programs = triton.cdiv(flat.numel(), BLOCK_ELEMENTS * ELEMENT_BLOCKS)
    partials = torch.empty(num_programs, dtype=torch.float64, device=flat.device)
    with torch.cuda.device(flat.device):
        _squares_kernel[(num_programs,)](flat, partials, flat.numel(), block=BLOCK_ELEMENTS, num_blocks=ELEMENT_BLOCKS)
    return partials.sum()
