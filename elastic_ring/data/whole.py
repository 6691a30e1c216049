"""Documents packed whole: which of them share a sequence, and how those are cut that are longer than a sequence.

Best-fit decreasing (Ding et al., "Fewer Truncations Improve Language Modeling", arXiv 2404.10830) over windows of
consecutive documents, so that a sequence is read from few row groups. A window's emptiest sequence is packed again with
the next window, unless a version of the corpus ends there: what is appended moves no sequence. Padding is a document of
its own that never counts.

A conversation that is too long is cut behind turns that count, so that each such turn is in one part, behind its
prompt and as much of the conversation before as there is room for; a turn that has no room with its prompt is left
out. A document without turns is cut into sequences that share one token: a target of the first, an input of the second.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elastic_ring.data.document_index import DocumentIndex
from elastic_ring.data.packing import PackedSource, Sample, Starts, aligned
from elastic_ring.data.sampling.order import philox

LongDocuments = Literal["cut", "leave_out"]
RULES = 1
"""Version of what a sequence holds. Raise it with every change: no run then goes on under other rules."""


class Part(NamedTuple):
    """Tokens [start, stop) of a document, which count from `first` on; `num_counted` of them do."""

    start: int
    stop: int
    first: int
    num_counted: int


def parts_of(length: int, edges: Starts | None, room: int) -> Iterator[Part]:
    """How a document of more than `room` tokens is cut. `edges`: as `DocumentIndex` has them; None: all count."""
    if edges is None:
        for start in range(0, length - 1, room - 1):
            stop = min(start + room, length)
            yield Part(start, stop, start, stop - start - 1)
        return
    begins, ends = edges[::2].tolist(), edges[1::2].tolist()
    bounds, turn = [0, *ends], 0  # a part begins at a bound
    while turn < len(ends):
        if ends[turn] - bounds[turn] > room:
            turn += 1  # no room with its prompt
            continue
        start = bounds[min(bisect_left(bounds, ends[turn] - room // 2), turn)]
        last = bisect_left(ends, start + room + 1, turn) - 1
        start = bounds[bisect_left(bounds, ends[last] - room)]
        counted = sum(end - begin for begin, end in zip(begins[turn : last + 1], ends[turn : last + 1], strict=True))
        yield Part(start, ends[last], begins[turn], counted)
        turn = last + 1


class Long(NamedTuple):
    """Documents that are longer than a sequence: how many, their counted tokens, and those that no part has."""

    num_documents: int
    num_counted: int
    num_left_out: int


def long_documents(index: DocumentIndex, context_tokens: int) -> Long:
    """Of one source's index, which has edges for all such documents or for none."""
    room, num_counted, num_kept = context_tokens + 1, 0, 0
    long = np.flatnonzero(index.lengths > room)
    for document in long.tolist():
        length, edges = int(index.lengths[document]), index.edges.get(document)
        num_counted += length - 1 if edges is None else int(edges[1::2].sum() - edges[::2].sum())
        num_kept += sum(part.num_counted for part in parts_of(length, edges, room))
    return Long(len(long), num_counted, num_counted - num_kept)


def best_fit(sizes: Starts, room: int) -> NDArray[np.int64]:
    """The sequence of each document: the longest first, each where it leaves the least room. None is above `room`."""
    order = np.argsort(-sizes, kind="stable")
    sequences, free, num, scale = list[int](), list[int](), 0, len(sizes)
    for size in sizes[order].tolist():
        at = bisect_left(free, size * scale)  # room and number of each sequence, in one whole number
        if at < len(free):
            left = free.pop(at)
        else:
            left, num = room * scale + num, num + 1
        sequences.append(left % scale)
        insort(free, left - size * scale)
    placed = np.empty(len(sizes), dtype=np.int64)
    placed[order] = sequences
    return placed


@dataclass(frozen=True, eq=False)
class Placed:
    """What each sequence has, in its order: tokens from `starts` on in the stream, `lengths` of them, which count after
    the first `uncounted`. `ends`: items up to the end of each sequence. `sizes`: sequences of each version. `long`:
    documents that were cut or left out."""

    starts: Starts
    lengths: NDArray[np.int32]
    uncounted: NDArray[np.int32]
    ends: Starts
    sizes: Sequence[int]
    long: Long

    @property
    def digest(self) -> str:
        """Of what each sequence has."""
        arrays = (self.starts, self.lengths, self.uncounted, self.ends)
        return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()[:16]


def place(
    index: DocumentIndex,
    versions: Sequence[int],
    context_tokens: int,
    *,
    align_tokens: int,
    window_tokens: int,
    long: LongDocuments,
) -> Placed:
    """Pack a source's documents. `versions`: how many documents each version has."""
    room, ends = context_tokens + 1, np.cumsum(index.lengths)
    starts, lengths, uncounted, counts = list[Starts](), [], [], list[Starts]()
    sizes = list[int]()
    for first, last in pairwise([0, *versions]):
        begins = ends[first:last] - index.lengths[first:last]
        cuts = first + np.flatnonzero(np.diff(begins // window_tokens, prepend=-1))
        rest = np.empty((3, 0), dtype=np.int64)
        for begin, end in pairwise([*cuts.tolist(), last] if last > first else []):
            items = np.hstack([rest, _items(index, ends, range(begin, end), room, cuts_long=long == "cut")])
            padded = aligned(items[1], align_tokens)
            used = np.where(padded > context_tokens, room, padded)
            sequence = best_fit(used, room)
            num = int(sequence.max(initial=-1)) + 1
            # The longest documents are in the first sequences, and these may be held out: deal them anew.
            sequence = np.argsort(philox(0, len(counts)).random_raw(num), kind="stable")[sequence]
            if num and end < last:
                emptiest = int(np.bincount(sequence, weights=used).argmin())
                stays = sequence != emptiest
                rest, items, sequence, num = items[:, ~stays], items[:, stays], sequence[stays], num - 1
                sequence -= sequence > emptiest
            items = items[:, np.lexsort((items[0], sequence))]
            starts.append(items[0])
            lengths.append(items[1].astype(np.int32))
            uncounted.append(items[2].astype(np.int32))
            counts.append(np.bincount(sequence, minlength=num))
        sizes.append(sum(map(len, counts)))
    none, of_long = np.empty(0, np.int32), long_documents(index, context_tokens)
    if long == "leave_out":
        of_long = of_long._replace(num_left_out=of_long.num_counted)
    firsts, nums, skipped, items = (np.concatenate([none, *parts]) for parts in (starts, lengths, uncounted, counts))
    return Placed(firsts, nums, skipped, np.cumsum(items, dtype=np.int64), sizes, of_long)


def _items(index: DocumentIndex, ends: Starts, documents: range, room: int, *, cuts_long: bool) -> Starts:
    """Of these documents and the parts of long ones, int64 (3, N): the first token in the stream, the number of tokens
    and of those that do not count."""
    lengths = index.lengths[documents.start : documents.stop]
    begins = ends[documents.start : documents.stop] - lengths
    fits = lengths <= room
    more = [
        (int(begins[number]) + part.start, part.stop - part.start, part.first - part.start)
        for number in (np.flatnonzero(~fits).tolist() if cuts_long else ())
        for part in parts_of(int(lengths[number]), index.edges.get(documents.start + number), room)
    ]
    whole = np.stack([begins[fits], lengths[fits], np.zeros(int(fits.sum()), np.int64)])
    return np.hstack([whole, np.array(more, dtype=np.int64).reshape(-1, 3).T])


@dataclass(kw_only=True, eq=False)
class WholeSource(PackedSource):
    """The sequences of `placed` over a list of chunks."""

    placed: Placed
    end_of_document: int
    align_tokens: int

    @property
    def num_sequences(self) -> int:
        return len(self.placed.ends)

    def read(self, sample_id: int) -> Sample:
        """One sequence. Raises ValueError for an id out of range, or if documents are not where the index has them."""
        context, at, starts = self.context_tokens, 0, list[int]()
        tokens = np.full(context + 1, self.end_of_document, dtype=np.int64)
        counted = np.zeros(context + 1, dtype=np.bool_)
        items, placed = self._items(sample_id), self.placed
        for begin, num, first in zip(
            placed.starts[items].tolist(), placed.lengths[items].tolist(), placed.uncounted[items].tolist(), strict=True
        ):
            if any(self._fill(begin, tokens[at : at + num], counted[at : at + num])[0]):
                raise ValueError(f"{self.describe}: has other documents than its index: restore its files")
            counted[at : at + first] = False
            starts.append(at)
            at += -(-num // self.align_tokens) * self.align_tokens
        if at <= context:
            starts.append(at)  # padding
        inside = tuple(start for start in starts if start < context)
        return Sample(tokens, inside, starts[-1] == context, self.padding, counted)

    def _items(self, sample_id: int) -> slice:
        self._check(sample_id)
        ends = self.placed.ends
        return slice(int(ends[sample_id - 1]) if sample_id else 0, int(ends[sample_id]))

    def _chunks_of(self, sample_id: int) -> Sequence[int]:
        items = self._items(sample_id)
        edges = zip(self.placed.starts[items].tolist(), self.placed.lengths[items].tolist(), strict=True)
        return sorted({chunk for begin, num in edges for chunk in self._chunks_between(begin, begin + num)})
