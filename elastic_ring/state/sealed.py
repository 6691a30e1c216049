"""Sealed bytes: host memory that begins with its own size and digest, how it travels, and the XOR of several.

A seal takes SEAL_BYTES: the number of bytes in all, the xxh3_128 of those after the seal, zeros. Whoever holds sealed
bytes can verify them alone. The digest guards against damage, not against malice; it is faster than sha256.
A *parity* is the XOR of whole sealed pieces, seals included, sealed again: XOR with all of them but one gives that one,
whose own seal then proves it.

What the bytes mean is in `state.snapshot`; who sends them to whom is decided elsewhere.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
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
"""Host memory, uint8, of at least so many bytes."""


def seal(data: Tensor) -> None:
    """Write the size and digest of `data` (uint8, contiguous, in host memory) into its first bytes."""
    head = SEAL.pack(data.numel(), _digest(data[SEAL_BYTES:]))
    data[:SEAL_BYTES] = torch.frombuffer(bytearray(head.ljust(SEAL_BYTES, b"\0")), dtype=torch.uint8)


def sealed_size(data: Tensor) -> int:
    """The number of bytes that the seal at the begin of `data` names."""
    return int(SEAL.unpack(bytes(data[: SEAL.size].numpy()))[0])


def verify(data: Tensor, what: str) -> None:
    """Raises DigestMismatch, naming `what`, unless the seal of `data` fits its bytes."""
    size, digest = SEAL.unpack(bytes(data[: SEAL.size].numpy())) if data.numel() >= SEAL_BYTES else (0, b"")
    if size != data.numel() or not size:
        raise DigestMismatch(f"{what} has {data.numel()} bytes, its seal says {size}")
    _check(_digest(data[SEAL_BYTES:]), digest, what)


def xor(into: Tensor, data: Tensor) -> None:
    """`into[:len(data)] ^= data`."""
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


def missing_piece(parity: Tensor, others: list[Tensor], what: str) -> Tensor:
    """The piece of a parity beside `others`. `parity` is used up. Raises DigestMismatch."""
    body = parity[SEAL_BYTES:]
    for piece in others:
        xor(body, piece)
    size = sealed_size(body) if body.numel() >= SEAL_BYTES else 0
    if not SEAL_BYTES <= size <= body.numel():
        raise DigestMismatch(f"{what}, rebuilt from a parity, would have {size} bytes")
    verify(body[:size], f"{what}, rebuilt from a parity,")
    return body[:size]


# ---------------------------------------------------------------- on their way


def refuse(group: Any, receiver: int) -> list[Any]:
    """Send a seal of no bytes: there is nothing this time. The receiver's DigestMismatch says so."""
    return [group.send([torch.zeros(SEAL_BYTES, dtype=torch.uint8)], receiver, 0)]


def send(group: Any, data: Tensor, receiver: int) -> list[Any]:
    """Begin to send sealed bytes; returns what to wait for. `data` must stay as it is until then."""
    return [group.send([piece], receiver, 0) for piece in (data[:SEAL_BYTES], *data[SEAL_BYTES:].split(CHUNK_BYTES))]


def receive(
    group: Any, sender: int, allocate: Allocate, what: str, after_chunk: Callable[[], None] = lambda: None
) -> Tensor:
    """Sealed bytes from `sender`, verified on arrival. Raises DigestMismatch, once all of them are here."""
    return receive_over(group, sender, lambda size: allocate(size)[:size], what, after_chunk)


def receive_over(
    group: Any, sender: int, place: Allocate, what: str, after_chunk: Callable[[], None] = lambda: None
) -> Tensor:
    """As `receive`; `place` gives exactly the memory. Where it has none: MemoryError, once the sender is rid of all."""
    head = torch.empty(SEAL_BYTES, dtype=torch.uint8)
    group.recv([head], sender, 0).wait()
    size, digest = SEAL.unpack(bytes(head[: SEAL.size].numpy()))
    if size < SEAL_BYTES:
        raise DigestMismatch(f"{what} would have {size} bytes")
    try:
        data = place(size)
    except (MemoryError, RuntimeError) as error:
        _discard(group, sender, size - SEAL_BYTES)
        raise MemoryError(f"{what} has {size} bytes, for which there is no memory: {error}") from error
    data[:SEAL_BYTES] = head
    chunks = data[SEAL_BYTES:].split(CHUNK_BYTES) if size > SEAL_BYTES else ()
    works = [group.recv([chunk], sender, 0) for chunk in chunks]
    found = xxhash.xxh3_128()
    for work, chunk in zip(works, chunks, strict=True):
        work.wait()
        _update(found, chunk)
        after_chunk()
    _check(found.digest(), digest, what)
    return data


def _discard(group: Any, sender: int, num_bytes: int) -> None:
    """Receive and drop a sender's bytes, so that it can go on and the next bytes are not mistaken for them."""
    chunk = torch.empty(min(CHUNK_BYTES, num_bytes), dtype=torch.uint8)
    for start in range(0, num_bytes, CHUNK_BYTES):
        group.recv([chunk[: min(CHUNK_BYTES, num_bytes - start)]], sender, 0).wait()


def _check(found: bytes, expected: bytes, what: str) -> None:
    if found != expected:
        raise DigestMismatch(f"{what} has digest {found.hex()[:16]}, its seal says {expected.hex()[:16]}")


def _digest(data: Tensor) -> bytes:
    total = xxhash.xxh3_128()
    _update(total, data)
    return total.digest()


def _update(total: Any, data: Tensor) -> None:
    for piece in _pieces(data):
        total.update(piece)


def _pieces(data: Tensor) -> Iterator[memoryview]:
    view = data.numpy().data
    for start in range(0, len(view), DIGEST_BYTES):
        yield view[start : start + DIGEST_BYTES]
