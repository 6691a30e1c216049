"""The cases that a calibration times: hops of several sizes, dense and sparse attention calls.

No clocks and no fitting in this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from elastic_ring.attention.autolayout import Sizes, sparse_kernels
from elastic_ring.attention.comm.messages import Group, PendingWork, one_operation
from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS
from elastic_ring.attention.layouts.layout import contiguous
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.families import BigBird
from elastic_ring.attention.patterns.sparse import Pattern, SparsePattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.ring import RingAttention
from elastic_ring.costs import CostModel

LEAST_BYTES = 1 << 10
NUM_MESSAGE_SIZES = 7
MOST_IN_A_ROW, BYTES_IN_A_ROW = 16, 8 << 20
"""Short messages are timed in sequences of up to 16 messages and 8 MiB: ranks leave a barrier about 10 us apart."""


class Ranks(Group, Protocol):
    """A group with `allgather`, such as `torch.distributed.ProcessGroup`."""

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], /) -> PendingWork: ...


@dataclass(frozen=True)
class TimingBudget:
    """The limits of a calibration.

    Repeats end after `limit_s` seconds; a running call is not interrupted, and every case gets its warm-ups and at
    least one repeat. `most_bytes` is the longest message; two of them are allocated. `num_tokens` are the shortest and
    the longest sequence for kernels (None: chosen by device). Raises `ValueError` for values too small to measure.
    """

    limit_s: float = 30.0
    repeats: int = 7
    most_bytes: int = 64 << 20
    num_tokens: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.limit_s < math.inf:
            raise ValueError(f"limit_s={self.limit_s!r}: give a number of seconds, 30 for example")
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats}: at least 1; 7 give a steady median")
        if self.most_bytes < 16 * LEAST_BYTES:
            raise ValueError(f"most_bytes={self.most_bytes}: a rate shows from {16 * LEAST_BYTES} bytes on; give more")
        if self.num_tokens is not None:
            low, high = self.num_tokens
            if not 8 * BLOCK_TOKENS <= low < high or low % BLOCK_TOKENS or high % BLOCK_TOKENS:
                raise ValueError(
                    f"num_tokens={self.num_tokens}: give two ascending multiples of {BLOCK_TOKENS}, from"
                    f" {8 * BLOCK_TOKENS} on"
                )


@dataclass(frozen=True)
class Case:
    """A timed function: `count` messages or kernel calls of `amount` bytes or FLOPs in total.

    `run` returns when the work is done, on a GPU when it is queued. Cases with `fitted` False only check the fit.
    """

    name: str
    count: int
    amount: float
    run: Callable[[], None]
    fitted: bool = True


def message_cases(group: Ranks, device: torch.device, effort: TimingBudget) -> Iterator[Case]:
    """Hops of up to `most_bytes`: every rank sends to the next and receives from the previous one.

    Every other size only checks the fit.
    """
    ratio = (effort.most_bytes / LEAST_BYTES) ** (1 / (NUM_MESSAGE_SIZES - 1))
    for index in range(NUM_MESSAGE_SIZES):
        num_bytes = round(LEAST_BYTES * ratio**index)
        count = max(1, min(MOST_IN_A_ROW, BYTES_IN_A_ROW // num_bytes))
        run = Hops(group, device, num_bytes, count)
        yield Case(f"{count} x {num_bytes} bytes", count, float(count * num_bytes), run, fitted=index % 2 == 0)


class Hops:
    """`count` hops of `num_bytes` in sequence. The first call, a warm-up, allocates the buffers."""

    def __init__(self, group: Ranks, device: torch.device, num_bytes: int, count: int) -> None:
        self._group, self._device, self._num_bytes, self._count = group, device, num_bytes, count
        self._buffers: torch.Tensor | None = None

    def __call__(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Run the hops; `meanwhile` runs while each hop is in progress."""
        if self._buffers is None:
            self._buffers = torch.ones(2, self._num_bytes, dtype=torch.uint8, device=self._device)
        outgoing, incoming = self._buffers.unbind(0)
        backend: Any = self._group
        backend = backend._get_backend(self._device) if hasattr(backend, "_get_backend") else backend
        rank, size = self._group.rank(), self._group.size()
        after, before = (rank + 1) % size, (rank - 1) % size
        for tag in range(self._count):
            works: list[Any]
            if self._device.type != "cuda":
                works = [self._group.recv([incoming], before, tag), self._group.send([outgoing], after, tag)]
            else:
                with one_operation(backend) as works:
                    self._group.recv([incoming], before, tag)
                    self._group.send([outgoing], after, tag)
            if meanwhile is not None:
                meanwhile()
            for work in works:
                work.wait()


def dense_cases(
    device: torch.device, sizes: Sizes, dtype: torch.dtype, deterministic: bool, effort: TimingBudget
) -> Iterator[Case]:
    """Causal forward passes of one rank on the dense ring."""
    for num_tokens, fitted in lengths(device, effort):
        ring = RingAttention(
            plan(Pattern(), contiguous(num_tokens, 1)), 0, None, RingOptions(deterministic=deterministic)
        )
        pairs = sizes.num_heads * num_tokens * (num_tokens + 1) // 2
        run = _Attends(ring, device, sizes, dtype, num_tokens)
        yield Case(f"dense {num_tokens}", 1, 4.0 * sizes.head_dim * pairs, run, fitted)


def sparse_cases(
    device: torch.device, sizes: Sizes, dtype: torch.dtype, deterministic: bool, effort: TimingBudget
) -> Iterator[Case]:
    """Forward passes over whole blocks of 128 tokens at two densities, and at a third that only checks the fit."""
    per_tile = CostModel(per_tile=device.type == "cpu")
    (low, _), (middle, _), (high, _) = lengths(device, effort)
    few, some, many = (BigBird(blocks, 0, blocks) for blocks in (1, 2, 4))
    for num_tokens, rule, fitted in (
        (low, few, True),
        (low, many, True),
        (middle, some, False),
        (high, few, True),
        (high, many, True),
    ):
        pattern = SparsePattern((rule,))
        schedule = plan_sparse(pattern, contiguous(num_tokens, 1), sizes.num_heads, sizes.num_kv_heads)
        calls, pairs = sparse_kernels(schedule, 0, False, per_tile)
        ring = RingAttention(schedule, 0, None, RingOptions(deterministic=deterministic))
        run = _Attends(ring, device, sizes, dtype, num_tokens)
        name = f"sparse {num_tokens}, density {pattern.density(num_tokens):.3f}"
        yield Case(name, calls, 4.0 * sizes.head_dim * pairs, run, fitted)


class _Attends:
    """One forward pass. The first call creates the tensors."""

    def __init__(
        self, ring: RingAttention, device: torch.device, sizes: Sizes, dtype: torch.dtype, num_tokens: int
    ) -> None:
        self._ring, self._device, self._dtype = ring, device, dtype
        heads = (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
        self._shapes = [(1, num_tokens, number, sizes.head_dim) for number in heads]
        self._tensors: list[torch.Tensor] = []

    def __call__(self) -> None:
        if not self._tensors:
            generator = torch.Generator(self._device).manual_seed(0)
            self._tensors = [
                torch.randn(shape, generator=generator, device=self._device, dtype=self._dtype)
                for shape in self._shapes
            ]
        with torch.no_grad():
            self._ring(*self._tensors)


def lengths(device: torch.device, effort: TimingBudget) -> list[tuple[int, bool]]:
    """(tokens, fitted): the shortest length, a middle one that only checks the fit, and the longest."""
    low, high = effort.num_tokens or ((2048, 4096) if device.type == "cpu" else (8192, 32768))
    middle = max(low + BLOCK_TOKENS, round(math.sqrt(low * high) / BLOCK_TOKENS) * BLOCK_TOKENS)
    return [(low, True), (middle, False), (high, True)]
