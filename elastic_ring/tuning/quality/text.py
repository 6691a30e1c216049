"""Long real documents for the trailing-token loss: the standard library's sources, in path order.

`long_range_bits` checks that distant text helps at all: without long-range signal in the corpus every window would
look perfect. Nothing is trained in here.
"""

from __future__ import annotations

import lzma
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic_ring.data.source import SourceConfig, StdlibText, open_source

Tokens = NDArray[np.int64]
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 20}]


@dataclass(frozen=True)
class Corpus:
    """Sequences of `seq_len` + 1 tokens, each within one document; the last `num_held` are held out."""

    sequences: Tokens
    num_held: int
    vocab_size: int

    @property
    def training(self) -> Tokens:
        return self.sequences[: -self.num_held]

    @property
    def held(self) -> Tokens:
        return self.sequences[-self.num_held :]


def corpus(seq_len: int, num_held: int, *, limit: int = 4096, source: SourceConfig | None = None) -> Corpus:
    """Packed sequences that lie within one document, at most `limit`, spread over the corpus; held-out ones too.

    Raises: ValueError where the source has fewer than twice `num_held` of them.
    """
    config = source or StdlibText(seq_len)
    opened = open_source(config)
    found = []
    every = max(1, opened.num_sequences // limit)
    for number in range(0, opened.num_sequences, every):
        sample = opened.read(number)
        if not any(0 < start < seq_len for start in sample.document_starts):
            found.append(sample.tokens)
    if len(found) < 2 * num_held:
        raise ValueError(f"only {len(found)} sequences of {seq_len} tokens lie within a document; shorten seq_len")
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(found))
    return Corpus(np.stack(found)[order].astype(np.int64), num_held, config.vocab_size)


def batch(corpus_: Corpus, seed: int, step: int, size: int) -> Tokens:
    """(size, seq_len + 1) training sequences of one step, in a seeded order that changes every epoch."""
    training = corpus_.training
    first = step * size
    rows = []
    for at in range(first, first + size):
        epoch, place = divmod(at, len(training))
        order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(len(training))
        rows.append(training[order[place]])
    return np.stack(rows)


def long_range_bits(sequences: Tokens, near: int, tail: int) -> dict[str, float]:
    """Bits per byte that a compressor needs for the last `tail` bytes, by context.

    `near`: the `near` bytes before them. `far`: everything before them. `other`: the near bytes, and as many distant
    ones of another document. far < other shows that the document's own distant text helps, not just more text. A
    compressor's gain is a lower bound on what can be learned.
    """
    total = {"near": 0, "far": 0, "other": 0}
    num = len(sequences)
    for i in range(num):
        text = _bytes(sequences[i])
        distant = _bytes(sequences[(i + num // 2) % num])
        before, last = text[:-tail], text[-tail:]
        contexts = {
            "near": before[-near:],
            "far": before,
            "other": distant[: len(before) - near] + before[-near:],
        }
        for name, context in contexts.items():
            total[name] += _size(context + last) - _size(context)
    return {name: 8 * size / (num * tail) for name, size in total.items()}


def _bytes(tokens: Tokens) -> bytes:
    return bytes(tokens[tokens < 256].astype(np.uint8))


def _size(data: bytes) -> int:
    return len(lzma.compress(data, format=lzma.FORMAT_RAW, filters=_FILTERS))
