"""The vote: every rank reads the same table in rank order and comes to the same bits, or says why not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic_ring.control.decisions.corruption import QUANTITIES, Digests
from elastic_ring.control.decisions.loss_spikes import VERDICTS, SpikeBallot
from elastic_ring.control.messages import Vote
from elastic_ring.mesh import Mesh
from elastic_ring.train.vote import (
    NOTHING,
    Ballot,
    Flag,
    Outcome,
    ReplicasDiverged,
    Tally,
    count,
    remark_on,
    start_vote,
)
from tests.unit.attention.attention_rings import ThreadRings, in_threads, one_thread

MESH = Mesh(3, 2)
# Added from left to right these give another sum than in any other order.
UNEVEN = (1e16, 1.0, -1e16, 1.0, 3.0, 1e-3)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with one_thread():
        yield


def ballot(**fields: Any) -> Ballot:
    plain: dict[str, Any] = {
        "grad_norm_sq": 2.0,
        "loss_sum": 10.0,
        "num_tokens": 5,
        "samples": (1.0, 2.0, 3.0, 4.0),
    }
    return Ballot(Tally(**{**plain, **fields}))


def counted(ballots: list[Ballot], mesh: Mesh = MESH) -> Outcome:
    return count(7, [b.row() for b in ballots], mesh, (2, 5))


def outcome(**values: float) -> Outcome:
    plain = {"grad_norm_sq": 16.0, "num_tokens": 2.0, "loss_sum": 3.0}
    return Outcome(Vote(0, Tally(**{**plain, **values}).numbers()))


def test_all_ranks_hold_the_same_bits_of_the_same_vote() -> None:
    groups = ThreadRings().groups(MESH.size)

    def cast(rank: int) -> Outcome:
        work, rows = start_vote(groups[rank], ballot(loss_sum=UNEVEN[rank], samples=(rank, 0.0, 1.0, 2.0)))
        work.wait()
        return count(7, rows, MESH, (2, 5))

    outcomes = in_threads(MESH.size, cast)
    assert all(o == outcomes[0] for o in outcomes)
    assert (outcomes[0].vote.step, outcomes[0].vote.membership_id) == (7, (2, 5))
    assert outcomes[0].samples == (15.0, 0.0, 6.0, 12.0)


def test_sums_are_taken_in_rank_order() -> None:
    in_order = 0.0
    for value in UNEVEN:
        in_order += value
    assert in_order != sum(reversed(UNEVEN))
    total = counted([ballot(loss_sum=value) for value in UNEVEN])
    assert total.loss * total.num_tokens == in_order
    assert total.num_tokens == 30


def test_each_rank_tells_how_near_it_came_to_the_end_of_its_memory() -> None:
    shares = (0.5, 0.97, 0.0, 0.6, 0.7, 0.8)
    assert counted([replace(ballot(), memory_share=share) for share in shares]).memory_shares == shares


def test_the_largest_load_of_an_expert_is_that_of_the_worst_ring() -> None:
    loads = (1.5, 1.5, 1.25, 1.25, 1.75, 1.75)
    assert counted([replace(ballot(), expert_load=load) for load in loads]).expert_load == 1.75


def test_the_gradient_norm_is_counted_in_one_ring_only() -> None:
    """All rings hold the same reduced gradient, each rank of a ring another part of it."""
    total = counted([ballot(grad_norm_sq=(9.0, 16.0)[rank % 2]) for rank in range(6)])
    assert total.tally.grad_norm_sq == 25.0
    assert total.grad_norm == 5.0 / 30


def test_replicas_that_computed_different_gradients_are_named() -> None:
    ballots = [ballot(grad_norm_sq=1.0) for _ in range(6)]
    ballots[3] = ballot(grad_norm_sq=math.nextafter(1.0, 2.0))
    with pytest.raises(ReplicasDiverged, match=r"step 7: the replicas of cp_rank 1 .*rank 3: 1\.0000000000000002") as e:
        counted(ballots)
    assert e.value.facts == {"step": 7, "cp_rank": 1}


def test_replicas_that_are_all_nan_agree_and_one_that_is_does_not() -> None:
    assert counted([ballot(grad_norm_sq=math.nan, num_nonfinite=3)] * 6).skip
    with pytest.raises(ReplicasDiverged, match="cp_rank 0"):
        counted([ballot(grad_norm_sq=math.nan if rank == 4 else 1.0) for rank in range(6)])


def test_a_rank_reads_of_each_row_what_was_said() -> None:
    """Bit by bit, also where nothing is finite; in no more numbers than a row of plain sums had."""
    flags = Flag.BOUNDARY | Flag.BUSY | Flag.COPY_FAILED
    spike = SpikeBallot(7, math.inf, VERDICTS.index("clip"), clips_harder=True)
    tally = Tally(1e-300, 3.0, -math.inf, 2.0**53, (1.0, 2.0**32, 0.0, 4.0), flags, spike)
    told = Digests(1.0, 2.0, 3.0, 4.0, 5.0), QUANTITIES[2], Digests(2.0**48, 7.0, 8.0, 9.0, 1.0)
    whole = Ballot(tally, 0.25, 0.5, *told, 1.5)
    for said in (whole, ballot(), Ballot(Tally())):
        assert Ballot.of(said.row().tolist()) == said
    assert Tally.of(tally.numbers()) == tally
    assert len(whole.row()) <= 28


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ((NOTHING, Flag.DUE), (True, False, False, False)),
        ((Flag.BUSY, Flag.DUE), (False, True, False, False)),
        ((Flag.BUSY | Flag.DUE, Flag.BUSY), (False, True, False, False)),
        ((Flag.BUSY, Flag.BUSY), (False, False, False, False)),
        ((Flag.COPYING, Flag.COPY_FAILED), (False, False, True, True)),
        ((Flag.COPYING, Flag.COPYING | Flag.DUE), (True, False, True, False)),
        ((Flag.COPY_FAILED, Flag.COPY_FAILED), (False, False, False, True)),
    ],
)
def test_what_any_rank_says_of_checkpoints_and_copies_counts(said: tuple[Flag, Flag], found: tuple[bool, ...]) -> None:
    for one, two in (said, said[::-1]):
        total = counted([ballot(flags=two if rank == 4 else one) for rank in range(6)])
        assert (total.checkpoint, total.checkpoint_missed, total.copying, total.copies_failed) == found


@pytest.mark.parametrize("rank", range(6))
def test_one_request_for_a_boundary_is_enough(rank: int) -> None:
    assert counted([ballot(flags=Flag.BOUNDARY if i == rank else NOTHING) for i in range(6)]).boundary
    assert not counted([ballot() for _ in range(6)]).boundary


@pytest.mark.parametrize(
    ("values", "skip"),
    [
        ({}, False),
        ({"num_nonfinite": 1.0}, True),
        ({"grad_norm_sq": math.nan}, True),
        ({"grad_norm_sq": math.inf}, True),
        ({"loss_sum": math.nan}, True),
        ({"loss_sum": -math.inf}, True),
        ({"num_tokens": 0.0, "loss_sum": 0.0, "grad_norm_sq": 0.0}, True),
    ],
)
def test_a_step_is_skipped_for_any_number_that_is_not_finite(values: dict[str, float], skip: bool) -> None:
    assert outcome(**values).skip is skip


def test_a_step_without_a_target_is_skipped_and_said_and_no_part_of_a_row() -> None:
    empty, broken = outcome(num_tokens=0.0, loss_sum=0.0, grad_norm_sq=0.0), outcome(num_nonfinite=1.0)
    assert (math.isnan(empty.loss), empty.grad_norm, empty.spike, empty.scale(1.0)) == (True, 0.0, "", 1.0)
    said = remark_on(empty, lambda step: [4, 7])
    assert said.endswith("is skipped and changes nothing: no target of its sequences counts; its sequences are 4, 7")
    assert [result.skips_in_a_row(2) for result in (empty, broken, outcome())] == [2, 3, 0]


def test_a_shard_with_a_non_finite_gradient_makes_all_skip() -> None:
    # The rings have summed it up, so that every replica of the shard counts it.
    assert counted([ballot(num_nonfinite=int(rank % 2 == 0)) for rank in range(6)]).skip


def test_the_scale_is_the_mean_over_tokens_and_clips_the_norm_of_the_mean() -> None:
    total = outcome(grad_norm_sq=16.0, num_tokens=2.0)  # the mean's norm is 2
    assert total.grad_norm == 2.0
    assert total.scale(None) == 0.5
    assert total.scale(2.0) == 0.5
    assert total.scale(1.0) == 0.25
    assert total.scale(0.5) * 4.0 == 0.5  # times the norm of the sum: exactly the bound


def spiked(loss: float, **spike: Any) -> Outcome:
    """Six ranks of 5 tokens each; ranks that came later know less, and would do something else."""
    known = SpikeBallot(**{"num_seen": 90, "limit": 3.0, "verdict": VERDICTS.index("skip"), **spike})
    newcomer = SpikeBallot(num_seen=4, limit=99.0, verdict=VERDICTS.index("stop"), clips_harder=True)
    return counted([ballot(loss_sum=5 * loss, spike=known if rank in (2, 5) else newcomer) for rank in range(6)])


def test_a_loss_is_judged_by_the_rank_that_has_seen_most_steps() -> None:
    assert (spiked(3.5).spike, spiked(3.5).spike_limit, spiked(3.5).skip) == ("skip", 3.0, True)
    assert (spiked(2.5).spike, spiked(2.5).skip) == ("", False)
    assert (spiked(3.5, limit=0.0).spike, spiked(3.5, limit=0.0).skip) == ("", False)
    assert spiked(math.nan).spike == ""
    assert spiked(3.5).samples == (6.0, 12.0, 18.0, 24.0)


def test_what_follows_a_spike_is_part_of_the_vote() -> None:
    skips = {verdict: spiked(3.5, verdict=VERDICTS.index(verdict)).skip for verdict in VERDICTS[1:]}
    assert skips == {"log": False, "clip": False, "skip": True, "stop": True, "back": True}
    usual = spiked(2.5).scale(1e-3)
    assert spiked(3.5, verdict=VERDICTS.index("log")).scale(1e-3) == pytest.approx(usual)
    assert spiked(3.5, verdict=VERDICTS.index("clip")).scale(1e-3) == pytest.approx(0.1 * usual)
    assert spiked(2.5, clips_harder=True).scale(1e-3) == pytest.approx(0.1 * usual)
    assert spiked(2.5, clips_harder=True).scale(None) == spiked(2.5).scale(None)
