"""Tokenizers: one token a byte, or a tokenizer saved in a local folder. No files of the corpus in here.

`tokenizers` and `transformers` are the extra `huggingface`, imported only where a folder is opened. Nothing is fetched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elastic_ring.data.packing import BYTE_VOCAB_SIZE, END_OF_DOCUMENT, Tokens
from elastic_ring.files import check_links, check_model_links, name_below, plain_json, read_small

BYTES = "bytes"
PART_BYTES = 1 << 20
"""Longer documents are cut for a folder's tokenizer, at the end of a line where there is one: its time and memory grow
with the length of a text."""
FAST, CONFIG = "tokenizer.json", "tokenizer_config.json"
_OF_MODELS = ("config.json", "generation_config.json")
_VOCABULARY = (".json", ".model", ".txt", ".tiktoken")


Encode = Callable[[list[str]], list[list[int]]]
"""(texts) -> token ids of each, without special tokens."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of `tokenizers` or `transformers` by its `encode_texts`; without that, a byte is a token. `sha256`
    identifies what it does."""

    vocab_size: int
    end_of_document: int
    sha256: str
    encode_texts: Encode | None = None

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        """The tokens of each document, without an end. Raises UnicodeDecodeError for one that is no UTF-8, unless a
        byte is a token."""
        if self.encode_texts is None:
            return [np.frombuffer(document, dtype=np.uint8).astype(np.int32) for document in documents]
        parts = [list(parts_of(document)) for document in documents]
        encoded = iter(self.encode_texts([part.decode("utf-8") for of_document in parts for part in of_document]))
        return [
            np.concatenate([np.empty(0, np.int32), *(np.asarray(next(encoded), dtype=np.int32) for _ in of_document)])
            for of_document in parts
        ]


BYTE_TOKENIZER = Tokenizer(BYTE_VOCAB_SIZE, END_OF_DOCUMENT, hashlib.sha256(b"bytes 257 256").hexdigest())


def parts_of(document: bytes, limit: int = PART_BYTES) -> Iterator[bytes]:
    """A document in parts of at most `limit` bytes, each whole lines, words or at least whole characters."""
    start = 0
    while len(document) - start > limit:
        stop = start + limit
        for sign in (b"\n", b" "):
            at = document.rfind(sign, start + 1, stop)
            if at > start:
                stop = at + 1 if sign == b"\n" else at  # a word's token begins with its space
                break
        while stop > start + 1 and document[stop] & 0xC0 == 0x80:  # inside a character
            stop -= 1
        yield document[start:stop]
        start = stop
    yield document[start:]


def open_tokenizer(where: str, end_of_document: str | None = None) -> Tokenizer:
    """`bytes`, or the tokenizer in a local folder. `end_of_document` names the token that ends a document; by default
    the folder's own end-of-sequence token.

    Raises ValueError for a folder without a tokenizer or without such a token, ModuleNotFoundError without the extra.
    """
    if where == BYTES:
        if end_of_document is not None:
            raise ValueError(
                f"end_of_document={end_of_document!r}: the byte tokenizer has one of its own; leave it out"
            )
        return BYTE_TOKENIZER
    folder = Path(where).expanduser()
    if not folder.is_dir():
        raise ValueError(f"tokenizer={where!r}: no such folder; give bytes, or a folder with a saved tokenizer")
    check_model_links(folder)
    fast = folder / FAST
    if not fast.exists() and not any((folder / name).exists() for name in (CONFIG, "tokenizer.model", "vocab.json")):
        raise ValueError(f"tokenizer={where!r}: holds no {FAST} and no other tokenizer's files")
    ids, encode = _open_fast(fast) if fast.exists() else _open_slow(folder)
    token = end_of_document or None
    for path in (folder / CONFIG, folder / "special_tokens_map.json"):
        if token is None and path.exists():
            try:
                saved = plain_json(read_small(path)).get("eos_token")
            except (OSError, ValueError, AttributeError) as error:  # no JSON, no UTF-8, no object
                raise ValueError(f"tokenizer={where!r}: {path.name} cannot be read: {error}") from error
            saved = saved.get("content") if isinstance(saved, dict) else saved
            token = None if saved is None else str(saved)
    if token is None:
        raise ValueError(
            f"tokenizer={where!r}: names no eos_token; say which token ends a document (--end-of-document)"
        )
    if token not in ids:
        raise ValueError(
            f"tokenizer={where!r}: has no token {token!r}; say which one ends a document (--end-of-document)"
        )
    return Tokenizer(max(ids.values()) + 1, ids[token], folder_digest(folder, ids[token]), encode)


def _open_fast(path: Path) -> tuple[dict[str, int], Encode]:
    from tokenizers import Tokenizer as Fast

    try:
        fast = Fast.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"tokenizer={str(path.parent)!r}: {path.name} cannot be read: {error}") from error
    fast.encode_special_tokens = True  # "<|endoftext|>" in a document is text
    fast.no_truncation()
    fast.no_padding()

    def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in fast.encode_batch_fast(texts, add_special_tokens=False)]

    return fast.get_vocab(with_added_tokens=True), encode


def open_saved(folder: str | Path) -> Any:
    """The tokenizer of `transformers` in a local folder, without code of its own. Raises ValueError."""
    from transformers import AutoTokenizer

    config = Path(folder).expanduser() / CONFIG
    try:
        names = plain_json(read_small(config)).get("fast_tokenizer_files", ()) if config.exists() else ()
        check_links(config.parent, [config.parent / name_below(name) for name in names])  # which transformers opens
        return AutoTokenizer.from_pretrained(Path(folder).expanduser(), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as many classes as there are tokenizers
        raise ValueError(f"tokenizer={str(folder)!r}: cannot be read: {error}") from error


def _open_slow(folder: Path) -> tuple[dict[str, int], Encode]:
    slow = open_saved(folder)

    def encode(texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        ids: list[list[int]] = slow(texts, add_special_tokens=False, split_special_tokens=True, truncation=False)[
            "input_ids"
        ]
        return ids

    return slow.get_vocab(), encode


def folder_digest(folder: Path, end: int) -> str:
    """SHA-256 of the files that decide about tokens, and of a document's end; a model beside them does not count."""
    fast = (folder / FAST).exists()
    names = [FAST] if fast else sorted(path.name for path in folder.iterdir() if path.suffix in _VOCABULARY)
    total = hashlib.sha256(f"end {end}".encode())
    for name in names:
        if name not in _OF_MODELS and not name.endswith(".index.json"):
            data = (folder / name).read_bytes()
            total.update(f"{name} {len(data)} ".encode() + data)
    return total.hexdigest()
