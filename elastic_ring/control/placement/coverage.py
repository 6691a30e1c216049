"""The cost of losing any process, any one host or any two, in the words that users read. Pure arithmetic.

Where nodes name their failure domains, these take the place of hosts. The recovery itself asks
`policy`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations_with_replacement

from elastic_ring.control.options import CopyMode
from elastic_ring.control.placement.copies import failure_places, place
from elastic_ring.control.state import (
    Building,
    State,
    domains_of,
    gpus_on,
    members,
    membership_of,
    mesh_of,
    node_of,
    spares,
)
from elastic_ring.mesh import Mesh

OUTCOMES = (
    "a spare",
    "fewer rings",
    "a wait for workers",
    "back to copies",
    "a wait for workers, then back to copies",
    "back to the newest checkpoint",
    "a wait for workers, then back to the newest checkpoint",
    "back to the first step",
)
"""From the best to the worst."""
SPARE, FEWER, WAIT, COPIES, _, CHECKPOINT, _, START = range(len(OUTCOMES))
PROCESS = "any process"
HOST = "its host"
RECOVERY_S = 1.0
"""A recovery without the steps that run again."""
HOSTS, DOMAINS = ("any host", "any two hosts"), ("any failure domain", "any two failure domains")


def describe(costs: Mapping[str, str]) -> str:
    return "a failure of " + "; ".join(f"{loss}: {outcome}" for loss, outcome in costs.items())


def without_holder(mesh: Mesh, mode: CopyMode, has_checkpoints: bool) -> int:
    """The outcome of the loss of the only rank that holds a shard."""
    if mode and mesh.size > 1:
        return COPIES
    return CHECKPOINT if has_checkpoints else START


def covered(state: State) -> dict[str, str]:
    """Loss → its worst outcome; empty while there is no mesh. Failure domains only where
    the members stand in several."""
    mesh = mesh_of(state)
    if mesh is None:
        return {}
    nodes, domains, options = node_of(state), domains_of(state), state.options
    mode = options.copy_mode(mesh)
    on = tuple(nodes.get(worker, "") for worker in members(state))
    places = _places(on, domains)
    there, on_node, limits = Counter(nodes[name] for name in spares(state)), Counter(on), gpus_on(state)
    # Node → its spares that have a GPU of their own. The others can only take a place of that node.
    able = Counter({n: min(num, max(0, limits.get(n, num + on_node[n]) - on_node[n])) for n, num in there.items()})
    standbys = there - able
    able_in = Counter[str]()
    for node, number in able.items():
        able_in[places.get(node, node)] += number
    counted = _Counted(
        mesh,
        tuple(places.get(node, node) for node in on),
        tuple(failure_places(on, domains, mode)),
        frozenset(able_in.items()),
        able.total() > 0 or all(standbys[node] > 0 for node in on),
        options.scaling.min_dp,
        mode,
        options.run.checkpoint_config.is_on or bool(state.checkpoints),
    )
    losses = (PROCESS, *(DOMAINS if places else HOSTS if len(set(on)) > 1 else (HOST,)))
    return {loss: OUTCOMES[outcome] for loss, outcome in zip(losses, counted.worst(), strict=False)}


def patience_s(state: State, since_saved_s: float) -> dict[str, float]:
    """How long the last holders of a shard may be silent at least before they are killed: as long as going back costs,
    with steps that took `since_saved_s`, and no longer than `heart_cap_s`. Nobody where each shard has more holders."""
    membership, holders = membership_of(state), defaultdict[int, list[str]](list)
    if membership is None:
        return {}
    to_heal = {newcomer for _, newcomer in membership.donors}
    if isinstance(state.phase, Building):
        to_heal -= set(state.phase.resumed)
    for rank, name in enumerate(membership.members):
        worker = state.workers.get(name)
        if worker is not None and worker.status == "ready" and name not in to_heal:
            holders[rank % membership.mesh.cp].append(name)
    limit_s = min(float(math.ceil(RECOVERY_S + since_saved_s)), state.options.timeouts.heart_cap_s)
    return {names[0]: limit_s for names in holders.values() if len(names) == 1}


def _places(on: Sequence[str], domains: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Node → its failure domain, of the widest level on which the members stand in several; empty if there is none."""
    for level in range(max(map(len, domains.values()), default=0)):
        inside = {node: "/".join(names[: level + 1]) for node, names in domains.items()}
        if len({inside.get(node, node) for node in on}) > 1:
            return inside
    return {}


@dataclass(frozen=True)
class _Counted:
    """`on`: the place of each rank, which is lost as one. `apart`: the place by which its copies are kept apart.
    `able`: (place, spares there that have a GPU)."""

    mesh: Mesh
    on: tuple[str, ...]
    apart: tuple[str, ...]
    able: frozenset[tuple[str, int]]
    is_process_covered: bool
    min_dp: int
    mode: CopyMode
    has_checkpoints: bool

    @cached_property
    def num_members(self) -> Counter[str]:
        return Counter(self.on)

    @cached_property
    def num_able(self) -> int:
        return sum(number for _, number in self.able)

    @cached_property
    def shard_on(self) -> dict[int, set[str]]:
        places: dict[int, set[str]] = defaultdict(set)
        for rank, place_of_rank in enumerate(self.on):
            places[rank % self.mesh.cp].add(place_of_rank)
        return places

    @lru_cache(maxsize=2)  # noqa: B019  asked each second, and placing the parity of 2,000 ranks takes as long
    def worst(self) -> tuple[int, ...]:
        """The worst outcome of the death of a member, and of the loss of one and of two places."""
        if self.mesh.dp == 1:
            a_process = without_holder(self.mesh, self.mode, self.has_checkpoints)
        else:
            a_process = SPARE if self.is_process_covered else self._without(1, self.num_able)
        return (a_process, *(self.places(num) for num in range(1, min(len(set(self.on)), 2) + 1)))

    def places(self, number: int) -> int:
        able = dict(self.able)
        alike = Counter((num, able.get(where, 0)) for where, num in self.num_members.items())
        worst = SPARE
        for kinds in combinations_with_replacement(alike, number):
            if any(count > alike[kind] for kind, count in Counter(kinds).items()):
                continue
            num_lost, num_left = sum(kind[0] for kind in kinds), self.num_able - sum(kind[1] for kind in kinds)
            worst = max(worst, SPARE if num_lost <= num_left else self._without(num_lost, num_left))
        if min(len(places) for places in self.shard_on.values()) > number:
            return worst
        mode = self.mode if self._copies_cover(number) else CopyMode()
        back = without_holder(self.mesh, mode, self.has_checkpoints)
        return back + 1 if worst == WAIT and back != START else back

    def _without(self, num_lost: int, num_able: int) -> int:
        rings = (self.mesh.size - num_lost + num_able) // self.mesh.cp
        return FEWER if rings >= max(1, self.min_dp) else WAIT

    def _copies_cover(self, number: int) -> bool:
        """Whether a copy of every shard outlives any such loss; parity counts for one place only."""
        mode = self.mode
        if not mode or self.mesh.size < 2 or (mode.group_size and number > 1):
            return False
        placed = place(self.mesh, self.apart, mode)
        if placed.parity_groups:
            groups = [(*group.ranks, group.holder) for group in placed.parity_groups]
            return all(len({self.on[rank] for rank in group}) == len(group) for group in groups)
        for cp_rank, nodes in self.shard_on.items():
            ranks = range(cp_rank, self.mesh.size, self.mesh.cp)
            if len(nodes.union(self.on[holder] for rank in ranks for holder in placed.copy_holders[rank])) <= number:
                return False
        return True
