"""A rank's slice cut at the boundaries of documents and blocks. Plain Python."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from elastic_ring.attention.layouts.layout import Layout, Range


@dataclass(frozen=True)
class Chunk:
    """The part of one block that is contiguous on a rank.

    `positions` count from the start of the document, `local` from the start of the rank's slice.
    """

    document: int
    block: int
    positions: Range
    local: Range


def chunks_of(layout: Layout, cp_rank: int, documents: tuple[Range, ...], block: int) -> tuple[Chunk, ...]:
    """A rank's slice, cut at document and block boundaries, in local order."""
    starts = [start for start, _ in documents]
    chunks: list[Chunk] = []
    offset = 0
    for start, stop in layout.segments[cp_rank]:
        document = bisect_right(starts, start) - 1
        at = start
        while at < stop:
            first, last = documents[document]
            index = (at - first) // block
            end = min(stop, last, first + (index + 1) * block)
            local = (offset + at - start, offset + end - start)
            chunks.append(Chunk(document, index, (at - first, end - first), local))
            document += end == last
            at = end
        offset += stop - start
    return tuple(chunks)
