"""Which sequences of a prepared corpus each step uses, over sources in proportion and versions that grow.

A pure function of (seed, step), the weights and the versions: which sequences each source had from which step on. A
version that is added later changes no step before its own.

In a source, blocks of consecutive sequences are permuted, and the sequences of each `window` blocks in that order are
mixed. So few row groups are in use at a time, each is read once an epoch, and sequences that follow each other in a run
still come from many places. Where a source grows, what is left of the epoch and what is new are permuted together,
after the window under way. Each epoch uses every sequence that is there at its end once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from elastic_ring.data.sampling.order import philox

Ids = NDArray[np.int64]
NUM_CACHED = 2
"""How many epochs, windows and steps are kept."""
BEGINNING = np.zeros(1, dtype=np.int64)
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


# ------------------------------------------------------------ the order of one source


@dataclass(frozen=True)
class Stage:
    """From the `first`-th sequence of this source that the run uses, the source has `num_sequences`."""

    first: int
    num_sequences: int


@dataclass(frozen=True, eq=False)
class _Epoch:
    number: int
    first: int
    blocks: Ids
    """Blocks in their order."""
    ends: Ids
    """Sequences of the epoch up to the end of each block."""
    cuts: Ids
    """Where windows begin in `blocks`, and the number of blocks."""
    window_ends: Ids
    """Sequences of the epoch up to the end of each window."""

    @property
    def num_sequences(self) -> int:
        return int(self.ends[-1])


class BlockOrder:
    """The order of one source, the `source`-th of its run."""

    def __init__(self, seed: int, source: int, stages: Sequence[Stage], *, block: int, window: int) -> None:
        """All stages but the last must have whole blocks. Raises ValueError where the first has no sequence."""
        if not stages or stages[0].num_sequences < 1:
            raise ValueError(f"source {source}: nothing of it is complete yet; begin once it has {block} sequences")
        assert stages[0].first == 0
        assert all(stage.num_sequences % block == 0 for stage in stages[:-1])
        self._seed, self._source, self._block, self._window = seed, source, block, window
        self._stages: list[Stage] = []  # without those in which this source has not grown
        for stage in stages:
            if self._stages and stage.first == self._stages[-1].first:
                self._stages[-1] = stage
            elif not self._stages or stage.num_sequences > self._stages[-1].num_sequences:
                self._stages.append(stage)
        self._growth_epochs: list[_Epoch] = []  # that begin before the last stage does
        self._first_regular = 0
        while self._first_regular < self._stages[-1].first:
            self._growth_epochs.append(self._growing_epoch(len(self._growth_epochs), self._first_regular))
            self._first_regular += self._growth_epochs[-1].num_sequences
        self._regular_epoch = lru_cache(NUM_CACHED)(self._new_epoch)
        self._window_ids = lru_cache(NUM_CACHED)(self._mixed_window)

    def sequence(self, index: int) -> int:
        """The `index`-th sequence of this source that the run uses."""
        epoch = self._epoch_of(index)
        offset = index - epoch.first
        window = int(np.searchsorted(epoch.window_ends, offset, side="right"))
        begin = int(epoch.window_ends[window - 1]) if window else 0
        return int(self._window_ids(epoch, window)[offset - begin])

    def _epoch_of(self, index: int) -> _Epoch:
        for epoch in self._growth_epochs:
            if epoch.first <= index < epoch.first + epoch.num_sequences:
                return epoch
        return self._regular_epoch((index - self._first_regular) // self._stages[-1].num_sequences)

    def _new_epoch(self, later: int) -> _Epoch:
        """The `later`-th epoch after those in which the source grows."""
        stage = self._stages[-1]
        number, first = len(self._growth_epochs) + later, self._first_regular + later * stage.num_sequences
        num_blocks = -(-stage.num_sequences // self._block)
        blocks = self._permuted(np.arange(num_blocks), number, len(self._stages) - 1)
        return self._epoch(number, first, blocks, stage)

    def _growing_epoch(self, number: int, first: int) -> _Epoch:
        at = max(index for index, stage in enumerate(self._stages) if stage.first <= first)
        stage = self._stages[at]
        num_blocks = stage.num_sequences // self._block
        epoch = self._epoch(number, first, self._permuted(np.arange(num_blocks), number, at), stage)
        for later in range(at + 1, len(self._stages)):
            stage = self._stages[later]
            used = stage.first - first
            if used >= epoch.num_sequences:
                break
            # The window under way is finished: its row groups have been read.
            begun = int(np.searchsorted(epoch.ends, used, side="left")) + 1 if used else 0
            cuts = epoch.cuts[: int(np.searchsorted(epoch.cuts, begun, side="left")) + 1]
            kept = int(cuts[-1])
            fresh = np.arange(num_blocks, -(-stage.num_sequences // self._block))
            left = np.sort(np.concatenate([epoch.blocks[kept:], fresh]))
            blocks = np.concatenate([epoch.blocks[:kept], self._permuted(left, number, later)])
            epoch = self._epoch(number, first, blocks, stage, cuts)
            num_blocks += len(fresh)
        return epoch

    def _epoch(self, number: int, first: int, blocks: Ids, stage: Stage, cuts: Ids = BEGINNING) -> _Epoch:
        """With these first cuts, and then one each `window` blocks."""
        sizes = np.minimum(self._block, stage.num_sequences - blocks * self._block)
        more = np.arange(int(cuts[-1]) + self._window, len(blocks), self._window)
        cuts, ends = np.concatenate([cuts, more, [len(blocks)]]), np.cumsum(sizes)
        return _Epoch(number, first, blocks, ends, cuts, ends[cuts[1:] - 1])

    def _permuted(self, blocks: Ids, epoch: int, stage: int) -> Ids:
        words = philox(self._seed, epoch, self._source, stage, 0).random_raw(len(blocks))
        return blocks[np.argsort(words, kind="stable")]

    def _mixed_window(self, epoch: _Epoch, window: int) -> Ids:
        """The sequences of `window` blocks in the order of their use."""
        blocks = epoch.blocks[epoch.cuts[window] : epoch.cuts[window + 1]]
        stops = np.minimum((blocks + 1) * self._block, self._stages[-1].num_sequences)
        ids = np.concatenate([np.arange(b * self._block, stop) for b, stop in zip(blocks, stops, strict=True)])
        words = philox(self._seed, epoch.number, self._source, 0, window + 1).random_raw(len(ids))
        return ids[np.argsort(words, kind="stable")]


# ------------------------------------------------------------ the order of a run


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
        self._ids_of = lru_cache(NUM_CACHED)(self._draw)
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
        return self._ids_of(step)

    def _draw(self, step: int) -> tuple[int, ...]:
        first = step * self.global_batch
        used = list(self._mixture.counts(first))
        ids: list[int] = []
        for index in range(first, first + self.global_batch):
            source = self._mixture.source(index)
            ids.append(self._numbering.sample_id(source, self._sources[source].sequence(used[source])))
            used[source] += 1
        return tuple(ids)
