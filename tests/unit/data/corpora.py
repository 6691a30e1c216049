"""Small corpora in every format, and the documents of a prepared one read back without the package's own reader."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_ring.data.manifest import Manifest, PreparedSource
from elastic_ring.data.packing import END_OF_DOCUMENT
from elastic_ring.data.preparation.prepare import PrepareConfig, prepare


def texts(number: int, start: int = 0) -> list[str]:
    """Different documents of a few to a few hundred bytes, some not ASCII."""
    letters = "abcdefghijklmnopqrstuvwxyzäöü "
    return [f"{i}: " + "".join(random.Random(i).choices(letters, k=i * 31 % 300)) for i in range(start, start + number)]


def write_jsonl(path: Path, documents: Sequence[str | None], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(documents)).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_table(path: Path, documents: Sequence[str | None], rows: int = 7, kind: Any = None) -> Path:
    """Parquet, an Arrow file (.arrow) or an Arrow stream (.ipc)."""
    table = pa.table({"id": list(range(len(documents))), "text": pa.array(documents, kind or pa.string())})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows)
        return path
    new = pa.ipc.new_file if path.suffix == ".arrow" else pa.ipc.new_stream
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def trained_bpe(*special_tokens: str) -> Any:
    """A byte-level BPE of 400 tokens."""
    import tokenizers

    bpe, level = tokenizers.Tokenizer(tokenizers.models.BPE()), tokenizers.pre_tokenizers.ByteLevel
    bpe.pre_tokenizer, bpe.decoder = level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    settings = {"vocab_size": 400, "special_tokens": list(special_tokens), "initial_alphabet": level.alphabet()}
    bpe.train_from_iterator(texts(200), tokenizers.trainers.BpeTrainer(**settings, show_progress=False))
    return bpe


def prepared(out: Path | str, *sources: Path | str, **settings: Any) -> Manifest:
    """A preparation in this process, with pieces and row groups so small that there are several."""
    small: dict[str, Any] = {"workers": 0, "piece_bytes": 2000, "row_group_tokens": 64, **settings}
    return prepare(PrepareConfig(tuple(str(source) for source in sources), str(out), **small))


def tokens_of(out: Path, source: PreparedSource) -> list[list[int]]:
    """The documents' tokens, each with its end, as the shards' rows give them."""
    documents: list[list[int]] = []
    for shard in source.shards:
        table = pq.read_table(out / "shards" / shard.name)
        for tokens, offset in zip(table["tokens"].to_pylist(), table["offset"].to_pylist(), strict=True):
            if offset == 0:
                documents.append([])
            assert len(documents[-1]) == offset
            documents[-1] += tokens
    return documents


def texts_of(out: Path, source: PreparedSource) -> list[str]:
    """The documents of a preparation with the byte tokenizer."""
    ended = tokens_of(out, source)
    assert all(tokens[-1] == END_OF_DOCUMENT for tokens in ended)
    return [bytes(token for token in tokens if token != END_OF_DOCUMENT).decode() for tokens in ended]
