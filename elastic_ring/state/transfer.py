"""Healing: a donor sends its shard to newcomers over a link, and the digest decides.

A newcomer's shard counts only after its digest of the received tensors equals the donor's. A link is two process
groups, or parts of groups, with the donor at rank 0: one for host memory, which also carries the header
(`state.header`), and one for tensors on a device, and for large tensors in host memory by way of it. On CPUs there is
only the first.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elastic_ring.errors import DigestMismatch
from elastic_ring.state.header import MAX_HEADER_BYTES, Header
from elastic_ring.state.host_optimizer import batched
from elastic_ring.state.safetensors import byte_view
from elastic_ring.state.shard import Shard, digest_of, uses_device

CHUNK_BYTES = 64 << 20
BATCH_BYTES = 1 << 30
DIGEST_BYTES = 32
DONOR = 0


@dataclass(frozen=True)
class Link:
    """The groups of one heal. `host` carries tensors in host memory, `device` those on a device and large
    ones (a backend that can join several sends into one operation, as NCCL's does)."""

    host: Any
    device: Any = None
    timings: dict[str, float] = field(default_factory=dict)
    """`pack_s` and `answer_s` of a donor, `wire_s` of both, `verify_s` of a newcomer."""

    def size(self) -> int:
        return int(self.host.size())


def send_shard(shard: Shard, link: Link, *, after_chunk: Callable[[], None] = lambda: None) -> int:
    """Send to every other rank of `link`; returns the bytes sent to each. `after_chunk` is called between chunks.

    Returns once every newcomer has acknowledged all data: between hosts a completed send may still be in flight, and
    closing the link would drop it.
    """
    begun = time.monotonic()
    description, tensors = shard.pack()
    header = description.to_bytes()
    packed = time.monotonic()
    receivers = [rank for rank in range(link.size()) if rank != DONOR]
    head = torch.frombuffer(bytearray(hashlib.sha256(header).digest() + header), dtype=torch.uint8)
    in_memory, on_device = _parts(tensors, shard.device, link)
    device, num_bytes = shard.device, 0
    for piece in (torch.tensor([head.numel()]), head, *_chunks(in_memory)):
        works = [link.host.send([piece], receiver, 0) for receiver in receivers]
        for work in works:
            work.wait()
        num_bytes += piece.numel() * piece.element_size()
        after_chunk()
    for batch in batched(_chunks(on_device), BATCH_BYTES):
        staged = [piece.to(device) for piece in batch]
        link.device._start_coalescing()
        for piece in staged:
            for receiver in receivers:
                link.device.send([piece], receiver, 0)
        link.device._end_coalescing().wait()
        num_bytes += sum(piece.numel() for piece in batch)
        after_chunk()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    sent = time.monotonic()
    for receiver in receivers:
        link.host.recv([torch.empty(1, dtype=torch.uint8)], receiver, 0).wait()
    link.timings.update(pack_s=packed - begun, wire_s=sent - packed, answer_s=time.monotonic() - sent)
    return num_bytes


def receive_shard(shard: Shard, link: Link, *, after_chunk: Callable[[], None] = lambda: None) -> int:
    """Fill `shard` from the donor; returns the bytes received.

    Raises DigestMismatch for a header that does not fit `shard`, which stays as it was, and for damaged data, which lie
    in its memory then.
    """
    length = torch.zeros(1, dtype=torch.int64)
    link.host.recv([length], DONOR, 0).wait()
    if not DIGEST_BYTES < int(length) <= MAX_HEADER_BYTES:
        raise DigestMismatch(f"the header of a healed shard would take {int(length)} bytes")
    head = torch.empty(int(length), dtype=torch.uint8)
    link.host.recv([head], DONOR, 0).wait()
    raw = head.numpy().tobytes()
    if hashlib.sha256(raw[DIGEST_BYTES:]).digest() != raw[:DIGEST_BYTES]:
        raise DigestMismatch("the header of a healed shard arrived damaged")
    header = Header.from_bytes(raw[DIGEST_BYTES:])
    shard.check_header(header)
    device = shard.device
    tensors = shard.places(header)
    num_bytes = length.element_size() + head.numel()
    begun = time.monotonic()
    in_memory, on_device = _parts(tensors, device, link)
    for chunk in _chunks(in_memory):
        link.host.recv([chunk], DONOR, 0).wait()
        num_bytes += chunk.numel()
        after_chunk()
    for batch in batched(_chunks(on_device), BATCH_BYTES):
        staged = [piece if piece.device == device else torch.empty_like(piece, device=device) for piece in batch]
        link.device._start_coalescing()
        for piece in staged:
            link.device.recv([piece], DONOR, 0)
        link.device._end_coalescing().wait()
        for piece, arrived_piece in zip(batch, staged, strict=True):
            if arrived_piece is not piece:
                piece.copy_(arrived_piece)
        num_bytes += sum(piece.numel() for piece in batch)
        after_chunk()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    arrived = time.monotonic()
    digest = digest_of(header.meta.counters, tensors, device)
    link.host.send([torch.ones(1, dtype=torch.uint8)], DONOR, 0).wait()  # acknowledges arrival, before the verdict
    if digest != header.digest:
        raise DigestMismatch(
            f"healed shard of cp_rank {header.cp_rank} has digest {digest[:16]}, its donor's is {header.digest[:16]}",
            cp_rank=header.cp_rank,
        )
    shard.load(header, tensors)
    link.timings.update(wire_s=arrived - begun, verify_s=time.monotonic() - arrived)
    return num_bytes


def _parts(tensors: list[Tensor], device: torch.device, link: Link) -> tuple[list[Tensor], list[Tensor]]:
    """(tensors for the host group, tensors for the device group); without a device group all go to the host group."""
    if link.device is None:
        return tensors, []
    on_device = [tensor for tensor in tensors if uses_device(tensor, device)]
    return [tensor for tensor in tensors if not uses_device(tensor, device)], on_device


def _chunks(tensors: list[Tensor]) -> list[Tensor]:
    """Byte views of contiguous tensors, none larger than CHUNK_BYTES; empty tensors have none."""
    return [piece for tensor in tensors for piece in byte_view(tensor).split(CHUNK_BYTES) if piece.numel()]
