"""A ring in one process: a thread and a real gloo group for each rank. Also the independent yardstick."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.layouts.layout import Layout, make_layout
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import Schedule, plan
from elastic_ring.attention.ring import RingAttention

TIMEOUT = timedelta(seconds=60)


class ThreadRings:
    """Gloo groups of every size, made when first asked for and kept: connecting 8 ranks takes 0.1 s."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self._groups: dict[int, list[dist.ProcessGroup]] = {}
        self._names = itertools.count()

    def groups(self, cp: int, *, fresh: bool = False) -> list[Any]:
        if fresh or cp not in self._groups:
            prefix = f"ring{next(self._names)}"

            def connect(cp_rank: int) -> dist.ProcessGroup:
                store = dist.PrefixStore(prefix, self._store)
                return dist.ProcessGroupGloo(store, cp_rank, cp, TIMEOUT)

            made = in_threads(cp, connect)
            if fresh:
                return made
            self._groups[cp] = made
        return self._groups[cp]


def in_threads(cp: int, work: Callable[[int], Any]) -> list[Any]:
    """`[work(0), ..., work(cp - 1)]`, each in its own thread. Raises the first error, by cp_rank."""
    results: list[Any] = [None] * cp
    errors: list[BaseException | None] = [None] * cp

    def run(cp_rank: int) -> None:
        try:
            results[cp_rank] = work(cp_rank)
        except BaseException as error:
            errors[cp_rank] = error

    threads = [threading.Thread(target=run, args=(cp_rank,), daemon=True) for cp_rank in range(cp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a rank is stuck"
    for error in errors:
        if error is not None:
            raise error
    return results


@dataclass(frozen=True)
class Case:
    """One configuration of a ring, and the global tensors that go with it."""

    cp: int
    seq_len: int
    causal: bool = True
    layout_name: str = "zigzag"
    document_starts: tuple[int, ...] = (0,)
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    batch: int = 2
    dtype: torch.dtype = torch.float64

    @property
    def layout(self) -> Layout:
        return make_layout(self.layout_name, self.seq_len, self.cp)

    @property
    def schedule(self) -> Schedule:
        return plan(Pattern(self.causal, self.document_starts), self.layout)

    def tensors(self, seed: int = 0) -> list[torch.Tensor]:
        """q, k, v and the gradient of out, over the whole sequence."""
        generator = torch.Generator().manual_seed(seed)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads)
        shapes = [(self.batch, self.seq_len, num, self.head_dim) for num in heads]
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes]

    def visible(self) -> torch.Tensor:
        """The (seq_len, seq_len) mask, straight from the definition."""
        at = torch.arange(self.seq_len)
        document = torch.bucketize(at, torch.tensor(self.document_starts), right=True)
        visible = document[:, None] == document[None, :]
        return visible & (at[:, None] >= at[None, :]) if self.causal else visible


@dataclass
class Outcome:
    """out, dq, dk, dv over the whole sequence, and each rank's ledger."""

    tensors: list[torch.Tensor]
    ledgers: list[HopLedger]


def run_ring(
    case: Any,
    groups: list[Any],
    tensors: list[torch.Tensor] | None = None,
    schedule: Schedule | None = None,
    **options: Any,
) -> Outcome:
    """Forward and backward of a `Case` or `SparseCase` on a thread for each rank; `schedule`: another than its own."""
    ledgers: list[Any] = [None] * case.layout.cp
    planned = case.schedule if schedule is None else schedule

    def attend(group: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cp_rank = next(rank for rank, each in enumerate(groups) if each is group)
        ring = RingAttention(planned, cp_rank, group, RingOptions(**options))
        ledgers[cp_rank] = ring.ledger
        return ring(q, k, v)

    return Outcome(train_alone(case, groups, attend, tensors), ledgers)


def whole_attention(case: Case, tensors: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """out, dq, dk, dv by autograd through a masked fp64 softmax: shares no code with the package."""
    *inputs, dout = (t.detach().double() for t in (case.tensors() if tensors is None else tensors))
    q, k, v = (tensor.requires_grad_() for tensor in inputs)
    group = case.num_heads // case.num_kv_heads
    wide_k, wide_v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, wide_k) / math.sqrt(case.head_dim)
    weights = scores.masked_fill(~case.visible().to(q.device), -math.inf).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, wide_v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def check_close(found: list[torch.Tensor], want: list[torch.Tensor], limit: float = 1e-12) -> None:
    """Out, dq, dk, dv are within a relative error of `limit`."""
    errors = [relative_error(a, b) for a, b in zip(found, want, strict=True)]
    assert max(errors) <= limit, errors


def train_alone(
    case: Any, groups: list[Any], call: Callable[..., torch.Tensor], tensors: list[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """out, dq, dk, dv over the whole sequence of `call(group, q, k, v)` on a thread for each rank."""
    whole = case.tensors() if tensors is None else tensors

    def work(cp_rank: int) -> list[torch.Tensor]:
        *inputs, dout = (case.layout.scatter(tensor, cp_rank, 1) for tensor in whole)
        leaves = [tensor.requires_grad_() for tensor in inputs]
        out = call(groups[cp_rank], *leaves)
        out.backward(dout)
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    found = in_threads(case.layout.cp, work)
    return [case.layout.gather([of_rank[i] for of_rank in found], 1) for i in range(4)]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
