"""How many conversations a context cuts: what follows a sequence's edge trains without the beginning before it.

Estimated from a sample of the shards, by where documents lie in their stream. No packing in here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np

from elastic_ring.data.chunks import Starts
from elastic_ring.data.manifest import Manifest
from elastic_ring.data.row_groups import RowGroups
from elastic_ring.errors import StorageFailed

log = logging.getLogger(__name__)

NUM_STRETCHES, ROW_GROUPS = 4, 8
"""The sample: so many stretches, evenly spaced, of so many row groups each; 2 Mi tokens by default."""


def log_documents(uri: str, manifest: Manifest, context_tokens: int) -> None:
    """Say which documents do not fit into a sequence; of conversations, how many are cut, where shards can be read."""
    shares: list[float] = []
    try:
        shares += [] if manifest.num_counted is None else cut_shares(uri, manifest, [context_tokens])
    except (ValueError, StorageFailed) as error:  # what reads them to train says so where it matters
        log.warning("how many conversations context_tokens=%d cuts is not known: %s", context_tokens, error)
    if manifest.longest_document_tokens > context_tokens:
        log.info(
            "documents of up to %s tokens are packed over several sequences of context_tokens=%d",
            f"{manifest.longest_document_tokens:,}",
            context_tokens,
        )
    for share in shares:
        log.info(
            "context_tokens=%d cuts %.1f %% of the conversations: the rest of each trains without its beginning",
            context_tokens,
            100 * share,
        )


def cut_shares(uri: str, manifest: Manifest, contexts: Sequence[int]) -> list[float]:
    """For each context, the share of documents with a sequence's edge inside. Raises ValueError and StorageFailed."""
    shares = np.zeros(len(contexts))
    for source in manifest.sources:
        if not source.num_documents:
            continue
        stretches = _stretches(RowGroups(uri, manifest, source), max(1, NUM_STRETCHES // len(manifest.sources)))
        starts, ends = (np.concatenate(parts) for parts in zip(*stretches, strict=True))
        # A document's last token is only a target: an edge may lie before it.
        is_cut = starts[:, None] // contexts != np.maximum(ends - 2, starts)[:, None] // contexts
        share = is_cut.mean(axis=0) if len(is_cut) else 1.0  # no document ends in the stretch in which it begins
        shares += share * source.num_documents / manifest.num_documents
    return [float(share) for share in shares]


def _stretches(row_groups: RowGroups, num: int) -> Iterator[tuple[Starts, Starts]]:
    """(first tokens, ends) in the stream of the documents that lie in each stretch; one stretch of a short source."""
    length = len(row_groups)
    width = length if length <= num * ROW_GROUPS else ROW_GROUPS
    for first in range(0, length, max(width, -(-length // num))):
        parts = []
        for index in range(first, min(first + width, length)):
            chunk = row_groups[index]
            parts.append(chunk.load().starts + row_groups.ends[index] - chunk.num_tokens)
        if first + width >= length:
            parts.append(row_groups.ends[-1:])
        edges = np.concatenate(parts)
        yield edges[:-1], edges[1:]
