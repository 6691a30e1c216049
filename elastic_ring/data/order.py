"""Which sequences each step uses, from (seed, step) alone.

An epoch is one permutation of all sequences; steps walk through it and over into the next, so each epoch uses
every sequence once. Neither the world's size nor what happened before enters, which is why a step that runs
again, on whatever mesh, uses the same sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Order:
    """The order of one run. Keeps the permutations of the two newest epochs it was asked for."""

    def __init__(self, seed: int, global_batch: int, num_sequences: int) -> None:
        """Raises ValueError where a step would need a sequence twice, or a number is out of range."""
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
        self._epochs: dict[int, NDArray[np.int64]] = {}

    def sample_ids(self, step: int) -> tuple[int, ...]:
        """The ids of the `global_batch` sequences of this step, in batch order."""
        if step < 0:
            raise ValueError(f"step={step}: steps count from 0")
        first = step * self.global_batch
        ids: list[int] = []
        while len(ids) < self.global_batch:
            epoch, offset = divmod(first + len(ids), self.num_sequences)
            ids += self._permutation(epoch)[offset : offset + self.global_batch - len(ids)].tolist()
        return tuple(ids)

    def epoch(self, step: int) -> int:
        """The epoch that the step's first sequence belongs to."""
        return step * self.global_batch // self.num_sequences

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._epochs:
            # Sorting raw words, not Generator.permutation: numpy promises that the former never changes.
            words = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64)).random_raw(
                self.num_sequences
            )
            self._epochs[epoch] = np.argsort(words, kind="stable")
            while len(self._epochs) > 2:
                self._epochs.pop(next(iter(self._epochs)))
        return self._epochs[epoch]


def sample_ids(seed: int, step: int, global_batch: int, num_sequences: int) -> tuple[int, ...]:
    """`Order.sample_ids` for one step. Sorts a whole epoch each time; a loop keeps an `Order`."""
    return Order(seed, global_batch, num_sequences).sample_ids(step)


def share(ids: Sequence[int], dp_rank: int, dp: int) -> tuple[tuple[int, int], ...]:
    """The (index_in_batch, sample_id) pairs that ring `dp_rank` of `dp` takes: every dp-th, from `dp_rank`
    on.

    Over all rings each index occurs once; rings differ by at most one sequence.
    """
    if not 0 <= dp_rank < dp:
        raise ValueError(f"dp_rank={dp_rank}: must be in [0, dp={dp})")
    return tuple((index, ids[index]) for index in range(dp_rank, len(ids), dp))
