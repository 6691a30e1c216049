"""What workers keep of each other's state in memory: over real gloo groups between threads, one `Copies` a worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic_ring.config import RunConfig
from elastic_ring.control.messages import Build, HeldCopy, ParityGroup, SnapshotId, Vote
from elastic_ring.errors import DigestMismatch
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.worker.copies import DONE, FAILED, Copies, CopyStore
from elastic_ring.state import sealed
from elastic_ring.state.snapshot import Snapshot
from elastic_ring.train.vote import NOTHING, Flag, Outcome, Tally
from tests.unit.attention.attention_rings import ThreadRings, one_thread
from tests.unit.state.test_transfer import make_shard, take_step

MEMBERS = ("a", "b", "c")
RING = ((1,), (2,), (0,))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def rings() -> ThreadRings:
    return ThreadRings()


def build(generation: int = 3, step: int = 0, **where: Any) -> Build:
    return Build("c", "a", 1, generation, Mesh(1, 3), MEMBERS, step, None, (), True, **where)


class Ring:
    """Three workers in a generation, each with a shard."""

    def __init__(self, rings: ThreadRings, command: Build, told: list[Any] | None = None) -> None:
        self.groups = rings.groups(3)
        self.shards = [make_shard(steps=command.step, seed=rank, rows=3 + rank) for rank in range(3)]
        told = [] if told is None else told
        run = RunConfig(copy_every_steps=2)
        self.copies = [Copies(run, worker, told.append) for worker in MEMBERS]
        for rank, shard in enumerate(self.shards):
            shard.cp_rank = rank
        self.begin(command)

    def begin(self, command: Build) -> None:
        for rank, one in enumerate(self.copies):
            one.begin(command, rank, self.groups[rank], torch.device("cpu"))
            one.first(self.shards[rank])
        self.wait()

    def step(self, *, copies: float = 0.0, wait: bool = True) -> None:
        """One step of all, in whose vote someone said `copies` of the last exchange."""
        for rank, one in enumerate(self.copies):
            take_step(self.shards[rank], self.shards[rank].counters.applied)
            one.after_step(self.shards[rank], outcome(copies))
        if wait:
            self.wait()

    def wait(self) -> None:
        for one in self.copies:
            for exchange in one._exchanges:
                assert exchange.thread is not None
                exchange.thread.join(timeout=60)
                assert not exchange.is_alive

    def held(self, rank: int) -> set[tuple[int, tuple[int, ...], bool]]:
        return {(one.snapshot.step, one.cp_ranks, one.own) for one in self.copies[rank].store.held()}


def outcome(copies: Flag = NOTHING) -> Outcome:
    return Outcome(Vote(0, Tally(flags=copies).numbers()))


def loaded(data: Tensor, wanted: SnapshotId, rank: int) -> str:
    """The digest of the shard that a newcomer makes of it."""
    newcomer = make_shard(steps=0, seed=9, rows=3 + rank)
    CopyStore("d").fill(wanted, rank, data, newcomer)
    return newcomer.digest()


def test_each_rank_holds_its_own_snapshot_and_its_peers_copy_and_the_last_that_is_complete_stands(
    rings: ThreadRings,
) -> None:
    told: list[Any] = []
    ring = Ring(rings, build(copy_holders=RING), told)
    assert ring.held(0) == {(0, (0,), True), (0, (2,), False)}
    ring.step()
    assert ring.held(0) == {(0, (0,), True), (0, (2,), False)}, "no step of which copies are due"
    ring.step()
    assert ring.held(1) == {(step, (rank,), rank == 1) for step in (0, 2) for rank in (0, 1)}
    ring.step()
    ring.step()
    assert ring.held(1) == {(step, (rank,), rank == 1) for step in (2, 4) for rank in (0, 1)}
    assert [copied.step for copied in told].count(4) == 3
    assert {copied.num_holders for copied in told} == {1}


def test_a_copy_is_the_bits_of_its_owner_while_the_owner_trains_on(rings: ThreadRings) -> None:
    ring = Ring(rings, build(copy_holders=RING))
    digests = [shard.digest() for shard in ring.shards]
    ring.step()
    at = SnapshotId(0, (1, 3))
    for rank in range(3):
        assert loaded(ring.copies[(rank + 1) % 3].store.piece(at, rank), at, rank) == digests[rank]
        ring.copies[rank].store.load(at, rank, ring.shards[rank])
        assert ring.shards[rank].digest() == digests[rank]
    with pytest.raises(DigestMismatch, match="a holds nothing of cp_rank 1 of step 0"):
        ring.copies[0].store.piece(at, 1)


def test_a_due_snapshot_is_skipped_while_some_rank_is_busy_and_the_last_complete_one_stays(rings: ThreadRings) -> None:
    ring = Ring(rings, build(copy_holders=RING))
    one = ring.copies[0]
    assert [one.flags(applied) for applied in (1, 2)] == [NOTHING, NOTHING]
    ring.step()
    ring.step(copies=Flag.COPYING)
    assert ring.held(0) == {(0, (0,), True), (0, (2,), False)}
    assert one.num_skipped == 1
    one._exchanges[-1].state = "running"
    assert [one.flags(applied) for applied in (3, 4)] == [NOTHING, Flag.COPYING]
    one._exchanges[-1].state = "done"
    assert one.flags(4) == NOTHING
    pinned = threading.Event()
    one.pinning._thread = threading.Thread(target=pinned.wait, daemon=True)
    one.pinning._thread.start()
    assert one.flags(4) == Flag.COPYING, "training does not wait for memory that is being pinned"
    pinned.set()
    one.pinning._thread.join(10.0)
    assert one.flags(4) == NOTHING
    ring.step()
    ring.step()
    assert ring.held(0) == {(step, (rank,), rank == 0) for step in (0, 4) for rank in (0, 2)}


def test_an_exchange_that_came_to_nothing_leaves_the_one_before_it(rings: ThreadRings) -> None:
    ring = Ring(rings, build(copy_holders=RING))
    for _ in range(2):
        ring.step()
    ring.copies[2]._exchanges[-1].state = FAILED
    assert ring.copies[2].flags(4) == Flag.COPY_FAILED
    ring.step()
    ring.step(copies=Flag.COPY_FAILED)
    assert ring.held(0) == {(step, (rank,), rank == 0) for step in (0, 4) for rank in (0, 2)}


def test_what_arrives_damaged_is_named_and_not_kept_and_the_next_exchange_is_whole(
    rings: ThreadRings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Ring(rings, build(copy_holders=RING))
    ring.step()
    send = sealed.send

    def damaged(group: Any, data: Tensor, receiver: int) -> list[Any]:
        if receiver == 1:
            data = data.clone()
            data[200] ^= 4
        return send(group, data, receiver)

    monkeypatch.setattr(sealed, "send", damaged)
    ring.step()
    monkeypatch.setattr(sealed, "send", send)
    assert [one._exchanges[-1].state for one in ring.copies] == [DONE, FAILED, DONE]
    assert "the copy of rank 0 (a) of step 2 (generation 3) has digest" in caplog.text
    assert ring.held(1) == {(0, (1,), True), (0, (0,), False), (2, (1,), True)}
    ring.step()
    ring.step(copies=Flag.COPY_FAILED)
    assert ring.held(1) == {(step, (rank,), rank == 1) for step in (0, 4) for rank in (0, 1)}


@pytest.mark.parametrize("where", ["snapshot", "copying", "copy", "parity"])
def test_memory_that_cannot_be_had_costs_that_copy_and_nothing_else(
    rings: ThreadRings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Rank 1 cannot take its snapshot, or finish it in its thread, or has no room for what it receives; the next
    exchange is whole."""
    monkeypatch.setattr(sealed, "CHUNK_BYTES", 200)
    groups = {"parity_groups": (ParityGroup((0, 2), 1), ParityGroup((1,), 0))}
    ring = Ring(rings, build(**(groups if where == "parity" else {"copy_holders": RING})))
    whole = [ring.held(rank) for rank in range(3)]
    ring.step()
    buffers = ring.copies[1].store.pinned if where == "snapshot" else ring.copies[1].store.buffers
    finish = Snapshot.finish
    with monkeypatch.context() as patch:
        if where == "copying":
            patch.setattr(Snapshot, "finish", lambda one: refusing(0) if one.cp_rank == 1 else finish(one))
        else:
            patch.setattr(buffers, "take", refusing)
        ring.step()
    not_taken = [DONE, FAILED, FAILED]
    states = {"snapshot": not_taken, "copying": not_taken, "copy": [DONE, FAILED, DONE], "parity": [DONE, FAILED, DONE]}
    assert [one._exchanges[-1].state for one in ring.copies] == states[where]
    assert "not enough pinned memory" in caplog.text
    ring.step()
    ring.step(copies=Flag.COPY_FAILED)
    assert [one._exchanges[-1].state for one in ring.copies] == [DONE] * 3
    assert [ring.held(rank) for rank in range(3)] == [
        {(step, ranks, own) for step in (0, 4) for _, ranks, own in held} for held in whole
    ]


def refusing(num_bytes: int) -> Tensor:
    raise RuntimeError("not enough pinned memory")


def test_a_copy_that_was_damaged_in_memory_is_named_dropped_and_not_reported_again(
    rings: ThreadRings, caplog: pytest.LogCaptureFixture
) -> None:
    ring, at = Ring(rings, build(copy_holders=RING)), SnapshotId(0, (1, 3))
    one = ring.copies[1].store
    one.copies[0].data[300] ^= 1
    with pytest.raises(DigestMismatch, match="the copy of cp_rank 0 of step 0"):
        one.piece(at, 0)
    assert one.held() == (HeldCopy(at, (1,), own=True),)
    one.own[at].data[300] ^= 1
    before = ring.shards[1].digest()
    with pytest.raises(DigestMismatch, match="the snapshot of cp_rank 1 of step 0"):
        one.load(at, 1, ring.shards[1])
    assert (one.held(), ring.shards[1].digest()) == ((), before)
    assert caplog.text.count("it is dropped") == 2


def test_a_parity_gives_back_the_snapshot_of_each_of_its_group(rings: ThreadRings) -> None:
    groups = (ParityGroup((0, 1), 2), ParityGroup((2,), 0))
    ring, at = Ring(rings, build(parity_groups=groups)), SnapshotId(0, (1, 3))
    assert ring.copies[2].store.held()[1:] == (HeldCopy(at, (0, 1), parity_of=("a", "b")),)
    assert ring.held(0) == {(0, (0,), True), (0, (2,), False)}, "the parity of one is a copy"
    for lost, other in ((0, 1), (1, 0)):
        parity = ring.copies[2].store.piece(at, lost, (MEMBERS[other],)).clone()
        whole = sealed.missing_piece(parity, [ring.copies[other].store.own_piece(at)], "it")
        assert loaded(whole, at, lost) == ring.shards[lost].digest()


def test_at_a_build_only_what_it_keeps_stays_and_memory_is_used_again(rings: ThreadRings) -> None:
    ring = Ring(rings, build(copy_holders=RING))
    for _ in range(4):
        ring.step()
    used = {one.data.data_ptr() for one in ring.copies[0].store.own.values()}
    for one in ring.copies:
        one.leave()
        assert (one.is_on, one.flags(6)) == (False, NOTHING)
        one.keep(SnapshotId(4, (1, 3)))
    assert ring.held(0) == {(4, (0,), True), (4, (2,), False)}
    ring.begin(build(generation=5, step=4, copy_holders=RING))
    assert {one.snapshot.membership_id for one in ring.copies[0].store.held()} == {(1, 3), (1, 5)}
    assert {one.data.data_ptr() for one in ring.copies[0].store.own.values()} == used
    ring.copies[0].clear()
    assert ring.copies[0].store.held() == ()


def test_nothing_of_an_exchange_counts_after_its_generation_has_ended(rings: ThreadRings) -> None:
    ring = Ring(rings, build(copy_holders=RING))
    ring.copies[1].leave()
    ring.copies[1].keep(None)
    exchange = ring.copies[0]._exchanges[-1]
    exchange.is_over = True
    ring.copies[0].keep(None)
    exchange.keep_own()
    assert ring.copies[0].store.held() == ()
