"""Entry point of the data package: what a corpus is, opening it, and splitting off validation sequences.

Order, mesh and slices belong to `order` and `loader`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from elastic_ring.data.packing import BYTE_VOCAB_SIZE, END_OF_DOCUMENT, PackedSource, Sample
from elastic_ring.data.prepared import PreparedTokens
from elastic_ring.data.sampling.order import Order, SampleOrder
from elastic_ring.data.shards import TokenShards
from elastic_ring.data.text import StdlibText, TextFiles

__all__ = [
    "BYTE_VOCAB_SIZE",
    "END_OF_DOCUMENT",
    "PackedSource",
    "PreparedTokens",
    "Sample",
    "Source",
    "SourceConfig",
    "StdlibText",
    "TextFiles",
    "TokenShards",
    "fingerprinted",
    "hold_out",
    "open_source",
    "order_of",
]


class Source(Protocol):
    """Packed sequences with random access. Reading the same id twice gives the same tokens.

    A source may also have `read_ahead(sample_ids)`, which begins to read in the background; `order(seed, global_batch)`
    in place of a permutation of all its sequences; and with it `hold_out(num)` for (training, validation).
    """

    @property
    def num_sequences(self) -> int: ...
    @property
    def context_tokens(self) -> int: ...
    @property
    def fingerprint(self) -> str:
        """A digest of the corpus, to detect that another process, or an earlier run, saw different data."""

    def read(self, sample_id: int) -> Sample: ...


class SourceConfig(Protocol):
    """The argument of `open_source`: picklable, and nothing is read before `open`. Users may bring their own."""

    @property
    def context_tokens(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    def open(self) -> Source: ...


@runtime_checkable
class _Ordered(Protocol):
    """A source with an order of its own."""

    def order(self, seed: int, global_batch: int) -> SampleOrder: ...
    def hold_out(self, num: int) -> tuple[Source, Source]: ...


@dataclass(frozen=True)
class _View:
    """Sequences [start, stop) of another source, renumbered from 0."""

    base: Source
    start: int
    stop: int

    @property
    def num_sequences(self) -> int:
        return self.stop - self.start

    @property
    def context_tokens(self) -> int:
        return self.base.context_tokens

    @property
    def fingerprint(self) -> str:
        return f"{self.base.fingerprint}[{self.start}:{self.stop}]"

    def read(self, sample_id: int) -> Sample:
        if not 0 <= sample_id < self.num_sequences:
            raise ValueError(f"sample_id={sample_id}: this part has sequences 0 to {self.num_sequences - 1}")
        return self.base.read(self.start + sample_id)

    def read_ahead(self, sample_ids: Sequence[int]) -> None:
        ahead = getattr(self.base, "read_ahead", None)
        if ahead is not None:
            ahead([self.start + sample_id for sample_id in sample_ids])


def open_source(config: SourceConfig) -> Source:
    """Open a corpus. Raises ValueError where it is unreadable or shorter than one sequence, StorageFailed where its
    storage is away: callers wait with `patiently` or `at_submission`."""
    source = config.open()
    if source.num_sequences < 1:
        raise ValueError(
            f"{config}: the corpus is empty: fewer than context_tokens + 1 = "
            f"{config.context_tokens + 1} tokens, or no conversation with room; give more text or another context"
        )
    return source


def fingerprinted(config: SourceConfig) -> tuple[Source, str]:
    """A corpus and its fingerprint, which may have to read all of it. Raises as `open_source`."""
    source = open_source(config)
    return source, source.fingerprint


def hold_out(source: Source, *, fraction: float = 0.0, num_sequences: int | None = None) -> tuple[Source, Source]:
    """(training, validation): the last sequences are for validation and never trained on.

    `num_sequences` of them, or else `fraction` of all, rounded up. Each part numbers its sequences from 0. The parts
    share one token: the last target of the first and an input, never a target, of the second. Raises ValueError where
    nothing is left to train on. A source with an order of its own holds out its first sequences.
    """
    if not 0.0 <= fraction < 1.0:
        raise ValueError(f"validation fraction={fraction}: must be at least 0 and below 1")
    total = source.num_sequences
    held = math.ceil(fraction * total) if num_sequences is None else num_sequences
    if not 0 <= held < total:
        raise ValueError(
            f"validation num_sequences={held} of {total}: at least one sequence must be left to train on; "
            "hold out fewer or give more text"
        )
    if isinstance(source, _Ordered):
        return source.hold_out(held)
    return _View(source, 0, total - held), _View(source, total - held, total)


def order_of(source: Source, seed: int, global_batch: int) -> SampleOrder:
    """Which sequences of the training part each step uses. Raises ValueError where it is smaller than one batch."""
    if isinstance(source, _Ordered):
        return source.order(seed, global_batch)
    return Order(seed, global_batch, source.num_sequences)
