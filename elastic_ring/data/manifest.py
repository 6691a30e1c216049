"""The manifest of a prepared corpus: its vocabulary, its sources and their token shards, with digests.

A manifest is one JSON file beside the folder `shards`. Its digest covers what training sees: documents, tokens, order
and weights, but neither where the input came from nor how the files are compressed. No tokens in here, and no Ray.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

from elastic_ring.data.filesystem import located, read_file
from elastic_ring.data.packing import MAX_VOCAB_SIZE
from elastic_ring.files import name_below, plain_json, shown_url
from elastic_ring.validation import NonNegativeInt, PositiveInt, from_plain, settings

MANIFEST, PREPARATION = "manifest.json", "preparation.json"
"""What a preparation writes last, and first."""
COLUMN, OFFSET, COUNTED = "tokens", "offset", "counted"
TOKENS_KEY = b"elastic_ring.tokens_sha256"
"""Columns of a shard, and the key of its digest in a file."""
MAX_MANIFEST_BYTES = 1 << 28
MAX_COUNT, MAX_ROW_GROUPS = 1 << 53, 1 << 27
"""Bounds of a corpus: an index of its row groups is kept in memory."""
_NAME = re.compile(r"^manifest(-\d+)?\.json$")
_NOT_IN_DIGEST = {"digest", "about", "num_bytes", "sha256", "tokens_by_length", "index_sha256"}
_NOT_IN_DIGEST |= {"num_records", "num_bad_records", "num_bad", "bad_bytes", "bad_kinds"}


@settings
class Shard:
    """One Parquet file of tokens. `tokens_sha256` is of its tokens, `sha256` of its bytes. `num_counted`: tokens that
    count in the loss, by the column COUNTED; None: all do, and there is no such column. `index_sha256` is of its index
    of documents; None where it was prepared without."""

    name: str
    num_documents: NonNegativeInt
    num_tokens: PositiveInt
    tokens_sha256: str
    num_bytes: PositiveInt
    sha256: str
    num_counted: NonNegativeInt | None = None
    index_sha256: str | None = None

    def __post_init__(self) -> None:
        if "/" in name_below(self.name, "a shard") or max(self.num_documents, self.num_tokens) > MAX_COUNT:
            raise ValueError(f"a shard has name {self.name[:200]!r} and {self.num_tokens} tokens, which cannot be")


@settings
class PreparedSource:
    """One part of a mixture, or the whole corpus where `weight` is None. Its shards follow each other."""

    name: str
    weight: float | None
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise ValueError(f"source {self.name[:200]!r} has weight={self.weight}: must be a positive number")

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.shards)


@settings
class Dropped:
    """Counts of what was left out. `bad` names the first of each kind of the `num_bad` unreadable inputs, with the
    reason; `bad_kinds` has the kind of each and how many there are.

    `num_records` includes bad ones; `bad_bytes` is the size of files that are bad as a whole.
    """

    num_duplicates: NonNegativeInt = 0
    num_empty_documents: NonNegativeInt = 0
    num_empty_files: NonNegativeInt = 0
    bad: tuple[str, ...] = ()
    num_records: NonNegativeInt = 0
    num_bad_records: NonNegativeInt = 0
    num_bad: NonNegativeInt = 0
    bad_bytes: NonNegativeInt = 0
    bad_kinds: tuple[tuple[str, NonNegativeInt], ...] = ()


@settings
class Manifest:
    """A prepared corpus, or the part of it that is complete: then `is_complete` is False.

    Documents end in the token `end_of_document`, and are padded with it to a multiple of `align_tokens`. Each row group
    of a shard has `row_group_tokens` tokens; the last one of a shard may have fewer. `tokens_by_length[i]`: of the
    documents of 2**i to 2**(i + 1) - 1 tokens; empty where they were not counted.
    """

    vocab_size: PositiveInt
    end_of_document: NonNegativeInt
    column: str
    row_group_tokens: PositiveInt
    align_tokens: PositiveInt
    tokenizer_sha256: str
    sources: tuple[PreparedSource, ...]
    longest_document_tokens: NonNegativeInt
    is_complete: bool
    tokens_by_length: tuple[NonNegativeInt, ...] = ()
    dropped: Dropped = field(default_factory=Dropped)
    about: Mapping[str, Any] = field(default_factory=dict)
    format: Literal["elastic_ring tokens 1"] = "elastic_ring tokens 1"
    digest: str = ""

    def __post_init__(self) -> None:
        if not self.end_of_document < self.vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(
                f"end_of_document={self.end_of_document} is no token below vocab_size={self.vocab_size}, "
                f"of at most {MAX_VOCAB_SIZE}"
            )
        shards = [shard for source in self.sources for shard in source.shards]
        num_groups = sum(-(-shard.num_tokens // self.row_group_tokens) for shard in shards)
        if num_groups > MAX_ROW_GROUPS or max(self.row_group_tokens, self.align_tokens) > MAX_COUNT:
            raise ValueError(
                f"row_group_tokens={self.row_group_tokens} gives {num_groups} row groups: there may be {MAX_ROW_GROUPS}"
            )

    @property
    def num_tokens(self) -> int:
        return sum(source.num_tokens for source in self.sources)

    @property
    def num_counted(self) -> int | None:
        """How many tokens count in the loss; None where all do."""
        counts = [shard.num_counted for source in self.sources for shard in source.shards]
        return None if None in counts else sum(num for num in counts if num is not None)

    @property
    def has_index(self) -> bool:
        """Whether it was prepared with an index of documents, by which they can be packed whole."""
        return all(shard.index_sha256 is not None for source in self.sources for shard in source.shards)

    @property
    def num_documents(self) -> int:
        return sum(source.num_documents for source in self.sources)

    @property
    def num_shards(self) -> int:
        return sum(len(source.shards) for source in self.sources)

    def sealed(self) -> Manifest:
        """The same with its digest."""
        return dataclasses.replace(self, digest=digest_of(dataclasses.asdict(self)))

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True).encode()


def digest_of(plain: Any) -> str:
    """SHA-256 of a manifest's JSON value, without what the digest does not cover."""
    return hashlib.sha256(json.dumps(_covered(plain), sort_keys=True).encode()).hexdigest()


def _covered(plain: Any) -> Any:
    if isinstance(plain, Mapping):
        left_out = _NOT_IN_DIGEST if plain.get("num_counted", 0) is not None else _NOT_IN_DIGEST | {"num_counted"}
        return {key: _covered(value) for key, value in plain.items() if key not in left_out}
    if isinstance(plain, Sequence) and not isinstance(plain, str):
        return [_covered(value) for value in plain]
    return plain


def is_manifest(uri: str) -> bool:
    """Whether the last part of a path or URI is a manifest's name."""
    return bool(_NAME.match(uri.rstrip("/").rpartition("/")[2]))


def read_manifest(uri: str) -> Manifest:
    """The manifest at `uri`. Raises ValueError for one that is absent, of another format or altered; StorageFailed."""
    filesystem, path = located(uri)
    data = read_file(filesystem, path, uri, MAX_MANIFEST_BYTES)
    try:
        plain = plain_json(data, MAX_MANIFEST_BYTES)
        manifest = from_plain(Manifest, plain)
    except ValueError as error:
        raise ValueError(f"{shown_url(uri)}: is no manifest of elastic-ring data prepare: {error}") from error
    if digest_of(plain) != manifest.digest:
        raise ValueError(
            f"{shown_url(uri)}: was altered after it was written: its content does not have its digest; restore it"
        )
    return manifest
