"""What a simulated shard is: its place and the votes that made it."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ring.control.messages import Vote


@dataclass(frozen=True)
class Shard:
    """`history[k]` is the vote that made step k; two holders of one shard are equal if these are."""

    cp_rank: int
    history: tuple[Vote, ...] = ()
