"""A ring whose rank is lost goes back to copies in its peers' memory: real processes, groups, shards and links.

Each process does what a member does in training and in a build that steps back; no Ray, and no decisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from elastic_ring.config import RunConfig
from elastic_ring.control.messages import Build, Heal, ParityGroup, SnapshotId
from elastic_ring.errors import ElasticRingError
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.groups.transport import translated
from elastic_ring.runtime.worker.copies import Copies
from elastic_ring.runtime.worker.generation_build import heal_from_copies
from tests.unit.groups.processes import Membership, abort, connect, membership
from tests.unit.train.tiny_task import begin, facts, make_task

RING = Mesh(1, 3)
WORKERS = ("a", "b", "c")
COPIES = {"copy_holders": ((1,), (2,), (0,))}
PARITY = {"parity_groups": (ParityGroup((0, 1), 2), ParityGroup((2,), 0))}
LOST, UNDONE, TO = 1, 2, 4


@pytest.fixture(scope="module")
def ring() -> Iterator[Membership]:
    with membership(3) as made:
        yield made


def build(generation: int, step: int, **where: Any) -> Build:
    return Build("c", "a", 1, generation, RING, WORKERS, step, None, (), False, **where)


def start(me: Any, where: Any, command: Build) -> None:
    begin(me, where, RING, make_task())
    me.copies = Copies(RunConfig(copy_every_steps=2), WORKERS[me.rank])
    me.state.before_apply = me.copies.before_apply
    hold(me, command)


def hold(me: Any, command: Build) -> None:
    """The end of a build, and the begin of training."""
    group = me.connector.host_link("copies", WORKERS, WORKERS[me.rank])
    me.copies.begin(command, me.rank, group, torch.device("cpu"))
    me.copies.first(me.state.shard)


def train(me: Any, num_steps: int) -> list[str]:
    """The losses; each exchange has ended before the next step."""
    losses = []
    with translated(me.connector):
        for _ in range(num_steps):
            me.copies._exchanges[-1].thread.join(timeout=60)
            step = me.state.applied
            outcome, _ = me.state.run(step, boundary=False, flags=partial(me.copies.flags, step + 1))
            me.copies.after_step(me.state.shard, outcome)
            losses.append(outcome.loss.hex())
    me.copies._exchanges[-1].thread.join(timeout=60)
    return losses


def held(me: Any) -> list[tuple[int, tuple[int, ...], bool]]:
    return sorted((one.snapshot.step, one.cp_ranks, one.own) for one in me.copies.store.held())


def step_back(
    me: Any, where: Any, command: Build, heals: tuple[Heal, ...], is_new: bool, rank: int | None = None
) -> str:
    """A build that goes back; `is_new`: as a process that has just started; `rank`: its new one, if it changes."""
    wanted, worker, old_rank = command.step_back, WORKERS[me.rank], me.rank
    assert wanted is not None
    if is_new:
        me.state.drop()
        me.copies.clear()
    me.state.leave()
    me.copies.leave()
    me.copies.keep(wanted)
    me.rank = me.rank if rank is None else rank
    connect(me, where, RING)
    me.membership_id = (command.term, command.generation)
    me.state.enter(me.groups, me.membership_id, keep=False)
    try:
        if not any(worker in heal.newcomers for heal in heals):
            with me.state.filling():
                me.copies.store.load(wanted, me.rank, me.state.shard)
        me.rank = old_rank
        for heal in heals:
            if worker in (*heal.senders, *heal.newcomers):
                heal_from_copies(heal, wanted, worker, me.copies.store, me.state, me.connector, lambda role: None, {})
        if rank is None:
            hold(me, command)
    except ElasticRingError as error:
        return f"{type(error).__name__}: {error}"
    return "back"


def flip(me: Any) -> None:
    me.copies.store.copies[-1].data[500] ^= 1


@pytest.mark.parametrize(
    ("placed", "heal"),
    [
        pytest.param(COPIES, Heal(LOST, "c", ("b",)), id="copy"),
        pytest.param(PARITY, Heal(LOST, "c", ("b",), ("a",)), id="parity", marks=pytest.mark.slow),
    ],
)
def test_a_ring_goes_back_to_the_bits_of_its_copies_and_trains_on_as_if_nothing_had_been(
    ring: Membership, placed: dict[str, Any], heal: Heal
) -> None:
    ring.all(start, ring.meeting(), build(0, 0, **placed))
    ring.all(train, TO)
    at = [fact["digest"] for fact in ring.all(facts)]
    losses = ring.all(train, UNDONE)
    ended = [fact["digest"] for fact in ring.all(facts)]
    assert held_steps(ring) == {4, 6}
    wanted = SnapshotId(TO, (1, 0))
    command = build(1, TO, step_back=wanted, keep=wanted, **placed)
    where = ring.meeting()
    for rank in range(3):
        ring.start(rank, step_back, where, command, (heal,), rank == LOST)
    assert [ring.result(rank) for rank in range(3)] == ["back"] * 3
    assert [fact["digest"] for fact in ring.all(facts)] == at
    assert ring.all(train, UNDONE) == losses
    assert [fact["digest"] for fact in ring.all(facts)] == ended
    assert all(fact["valid"] for fact in ring.all(facts))


def held_steps(ring: Membership) -> set[int]:
    return {step for told in ring.all(held) for step, _, _ in told}


@pytest.mark.slow
def test_a_rank_that_holds_its_own_parity_is_healed_from_its_own_memory_and_the_others(ring: Membership) -> None:
    """Ranks 0 and 1 are a group, whose parity c holds; c takes the place of rank 1, and b is gone."""
    ring.all(start, ring.meeting(), build(0, 0, **PARITY))
    ring.all(train, TO)
    at = [fact["digest"] for fact in ring.all(facts)]
    wanted = SnapshotId(TO, (1, 0))
    command = build(1, TO, step_back=wanted, keep=wanted, **PARITY)
    heals = (Heal(LOST, "c", ("c",), ("a",)), Heal(2, "a", ("b",)))
    where, new_ranks = ring.meeting(), (0, 2, 1)
    for rank in range(3):
        ring.start(rank, step_back, where, command, heals, rank == LOST, new_ranks[rank])
    assert [ring.result(rank) for rank in range(3)] == ["back"] * 3
    assert [fact["digest"] for fact in ring.all(facts)] == [at[0], at[2], at[1]]
    assert all((TO, (new_ranks[rank],), True) in ring.call(rank, held) for rank in range(3))


@pytest.mark.slow
def test_a_flipped_byte_in_the_copy_is_named_by_its_holder_and_the_newcomer_holds_nothing(ring: Membership) -> None:
    ring.all(start, ring.meeting(), build(0, 0, **COPIES))
    ring.all(train, TO)
    ring.call(2, flip)
    wanted = SnapshotId(TO, (1, 0))
    command = build(1, TO, step_back=wanted, keep=wanted, **COPIES)
    where = ring.meeting()
    for rank in range(3):
        ring.start(rank, step_back, where, command, (Heal(LOST, "c", ("b",)),), rank == LOST)
    told = ring.result(2)
    assert told.startswith(
        "DigestMismatch: the copy of cp_rank 1 of step 4 (generation 0), made by b, in c, has digest"
    )
    for rank in range(2):
        ring.now(rank, abort)
    assert ring.result(LOST).split(":")[0] in ("GroupAborted", "PeerFailed")
    ring.result(0)
    assert not ring.call(LOST, facts)["valid"]
    assert held_of(ring, 2) == [(4, (2,), True)]


def held_of(ring: Membership, rank: int) -> Any:
    return ring.call(rank, held)
