"""What a pass asks of its host, counted: with short slices that, not the GPU, is how long it takes."""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from elastic_ring.attention.comm.ledger import EVENT_STEPS, HopEvents, HopLedger, HopTally
from elastic_ring.attention.kernels.adapters.aten import cpu_backward, cpu_forward
from elastic_ring.attention.kernels.kernel import DENSE, Kernel
from elastic_ring.attention.kernels.registry import named
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import Layout, make_layout
from elastic_ring.attention.lowering import rectangles
from elastic_ring.attention.lowering.call_plan import Program, one_late
from elastic_ring.attention.merge import add_, eager_add_
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.rank_plan import RankPlan, Stage, rank_plan, traffic
from elastic_ring.attention.plan.schedule import Schedule, plan
from elastic_ring.attention.ring import RingAttention
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.transformer import Transformer
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
def test_a_work_is_waited_for_once_however_many_messages_it_ends(hops_per_stage):
    for case in SEVERAL:
        for cp_rank in range(case.cp):
            ring, group, tensors = ring_and_tensors(case, cp_rank, hops_per_stage)
            both_passes(ring, tensors)
            assert set(group.waits.values()) <= {1}, (case, cp_rank)
            assert group.num_messages == 0 or group.waits
            own_plan = rank_plan(case.schedule, cp_rank, hops_per_stage)
            of_stages = traffic(own_plan, case.batch, case.num_kv_heads * case.head_dim, packed=False)
            keys = sum(bool(stage.keys_in or stage.keys_out) for stage in of_stages)
            partials = sum(bool(stage.partials_in or stage.partials_out) for stage in of_stages)
            assert len(group.waits) == 2 * keys + partials, "every work that ends a message is waited for"


def test_a_second_call_hashes_no_schedule_and_looks_up_no_plan(monkeypatch):
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


def test_what_comes_back_to_a_key_is_added_in_one_go_dk_and_dv_together(monkeypatch):
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


def test_no_tensor_is_cut_where_a_tile_is_all_of_it(monkeypatch):
    seen: list[bool] = []

    def checked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **more: Any) -> Any:
        seen.append(q is tensors[0] and k is tensors[1] and v is tensors[2])
        return cpu_forward(q, k, v, *rest, **more)

    kernel = Kernel("counted", DENSE, ("cpu",), (torch.float64,), None, True, checked, cpu_backward)
    ring, _, tensors = ring_and_tensors(Case(2, 64), 0, 1, backend=kernel)
    both_passes(ring, tensors)
    assert seen[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_one_call_that_is_all_there_is_has_the_bits_of_the_loop(dtype, monkeypatch):
    for case in (Case(1, 24), Case(1, 24, causal=False, batch=2), Case(1, 24, document_starts=(0, 9)), Case(2, 24)):
        ring, _, tensors = ring_and_tensors(case, 0, 1)
        q, k, v, dout = (x.to(dtype) for x in tensors)
        own_plan, found = ring.call_plan(q, k), []
        assert (own_plan.alone is not None) == (case.cp == 1 and case.document_starts == (0,)), case
        for each in (own_plan, replace(own_plan, alone=None)):
            monkeypatch.setattr(ring, "call_plan", lambda *_, each=each, **__: each)
            with torch.no_grad():
                out, lse, call, _ = ring.run_forward(q, k, v, 1.0)
                found.append((out, lse, *ring.run_backward(dout, (q, k, v, out, lse), 1.0, call)))
        assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(*found, strict=True)), case


@pytest.mark.parametrize("num_stages", [2, 3])
def test_own_heads_in_two_halves_give_the_gradients_of_one_run(num_stages, monkeypatch):
    """As a GPU runs them where there is much to hide."""
    case = Case(1, 24)
    ring, _, (q, k, v, dout) = ring_and_tensors(case, 0, 1)
    own_plan = rank_plan(case.schedule, 0, 1)
    with torch.no_grad():
        out, lse, *_ = ring.run_forward(q, k, v, 1.0)
        whole_plan, found = ring.call_plan(q, k), []
        halves = rectangles.own_halves(
            whole_plan.stages[0].forward, own_plan.stages[0].keys_once, k.size(2), q.size(2) // k.size(2)
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
def test_a_single_part_gives_the_bits_of_the_sum_in_fp32(dtype):
    generator = torch.Generator().manual_seed(0)
    for batch in (1, 2, 7):
        total, part = (torch.randn(batch, 33, 2, 8, generator=generator).mul(3).to(dtype) for _ in range(2))
        want = total.clone()
        eager_add_(want[:, 3:20], [part[:, 3:20]])
        add_(total[:, 3:20], [part[:, 3:20]])
        assert torch.equal(total, want)


# ------------------------------------------------------------ rows without keys


def test_that_every_row_sees_a_key_is_said_where_the_mask_says_so():
    for case in CASES:
        visible = case.visible().any(1)
        for cp_rank, hops_per_stage in itertools.product(range(case.cp), (1, 3)):
            rows = case.layout.scatter(visible, cp_rank, 0)
            assert rank_plan(case.schedule, cp_rank, hops_per_stage).every_row_sees is bool(rows.all()), case


@pytest.mark.parametrize("missing", ["the first", "the last", "one between", "all"])
def test_and_not_where_some_row_is_in_no_tile(missing):
    own_plan = rank_plan(Case(1, 40, document_starts=(0, 10, 20, 30)).schedule, 0, 1)
    (own,) = own_plan.stages
    kept = {
        "the first": own.by_rows[1:],
        "the last": own.by_rows[:-1],
        "one between": (own.by_rows[0], *own.by_rows[2:]),
        "all": (),
    }[missing]
    assert own_plan.every_row_sees
    assert not replace(own_plan, stages=(replace(own, by_rows=kept),)).every_row_sees
    nothing = tuple(replace(tile, k=(5, 5)) if tile not in kept else tile for tile in own.by_rows)
    assert not replace(own_plan, stages=(replace(own, by_rows=nothing),)).every_row_sees


def test_where_rows_see_nothing_backward_still_gets_their_lse_as_plus_infinity(monkeypatch):
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


def test_the_lse_of_a_ring_whose_rows_all_see_a_key_is_handed_on_as_it_is(monkeypatch):
    monkeypatch.setattr("elastic_ring.attention.ring.lse_for_backward", lambda lse: pytest.fail("nothing to replace"))
    for case in CASES:
        ring, _, tensors = ring_and_tensors(case, 0, 1)
        both_passes(ring, tensors)


def test_messages_lie_where_both_sides_have_them_and_fill_every_buffer():
    """Each leg as its sender and as its receiver plan it, and no element of a stage's buffers twice or never."""
    for case, hops_per_stage, packed in itertools.product(SEVERAL, (1, 2, 4), (True, False)):
        row = case.num_kv_heads * case.head_dim
        plans = [rank_plan(case.schedule, cp_rank, hops_per_stage) for cp_rank in range(case.cp)]
        legs = [traffic(own_plan, case.batch, row, packed=packed) for own_plan in plans]
        for cp_rank, (own_plan, own) in enumerate(zip(plans, legs, strict=True)):
            for index, stage in enumerate(own):
                for mine, theirs in (("keys_in", "keys_out"), ("partials_in", "partials_out")):
                    for leg in getattr(stage, mine):
                        there = [other for other in getattr(legs[leg.peer][index], theirs) if other.hop == leg.hop]
                        assert [(other.peer, other.pieces) for other in there] == [(cp_rank, leg.pieces)]
                sizes = (own_plan.stages[index + 1].num_tokens, stage.num_served)
                for incoming, num_tokens in zip((stage.keys_in, stage.partials_in), sizes, strict=True):
                    filled = sorted((p.target, p.target + p.size) for leg in incoming for p in leg.pieces)
                    ends = [0, *(end for _, end in filled)]
                    assert [begin for begin, _ in filled] == ends[:-1]
                    assert ends[-1] == 2 * case.batch * num_tokens * row


# --------------------------------------------------------------------------------------------- the files that handle q


ROOT = Path(__file__).resolve().parents[3]
ADAPTERS = "elastic_ring/attention/kernels/adapters"
NUM_TOKENS = 256
WAYS = {
    "dense": (None, RingOptions(backend=named("aten-cpu"))),
    "sparse, CPU": ("window:64", RingOptions()),
    "sparse, GPU": ("window:128", RingOptions(kernel=named("reference-sparse"))),
}
"""The pattern of each way, and how it runs; tables of GPUs run on a CPU with the kernel that is their reference."""


def walk(attention: Any) -> set[str]:
    """The package's files that get q, from the model's call on, once plans are made; adapters of kernels as one."""
    model = Transformer(ModelConfig(64, 1, 32, 4, 2, 8, 64))
    tokens = torch.arange(NUM_TOKENS).unsqueeze(0) % 64
    found = set[str]()
    storage: list[int] = []
    alive: list[torch.Tensor] = []

    def is_q(value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in storage

    def entered(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(ROOT / "elastic_ring"):
            return
        if not storage and "attention" in path.parts and isinstance(frame.f_locals.get("q"), torch.Tensor):
            alive.append(frame.f_locals["q"])  # what comes later must not have its address
            storage.append(alive[0].untyped_storage().data_ptr())
            assert frame.f_back is not None
            found.add(Path(frame.f_back.f_code.co_filename).relative_to(ROOT).as_posix())
        values = [each for value in frame.f_locals.values() for each in (value if type(value) is tuple else [value])]
        if any(map(is_q, values)):
            found.add(path.relative_to(ROOT).as_posix())

    for watch in (None, entered):
        sys.setprofile(watch)
        try:
            model(tokens, positions=tokens, document_ids=tokens.int(), attention=attention)
        finally:
            sys.setprofile(None)
    return {ADAPTERS if path.startswith(ADAPTERS) else path for path in found}


@pytest.mark.parametrize("way", WAYS)
def test_the_walk_of_q_is_the_one_that_the_documents_name(way):
    pattern, options = WAYS[way]
    layout = make_layout("zigzag", NUM_TOKENS, 1)
    if pattern is None:
        found = walk(RingAttention(plan(Pattern(), layout), 0, None, options))
    else:
        found = walk(PatternedAttention(parse_pattern(pattern), layout, 0, None, options))
    text = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8").split("## The walk of q")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in text.splitlines() if line.startswith("|")]
    column = 0 if way == "dense" else 1
    cells = [row[0] if row[column] == "the same" else row[column] for row in rows]
    assert found == {path for cell in cells for path in re.findall(r"`([^`]+)`", cell)}


# ------------------------------------------------------------------------ times of hops as a device's events tell them


@dataclass
class Mark:
    """What a CUDA event says: when the device passed it (ms), and whether it has yet."""

    at_ms: float
    passed: bool = True

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, end: Mark) -> float:
        assert self.passed, "asked of what is not over, CUDA raises"
        assert end.passed
        return end.at_ms - self.at_ms


def exchange(latency_ms: float, exposed_ms: float = 0.0, passed: bool = True) -> HopEvents:
    return HopEvents("forward", 1, Mark(1.0), Mark(1.0 + latency_ms, passed), Mark(5.0), Mark(5.0 + exposed_ms))


def times_of(*events: HopEvents) -> list[float | None]:
    """Latency in the mean and at the 99th percentile, and the time exposed."""
    figures = HopTally(True, 1, events=list(events)).figures()
    return [figures["hop_latency_mean_s"], figures["hop_latency_p99_s"], figures["exposed_hop_wait_s"]]


def test_mean_and_99th_percentile_are_over_the_exchanges_and_what_is_exposed_adds_up():
    many = times_of(*(exchange(float(ms), 0.5) for ms in range(1, 201)))
    assert many == [pytest.approx(0.1005), pytest.approx(0.198), pytest.approx(0.1)]
    assert times_of(exchange(1.0), exchange(3.0))[1] == pytest.approx(0.003), "of few the longest"


def test_what_is_not_over_is_left_out_and_not_waited_for():
    untaken = HopEvents("forward", 1, Mark(1.0))
    assert times_of(exchange(1.0), exchange(9.0, passed=False), untaken)[1] == pytest.approx(0.001)
    assert times_of(untaken) == times_of() == [None] * 3


def told(on_gpu: bool, step: int, *events: HopEvents) -> tuple[HopTally, dict[str, Any]]:
    tally = HopTally(on_gpu, step)
    for _ in range(2):
        ledger = HopLedger()
        tally.watch(ledger)
        ledger.sent_bytes["forward", 1] += 100
        ledger.wait_s["forward", 1] += 0.25
        ledger.events += events if ledger.keep_events else ()
        tally.add(ledger)
    return tally, tally.figures()


def test_on_a_gpu_one_step_of_ten_is_watched_and_the_hosts_clock_is_no_answer():
    event = exchange(2.0, 1.0)
    watched = [step for step in range(3 * EVENT_STEPS) if told(True, step, event)[0].is_watched]
    assert watched == [1, EVENT_STEPS + 1, 2 * EVENT_STEPS + 1]
    _, figures = told(True, 1, event)
    assert figures == {
        "hop_bytes": 200,
        "far_hop_bytes": 0,
        "exposed_hop_wait_s": pytest.approx(0.002),
        "hop_latency_mean_s": pytest.approx(0.002),
        "hop_latency_p99_s": pytest.approx(0.002),
    }
    unmeasured = {"exposed_hop_wait_s": None, "hop_latency_mean_s": None, "hop_latency_p99_s": None}
    nothing = {"hop_bytes": 200, "far_hop_bytes": 0, **unmeasured}
    assert told(True, 2, event)[1] == nothing
    assert told(True, 1)[1] == nothing, "a ring of one has no hops"


def test_on_a_cpu_the_hosts_wait_is_measured_in_every_step_and_no_latency():
    for step in (0, 1, 2):
        assert told(False, step, exchange(2.0))[1] == {
            "hop_bytes": 200,
            "far_hop_bytes": 0,
            "exposed_hop_wait_s": 0.5,
            "hop_latency_mean_s": None,
            "hop_latency_p99_s": None,
        }
