"""Dense attention patterns as plain data: which query may see which key. No tensors, ranks or layouts.

A pattern is the same on every rank and mesh; `schedule.plan` turns a pattern and a layout into hops. Token
placement belongs in `layout`, communication in `exchange`.
Sparse attention is `sparse.SparsePattern`: basic rules are in `rules`, published families in `families`,
content-chosen blocks in `content` and `routing`. `sparse_schedule.plan_sparse` plans its hops, `autolayout` picks
its layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Pattern:
    """Dense attention inside each packed document, causal or full; no attention across documents.

    `document_starts` are the positions in the global sequence where documents begin: 0 first, strictly ascending,
    else `ValueError`. `documents` checks them against the length of the sequence.
    """

    causal: bool = True
    document_starts: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        starts = self.document_starts
        if not starts or starts[0] != 0:
            raise ValueError(f"document_starts={_short(starts)}: the first document must start at position 0")
        for before, after in pairwise(starts):
            if after <= before:
                raise ValueError(
                    f"document_starts={_short(starts)}: {after} follows {before}; give each start once, in"
                    " ascending order"
                )

    def documents(self, seq_len: int) -> tuple[tuple[int, int], ...]:
        """The (start, stop) range of every document. Raises `ValueError` if one starts at or after `seq_len`."""
        starts = self.document_starts
        if starts[-1] >= seq_len:
            raise ValueError(
                f"document_starts={_short(starts)}: the last start must lie inside the sequence of"
                f" {seq_len} tokens; leave out the starts from {seq_len} on"
            )
        return tuple(zip(starts, (*starts[1:], seq_len), strict=True))


def _short(starts: tuple[int, ...]) -> str:
    if len(starts) <= 8:
        return str(starts)
    return f"({', '.join(map(str, starts[:4]))}, ... {len(starts)} in all, last {starts[-1]})"
