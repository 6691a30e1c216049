"""A Ray or Hugging Face dataset as training data: its documents are written out and prepared as any corpus.

A run reads sequence i again on whatever rank needs it, so its data must have a sequence i. A dataset in memory has; an
iterable that is read once has not, and is refused. Neither Ray nor `datasets` is imported here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_ring.config import StepConfig
from elastic_ring.data.manifest import MANIFEST
from elastic_ring.data.packing import check_context
from elastic_ring.data.preparation import chat_columns
from elastic_ring.data.preparation.chat import ChatTokenizer, Conversations
from elastic_ring.data.preparation.documents import Content, TextIn
from elastic_ring.data.preparation.prepare import PrepareConfig, Session, prepare
from elastic_ring.data.prepared import PreparedTokens
from elastic_ring.data.tokenizer import BYTES, open_tokenizer
from elastic_ring.files import plain_json
from elastic_ring.state.storage.folder import Storage
from elastic_ring.validation import from_plain, settings

log = logging.getLogger(__name__)

INPUT_RECORD = "input.json"
INPUT, TOKENS = "input", "tokens"
FILE_BYTES = 32 << 20
NUM_ROWS = 1000
DATASETS = {"ray.data.dataset.Dataset": "Ray", "datasets.arrow_dataset.Dataset": "Hugging Face"}
READ_ONCE = {
    "datasets.iterable_dataset.IterableDataset": "a streamed Hugging Face dataset",
    "ray.data.iterator.DataIterator": "an iterator of a Ray dataset",
    "torch.utils.data.dataset.IterableDataset": "an IterableDataset of torch",
    "torch.utils.data.dataloader.DataLoader": "a DataLoader",
}


@dataclass(frozen=True)
class DatasetTokens:
    """A `ray.data.Dataset` or `datasets.Dataset` with documents in `text_column`; with `chat`, one of conversations in
    any form that `data prepare --chat` reads (`columns` as there), or a list of such records.

    `fit` begins by writing them out beside the run's folder and preparing them with `tokenizer` (`bytes`, or a folder).
    """

    dataset: Any
    context_tokens: int
    tokenizer: str = BYTES
    text_column: str = "text"
    end_of_document: str | None = None
    align_tokens: int = 1
    chat: bool = False
    columns: str = ""

    def __post_init__(self) -> None:
        check_context(self.context_tokens, self.align_tokens)
        is_list = self.chat and isinstance(self.dataset, list)
        if not is_list and kind_of(self.dataset) is None:
            raise ValueError(
                f"DatasetTokens dataset is a {type(self.dataset).__name__}: give a ray.data.Dataset or a "
                "datasets.Dataset, or with chat=True a list of records"
            )
        if is_list and not all(isinstance(row, Mapping) for row in self.dataset):
            raise ValueError("DatasetTokens dataset has rows that are no mapping: give records, as {'messages': [...]}")
        self.config("input", "output")

    def config(self, uri: str, out: str) -> PrepareConfig:
        """How its documents are prepared. Raises ValueError for settings that do not go together."""
        return PrepareConfig(
            (uri,),
            out,
            tokenizer=self.tokenizer,
            text_column=self.text_column,
            chat=self.chat,
            columns=self.columns,
            end_of_document=self.end_of_document,
            align_tokens=self.align_tokens,
        )

    @property
    def vocab_size(self) -> int:
        return open_tokenizer(self.tokenizer, self.end_of_document).vocab_size

    def open(self) -> Any:
        """Raises ValueError: only `fit` knows where to write."""
        raise ValueError("DatasetTokens: is opened by ElasticRingTrainer.fit, which writes the dataset out first")


def as_source(data: Any, step: StepConfig) -> Any:
    """`data`, or a dataset as `DatasetTokens`. Raises ValueError for a dataset that can be read only once."""
    if kind_of(data) is not None:
        return DatasetTokens(data, step.context_tokens)
    names = _names(data)
    if "datasets.dataset_dict.DatasetDict" in names:
        raise ValueError(
            f"data is a DatasetDict of {', '.join(data)}: give one of its datasets, data[{next(iter(data))!r}]"
        )
    is_iterator = "an iterator" if hasattr(data, "__next__") else None
    once = next((kind for name, kind in READ_ONCE.items() if name in names), is_iterator)
    if once is not None:
        raise ValueError(
            f"data is {once}, which can be read only once and in one order: after a failure a step is run again on "
            "other ranks, which must read its sequences anew. Give the dataset itself, or prepare its text with "
            "elastic-ring data prepare"
        )
    return data


def kind_of(data: Any) -> str | None:
    """Whose dataset it is; None for anything else."""
    return next((kind for name, kind in DATASETS.items() if name in _names(data)), None)


def _names(data: Any) -> set[str]:
    return {f"{cls.__module__}.{cls.__qualname__}" for cls in type(data).__mro__}


@settings
class InputRecord:
    """What the folder was written from: the digest of the documents in order, and what decides about their tokens."""

    sha256: str
    num_documents: int
    settings: Mapping[str, str | int]


def materialised(source: DatasetTokens, uri: str, session: Session | None = None) -> PreparedTokens:
    """The dataset as a prepared corpus under `uri`, written there unless it is there already.

    `session`: as for `prepare`. Raises ValueError for a dataset without text, and where `uri` has other documents or
    other settings.
    """
    storage, kind = Storage(uri).open(), kind_of(source.dataset) or "chat"
    opened = ChatTokenizer if source.chat else open_tokenizer
    tokenizer = opened(source.tokenizer, source.end_of_document)
    name, column = ("columns", source.columns) if source.chat else ("text_column", source.text_column)
    named = {"tokenizer": tokenizer.sha256, name: column}
    decides: Mapping[str, str | int] = {**named, "align_tokens": source.align_tokens}
    if storage.exists(INPUT_RECORD):
        try:
            record = from_plain(InputRecord, plain_json(storage.read_record(INPUT_RECORD)))
        except ValueError as error:
            raise ValueError(
                f"{storage.at(INPUT_RECORD)}: does not say what was written there; give a run of another name"
            ) from error
        if record.settings != decides:
            raise ValueError(f"{uri}: was prepared with {record.settings}, not {decides}; give a run of another name")
        total = hashlib.sha256()
        for column in _columns(source):
            _add(total, column)
        if total.hexdigest() != record.sha256:
            raise ValueError(
                f"{uri}: the dataset has other documents, or another order, than when it was written there: a corpus "
                "must not change under a run; give the same (a shuffle needs a seed), or a run of another name"
            )
        log.info("the %s dataset is in %s, written by an earlier submission", kind, uri)
    else:
        log.info("the %s dataset is written to %s and prepared there, since a run reads by index", kind, uri)
        storage.remove_folder(INPUT)  # what a kill left
        sha256, num_documents = _write(source, storage)
        record = InputRecord(sha256, num_documents, decides)
        storage.replace(INPUT_RECORD, json.dumps(dataclasses.asdict(record)).encode())
    if not storage.exists(f"{TOKENS}/{MANIFEST}"):
        prepare(source.config(f"{uri}/{INPUT}", f"{uri}/{TOKENS}"), session)
        storage.remove_folder(INPUT)
    return PreparedTokens.of(f"{uri}/{TOKENS}/{MANIFEST}", source.context_tokens)


def _write(source: DatasetTokens, storage: Storage) -> tuple[str, int]:
    """Write the documents as Parquet files, conversations as JSON lines. Gives their digest and number."""
    total, num_documents, num_files = hashlib.sha256(), 0, 0
    columns: list[Any] = []

    def write_file() -> None:
        name = f"{INPUT}/part-{num_files:06d}"
        if source.chat:
            lines = "".join(f"{line}\n" for column in columns for line in column.to_pylist())
            storage.replace(f"{name}.jsonl", lines.encode())
            return
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({source.text_column: pa.chunked_array(columns)}), sink, compression="zstd")
        storage.replace(f"{name}.parquet", sink.getvalue().to_pybytes())

    for column in _columns(source):
        _add(total, column)
        num_documents += len(column)
        columns.append(column)
        if sum(part.nbytes for part in columns) >= FILE_BYTES:
            write_file()
            columns, num_files = [], num_files + 1
    if columns:
        write_file()
    if not num_documents:
        raise ValueError("the dataset has no rows: give documents")
    return total.hexdigest(), num_documents


def _add(total: Any, column: Any) -> None:
    """Add lengths and bytes of the documents, so that neither a moved boundary nor a null goes unnoticed."""
    for document in column.to_pylist():
        data = b"" if document is None else document.encode()
        total.update((-1 if document is None else len(data)).to_bytes(8, "little", signed=True) + data)


def _columns(source: DatasetTokens) -> Iterator[Any]:
    """The documents in order, a batch at a time, as Arrow text; conversations as JSON."""
    dataset, name = source.dataset, source.text_column
    content = Conversations(chat_columns(source.columns)) if source.chat else TextIn(name)
    if isinstance(dataset, list):
        batches = (dataset[start : start + NUM_ROWS] for start in range(0, len(dataset), NUM_ROWS))
        yield from (_lines(rows, content) for rows in batches)
        return
    of_ray = kind_of(dataset) == "Ray"
    names = dataset.columns() if of_ray else dataset.column_names
    if not (columns := [column for column in content.columns if column in names]):
        raise ValueError(
            f"the dataset has no column {' or '.join(map(repr, content.columns))}: it has {', '.join(names)}; give "
            "DatasetTokens(dataset, context_tokens, text_column=...), or chat=True for conversations (columns=...)"
        )
    columns += [column for column in content.optional_columns if column in names]
    if of_ray:
        dataset = dataset.select_columns(columns)
        dataset.context.execution_options.preserve_order = True  # by default rows come as they are ready
        tables = dataset.iter_batches(batch_size=NUM_ROWS, batch_format="pyarrow")
    else:
        tables = dataset.select_columns(columns).with_format("arrow").iter(NUM_ROWS)
    for table in tables:
        try:
            texts = pa.chunked_array([_lines(table.to_pylist(), content)]) if source.chat else table.column(name)
            yield from texts.cast(pa.large_string()).chunks
        except pa.ArrowException as error:
            raise ValueError(f"the dataset's column {name!r} is no text: {error}") from error


def _lines(rows: Sequence[Mapping[str, object]], content: Content) -> Any:
    """Each record as a line of JSON, with the columns of conversations alone."""
    names = (*content.columns, *content.optional_columns)
    parts = ({name: row[name] for name in names if row.get(name) is not None} for row in rows)
    return pa.array(map(json.dumps, parts), pa.large_string())
