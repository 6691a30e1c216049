"""The manifest of a preparation: its pieces' records put together, and whether too much of the input was bad."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from elastic_ring.data.listing import shown
from elastic_ring.data.manifest import COLUMN, Dropped, Manifest, PreparedSource, Shard
from elastic_ring.data.preparation.piece import PieceRecord
from elastic_ring.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from elastic_ring.data.preparation.prepare import Plan, PrepareConfig

MAX_NAMED = 100
"""How many bad inputs a manifest names."""


def assemble(
    config: PrepareConfig, tokenizer: Tokenizer, plan: Plan, records: Sequence[PieceRecord], *, is_complete: bool = True
) -> Manifest:
    """The manifest of these pieces. Raises ValueError where a source of the whole has no document."""
    by_name = sorted(records, key=lambda record: record.name)
    if config.weights:
        sources = tuple(
            PreparedSource(name, weight, _shards(by_name, f"{index:03d}-"))
            for index, (name, weight) in enumerate(zip(_names(config.sources), config.weights, strict=True))
        )
    else:
        sources = (PreparedSource("all", None, _shards(by_name)),)
    empty = [source.name for source in sources if not source.shards]
    if empty and is_complete:
        raise ValueError(f"sources={config.sources!r}: {empty[0]} has no document; give text, or leave the source out")
    dropped = _dropped(by_name)
    if is_complete:
        _check_bad_share(config, plan, dropped)
    return Manifest(
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        column=COLUMN,
        row_group_tokens=config.row_group_tokens,
        align_tokens=config.align_tokens,
        tokenizer_sha256=tokenizer.sha256,
        sources=sources,
        is_complete=is_complete,
        longest_document_tokens=max((record.longest_document_tokens for record in by_name), default=0),
        dropped=dropped,
        about={
            "sources": list(map(shown, config.sources)),
            "tokenizer": config.tokenizer,
            "pyarrow": pa.__version__,
            "files": {what: [dataclasses.asdict(group) for group in groups] for what, groups in plan.groups.items()},
        },
    ).sealed()


def _dropped(records: Sequence[PieceRecord]) -> Dropped:
    """The sum over pieces; of what is bad the first are named."""
    parts = [record.dropped for record in records]
    names = [one.name for one in dataclasses.fields(Dropped) if one.name != "bad"]
    sums = {name: sum(getattr(part, name) for part in parts) for name in names}
    return Dropped(bad=tuple(itertools.islice((line for part in parts for line in part.bad), MAX_NAMED)), **sums)


def _check_bad_share(config: PrepareConfig, plan: Plan, dropped: Dropped) -> None:
    """Raises ValueError where more was skipped than is allowed."""
    total_bytes = sum(piece.num_bytes for piece in plan.pieces)
    shares = {
        f"{dropped.num_bad_records:,} of {dropped.num_records:,} records": dropped.num_bad_records
        / max(dropped.num_records, 1),
        f"{dropped.bad_bytes:,} of {total_bytes:,} bytes, whole files,": dropped.bad_bytes / max(total_bytes, 1),
    }
    told, share = max(shares.items(), key=lambda item: item[1])
    if share > config.max_bad_share:
        raise ValueError(
            f"max_bad_share={config.max_bad_share}: {told} ({share:.1%}) are bad; the first: {dropped.bad[0]}. Mend "
            "the input, or allow more: --max-bad-share; what is prepared is kept"
        )


def _shards(records: Sequence[PieceRecord], prefix: str = "") -> tuple[Shard, ...]:
    return tuple(shard for record in records if record.name.startswith(prefix) for shard in record.shards)


def _names(uris: Sequence[str]) -> list[str]:
    """A name for each source: the last part of its URI, numbered where two are alike."""
    names = [uri.rstrip("/").rpartition("/")[2] for uri in uris]
    return [name if names.count(name) == 1 else f"{name}-{index}" for index, name in enumerate(names)]
