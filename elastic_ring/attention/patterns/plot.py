"""Plots of a pattern: as text for docstrings and logs, and as a small PNG. Plots block kinds as given by `blocks`;
rules and layouts must not enter."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from elastic_ring.attention.patterns.rules import FULL, NONE, PART, Kinds

_LETTERS = {NONE: ".", PART: "+", FULL: "#"}
_COLOURS = {NONE: (238, 243, 248), PART: (122, 160, 196), FULL: (31, 78, 121)}
_FUTURE = (255, 255, 255)


def as_text(kinds: Kinds, *, max_rows: int = 32) -> str:
    """One line per query block: `#` a full block, `+` a partly kept one, `.` a skipped one.

    Above `max_rows` rows, several blocks share a letter: `#` only if all of them are full.
    """
    small = _shrunk(kinds, max_rows)
    return "\n".join("".join(_LETTERS[int(kind)] for kind in row[: i + 1]) for i, row in enumerate(small))


def write_png(kinds: Kinds, path: str | Path, *, pixels: int = 256) -> Path:
    """Write an image of about `pixels` x `pixels`, queries from top to bottom, keys from left to right. Returns the
    path."""
    from matplotlib.image import imsave

    small = _shrunk(kinds, pixels)
    image = np.full((*small.shape, 3), _FUTURE, dtype=np.uint8)
    for kind, colour in _COLOURS.items():
        image[np.tril(small == kind)] = colour
        image[np.triu(np.ones_like(small, dtype=bool), 1)] = _FUTURE
    scale = max(1, pixels // len(small))
    target = Path(path)
    imsave(target, image.repeat(scale, axis=0).repeat(scale, axis=1), format="png")
    return target


def _shrunk(kinds: Kinds, max_rows: int) -> Kinds:
    factor = -(-len(kinds) // max_rows)
    if factor == 1:
        return kinds
    num_rows = -(-len(kinds) // factor)
    ends = np.arange(num_rows) * factor
    most = np.maximum.reduceat(np.maximum.reduceat(kinds, ends, axis=0), ends, axis=1)
    causal = np.where(np.tril(np.ones_like(kinds, dtype=bool)), kinds, FULL)
    least = np.minimum.reduceat(np.minimum.reduceat(causal, ends, axis=0), ends, axis=1)
    return np.where(least == FULL, FULL, np.minimum(most, PART)).astype(np.uint8)
