"""The mesh of `dp x cp` ranks and their coordinates. Pure arithmetic; imports nothing of the project."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Coordinate:
    """A rank's coordinate in the mesh: `dp_rank` is its ring, `cp_rank` its slice of the sequence."""

    dp_rank: int
    cp_rank: int


@dataclass(frozen=True)
class Mesh:
    """`dp` rings of `cp` ranks each; global_rank = dp_rank * cp + cp_rank. Raises: ValueError if dp or cp < 1."""

    dp: int
    cp: int

    def __post_init__(self) -> None:
        if self.dp < 1 or self.cp < 1:
            raise ValueError(f"mesh dp={self.dp} x cp={self.cp}: both must be at least 1")

    @property
    def size(self) -> int:
        return self.dp * self.cp

    def coordinate(self, global_rank: int) -> Coordinate:
        assert 0 <= global_rank < self.size, (global_rank, self)
        return Coordinate(*divmod(global_rank, self.cp))

    def global_rank(self, coordinate: Coordinate) -> int:
        return coordinate.dp_rank * self.cp + coordinate.cp_rank

    def ring(self, dp_rank: int) -> tuple[int, ...]:
        """The global ranks of one ring, in `cp_rank` order."""
        return tuple(range(dp_rank * self.cp, (dp_rank + 1) * self.cp))

    def replicas(self, cp_rank: int) -> tuple[int, ...]:
        """The global ranks that hold the same shard, in `dp_rank` order."""
        return tuple(range(cp_rank, self.size, self.cp))

    def __str__(self) -> str:
        return f"dp={self.dp} x cp={self.cp}"
