"""Long real documents for the trailing-token loss: the standard library's sources, in path order. No training here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic_ring.data.source import SourceConfig, StdlibText, open_source

Tokens = NDArray[np.int64]


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
