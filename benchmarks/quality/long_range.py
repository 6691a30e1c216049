"""Whether distant text helps at all: without long-range signal in the corpus every window would look perfect."""

from __future__ import annotations

import lzma

import numpy as np

from benchmarks.quality.small.text import Tokens

_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 20}]


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
