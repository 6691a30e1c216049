"""Which losses a run can take now, and what each would cost: any process, any one host, any two. Pure arithmetic.

Told in words for operators; the recovery itself asks `policy`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations_with_replacement

from elastic_ring.control.placement.copies import CopyMode, place
from elastic_ring.control.state import State, gpus_on, members, mesh_of, node_of, spares
from elastic_ring.mesh import Mesh

OUTCOMES = ("a spare", "fewer rings", "a wait for workers", "back to copies", "back to the newest checkpoint")
"""From the best to the worst."""
SPARE, FEWER, WAIT, COPIES, CHECKPOINT = range(len(OUTCOMES))
LOSSES = ("any process", "any host", "any two hosts")


def covered(state: State) -> dict[str, str]:
    """Loss → what follows in the worst case; empty while there is no mesh. Hosts are told of where there are others."""
    mesh = mesh_of(state)
    if mesh is None:
        return {}
    nodes, mode = node_of(state), state.options.copy_mode(mesh)
    on = tuple(nodes.get(worker, "") for worker in members(state))
    able, standbys = (frozenset(each.items()) for each in (_able_spares(state, on), _standbys(state, on)))
    return dict(_covered(mesh, on, able, standbys, state.options.min_dp, mode))


@lru_cache(maxsize=2)  # asked each second, and placing the parity of 2,000 ranks takes as long
def _covered(
    mesh: Mesh, on: tuple[str, ...], able: frozenset[tuple[str, int]], standbys: frozenset[tuple[str, int]],
    min_dp: int, mode: CopyMode,
) -> dict[str, str]:  # fmt: skip
    counted = _Counted(mesh, on, dict(able), min_dp)
    worst = {LOSSES[0]: counted.a_process(dict(standbys), mode)}
    for num_hosts in range(1, min(len(set(on)), len(LOSSES))):
        worst[LOSSES[num_hosts]] = counted.hosts(num_hosts, mode)
    return {loss: OUTCOMES[outcome] for loss, outcome in worst.items()}


def _able_spares(state: State, on: Iterable[str]) -> Counter[str]:
    """Node → spares there that have a GPU of their own."""
    there = Counter(state.workers[name].node for name in spares(state))
    taken, limits = Counter(on), gpus_on(state)
    return Counter({n: min(number, max(0, limits.get(n, number + taken[n]) - taken[n])) for n, number in there.items()})


def _standbys(state: State, on: Iterable[str]) -> Counter[str]:
    """Node → spares there that can only take a place of that node."""
    return Counter(state.workers[name].node for name in spares(state)) - _able_spares(state, on)


class _Counted:
    """The members and spares of each host, and the hosts on which each shard is."""

    def __init__(self, mesh: Mesh, on: Sequence[str], able: Mapping[str, int], min_dp: int) -> None:
        self.mesh, self.on, self.able, self.min_dp = mesh, on, able, max(1, min_dp)
        self.num_members, self.num_able = Counter(on), sum(able.values())
        self.shard_on: dict[int, set[str]] = defaultdict(set)
        for rank, node in enumerate(on):
            self.shard_on[rank % mesh.cp].add(node)

    def a_process(self, standbys: Mapping[str, int], mode: CopyMode) -> int:
        """The worst outcome of the death of one member."""
        is_covered = self.num_able > 0 or all(standbys.get(node, 0) > 0 for node in self.num_members)
        if self.mesh.dp > 1:
            return SPARE if is_covered else self._without(1, self.num_able)
        return COPIES if mode and self.mesh.size > 1 else CHECKPOINT

    def hosts(self, number: int, mode: CopyMode) -> int:
        """The worst outcome of the loss of so many hosts with members at once."""
        if min(len(nodes) for nodes in self.shard_on.values()) <= number:
            return COPIES if self._copies_cover(number, mode) else CHECKPOINT
        alike = Counter((self.num_members[node], self.able.get(node, 0)) for node in self.num_members)
        worst = SPARE
        for kinds in combinations_with_replacement(alike, number):
            if any(count > alike[kind] for kind, count in Counter(kinds).items()):
                continue
            num_lost, num_left = sum(kind[0] for kind in kinds), self.num_able - sum(kind[1] for kind in kinds)
            worst = max(worst, SPARE if num_lost <= num_left else self._without(num_lost, num_left))
        return worst

    def _without(self, num_lost: int, num_able: int) -> int:
        rings = (self.mesh.size - num_lost + num_able) // self.mesh.cp
        return FEWER if rings >= self.min_dp else WAIT

    def _copies_cover(self, number: int, mode: CopyMode) -> bool:
        """Whether a copy of every shard outlives any such loss; parity counts for one host only."""
        if not mode or self.mesh.size < 2 or (mode.group_size and number > 1):
            return False
        placed = place(self.mesh, self.on, mode)
        if placed.parity_groups:
            groups = [(*group.ranks, group.holder) for group in placed.parity_groups]
            return all(len({self.on[rank] for rank in group}) == len(group) for group in groups)
        for cp_rank, nodes in self.shard_on.items():
            ranks = range(cp_rank, self.mesh.size, self.mesh.cp)
            if len(nodes.union(self.on[holder] for rank in ranks for holder in placed.copy_holders[rank])) <= number:
                return False
        return True
