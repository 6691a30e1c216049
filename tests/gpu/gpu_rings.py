"""A ring on one device: a thread for each rank, messages as copies.

One thread runs at a time (the kernels' compiler takes no two), and gives way where it waits for a message.
Forward and backward are called without autograd: its one thread for the device would serve all ranks.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.lowering.keys import Latents
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.content import top_ks_of
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.ring import RingAttention
from elastic_ring.attention.routing.router import Router
from tests.unit.attention.attention_rings import Case, Outcome, in_threads
from tests.unit.content.content_cases import ContentCase
from tests.unit.sparse.pattern_cases import SparseCase


@dataclass
class ProcessGroups:
    """Sends and receives that wait for each other, first come first matched for each pair, as in NCCL."""

    cp: int
    baton: threading.Condition = field(default_factory=threading.Condition)
    sends: dict[tuple[int, int], deque[Any]] = field(default_factory=lambda: defaultdict(deque))
    receives: dict[tuple[int, int], deque[Any]] = field(default_factory=lambda: defaultdict(deque))

    def groups(self) -> list[ThreadGroup]:
        return [ThreadGroup(self, rank) for rank in range(self.cp)]

    def match(self, pair: tuple[int, int]) -> None:
        while self.sends[pair] and self.receives[pair]:
            source, work = self.sends[pair].popleft()
            target, other = self.receives[pair].popleft()
            assert source.shape == target.shape, (pair, source.shape, target.shape)
            assert source.dtype == target.dtype
            for each in (work, other):
                each.follow(each.posted)
            target.copy_(source)
            for each in (work, other):
                each.num_open -= 1
                each.copied += _mark(target)
        self.baton.notify_all()


@dataclass
class ThreadGroup:
    """What `HopExchange` needs of an NCCL group. Nothing moves before `_end_coalescing`."""

    links: ProcessGroups
    cp_rank: int
    posted: list[tuple[str, tuple[int, int], torch.Tensor]] = field(default_factory=list)
    log: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)
    num_operations: int = 0

    def rank(self) -> int:
        return self.cp_rank

    def size(self) -> int:
        return self.links.cp

    def _start_coalescing(self) -> None:
        assert not self.posted

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> None:
        self.posted.append(("send", (self.cp_rank, dst), tensors[0]))
        self.log.append(("send", dst, tuple(tensors[0].shape)))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> None:
        self.posted.append(("recv", (src, self.cp_rank), tensors[0]))
        self.log.append(("recv", src, tuple(tensors[0].shape)))

    def _end_coalescing(self) -> CopyWork:
        work = CopyWork(self.links.baton, len(self.posted), _mark(self.posted[0][2]) if self.posted else [])
        for kind, pair, tensor in self.posted:
            queues = self.links.sends if kind == "send" else self.links.receives
            queues[pair].append((tensor, work))
            self.links.match(pair)
        self.posted = []
        self.num_operations += 1
        return work


@dataclass
class CopyWork:
    """On a GPU, `posted` and `copied` are where the streams stood that posted it and that copied its messages: what
    is gathered beside the kernels is posted from a stream of its own."""

    baton: threading.Condition
    num_open: int
    posted: list[Any] = field(default_factory=list)
    copied: list[Any] = field(default_factory=list)

    def wait(self) -> None:
        assert self.baton.wait_for(lambda: self.num_open == 0, timeout=60), "a message nobody sent or received"
        self.follow(self.copied)

    @staticmethod
    def follow(events: list[Any]) -> None:
        for event in events:
            torch.cuda.current_stream().wait_event(event)


def _mark(tensor: torch.Tensor) -> list[Any]:
    return [torch.cuda.current_stream().record_event()] if tensor.is_cuda else []


def run_sparse_on(
    device: str, case: SparseCase, links: ProcessGroups | None = None, **options: Any
) -> tuple[list[torch.Tensor], list[HopLedger]]:
    """out, dq, dk, dv of a sparse case over the whole sequence, on the CPU, and each rank's ledger."""

    def ring_of(cp_rank: int, group: ThreadGroup, *_: torch.Tensor) -> RingAttention:
        return RingAttention(case.schedule, cp_rank, group, RingOptions(coalesced=True, **options))

    found, rings = run_rings(device, case, links, ring_of)
    return found, [ring.ledger for ring in rings]


def run_rings(
    device: str,
    case: Any,
    links: ProcessGroups | None,
    ring_of: Callable[[int, Any, torch.Tensor, torch.Tensor], RingAttention],
) -> tuple[list[torch.Tensor], list[RingAttention]]:
    """Of `ring_of(rank, group, q, k)`, a thread for each rank: out, dq, dk, dv on the CPU, and the rings."""
    cp, layout, scale = case.layout.cp, case.layout, case.head_dim**-0.5
    links = ProcessGroups(cp) if links is None else links
    groups = links.groups()
    tensors = [tensor.to(device) for tensor in case.tensors()]

    @torch.no_grad()
    def work(cp_rank: int) -> tuple[list[torch.Tensor], RingAttention]:
        with links.baton:
            q, k, v, dout = (layout.scatter(tensor, cp_rank, 1).contiguous() for tensor in tensors)
            ring = ring_of(cp_rank, groups[cp_rank], q, k)
            out, lse, call, keys = ring.run_forward(q, k, v, scale)
            return [out, *ring.run_backward(dout, (q, k, v, out, lse), scale, call, keys)], ring

    results = in_threads(cp, work)
    if device == "cuda":
        torch.cuda.synchronize()
    gathered = [layout.gather([locals_[i] for locals_, _ in results], 1).cpu() for i in range(4)]
    return gathered, [ring for _, ring in results]


def run_content_on(
    device: str, case: ContentCase, links: ProcessGroups | None = None, **options: Any
) -> tuple[list[torch.Tensor], list[RingAttention]]:
    """The same where content chooses, over whole blocks, and each rank's ring."""
    return run_rings(device, case, links, lambda *of_rank: _ring_of(case, *of_rank, options=options))


def _ring_of(
    case: ContentCase, cp_rank: int, group: ThreadGroup, q: torch.Tensor, k: torch.Tensor, options: dict[str, Any]
) -> RingAttention:
    """A rank's ring for one call, of what content chose."""
    if all(top_k.fetch_all for rule in case.heads for top_k in top_ks_of(rule)):
        whole = RingOptions(kernel=options["kernel"], deterministic=options["deterministic"])
        own = (case.pattern, case.layout, cp_rank, group, whole)
        return PatternedAttention(*own, document_starts=case.document_starts).ring(0, q, k)
    made = RingOptions(coalesced=True, **options)
    route = Router(case.layout, cp_rank, group, case.documents, made)
    pattern = SparsePattern(route(case.heads, q, k, 0), case.block)
    schedule = plan_sparse(pattern, case.layout, case.num_heads, case.num_kv_heads)
    return RingAttention(schedule, cp_rank, group, made)


def run_latents_on(
    device: str, schedule: Schedule, tensors: list[torch.Tensor], **options: Any
) -> tuple[list[torch.Tensor], list[HopLedger]]:
    """Of q, latents with rotated keys, projection and the gradient of out: out and the gradients of the first three, on
    the CPU, and each rank's ledger, through the messages of a GPU."""
    cp, layout = schedule.cp, schedule.layout
    links = ProcessGroups(cp)
    groups, up = links.groups(), tensors[2].to(device)

    @torch.no_grad()
    def work(cp_rank: int) -> tuple[list[torch.Tensor], torch.Tensor, HopLedger]:
        with links.baton:
            q, both, dout = (layout.scatter(x.to(device), cp_rank, 1) for x in (tensors[0], tensors[1], tensors[3]))
            q, first, second = (x.contiguous() for x in (q, *both.chunk(2, -1)))
            ring = RingAttention(schedule, cp_rank, groups[cp_rank], RingOptions(coalesced=True, **options))
            ring.check_call(q, first, second, latent=True)
            out, lse, call, kept = ring.run_forward(q, first, second, 0.25, up)
            latents = Latents(up, q, first, needs_grad=True)
            saved = (q, first, second, out, lse)
            dq, *halves = ring.run_backward(dout.contiguous(), saved, 0.25, call, kept, latents)
            assert latents.dup is not None
            return [out, dq, torch.cat(halves, -1)], latents.dup.flatten(0, 1), ring.ledger

    found = in_threads(cp, work)
    gathered = [layout.gather([one[0][i] for one in found], 1).cpu() for i in range(3)]
    return [*gathered, torch.stack([one[1] for one in found]).sum(0).cpu()], [one[2] for one in found]


def run_on_gpu(case: Case, links: ProcessGroups | None = None, **options: Any) -> Outcome:
    """Forward and backward of `case`, a thread for each rank; the results on the CPU."""
    return run_dense_on("cuda", case, links, **options)


def run_dense_on(device: str, case: Case, links: ProcessGroups | None = None, **options: Any) -> Outcome:
    """The same on `device`, through the messages of a GPU."""
    return Outcome(*run_sparse_on(device, case, links, **options))
