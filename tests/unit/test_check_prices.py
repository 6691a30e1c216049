"""What is put beside prices runs what it says, and the search for patterns plans with measured figures."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

import pytest
import torch

from elastic_ring.attention.choice import Candidate, Sizes, price
from elastic_ring.attention.layout import zigzag
from elastic_ring.attention.machine import Machine
from elastic_ring.attention.sparse import SparsePattern
from elastic_ring.attention.sparse_ring import SparseRingAttention
from elastic_ring.attention.sparse_schedule import SparseSchedule, plan_sparse
from elastic_ring.attention.spec import parse_pattern
from jobs.check_prices import Row, sending_all, systems_of, told
from tests.unit.attention_rings import ThreadRings, in_threads, one_thread

FIGURES = Machine(1e10, 1e8, 1e-3, 1e-4, 1e10, 0.5)


@pytest.fixture(scope="module")
def rings() -> Iterator[ThreadRings]:
    with one_thread():
        yield ThreadRings()


def test_sending_all_sends_every_key_and_gives_what_the_exact_ranges_give(rings: ThreadRings) -> None:
    pattern, layout, sizes = SparsePattern(parse_pattern("window:40").groups[0].rules, 16), zigzag(500, 3), (4, 2)
    exact = plan_sparse(pattern, layout, *sizes)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 500, n, 8, generator=generator, dtype=torch.float64) for n in (4, 2, 2)]

    def run(schedule: SparseSchedule) -> tuple[torch.Tensor, list[int]]:
        def work(cp_rank: int) -> tuple[torch.Tensor, int]:
            ring = SparseRingAttention(schedule, cp_rank, rings.groups(3)[cp_rank])
            out = ring(*(layout.scatter(x, cp_rank, 1) for x in whole))
            return out, sum(ring.ledger.received_bytes.values())

        rings.groups(3)
        found = in_threads(3, work)
        return layout.gather([out for out, _ in found], 1), [received for _, received in found]

    (want, _), (got, received) = run(exact), run(sending_all(exact))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert received == [(500 - layout.num_tokens(rank)) * 2 * 2 * 8 * 8 for rank in range(3)]
    of_ring = next(c for c in price(pattern, layout, Sizes(*sizes, 8, 8), Machine()) if c.exchange == "ring")
    assert of_ring.all_bytes == sum(received)


def row(predicted: float, measured: float) -> Row:
    return Row("window:128", 0.1, "zigzag/hops", predicted, 0, 1.0, [measured], [3 * measured])


def candidate(forward_s: float) -> Candidate:
    return Candidate(zigzag(8, 2), "hops", 0, 0, 0, 1.0, forward_s)


def test_agreement_is_by_rank_and_regret_by_time() -> None:
    lines, agreement = told([row(1.0, 2.0), row(2.0, 3.0), row(3.0, 9.0)], [candidate(s) for s in (1.0, 2.0, 3.0)])
    assert (agreement["forward"], agreement["both"], agreement["regret_of_chosen"]) == (1.0, 1.0, 0.0)
    assert [line.endswith("chosen") for line in lines] == [True, False, False, False]
    _, other = told([row(1.0, 3.0), row(2.0, 2.0), row(3.0, 1.0)], [candidate(s) for s in (1.0, 2.0, 3.0)])
    assert other["forward"] == -1.0
    assert other["regret_of_quickest"] == pytest.approx(2.0)


def test_each_layout_runs_with_the_exact_ranges_and_with_all() -> None:
    options = Namespace(tokens=1024, ranks=1, heads=(2, 2), head_dim=8)
    with one_thread():
        systems, prices = systems_of("bigbird:2,0,1", options, FIGURES, 0, None)
        for system in systems:
            system.forward()
            system.both()
    assert [system.row.candidate for system in systems] == [f"{p.layout.name}/{p.exchange}" for p in prices]
    assert {p.exchange for p in prices} == {"hops", "ring"}
