"""Training data from a manifest: token shards that `prepare` has written, read by row groups.

The manifest gives vocabulary, end of document, alignment and mixture. Its shards' sizes give every sequence its place
without reading them. What a step reads is a pure function of the seed, the step and the manifest; where a run's corpus
grows, of the manifests and the steps from which they hold.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar

from pydantic import Field

from elastic_ring.data.cuts import log_documents
from elastic_ring.data.manifest import Manifest, PreparedSource, read_manifest
from elastic_ring.data.packing import MAX_VOCAB_SIZE, Files, PackedSource, Sample, check_context
from elastic_ring.data.row_groups import RowGroups
from elastic_ring.data.sampling.mixed_order import MixedOrder, Numbering, Version
from elastic_ring.files import absolute, shown_url
from elastic_ring.validation import PositiveInt, settings

CACHE_BYTES, LEAST_CACHE_BYTES = 256 << 20, 32 << 20
BLOCK_ROW_GROUPS, WINDOW_BLOCKS = 8, 8
"""Row groups that are read one after the other, and how many such blocks are mixed: 4 Mi tokens at 64 Ki each."""


@settings
class Later:
    """From `first_step` on, another manifest of the same preparation holds."""

    first_step: PositiveInt
    uri: str
    digest: str


@settings
class PreparedTokens:
    """The corpus of the manifest `uri`, packed into sequences of `context_tokens`.

    `PreparedTokens.of(uri, context_tokens)` reads the manifest for the rest. Opening it refuses a manifest whose digest
    has changed. `later` has the manifests by which the corpus grows, in order.
    """

    _prefix: ClassVar[str] = "PreparedTokens "

    context_tokens: int
    uri: str
    digest: str
    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCAB_SIZE)]
    align_tokens: PositiveInt = 1
    later: tuple[Later, ...] = ()

    def __post_init__(self) -> None:
        check_context(self.context_tokens, self.align_tokens)
        object.__setattr__(self, "uri", absolute(self.uri))
        firsts = [later.first_step for later in self.later]
        if firsts != sorted(set(firsts)):
            raise ValueError(f"PreparedTokens later={self.later}: the first steps must rise")

    @classmethod
    def of(cls, uri: str, context_tokens: int) -> PreparedTokens:
        """Read the manifest and pin its digest; log documents that are longer than a sequence and, from a sample of the
        shards, conversations that are cut. Raises ValueError for what cannot be read."""
        manifest = read_manifest(uri)
        log_documents(uri, manifest, context_tokens)
        return cls(context_tokens, uri, manifest.digest, manifest.vocab_size, manifest.align_tokens)

    def open(self) -> PreparedCorpus:
        """Read the manifests, and no shard. Raises ValueError for one that is not what it was."""
        used = [(self.uri, self.digest), *((later.uri, later.digest) for later in self.later)]
        manifests = [pinned_manifest(uri, digest) for uri, digest in used]
        uris = [later.uri for later in self.later]
        for (before, after), uri in zip(pairwise(manifests), uris, strict=True):
            check_grown(before, after, uri)
        streams = [self._stream(index, manifests[-1]) for index in range(len(manifests[0].sources))]
        firsts = [0, *(later.first_step for later in self.later)]
        sizes = [[self._num_sequences(source) for source in manifest.sources] for manifest in manifests]
        facts = ["prepared", self.context_tokens, [manifest.digest for manifest in manifests], firsts]
        return PreparedCorpus(
            tuple(streams),
            tuple(source.weight or 1.0 for source in manifests[0].sources),
            firsts,
            sizes,
            is_complete=manifests[-1].is_complete,
            block=max(1, BLOCK_ROW_GROUPS * manifests[0].row_group_tokens // self.context_tokens),
            fingerprint=hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        )

    def _num_sequences(self, source: PreparedSource) -> int:
        return max(source.num_tokens - 1, 0) // self.context_tokens

    def _stream(self, index: int, manifest: Manifest) -> PackedSource:
        source = manifest.sources[index]
        chunks = RowGroups(self.uri, manifest, source)
        return PackedSource(
            chunks,
            ends=chunks.ends,
            context_tokens=self.context_tokens,
            vocab_size=manifest.vocab_size,
            describe=f"{shown_url(self.uri)} (source {source.name})",
            how=["prepared"],
            digests=lambda: files_of(source),
            padding=manifest.end_of_document if manifest.align_tokens > 1 else None,
            cache_bytes=max(LEAST_CACHE_BYTES, CACHE_BYTES // len(manifest.sources)),
        )


def files_of(source: PreparedSource) -> Files:
    return tuple((shard.name, shard.tokens_sha256) for shard in source.shards)


class PreparedCorpus:
    """Sequences over the sources of a manifest, and their order. Ids are those of `Numbering`.

    `held`: how many sequences at the beginning of each source are not in this part.
    """

    def __init__(
        self,
        streams: Sequence[PackedSource],
        weights: Sequence[float],
        first_steps: Sequence[int],
        sizes: Sequence[Sequence[int]],
        *,
        is_complete: bool,
        block: int,
        fingerprint: str,
        held: Sequence[int] = (),
    ) -> None:
        self._streams, self._weights, self._first_steps, self._sizes = streams, weights, first_steps, sizes
        self._is_complete, self._block, self._own = is_complete, block, fingerprint
        self._held = tuple(held) or (0,) * len(streams)
        self._versions = tuple(
            Version(step, tuple(self._usable(s, size, number) for s, size in enumerate(of_version)))
            for number, (step, of_version) in enumerate(zip(first_steps, sizes, strict=True))
        )
        self._numbering = Numbering(self._versions)

    def _usable(self, source: int, size: int, version: int) -> int:
        """Sequences of this part. A block that is not complete waits for the next version."""
        num = max(size - self._held[source], 0)
        last = version == len(self._sizes) - 1
        return num if last and self._is_complete else num // self._block * self._block

    @property
    def num_sequences(self) -> int:
        return self._numbering.num_sequences

    @property
    def context_tokens(self) -> int:
        return self._streams[0].context_tokens

    @property
    def files(self) -> Files:
        """The shards, source after source."""
        return tuple(file for stream in self._streams for file in stream.files)

    @property
    def fingerprint(self) -> str:
        return f"{self._own}{list(self._held)}" if any(self._held) else self._own

    def read(self, sample_id: int) -> Sample:
        stream, sequence = self._place(sample_id)
        return stream.read(sequence)

    def read_ahead(self, sample_ids: Sequence[int]) -> None:
        """Begin to read what these sequences need, in the background."""
        places = [self._place(sample_id) for sample_id in sample_ids]
        for stream in self._streams:
            stream.read_ahead([sequence for owner, sequence in places if owner is stream])

    def order(self, seed: int, global_batch: int) -> MixedOrder:
        """Which sequences each step uses. Raises ValueError for a batch larger than the corpus."""
        return MixedOrder(seed, global_batch, self._weights, self._versions, block=self._block, window=WINDOW_BLOCKS)

    def hold_out(self, num: int) -> tuple[PreparedCorpus, PreparedCorpus]:
        """(training, validation): the first sequences of each source are held out, in proportion to the weights.

        The beginning stays where it is when a corpus grows. Raises ValueError where nothing is left to train on.
        """
        held = apportioned(num, self._weights)
        if any(h >= size for h, size in zip(held, self._versions[0].num_sequences, strict=True)):
            raise ValueError(
                f"validation num_sequences={num}: at least one sequence of each source must be left to train on, and "
                f"they have {', '.join(map(str, self._versions[0].num_sequences))}; hold out fewer or give more text"
            )
        training = self._part(self._first_steps, self._sizes, held=held, is_complete=self._is_complete)
        return training, self._part([0], [held], held=(), is_complete=True)

    def _part(self, steps: Any, sizes: Any, *, held: Sequence[int], is_complete: bool) -> PreparedCorpus:
        return PreparedCorpus(
            self._streams,
            self._weights,
            steps,
            sizes,
            is_complete=is_complete,
            block=self._block,
            fingerprint=self._own,
            held=held,
        )

    def _place(self, sample_id: int) -> tuple[PackedSource, int]:
        if not 0 <= sample_id < self.num_sequences:
            raise ValueError(f"sample_id={sample_id}: this part has sequences 0 to {self.num_sequences - 1}")
        source, sequence = self._numbering.place(sample_id)
        return self._streams[source], self._held[source] + sequence


def apportioned(num: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`num` in whole parts in proportion to the weights: the largest remainders are rounded up."""
    exact = [num * weight / sum(weights) for weight in weights]
    parts = [int(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda index: (parts[index] - exact[index], index))
    for index in by_remainder[: num - sum(parts)]:
        parts[index] += 1
    return tuple(parts)


# ------------------------------------------------------------ manifests


def pinned_manifest(uri: str, digest: str) -> Manifest:
    """The manifest that a run uses. Raises ValueError if it has changed."""
    found = read_manifest(uri)
    if found.digest != digest:
        raise ValueError(
            f"{shown_url(uri)}: has the digest {found.digest[:16]}, the run began with {digest[:16]}: a corpus must "
            "not change under a run; restore the manifest, or start a run of another name"
        )
    return found


def check_grown(before: Manifest, after: Manifest, uri: str) -> None:
    """Raises ValueError where the later manifest, at `uri`, does not begin with the shards of the earlier one."""
    pairs = list(zip(before.sources, after.sources, strict=False))
    shorter = [one.name for one, two in pairs if one.shards[: len(two.shards)] == two.shards != one.shards]
    if shorter:
        raise ValueError(
            f"{shown_url(uri)}: source {shorter[0]} has fewer shards than the run has used: a corpus only grows under "
            "a run; restore the manifest, or start a run of another name"
        )
    alike = (
        before.vocab_size,
        before.end_of_document,
        before.row_group_tokens,
        before.align_tokens,
        before.tokenizer_sha256,
    ) == (after.vocab_size, after.end_of_document, after.row_group_tokens, after.align_tokens, after.tokenizer_sha256)
    grown = all(one.weight == two.weight and two.shards[: len(one.shards)] == one.shards for one, two in pairs)
    if not (alike and grown and len(before.sources) == len(after.sources)):
        raise ValueError(
            f"{shown_url(uri)}: a later manifest is of another preparation: it must begin with the same shards"
        )
