"""Sealed bytes: host memory that begins with its own size and digest, sending and receiving it, and parities.

A seal takes SEAL_BYTES: the number of bytes in all, the xxh3_128 of those after the seal, zeros. So sealed bytes can be
verified alone. The digest guards against damage, not against malice; it is faster than sha256.
A *parity* is the XOR of whole sealed pieces, seals included, sealed again: XOR with all pieces but one gives the last
piece, whose own seal then proves it.

The meaning of the bytes is in `state.snapshot`; who sends them to whom is decided elsewhere.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
import xxhash
from torch import Tensor

from elastic_ring.errors import DigestMismatch

SEAL = struct.Struct("<Q16s")
SEAL_BYTES = 64  # a multiple of the alignment of tensors behind it
CHUNK_BYTES = 32 << 20
DIGEST_BYTES = 4 << 20  # short enough that no other Python thread waits for long

Allocate = Callable[[int], Tensor]
"""Allocates host memory, uint8, of at least so many bytes."""


def seal(data: Tensor) -> None:
    """Write the size and digest of `data` (uint8, contiguous, in host memory) into its first bytes."""
    head = SEAL.pack(data.numel(), _digest(data[SEAL_BYTES:]))
    data[:SEAL_BYTES] = torch.frombuffer(bytearray(head.ljust(SEAL_BYTES, b"\0")), dtype=torch.uint8)


def verify(data: Tensor, label: str) -> None:
    """Raises DigestMismatch, with `label`, unless the seal of `data` fits its bytes."""
    size, digest = SEAL.unpack(bytes(data[: SEAL.size].numpy())) if data.numel() >= SEAL_BYTES else (0, b"")
    if size != data.numel() or not size:
        raise DigestMismatch(f"{label} has {data.numel()} bytes, its seal says {size}")
    _compare(_digest(data[SEAL_BYTES:]), digest, label)


def xor(into: Tensor, data: Tensor) -> None:
    part = into[: data.numel()]
    torch.bitwise_xor(part, data, out=part)


def parity_of(pieces: list[Tensor], allocate: Allocate) -> Tensor:
    """The sealed XOR of sealed pieces of any sizes."""
    size = SEAL_BYTES + max(piece.numel() for piece in pieces)
    parity = allocate(size)[:size].zero_()
    for piece in pieces:
        xor(parity[SEAL_BYTES:], piece)
    seal(parity)
    return parity


def missing_piece(parity: Tensor, pieces: list[Tensor], label: str) -> Tensor:
    """Rebuild the piece of a parity that is not in `pieces`, in the memory of `parity`. Raises DigestMismatch."""
    body = parity[SEAL_BYTES:]
    for piece in pieces:
        xor(body, piece)
    size = SEAL.unpack(bytes(body[: SEAL.size].numpy()))[0] if body.numel() >= SEAL_BYTES else 0
    if not SEAL_BYTES <= size <= body.numel():
        raise DigestMismatch(f"{label}, rebuilt from a parity, would have {size} bytes")
    verify(body[:size], f"{label}, rebuilt from a parity,")
    return body[:size]


# ---------------------------------------------------------------- sending and receiving


def refuse(group: Any, receiver: int) -> list[Any]:
    """Begin to send an empty message: no copy available. It raises DigestMismatch at the receiver."""
    return [group.send([torch.zeros(SEAL_BYTES, dtype=torch.uint8)], receiver, 0)]


def send(group: Any, data: Tensor, receiver: int) -> list[Any]:
    """Begin to send sealed bytes; returns the works to wait for. `data` must not change until then."""
    return [group.send([piece], receiver, 0) for piece in (data[:SEAL_BYTES], *data[SEAL_BYTES:].split(CHUNK_BYTES))]


def receive(
    group: Any, sender: int, allocate: Allocate, label: str, after_chunk: Callable[[], None] = lambda: None
) -> Tensor:
    """Receive sealed bytes from `sender`. Raises DigestMismatch once all have arrived, and MemoryError for lack of
    memory once the sender is rid of them."""
    head = torch.empty(SEAL_BYTES, dtype=torch.uint8)
    group.recv([head], sender, 0).wait()
    size, digest = SEAL.unpack(bytes(head[: SEAL.size].numpy()))
    if size < SEAL_BYTES:
        raise DigestMismatch(f"{label} would have {size} bytes")
    try:
        data = allocate(size)[:size]
    except (MemoryError, RuntimeError) as error:
        # Receive and drop its bytes, so that the sender can go on and the next bytes are not mistaken for them.
        num_bytes = size - SEAL_BYTES
        chunk = torch.empty(min(CHUNK_BYTES, num_bytes), dtype=torch.uint8)
        for start in range(0, num_bytes, CHUNK_BYTES):
            group.recv([chunk[: min(CHUNK_BYTES, num_bytes - start)]], sender, 0).wait()
        raise MemoryError(f"{label} has {size} bytes, for which there is no memory: {error}") from error
    data[:SEAL_BYTES] = head
    chunks = data[SEAL_BYTES:].split(CHUNK_BYTES) if size > SEAL_BYTES else ()
    works = [group.recv([chunk], sender, 0) for chunk in chunks]
    total = xxhash.xxh3_128()
    for work, chunk in zip(works, chunks, strict=True):
        work.wait()
        _update(total, chunk)
        after_chunk()
    _compare(total.digest(), digest, label)
    return data


def _compare(computed: bytes, sealed: bytes, label: str) -> None:
    if computed != sealed:
        raise DigestMismatch(f"{label} has digest {computed.hex()[:16]}, its seal says {sealed.hex()[:16]}")


def _digest(data: Tensor) -> bytes:
    total = xxhash.xxh3_128()
    _update(total, data)
    return total.digest()


def _update(total: xxhash.xxh3_128, data: Tensor) -> None:
    view = data.numpy().data
    for start in range(0, len(view), DIGEST_BYTES):
        total.update(view[start : start + DIGEST_BYTES])
