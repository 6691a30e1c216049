"""An order that leaves batches out. No decision here which: `control.decisions.rollback` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastic_ring.control.decisions.rollback import batch_of
from elastic_ring.control.messages import BatchSkip, CorpusVersion
from elastic_ring.data.sampling.order import SampleOrder


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
