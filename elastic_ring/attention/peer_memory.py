"""Device memory that the ranks of one host write to directly: buffers, flags, and the order between streams.

Copies between GPUs run on their copy engines, so that a hop takes no multiprocessor from the kernel it hides
behind, and starts when its data are ready, not when a kernel makes room. A rank waits only for flags in its
*own* memory, which `release` can raise: an abort needs no answer from a dead peer. What is sent where, and
when a buffer may be overwritten, is the exchange's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from elastic_ring.attention.rank_plan import Piece

_NUM_COUNTERS = 4
ARRIVED_KEYS, ARRIVED_PARTIALS, FREE_KEYS, FREE_PARTIALS = range(_NUM_COUNTERS)
_RELEASED = 0x3FFFFFFF


@dataclass
class _Region:
    own: torch.Tensor
    peers: list[torch.Tensor]  # hold the mappings that `addresses` are of
    handle: Any
    addresses: list[int]  # of `peers`


@dataclass
class PeerMemory:
    """Symmetric memory of the `cp` ranks of a ring that share a host. `connect` before use.

    Every rank makes the same `reserve` calls. One object serves one ring after another.
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

        Collective; at most once for each group. Raises `RuntimeError` where GPUs cannot reach each other.
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
        """Make room for `num_elements` under (name, slot). Collective when it has to grow, else free."""
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
        pieces: Sequence[Piece],
        sources: Sequence[torch.Tensor],
        stream: torch.cuda.Stream,
    ) -> int:
        """In `stream`: the `pieces` of `sources`, which are contiguous, to `cp_rank`'s buffer. Returns the bytes.

        By addresses, found anew at each call, for a buffer that has grown lies elsewhere. A view of each end and a copy
        of torch's, which needs its stream made the current one, would take the host several times as long.
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
        """What the buffers take on this device; torch's own statistics do not see it."""
        return sum(region.own.nbytes for region in self.regions.values())

    def next(self, counter: int, cp_rank: int) -> int:
        """How often this pair has used `counter`, this time included."""
        key = (counter, cp_rank)
        self.counts[key] = self.counts.get(key, 0) + 1
        return self.counts[key]

    def raise_flag(self, counter: int, cp_rank: int, value: int, stream: torch.cuda.Stream) -> None:
        """In `stream`, after all before it: tell `cp_rank` that this rank's `counter` has reached `value`."""
        address = self.regions["flags", 0].addresses[cp_rank] + 4 * (counter * self.cp + self.cp_rank)
        _check(_driver().cuStreamWriteValue32(stream.cuda_stream, address, value, 0))

    def wait_flag(self, counter: int, cp_rank: int, value: int, stream: torch.cuda.Stream) -> None:
        """`stream` stands still until `cp_rank` has raised `counter` to `value` here."""
        address = self.regions["flags", 0].own.data_ptr() + 4 * (counter * self.cp + cp_rank)
        _check(_driver().cuStreamWaitValue32(stream.cuda_stream, address, value, 0))

    def release(self) -> None:
        """Let go of every stream that waits for a flag, from another thread, after a peer was lost.

        What arrives is then garbage and this object of no more use. Peers that are still alive may lower a
        flag again: call until the streams are idle.
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
