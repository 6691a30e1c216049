"""Where a worker's sequences come from: the run's own order over an indexed corpus, or a shard of a Ray dataset.

The first gives the samples of the elastic ring: a pure function of the step, on any mesh, exactly once through any
failure. The second is whatever a Ray Data pipeline yields, in its order; a new worker group begins an epoch anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
import torch.distributed as dist

from elastic_ring.attention.layouts.layout import Layout
from elastic_ring.data.loader import Loader, Slice, slice_sample
from elastic_ring.data.packing import Sample
from elastic_ring.data.sampling.order import SampleOrder, share
from elastic_ring.mesh import Coordinate, Mesh

TOKENS = "tokens"
READ_AHEAD = 16
PREFETCH_BATCHES = 2


class Feed(Protocol):
    """The slices of this rank in one step: equally many on every rank. `source` has one for the start-up check."""

    @property
    def source(self) -> Any: ...

    def slices(self, step: int) -> list[Slice]: ...

    def sample_ids(self, step: int) -> Sequence[int]: ...

    def close(self) -> None: ...


class OrderedFeed:
    """Sequences by the run's order; each ring takes its share, each rank its slice."""

    def __init__(self, source: Any, order: SampleOrder, layout: Layout, mesh: Mesh, at: Coordinate) -> None:
        self._loader, self._order = Loader(source), order
        self._layout, self._mesh, self._at = layout, mesh, at

    @property
    def source(self) -> Any:
        return self._loader.source

    def slices(self, step: int) -> list[Slice]:
        mine = self._share(step)
        upcoming = [*mine, *self._share(step + 1)]
        return [
            self._loader.load(
                sample_id,
                index,
                self._layout,
                self._at.cp_rank,
                upcoming=[later for _, later in upcoming[place + 1 :]][:READ_AHEAD],
            )
            for place, (index, sample_id) in enumerate(mine)
        ]

    def close(self) -> None:
        self._loader.close()

    def sample_ids(self, step: int) -> Sequence[int]:
        """The sequences of a step, on all rings."""
        return self._order.sample_ids(step)

    def _share(self, step: int) -> tuple[tuple[int, int], ...]:
        return share(self._order.sample_ids(step), self._at.dp_rank, self._mesh.dp)


@dataclass(frozen=True)
class DatasetRows:
    """What a task knows of a Ray dataset, in place of a corpus: `DatasetFeed` reads the rows."""

    context_tokens: int
    vocab_size: int

    def open(self) -> NoReturn:
        raise ValueError("a Ray dataset has no sequences by number: its workers read rows of their shards")


@dataclass(frozen=True)
class CountedUp:
    """A sequence for the start-up check where reading a row would use it up."""

    context_tokens: int
    vocab_size: int

    def read(self, sample_id: int) -> Sample:
        return Sample((np.arange(self.context_tokens + 1, dtype=np.int64) + sample_id) % self.vocab_size, (0,), False)


class DatasetFeed:
    """Rows of a Ray dataset's shard (`ray.train.get_dataset_shard`), packed end to end into sequences.

    A row is a document: a list of tokens in column `tokens`. Each rank packs the rows of its own shard; the ranks of a
    ring exchange the sequences and each keeps its slice. Raises ValueError for rows of another kind.
    """

    def __init__(
        self,
        shard: Any,
        layout: Layout,
        mesh: Mesh,
        at: Coordinate,
        ring: Any,
        *,
        global_batch: int,
        vocab_size: int,
        end_of_document: int,
    ) -> None:
        if global_batch % mesh.size:
            raise ValueError(
                f"global_batch={global_batch} is no multiple of workers={mesh.size}: each worker reads "
                "equally many sequences of a Ray dataset; change one of them"
            )
        self._each, self._layout, self._mesh, self._at, self._ring = global_batch // mesh.size, layout, mesh, at, ring
        self._samples = packed(_documents(shard, vocab_size), layout.seq_len, end_of_document)
        self._starts_room = layout.seq_len + 2
        self.source = CountedUp(layout.seq_len, vocab_size)

    def slices(self, step: int) -> list[Slice]:
        found, cp = [], self._mesh.cp
        for place in range(self._each):
            for cp_rank, sample in enumerate(self._exchanged(next(self._samples))):
                index = (place * self._mesh.dp + self._at.dp_rank) * cp + cp_rank
                found.append(
                    slice_sample(
                        sample,
                        self._layout,
                        self._at.cp_rank,
                        sample_id=step * self._each * self._mesh.size + index,
                        index_in_batch=index,
                    )
                )
        return found

    def sample_ids(self, step: int) -> Sequence[int]:
        """None: rows of a Ray dataset have no numbers."""
        return ()

    def close(self) -> None:
        """Nothing is held: Ray Data ends with the worker group."""

    def _exchanged(self, own: Sample) -> list[Sample]:
        """The sequence of each rank of the ring, in its order. Collective over the ring."""
        if self._ring is None:
            return [own]
        starts = np.zeros(self._starts_room, dtype=np.int64)
        starts[0], starts[1] = len(own.document_starts), own.ends_document
        starts[2 : 2 + len(own.document_starts)] = own.document_starts
        row = torch.from_numpy(np.concatenate([own.tokens, starts])).to(self._device)
        rows = [torch.empty_like(row) for _ in range(self._mesh.cp)]
        dist.all_gather(rows, row, group=self._ring)
        return [_sample(each.cpu().numpy(), self._layout.seq_len) for each in rows]

    @property
    def _device(self) -> str:
        return "cuda" if dist.get_backend(self._ring) == "nccl" else "cpu"


def packed(documents: Iterator[Any], context_tokens: int, end_of_document: int) -> Iterator[Sample]:
    """Sequences as `data.packing` makes them, of documents that come one after the other."""
    tokens = np.empty(0, dtype=np.int64)
    starts: list[int] = []
    for document in documents:
        starts.append(len(tokens))
        tokens = np.concatenate([tokens, document, np.array([end_of_document], dtype=np.int64)])
        while len(tokens) > context_tokens:
            inside = sorted({0, *(start for start in starts if start < context_tokens)})
            yield Sample(tokens[: context_tokens + 1], tuple(inside), context_tokens in starts)
            tokens = tokens[context_tokens:]
            starts = [start - context_tokens for start in starts if start >= context_tokens]


def _documents(shard: Any, vocab_size: int) -> Iterator[Any]:
    """The rows' tokens, epoch after epoch."""
    while True:
        empty = True
        for batch in shard.iter_batches(batch_size=64, prefetch_batches=PREFETCH_BATCHES, batch_format="numpy"):
            if TOKENS not in batch:
                raise ValueError(
                    f"the Ray dataset has columns {', '.join(batch)}: it needs a column {TOKENS!r} of "
                    "lists of tokens; make one with Dataset.map_batches"
                )
            for row in batch[TOKENS]:
                document = np.asarray(row, dtype=np.int64)
                if document.ndim != 1 or (len(document) and not 0 <= document.min() <= document.max() < vocab_size):
                    raise ValueError(
                        f"a row of the Ray dataset's column {TOKENS!r} is no list of tokens below "
                        f"vocab_size={vocab_size}: tokenise with the model's tokenizer"
                    )
                empty = False
                yield document
        if empty:
            raise ValueError("a worker's shard of the Ray dataset has no rows: give more rows than workers")


def _sample(row: Any, context_tokens: int) -> Sample:
    tokens, facts = row[: context_tokens + 1], row[context_tokens + 1 :]
    return Sample(tokens, tuple(facts[2 : 2 + int(facts[0])].tolist()), bool(facts[1]))
