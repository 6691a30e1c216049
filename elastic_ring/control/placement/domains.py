"""Where members should stand so that what fails together takes no shard with it. Pure.

Replicas of a shard are spread over failure domains (zone, rack, host), a ring is packed into one; of each shard one
holder stands on a reserved node where there are such nodes, the others on spot machines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class DomainCounts:
    """Who stands where, while a mesh is filled. `domains_of`: node → its domains, the widest first."""

    def __init__(self, cp: int, domains_of: Mapping[str, tuple[str, ...]], reserved: frozenset[str]) -> None:
        self._cp, self._domains_of, self._reserved = cp, domains_of, reserved
        self._on_node: Counter[tuple[int, str]] = Counter()
        self._on_reserved: Counter[int] = Counter()
        self._holders: Counter[tuple[int, tuple[str, ...]]] = Counter()
        self._ring: Counter[tuple[int, tuple[str, ...]]] = Counter()

    @property
    def matter(self) -> bool:
        return bool(self._domains_of or self._reserved)

    def count(self, rank: int, node: str, number: int) -> None:
        """`number` more members (or fewer, below 0) of this rank stand on the node."""
        if not self.matter:
            return
        ring, cp_rank = divmod(rank, self._cp)
        self._on_node[cp_rank, node] += number
        self._on_reserved[cp_rank] += number * (node in self._reserved)
        for domain in self._domains(node):
            self._holders[cp_rank, domain] += number
            self._ring[ring, domain] += number

    def narrowed(self, rank: int, shelf: Mapping[str, list[str]]) -> dict[str, list[str]]:
        """The nodes of `shelf` (node → free workers) that suit this rank best, as far as domains are concerned.

        Never one with more holders of the shard than another has: nodes come before domains.
        """
        ring, cp_rank = divmod(rank, self._cp)
        fewest = min(self._on_node[cp_rank, node] for node in shelf)
        nodes = [node for node in shelf if self._on_node[cp_rank, node] == fewest]
        if self._reserved:
            wants_reserved = not self._on_reserved[cp_rank]
            nodes = [node for node in nodes if (node in self._reserved) == wants_reserved] or nodes
        for level in range(max((len(self._domains_of.get(node, ())) for node in nodes), default=0)):
            inside = {node: self._domains_of[node][: level + 1] for node in nodes}
            room = Counter({domain: 0 for domain in inside.values()})
            for node, domain in inside.items():
                room[domain] += len(shelf[node])
            best = min(
                room, key=lambda domain: (self._holders[cp_rank, domain], -self._ring[ring, domain], -room[domain])
            )
            nodes = [node for node in nodes if inside[node] == best]
        return {node: shelf[node] for node in nodes}

    def _domains(self, node: str) -> list[tuple[str, ...]]:
        names = self._domains_of.get(node, ())
        return [names[: level + 1] for level in range(len(names))]
