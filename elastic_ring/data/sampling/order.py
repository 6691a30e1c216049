"""Which sequences each step uses: a pure function of (seed, step).

An epoch is a permutation of all sequences, and steps take consecutive batches across epochs, so each epoch uses every
sequence once. World size and history do not enter: a repeated step uses the same sequences on any mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from elastic_ring.config import StepConfig
from elastic_ring.control.decisions.data_order import batch_of
from elastic_ring.control.messages import BatchSkip, CorpusVersion


class SampleOrder(Protocol):
    """Which sequences each step uses. Depends on neither the mesh nor what ran before."""

    def sample_ids(self, step: int) -> tuple[int, ...]: ...


class Order:
    """The sample order of one run. Caches the permutations of the two most recent epochs."""

    def __init__(self, seed: int, global_batch: int, num_sequences: int) -> None:
        """Raises ValueError when a batch is larger than the corpus, or a number is out of range."""
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed={seed}: must be in [0, 2**64)")
        if global_batch < 1:
            raise ValueError(f"global_batch={global_batch}: a step needs at least 1 sequence")
        if num_sequences < global_batch:
            raise ValueError(
                f"global_batch={global_batch}: the corpus has only {num_sequences} sequences to train on, "
                "fewer than one batch; give more text, a shorter context or a smaller global batch"
            )
        self.seed = seed
        self.global_batch = global_batch
        self.num_sequences = num_sequences
        self._cached_permutation = lru_cache(2)(self._permutation)

    def sample_ids(self, step: int) -> tuple[int, ...]:
        """The ids of the `global_batch` sequences of this step, in batch order."""
        if step < 0:
            raise ValueError(f"step={step}: steps count from 0")
        first = step * self.global_batch
        ids: list[int] = []
        while len(ids) < self.global_batch:
            epoch, offset = divmod(first + len(ids), self.num_sequences)
            ids += self._cached_permutation(epoch)[offset : offset + self.global_batch - len(ids)].tolist()
        return tuple(ids)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        # Sort raw words: numpy guarantees a stable raw stream, but not a stable Generator.permutation.
        return np.argsort(philox(self.seed, epoch).random_raw(self.num_sequences), kind="stable")


def philox(seed: int, epoch: int, *purpose: int) -> np.random.Philox:
    """Random words of (seed, epoch); up to three numbers of `purpose` give streams that share none."""
    counter = np.array([0, *purpose, *[0] * (3 - len(purpose))], dtype=np.uint64)
    return np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64), counter=counter)


def sample_ids(seed: int, step: int, global_batch: int, num_sequences: int) -> tuple[int, ...]:
    """`Order.sample_ids` for one step. Sorts a whole epoch per call; use an `Order` in a loop."""
    return Order(seed, global_batch, num_sequences).sample_ids(step)


def share(ids: Sequence[int], dp_rank: int, dp: int) -> tuple[tuple[int, int], ...]:
    """The (index_in_batch, sample_id) pairs of ring `dp_rank` of `dp`: every dp-th, starting at `dp_rank`.

    The rings' shares are disjoint, cover the batch, and differ by at most one sequence. Raises ValueError for a rank
    out of range.
    """
    if not 0 <= dp_rank < dp:
        raise ValueError(f"dp_rank={dp_rank}: must be in [0, dp={dp})")
    return tuple((index, ids[index]) for index in range(dp_rank, len(ids), dp))


def passes(num_sequences: int, sequences_per_pass: int) -> tuple[range, ...]:
    """A ring's share of a step in groups that it computes together; the last one has what is left."""
    return tuple(
        range(first, min(first + sequences_per_pass, num_sequences))
        for first in range(0, num_sequences, sequences_per_pass)
    )


def pass_sizes(step: StepConfig) -> tuple[int, ...]:
    """How many sequences a pass may have on some mesh, ascending; validation takes one at a time."""
    batch = step.global_batch
    shares = {share for dp in range(1, batch + 1) for share in (batch // dp, -(-batch // dp))}
    sizes = {len(group) for share in shares for group in passes(share, step.micro_batch)}
    return tuple(sorted(sizes | ({1} if step.validates else set())))


class SkippingOrder:
    """The order `base` without what `skips` leave out: each step uses a later batch of it."""

    def __init__(self, base: SampleOrder, skips: Sequence[BatchSkip]) -> None:
        self._base, self._skips = base, tuple(skips)

    def sample_ids(self, step: int) -> tuple[int, ...]:
        """The ids of the sequences of this step, in batch order."""
        return self._base.sample_ids(batch_of(step, self._skips))

    def left_out(self, skip: BatchSkip) -> list[int]:
        """The ids of the sequences that this skip leaves out, in the order's order."""
        first = batch_of(skip.first_step, self._skips) - skip.num_batches
        return [sample for batch in range(first, first + skip.num_batches) for sample in self._base.sample_ids(batch)]


def by_batch(versions: Sequence[CorpusVersion], skips: Sequence[BatchSkip]) -> tuple[CorpusVersion, ...]:
    """The versions of a corpus that grows, each from its first batch of the undisturbed order on."""
    return tuple(replace(version, first_step=batch_of(version.first_step, skips)) for version in versions)
