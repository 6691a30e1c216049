"""Healing: a donor sends its shard to newcomers over a link group, and the digest decides.

A newcomer's shard counts only after its own digest over what arrived equals the donor's digest over what
left. The link is any process group with the donor at rank 0.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from elastic_ring.errors import DigestMismatch
from elastic_ring.state.shard import Shard, digest_of

CHUNK_BYTES = 64 << 20
DIGEST_BYTES = 32
DONOR = 0


def send_shard(shard: Shard, link: Any, *, after_chunk: Callable[[], None] = lambda: None) -> int:
    """Send to every other rank of `link`; returns the bytes sent to each. `after_chunk` is called between chunks."""
    header, tensors = shard.pack()
    receivers = [rank for rank in range(link.size()) if rank != DONOR]
    head = torch.frombuffer(bytearray(hashlib.sha256(header).digest() + header), dtype=torch.uint8)
    num_bytes = 0
    for piece in (torch.tensor([head.numel()]), head, *_chunks(tensors)):
        works = [link.send([piece], receiver, 0) for receiver in receivers]
        for work in works:
            work.wait()
        num_bytes += piece.numel() * piece.element_size()
        after_chunk()
    return num_bytes


def receive_shard(shard: Shard, link: Any, *, after_chunk: Callable[[], None] = lambda: None) -> int:
    """Fill `shard` from the donor; returns the bytes received. Raises DigestMismatch and leaves it unused."""
    length = torch.zeros(1, dtype=torch.int64)
    link.recv([length], DONOR, 0).wait()
    head = torch.empty(int(length), dtype=torch.uint8)
    link.recv([head], DONOR, 0).wait()
    raw = head.numpy().tobytes()
    if hashlib.sha256(raw[DIGEST_BYTES:]).digest() != raw[:DIGEST_BYTES]:
        raise DigestMismatch("the description of a healed shard arrived damaged")
    header = pickle.loads(raw[DIGEST_BYTES:])
    tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in header["layout"]]
    num_bytes = length.element_size() + head.numel()
    for chunk in _chunks(tensors):
        link.recv([chunk], DONOR, 0).wait()
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
