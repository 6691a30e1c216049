"""The copies of one simulated worker: its own snapshots, its peers' copies and parities, and how they travel.

The exchange is that of the real worker: a snapshot at the end of every build and after each `copy_every_steps`-th step,
unless the vote says that someone's last one is still under way; sent again until acknowledged; verified on arrival and
again before use; broken off with its generation. No clock, no ray.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from elastic_ring.control.messages import Build, Heal, HeldCopy, ParityGroup, SnapshotId, Vote
from tests.sim.simulator.shard import Shard

if TYPE_CHECKING:
    from tests.sim.simulator.worker import Group, SimWorker

SEND_AGAIN_S = 0.5
FLIPPED = Vote(-1, (-1.0,))


@dataclass(frozen=True)
class Kept:
    """A shard in host memory, and the one its digest was taken of."""

    shard: Shard
    digest_of: Shard

    @classmethod
    def of(cls, shard: Shard) -> Kept:
        return cls(shard, shard)

    @property
    def sound(self) -> bool:
        """Whether the digest agrees."""
        return self.shard == self.digest_of

    def flipped(self) -> Kept:
        return replace(self, shard=replace(self.shard, history=(*self.shard.history[:-1], FLIPPED)))


@dataclass(frozen=True)
class Piece:
    """What is on its way: the snapshot of `owner`, for the parity of `group` or as a copy of its own."""

    snapshot: SnapshotId
    owner: str
    shard: Shard
    group: ParityGroup | None = None


class SimCopies:
    """What one worker holds, by snapshot; of a parity the snapshots that went into it, by owner."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker, self.world = worker, worker.world
        self.own: dict[SnapshotId, Kept] = {}
        self.of_peers: dict[tuple[SnapshotId, str], Kept] = {}
        self.parities: dict[tuple[SnapshotId, ParityGroup], dict[str, Kept]] = {}
        self.unacknowledged: set[tuple[SnapshotId, str]] = set()

    # ------------------------------------------------------------ snapshots

    @property
    def busy(self) -> bool:
        """Whether the last snapshot of this worker is still under way."""
        return bool(self.unacknowledged)

    def built(self, group: Group) -> None:
        """The state of a new mesh is complete: the first snapshot of its members. It replaces none: others may find a
        copy damaged yet, and go back further."""
        self._take(group)

    def applied(self, group: Group, vote: Vote) -> None:
        """A step was applied: take the next snapshot if it is due and nobody's last one is under way. That vote shows
        that the last one is complete everywhere, so those before it are dropped."""
        if not self._exchanges(group) or self.worker.applied % self.world.options.run.copy_every_steps:
            return
        if self._all_idle(vote):
            # A peer that was faster may have sent its next one already.
            self.keep_only({max(self.own), SnapshotId(self.worker.applied, (group.order.term, group.order.generation))})
            self._take(group)
        else:
            group.skipped.add(self.worker.applied)

    def _all_idle(self, vote: Vote) -> bool:
        return vote.values[4] == 0

    def _exchanges(self, group: Group) -> bool:
        return bool(group.order.copy_holders or group.order.parity_groups)

    def _take(self, group: Group) -> None:
        worker, order = self.worker, group.order
        if not self._exchanges(group):
            return
        assert worker.shard is not None
        snapshot = SnapshotId(worker.applied, (order.term, order.generation))
        self.own[snapshot] = Kept.of(worker.shard)
        group.taken.add(snapshot.step)
        rank = order.members.index(worker.name)
        pieces = []
        if order.copy_holders:
            piece = Piece(snapshot, worker.name, worker.shard)
            pieces = [(order.members[holder], piece) for holder in order.copy_holders[rank]]
        for parity in order.parity_groups:
            if rank in parity.ranks:
                alone = len(parity.ranks) == 1  # the parity of one is a copy
                piece = Piece(snapshot, worker.name, worker.shard, None if alone else parity)
                pieces.append((order.members[parity.holder], piece))
        self.unacknowledged = {(snapshot, holder) for holder, _ in pieces}
        for holder, piece in pieces:
            self._send(group, holder, piece)

    # ------------------------------------------------------------ the exchange

    def _send(self, group: Group, holder: str, piece: Piece) -> None:
        """Send until it is acknowledged or the generation ends; what arrives damaged is not acknowledged."""
        if self.worker.group is not group or (piece.snapshot, holder) not in self.unacknowledged:
            return
        target = self.world.workers[holder].copies
        delay_s = self.world.random.choice([0.02, 0.1, 0.6])
        if not self.worker.frozen and self.world.random.random() >= self.world.schedule.lost:
            self.world.later(self.world.random.uniform(0.005, delay_s), lambda: target.arrived(group, piece, self))
        self.world.later(SEND_AGAIN_S + delay_s, lambda: self._send(group, holder, piece))

    def arrived(self, group: Group, piece: Piece, sender: SimCopies) -> None:
        worker = self.worker
        if not worker.alive or worker.frozen or worker.group is not group:
            return
        kept = Kept.of(piece.shard)
        if self.world.take_fault("flip-in-transfer"):
            kept = kept.flipped()
        if not kept.sound:
            return
        if any(snapshot > piece.snapshot for snapshot in self.own):
            return  # a late one of a round that is over
        if piece.group is None:
            self.of_peers.setdefault((piece.snapshot, piece.owner), kept)
        else:
            self.parities.setdefault((piece.snapshot, piece.group), {}).setdefault(piece.owner, kept)
        if worker.doing not in ("paused", "stopped"):  # what comes after its report is told to nobody, and dropped
            group.stored.setdefault(piece.snapshot.step, set()).add((piece.owner, worker.name))
        key = (piece.snapshot, worker.name)
        if self.world.random.random() >= self.world.schedule.lost:
            self.world.later(self.world.random.uniform(0.001, 0.02), lambda: sender.unacknowledged.discard(key))

    # ------------------------------------------------------------ what is held

    def held(self) -> tuple[HeldCopy, ...]:
        """For the report. A parity counts once all its snapshots are in it. Flipped bits are found at use only."""
        found = [HeldCopy(snapshot, (kept.shard.cp_rank,), own=True) for snapshot, kept in self.own.items()]
        found += [HeldCopy(snapshot, (kept.shard.cp_rank,)) for (snapshot, _), kept in self.of_peers.items()]
        for (snapshot, parity), inside in self.parities.items():
            if len(inside) == len(parity.ranks):
                cp_ranks = tuple(kept.shard.cp_rank for kept in inside.values())
                found.append(HeldCopy(snapshot, cp_ranks, parity_of=tuple(inside)))
        return tuple(found)

    def keep_only(self, snapshots: Container[SnapshotId]) -> None:
        self.own = {at: kept for at, kept in self.own.items() if at in snapshots}
        self.of_peers = {key: kept for key, kept in self.of_peers.items() if key[0] in snapshots}
        self.parities = {key: inside for key, inside in self.parities.items() if key[0] in snapshots}

    def obeyed(self, order: Build) -> None:
        """A build drops what is newer than its beginning."""
        newest = order.step_back or order.keep
        if newest is None:
            self.forget()
        else:
            known = {*self.own, *(key[0] for key in self.of_peers), *(key[0] for key in self.parities)}
            self.keep_only({at for at in known if at <= newest})

    def forget(self) -> None:
        self.own, self.of_peers, self.parities = {}, {}, {}
        self.unacknowledged = set()

    def broken_off(self) -> None:
        """The generation ends: what is under way never arrives."""
        self.unacknowledged = set()

    # ------------------------------------------------------------ going back

    def load(self, snapshot: SnapshotId, cp_rank: int) -> Shard | None:
        """The shard from this worker's memory; None, and it is dropped, if it is not there or does not verify."""
        kept = self.own.get(snapshot)
        if kept is not None and kept.digest_of.cp_rank == cp_rank:
            return self._verified(self.own, snapshot)
        for key, kept in list(self.of_peers.items()):
            if key[0] == snapshot and kept.digest_of.cp_rank == cp_rank:
                return self._verified(self.of_peers, key)
        return None

    def given(self, snapshot: SnapshotId, heal: Heal) -> Shard | None:
        """What this donor sends, from its memory; None if something does not verify."""
        return self._rebuilt(snapshot, heal) if heal.parity_from else self.load(snapshot, heal.cp_rank)

    def healed(self, snapshot: SnapshotId | None, shard: Shard) -> None:
        """A newcomer that got a snapshot holds it from then on, too."""
        if snapshot is not None:
            self.own.setdefault(snapshot, Kept.of(shard))

    def _rebuilt(self, snapshot: SnapshotId, heal: Heal) -> Shard | None:
        """The shard of `heal.cp_rank` from this worker's parity and the snapshots of `heal.parity_from`."""
        for key, inside in list(self.parities.items()):
            left = [owner for owner in inside if owner not in heal.parity_from]
            if key[0] != snapshot or len(left) != 1 or len(inside) != len(heal.parity_from) + 1:
                continue
            (missing,) = left
            if inside[missing].digest_of.cp_rank != heal.cp_rank:
                continue
            snapshots = [self.world.workers[name].copies.own.get(snapshot) for name in heal.parity_from]
            if not all(kept.sound for kept in inside.values()):
                del self.parities[key]
                self.world.count("damaged copy found")
                return None
            for name, kept in zip(heal.parity_from, snapshots, strict=True):
                if kept is None or self.world.workers[name].copies.load(snapshot, kept.digest_of.cp_rank) is None:
                    return None
            return inside[missing].shard
        return None

    def _verified(self, where: dict[Any, Kept], key: object) -> Shard | None:
        kept = where[key]
        if self._verifies(kept):
            return kept.shard
        del where[key]
        self.world.count("damaged copy found")
        return None

    def _verifies(self, kept: Kept) -> bool:
        return kept.sound

    # ------------------------------------------------------------ faults

    def flip(self) -> bool:
        """A bit flips in something that is held; False if nothing is."""
        places: list[tuple[dict[Any, Kept], Any]] = [(self.own, at) for at in self.own]
        places += [(self.of_peers, key) for key in self.of_peers]
        places += [(inside, owner) for inside in self.parities.values() for owner in inside]
        if not places:
            return False
        where, key = self.world.random.choice(places)
        where[key] = where[key].flipped()
        return True

    def lose(self) -> bool:
        """What is held for others is gone; False if there is nothing."""
        held = bool(self.of_peers or self.parities)
        self.of_peers, self.parities = {}, {}
        return held
