"""The sums of `device_digests` in one pass over memory, as a Triton kernel. Imported only for tensors on a GPU.

`digest.eager_sums` is the reference; integer sums make both equal bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_WORDS = 2048
PROGRAM_BLOCKS = 8


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
    grid = (triton.cdiv(words.numel(), BLOCK_WORDS * PROGRAM_BLOCKS),)
    with torch.cuda.device(words.device):
        _digest_kernel[grid](
            words, sums, words.numel(), *secrets, *constants, block=BLOCK_WORDS, num_blocks=PROGRAM_BLOCKS
        )
