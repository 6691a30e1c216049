"""The order of a source whose sequences are read in row groups, also while the source grows: pure functions.

Blocks of consecutive sequences are permuted, and the sequences of each `window` blocks in that order are mixed. So few
row groups are in use at a time, each is read once an epoch, and sequences that follow each other in a run still come
from many places.

A source may grow: from some sequence of the run on it has more. What is left of the epoch and what is new are then
permuted together, after the window under way. Each epoch uses every sequence that is there at its end once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic_ring.data.sampling.order import philox

Ids = NDArray[np.int64]
KEPT = 2  # epochs and windows that are cached
BEGINNING = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True)
class Stage:
    """From the `first`-th sequence of this source that the run uses, the source has `num_sequences`."""

    first: int
    num_sequences: int


@dataclass(frozen=True)
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
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        self._mixed: OrderedDict[tuple[int, int], Ids] = OrderedDict()

    def sequence(self, index: int) -> int:
        """The `index`-th sequence of this source that the run uses."""
        epoch = self._epoch_of(index)
        offset = index - epoch.first
        window = int(np.searchsorted(epoch.window_ends, offset, side="right"))
        begin = int(epoch.window_ends[window - 1]) if window else 0
        return int(self._mixed_window(epoch, window)[offset - begin])

    # ------------------------------------------------------------ epochs

    def _epoch_of(self, index: int) -> _Epoch:
        for epoch in self._growth_epochs:
            if epoch.first <= index < epoch.first + epoch.num_sequences:
                return epoch
        stage = self._stages[-1]
        later = (index - self._first_regular) // stage.num_sequences
        number, first = len(self._growth_epochs) + later, self._first_regular + later * stage.num_sequences
        if number not in self._epochs:
            num_blocks = -(-stage.num_sequences // self._block)
            blocks = self._permuted(np.arange(num_blocks), number, len(self._stages) - 1)
            self._epochs[number] = self._epoch(number, first, blocks, stage)
            while len(self._epochs) > KEPT:
                self._epochs.popitem(last=False)
        return self._epochs[number]

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

    # ------------------------------------------------------------ permutations

    def _permuted(self, blocks: Ids, epoch: int, stage: int) -> Ids:
        words = philox(self._seed, epoch, self._source, stage, 0).random_raw(len(blocks))
        return blocks[np.argsort(words, kind="stable")]

    def _mixed_window(self, epoch: _Epoch, window: int) -> Ids:
        """The sequences of `window` blocks in the order of their use."""
        key = (epoch.number, window)
        if key not in self._mixed:
            blocks = epoch.blocks[epoch.cuts[window] : epoch.cuts[window + 1]]
            stops = np.minimum((blocks + 1) * self._block, self._stages[-1].num_sequences)
            ids = np.concatenate([np.arange(b * self._block, stop) for b, stop in zip(blocks, stops, strict=True)])
            words = philox(self._seed, epoch.number, self._source, 0, window + 1).random_raw(len(ids))
            self._mixed[key] = ids[np.argsort(words, kind="stable")]
            while len(self._mixed) > KEPT:
                self._mixed.popitem(last=False)
        return self._mixed[key]
