"""The ring gives what one process gives: values and gradients, for every shape of ring that is promised."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from elastic_ring.attention.kernels.adapters import aten
from elastic_ring.attention.kernels.kernel import Documents
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.ring import RingAttention
from tests.unit.attention.attention_rings import (
    Case,
    check_close,
    in_threads,
    relative_error,
    run_ring,
    whole_attention,
)

HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}


def _combinations() -> list[Case]:
    """Every combination of the issue's point 4: cp x mask x heads x layout x documents x evenness."""
    cases = []
    for cp, causal, (num_heads, num_kv_heads), layout, packed, even in itertools.product(
        range(1, 9), (True, False), HEADS.values(), ("contiguous", "zigzag"), (False, True), (True, False)
    ):
        seq_len = 4 * cp if even else 4 * cp + 3
        starts = (0, 1, seq_len // 3 + 1, seq_len // 2 + 2) if packed else (0,)
        cases.append(
            Case(
                cp=cp,
                seq_len=seq_len,
                causal=causal,
                layout_name=layout,
                document_starts=tuple(sorted({start for start in starts if start < seq_len})),
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
            )
        )
    return cases


@pytest.mark.thinned(num=4)
@pytest.mark.parametrize("cp", range(1, 9))
def test_fp64_agrees_with_one_process_in_every_combination(rings, cp):
    cases = [case for case in _combinations() if case.cp == cp]
    assert len(cases) == 2 * 3 * 2 * 2 * 2
    for case in cases:
        found = run_ring(case, rings.groups(cp)).tensors
        for name, got, want in zip(("out", "dq", "dk", "dv"), found, whole_attention(case), strict=True):
            assert relative_error(got, want) <= 1e-12, (case, name)


class Leaving:
    """A rank's gloo group. What it sends must stay as it is until the send is waited for."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size, self.recv = group.rank, group.size, group.recv
        self.num_open = 0

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> SimpleNamespace:
        (sent,), before, work = tensors, tensors[0].clone(), self._group.send(tensors, dst, tag)
        self.num_open += 1

        def wait() -> None:
            work.wait()
            assert torch.equal(sent, before), "a buffer was refilled while its message was leaving"
            self.num_open -= 1

        return SimpleNamespace(wait=wait)


@pytest.mark.parametrize("causal", [True, False])
def test_no_buffer_is_refilled_before_its_message_has_left(rings, causal):
    """Short documents: a rank needs keys of few hops, and stages without keys lie between them."""
    for layout, hops in itertools.product(("contiguous", "zigzag"), (1, 2)):
        case = Case(8, 35, causal, layout, (0, 1, 12, 19))
        groups = [Leaving(group) for group in rings.groups(8)]
        run_ring(case, groups, hops_per_stage=hops)
        assert [group.num_open for group in groups] == [0] * 8, case


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("cp", [2, 3, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_longer_sequences_cross_the_kernels_own_blocks(rings, cp, causal):
    case = Case(cp=cp, seq_len=1501, causal=causal, document_starts=(0, 40, 700), batch=1)
    found = run_ring(case, rings.groups(cp)).tensors
    check_close(found, whole_attention(case))


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("layout_name", ["contiguous", "zigzag"])
def test_documents_in_one_call_agree_with_one_process(rings, cp, layout_name):
    """The kernels of GPUs serve all documents of a slice at once, as the reference does here; the default does not."""
    starts = (0, 1, 9, 16, 40, 41, 77)
    case = Case(cp=cp, seq_len=101, layout_name=layout_name, document_starts=starts, batch=1)
    outcome = run_ring(case, rings.groups(cp), backend="reference")
    check_close(outcome.tensors, whole_attention(case))
    q, k, *_ = (case.layout.scatter(x, 0, 1) for x in case.tensors())
    calls = [
        RingAttention(case.schedule, 0, rings.groups(cp)[0], RingOptions(backend=name)).call_plan(q, k)
        for name in ("reference", "aten-cpu")
    ]
    (documents, *others), apart = (each.stages[0].forward for each in calls)
    assert isinstance(documents.cover, Documents)
    num_squares = documents.cover.cuts.numel() - 1
    assert num_squares > 1
    assert all(call.cover == "full" for call in others)
    assert len(apart) == num_squares + len(others)


@pytest.mark.parametrize("cp", [1, 4, 5])
def test_fp32_agrees_to_single_precision(rings, cp):
    case = Case(cp=cp, seq_len=203, document_starts=(0, 31, 150), dtype=torch.float32)
    found = run_ring(case, rings.groups(cp)).tensors
    for got, want in zip(found, whole_attention(case), strict=True):
        assert got.dtype == torch.float32
        assert relative_error(got, want) <= 2e-6


@pytest.mark.parametrize(("cp", "causal"), [(2, True), (4, False), (7, True), (8, True)])
def test_bf16_error_is_at_most_a_quarter_above_that_of_the_single_kernel(rings, cp, causal):
    case = Case(cp=cp, seq_len=515, causal=causal, head_dim=32, dtype=torch.bfloat16)
    found = run_ring(case, rings.groups(cp)).tensors
    single = _single_bf16_kernel(case)
    for name, got, one, want in zip(("out", "dq", "dk", "dv"), found, single, whole_attention(case), strict=True):
        assert got.dtype == torch.bfloat16
        assert relative_error(got, want) <= 1.25 * relative_error(one, want), name


def _single_bf16_kernel(case: Case) -> list[torch.Tensor]:
    """torch's own bf16 attention over the whole sequence on one process."""
    *inputs, dout = case.tensors()
    leaves = [tensor.requires_grad_() for tensor in inputs]
    q, k, v = (leaf.transpose(1, 2) for leaf in leaves)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=True)
    out.transpose(1, 2).backward(dout)
    return [out.transpose(1, 2).detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_calls_give_equal_bits(rings, dtype):
    case = Case(cp=5, seq_len=211, document_starts=(0, 100), dtype=dtype)
    first = run_ring(case, rings.groups(5)).tensors
    for _ in range(3):
        again = run_ring(case, rings.groups(5, fresh=True)).tensors
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_runs_the_hops_again_and_gives_the_same_bits(rings, reentrant):
    case = Case(cp=3, seq_len=50)
    layers = 2

    def train(recompute: bool) -> list[torch.Tensor]:
        tensors = case.tensors()
        groups = rings.groups(case.cp)
        hops: list[list[tuple[str, int, int]]] = [[] for _ in range(case.cp)]

        def work(cp_rank: int) -> torch.Tensor:
            seen = hops[cp_rank]
            ring = RingAttention(
                case.schedule, cp_rank, groups[cp_rank], RingOptions(observer=lambda *stamp: seen.append(stamp))
            )
            q, k, v, dout = (case.layout.scatter(tensor, cp_rank, 1) for tensor in tensors)
            leaf = q.requires_grad_()
            x = leaf
            for _ in range(layers):
                x = checkpoint(ring, x, k, v, use_reentrant=reentrant) if recompute else ring(x, k, v)
            x.backward(dout)
            assert leaf.grad is not None
            return leaf.grad

        grads = in_threads(case.cp, work)
        num_forwards = layers * 2 if recompute else layers
        for seen in hops:
            assert sum(stamp[0] == "forward" for stamp in seen) == num_forwards * case.cp
            assert {stamp[1] for stamp in seen if stamp[0] == "forward"} == set(range(num_forwards))
            assert seen == hops[0]
        return grads

    plain, recomputed = train(recompute=False), train(recompute=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_a_ring_of_one_is_the_single_kernel_bit_for_bit():
    case = Case(cp=1, seq_len=77, dtype=torch.float32)
    q, k, v, dout = case.tensors()
    out, lse = aten.cpu_forward(q, k, v, causal=True, scale=case.head_dim**-0.5)
    grads = aten.cpu_backward(dout, q, k, v, out, lse, causal=True, scale=case.head_dim**-0.5)
    found = run_ring(case, [None]).tensors
    assert all(torch.equal(a, b) for a, b in zip(found, (out, *grads), strict=True))


def test_the_scale_is_the_callers(rings):
    case = Case(cp=2, seq_len=20)
    q, k, v, _ = case.tensors()
    groups = rings.groups(2)
    halved = in_threads(
        2,
        lambda r: RingAttention(case.schedule, r, groups[r])(
            *(case.layout.scatter(x, r, 1) for x in (q, k, v)), scale=case.head_dim**-0.5 / 2
        ),
    )
    want = whole_attention(case, [q / 2, k, v, q])[0]
    assert relative_error(case.layout.gather(halved, 1), want) <= 1e-12


@pytest.mark.parametrize("layout_name", ["contiguous", "zigzag"])
@pytest.mark.parametrize("changed", ["k", "v"])
def test_one_remote_element_moves_what_depends_on_it_and_nothing_else(rings, layout_name, changed):
    case = Case(cp=4, seq_len=43, layout_name=layout_name, document_starts=(0, 9, 34))
    position, kv_head, channel, batch = 14, 1, 3, 1
    document, reached = slice(9, 34), slice(position, 34)
    before = run_ring(case, rings.groups(4)).tensors
    inputs = case.tensors()
    inputs["qkv".index(changed)][batch, position, kv_head, channel] += 0.5
    after = run_ring(case, rings.groups(4), inputs).tensors
    heads = slice(2 * kv_head, 2 * kv_head + 2)
    channels = slice(None) if changed == "k" else slice(channel, channel + 1)
    every = slice(None)
    moved = {
        "out": (reached, heads, channels),
        "dq": (reached, heads, every),
        "dk": (document, slice(kv_head, kv_head + 1), every),
        "dv": (document, slice(kv_head, kv_head + 1), every) if changed == "k" else None,
    }
    for (name, where), old, new in zip(moved.items(), before, after, strict=True):
        expected = torch.zeros_like(old, dtype=torch.bool)
        if where is not None:
            expected[(batch, *where)] = True
        assert torch.equal(old != new, expected), name


def test_the_case_of_the_perturbation_is_remote():
    for layout_name in ("contiguous", "zigzag"):
        case = Case(cp=4, seq_len=43, layout_name=layout_name)
        owners = {r for r in range(4) if 14 in case.layout.positions(r).tolist()}
        readers = {r for r in range(4) if set(range(14, 34)) & set(case.layout.positions(r).tolist())}
        assert readers - owners


def test_a_ring_with_empty_slices_still_agrees(rings):
    """`ring_attention` refuses it, a schedule allows it: ranks without tokens take part and send nothing."""
    case = replace(Case(cp=5, seq_len=3), layout_name="contiguous")
    found = run_ring(case, rings.groups(5)).tensors
    check_close(found, whole_attention(case))
