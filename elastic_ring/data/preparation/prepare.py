"""From documents to token shards and a manifest: what `elastic-ring data prepare` does.

The input is cut into pieces that depend on the files alone. A worker turns a piece into shards and then writes the
piece's record, so a preparation that was killed goes on with the pieces that have none. The manifest is written last.
`pipeline` spreads pieces over a Ray cluster; with `workers=0` they run in this process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from elastic_ring.data.listing import (
    Group,
    check_apart,
    left_out_groups,
    list_source,
    shown,
    used_groups,
)
from elastic_ring.data.manifest import (
    COLUMN,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    PREPARATION,
    Dropped,
    Manifest,
    PreparedSource,
    Shard,
    read_manifest,
)
from elastic_ring.data.preparation import PrepareConfig
from elastic_ring.data.preparation.chat import RULES, ChatTokenizer
from elastic_ring.data.preparation.inputs import Piece, cut
from elastic_ring.data.preparation.piece import (
    DUPLICATES,
    PIECES,
    Job,
    PieceRecord,
    PieceWorker,
    digests_name,
    read_record,
    record_name,
    repeated_name,
)
from elastic_ring.data.tokenizer import Tokenizer, open_tokenizer
from elastic_ring.files import plain_json
from elastic_ring.state.storage.folder import Storage, open_or_refuse

__all__ = ["PrepareConfig", "prepare"]

log = logging.getLogger(__name__)

READ_AT_ONCE = 16
SMALL_BYTES = 32 << 20
GROWTH = 2
"""How much longer the complete beginning is before it gets a manifest of its own."""

Task = Literal["digest", "prepare"]
Spread = Callable[[Job, Task, Sequence[Piece]], Iterator[tuple[Piece, PieceRecord | None]]]
"""Runs pieces and yields each as it is complete, in any order."""
Session = Callable[[int], AbstractContextManager[None]]
"""Joins a Ray, or starts one with so many CPUs: `elastic_ring.runtime.driver.ray_session.cluster`."""
DECIDE_NOTHING = (
    *("sources", "out", "tokenizer", "end_of_document", "workers"),
    *("on_bad_input", "max_bad_share", "allow_left_out", "chat", "columns"),
)
"""Settings that do not change the result, or whose effect `Plan.settings` has as digests."""
MAX_NAMED = 100
"""How many kinds of bad input a manifest names."""


@dataclass(frozen=True)
class Plan:
    """The pieces in the order in which they are worked on, and what identifies the preparation, as JSON has it."""

    settings: dict[str, Any]
    input: str
    pieces: tuple[Piece, ...]
    groups: Mapping[str, Sequence[Group]]
    """Files that are used and left out, for the summary."""


def prepare(config: PrepareConfig, session: Session | None = None) -> Manifest:
    """Prepare a corpus, or go on with a preparation that was stopped, or find it complete.

    Deterministic: equal input and settings give a manifest with the same digest. `session` gives the Ray of a
    preparation with workers; it may be left out where this process has one. Raises ValueError for settings and input
    that cannot be used, StorageFailed for a folder that cannot be written.
    """
    tokenizer = open_tokenizer(config.tokenizer, config.end_of_document)
    chat = ChatTokenizer(config.tokenizer, config.end_of_document) if config.chat else None
    plan = plan_of(config, tokenizer, chat)
    storage = open_or_refuse(config.out, setting="out")
    if claim(storage, plan):
        log.info("%s is complete already", storage.at(MANIFEST))
        return read_manifest(f"{config.out.rstrip('/')}/{MANIFEST}")
    spread: Spread = _in_process
    within: AbstractContextManager[None] = nullcontext()
    workers = config.workers
    if workers is None and sum(piece.num_bytes for piece in plan.pieces) <= SMALL_BYTES:
        workers = 0  # Ray and its workers' imports would take longer
    if workers != 0:
        from elastic_ring.data.preparation.pipeline import over_cluster

        spread = partial(over_cluster, workers)
        within = nullcontext() if session is None else session(workers or os.cpu_count() or 1)
    job = Job(config, tokenizer.sha256, None if chat is None else chat.sha256)
    with within:
        if config.drop_duplicates:
            _find_duplicates(storage, job, plan, spread)
        manifest = _run(storage, job, plan, spread, tokenizer)
    storage.replace(MANIFEST, manifest.to_json())
    storage.remove_folder(DUPLICATES)
    return manifest


def plan_of(config: PrepareConfig, tokenizer: Tokenizer, chat: ChatTokenizer | None = None) -> Plan:
    """The work to do. Raises ValueError for sources without files."""
    for uri in config.sources:
        check_apart(uri, config.out)
    listings = [list_source(uri, allow_left_out=config.allow_left_out) for uri in config.sources]
    decides = dataclasses.asdict(config)
    for name in DECIDE_NOTHING:
        del decides[name]
    decides |= {"tokenizer_sha256": tokenizer.sha256, "weights": list(config.weights)}
    if chat is not None:
        decides |= {"chat_rules": RULES, "chat_sha256": chat.sha256, "columns": config.columns}
    facts = [[[file.name, file.kind, file.num_bytes] for file in listing.files] for listing in listings]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    pieces = [piece for index, listing in enumerate(listings) for piece in cut(listing, index, config.piece_bytes)]
    if config.weights:  # the sources of a mixture grow together; else one follows the other
        worked_bytes = [0.0] * len(listings)
        turns: dict[Piece, tuple[float, int]] = {}
        for piece in pieces:
            turns[piece] = (worked_bytes[piece.source] / config.weights[piece.source], piece.source)
            worked_bytes[piece.source] += max(piece.num_bytes, 1)
        pieces.sort(key=turns.__getitem__)
    groups = {"used": used_groups(listings), "left_out": left_out_groups(listings)}
    return Plan(json.loads(json.dumps(decides)), digest, tuple(pieces), groups)


def claim(storage: Storage, plan: Plan) -> bool:
    """Make the folder this preparation's; whether it is complete already.

    Raises ValueError for a folder with other files, or another preparation's.
    """
    identity = {"settings": plan.settings, "input": plan.input}
    if not storage.exists(PREPARATION):
        names = [name for name, _ in storage.names(recursive=False)] + storage.folders()
        names = [name for name in names if not name.startswith(".")]  # what a kill left of a file half written
        if names:
            raise ValueError(f"out={storage.uri!r}: holds other files ({names[0]}, ...); give an empty or a new folder")
        storage.create(PREPARATION, json.dumps(identity, indent=1, sort_keys=True).encode())
    try:
        stored = plain_json(storage.read_record(PREPARATION, MAX_MANIFEST_BYTES), MAX_MANIFEST_BYTES)
    except ValueError as error:
        raise ValueError(f"out={storage.uri!r}: {PREPARATION} cannot be read: {error}; give a new folder") from error
    if stored == identity:
        return storage.exists(MANIFEST)
    difference = f"its {PREPARATION} says something else"
    if isinstance(stored, dict) and isinstance(before := stored.get("settings"), dict):
        changed = [
            f"{name} was {before.get(name)}, is {value}"
            for name, value in plan.settings.items()
            if value != before.get(name)
        ]
        difference = "; ".join(changed) or "its input had other files or sizes"
    raise ValueError(f"out={storage.uri!r}: holds another preparation: {difference}; give a new folder")


# ------------------------------------------------------------ running


def _in_process(job: Job, task: Task, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, PieceRecord | None]]:
    worker = PieceWorker(job)
    for piece in pieces:
        yield piece, getattr(worker, task)(piece)


def _find_duplicates(storage: Storage, job: Job, plan: Plan, spread: Spread) -> None:
    """Write for each piece which of its documents came before, in this piece or an earlier one."""
    if storage.exists(f"{DUPLICATES}/found"):
        return
    stored = {name for name, _ in storage.names(DUPLICATES)}
    missing = [piece for piece in plan.pieces if digests_name(piece.name) not in stored]
    with _bar("looking for duplicates", plan.pieces, missing) as bar:
        for piece, _ in spread(job, "digest", missing):
            bar.update(piece.num_bytes)
    ordered = sorted(plan.pieces, key=lambda piece: piece.name)
    digests = [np.frombuffer(storage.read(digests_name(piece.name)), dtype="S16") for piece in ordered]
    first = np.unique(np.concatenate(digests), return_index=True)[1]
    repeated = np.ones(sum(map(len, digests)), dtype=bool)
    repeated[first] = False
    parts = np.split(repeated, np.cumsum([len(part) for part in digests])[:-1])
    for piece, part in zip(ordered, parts, strict=True):
        storage.replace(repeated_name(piece.name), np.flatnonzero(part).astype("<i8").tobytes())
    storage.replace(f"{DUPLICATES}/found", b"")


def _run(storage: Storage, job: Job, plan: Plan, spread: Spread, tokenizer: Tokenizer) -> Manifest:
    """Prepare the pieces that have no record; the manifest of all. On the way, complete beginnings get manifests, from
    which training may begin."""
    names = {name for name, _ in storage.names(PIECES)}
    there = [piece for piece in plan.pieces if record_name(piece.name) in names]
    with ThreadPoolExecutor(READ_AT_ONCE, thread_name_prefix="elastic-ring-records") as threads:
        records = {record.name: record for record in threads.map(lambda piece: read_record(storage, piece.name), there)}
    if records:
        log.info("going on: %d of %d pieces are there", len(records), len(plan.pieces))
    missing = [piece for piece in plan.pieces if piece.name not in records]
    complete = published = 0
    with _bar("preparing", plan.pieces, missing) as bar:
        for piece, record in spread(job, "prepare", missing):
            assert record is not None
            records[piece.name] = record
            bar.update(piece.num_bytes)
            while complete < len(plan.pieces) and plan.pieces[complete].name in records:
                complete += 1
            if complete < len(plan.pieces) and complete >= GROWTH * max(published, 1):
                begun = [records[piece.name] for piece in plan.pieces[:complete]]
                beginning = assemble(job.config, tokenizer, plan, begun, is_complete=False)
                if all(source.shards for source in beginning.sources):
                    storage.replace(f"manifest-{complete:06d}.json", beginning.to_json())
                published = complete
    for piece in plan.pieces:
        if piece.name not in records:
            raise ValueError(f"out={storage.uri!r}: piece {piece.name} has not been prepared; run the command again")
    return assemble(job.config, tokenizer, plan, [records[piece.name] for piece in plan.pieces])


def _bar(title: str, pieces: Sequence[Piece], missing: Sequence[Piece]) -> tqdm:
    total = sum(piece.num_bytes for piece in pieces)
    initial = total - sum(piece.num_bytes for piece in missing)
    return tqdm(desc=title, total=total, initial=initial, unit="B", unit_scale=True, unit_divisor=1024, disable=None)


# ------------------------------------------------------------ the manifest


def assemble(
    config: PrepareConfig, tokenizer: Tokenizer, plan: Plan, records: Sequence[PieceRecord], *, is_complete: bool = True
) -> Manifest:
    """The manifest of these pieces. Raises ValueError where a source of the whole has no document, no record has a
    column of `columns`, or more was skipped than is allowed."""
    records = sorted(records, key=lambda record: record.name)

    def shards_of(prefix: str) -> tuple[Shard, ...]:
        return tuple(shard for record in records if record.name.startswith(prefix) for shard in record.shards)

    if config.weights:
        names = [uri.rstrip("/").rpartition("/")[2] for uri in config.sources]
        numbered = [name if names.count(name) == 1 else f"{name}-{index}" for index, name in enumerate(names)]
        sources = tuple(
            PreparedSource(name, weight, shards_of(f"{index:03d}-"))
            for index, (name, weight) in enumerate(zip(numbered, config.weights, strict=True))
        )
    else:
        sources = (PreparedSource("all", None, shards_of("")),)
    dropped = _sum_of([record.dropped for record in records])
    if is_complete:
        for line, (_, count) in zip(dropped.bad, dropped.bad_kinds, strict=True):
            log.warning("left out: %s%s", line, f" ({count:,} of this kind)" if count > 1 else "")
        _check_bad_share(config, plan, dropped)
    empty = [source.name for source in sources if not source.shards]
    if empty and is_complete:
        raise ValueError(f"sources={config.sources!r}: {empty[0]} has no document; give text, or leave the source out")
    missing = set.intersection(*({*record.missing_columns} for record in records)) if records else set()
    if missing and is_complete:
        raise ValueError(
            f"columns={config.columns!r}: no record has {min(missing)!r}; mend the name or leave that part out, and "
            "prepare into a new folder"
        )
    lengths = [record.tokens_by_length for record in records if record.shards]
    return Manifest(
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        column=COLUMN,
        row_group_tokens=config.row_group_tokens,
        align_tokens=config.align_tokens,
        tokenizer_sha256=tokenizer.sha256,
        sources=sources,
        is_complete=is_complete,
        longest_document_tokens=max((record.longest_document_tokens for record in records), default=0),
        # None where pieces of an earlier version have not counted them.
        tokens_by_length=tuple(map(sum, zip_longest(*lengths, fillvalue=0))) if all(lengths) else (),
        dropped=dropped,
        about={
            "sources": list(map(shown, config.sources)),
            "tokenizer": config.tokenizer,
            "pyarrow": pa.__version__,
            "files": plan.groups,
        },
    ).sealed()


def _sum_of(parts: Sequence[Dropped]) -> Dropped:
    """What all pieces left out; of each kind of bad input the first in order."""
    lines, kinds = dict[str, str](), Counter[str]()
    for part in parts:
        # Earlier versions named each, and no kinds.
        for line, (kind, count) in zip(part.bad, part.bad_kinds or [(line, 1) for line in part.bad], strict=True):
            lines.setdefault(kind, line)
            kinds[kind] += count
    names = list(lines)[:MAX_NAMED]
    counts = [each.name for each in dataclasses.fields(Dropped) if not each.name.startswith("bad")] + ["bad_bytes"]
    return Dropped(
        bad=tuple(lines[kind] for kind in names),
        bad_kinds=tuple((kind, kinds[kind]) for kind in names),
        **{name: sum(getattr(part, name) for part in parts) for name in counts},
    )


def _check_bad_share(config: PrepareConfig, plan: Plan, dropped: Dropped) -> None:
    """Raises ValueError where more was skipped than is allowed."""
    total_bytes = sum(piece.num_bytes for piece in plan.pieces)
    share, amount = max(
        (
            dropped.num_bad_records / max(dropped.num_records, 1),
            f"{dropped.num_bad_records:,} of {dropped.num_records:,} records",
        ),
        (
            dropped.bad_bytes / max(total_bytes, 1),
            f"{dropped.bad_bytes:,} of {total_bytes:,} bytes, whole files,",
        ),
    )
    if share > config.max_bad_share:
        raise ValueError(
            f"max_bad_share={config.max_bad_share}: {amount} ({share:.1%}) are bad; the first: {dropped.bad[0]}. Mend "
            "the input, or allow more: --max-bad-share; what is prepared is kept"
        )
