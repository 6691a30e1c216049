"""Device memory that the ranks of one host write to directly: buffers, flags, and their order between streams.

Copies between GPUs use copy engines: a hop takes no multiprocessor from the kernel it overlaps with, and starts when
its data are ready. A rank waits only for flags in its *own* memory, which `release` can raise, so an abort needs no
answer from a dead peer. What is sent, and when buffers may be overwritten, must not enter: `peer_exchange` decides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from elastic_ring.attention.plan.traffic import ContiguousCopy

_NUM_COUNTERS = 4
ARRIVED_KEYS, ARRIVED_PARTIALS, FREE_KEYS, FREE_PARTIALS = range(_NUM_COUNTERS)
_RELEASED = 0x3FFFFFFF


@dataclass
class _Region:
    own: torch.Tensor
    peers: list[torch.Tensor]  # own the mappings behind `addresses`
    handle: Any
    addresses: list[int]  # of `peers`


@dataclass
class PeerMemory:
    """Symmetric memory of the `cp` ranks of a ring on one host. Call `connect` before use.

    All ranks make the same `reserve` calls. One object may serve several rings in turn.
    """

    cp_rank: int
    cp: int
    device: torch.device
    name: str = ""
    regions: dict[tuple[str, int], _Region] = field(default_factory=dict, repr=False)
    counts: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)
    streams: list[torch.cuda.Stream] = field(default_factory=list, repr=False)

    def connect(self, group: Any) -> None:
        """Map the flags of all ranks of `group`, a torch.distributed group of exactly the ring's ranks.

        Collective; at most once per group. Raises: `RuntimeError` if the GPUs cannot access each other's memory.
        """
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        self.name = group.group_name
        enable_symm_mem_for_group(group.group_name)
        self.streams = [torch.cuda.Stream(self.device, priority=-1) for _ in range(self.cp)]
        self._map("flags", 0, _NUM_COUNTERS * self.cp, torch.int32)
        self.regions["flags", 0].own.zero_()
        torch.cuda.synchronize(self.device)
        self.regions["flags", 0].handle.barrier()
        torch.cuda.synchronize(self.device)

    def reserve(self, name: str, slot: int, num_elements: int, dtype: torch.dtype) -> None:
        """Ensure room for `num_elements` under (name, slot). Collective if the buffer has to grow."""
        found = self.regions.get((name, slot))
        if found is None or found.own.dtype != dtype or found.own.numel() < num_elements:
            torch.cuda.synchronize(self.device)
            self.regions.pop((name, slot), None)
            self._map(name, slot, num_elements, dtype)

    def own(self, name: str, slot: int, shape: tuple[int, ...]) -> torch.Tensor:
        return _view(self.regions[name, slot].own, shape)

    def copy(
        self,
        name: str,
        slot: int,
        cp_rank: int,
        pieces: Sequence[ContiguousCopy],
        sources: Sequence[torch.Tensor],
        stream: torch.cuda.Stream,
    ) -> int:
        """Copy the `pieces` of `sources`, which are contiguous, to `cp_rank`'s buffer on `stream`. Returns the number
        of bytes.

        Works on raw addresses, looked up at each call because a buffer that grew has moved. Tensor views and `copy_`,
        which needs the stream to be current, would take the host several times as long.
        """
        region, bases = self.regions[name, slot], []
        size, there = region.own.itemsize, region.own.numel()
        for source in sources:
            assert source.is_contiguous()
            assert source.dtype == region.own.dtype, (source.dtype, region.own.dtype)
            bases.append((source.data_ptr(), source.numel()))
        num_bytes = 0
        for piece in pieces:
            base, here = bases[piece.kind]
            assert piece.source + piece.size <= here, (piece, here)
            assert piece.target + piece.size <= there, (piece, there)
            target = region.addresses[cp_rank] + size * piece.target
            self._copy(target, base + size * piece.source, size * piece.size, stream)
            num_bytes += size * piece.size
        return num_bytes

    @property
    def num_bytes(self) -> int:
        """Device memory of the buffers in bytes, which torch's statistics do not include."""
        return sum(region.own.nbytes for region in self.regions.values())

    def next(self, counter: int, cp_rank: int) -> int:
        """Increment and return the number of uses of `counter` by this pair."""
        key = (counter, cp_rank)
        self.counts[key] = self.counts.get(key, 0) + 1
        return self.counts[key]

    def raise_flag(self, counter: int, cp_rank: int, value: int, stream: torch.cuda.Stream) -> None:
        """On `stream`: set this rank's `counter` at `cp_rank` to `value`."""
        address = self.regions["flags", 0].addresses[cp_rank] + 4 * (counter * self.cp + self.cp_rank)
        _check(_driver().cuStreamWriteValue32(stream.cuda_stream, address, value, 0))

    def wait_flag(self, counter: int, cp_rank: int, value: int, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait until `cp_rank` has raised `counter` to `value` on this rank."""
        address = self.regions["flags", 0].own.data_ptr() + 4 * (counter * self.cp + cp_rank)
        _check(_driver().cuStreamWaitValue32(stream.cuda_stream, address, value, 0))

    def release(self) -> None:
        """Unblock all streams that wait for a flag. Called from another thread after a peer was lost.

        Received data are then garbage, and this object must not be used again. Live peers may lower a flag again: call
        repeatedly until the streams are idle.
        """
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            self.regions["flags", 0].own.fill_(_RELEASED)

    def _map(self, name: str, slot: int, num_elements: int, dtype: torch.dtype) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        shape = (max(1, num_elements),)
        own = _SymmetricMemory.empty_strided_p2p(shape, (1,), dtype, self.device, self.name)
        handle = _SymmetricMemory.rendezvous(own, self.name)
        peers = [handle.get_buffer(rank, shape, dtype) for rank in range(self.cp)]
        self.regions[name, slot] = _Region(own, peers, handle, [peer.data_ptr() for peer in peers])

    @staticmethod
    def _copy(target: int, source: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
        _check(_driver().cuMemcpyDtoDAsync(target, source, num_bytes, stream.cuda_stream))


@lru_cache(maxsize=1)
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _check(result: tuple[Any, ...]) -> None:
    if int(result[0]) != 0:
        raise RuntimeError(f"a stream operation on peer memory failed: {result[0]!r}")


def _view(flat: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    num_elements = 1
    for size in shape:
        num_elements *= size
    return flat[:num_elements].view(shape)
