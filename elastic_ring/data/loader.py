"""A rank's slice of each sequence, prefetched, several joined for one pass, and a digest of what a step consumed.

The digest covers the slices that entered a step, not the plan. On a GPU it is computed before the copy to the device;
`ArrivedCopies` checks the copies in some steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elastic_ring.config import Timeouts
from elastic_ring.data.filesystem import patiently
from elastic_ring.data.packing import Sample
from elastic_ring.data.source import Source
from elastic_ring.errors import DigestMismatch
from elastic_ring.state.storage.backend import ignore

if TYPE_CHECKING:
    from elastic_ring.attention.layouts.layout import Layout

# Target of a position without one: the next token belongs to another document, is padding or does not count.
IGNORE = -100
LOOK_S = 0.2

TENSORS = ("tokens", "targets", "positions", "document_ids")
_LANES = (0x243F6A8885A308D3, 0x13198A2E03707344)


@dataclass(frozen=True)
class Slice:
    """One rank's part of one sequence, or of several that are computed together (`joined`), in layout order; S is the
    local length.

    tokens, targets, positions: int64 (1, S); document_ids: int32 (1, S). `positions` count in the global sequence.
    `document_starts` are those of the whole sequence, or of all joined ones laid end to end, for the attention mask.
    num_targets: the number of targets other than -100, counted on the host so that no device has to be synchronised.
    `sample_id` is that of the first sequence; `indices_in_batch`: the place of each sequence in its step.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    document_ids: Tensor
    document_starts: tuple[int, ...]
    sample_id: int
    indices_in_batch: tuple[int, ...]
    num_targets: int

    @property
    def num_sequences(self) -> int:
        return len(self.indices_in_batch)

    def to(self, device: torch.device | str) -> Slice:
        """The same slice on another device."""
        tensors = {name: getattr(self, name) for name in TENSORS}
        if torch.device(device).type == "cuda":  # a non-blocking copy may read pageable memory after its reuse
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})


def slice_sample(sample: Sample, layout: Layout, cp_rank: int, *, sample_id: int, index_in_batch: int) -> Slice:
    """The slice of `cp_rank` of a sequence of layout.seq_len tokens.

    Raises: ValueError where layout and sequence differ in length.
    """
    seq_len = len(sample.tokens) - 1
    segments = layout.segments[cp_rank]
    if layout.seq_len != seq_len:
        raise ValueError(
            f"layout seq_len={layout.seq_len} for a sequence of {seq_len} tokens: "
            "make the layout for the source's context"
        )
    ranges = [np.arange(start, stop, dtype=np.int64) for start, stop in segments]
    positions = np.concatenate([np.empty(0, dtype=np.int64), *ranges])
    starts = np.asarray(sample.document_starts, dtype=np.int64)
    targets = sample.tokens[positions + 1]
    targets[np.isin(positions + 1, starts)] = IGNORE
    if sample.padding is not None:
        targets[(targets == sample.padding) & (sample.tokens[positions] == sample.padding)] = IGNORE
    if sample.counted is not None:
        targets[~sample.counted[positions + 1]] = IGNORE
    if sample.ends_document:
        targets[positions == seq_len - 1] = IGNORE
    document_ids = (np.searchsorted(starts, positions, side="right") - 1).astype(np.int32)
    return Slice(
        tokens=torch.from_numpy(sample.tokens[positions]).unsqueeze(0),
        targets=torch.from_numpy(targets).unsqueeze(0),
        positions=torch.from_numpy(positions).unsqueeze(0),
        document_ids=torch.from_numpy(document_ids).unsqueeze(0),
        document_starts=sample.document_starts,
        sample_id=sample_id,
        indices_in_batch=(index_in_batch,),
        num_targets=int((targets != IGNORE).sum()),
    )


def joined(slices: Sequence[Slice], seq_len: int) -> Slice:
    """One rank's slices of several sequences of `seq_len` tokens as the slice of one long sequence that has the
    documents of all; for a layout of so many sequences (`Layout.repeated`).

    Positions and targets stay those of each sequence. One slice alone is returned as it is.
    """
    first = slices[0]
    if len(slices) == 1:
        return first
    document_ids, starts = [], list[int]()
    for row, part in enumerate(slices):
        document_ids.append(part.document_ids + len(starts))
        starts += [row * seq_len + start for start in part.document_starts]
    tokens, targets, positions = (
        torch.cat([getattr(part, name) for part in slices], dim=1) for name in ("tokens", "targets", "positions")
    )
    return Slice(
        tokens,
        targets,
        positions,
        torch.cat(document_ids, dim=1),
        document_starts=tuple(starts),
        sample_id=first.sample_id,
        indices_in_batch=tuple(index for part in slices for index in part.indices_in_batch),
        num_targets=sum(part.num_targets for part in slices),
    )


class Loader:
    """Reads samples on its own thread, `num_ahead` ahead of the step. Close it, or use it in a `with`.

    All reads run on that thread, in order; prefetched samples that are not requested next are dropped. While `load`
    waits it calls `while_waiting` every LOOK_S seconds; an exception from it ends the wait. A read is retried for
    `patience_s` while its storage fails; `tell` gets lines for a person; what is read ahead hides short ones.
    """

    def __init__(
        self,
        source: Source,
        while_waiting: Callable[[], None] | None = None,
        num_ahead: int = 1,
        *,
        patience_s: float = Timeouts.storage_s,
        tell: Callable[[str], None] = ignore,
    ) -> None:
        self.source = source
        self._while_waiting, self._num_ahead = while_waiting, num_ahead
        self._patience_s, self._tell = patience_s, tell
        self._read_ahead: Callable[[Sequence[int]], None] | None = getattr(source, "read_ahead", None)
        self.waited_s = 0.0
        """How long `load` has waited for data in all."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic-ring-loader")
        self._ahead: deque[tuple[int, Future[Sample]]] = deque()

    def prefetch(self, sample_ids: Sequence[int]) -> None:
        """Start to read these sequences. Errors are raised by the `load` of a sequence."""
        num_kept = 0
        for (sample_id, _), requested in zip(self._ahead, sample_ids, strict=False):
            if sample_id != requested:
                break
            num_kept += 1
        self._drop(num_kept)
        for sample_id in sample_ids[num_kept:]:
            read = partial(self.source.read, sample_id)
            self._ahead.append((sample_id, self._thread.submit(patiently, read, self._patience_s, self._tell)))

    def load(
        self, sample_id: int, index_in_batch: int, layout: Layout, cp_rank: int, *, upcoming: Sequence[int] = ()
    ) -> Slice:
        """The slice of one sequence. While the caller computes, the first `num_ahead` of the `upcoming` ones are read,
        and of the others what the source reads ahead.

        Raises: whatever the source raises for this sequence; StorageFailed where its storage stays away.
        """
        if not self._ahead or self._ahead[0][0] != sample_id:
            self.prefetch([sample_id])
        future = self._ahead[0][1]
        begun_s = time.monotonic()
        while not wait([future], timeout=LOOK_S).done:
            if self._while_waiting is not None:
                self._while_waiting()  # may raise to end the wait; the read itself goes on
        self.waited_s += time.monotonic() - begun_s
        self._ahead.popleft()
        sample = future.result()
        if upcoming:
            self.prefetch(upcoming[: self._num_ahead])
            if self._read_ahead is not None:
                self._read_ahead(upcoming[self._num_ahead :])
        return slice_sample(sample, layout, cp_rank, sample_id=sample_id, index_in_batch=index_in_batch)

    def close(self) -> None:
        """Wait for a read in progress, if any, and end the thread."""
        self._drop()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _drop(self, num_kept: int = 0) -> None:
        while len(self._ahead) > num_kept:
            self._ahead.pop()[1].cancel()


class ArrivedCopies:
    """Check that slices arrived unchanged on the device.

    `keep` enqueues copies back to the host behind the step's work, so that nothing waits for them; call `check` once
    the device has been synchronised.
    """

    def __init__(self, on: bool) -> None:
        """With `on` False, nothing is copied or checked."""
        self._on = on
        self._kept: list[tuple[Slice, str, Tensor]] = []

    def keep(self, piece: Slice, batch: Any) -> None:
        """Enqueue copies of `batch`, which has the tensors of `piece` on the device."""
        for name in TENSORS if self._on else ():
            there = getattr(batch, name)
            back = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
            self._kept.append((piece, name, back.copy_(there, non_blocking=True)))

    def check(self, step: int) -> None:
        """Raises DigestMismatch where a copy differs from the slice that the digest covers."""
        kept, self._kept = self._kept, []
        for piece, name, back in kept:
            if not torch.equal(getattr(piece, name), back):
                joint = f" or of the {piece.num_sequences - 1} computed with it" if piece.num_sequences > 1 else ""
                raise DigestMismatch(
                    f"step {step}: {name} of sequence {piece.sample_id}{joint} arrived changed on the device; the "
                    "step runs again",
                    step=step,
                )


def consumed_digest(step: int, slices: Iterable[Slice]) -> tuple[float, ...]:
    """An additive digest of the tokens and targets that a rank consumed in a step.

    Two independent 64-bit sums of a hash (splitmix64's finaliser, Steele et al. 2014) of (step, index_in_batch,
    position, token, target), each as two 32-bit limbs: low, high, low, high. Limbs add exactly in float64 over up to
    2**21 ranks, and the total over all ranks does not depend on mesh or layout.
    """
    sums = [0, 0]
    for part in slices:
        positions, tokens, targets = (
            tensor.cpu().numpy().reshape(-1).astype(np.uint64) for tensor in (part.positions, part.tokens, part.targets)
        )
        for lane, secret in enumerate(_LANES):
            place = np.array([secret], dtype=np.uint64)
            for number in (step, *part.indices_in_batch):
                place = _mix(place ^ _mix(np.array([number], dtype=np.uint64)))
            mixed = _mix(_mix(_mix(place + positions) + tokens) + targets)
            sums[lane] = (sums[lane] + int(mixed.sum(dtype=np.uint64))) % 2**64
    return tuple(float(limb) for total in sums for limb in (total % 2**32, total >> 32))


def samples_text(limbs: Sequence[float]) -> str:
    """The digest whose limbs were added over ranks, steps or both: two 64-bit sums in hexadecimal."""
    low_a, high_a, low_b, high_b = (int(limb) for limb in limbs)
    return f"{(low_a + (high_a << 32)) % 2**64:016x}{(low_b + (high_b << 32)) % 2**64:016x}"


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
