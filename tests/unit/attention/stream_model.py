"""What a GPU may do in any order: a model of streams in which two accesses to the same memory race unless one is sure
to end before the other begins.

Each rank has a stream of kernels, one beside it and NCCL's. Code under test runs on the CPU, rank after rank, and moves
nothing: its kernels, gathers, messages and waits become the nodes of a graph, with the memory that each of them reads
or writes. What is certain is what the graph's edges say, and nothing of a clock enters: a wait that is missing shows
every time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

KERNELS, BESIDE, NCCL = "kernels", "beside", "nccl"


class Access(NamedTuple):
    """Bytes [start, stop) of one rank's memory."""

    rank: int
    storage: int
    start: int
    stop: int
    writes: bool

    def meets(self, other: Access) -> bool:
        return (self.writes or other.writes) and self.start < other.stop and other.start < self.stop


class Sent(NamedTuple):
    """A message, or where it arrives: the nodes at which its exchange begins and ends on its rank."""

    start: int
    end: int
    tag: int
    num_elements: int


@dataclass
class Graph:
    """Nodes in the order in which the host made them, each with those that certainly ended before it began."""

    before: list[list[int]] = field(default_factory=list)
    accesses: list[list[Access]] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    messages: dict[tuple[str, int, int], list[Sent]] = field(default_factory=lambda: defaultdict(list))
    alive: list[torch.Tensor] = field(default_factory=list)  # an address means one thing only

    def node(self, label: str, before: list[int], accesses: list[Access]) -> int:
        self.before.append(before)
        self.accesses.append(accesses)
        self.labels.append(label)
        return len(self.before) - 1

    def races(self) -> set[tuple[str, str]]:
        """By the edges inside each rank alone: no peer may be trusted to be in time."""
        reach = [0] * len(self.before)
        for index, before in enumerate(self.before):
            for earlier in before:
                reach[index] |= reach[earlier] | 1 << earlier
        by_memory: dict[tuple[int, int], list[tuple[int, Access]]] = defaultdict(list)
        for index, accesses in enumerate(self.accesses):
            for access in accesses:
                by_memory[access.rank, access.storage].append((index, access))
        return {
            (self.labels[i], self.labels[j])
            for touching in by_memory.values()
            for (i, one), (j, other) in itertools.combinations(touching, 2)
            if i != j and one.meets(other) and not reach[j] >> i & 1
        }

    def never_begins(self) -> list[str]:
        """What waits for itself, once an exchange ends only when the other side's has begun."""
        before = [set(earlier) for earlier in self.before]
        for (what, sender, receiver), sends in self.messages.items():
            if what == "send":
                for one, other in zip(sends, self.messages["receive", sender, receiver], strict=True):
                    before[other.end].add(one.start)
                    before[one.end].add(other.start)
        open_ = set(range(len(before)))
        while ready := {index for index in open_ if not before[index] & open_}:
            open_ -= ready
        return [self.labels[index] for index in sorted(open_)]

    def unmatched(self) -> list[tuple[int, int]]:
        """Pairs of ranks between which some message is of another tag or size than what is waited for."""
        return [
            (sender, receiver)
            for what, sender, receiver in list(self.messages)
            if [sent[2:] for sent in self.messages["send", sender, receiver]]
            != [sent[2:] for sent in self.messages["receive", sender, receiver]]
        ]


class Streams:
    """One rank's streams, and on which of them the host launches now."""

    def __init__(self, graph: Graph, rank: int) -> None:
        self.graph, self.rank = graph, rank
        self.current = KERNELS
        begun = graph.node(f"rank {rank} begins", [], [])
        self.last = dict.fromkeys((KERNELS, BESIDE, NCCL), begun)

    def run(
        self,
        label: str,
        reads: list[torch.Tensor] | None = None,
        writes: list[torch.Tensor] | None = None,
        *,
        stream: str | None = None,
        after: list[int] | None = None,
    ) -> int:
        stream = stream or self.current
        accesses = [self._access(x, False) for x in reads or []] + [self._access(x, True) for x in writes or []]
        label = f"rank {self.rank}, {stream}: {label}"
        self.last[stream] = self.graph.node(label, [self.last[stream], *(after or [])], accesses)
        return self.last[stream]

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _access(self, tensor: torch.Tensor, writes: bool) -> Access:
        """From its first byte to its last: rows that lie apart are one access with what is between them."""
        self.graph.alive.append(tensor)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset() * tensor.itemsize
        stop = start + (last + 1) * tensor.itemsize if tensor.numel() else start
        return Access(self.rank, tensor.untyped_storage().data_ptr(), start, stop, writes)


class ModelledGroup:
    """What an exchange needs of an NCCL group: an operation waits for the stream that is current at its end, and for
    all operations before it."""

    def __init__(self, streams: Streams, size: int) -> None:
        self._streams, self._size = streams, size
        self._posted: list[tuple[str, torch.Tensor, int, int]] = []
        self.labels: list[str] = []

    def rank(self) -> int:
        return self._streams.rank

    def size(self) -> int:
        return self._size

    def _start_coalescing(self) -> None:
        self._posted = []

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> None:
        self._posted.append(("send", tensors[0], dst, tag))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> None:
        self._posted.append(("receive", tensors[0], src, tag))

    def _end_coalescing(self) -> ModelledWork | None:
        if not self._posted:
            return None
        streams, graph = self._streams, self._streams.graph
        reads = [tensor for what, tensor, _, _ in self._posted if what == "send"]
        writes = [tensor for what, tensor, _, _ in self._posted if what == "receive"]
        self.labels.append("partials" if self._posted[0][3] % 2 else "keys")
        label = self.labels[-1]
        start = streams.run(f"{label} go", reads, writes, stream=NCCL, after=[streams.last[streams.current]])
        end = streams.run(f"{label} are there", stream=NCCL)
        for what, tensor, peer, tag in self._posted:
            pair = (streams.rank, peer) if what == "send" else (peer, streams.rank)
            graph.messages[what, *pair].append(Sent(start, end, tag, tensor.numel()))
        return ModelledWork(streams, end)


@dataclass
class ModelledWork:
    streams: Streams
    end: int

    def wait(self, *_: Any) -> None:
        self.streams.run("waits", after=[self.end])
