"""What one worker process reads: the corpus as it grows, the order of its sequences, and what is held out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from elastic_ring.control.messages import BatchSkip, CorpusVersion
from elastic_ring.data.filesystem import patiently
from elastic_ring.data.loader import Loader
from elastic_ring.data.prepared import with_versions
from elastic_ring.data.sampling.order import SampleOrder, SkippingOrder, by_batch
from elastic_ring.data.sampling.validation import ValidationSource, open_sets, with_sets
from elastic_ring.data.source import Source, fingerprinted, hold_out, open_source, order_of
from elastic_ring.train.task import TrainingTask

T = TypeVar("T")


class MemberData:
    """`look` is called while a read takes long, and raises where nobody waits for it any more; `tell` says that storage
    is waited for, for at most `patience_s`. The constructor reads."""

    def __init__(
        self, task: TrainingTask, patience_s: float, look: Callable[[], None], tell: Callable[[str], None]
    ) -> None:
        self._task, self._patience_s, self._look, self._tell = task, patience_s, look, tell
        source, fingerprint = self._patiently(lambda: fingerprinted(task.data))
        self._training, held = hold_out(source, num_sequences=task.num_held_out)
        opened = self._patiently(lambda: open_sets(task.validation))
        self.fingerprint = with_sets(fingerprint, opened)
        self.held_out = ValidationSource(task.validation, held, {name: one for name, (one, _) in opened.items()})
        self.held_out_loader = self._loader(self.held_out, num_ahead=1)
        self._reads: tuple[tuple[CorpusVersion, ...], tuple[BatchSkip, ...]] = ((), ())

    def begin(self) -> tuple[Loader, SampleOrder]:
        """Of the corpus with which the run began, without batches left out."""
        return self._loader(self._training), self._order()

    def news(
        self, versions: tuple[CorpusVersion, ...], skips: tuple[BatchSkip, ...]
    ) -> tuple[Loader, SkippingOrder, Sequence[BatchSkip]] | None:
        """The loader and order for a corpus that has grown, or that leaves out more, since the last call, and what is
        new of the `skips`; None where nothing changed. What is held out stays the same.

        Raises ValueError for a manifest that is not what it was.
        """
        if (versions, skips) == self._reads:
            return None
        if versions:
            data = with_versions(self._task.data, by_batch(versions, skips))
            source = self._patiently(lambda: open_source(data))
            self._training, _ = hold_out(source, num_sequences=self._task.num_held_out)
        new = [skip for skip in skips if skip not in self._reads[1]]
        loader, order = self._loader(self._training), SkippingOrder(self._order(), skips)
        self._reads = versions, skips  # last: what fails is tried again in the next build
        return loader, order, new

    def _order(self) -> SampleOrder:
        return order_of(self._training, self._task.step.seed, self._task.step.global_batch)

    def _loader(self, source: Source, num_ahead: int = 0) -> Loader:
        num_ahead = num_ahead or self._task.step.micro_batch
        return Loader(source, self._look, num_ahead, patience_s=self._patience_s, tell=self._tell)

    def _patiently(self, read: Callable[[], T]) -> T:
        return patiently(read, self._patience_s, self._tell)
