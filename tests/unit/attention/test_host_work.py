"""What a pass asks of its host, counted: with short slices that, not the GPU, is how long it takes."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from elastic_ring.attention.kernels.adapters.aten import cpu_backward, cpu_forward
from elastic_ring.attention.kernels.kernel import DENSE, Kernel
from elastic_ring.attention.layouts.layout import Layout
from elastic_ring.attention.lowering import rectangles
from elastic_ring.attention.lowering.call_plan import Program, one_late
from elastic_ring.attention.merge import add_, eager_add_
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.rank_plan import RankPlan, Stage, rank_plan, traffic
from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.ring import RingAttention
from tests.unit.attention.attention_rings import Case

CASES = [
    Case(cp, 12 * cp + 5, causal, layout, documents, batch=batch)
    for cp, causal, layout, documents, batch in itertools.product(
        (1, 2, 4, 5), (True, False), ("contiguous", "zigzag"), ((0,), (0, 1, 9, 16)), (1, 2)
    )
]
SEVERAL = [case for case in CASES if case.cp > 1]


@dataclass
class IdleGroup:
    """Moves nothing: what is counted does not depend on what arrives."""

    cp_rank: int
    cp: int
    num_messages: int = 0
    waits: Counter[int] = field(default_factory=Counter)
    num_operations: int = 0

    def rank(self) -> int:
        return self.cp_rank

    def size(self) -> int:
        return self.cp

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> None:
        self.num_messages += 1

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> None:
        tensors[0].zero_()
        self.num_messages += 1

    def _start_coalescing(self) -> None:
        self.num_operations += 1

    def _end_coalescing(self) -> IdleWork:
        return IdleWork(self, self.num_operations)


@dataclass
class IdleWork:
    group: IdleGroup
    number: int

    def wait(self) -> None:
        self.group.waits[self.number] += 1


def ring_and_tensors(
    case: Case, cp_rank: int, hops_per_stage: int, **options: Any
) -> tuple[RingAttention, IdleGroup, list[torch.Tensor]]:
    group: Any = IdleGroup(cp_rank, case.cp)
    ring = RingAttention(
        case.schedule, cp_rank, group, RingOptions(coalesced=True, hops_per_stage=hops_per_stage, **options)
    )
    return ring, group, [case.layout.scatter(x, cp_rank, 1).contiguous() for x in case.tensors()]


def both_passes(ring: RingAttention, tensors: list[torch.Tensor]) -> None:
    q, k, v, dout = tensors
    with torch.no_grad():
        out, lse, call, _ = ring.run_forward(q, k, v, 1.0)
        ring.run_backward(dout, (q, k, v, out, lse), 1.0, call)


@pytest.mark.slow
@pytest.mark.parametrize("hops_per_stage", [1, 3])
def test_a_work_is_waited_for_once_however_many_messages_it_ends(hops_per_stage: int) -> None:
    for case in SEVERAL:
        for cp_rank in range(case.cp):
            ring, group, tensors = ring_and_tensors(case, cp_rank, hops_per_stage)
            both_passes(ring, tensors)
            assert set(group.waits.values()) <= {1}, (case, cp_rank)
            assert group.num_messages == 0 or group.waits
            plan = rank_plan(case.schedule, cp_rank, hops_per_stage)
            of_stages = traffic(plan, case.batch, case.num_kv_heads * case.head_dim, packed=False)
            keys = sum(bool(stage.keys_in or stage.keys_out) for stage in of_stages)
            partials = sum(bool(stage.partials_in or stage.partials_out) for stage in of_stages)
            assert len(group.waits) == 2 * keys + partials, "every work that ends a message is waited for"


def test_a_second_call_hashes_no_schedule_and_looks_up_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: Counter[str] = Counter()
    for kind in (Schedule, Pattern, Layout, Stage, RankPlan):

        def counted(self: Any, kind: type = kind, old: Any = kind.__hash__) -> int:
            hashed[kind.__name__] += 1
            return int(old(self))

        monkeypatch.setattr(kind, "__hash__", counted)
    planned: list[Any] = []
    monkeypatch.setattr(rectangles, "rank_plan", lambda *args: planned.append(args) or rank_plan(*args))
    for case in CASES:
        ring, _, tensors = ring_and_tensors(case, 0, 2)
        both_passes(ring, tensors)
        hash(case.schedule)
        assert hashed["Schedule"], "a look-up by schedules would be seen"
        hashed.clear()
        both_passes(ring, tensors)
        assert not hashed, case
        assert len(planned) == 1
        planned.clear()


def test_what_comes_back_to_a_key_is_added_in_one_go_dk_and_dv_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[int] = []

    def counted(total: torch.Tensor, parts: list[torch.Tensor]) -> None:
        sums.append(total.size(1))
        add_(total, parts)

    monkeypatch.setattr(rectangles, "add_", counted)
    case = Case(4, 64, causal=False, batch=2)
    for hops_per_stage, num_sums in ((1, 3), (3, 1)):
        sums.clear()
        ring, _, tensors = ring_and_tensors(case, 1, hops_per_stage)
        both_passes(ring, tensors)
        assert sums == [16] * num_sums


def test_no_tensor_is_cut_where_a_tile_is_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def checked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **more: Any) -> Any:
        seen.append(q is tensors[0] and k is tensors[1] and v is tensors[2])
        return cpu_forward(q, k, v, *rest, **more)

    kernel = Kernel("counted", DENSE, ("cpu",), (torch.float64,), None, True, checked, cpu_backward)
    ring, _, tensors = ring_and_tensors(Case(2, 64), 0, 1, backend=kernel)
    both_passes(ring, tensors)
    assert seen[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_one_call_that_is_all_there_is_has_the_bits_of_the_loop(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case in (Case(1, 24), Case(1, 24, causal=False, batch=2), Case(1, 24, document_starts=(0, 9)), Case(2, 24)):
        ring, _, tensors = ring_and_tensors(case, 0, 1)
        q, k, v, dout = (x.to(dtype) for x in tensors)
        plan, found = ring.call_plan(q, k), []
        assert (plan.alone is not None) == (case.cp == 1 and case.document_starts == (0,)), case
        for each in (plan, replace(plan, alone=None)):
            monkeypatch.setattr(ring, "call_plan", lambda *_, each=each, **__: each)
            with torch.no_grad():
                out, lse, call, _ = ring.run_forward(q, k, v, 1.0)
                found.append((out, lse, *ring.run_backward(dout, (q, k, v, out, lse), 1.0, call)))
        assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(*found, strict=True)), case


@pytest.mark.parametrize("num_stages", [2, 3])
def test_own_heads_in_two_halves_give_the_gradients_of_one_run(
    num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU runs them where there is much to hide."""
    case = Case(1, 24)
    ring, _, (q, k, v, dout) = ring_and_tensors(case, 0, 1)
    plan = rank_plan(case.schedule, 0, 1)
    with torch.no_grad():
        out, lse, *_ = ring.run_forward(q, k, v, 1.0)
        whole_plan, found = ring.call_plan(q, k), []
        halves = rectangles.own_halves(
            whole_plan.stages[0].forward, plan.stages[0].keys_once, k.size(2), q.size(2) // k.size(2)
        )
        sums = whole_plan.sums._replace(zeroed=num_stages > 2)
        program = Program(one_late(0, 2), halves, fetches=True)
        halved = replace(whole_plan, backward=program, sums=sums, alone=None)
        for each in (whole_plan, halved):
            monkeypatch.setattr(ring, "call_plan", lambda *_, each=each, **__: each)
            found.append(ring.run_backward(dout, (q, k, v, out, lse), 1.0, 0))
    for whole, halves in zip(*found, strict=True):
        assert torch.allclose(whole, halves, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_single_part_gives_the_bits_of_the_sum_in_fp32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for batch in (1, 2, 7):
        total, part = (torch.randn(batch, 33, 2, 8, generator=generator).mul(3).to(dtype) for _ in range(2))
        want = total.clone()
        eager_add_(want[:, 3:20], [part[:, 3:20]])
        add_(total[:, 3:20], [part[:, 3:20]])
        assert torch.equal(total, want)


# ------------------------------------------------------------ rows without keys


def test_that_every_row_sees_a_key_is_said_where_the_mask_says_so() -> None:
    for case in CASES:
        visible = case.visible().any(1)
        for cp_rank, hops_per_stage in itertools.product(range(case.cp), (1, 3)):
            rows = case.layout.scatter(visible, cp_rank, 0)
            assert rank_plan(case.schedule, cp_rank, hops_per_stage).every_row_sees is bool(rows.all()), case


@pytest.mark.parametrize("missing", ["the first", "the last", "one between", "all"])
def test_and_not_where_some_row_is_in_no_tile(missing: str) -> None:
    plan = rank_plan(Case(1, 40, document_starts=(0, 10, 20, 30)).schedule, 0, 1)
    (own,) = plan.stages
    kept = {
        "the first": own.by_rows[1:],
        "the last": own.by_rows[:-1],
        "one between": (own.by_rows[0], *own.by_rows[2:]),
        "all": (),
    }[missing]
    assert plan.every_row_sees
    assert not replace(plan, stages=(replace(own, by_rows=kept),)).every_row_sees
    nothing = tuple(replace(tile, k=(5, 5)) if tile not in kept else tile for tile in own.by_rows)
    assert not replace(plan, stages=(replace(own, by_rows=nothing),)).every_row_sees


def test_where_rows_see_nothing_backward_still_gets_their_lse_as_plus_infinity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(1, 40, document_starts=(0, 10, 20, 30))
    ring, _, (q, k, v, dout) = ring_and_tensors(case, 0, 1)
    call_plan = ring.call_plan(q, k)
    own, part = call_plan.stages[0], call_plan.backward.own[0]
    holes = (replace(own, forward=own.forward[1:], backward=own.backward[1:]),)
    program = call_plan.backward._replace(own=(part._replace(calls=part.calls[1:], once=False),))
    seeing = replace(call_plan, stages=holes, backward=program, every_row_sees=False)
    monkeypatch.setattr(ring, "call_plan", lambda *_, **__: seeing)
    with torch.no_grad():
        out, lse, call, _ = ring.run_forward(q, k, v, 1.0)
        grads = ring.run_backward(dout, (q, k, v, out, lse), 1.0, call)
    assert lse[:, :10].eq(float("inf")).all()
    assert lse[:, 10:].isfinite().all()
    assert all(x[:, :10].eq(0).all() for x in (out, *grads))
    assert all(x.isfinite().all() for x in grads)


def test_the_lse_of_a_ring_whose_rows_all_see_a_key_is_handed_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ring.attention.ring.lse_for_backward", lambda lse: pytest.fail("nothing to replace"))
    for case in CASES:
        ring, _, tensors = ring_and_tensors(case, 0, 1)
        both_passes(ring, tensors)


def test_messages_lie_where_both_sides_have_them_and_fill_every_buffer() -> None:
    """Each leg as its sender and as its receiver plan it, and no element of a stage's buffers twice or never."""
    for case, hops_per_stage, packed in itertools.product(SEVERAL, (1, 2, 4), (True, False)):
        row = case.num_kv_heads * case.head_dim
        plans = [rank_plan(case.schedule, cp_rank, hops_per_stage) for cp_rank in range(case.cp)]
        legs = [traffic(plan, case.batch, row, packed=packed) for plan in plans]
        for cp_rank, (plan, own) in enumerate(zip(plans, legs, strict=True)):
            for index, stage in enumerate(own):
                for mine, theirs in (("keys_in", "keys_out"), ("partials_in", "partials_out")):
                    for leg in getattr(stage, mine):
                        there = [other for other in getattr(legs[leg.peer][index], theirs) if other.hop == leg.hop]
                        assert [(other.peer, other.pieces) for other in there] == [(cp_rank, leg.pieces)]
                sizes = (plan.stages[index + 1].num_tokens, stage.num_served)
                for incoming, num_tokens in zip((stage.keys_in, stage.partials_in), sizes, strict=True):
                    filled = sorted((p.target, p.target + p.size) for leg in incoming for p in leg.pieces)
                    ends = [0, *(end for _, end in filled)]
                    assert [begin for begin, _ in filled] == ends[:-1]
                    assert ends[-1] == 2 * case.batch * num_tokens * row
