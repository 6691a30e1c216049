"""Where copies of shards go in peers' memory.

Pure: no transfer, no buffers, no recovery decisions. A *snapshot* is a rank's whole state after a step, in the rank's
own host memory; a *copy* is a snapshot of another rank; a *parity* is the XOR of several ranks' snapshots.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_ring.control.messages import ParityGroup
from elastic_ring.control.options import CopyMode
from elastic_ring.mesh import Mesh

_MAX_TRIES = 64
"""How many shifts, swaps or holders are tried: placing 2,000 ranks must not delay a recovery."""
_SAME_SHARD, _SAME_NODE, _NODE_OF_REPLICA = 100, 10, 1
"""Costs of a holder: one of the same shard is lost together with the shard, so its copy protects nothing."""


@dataclass(frozen=True)
class CopyPlacement:
    """`copy_holders[global_rank]`: the ranks that hold its copy, empty for parity and without copies."""

    copy_holders: tuple[tuple[int, ...], ...] = ()
    parity_groups: tuple[ParityGroup, ...] = ()


def place(mesh: Mesh, nodes: Sequence[str], mode: CopyMode) -> CopyPlacement:
    """Where the copies of each rank go. `nodes[global_rank]` is the node of that rank.

    A holder is never the rank itself. It has another `cp_rank` if there is one, then another node if there is one, then
    a node without a replica of the shard. Every rank holds equally many copies, and at most one parity while there are
    ranks enough. A mesh that is too small for the mode gets fewer copies, or smaller groups.
    """
    assert len(nodes) == mesh.size, (len(nodes), mesh)
    if mesh.size < 2 or not mode:
        return CopyPlacement()
    if mode.group_size:
        return CopyPlacement(parity_groups=_parity_groups(mesh, nodes, min(mode.group_size, mesh.size - 1)))
    return CopyPlacement(copy_holders=_holders(mesh, nodes, min(mode.num_copies, mesh.size - 1)))


def failure_places(nodes: Sequence[str], domains_of: Mapping[str, tuple[str, ...]], mode: CopyMode) -> list[str]:
    """The failure domain, or node, of each rank, by which `place` keeps its state and its copies apart.

    `domains_of`: node → its failure domains, the widest first. The widest level counts on which no domain
    has so many ranks that some copy must stay inside; the node where there is none.
    """
    for level in range(max((len(domains_of.get(node, ())) for node in nodes), default=0)):
        inside = ["/".join(domains_of.get(node, ())[: level + 1]) for node in nodes]
        if max(Counter(inside).values()) * mode.num_ranks_needed <= len(nodes):
            return inside
    return list(nodes)


class _Costs:
    """Cost of a holder for a rank's shard; 0 protects best."""

    def __init__(self, mesh: Mesh, nodes: Sequence[str]) -> None:
        self.mesh, self.nodes = mesh, nodes
        self.replicas_on = {(rank % mesh.cp, node) for rank, node in enumerate(nodes)} if mesh.dp > 1 else set()

    def __call__(self, rank: int, holder: int, sharers: Sequence[int] = ()) -> int:
        """`sharers`: the ranks that hold the same state already."""
        nodes, cp = self.nodes, self.mesh.cp
        cost = _SAME_SHARD if cp > 1 and rank % cp == holder % cp else 0
        if nodes[holder] == nodes[rank] or any(nodes[holder] == nodes[sharer] for sharer in sharers):
            return cost + _SAME_NODE
        return cost + (_NODE_OF_REPLICA if (rank % cp, nodes[holder]) in self.replicas_on else 0)


def _holders(mesh: Mesh, nodes: Sequence[str], num_copies: int) -> tuple[tuple[int, ...], ...]:
    """The ranks in the order of their nodes, shifted, once for each copy; then bad holders are swapped.

    A shift keeps the load even. One by the largest node's number of ranks leads every rank to another node wherever no
    node has more than half of them.
    """
    costs = _Costs(mesh, nodes)
    by_node: dict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        by_node[node].append(rank)
    order = [rank for ranks in sorted(by_node.values(), key=lambda ranks: (-len(ranks), ranks)) for rank in ranks]
    largest = max(len(ranks) for ranks in by_node.values())
    columns: list[list[int]] = []
    used: set[int] = set()
    for _ in range(num_copies):
        shift = _best_shift(order, largest, columns, used, costs)
        used.add(shift)
        columns.append([*order[shift:], *order[:shift]])
    for index, column in enumerate(columns):
        _swap_bad(order, column, [*columns[:index], *columns[index + 1 :]], costs)
    holders = dict(zip(order, zip(*columns, strict=True), strict=True))
    return tuple(holders[rank] for rank in range(mesh.size))


def _best_shift(
    order: Sequence[int], first: int, columns: Sequence[Sequence[int]], used: set[int], costs: _Costs
) -> int:
    """The cheapest of the shifts that no earlier copy has, tried from `first` on; the first one without any cost."""
    size, best, lowest = len(order), 0, -1
    for extra in range(min(size - 1, _MAX_TRIES)):
        shift = 1 + (first - 1 + extra) % (size - 1)
        if shift in used:
            continue
        cost = 0
        for place, rank in enumerate(order):
            cost += costs(rank, order[(place + shift) % size], [column[place] for column in columns])
        if lowest < 0 or cost < lowest:
            best, lowest = shift, cost
        if cost == 0:
            break
    return best


def _swap_bad(order: Sequence[int], column: list[int], other_columns: Sequence[Sequence[int]], costs: _Costs) -> None:
    """Swap the holders of two ranks where that lowers the cost. Only a rank with a bad holder looks for a partner."""
    size = len(order)

    def cost(place: int, holder: int) -> int | None:
        rank, sharers = order[place], [other[place] for other in other_columns]
        return None if holder == rank or holder in sharers else costs(rank, holder, sharers)

    for here in range(size):
        before = cost(here, column[here])
        if before is None or before < _SAME_NODE:
            continue
        for ahead in range(1, min(size, _MAX_TRIES)):
            there = (here + ahead) % size
            mine, theirs, old = cost(here, column[there]), cost(there, column[here]), cost(there, column[there])
            if mine is not None and theirs is not None and old is not None and mine + theirs < before + old:
                column[here], column[there] = column[there], column[here]
                break


def _parity_groups(mesh: Mesh, nodes: Sequence[str], group_size: int) -> tuple[ParityGroup, ...]:
    """Groups of ranks of different nodes and shards; each one's holder is outside, elsewhere if possible."""

    def num_clashes(groups: Sequence[Sequence[int]]) -> int:
        """Cost of ranks of one group that one loss, or the loss of one shard's holders, takes together."""
        total = 0
        for group in groups:
            same_node = len(group) - len({nodes[rank] for rank in group})
            same_shard = len(group) - len({rank % mesh.cp for rank in group}) if mesh.cp > 1 else 0
            total += _SAME_NODE * same_node + _SAME_SHARD * same_shard
        return total

    cut = min((_cut(mesh, nodes, group_size, turn) for turn in (0, 1)), key=num_clashes)
    costs, load, num_with = _Costs(mesh, nodes), Counter[int](), Counter({0: mesh.size})
    groups = []
    for group in cut:
        inside, loads_inside = set(group), Counter(load[rank] for rank in group)
        least = min(each for each, number in num_with.items() if number > loads_inside[each])
        ahead = ((group[-1] + step) % mesh.size for step in range(1, mesh.size))
        outside = (rank for rank in ahead if load[rank] == least and rank not in inside)
        free = itertools.islice(outside, _MAX_TRIES)
        holder = min(free, key=lambda rank: sum(costs(member, rank) for member in group))
        num_with[load[holder]] -= 1
        load[holder] += 1
        num_with[load[holder]] += 1
        groups.append(ParityGroup(tuple(sorted(group)), holder))
    return tuple(groups)


def _cut(mesh: Mesh, nodes: Sequence[str], group_size: int, turn: int) -> list[list[int]]:
    """Groups of consecutive ranks of an order that changes the node with each rank.

    `turn`: the i-th node's ranks begin `i * turn` later, which gives a group different shards where each node has a
    whole ring.
    """
    by_node: dict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        by_node[node].append(rank)
    spread = []
    for index, ranks in enumerate(by_node.values()):
        start = index * turn % len(ranks)
        for place, rank in enumerate([*ranks[start:], *ranks[:start]]):
            spread.append(((place + 0.5) / len(ranks), index, rank))
    order = [rank for _, _, rank in sorted(spread)]
    num_groups = -(-mesh.size // group_size)
    cuts = [round(mesh.size * group / num_groups) for group in range(num_groups + 1)]
    return [order[begin:end] for begin, end in itertools.pairwise(cuts)]
