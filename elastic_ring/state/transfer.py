"""Healing: a donor sends its shard to newcomers over a link, and the digest decides.

A newcomer's shard counts only after its own digest over what arrived equals the donor's digest over what
left. Both ends of a link are process groups with the donor at rank 0: one for host memory, which also carries
the description, and one for tensors on a device, the same where there is no other.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elastic_ring.errors import DigestMismatch
from elastic_ring.state.shard import Shard, digest_of

CHUNK_BYTES = 64 << 20
DIGEST_BYTES = 32
DONOR = 0


@dataclass(frozen=True)
class Link:
    """The groups of one heal. `host` carries tensors in host memory, `device` those on a device."""

    host: Any
    device: Any = None

    def group_of(self, tensor: Tensor) -> Any:
        return self.host if not tensor.is_cuda or self.device is None else self.device

    def size(self) -> int:
        return int(self.host.size())


def send_shard(shard: Shard, link: Link, *, after_chunk: Callable[[], None] = lambda: None) -> int:
    """Send to every other rank of `link`; returns the bytes sent to each. `after_chunk` is called between chunks."""
    header, tensors = shard.pack()
    receivers = [rank for rank in range(link.size()) if rank != DONOR]
    head = torch.frombuffer(bytearray(hashlib.sha256(header).digest() + header), dtype=torch.uint8)
    num_bytes = 0
    for piece in (torch.tensor([head.numel()]), head, *_chunks(tensors)):
        works = [link.group_of(piece).send([piece], receiver, 0) for receiver in receivers]
        for work in works:
            work.wait()
        num_bytes += piece.numel() * piece.element_size()
        after_chunk()
    return num_bytes


def receive_shard(shard: Shard, link: Link, *, after_chunk: Callable[[], None] = lambda: None) -> int:
    """Fill `shard` from the donor; returns the bytes received. Raises DigestMismatch and leaves it unused."""
    length = torch.zeros(1, dtype=torch.int64)
    link.host.recv([length], DONOR, 0).wait()
    head = torch.empty(int(length), dtype=torch.uint8)
    link.host.recv([head], DONOR, 0).wait()
    raw = head.numpy().tobytes()
    if hashlib.sha256(raw[DIGEST_BYTES:]).digest() != raw[:DIGEST_BYTES]:
        raise DigestMismatch("the description of a healed shard arrived damaged")
    header = pickle.loads(raw[DIGEST_BYTES:])
    device = next(iter(shard.params.values())).device
    tensors = [
        torch.empty(shape, dtype=dtype, device=device if on_device else "cpu")
        for dtype, shape, on_device in header["layout"]
    ]
    num_bytes = length.element_size() + head.numel()
    for chunk in _chunks(tensors):
        link.group_of(chunk).recv([chunk], DONOR, 0).wait()
        num_bytes += chunk.numel()
        after_chunk()
    found = digest_of(header["counters"], tensors)
    if found != header["digest"]:
        raise DigestMismatch(
            f"healed shard of cp_rank {header['cp_rank']} has digest {found[:16]}, its donor's is "
            f"{header['digest'][:16]}",
            cp_rank=header["cp_rank"],
        )
    shard.load(header, tensors)
    return num_bytes


def _chunks(tensors: list[Tensor]) -> list[Tensor]:
    """Byte views of contiguous tensors, none larger than CHUNK_BYTES; empty tensors have none."""
    views: list[Tensor] = []
    for tensor in tensors:
        flat = tensor.detach()
        flat = flat if flat.is_contiguous() else flat.contiguous()
        raw = flat.reshape(-1).view(torch.uint8)
        views += [piece for piece in raw.split(CHUNK_BYTES) if piece.numel()]
    return views
