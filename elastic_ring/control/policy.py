"""Who sits where next: one mapping of all losses known at once to seats and heals. Pure, no protocol.

Invariant 6 is minimised, not enforced: holders of one shard share a node only where the nodes leave no choice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elastic_ring.control.messages import Heal
from elastic_ring.control.options import LADDER
from elastic_ring.control.seats import able_to_sit
from elastic_ring.mesh import Mesh


@dataclass(frozen=True)
class Situation:
    """Everything known when the reports are in.

    `mesh` and `seats` are those of the last generation that ran (`seats` is empty for a first formation).
    `hints` are ranks that a later attempt gave to workers without a seat in it. `holders` maps workers with a
    verified shard at the next step to its `cp_rank`; `empty` are live members without one. Whoever is in
    `draining` may donate but gets a seat only when there is no other way to keep `min_dp` rings. `seats_on`:
    how many members may sit at once on each node that has a limit.
    """

    mesh: Mesh
    seats: tuple[str, ...]
    holders: Mapping[str, int]
    empty: tuple[str, ...]
    spares: tuple[str, ...]
    node_of: Mapping[str, str]
    target_dp: int
    min_dp: int
    draining: frozenset[str] = frozenset()
    hints: Mapping[str, int] = field(default_factory=dict)
    fresh: bool = False
    seats_on: Mapping[str, int] = field(default_factory=dict)

    def able(self, workers: Iterable[str]) -> list[str]:
        """Those of `workers` that can sit at once; they are asked in the order holders, empty, spares.

        A holder has its GPU. A live member without a shard may never have got one, so it stands in line, first.
        """
        leaving = (worker for worker in self.empty if worker in self.draining)
        return able_to_sit(workers, (*self.holders, *leaving), self.node_of, self.seats_on)


@dataclass(frozen=True)
class Plan:
    """`leaving` took part until now and have no seat; `newcomers` are healed; `action` and `promise` in words."""

    mesh: Mesh
    seats: tuple[str, ...]
    heals: tuple[Heal, ...]
    newcomers: tuple[str, ...]
    leaving: tuple[str, ...]
    action: str
    promise: str
    reason: str


@dataclass(frozen=True)
class Short:
    """Every shard is held, but there are not workers enough for `min_dp` rings: wait.

    `num_workers` could sit at once, `num_crowded` more are there for whom their node has no seat left.
    """

    num_workers: int
    num_missing: int
    num_crowded: int = 0


@dataclass(frozen=True)
class Unheld:
    """These `cp_rank`s have no verified holder."""

    cp_ranks: tuple[int, ...]


def next_rung(available: Sequence[str]) -> str | None:
    """The best rung of the ladder below a live holder that this run has; None if there is none."""
    return next((rung for rung in LADDER[1:] if rung in available), None)


def plan(situation: Situation) -> Plan | Short | Unheld:
    """Spares into the gaps if they suffice, else as many whole rings as there are workers for.

    Only workers that can sit at once take part, so that no choice below can exceed a node's limit.
    """
    cp = situation.mesh.cp
    held = set(situation.holders.values())
    unheld = tuple(cp_rank for cp_rank in range(cp) if cp_rank not in held)
    if unheld and not situation.fresh:
        return Unheld(unheld)
    everyone = (*situation.holders, *situation.empty, *situation.spares)
    able = situation.able(worker for worker in everyone if worker not in situation.draining)
    if len(able) // cp < situation.min_dp:
        able = situation.able(everyone)
    dp = min(situation.target_dp, len(able) // cp)
    if dp < max(1, situation.min_dp):
        return Short(len(able), max(1, situation.min_dp) * cp - len(able), len(everyone) - len(able))
    seating = _Seating(situation, Mesh(dp, cp), able)
    seating.keep()
    seating.move_surplus()
    seating.keep_empty()
    seating.fill()
    return _describe(situation, Mesh(dp, cp), seating.seats())


class _Seating:
    """The seats while they fill: first who stays, then surplus holders of the same shard, then newcomers."""

    def __init__(self, situation: Situation, mesh: Mesh, able: Iterable[str]) -> None:
        self.situation = situation
        self.mesh = mesh
        self.free = dict.fromkeys(able)
        self.taken: list[str | None] = [None] * mesh.size
        self.holders_on: Counter[tuple[int, str]] = Counter()
        self.ring_on: Counter[tuple[int, str]] = Counter()
        self.new_ring: dict[int, int] = {}

    def seats(self) -> tuple[str, ...]:
        assert all(worker is not None for worker in self.taken), self.taken
        return tuple(worker for worker in self.taken if worker is not None)

    def keep(self) -> None:
        """Holders of the kept rings stay where they are."""
        old = self.situation.mesh
        wanted = [
            (rank, worker) for worker, rank in self._preferred().items()
            if worker in self.free and self.situation.holders.get(worker) == old.seat(rank).cp_rank
        ]
        self.new_ring = self._kept_rings(Counter(old.seat(rank).dp_rank for rank, _ in wanted))
        self._sit_again(wanted)

    def keep_empty(self) -> None:
        """A live member that lost its shard keeps its place, if no holder needs it, and is healed there."""
        empty = set(self.situation.empty)
        self._sit_again([(rank, w) for w, rank in self._preferred().items() if w in self.free and w in empty])

    def _preferred(self) -> dict[str, int]:
        """Worker → old global rank; where it sat when the mesh last ran goes before any later attempt."""
        return {**self.situation.hints, **{worker: rank for rank, worker in enumerate(self.situation.seats)}}

    def _sit_again(self, wanted: Sequence[tuple[int, str]]) -> None:
        for rank, worker in wanted:
            seat = self.situation.mesh.seat(rank)
            if seat.dp_rank in self.new_ring:
                new_rank = self.new_ring[seat.dp_rank] * self.mesh.cp + seat.cp_rank
                if self.taken[new_rank] is None:
                    self._sit(new_rank, worker)

    def _kept_rings(self, num_survivors: Counter[int]) -> dict[int, int]:
        """Old dp_rank → new one: the rings with most survivors, each at its old place where that still exists."""
        order = sorted(range(self.situation.mesh.dp), key=lambda ring: (-num_survivors[ring], ring))
        kept = sorted(order[: self.mesh.dp])
        gaps = iter(sorted(set(range(self.mesh.dp)) - set(kept)))
        return {ring: ring if ring < self.mesh.dp else next(gaps) for ring in kept}

    def move_surplus(self) -> None:
        """Holders without a place fill gaps of their own shard: no heal needed."""
        surplus: dict[int, list[str]] = defaultdict(list)
        for worker in self.free:
            if worker in self.situation.holders:
                surplus[self.situation.holders[worker]].append(worker)
        for rank in self._gaps() if surplus else ():
            candidates = surplus[rank % self.mesh.cp]
            if candidates:
                best = min(candidates, key=lambda worker: self._cost(rank, self.situation.node_of[worker]))
                candidates.remove(best)
                self._sit(rank, best)

    def fill(self) -> None:
        """Newcomers: spares before holders whose own shard is not needed; spread first, then pack the ring."""
        pool: dict[str, list[str]] = defaultdict(list)
        spare = set(self.situation.spares)
        for worker in sorted(self.free, key=lambda worker: worker not in spare):
            pool[self.situation.node_of[worker]].append(worker)
        gaps = self._gaps()
        left_in_ring = Counter(rank // self.mesh.cp for rank in gaps)
        # While spares last, only their nodes are looked at: turning a holder over to another shard comes last.
        num_spares = sum(worker in spare for worker in self.free)
        shelf = {node: workers for node, workers in pool.items() if workers[0] in spare} if num_spares else pool
        fewest: Counter[int] = Counter()
        for rank in gaps:
            ring = rank // self.mesh.cp
            node = self._best_node(rank, shelf, left_in_ring[ring], fewest)
            workers = shelf.pop(node)
            self._sit(rank, workers.pop(0))
            left_in_ring[ring] -= 1
            # Back at the end of the line, so that the next search meets less used nodes first.
            if workers and (shelf is pool or workers[0] in spare):
                shelf[node] = workers
            elif not workers:
                pool.pop(node, None)
            if not shelf:
                shelf, fewest = pool, Counter()
        self._swap_apart(gaps)
        self._trade_with_idle(gaps, spare)

    def _best_node(
        self, rank: int, shelf: Mapping[str, list[str]], num_left_in_ring: int, fewest: Counter[int]
    ) -> str:
        """Fewest holders of the shard, then most of the ring, then room for the rest of it.

        `fewest` remembers the least number of holders seen per shard; it only rises while nodes fill, so the
        search may end at the first node that reaches it with all else at its best.
        """
        ring, cp_rank = divmod(rank, self.mesh.cp)
        holders_on, ring_on = self.holders_on, self.ring_on
        begun = [node for node in self._nodes_of_ring(ring) if node in shelf]
        most = max([ring_on[ring, node] for node in begun]) if begun else 0
        best, best_key = "", (self.mesh.size + 1, 0, 0)
        for node in (*begun, *shelf) if begun else shelf:
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

    def _nodes_of_ring(self, ring: int) -> dict[str, None]:
        """In the order of the ranks that sit on them."""
        node_of, first = self.situation.node_of, ring * self.mesh.cp
        taken = self.taken[first : first + self.mesh.cp]
        return {node_of[worker]: None for worker in taken if worker is not None}

    def _swap_apart(self, gaps: Sequence[int]) -> None:
        """Two newcomers of one ring trade places where that parts holders of one shard."""
        by_ring: dict[int, list[int]] = defaultdict(list)
        for rank in gaps:
            by_ring[rank // self.mesh.cp].append(rank)
        for rank in gaps:
            if self.holders_on[self._spot(rank)] < 2:
                continue
            for other in by_ring[rank // self.mesh.cp]:
                if self._gain(rank, other) > 0:
                    first, second = self._leave(rank), self._leave(other)
                    self._sit(rank, second)
                    self._sit(other, first)
                    break

    def _trade_with_idle(self, gaps: Sequence[int], spare: set[str]) -> None:
        """A spare that was left standing takes a newcomer's place where that parts holders of one shard."""
        for rank in gaps:
            cp_rank, node = self._spot(rank)
            if self.taken[rank] not in spare or self.holders_on[cp_rank, node] < 2:
                continue
            least = self.holders_on[cp_rank, node] - 1
            for idle in [worker for worker in self.free if worker in spare]:
                if self.holders_on[cp_rank, self.situation.node_of[idle]] < least:
                    self.free[self._leave(rank)] = None
                    self._sit(rank, idle)
                    break

    def _gain(self, rank: int, other: int) -> int:
        """How many same-node pairs of one shard fewer there are after the two trade places."""
        (one, here), (two, there) = self._spot(rank), self._spot(other)
        if here == there or one == two:
            return 0
        on = self.holders_on
        return on[one, here] - 1 - on[one, there] + on[two, there] - 1 - on[two, here]

    def _spot(self, rank: int) -> tuple[int, str]:
        worker = self.taken[rank]
        assert worker is not None
        return rank % self.mesh.cp, self.situation.node_of[worker]

    def _cost(self, rank: int, node: str) -> tuple[int, int]:
        ring, cp_rank = divmod(rank, self.mesh.cp)
        return self.holders_on.get((cp_rank, node), 0), -self.ring_on.get((ring, node), 0)

    def _gaps(self) -> list[int]:
        return [rank for rank, worker in enumerate(self.taken) if worker is None]

    def _sit(self, rank: int, worker: str) -> None:
        self.free.pop(worker, None)
        self.taken[rank] = worker
        ring, cp_rank = divmod(rank, self.mesh.cp)
        node = self.situation.node_of[worker]
        self.holders_on[cp_rank, node] += 1
        self.ring_on[ring, node] += 1

    def _leave(self, rank: int) -> str:
        ring, cp_rank = divmod(rank, self.mesh.cp)
        worker = self.taken[rank]
        assert worker is not None
        self.taken[rank] = None
        node = self.situation.node_of[worker]
        self.holders_on[cp_rank, node] -= 1
        self.ring_on[ring, node] -= 1
        return worker


def _describe(situation: Situation, mesh: Mesh, seats: tuple[str, ...]) -> Plan:
    newcomers = tuple(
        worker for rank, worker in enumerate(seats) if situation.holders.get(worker) != rank % mesh.cp
    )
    seated = set(seats)
    leaving = tuple(w for w in (*situation.holders, *situation.empty) if w not in seated)
    heals = () if situation.fresh else _heals(situation, mesh, seats)
    action = "formed" if situation.fresh else _action(situation, mesh, newcomers, seated)
    old = situation.seats
    in_place = mesh == situation.mesh and all(
        new == before or before not in seated for new, before in zip(seats, old, strict=False)
    )
    promise = "bit-exact" if in_place or situation.fresh else "sample-exact"
    reason = f"{action}: {mesh}, {len(newcomers)} newcomer(s), {len(leaving)} without a seat"
    return Plan(mesh, seats, heals, newcomers, leaving, action, promise, reason)


def _action(situation: Situation, mesh: Mesh, newcomers: tuple[str, ...], seated: set[str]) -> str:
    if mesh.dp != situation.mesh.dp:
        return "mesh shrank" if mesh.dp < situation.mesh.dp else "grew"
    if any(worker in situation.draining and worker not in seated for worker in situation.seats):
        return "drained"
    # Whoever was healed in an attempt that failed afterwards is no newcomer any more, but still a spare.
    num_spares = len(seated - set(situation.seats))
    if num_spares:
        return "spare took its place" if num_spares == 1 else "spares took their places"
    return "healed in place" if newcomers else "rebuilt in place"


def _heals(situation: Situation, mesh: Mesh, seats: tuple[str, ...]) -> tuple[Heal, ...]:
    """Donors are verified holders; those with a seat first, in turn, so that no one sends everything."""
    everyone_seated = set(seats)
    seated = {w for rank, w in enumerate(seats) if situation.holders.get(w) == rank % mesh.cp}
    healers: dict[int, list[str]] = defaultdict(list)
    for worker, cp_rank in situation.holders.items():
        healers[cp_rank].append(worker)
    heals = []
    for cp_rank in range(mesh.cp):
        needy = [seats[rank] for rank in mesh.replicas(cp_rank) if seats[rank] not in seated]
        if not needy:
            continue
        in_mesh = [worker for worker in healers[cp_rank] if worker in seated]
        donors = in_mesh or [worker for worker in healers[cp_rank] if worker not in everyone_seated]
        assert donors, f"cp_rank {cp_rank} has a holder, but it was given another shard's seat"
        for index, donor in enumerate(donors):
            if needy[index :: len(donors)]:
                heals.append(Heal(cp_rank, donor, tuple(needy[index :: len(donors)])))
    return tuple(heals)
