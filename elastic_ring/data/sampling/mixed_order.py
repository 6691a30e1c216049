"""Which sequences of a prepared corpus each step uses, over sources in proportion and versions that grow.

A pure function of (seed, step), the weights and the versions: which sequences each source had from which step on. A
version that is added later changes no step before its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from elastic_ring.data.sampling.block_order import KEPT, BlockOrder, Stage
from elastic_ring.data.sampling.order import philox

MODULUS = 2**32
STEP = 2654435769  # odd, next to MODULUS divided by the golden ratio
_PURPOSE = 2**32  # of the random word among those of the seed


class Mixture:
    """Sources by index, in the proportion of `weights`."""

    def __init__(self, seed: int, weights: Sequence[float]) -> None:
        """Raises ValueError where a weight is not above 0, or too small beside the others."""
        if not weights or not all(weight > 0 for weight in weights):
            raise ValueError(f"weights={tuple(weights)}: each source needs a weight above 0")
        ends = np.cumsum(np.asarray(weights, dtype=np.float64))
        self._ends = [round(float(end / ends[-1]) * MODULUS) for end in ends]
        if any(high <= low for low, high in zip([0, *self._ends], self._ends, strict=False)):
            raise ValueError(f"weights={tuple(weights)}: one is less than 1 in {MODULUS} of all; leave that source out")
        self._begin = int(philox(seed, 0, _PURPOSE).random_raw(1)[0] % MODULUS)

    def source(self, index: int) -> int:
        point = (self._begin + STEP * index) % MODULUS
        return next(source for source, end in enumerate(self._ends) if point < end)

    def counts(self, num: int) -> tuple[int, ...]:
        """How many of the first `num` indices fall to each source."""
        # Points below an end: the multiples of MODULUS that begin + STEP * i passes, less those that it passes when it
        # starts by so much earlier.
        begin = self._begin + MODULUS
        passed = [floor_sum(num, MODULUS, STEP, begin - end) for end in (0, *self._ends)]
        return tuple(low - high for low, high in pairwise(passed))


def floor_sum(num: int, modulus: int, step: int, begin: int) -> int:
    """The sum of (step * i + begin) // modulus over 0 <= i < num, in as many turns as Euclid's algorithm takes.

    step and begin at least 0.
    """
    total = 0
    while True:
        total += num * (num - 1) // 2 * (step // modulus) + num * (begin // modulus)
        step, begin = step % modulus, begin % modulus
        last = step * num + begin
        if last < modulus:
            return total
        num, begin = divmod(last, modulus)
        modulus, step = step, modulus


@dataclass(frozen=True)
class Version:
    """The sources' numbers of sequences from `first_step` on."""

    first_step: int
    num_sequences: tuple[int, ...]


class Numbering:
    """Ids of sequences over sources: 0 and up for the first version's, source after source, and on for what each later
    version adds. So an id keeps its sequence when the sources grow."""

    def __init__(self, versions: Sequence[Version]) -> None:
        self._sources: list[int] = []
        self._starts: list[int] = []  # within the source
        ends, there = [0], [0] * len(versions[0].num_sequences)
        for version in versions:
            for source, num in enumerate(version.num_sequences):
                if num > there[source]:
                    self._sources.append(source)
                    self._starts.append(there[source])
                    ends.append(ends[-1] + num - there[source])
                    there[source] = num
        self._firsts = np.array(ends[:-1], dtype=np.int64)
        self.num_sequences = ends[-1]

    def place(self, sample_id: int) -> tuple[int, int]:
        """(source, sequence of it)."""
        part = int(np.searchsorted(self._firsts, sample_id, side="right")) - 1
        return self._sources[part], self._starts[part] + sample_id - int(self._firsts[part])

    def sample_id(self, source: int, sequence: int) -> int:
        part = max(
            part for part, owner in enumerate(self._sources) if owner == source and self._starts[part] <= sequence
        )
        return int(self._firsts[part]) + sequence - self._starts[part]


class MixedOrder:
    """The order of one run over a prepared corpus."""

    def __init__(
        self,
        seed: int,
        global_batch: int,
        weights: Sequence[float],
        versions: Sequence[Version],
        *,
        block: int,
        window: int,
    ) -> None:
        """Raises ValueError when a batch is larger than the corpus, or a number is out of range."""
        num_sequences = sum(versions[0].num_sequences)
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed={seed}: must be in [0, 2**64)")
        if not 1 <= global_batch <= num_sequences:
            raise ValueError(
                f"global_batch={global_batch}: must be at least 1, and the corpus has only {num_sequences} sequences "
                "to train on; give more text, a shorter context or a smaller global batch"
            )
        self.global_batch = global_batch
        self._mixture = Mixture(seed, weights)
        self._numbering = Numbering(versions)
        firsts = [self._mixture.counts(version.first_step * global_batch) for version in versions]
        self._steps: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._sources = [
            BlockOrder(
                seed,
                source,
                [Stage(first[source], v.num_sequences[source]) for first, v in zip(firsts, versions, strict=True)],
                block=block,
                window=window,
            )
            for source in range(len(weights))
        ]

    def sample_ids(self, step: int) -> tuple[int, ...]:
        """The ids of the `global_batch` sequences of this step, in batch order."""
        if step < 0:
            raise ValueError(f"step={step}: steps count from 0")
        if step in self._steps:
            return self._steps[step]
        first = step * self.global_batch
        used = list(self._mixture.counts(first))
        ids: list[int] = []
        for index in range(first, first + self.global_batch):
            source = self._mixture.source(index)
            ids.append(self._numbering.sample_id(source, self._sources[source].sequence(used[source])))
            used[source] += 1
        self._steps[step] = tuple(ids)
        while len(self._steps) > KEPT:
            self._steps.popitem(last=False)
        return tuple(ids)
