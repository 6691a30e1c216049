"""A rank's slice of each sequence, prefetched by one, and a digest of the data that a step consumed.

The digest covers the slices that entered a step, not the plan. On a GPU it is computed before the copy to the device;
`ArrivedCopies` checks the copies in some steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elastic_ring.data.packing import Sample
from elastic_ring.data.source import Source
from elastic_ring.errors import DigestMismatch

if TYPE_CHECKING:
    from elastic_ring.attention.layouts.layout import Layout

# Target of a position without one: the next token belongs to another document or is padding.
IGNORE = -100
LOOK_S = 0.2

DIGEST_LIMBS = 4
_LANES = (0x243F6A8885A308D3, 0x13198A2E03707344)


@dataclass(frozen=True)
class Slice:
    """One rank's part of one sequence, in layout order; S is the local length.

    tokens, targets, positions: int64 (1, S); document_ids: int32 (1, S). `positions` count in the global sequence.
    `document_starts` are those of the whole sequence, for the attention mask. num_targets: the number of targets other
    than -100, counted on the host so that no device has to be synchronised.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    document_ids: Tensor
    document_starts: tuple[int, ...]
    sample_id: int
    index_in_batch: int
    num_targets: int

    def to(self, device: torch.device | str) -> Slice:
        """The same slice on another device."""
        return replace(
            self,
            tokens=_moved(self.tokens, device),
            targets=_moved(self.targets, device),
            positions=_moved(self.positions, device),
            document_ids=_moved(self.document_ids, device),
        )


def _moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy through pinned memory: a non-blocking copy may read pageable memory after it was freed and reused."""
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def slice_sample(sample: Sample, layout: Layout, cp_rank: int, *, sample_id: int, index_in_batch: int) -> Slice:
    """The slice of `cp_rank` of a sequence with context_tokens = layout.seq_len tokens.

    Raises: ValueError where layout and sequence differ in length.
    """
    context_tokens = len(sample.tokens) - 1
    segments = layout.segments[cp_rank]
    if layout.seq_len != context_tokens:
        raise ValueError(
            f"layout seq_len={layout.seq_len} for a sequence of context_tokens={context_tokens}: "
            "make the layout for the source's context"
        )
    ranges = [np.arange(start, stop, dtype=np.int64) for start, stop in segments]
    positions = np.concatenate([np.empty(0, dtype=np.int64), *ranges])
    starts = np.asarray(sample.document_starts, dtype=np.int64)
    targets = sample.tokens[positions + 1]
    targets[np.isin(positions + 1, starts)] = IGNORE
    if sample.padding is not None:
        targets[(targets == sample.padding) & (sample.tokens[positions] == sample.padding)] = IGNORE
    if sample.ends_document:
        targets[positions == context_tokens - 1] = IGNORE
    document_ids = (np.searchsorted(starts, positions, side="right") - 1).astype(np.int32)
    return Slice(
        tokens=torch.from_numpy(sample.tokens[positions]).unsqueeze(0),
        targets=torch.from_numpy(targets).unsqueeze(0),
        positions=torch.from_numpy(positions).unsqueeze(0),
        document_ids=torch.from_numpy(document_ids).unsqueeze(0),
        document_starts=sample.document_starts,
        sample_id=sample_id,
        index_in_batch=index_in_batch,
        num_targets=int((targets != IGNORE).sum()),
    )


class Loader:
    """Reads samples on its own thread, one ahead of the step. Close it, or use it in a `with`.

    All reads run on that thread, in order; a prefetched sample that is not requested next is dropped. While `load`
    waits it calls `while_waiting` every LOOK_S seconds; an exception from it ends the wait.
    """

    def __init__(self, source: Source, while_waiting: Callable[[], None] | None = None) -> None:
        self.source = source
        self._while_waiting = while_waiting
        self._read_ahead: Callable[[Sequence[int]], None] | None = getattr(source, "read_ahead", None)
        self.waited_s = 0.0
        """How long `load` has waited for data in all."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic-ring-loader")
        self._ahead: tuple[int, Future[Sample]] | None = None

    def prefetch(self, sample_id: int) -> None:
        """Start to read a sequence. Errors are raised by the `load` of that sequence."""
        if self._ahead is not None and self._ahead[0] == sample_id:
            return
        self._drop()
        self._ahead = (sample_id, self._thread.submit(self.source.read, sample_id))

    def load(
        self, sample_id: int, index_in_batch: int, layout: Layout, cp_rank: int, *, upcoming: Sequence[int] = ()
    ) -> Slice:
        """The slice of one sequence. While the caller computes, the first of the `upcoming` ones is read, and of the
        others what the source reads ahead.

        Raises: whatever the source raises for this sequence.
        """
        self.prefetch(sample_id)
        assert self._ahead is not None
        future = self._ahead[1]
        begun_s = time.monotonic()
        while not wait([future], timeout=LOOK_S).done:
            if self._while_waiting is not None:
                self._while_waiting()  # may raise to end the wait; the read itself goes on
        self.waited_s += time.monotonic() - begun_s
        self._ahead = None
        sample = future.result()
        if upcoming:
            self.prefetch(upcoming[0])
            if self._read_ahead is not None:
                self._read_ahead(upcoming[1:])
        return slice_sample(sample, layout, cp_rank, sample_id=sample_id, index_in_batch=index_in_batch)

    def close(self) -> None:
        """Wait for a read in progress, if any, and end the thread."""
        self._drop()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drop(self) -> None:
        if self._ahead is not None:
            self._ahead[1].cancel()
            self._ahead = None


_COPIED = ("tokens", "targets", "positions", "document_ids")


class ArrivedCopies:
    """Check that slices arrived unchanged on the device.

    `keep` enqueues copies back to the host behind the step's work, so that nothing waits for them; call `check` once
    the device has been synchronised.
    """

    def __init__(self, on: bool) -> None:
        """With `on` False, nothing is copied or checked."""
        self._on = on
        self._kept: list[tuple[int, str, Tensor, Tensor]] = []

    def keep(self, piece: Slice, batch: Any) -> None:
        """Enqueue copies of `batch`, which has the tensors of `piece` on the device."""
        for name in _COPIED if self._on else ():
            there = getattr(batch, name)
            back = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
            self._kept.append((piece.sample_id, name, getattr(piece, name), back.copy_(there, non_blocking=True)))

    def check(self, step: int) -> None:
        """Raises DigestMismatch where a copy differs from the slice that the digest covers."""
        kept, self._kept = self._kept, []
        for sample_id, name, sent, back in kept:
            if not torch.equal(sent, back):
                raise DigestMismatch(
                    f"step {step}: {name} of sequence {sample_id} arrived changed on the device; the step runs again",
                    step=step,
                )


def consumed_digest(step: int, slices: Iterable[Slice]) -> tuple[float, ...]:
    """An additive digest of the tokens and targets that a rank consumed in a step.

    Two independent 64-bit sums of a hash (splitmix64's finaliser, Steele et al. 2014) of (step, index_in_batch,
    position, token, target), each as two 32-bit limbs: low, high, low, high. Limbs add exactly in float64 over up to
    2**21 ranks, and the total over all ranks does not depend on mesh or layout. `digest_value` decodes it.
    """
    sums = [0, 0]
    for part in slices:
        positions, tokens, targets = (
            tensor.cpu().numpy().reshape(-1).astype(np.uint64) for tensor in (part.positions, part.tokens, part.targets)
        )
        for lane, secret in enumerate(_LANES):
            place = np.array([secret], dtype=np.uint64)
            for number in (step, part.index_in_batch):
                place = _mix(place ^ _mix(np.array([number], dtype=np.uint64)))
            mixed = _mix(_mix(_mix(place + positions) + tokens) + targets)
            sums[lane] = (sums[lane] + int(mixed.sum(dtype=np.uint64))) % 2**64
    return tuple(float(limb) for total in sums for limb in (total % 2**32, total >> 32))


def digest_value(limbs: Iterable[float]) -> tuple[int, int]:
    """The two 64-bit sums of limbs that were added over ranks, steps or both."""
    low_a, high_a, low_b, high_b = (int(limb) for limb in limbs)
    return (low_a + (high_a << 32)) % 2**64, (low_b + (high_b << 32)) % 2**64


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
