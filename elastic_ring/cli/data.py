"""Prepare documents for training: `elastic-ring data prepare` turns them into token shards and a manifest.

    elastic-ring data prepare --source corpus/ --tokenizer bytes --out prepared/
    elastic-ring train --data prepared/manifest.json

A preparation that was stopped or killed goes on when it is started again with the same settings. The last line is the
manifest's digest. Exits 0 when it is complete, 1 when it failed, 2 for a wrong setting or bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args, get_type_hints

from elastic_ring.cli import refused
from elastic_ring.data.preparation import PrepareConfig
from elastic_ring.validation import docstrings, from_plain

if TYPE_CHECKING:
    from elastic_ring.data.manifest import Manifest
    from elastic_ring.data.whole import Long

CONTEXTS = (2_048, 8_192, 32_768)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="elastic-ring data", description=(__doc__ or "").split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    says = "read documents, tokenise them, write token shards and a manifest"
    prepare = verbs.add_parser("prepare", help=says, description=says)
    add = prepare.add_argument
    add(
        "--source",
        required=True,
        action="append",
        metavar="URI[,URI...]",
        help="files, folders, patterns or saved datasets, separated by commas or each with a --source of its own",
    )
    says = "train on the sources in this proportion; all are one if left out"
    add("--weights", default="", metavar="W[,W...]", help=says)
    types, fields = get_type_hints(PrepareConfig), {field.name: field for field in dataclasses.fields(PrepareConfig)}
    for name, text in docstrings(PrepareConfig).items():
        kinds, default = get_args(types[name]) or (types[name],), fields[name].default
        if name in ("sources", "weights"):
            continue
        if bool in kinds:
            add(f"--{name.replace('_', '-')}", action="store_true", help=text)
        else:
            kind = next((kind for kind in (int, float) if kind in kinds), str)
            shown = "" if default in (None, dataclasses.MISSING) else f" ({default})"
            required = default is dataclasses.MISSING
            add(f"--{name.replace('_', '-')}", type=kind, required=required, help=f"{text}{shown}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = parser().parse_args(argv)
    from elastic_ring.errors import ElasticRingError

    try:
        print("\n".join(report(_prepare(options), options.out)))
    except (ValueError, ElasticRingError, KeyboardInterrupt) as error:
        return refused("elastic-ring data prepare", error, "stopped; the same command goes on from here")
    return 0


def _prepare(options: argparse.Namespace) -> Manifest:
    from elastic_ring.data.preparation.prepare import prepare

    config = config_of(options)
    if config.workers == 0:
        return prepare(config)
    from elastic_ring.config import environment
    from elastic_ring.runtime.driver.ray_session import cluster

    # Ray writes a line marked as an error for every pool of Ray Data, since its actors may restart.
    environment().setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    return prepare(config, cluster)


def config_of(options: argparse.Namespace) -> PrepareConfig:
    """The settings of `data prepare`. Raises ValueError for wrong ones."""
    values = {
        name: value
        for name, value in vars(options).items()
        if name not in ("verb", "source", "weights") and value is not None
    }
    try:
        weights = [float(weight) for weight in options.weights.split(",") if weight]
    except ValueError as error:
        raise ValueError(f"--weights {options.weights}: write numbers, separated by commas") from error
    return from_plain(PrepareConfig, {**values, "sources": sources_of(options.source), "weights": weights})


def sources_of(texts: Sequence[str]) -> list[str]:
    """The sources that were given. A name that has a comma stays whole where there is such a file or folder."""
    from elastic_ring.data.listing import exists

    return [uri for text in texts for uri in ([text] if "," in text and exists(text) else text.split(","))]


def report(manifest: Manifest, out: str) -> list[str]:
    """Lines on the result, on what was left out, and where the manifest is; its digest last."""
    from elastic_ring.data.listing import summary
    from elastic_ring.data.manifest import MANIFEST
    from elastic_ring.data.prepared import long_shares

    dropped, uri = manifest.dropped, f"{out.rstrip('/')}/{MANIFEST}"
    lines = [
        f"{manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens in {manifest.num_shards} shards; "
        f"vocabulary {manifest.vocab_size:,}, the longest document has {manifest.longest_document_tokens:,} tokens",
        f"left out: {dropped.num_duplicates:,} duplicates, {dropped.num_empty_documents:,} empty documents, "
        f"{dropped.num_empty_files} empty files, {max(dropped.num_bad - dropped.num_empty_files, 0):,} bad inputs",
    ]
    if manifest.num_counted is not None:
        share = manifest.num_counted / max(manifest.num_tokens, 1)
        lines.append(f"{manifest.num_counted:,} of the tokens count in the loss ({share:.1%})")
        num_left_out = dropped.num_bad_records + dropped.num_duplicates + dropped.num_empty_documents
        if manifest.num_documents > (num_records := dropped.num_records - num_left_out) > 0:
            lines.append(
                f"{num_records:,} conversations are {manifest.num_documents:,} documents: the chat template writes "
                "earlier turns anew, and each counts as it was generated"
            )
        if manifest.has_index:  # pieces of an earlier version have none
            lines += _long_lines(manifest, long_shares(uri, manifest, CONTEXTS))
    for title, groups in manifest.about.get("files", {}).items():
        lines += summary(title.replace("_", " "), groups)
    if len(manifest.sources) > 1:
        total = sum(source.weight or 0.0 for source in manifest.sources)
        lines += [
            f"source {source.name}: {source.num_tokens:,} tokens, {(source.weight or 0.0) / total:.1%} of training"
            for source in manifest.sources
        ]
    return [*lines, uri, manifest.digest]


def _long_lines(manifest: Manifest, longs: Sequence[Long]) -> list[str]:
    """How many conversations are longer than the sequences of some contexts."""
    num_documents, num_counted = max(manifest.num_documents, 1), max(manifest.num_counted or 0, 1)
    return [
        f"--context {context}: {long.num_documents / num_documents:.1%} of the conversations are longer, with "
        f"{long.num_counted / num_counted:.1%} of the counted tokens; cut at turns, "
        f"{long.num_left_out / num_counted:.1%} have no room with their prompt"
        for context, long in zip(CONTEXTS, longs, strict=True)
    ]
