"""A rank's whole shard in host memory, taken after a step: sealed bytes that any process can load or send on.

Behind the seal (`state.sealed`) come the step, the (term, generation) whose members took it, the length of the header,
the header (`state.header`) and the tensors, each at a multiple of ALIGN_BYTES. Host memory is reused; for a shard on a
GPU it is pinned and filled on a stream of its own: the copy runs beside the next step, which changes nothing of the
shard before its apply. Nothing here sends anything, and nothing is unpickled.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from elastic_ring.control.messages import SnapshotId
from elastic_ring.errors import DigestMismatch
from elastic_ring.state import pinned
from elastic_ring.state.header import Header
from elastic_ring.state.safetensors import byte_view
from elastic_ring.state.sealed import SEAL_BYTES, seal, verify
from elastic_ring.state.shard import Shard

PIECE_BYTES = 32 << 20
"""0.6 ms at 50 GB/s."""


class HostSnapshot:
    """A copy of tensors of rank `cp_rank` in host memory; `fill` begins it."""

    def __init__(self, cp_rank: int) -> None:
        self.cp_rank = cp_rank
        self._lock = threading.Lock()
        self._left: list[tuple[Tensor, Tensor]] = []
        self._stream: Any = None
        self._begin: Any = None
        self._error: Exception | None = None

    def fill(self, pairs: Iterable[tuple[Tensor, Tensor]], stream: Any) -> None:
        """Begin to copy: `pairs` are (contiguous host memory, tensor), of equally many bytes. Tensors in host memory
        are copied now; tensors on a GPU once a thread waits, on `stream`, after the current stream's work of now."""
        for place, tensor in pairs:
            if tensor.is_cuda:
                self._left.append((place, tensor))
            elif tensor.numel():
                byte_view(place).copy_(byte_view(tensor))
        if self._left:
            self._stream, self._begin = stream, torch.cuda.current_stream(stream.device).record_event()

    def wait(self) -> float:
        """Wait until the shard may be changed or freed; returns the seconds waited. The first call copies, so it
        should not come from the training thread."""
        if not self._left:
            return 0.0
        begun = time.monotonic()
        with self._lock:
            try:
                if self._left:
                    self._copy()
            except (MemoryError, RuntimeError) as error:
                self._error = error
            self._left = []
        return time.monotonic() - begun

    def finish(self) -> None:
        """Wait until all of it is in host memory. Raises the error of the copy: MemoryError or RuntimeError."""
        self.wait()
        if self._error is not None:
            raise self._error

    def _copy(self) -> None:
        num_bytes = 0
        # Set the device: threads default to GPU 0, and leaving the stream would open a context there.
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._begin)
            try:
                for place, tensor in self._left:
                    targets, sources = (byte_view(whole).split(PIECE_BYTES) for whole in (place, tensor))
                    for target, piece in zip(targets, sources, strict=True):
                        target.copy_(piece, non_blocking=True)
                        num_bytes += piece.numel()
                        if num_bytes >= PIECE_BYTES:
                            self._stream.synchronize()
                            num_bytes = 0
            finally:  # queued copies still read the tensors, also where the next piece failed
                self._stream.synchronize()


ALIGN_BYTES = 64
_HEAD = struct.Struct("<QQQQ")  # step, term, generation, bytes of the header
_KEPT = 4
_SLACK_BYTES = 1 << 20  # a header grows with the numbers in it


def named(snapshot_id: SnapshotId) -> str:
    """A snapshot's name in a log line or an error."""
    return f"step {snapshot_id.step} (generation {snapshot_id.membership_id[1]})"


class Buffers:
    """A pool of host memory. May be called from any thread."""

    def __init__(self, *, is_pinned: bool = False) -> None:
        self._is_pinned = is_pinned
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Tensor:
        """At least so many bytes (uint8), with any content. Raises as `pinned.empty`, or RuntimeError."""
        with self._lock:
            fitting = [data for data in self._free if num_bytes <= data.numel() <= 2 * num_bytes + _SLACK_BYTES]
            if fitting:
                smallest = min(fitting, key=Tensor.numel)
                self._free = [data for data in self._free if data is not smallest]
                return smallest
        whole_bytes = num_bytes + _SLACK_BYTES
        return pinned.empty(whole_bytes) if self._is_pinned else torch.empty(whole_bytes, dtype=torch.uint8)

    def reserve(self, num_bytes: int, num: int) -> None:
        """Prepare `num` buffers of at least so many bytes. Raises as `take`."""
        for buffer in [self.take(num_bytes) for _ in range(num)]:
            self.give_back(buffer)

    def give_back(self, data: Tensor) -> None:
        """Return a buffer, or a view of its begin, to the pool."""
        whole = torch.empty(0, dtype=torch.uint8).set_(data.untyped_storage())
        with self._lock:
            self._free = [*self._free[-(_KEPT - 1) :], whole]

    def clear(self) -> None:
        with self._lock:
            self._free = []


class Snapshot(HostSnapshot):
    """`data` is sealed once `finish` has returned. `is_taken`: by this worker itself, so that the memory is pinned."""

    def __init__(self, snapshot_id: SnapshotId, cp_rank: int, data: Tensor, *, is_taken: bool = False) -> None:
        super().__init__(cp_rank)
        self.id, self.data, self.is_taken = snapshot_id, data, is_taken
        self.waited_s = 0.0  # of training, before the shard changed

    @classmethod
    def empty(cls, snapshot_id: SnapshotId, cp_rank: int) -> Snapshot:
        """Stands for a snapshot that could not be taken."""
        return cls(snapshot_id, cp_rank, torch.empty(0, dtype=torch.uint8))

    @property
    def is_empty(self) -> bool:
        return self.data.numel() == 0

    def finish(self) -> None:
        """Copy tensors from the GPU and seal the data. Not from the training thread. Raises as `HostSnapshot`."""
        super().finish()
        seal(self.data)


def size_of(shard: Shard) -> int:
    """The bytes of a snapshot of this shard; later ones differ by a few, see `Buffers`."""
    header, _ = shard.describe()
    return _places(len(header.to_bytes()), header)[1]


def take(shard: Shard, membership_id: tuple[int, int], buffers: Buffers, stream: Any = None) -> Snapshot:
    """Copy a shard into host memory; tensors on a GPU are copied on `stream`, once a thread waits for it."""
    header, tensors = shard.describe()
    text = header.to_bytes()
    step = shard.counters.applied
    offsets, size = _places(len(text), header)
    data = buffers.take(size)[:size]
    head = _HEAD.pack(step, *membership_id, len(text)) + text
    data[SEAL_BYTES : SEAL_BYTES + len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    snapshot = Snapshot(SnapshotId(step, membership_id), shard.cp_rank, data, is_taken=True)
    specs = header.layout.values()
    places = (data[offset : offset + spec.num_bytes] for offset, spec in zip(offsets, specs, strict=True))
    snapshot.fill(zip(places, tensors, strict=True), stream)
    return snapshot


def opened(data: Tensor, label: str) -> tuple[SnapshotId, Header, list[Tensor]]:
    """(id, header, views of the tensors) of a snapshot's bytes, verified. Raises DigestMismatch."""
    verify(data, label)
    try:
        step, term, generation, length = _HEAD.unpack(bytes(data[SEAL_BYTES : SEAL_BYTES + _HEAD.size].numpy()))
        begin = SEAL_BYTES + _HEAD.size
        header = Header.from_bytes(bytes(data[begin : begin + length].numpy()))
        offsets, size = _places(length, header)
        if size != data.numel():
            raise ValueError(f"{data.numel()} bytes instead of {size}")
        tensors = [
            data[offset : offset + spec.num_bytes].view(spec.torch_dtype).view(spec.shape)
            for offset, spec in zip(offsets, header.layout.values(), strict=True)
        ]
    except (ValueError, struct.error, RuntimeError) as error:
        raise DigestMismatch(f"{label} is no snapshot: {error}") from error
    return SnapshotId(step, (term, generation)), header, tensors


def load(data: Tensor, expected: SnapshotId, cp_rank: int, shard: Shard, label: str) -> None:
    """Load a snapshot's bytes into `shard`. Raises DigestMismatch unless they are the snapshot `expected`."""
    snapshot_id, header, tensors = opened(data, label)
    if snapshot_id != expected or header.cp_rank != cp_rank or header.meta.counters.applied != expected.step:
        raise DigestMismatch(
            f"{label} is of {named(snapshot_id)} and cp_rank {header.cp_rank}, not of {named(expected)} and {cp_rank}"
        )
    shard.check_header(header)
    places = shard.places(header)
    for place, tensor in zip(places, tensors, strict=True):
        place.copy_(tensor)
    shard.load(header, places)


def _places(header_bytes: int, header: Header) -> tuple[list[int], int]:
    """(offset of each tensor, bytes of the whole snapshot)."""
    at, offsets = SEAL_BYTES + _HEAD.size + header_bytes, []
    for spec in header.layout.values():
        at += -at % ALIGN_BYTES
        offsets.append(at)
        at += spec.num_bytes
    return offsets, at
