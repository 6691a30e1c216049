"""A rank's slice of a sequence, read ahead by one, and a digest of what was really consumed.

The digest is over the slices that went into a step, not over the plan. On a GPU it is taken before they are copied
there; now and then what has arrived is copied back and compared (`ArrivedCopies`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    from elastic_ring.attention.layout import Layout

# The target of a position that has none: the next token belongs to another document, or only fills this one up.
IGNORE = -100
LOOK_S = 0.2

DIGEST_LIMBS = 4
_LANES = (0x243F6A8885A308D3, 0x13198A2E03707344)


@dataclass(frozen=True)
class Slice:
    """What one rank of a ring holds of one sequence, in the order of its layout; S is the local length.

    tokens, targets, positions: int64 (1, S); document_ids: int32 (1, S). `positions` count in the global
    sequence. `document_starts` are those of the whole sequence, for the attention's mask. num_targets: how
    many targets are not -100, counted here so that no device has to be asked.
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
    """Pinned on the way to a GPU: a copy that the host does not wait for reads pageable memory after its owner has
    let go of it, and then now and then a step trains on other tokens."""
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def slice_sample(
    sample: Sample, layout: Layout, cp_rank: int, *, sample_id: int, index_in_batch: int
) -> Slice:
    """Cuts the slice of `cp_rank` out of a sequence of layout.seq_len = context_tokens tokens."""
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
    """Reads samples on one thread of its own, one ahead of the step. Close it, or use it in a `with`.

    All reads go through that thread, in order; a read that was foretold and not asked for is dropped.
    `while_waiting` is called every LOOK_S of a wait; what it raises ends the wait.
    """

    def __init__(self, source: Source, while_waiting: Callable[[], None] | None = None) -> None:
        self.source = source
        self._while_waiting = while_waiting
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic-ring-loader")
        self._ahead: tuple[int, Future[Sample]] | None = None

    def prefetch(self, sample_id: int) -> None:
        """Begins to read a sequence. What goes wrong is raised by the `load` that asks for it."""
        if self._ahead is not None and self._ahead[0] == sample_id:
            return
        self._drop()
        self._ahead = (sample_id, self._thread.submit(self.source.read, sample_id))

    def load(
        self, sample_id: int, index_in_batch: int, layout: Layout, cp_rank: int, *, next_id: int | None = None
    ) -> Slice:
        """The slice of one sequence; `next_id` is read on while the caller computes.

        Raises whatever the source raises for this sequence.
        """
        self.prefetch(sample_id)
        assert self._ahead is not None
        future = self._ahead[1]
        while not wait([future], timeout=LOOK_S).done:
            if self._while_waiting is not None:
                self._while_waiting()  # raises when nobody needs the sequence any more; the read goes on
        self._ahead = None
        sample = future.result()
        if next_id is not None:
            self.prefetch(next_id)
        return slice_sample(sample, layout, cp_rank, sample_id=sample_id, index_in_batch=index_in_batch)

    def close(self) -> None:
        """Waits for the read under way, if any; the thread ends."""
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
    """What of a step's slices has arrived on the device that computes, copied back behind the step's own work, so that
    nothing waits for it; compared once something else has waited for the device."""

    def __init__(self, on: bool) -> None:
        """`on` False keeps nothing."""
        self._on = on
        self._kept: list[tuple[int, str, Tensor, Tensor]] = []

    def keep(self, piece: Slice, batch: Any) -> None:
        """`batch` has the tensors of `piece` on the device."""
        for name in _COPIED if self._on else ():
            there = getattr(batch, name)
            back = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
            self._kept.append((piece.sample_id, name, getattr(piece, name), back.copy_(there, non_blocking=True)))

    def check(self, step: int) -> None:
        """Raises DigestMismatch when something else arrived than the digest says."""
        kept, self._kept = self._kept, []
        for sample_id, name, sent, back in kept:
            if not torch.equal(sent, back):
                raise DigestMismatch(
                    f"step {step}: {name} of sequence {sample_id} arrived changed on the device; the step runs again",
                    step=step,
                )


def consumed_digest(step: int, slices: Iterable[Slice]) -> tuple[float, ...]:
    """An additive digest of the tokens and targets that a rank consumed in a step.

    Two independent 64-bit sums of a mix (splitmix64's finaliser, Steele et al. 2014) of (step,
    index_in_batch, position, token, target), each as two limbs of 32 bits: low, high, low, high. Limbs add
    exactly in float64 over up to 2**21 ranks; the sums over all ranks are those of the whole batch whatever
    the mesh and layout. `digest_value` reads them.
    """
    sums = [0, 0]
    for part in slices:
        positions, tokens, targets = (
            tensor.cpu().numpy().reshape(-1).astype(np.uint64)
            for tensor in (part.positions, part.tokens, part.targets)
        )
        for lane, secret in enumerate(_LANES):
            place = np.array([secret], dtype=np.uint64)
            for number in (step, part.index_in_batch):
                place = _mix(place ^ _mix(np.array([number], dtype=np.uint64)))
            mixed = _mix(_mix(_mix(place + positions) + tokens) + targets)
            sums[lane] = (sums[lane] + int(mixed.sum(dtype=np.uint64))) % 2**64
    return tuple(float(limb) for total in sums for limb in (total % 2**32, total >> 32))


def digest_value(limbs: Iterable[float]) -> tuple[int, int]:
    """The two 64-bit sums from limbs that were added over ranks, steps or both."""
    low_a, high_a, low_b, high_b = (int(limb) for limb in limbs)
    return (low_a + (high_a << 32)) % 2**64, (low_b + (high_b << 32)) % 2**64


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
