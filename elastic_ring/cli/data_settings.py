"""The settings of a run's corpus, and what a manifest says in their place. No torch and no Ray in here."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from elastic_ring.config import StepConfig
from elastic_ring.files import absolute, shown_url
from elastic_ring.model.config import ModelConfig
from elastic_ring.validation import Flag, NonNegativeInt, PositiveInt, settings

if TYPE_CHECKING:
    from elastic_ring.data.source import SourceConfig


@settings
class DataConfig:
    """The corpus. Its sequences have step.context_tokens tokens."""

    _prefix: ClassVar[str] = "data."

    source: Literal["stdlib", "text", "shards", "prepared"] = "stdlib"
    """stdlib: Python's own library; text: files as bytes (paths); shards: Parquet or Arrow files of tokens (uri);
    prepared: what elastic-ring data prepare wrote (uri of its manifest, which has the settings below)."""
    paths: tuple[str, ...] = ()
    """Files of text or records, directories or glob patterns, local or as URIs."""
    uri: str = ""
    """A token shard, a directory of them, or a manifest."""
    digest: str = ""
    """The manifest's; another one is refused. Taken from it if left out."""
    column: str = "tokens"
    """Column of the shards with a list of tokens a row."""
    vocab_size: PositiveInt | None = None
    """Vocabulary of the shards; the model's if left out."""
    end_of_document: NonNegativeInt | None = None
    """Token put after each row of the shards; 256 for bytes, to be given for any other vocabulary."""
    rows_end_documents: bool = False
    """The rows of the shards end in end_of_document already."""
    align_tokens: Annotated[PositiveInt, Flag("align_tokens")] = 1
    """Fill documents up to multiples of this; 128 for patterns on GPUs."""
    allow_left_out: bool = False
    """Go on where a folder or pattern has more bytes that are no text than it has text."""
    packing: Annotated[Literal["auto", "whole", "stream"], Flag("packing")] = "auto"
    """Of a prepared corpus: whole documents, or one stream that is cut anywhere; auto: conversations whole."""
    long_documents: Annotated[Literal["cut", "leave_out"], Flag("long_documents")] = "cut"
    """Of packing whole: documents longer than a sequence are cut, conversations at turns, or left out."""

    def __post_init__(self) -> None:
        # Other processes, and later submissions, have other working directories.
        object.__setattr__(self, "paths", tuple(map(absolute, self.paths)))
        object.__setattr__(self, "uri", absolute(self.uri))


@settings
class SetConfig:
    """A set of the validations as `--validate` names it; without data: held-out sequences."""

    _prefix: ClassVar[str] = "validate."

    name: str
    data: str = ""
    weight: float = 1.0
    sequences: PositiveInt | None = None

    def __str__(self) -> str:
        data = f"={absolute(self.data)}" if self.data else ""
        weight = f",weight={self.weight:g}" if self.weight != 1.0 else ""
        return f"{self.name}{data}{weight}{f',sequences={self.sequences}' if self.sequences else ''}"


def validation_sets(text: str) -> list[SetConfig]:
    """The sets that `--validate` names. Raises ValueError for text that names none."""
    sets = []
    for item in text.split(";"):
        first, *rest = item.strip().split(",")
        name, _, data = first.partition("=")
        plain: dict[str, Any] = {"name": name.strip(), "data": data.strip()}
        for option in rest:
            key, equals, value = option.strip().partition("=")
            try:
                plain[key] = int(value) if key == "sequences" else float(value) if key == "weight" else value
            except ValueError:
                equals = ""
            if not equals or key not in ("weight", "sequences"):
                raise ValueError(
                    f"validate={text!r}: {option.strip()!r} is not weight=NUMBER or sequences=COUNT: write NAME=DATA,"
                    "weight=2,sequences=64, sets separated by ;"
                )
        sets.append(SetConfig(**plain))
    names = [entry.name for entry in sets]
    if "" in names or len({*names}) < len(names):
        raise ValueError(
            f"validate={text!r}: each set needs a name of its own: NAME=DATA, or NAME for what is held out"
        )
    return sets


OF_MANIFEST: Mapping[str, Any] = {
    "digest": "",
    "column": "tokens",
    "vocab_size": None,
    "end_of_document": None,
    "align_tokens": 1,
}
"""The settings that a manifest has, with their defaults."""


def data_flag(text: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What --data means, over what is `given` so far: what belongs to another manifest does not stay."""
    from elastic_ring.data.manifest import is_manifest

    if text.startswith("shards:"):
        return {"source": "shards", "uri": text.removeprefix("shards:")}
    if not is_manifest(text):
        return {"source": "text", "paths": [text]}
    other = values["source"] == "prepared" and absolute(values["uri"]) != absolute(text)
    return {"source": "prepared", "uri": text, **(dict(OF_MANIFEST) if other else {})}


def prepared_data(
    data: DataConfig, model: ModelConfig, *, vocabulary_is_chosen: bool
) -> tuple[DataConfig, ModelConfig]:
    """Both with what the manifest says; the model's vocabulary becomes the manifest's unless it was chosen.

    Raises ValueError for a manifest that cannot be read or is another one, and settings that contradict it.
    """
    from elastic_ring.data.filesystem import at_submission
    from elastic_ring.data.manifest import read_manifest

    manifest = at_submission(lambda: read_manifest(data.uri))
    if data.digest not in ("", manifest.digest):
        raise ValueError(
            f"data.digest={data.digest[:16]}...: {shown_url(data.uri)} has {manifest.digest[:16]} now: restore the "
            "manifest, or start a run of another name without it"
        )
    says = {name: getattr(manifest, name) for name in OF_MANIFEST if name != "digest"}
    for name, value in says.items():
        if getattr(data, name) not in (OF_MANIFEST[name], value):
            way_out = " (prepare it anew with --align-tokens)" if name == "align_tokens" else ": leave it out"
            raise ValueError(f"data.{name}={getattr(data, name)!r}: {shown_url(data.uri)} has {value!r}{way_out}")
    if not vocabulary_is_chosen:
        model = dataclasses.replace(model, vocab_size=manifest.vocab_size)
    return dataclasses.replace(data, digest=manifest.digest, **says), model


def data_source(data: DataConfig, model: ModelConfig, step: StepConfig) -> SourceConfig:
    """The corpus that the settings name. Raises ValueError for one that does not suit the model's vocabulary."""
    from elastic_ring.data.filesystem import at_submission
    from elastic_ring.data.manifest import read_manifest
    from elastic_ring.data.packing import BYTE_VOCAB_SIZE, END_OF_DOCUMENT
    from elastic_ring.data.prepared import packing_of
    from elastic_ring.data.source import PreparedTokens, StdlibText, TextFiles, TokenShards

    if data.packing == "whole" and data.source != "prepared":
        raise ValueError(
            f"data.packing='whole' with data.source={data.source!r}: only a prepared corpus has the lengths of its "
            "documents: prepare it with elastic-ring data prepare, or leave --packing out"
        )
    if data.long_documents != "cut" and (data.source != "prepared" or data.packing == "stream"):
        raise ValueError(
            f"data.long_documents={data.long_documents!r}: belongs to packing whole documents of a prepared corpus; "
            "leave --long-documents out"
        )
    if data.source == "stdlib":
        return StdlibText(step.context_tokens, data.align_tokens)
    if data.source == "text":
        return TextFiles(step.context_tokens, data.paths, data.align_tokens, data.allow_left_out)
    if data.source == "prepared":
        manifest = at_submission(lambda: read_manifest(data.uri))
        if manifest.vocab_size > model.vocab_size:
            raise ValueError(
                f"{shown_url(data.uri)}: has tokens of a vocabulary of {manifest.vocab_size:,}, and the model has rows "
                f"for model.vocab_size={model.vocab_size:,}: prepare the corpus with the model's tokenizer, or leave "
                "--model.vocab-size out"
            )
        logging.info(
            "%s: %s documents, %s tokens, vocabulary %s%s",
            shown_url(data.uri),
            f"{manifest.num_documents:,}",
            f"{manifest.num_tokens:,}",
            f"{manifest.vocab_size:,}",
            "" if manifest.is_complete else "; the complete beginning of a preparation",
        )
        assert data.vocab_size is not None
        sizes, packing = (data.vocab_size, data.align_tokens), packing_of(manifest, data.packing)
        corpus = PreparedTokens(
            step.context_tokens, data.uri, data.digest, *sizes, packing=packing, long_documents=data.long_documents
        )
        at_submission(lambda: corpus.log_documents(manifest))
        return corpus
    vocab_size = data.vocab_size or model.vocab_size
    if vocab_size > model.vocab_size:
        raise ValueError(
            f"data.vocab_size={vocab_size} is more than model.vocab_size={model.vocab_size}: the model needs a row for "
            "each token; raise model.vocab_size"
        )
    end = data.end_of_document
    if end is None and vocab_size != BYTE_VOCAB_SIZE:
        raise ValueError(
            f"data.end_of_document is not given for shards of data.vocab_size={vocab_size}: give the tokenizer's "
            "(--data.end-of-document ID)"
        )
    return TokenShards(
        step.context_tokens,
        data.uri,
        data.column,
        vocab_size,
        END_OF_DOCUMENT if end is None else end,
        data.rows_end_documents,
        data.align_tokens,
    )
