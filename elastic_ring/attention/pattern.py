"""Which query may see which key, as plain data. No tensors, no ranks, no layout.

A pattern is the same for every rank and every mesh; `schedule.plan` turns it, with a layout, into hops.
Anything that depends on where a token lies belongs in `layout`, anything that moves bytes in `exchange`.
`Pattern` is dense attention. Sparse attention is `sparse.SparsePattern` with a rule for each head: the plain
rules are in `rules` (Window, Sinks, Strided and their unions), the published families in `families`, choice
by content in `content` and `routing`; `sparse_schedule.plan_sparse` turns them into hops, `choice.choose` finds a
layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Pattern:
    """Dense attention inside each packed document, causal or full; nothing crosses a document's boundary.

    `document_starts` are the positions where documents begin in the global sequence, ascending, the first
    one 0. Raises `ValueError` when they are not. Whether they fit the sequence is checked where its length
    is known (`schedule.plan`).
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
        """The (start, stop) position range of every document of a sequence of `seq_len` tokens."""
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
