"""Training data from a manifest: token shards that `prepare` has written, read by row groups.

The manifest gives vocabulary, end of document, alignment and mixture. Its shards' sizes give every sequence its place
without reading them; where documents are packed whole, their lengths do. What a step reads is a pure function of the
seed, the step and the manifest; where a run's corpus grows, of the manifests and the steps from which they hold.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pyarrow import fs
from pydantic import Field

from elastic_ring.control.messages import CorpusVersion
from elastic_ring.data.document_index import read_index
from elastic_ring.data.filesystem import located, reading
from elastic_ring.data.manifest import Manifest, is_manifest, read_manifest
from elastic_ring.data.packing import MAX_VOCAB_SIZE, Files, PackedSource, Sample, check_context
from elastic_ring.data.row_groups import RowGroups
from elastic_ring.data.sampling.mixed_order import MixedOrder, Numbering, Version
from elastic_ring.data.whole import RULES, Long, LongDocuments, Placed, WholeSource, long_documents, place
from elastic_ring.files import absolute, shown_url, with_access
from elastic_ring.validation import PositiveInt, settings

log = logging.getLogger(__name__)

CACHE_BYTES, LEAST_CACHE_BYTES = 256 << 20, 32 << 20
BLOCK_ROW_GROUPS, WINDOW_BLOCKS = 8, 8
"""Row groups that are read one after the other, and how many such blocks are mixed: 4 Mi tokens at 64 Ki each."""
WINDOW_SEQUENCES, LOADED_BYTES = 16, 6
"""Sequences among which whole documents are packed, at least; and the most that a token takes in the cache."""
MUCH_PADDING = 0.1
"""Share of a corpus's positions that a submission is warned of."""
Packing = Literal["stream", "whole"]
Auto = Literal["auto"]
_NUMBERED = re.compile(r"^manifest-(\d+)\.json$")


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
    has changed. `later` has the manifests by which the corpus grows, in order. `packing`: one stream of tokens, or
    `whole` documents; then `long_documents` are those that are longer than a sequence.
    """

    _prefix: ClassVar[str] = "PreparedTokens "

    context_tokens: int
    uri: str
    digest: str
    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCAB_SIZE)]
    align_tokens: PositiveInt = 1
    later: tuple[Later, ...] = ()
    packing: Packing = "stream"
    long_documents: LongDocuments = "cut"

    def __post_init__(self) -> None:
        check_context(self.context_tokens, self.align_tokens)
        object.__setattr__(self, "uri", absolute(self.uri))
        firsts = [later.first_step for later in self.later]
        if firsts != sorted(set(firsts)):
            raise ValueError(f"PreparedTokens later={self.later}: the first steps must rise")

    @classmethod
    def of(
        cls,
        uri: str,
        context_tokens: int,
        *,
        packing: Packing | Auto = "auto",
        long_documents: LongDocuments = "cut",
    ) -> PreparedTokens:
        """Read the manifest and pin its digest; log how documents fit into sequences. `packing="auto"`: conversations
        whole, if the corpus was prepared with their lengths. Raises ValueError for what cannot be read."""
        manifest = read_manifest(uri)
        sizes, how = (manifest.vocab_size, manifest.align_tokens), packing_of(manifest, packing)
        data = cls(context_tokens, uri, manifest.digest, *sizes, packing=how, long_documents=long_documents)
        data.log_documents(manifest)
        return data

    def open(self) -> PreparedCorpus:
        """Read the manifests and, for whole documents, their lengths, and no shard. Raises ValueError for one that is
        not what it was."""
        used = [(self.uri, self.digest), *((later.uri, later.digest) for later in self.later)]
        manifests = [pinned_manifest(uri, digest) for uri, digest in used]
        uris = [later.uri for later in self.later]
        for (before, after), uri in zip(pairwise(manifests), uris, strict=True):
            check_grown(before, after, uri)
        firsts = [0, *(later.first_step for later in self.later)]
        facts: list[object] = ["prepared", self.context_tokens, [manifest.digest for manifest in manifests], firsts]
        nums = range(len(manifests[0].sources))
        if self.packing == "whole":
            placed = [self._placed(index, manifests) for index in nums]
            facts += ["whole", RULES, self.long_documents, *(part.digest for part in placed)]
            streams = [self._stream(index, manifests[-1], placed[index]) for index in nums]
            sizes = [list(of_version) for of_version in zip(*(part.sizes for part in placed), strict=True)]
        else:
            streams = [self._stream(index, manifests[-1]) for index in nums]
            sizes = [
                [max(source.num_tokens - 1, 0) // self.context_tokens for source in manifest.sources]
                for manifest in manifests
            ]
        block_tokens = self._block_tokens(manifests[0])
        return PreparedCorpus(
            tuple(streams),
            tuple(source.weight or 1.0 for source in manifests[0].sources),
            firsts,
            sizes,
            is_complete=manifests[-1].is_complete,
            block=max(1, block_tokens // self.context_tokens),
            window=_window_blocks(self.packing, streams[0].cache_bytes, block_tokens),
            digest=hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
            held=(0,) * len(streams),
        )

    def _placed(self, index: int, manifests: Sequence[Manifest]) -> Placed:
        manifest, source = manifests[-1], manifests[-1].sources[index]
        if not manifest.has_index:
            raise ValueError(
                f"packing='whole': {shown_url(self.uri)} was prepared without the lengths of its documents: prepare it "
                "anew into another folder, or take packing='stream'"
            )
        documents = read_index(self.uri, source, self.context_tokens + 1)
        shards = [len(each.sources[index].shards) for each in manifests]
        return place(
            documents,
            [int(documents.by_shard[num - 1]) if num else 0 for num in shards],
            self.context_tokens,
            align_tokens=manifest.align_tokens,
            window_tokens=self._block_tokens(manifests[0]),
            long=self.long_documents,
        )

    def _block_tokens(self, manifest: Manifest) -> int:
        """How many tokens are read together."""
        of_row_groups = BLOCK_ROW_GROUPS * manifest.row_group_tokens
        return of_row_groups if self.packing == "stream" else max(of_row_groups, WINDOW_SEQUENCES * self.context_tokens)

    def _stream(self, index: int, manifest: Manifest, placed: Placed | None = None) -> PackedSource:
        source, end, align = manifest.sources[index], manifest.end_of_document, manifest.align_tokens
        new: Callable[..., PackedSource] = PackedSource
        if placed is not None:
            new = partial(WholeSource, placed=placed, end_of_document=end, align_tokens=align)
        chunks = RowGroups(self.uri, manifest, source)
        return new(
            chunks=chunks,
            ends=chunks.ends,
            context_tokens=self.context_tokens,
            vocab_size=manifest.vocab_size,
            describe=f"{shown_url(self.uri)} (source {source.name})",
            how=["prepared"],
            digests=lambda: tuple((shard.name, shard.tokens_sha256) for shard in source.shards),
            padding=end if align > 1 else None,
            cache_bytes=max(LEAST_CACHE_BYTES, CACHE_BYTES // len(manifest.sources)),
        )

    def log_documents(self, manifest: Manifest) -> None:
        """Log how the documents of this corpus fit into sequences. Raises as `open`."""
        context, masked = self.context_tokens, manifest.num_counted is not None
        if self.packing == "whole":
            line, padding = _whole_line(self.open(), manifest, self.long_documents)
            log.log(logging.WARNING if padding > MUCH_PADDING else logging.INFO, "%s", line)
        elif masked:
            share, way_out = "", "prepare the corpus anew to pack them whole"
            if manifest.has_index:
                way_out = "packing whole keeps them"
                with suppress(ValueError):  # a stream needs no index
                    share = f"{_cut_share(self.uri, manifest, context):.1%} of the "
            problem = "conversations are cut where sequences end, and the rest of each trains without its prompt"
            log.warning("context_tokens=%d: %s%s: %s", context, share, problem, way_out)
        elif manifest.longest_document_tokens > context:
            log.info(
                "documents of up to %s tokens are packed over several sequences of context_tokens=%d",
                f"{manifest.longest_document_tokens:,}",
                context,
            )


@dataclass(frozen=True, eq=False)
class PreparedCorpus:
    """Sequences over the sources of a manifest, and their order. Ids are those of `Numbering`.

    `sizes`: for each version of the corpus, how many sequences each source has. `held`: how many at the beginning of
    each source are not in this part. `window`: how many blocks are mixed.
    """

    streams: Sequence[PackedSource]
    weights: Sequence[float]
    first_steps: Sequence[int]
    sizes: Sequence[Sequence[int]]
    is_complete: bool
    block: int
    window: int
    digest: str
    held: tuple[int, ...]

    @cached_property
    def versions(self) -> tuple[Version, ...]:
        versions: list[Version] = []
        for number, (step, sizes) in enumerate(zip(self.first_steps, self.sizes, strict=True)):
            nums = [max(size - held, 0) for size, held in zip(sizes, self.held, strict=True)]
            if number < len(self.sizes) - 1 or not self.is_complete:  # an incomplete block waits for the next version
                nums = [num // self.block * self.block for num in nums]
            versions.append(Version(step, tuple(nums)))
        return tuple(versions)

    @cached_property
    def numbering(self) -> Numbering:
        return Numbering(self.versions)

    @property
    def num_sequences(self) -> int:
        return self.numbering.num_sequences

    @property
    def context_tokens(self) -> int:
        return self.streams[0].context_tokens

    @property
    def files(self) -> Files:
        """The shards, source after source."""
        return tuple(file for stream in self.streams for file in stream.files)

    @property
    def fingerprint(self) -> str:
        return f"{self.digest}{list(self.held)}" if any(self.held) else self.digest

    def read(self, sample_id: int) -> Sample:
        stream, sequence = self._place(sample_id)
        return stream.read(sequence)

    def read_ahead(self, sample_ids: Sequence[int]) -> None:
        """Begin to read what these sequences need, in the background."""
        places = [self._place(sample_id) for sample_id in sample_ids]
        for stream in self.streams:
            stream.read_ahead([sequence for owner, sequence in places if owner is stream])

    def order(self, seed: int, global_batch: int) -> MixedOrder:
        """Which sequences each step uses. Raises ValueError for a batch larger than the corpus."""
        return MixedOrder(seed, global_batch, self.weights, self.versions, block=self.block, window=self.window)

    def hold_out(self, num: int) -> tuple[PreparedCorpus, PreparedCorpus]:
        """(training, validation): the first sequences of each source are held out, in proportion to the weights.

        The beginning stays where it is when a corpus grows. Raises ValueError where nothing is left to train on.
        """
        held, sizes = apportioned(num, self.weights), self.versions[0].num_sequences
        if any(part >= size for part, size in zip(held, sizes, strict=True)):
            raise ValueError(
                f"validation num_sequences={num}: at least one sequence of each source must be left to train on, and "
                f"they have {', '.join(map(str, sizes))}; hold out fewer or give more text"
            )
        return replace(self, held=held), replace(self, first_steps=[0], sizes=[held], is_complete=True)

    def _place(self, sample_id: int) -> tuple[PackedSource, int]:
        if not 0 <= sample_id < self.num_sequences:
            raise ValueError(f"sample_id={sample_id}: this part has sequences 0 to {self.num_sequences - 1}")
        source, sequence = self.numbering.place(sample_id)
        return self.streams[source], self.held[source] + sequence


def _window_blocks(packing: Packing, cache_bytes: int, block_tokens: int) -> int:
    """How many blocks are mixed: of whole documents at most as many as are loaded at once."""
    most = cache_bytes // (LOADED_BYTES * block_tokens) if packing == "whole" else WINDOW_BLOCKS
    return max(1, min(WINDOW_BLOCKS, most))


def packing_of(manifest: Manifest, packing: Packing | Auto) -> Packing:
    """`auto` for a manifest: conversations whole, other documents and those of earlier versions as a stream."""
    if packing != "auto":
        return packing
    return "whole" if manifest.num_counted is not None and manifest.has_index else "stream"


def apportioned(num: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`num` in whole parts in proportion to the weights: the largest remainders are rounded up."""
    exact = [num * weight / sum(weights) for weight in weights]
    parts = [int(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda index: (parts[index] - exact[index], index))
    for index in by_remainder[: num - sum(parts)]:
        parts[index] += 1
    return tuple(parts)


# ------------------------------------------------------------ manifests that grow


def pinned_manifest(uri: str, digest: str) -> Manifest:
    """The manifest that a run uses. Raises ValueError if it has changed."""
    manifest = read_manifest(uri)
    if manifest.digest != digest:
        raise ValueError(
            f"{shown_url(uri)}: has the digest {manifest.digest[:16]}, the run began with {digest[:16]}: a corpus must "
            "not change under a run; restore the manifest, or start a run of another name"
        )
    return manifest


def check_grown(before: Manifest, after: Manifest, uri: str) -> None:
    """Raises ValueError where the later manifest, at `uri`, does not begin with the shards of the earlier one."""
    pairs = list(zip(before.sources, after.sources, strict=False))
    shorter = [old.name for old, new in pairs if old.shards[: len(new.shards)] == new.shards != old.shards]
    if shorter:
        raise ValueError(
            f"{shown_url(uri)}: source {shorter[0]} has fewer shards than the run has used: a corpus only grows under "
            "a run; restore the manifest, or start a run of another name"
        )
    fixed = ("vocab_size", "end_of_document", "row_group_tokens", "align_tokens", "tokenizer_sha256", "has_index")
    is_alike = all(getattr(before, name) == getattr(after, name) for name in fixed)
    is_grown = all(old.weight == new.weight and new.shards[: len(old.shards)] == old.shards for old, new in pairs)
    if not (is_alike and is_grown and len(before.sources) == len(after.sources)):
        raise ValueError(
            f"{shown_url(uri)}: a later manifest is of another preparation: it must begin with the same shards"
        )


def may_grow(data: Any) -> bool:
    """Whether a run may take longer manifests over: its own is a beginning's, and `later` does not say what follows."""
    if not isinstance(data, PreparedTokens) or data.later:
        return False
    return _NUMBERED.match(data.uri.rpartition("/")[2]) is not None


def with_versions(data: Any, versions: Iterable[CorpusVersion]) -> Any:
    """The data of a run once it has taken these manifests over; `data` themselves where there are none."""
    later = tuple(Later(version.first_step, with_access(version.uri, data.uri), version.digest) for version in versions)
    return replace(data, later=later) if later else data


def versions_beside(data: Any, versions: Iterable[CorpusVersion]) -> tuple[CorpusVersion, ...]:
    """The versions in the folder of the data's own manifest, where a preparation writes them all."""
    folder = data.uri.rpartition("/")[0]
    return tuple(replace(version, uri=shown_url(f"{folder}/{version.uri.rpartition('/')[2]}")) for version in versions)


def longer_manifest(uri: str, now: Manifest) -> tuple[str, Manifest] | None:
    """(URI, manifest) of the longest manifest in the folder of `uri`, if it is longer than `now`, which `uri` names.

    None if there is none, or if the manifest is complete. Raises ValueError that names a manifest which lacks
    shards of `now`, has others in their place, or cannot be read; and for a folder that cannot be listed; StorageFailed
    where the store is away. The first reads
    "FILE: what is wrong: details; expected ...", where the details may be others at each look.
    """
    if now.is_complete:
        return None
    folder, _, name = uri.rpartition("/")
    filesystem, path = located(folder)
    selector = fs.FileSelector(path, recursive=False)
    try:
        files: list[Any] = reading(folder, lambda: filesystem.get_file_info(selector), problem="cannot be listed")
    except ValueError as error:
        raise ValueError(f"{error}; expected the manifests of the run's corpus") from error
    names = [file.base_name for file in files if is_manifest(file.base_name)]
    newest = max(names, key=_num_pieces, default=name)
    if _num_pieces(newest) <= _num_pieces(name):
        return None
    longer = f"{folder}/{newest}"
    try:
        manifest = read_manifest(longer)
        check_grown(now, manifest, longer)
    except ValueError as error:
        raise ValueError(f"{error}; expected one that begins with the {now.num_shards} shard(s) of {name}") from error
    return longer, manifest


def _num_pieces(name: str) -> float:
    """How many pieces a manifest has by its name; the complete one has all."""
    numbered = _NUMBERED.match(name)
    return int(numbered[1]) if numbered else float("inf")


# ------------------------------------------------------------ documents longer than a sequence


def _whole_line(corpus: PreparedCorpus, manifest: Manifest, long_documents: LongDocuments) -> tuple[str, float]:
    """How the documents of a corpus that packs them whole fit into its sequences, and the share of padding."""
    placed = [stream.placed for stream in corpus.streams if isinstance(stream, WholeSource)]
    num_sequences, num_tokens = sum(len(part.ends) for part in placed), sum(int(part.lengths.sum()) for part in placed)
    long, context = _summed(part.long for part in placed), corpus.context_tokens
    masked = manifest.num_counted is not None
    kind = "conversations" if masked else "documents"
    padding = 1 - num_tokens / (num_sequences * (context + 1)) if num_sequences else 0.0
    line = (
        f"{manifest.num_documents:,} {kind} are packed whole into {num_sequences:,} sequences of "
        f"context_tokens={context}, {padding:.1%} padding"
    )
    if not long.num_documents:
        return line, padding
    how = "left out" if long_documents == "leave_out" else "cut at turns" if masked else "cut"
    num_counted = max(manifest.num_tokens if manifest.num_counted is None else manifest.num_counted, 1)
    return (
        f"{line}; {long.num_documents:,} ({long.num_documents / manifest.num_documents:.1%}) are longer and {how}: "
        f"they have {long.num_counted / num_counted:.1%} of the counted tokens, and {long.num_left_out:,} are left out"
    ), padding


def _cut_share(uri: str, manifest: Manifest, context_tokens: int) -> float:
    """The share of documents with the edge of a stream's sequence inside. Raises ValueError and StorageFailed."""
    num_cut = 0
    for lengths in (read_index(uri, source, source.num_tokens).lengths for source in manifest.sources):
        begins = np.cumsum(lengths) - lengths
        last = begins + np.maximum(lengths - 2, 0)  # the last token is only a target: an edge may lie before it
        num_cut += int((begins // context_tokens != last // context_tokens).sum())
    return num_cut / max(manifest.num_documents, 1)


def long_shares(uri: str, manifest: Manifest, contexts: Sequence[int]) -> list[Long]:
    """For each context, the documents that are longer than a sequence. Raises ValueError and StorageFailed."""
    indices = [read_index(uri, source, min(contexts) + 1) for source in manifest.sources]
    return [_summed(long_documents(index, context) for index in indices) for context in contexts]


def _summed(longs: Iterable[Long]) -> Long:
    return Long(*map(sum, zip(*longs, strict=True)))
