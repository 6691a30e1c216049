"""Placement: from all losses known so far to the members by rank and the heals of the next mesh.

Pure; no protocol, no messages sent here. Holders of one shard share a node only where the nodes leave no choice
(invariant 6).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle

from elastic_ring.control.messages import Heal
from elastic_ring.control.pool import placeable
from elastic_ring.mesh import Mesh


class DomainCounts:
    """Members of a mesh that is being filled, by failure domain. `domains_of`: node → its domains, the widest first."""

    def __init__(self, cp: int, domains_of: Mapping[str, tuple[str, ...]], reserved: frozenset[str]) -> None:
        self._cp, self._domains_of, self._reserved = cp, domains_of, reserved
        self._on_node: Counter[tuple[int, str]] = Counter()
        self._on_reserved: Counter[int] = Counter()
        self._holders: Counter[tuple[int, tuple[str, ...]]] = Counter()
        self._ring: Counter[tuple[int, tuple[str, ...]]] = Counter()

    @property
    def is_needed(self) -> bool:
        return bool(self._domains_of or self._reserved)

    def count(self, rank: int, node: str, number: int) -> None:
        if not self.is_needed:
            return
        ring, cp_rank = divmod(rank, self._cp)
        self._on_node[cp_rank, node] += number
        self._on_reserved[cp_rank] += number * (node in self._reserved)
        names = self._domains_of.get(node, ())
        for level in range(len(names)):
            self._holders[cp_rank, names[: level + 1]] += number
            self._ring[ring, names[: level + 1]] += number

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


def heals_of(situation: Situation, mesh: Mesh, members: tuple[str, ...]) -> tuple[Heal, ...]:
    """The heals of the next mesh: newcomers of a shard are divided among its donors.

    Donors are verified holders in the new mesh, else leaving ones, else workers that can supply the shard of a
    snapshot. A member that has a copy of its shard itself needs no heal.
    """
    in_new_mesh = set(members)
    copied = {
        cp_rank: [source.donor for source in sources if not source.parity_from]
        for cp_rank, sources in situation.sources.items()
    }
    ranked = [(worker, rank % mesh.cp) for rank, worker in enumerate(members)]
    placed = {worker for worker, cp_rank in ranked if situation.holders.get(worker) == cp_rank}
    served = placed | {worker for worker, cp_rank in ranked if worker in copied.get(cp_rank, ())}
    healers: dict[int, list[str]] = defaultdict(list)
    for worker, cp_rank in situation.holders.items():
        healers[cp_rank].append(worker)
    heals: list[Heal] = []
    for cp_rank in range(mesh.cp):
        needy = [members[rank] for rank in mesh.replicas(cp_rank) if members[rank] not in served]
        if not needy:
            continue
        in_mesh = [worker for worker in healers[cp_rank] if worker in placed]
        donors = in_mesh or [worker for worker in healers[cp_rank] if worker not in in_new_mesh]
        if not donors and (copiers := copied.get(cp_rank)):
            # Copiers that need no heal themselves, if there are any: others would send before they receive.
            donors = [worker for worker in copiers if worker in served or worker not in in_new_mesh] or copiers
        for index, donor in enumerate(donors):
            if needy[index :: len(donors)]:
                heals.append(Heal(cp_rank, donor, tuple(needy[index :: len(donors)])))
        if not donors:  # one heal for each newcomer, spread over the parities that have this shard
            parities = [source for source in situation.sources.get(cp_rank, ()) if source.parity_from]
            assert parities, f"cp_rank {cp_rank} has a holder, but it was given a rank of another shard"
            for newcomer, source in zip(needy, cycle(parities), strict=False):
                heals.append(Heal(cp_rank, source.donor, (newcomer,), source.parity_from))
    return tuple(heals)


@dataclass(frozen=True)
class Source:
    """A way to a shard of a snapshot without its owner: `donor` has a copy, or a parity that restores it together with
    the own snapshots of `parity_from`."""

    donor: str
    parity_from: tuple[str, ...] = ()


@dataclass(frozen=True)
class Situation:
    """The input of `plan`, once all reports have arrived.

    `mesh` and `members`: those of the last generation that ran (`members` is empty for a first formation). `hints`:
    worker → rank in a later attempt, for workers outside `members`. `holders`: worker → `cp_rank` of its verified shard
    at the next step. `empty`: live members without one. Workers in `draining` may donate, but become members only if
    `min_dp` rings are impossible without them. `gpus_on`: node → maximum number of members, for nodes with a limit.
    `domains_of`: node → its failure domains, the widest first; `reserved`: nodes that are no spot machines.
    `avoided`: nodes whose spares come last.
    `sources`: `cp_rank` → other ways to it than its holders; only where all members go back to a snapshot.
    """

    mesh: Mesh
    members: tuple[str, ...]
    holders: Mapping[str, int]
    empty: tuple[str, ...]
    spares: tuple[str, ...]
    node_of: Mapping[str, str]
    target_dp: int
    min_dp: int
    draining: frozenset[str] = frozenset()
    hints: Mapping[str, int] = field(default_factory=dict)
    fresh: bool = False
    gpus_on: Mapping[str, int] = field(default_factory=dict)
    domains_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reserved: frozenset[str] = frozenset()
    avoided: frozenset[str] = frozenset()
    sources: Mapping[int, tuple[Source, ...]] = field(default_factory=dict)

    def able(self, workers: Iterable[str]) -> list[str]:
        """The `workers` that can be members at the same time; `workers` come in the order holders, empty, spares.

        A holder has its GPU. A live member may have no shard; it counts as a newcomer then, before spares.
        """
        leaving = (worker for worker in self.empty if worker in self.draining)
        return placeable(workers, (*self.holders, *leaving), self.node_of, self.gpus_on)


@dataclass(frozen=True)
class Plan:
    """The next mesh. `newcomers` get healed; `leaving` took part until now and are not in the mesh.

    `action`: as in `state.Change`. `promise`: "bit-exact" or "sample-exact".
    """

    mesh: Mesh
    members: tuple[str, ...]
    heals: tuple[Heal, ...]
    newcomers: tuple[str, ...]
    leaving: tuple[str, ...]
    action: str
    promise: str
    reason: str


@dataclass(frozen=True)
class NotEnoughWorkers:
    """Every shard has a holder, but there are too few workers for `min_dp` rings: wait.

    `num_workers` could be members at the same time; `num_crowded` more are on nodes without a free GPU.
    """

    num_workers: int
    num_missing: int
    num_crowded: int = 0


@dataclass(frozen=True)
class NoHolder:
    """These `cp_rank`s have no verified holder."""

    cp_ranks: tuple[int, ...]


def plan(situation: Situation) -> Plan | NotEnoughWorkers | NoHolder:
    """Fill the gaps with spares if there are enough, else form as many whole rings as there are workers for.

    Only workers that can be members at the same time are candidates, so no later choice can exceed a node's limit.
    """
    cp = situation.mesh.cp
    held = {*situation.holders.values(), *situation.sources}
    no_holder = tuple(cp_rank for cp_rank in range(cp) if cp_rank not in held)
    if no_holder and not situation.fresh:
        return NoHolder(no_holder)
    everyone = (*situation.holders, *situation.empty, *situation.spares)
    able = situation.able(worker for worker in everyone if worker not in situation.draining)
    if len(able) // cp < situation.min_dp:
        able = situation.able(everyone)
    dp = min(situation.target_dp, len(able) // cp)
    if dp < max(1, situation.min_dp):
        return NotEnoughWorkers(len(able), max(1, situation.min_dp) * cp - len(able), len(everyone) - len(able))
    placement = _Placement(situation, Mesh(dp, cp), able)
    placement.keep()
    placement.move_surplus()
    placement.keep_empty()
    placement.fill()
    return _describe(situation, Mesh(dp, cp), placement.members())


class _Placement:
    """A mesh that is being filled: members that stay, then surplus holders of the same shard, then newcomers."""

    def __init__(self, situation: Situation, mesh: Mesh, able: Iterable[str]) -> None:
        self.situation = situation
        self.mesh = mesh
        self.free = dict.fromkeys(able)
        self.worker_of: list[str | None] = [None] * mesh.size
        self.holders_on: Counter[tuple[int, str]] = Counter()
        self.ring_on: Counter[tuple[int, str]] = Counter()
        self.new_ring: dict[int, int] = {}
        self.domains = DomainCounts(mesh.cp, situation.domains_of, situation.reserved)

    def members(self) -> tuple[str, ...]:
        assert all(worker is not None for worker in self.worker_of), self.worker_of
        return tuple(worker for worker in self.worker_of if worker is not None)

    def keep(self) -> None:
        """Holders in kept rings keep their ranks. The rings with most survivors are kept, under their old dp_rank where
        that still exists."""
        cp, old_dp, holders = self.mesh.cp, self.situation.mesh.dp, self.situation.holders
        survivors = [(rank, worker) for rank, worker in self._old_ranks() if holders.get(worker) == rank % cp]
        num_survivors = Counter(rank // cp for rank, _ in survivors)
        kept = sorted(sorted(range(old_dp), key=lambda ring: (-num_survivors[ring], ring))[: self.mesh.dp])
        gaps = iter(sorted(set(range(self.mesh.dp)) - set(kept)))
        self.new_ring = {ring: ring if ring < self.mesh.dp else next(gaps) for ring in kept}
        self._place_again(survivors)

    def keep_empty(self) -> None:
        """A live member that lost its shard keeps its rank, unless a holder took it, and is healed there."""
        if empty := set(self.situation.empty):
            self._place_again([(rank, worker) for rank, worker in self._old_ranks() if worker in empty])

    def _old_ranks(self) -> list[tuple[int, str]]:
        """Global ranks of free workers; the last mesh that ran overrides later attempts."""
        ranks = {**self.situation.hints, **{worker: rank for rank, worker in enumerate(self.situation.members)}}
        return [(rank, worker) for worker, rank in ranks.items() if worker in self.free]

    def _place_again(self, ranked: Sequence[tuple[int, str]]) -> None:
        for rank, worker in ranked:
            ring, cp_rank = divmod(rank, self.mesh.cp)
            if ring in self.new_ring:
                new_rank = self.new_ring[ring] * self.mesh.cp + cp_rank
                if self.worker_of[new_rank] is None:
                    self._place(new_rank, worker)

    def move_surplus(self) -> None:
        """Holders without a rank fill gaps of their own shard, which need no heal."""
        surplus: dict[int, list[str]] = defaultdict(list)
        for worker in self.free:
            if worker in self.situation.holders:
                surplus[self.situation.holders[worker]].append(worker)
        for rank in self._gaps() if surplus else ():
            ring, cp_rank = divmod(rank, self.mesh.cp)
            candidates = {worker: self.situation.node_of[worker] for worker in surplus[cp_rank]}
            if candidates:
                best = min(
                    candidates,
                    key=lambda worker: (
                        self.holders_on.get((cp_rank, candidates[worker]), 0),
                        -self.ring_on.get((ring, candidates[worker]), 0),
                    ),
                )
                surplus[cp_rank].remove(best)
                self._place(rank, best)

    def fill(self) -> None:
        """Fill the rest with newcomers: spares, then holders whose shard has enough holders.

        Spreading the holders of a shard over nodes comes before packing a ring on few nodes.
        """
        pool: dict[str, list[str]] = defaultdict(list)
        spare = set(self.situation.spares)
        for worker in sorted(self.free, key=lambda worker: worker not in spare):
            pool[self.situation.node_of[worker]].append(worker)
        gaps = self._gaps()
        left_in_ring = Counter(rank // self.mesh.cp for rank in gaps)
        # Consider only nodes with spares while there are any: moving a holder to another shard is the last resort.
        num_spares = sum(worker in spare for worker in self.free)
        shelf = {node: workers for node, workers in pool.items() if workers[0] in spare} if num_spares else pool
        better = {node: workers for node, workers in shelf.items() if node not in self.situation.avoided}
        if num_spares and sum(w in spare for workers in better.values() for w in workers) >= len(gaps):
            shelf = better
        fewest: Counter[int] = Counter()
        for rank in gaps:
            ring = rank // self.mesh.cp
            near = self.domains.narrowed(rank, shelf) if self.domains.is_needed else shelf
            node = self._best_node(rank, near, left_in_ring[ring], Counter() if near is not shelf else fewest)
            workers = shelf.pop(node)
            self._place(rank, workers.pop(0))
            left_in_ring[ring] -= 1
            # Reinsert the node at the end, so that the next search meets less used nodes first.
            if workers and (shelf is pool or workers[0] in spare):
                shelf[node] = workers
            elif not workers:
                pool.pop(node, None)
            if not shelf:
                shelf, fewest = pool, Counter()
        self._swap_apart(gaps)
        self._trade_with_idle(gaps, spare)

    def _best_node(self, rank: int, shelf: Mapping[str, list[str]], num_left_in_ring: int, fewest: Counter[int]) -> str:
        """The node with fewest holders of the shard, then most members of the ring, then room for its other members.

        `fewest` has the minimum number of holders per shard. It only rises while nodes fill, so the search stops at
        the first node that reaches it and is best by the other criteria.
        """
        ring, cp_rank = divmod(rank, self.mesh.cp)
        holders_on, ring_on = self.holders_on, self.ring_on
        in_ring = self.worker_of[ring * self.mesh.cp : (ring + 1) * self.mesh.cp]
        nodes = dict.fromkeys(self.situation.node_of[worker] for worker in in_ring if worker is not None)
        begun = [node for node in nodes if node in shelf]
        most = max([ring_on[ring, node] for node in begun]) if begun else 0
        best, best_key = "", (self.mesh.size + 1, 0, 0)
        for node in chain(begun, shelf):
            num_holders = holders_on.get((cp_rank, node), 0)
            if num_holders > best_key[0]:
                continue
            key = (num_holders, -ring_on.get((ring, node), 0), -min(len(shelf[node]), num_left_in_ring))
            if key < best_key:
                best, best_key = node, key
            if key[:2] == (fewest[cp_rank], -most) and (most > 0 or key[2] == -num_left_in_ring):
                break
        fewest[cp_rank] = best_key[0]
        return best

    def _swap_apart(self, gaps: Sequence[int]) -> None:
        """Swap two newcomers of a ring where that moves holders of one shard to different nodes."""
        by_ring: dict[int, list[int]] = defaultdict(list)
        for rank in gaps:
            by_ring[rank // self.mesh.cp].append(rank)
        for rank in gaps:
            if self.holders_on[self._shard_and_node(rank)] < 2:
                continue
            for other in by_ring[rank // self.mesh.cp]:
                (shard, here), (other_shard, there) = self._shard_and_node(rank), self._shard_and_node(other)
                if here == there or shard == other_shard:
                    continue
                on = self.holders_on  # pairs of holders of one shard on one node that a swap removes
                num_fewer = on[shard, here] - on[shard, there] + on[other_shard, there] - on[other_shard, here] - 2
                if num_fewer > 0:
                    first, second = self._leave(rank), self._leave(other)
                    self._place(rank, second)
                    self._place(other, first)
                    break

    def _trade_with_idle(self, gaps: Sequence[int], spare: set[str]) -> None:
        """Replace a newcomer by an unused spare where that moves holders of one shard to different nodes."""
        for rank in gaps:
            cp_rank, node = self._shard_and_node(rank)
            if self.worker_of[rank] not in spare or self.holders_on[cp_rank, node] < 2:
                continue
            least = self.holders_on[cp_rank, node] - 1
            for idle in [worker for worker in self.free if worker in spare]:
                if self.holders_on[cp_rank, self.situation.node_of[idle]] < least:
                    self.free[self._leave(rank)] = None
                    self._place(rank, idle)
                    break

    def _shard_and_node(self, rank: int) -> tuple[int, str]:
        worker = self.worker_of[rank]
        assert worker is not None
        return rank % self.mesh.cp, self.situation.node_of[worker]

    def _gaps(self) -> list[int]:
        return [rank for rank, worker in enumerate(self.worker_of) if worker is None]

    def _place(self, rank: int, worker: str) -> None:
        self.free.pop(worker, None)
        self.worker_of[rank] = worker
        ring, cp_rank = divmod(rank, self.mesh.cp)
        node = self.situation.node_of[worker]
        self.holders_on[cp_rank, node] += 1
        self.ring_on[ring, node] += 1
        self.domains.count(rank, node, 1)

    def _leave(self, rank: int) -> str:
        ring, cp_rank = divmod(rank, self.mesh.cp)
        worker = self.worker_of[rank]
        assert worker is not None
        self.worker_of[rank] = None
        node = self.situation.node_of[worker]
        self.holders_on[cp_rank, node] -= 1
        self.ring_on[ring, node] -= 1
        self.domains.count(rank, node, -1)
        return worker


def _describe(situation: Situation, mesh: Mesh, members: tuple[str, ...]) -> Plan:
    newcomers = tuple(worker for rank, worker in enumerate(members) if situation.holders.get(worker) != rank % mesh.cp)
    placed = set(members)
    leaving = tuple(w for w in (*situation.holders, *situation.empty) if w not in placed)
    heals = () if situation.fresh else heals_of(situation, mesh, members)
    old = situation.members
    # A spare that was healed in an attempt that failed later is no newcomer now, but still counts as a spare here.
    num_spares = len(placed - set(old))
    if situation.fresh:
        action = "formed"
    elif mesh.dp != situation.mesh.dp:
        action = "mesh shrank" if mesh.dp < situation.mesh.dp else "grew"
    elif any(worker in situation.draining and worker not in placed for worker in old):
        action = "drained"
    elif num_spares:
        action = "spare took its place" if num_spares == 1 else "spares took their places"
    else:
        action = "healed in place" if newcomers else "rebuilt in place"
    in_place = mesh == situation.mesh and all(
        new == before or before not in placed for new, before in zip(members, old, strict=False)
    )
    promise = "bit-exact" if in_place or situation.fresh else "sample-exact"
    reason = f"{action}: {mesh}, {len(newcomers)} newcomer(s), {len(leaving)} leaving"
    return Plan(mesh, members, heals, newcomers, leaving, action, promise, reason)
