"""A ring on one GPU: a thread for each rank, messages as copies on the stream that all of them share."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Wires:
    """Sends and receives that wait for each other, first come first matched for each pair, as in NCCL."""

    cp: int
    lock: threading.Condition = field(default_factory=threading.Condition)
    sends: dict[tuple[int, int], deque[Any]] = field(default_factory=lambda: defaultdict(deque))
    receives: dict[tuple[int, int], deque[Any]] = field(default_factory=lambda: defaultdict(deque))

    def groups(self) -> list[ThreadGroup]:
        return [ThreadGroup(self, rank) for rank in range(self.cp)]

    def match(self, pair: tuple[int, int]) -> None:
        while self.sends[pair] and self.receives[pair]:
            source, sent = self.sends[pair].popleft()
            target, received = self.receives[pair].popleft()
            assert source.shape == target.shape, (pair, source.shape, target.shape)
            assert source.dtype == target.dtype
            target.copy_(source)
            sent.set()
            received.set()


@dataclass
class ThreadGroup:
    """What `HopExchange` needs of an NCCL group. Nothing moves before `_end_coalescing`."""

    wires: Wires
    cp_rank: int
    posted: list[tuple[str, tuple[int, int], torch.Tensor]] = field(default_factory=list)
    log: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)

    def rank(self) -> int:
        return self.cp_rank

    def size(self) -> int:
        return self.wires.cp

    def _start_coalescing(self) -> None:
        assert not self.posted

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> None:
        self.posted.append(("send", (self.cp_rank, dst), tensors[0]))
        self.log.append(("send", dst, tuple(tensors[0].shape)))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> None:
        self.posted.append(("recv", (src, self.cp_rank), tensors[0]))
        self.log.append(("recv", src, tuple(tensors[0].shape)))

    def _end_coalescing(self) -> CopyWork:
        done = []
        with self.wires.lock:
            for kind, pair, tensor in self.posted:
                done.append(threading.Event())
                queues = self.wires.sends if kind == "send" else self.wires.receives
                queues[pair].append((tensor, done[-1]))
                self.wires.match(pair)
        self.posted = []
        return CopyWork(done)


@dataclass
class CopyWork:
    done: list[threading.Event]

    def wait(self) -> None:
        for event in self.done:
            assert event.wait(timeout=60), "a message that nobody sent or received"
