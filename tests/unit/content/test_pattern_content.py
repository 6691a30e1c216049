"""Blocks chosen by content over a ring: the choice is the definition's on every ring, the result exact to rounding."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.quality.content import ContentFamily
from elastic_ring.attention import layers
from elastic_ring.attention.autolayout import Sizes
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import contiguous, zigzag
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.content import ByDocument, Chosen, TopK
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.rules import FULL, NONE, Window
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.schedule import chunks_of
from elastic_ring.attention.plan.sparse_blocks import check_layer_blocks
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.routing.router import Router
from experiments.block_means import choose_blocks
from experiments.pattern_choice import choose
from tests.unit.attention.attention_rings import in_threads, relative_error
from tests.unit.content.content_cases import (
    LAYOUTS,
    ContentCase,
    alone,
    check_choice,
    make_case,
    routed,
    run_content,
    schedule_of,
    wanted,
)
from tests.unit.sparse.block_cases import masked_reference

MIXED = '{"groups": [{"heads": [{"count": 3, "rule": "topk:3,unit=4"}, {"rule": "topk:2,causal=0,unit=6+window:5"}]}]}'
FETCHING_HEADS = (
    '{"groups": [{"heads": [{"count": 3, "rule": "topk:3,fetch_all=1"}, {"count": 1, "rule": "bigbird:2,1,0"}]}]}'
)
TEXTS = ("topk:3,unit=4", "topk:2,causal=0,unit=4", "topk:2,unit=5+window:7", MIXED)
DOCUMENTS = ((0,), (0, 11, 40), (0, 2, 3, 60))


@pytest.mark.thinned(num=2)
@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_ring_makes_the_choice_of_the_definition_and_its_result_is_exact(rings, name, cp):
    """67 tokens that no unit divides, grouped heads; documents take turns with patterns."""
    for number, text in enumerate(TEXTS):
        starts = DOCUMENTS[(number + cp) % 3]
        case = make_case(name, cp, text=text, document_starts=starts, num_kv_heads=4 if cp == 3 else 2)
        found, used = run_content(case, rings.groups(cp))
        for what, got, want in zip(("out", "dq", "dk", "dv"), found, wanted(alone(case)), strict=True):
            assert relative_error(got, want) <= 1e-12, (case, what)
        check_choice(case, schedule_of(used[0]))
        assert all(schedule_of(each) == schedule_of(used[0]) for each in used)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_short_types_too_every_ring_and_layout_makes_the_same_choice(rings, dtype):
    """Sums of such numbers are exact in fp64, so it does not matter where a sequence is cut."""
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, 259, heads, 16, generator=generator).to(dtype) for heads in (4, 2))
    rules = (TopK(4, True, 8), TopK(4, False, 8), TopK(3, True, 5), TopK(3, True, 5) | Window(9))
    documents = ((0, 100), (100, 259))

    def route(layout: Any, groups: list[Any], cp_rank: int) -> Any:
        own = [layout.scatter(x, cp_rank, 1) for x in (q, k)]
        return Router(layout, cp_rank, groups[cp_rank], documents, RingOptions())(rules, *own, 0)

    found = set()
    for cp in (1, 2, 3, 5):
        groups = rings.groups(cp)
        for name in LAYOUTS:
            found |= set(in_threads(cp, partial(route, LAYOUTS[name](259, cp), groups)))
    assert len(found) == 1


def test_among_equal_scores_the_earlier_block_is_taken(rings):
    rule = TopK(3, True, 4)
    k = torch.ones(1, 64, 1, 8, dtype=torch.float64)
    k[:, 40:44] += 2.0**-48  # more in fp64, equal in fp32
    q = torch.randn(1, 64, 2, 8, generator=torch.Generator().manual_seed(0)).abs().double()
    for cp in (1, 3):
        groups = rings.groups(cp)
        layout = zigzag(64, cp)

        def route(cp_rank: int, layout: Any = layout, groups: Any = groups) -> Any:
            own = [layout.scatter(x, cp_rank, 1) for x in (q, k)]
            return Router(layout, cp_rank, groups[cp_rank], ((0, 64),), RingOptions())((rule,), *own, 0)

        for rules in in_threads(cp, route):
            assert rules[0].past[3:].tolist() == [[0, 1]] * 13


def test_numbers_that_are_none_choose_past_blocks_too():
    """A gradient gone wrong makes such queries; the step is then skipped, and must not end in an index instead."""
    q, k = torch.randn(1, 24, 1, 4), torch.randn(1, 24, 1, 4)
    q[:, ::4], k[:, 4:12] = float("nan"), -float("inf")
    (rule,) = Router(contiguous(24, 1), 0, None, ((0, 24),), RingOptions())((TopK(3, True, 4),), q, k, 0)
    assert isinstance(rule, Chosen)
    for row, past in enumerate(rule.past.tolist()):
        assert len({j for j in past if 0 <= j < row}) == min(row, 2)


def changed_after(case: ContentCase, groups: list[Any], position: int) -> torch.Tensor:
    """The rows of out that are other bits once all tokens from `position` on are others."""
    outs = []
    for later in (0.0, 3.0):

        def tensors(case: ContentCase = case, later: float = later) -> list[torch.Tensor]:
            found = super(ContentCase, case).tensors()
            return [torch.cat([x[:1, :position], x[:1, position:] * (1 - later)], dim=1) for x in found]

        changed = replace(case)
        object.__setattr__(changed, "tensors", tensors)
        outs.append(run_content(changed, groups)[0][0])
    return (outs[0] != outs[1]).flatten(2).any(-1)[0].nonzero().flatten()


@pytest.mark.slow
@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_no_later_token_changes_what_an_earlier_one_sees_unless_the_mean_of_a_block_chooses(rings, cp):
    causal = make_case("zigzag", cp, 96, text="topk:3,unit=8")
    for position in (41, 44, 47, 90):
        assert changed_after(causal, rings.groups(cp), position).min() == position
    by_mean = replace(causal, text="topk:3,causal=0,unit=8")
    assert min(int(changed_after(by_mean, rings.groups(cp), position).min()) for position in (41, 44, 47, 90)) == 40


@pytest.mark.thinned(num=3)
@pytest.mark.parametrize("text", ["topk:3,unit=4", "topk:3,causal=0,unit=4"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_only_the_union_of_what_was_chosen_moves_and_what_choosing_takes(rings, name, text):
    case = make_case(name, 4, dtype=torch.float32, text=text, document_starts=(0, 30))
    _, used = run_content(case, rings.groups(4))
    mask = alone(case).mask()
    for rank, attention in enumerate(used):
        rows = case.layout.positions(rank)
        others = torch.ones(67, dtype=torch.bool)
        others[rows] = False
        seen = mask[:, rows].any(1).view(case.num_kv_heads, -1, 67).any(1) & others
        received = sum(num for (way, _), num in attention.ledger.received_bytes.items() if way == "forward")
        assert received == int(seen.sum()) * 2 * case.head_dim * 4
        sent, got = routing_bytes(case, rank)
        assert sum(routed(attention.ledger.sent_bytes).values()) == sent > 0
        assert sum(routed(attention.ledger.received_bytes).values()) == got > 0
        keys = sum(num for (way, _), num in attention.ledger.sent_bytes.items() if way != "routing")
        assert attention.ledger.all_sent_bytes == sent + keys


def routing_bytes(case: ContentCase, rank: int) -> tuple[int, int]:
    """(sent, received): fp64 sums of the pieces of blocks that a chooser may choose, or that speak; and choices."""
    (rule,) = {top_k for top_k in case.heads if isinstance(top_k, TopK)}
    held = [chunks_of(case.layout, r, case.documents, rule.unit_tokens) for r in range(4)]
    rows = [
        {(c.document, c.block) for c in own if c.positions[0] == c.block * rule.unit_tokens and c.block > rule.width}
        for own in held
    ]

    def told(source: int, chooser: int) -> int:
        num = 0
        for chunk in held[source]:
            past = any(document == chunk.document and block > chunk.block for document, block in rows[chooser])
            speaks = not rule.causal and (chunk.document, chunk.block) in rows[chooser]
            num += past * case.num_kv_heads + speaks * case.num_heads
        return num * case.head_dim * 8

    choices = [len(own) * case.num_heads * rule.width * 4 for own in rows]
    others = [r for r in range(4) if r != rank]
    sent = sum(told(rank, other) for other in others) + 3 * choices[rank]
    return sent, sum(told(other, rank) + choices[other] for other in others)


@pytest.mark.parametrize("text", ["topk:1,unit=4", "topk:20,unit=4", "topk:3,unit=32"])
def test_where_there_is_nothing_to_choose_nothing_is_said(rings, text):
    case = make_case("zigzag", 3, text=text)
    found, used = run_content(case, rings.groups(3))
    for got, want in zip(found, wanted(alone(case)), strict=True):
        assert relative_error(got, want) <= 1e-12
    assert not any(routed(x) for each in used for x in (each.ledger.sent_bytes, each.ledger.received_bytes))
    check_choice(case, schedule_of(used[0]))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [None, "reference-sparse"], ids=["tiles", "blocks"])
def test_calls_after_one_another_do_not_mix_and_repeat_bit_for_bit(rings, kernel):
    case = make_case("zigzag", 2, 1024, text="topk:2,unit=128", block=128, dtype=torch.float32)
    groups = rings.groups(2, fresh=True)

    def work(cp_rank: int) -> list[torch.Tensor]:
        q, k, v, dout = (case.layout.scatter(tensor, cp_rank, 1) for tensor in case.tensors())
        outs = []
        for _ in range(2):
            attention = PatternedAttention(
                case.pattern, case.layout, cp_rank, groups[cp_rank], RingOptions(kernel=kernel)
            )
            leaf = q.clone().requires_grad_()
            attention(attention(leaf, k, v), k, v).backward(dout)
            assert leaf.grad is not None
            outs.append(leaf.grad)
        return outs

    for once, again in in_threads(2, work):
        assert torch.equal(once, again)


# ------------------------------------------------------------ what GPUs run


BLOCK_TEXTS = (
    "topk:2",
    "topk:3,causal=0",
    "topk:2,unit=256",
    "topk:2+bigbird:2,0,0",
    '{"groups": [{"heads": [{"rule": "topk:2"}, {"rule": "dense"}, {"count": 2, "rule": "topk:3+random:1"}]}]}',
)


@pytest.mark.thinned(num=2)
@pytest.mark.parametrize("starts", [(0,), (0, 384)])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("text", BLOCK_TEXTS)
def test_in_whole_blocks_the_choice_and_the_result_are_the_same(rings, text, cp, starts):
    name = ("contiguous", "zigzag")[(cp + BLOCK_TEXTS.index(text)) % 2]
    case = make_case(name, cp, 1024, text=text, block=128, document_starts=starts)
    found, used = run_content(case, rings.groups(cp), kernel="reference-sparse")
    for what, got, want in zip(("out", "dq", "dk", "dv"), found, wanted(alone(case)), strict=True):
        assert relative_error(got, want) <= 1e-12, what
    check_choice(case, schedule_of(used[0]))


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("cp", [1, 3])
@pytest.mark.parametrize("text", ["topk:4,unit=64", "topk:2+window:200", "topk:2"])
def test_blocks_that_are_cut_are_chosen_and_attended_too(rings, text, cp):
    block = 64 if "unit=64" in text else 128
    case = make_case("zigzag", cp, 1000, text=text, block=block, document_starts=(0, 200))
    found, used = run_content(case, rings.groups(cp), kernel="reference-sparse")
    for what, got, want in zip(("out", "dq", "dk", "dv"), found, wanted(alone(case)), strict=True):
        assert relative_error(got, want) <= 1e-12, what
    check_choice(case, schedule_of(used[0]))


def test_without_the_host_only_whole_blocks_are_chosen():
    layout = zigzag(1024, 2)
    check_layer_blocks(parse_pattern("topk:4+bigbird:2,0,0"), layout)
    check_layer_blocks(parse_pattern("topk:4,unit=256"), layout)
    with pytest.raises(ValueError, match=r"topk:4.*chooses blocks of 64 tokens.*set unit=128"):
        check_layer_blocks(parse_pattern("topk:4,unit=64"), layout)
    with pytest.raises(ValueError, match=r"window:200: keeps blocks of 128 tokens in part"):
        check_layer_blocks(parse_pattern("topk:4+window:200"), layout)
    x, text = torch.zeros(1, 512, 2, 16), "topk:2,fetch_all=1"
    packed = PatternedAttention(
        parse_pattern(text),
        contiguous(512, 1),
        0,
        None,
        RingOptions(kernel="reference-sparse"),
        document_starts=(0, 200),
    )
    with pytest.raises(ValueError, match="begins at position 200, inside a block"):
        packed(x, x, x)


# ------------------------------------------------------------ as a pattern


def test_the_short_form_and_the_file_mean_the_rule():
    def first(text: str) -> Any:
        return parse_pattern(text).of_layer(0).rules[0]

    assert first("topk:8") == TopK(8, True, 128)
    assert first("topk:blocks=8,unit=64,causal=0") == TopK(8, False, 64)
    assert first("topk:8,0,64") == TopK(8, False, 64)
    assert first("topk:8+window:512") == TopK(8) | Window(512)
    layered = parse_pattern("topk:8+sinks:64;dense@3")
    assert (layered.any_dense, layered.any_sparse) == (True, True)
    layered.check(4, 4, 2)
    named = parse_pattern(json.dumps({"block": 64, "groups": [{"layers": [0], "rule": "topk:4"}, {"rule": "dense"}]}))
    assert named.of_layer(0).rules == (TopK(4),)
    assert str(layered) == "topk:8+sinks:64;dense@3"
    texts = ["topk:8", "topk:9", "topk:8,causal=0", "topk:8,unit=64", "topk:8+window:512"]
    assert len({parse_pattern(text).identity for text in texts}) == len(texts)
    assert parse_pattern("topk:8,1").identity == parse_pattern("topk:8").identity


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("topk", "topk needs blocks, for example topk:8"),
        ("topk:0", "blocks=0: must be at least 1"),
        ("topk:4,fetch_all=2", "fetch_all=2: 1 fetches all past keys"),
        ("topk:4,unit=64,fetch_all=1", "fetch_all=1 with unit=64: .* leave unit or fetch_all out"),
        ("topk:4,causal=2", "causal=2: 1 has a block's first query choose, 0 the mean"),
        ("topk:4,unit=0", "unit=0: must be at least 1"),
        ("topk:4,mean=1", "topk takes blocks, causal, unit, fetch_all; 'mean=1' is none of these"),
    ],
)
def test_a_wrong_short_form_is_refused(text, named):
    with pytest.raises(ValueError, match=named):
        parse_pattern(text)


def test_before_a_call_it_has_no_pairs_and_says_so():
    for rule in (TopK(4), TopK(4) | Window(8)):
        pattern = SparsePattern((rule,))
        for ask in (
            lambda rule=rule: rule.sees(torch.arange(4).numpy(), torch.arange(4).numpy()),
            lambda rule=rule: rule.kinds(4, 128),
            lambda pattern=pattern: pattern.kinds(512),
            lambda pattern=pattern: plan_sparse(pattern, contiguous(512, 2), 2, 2),
            lambda pattern=pattern: choose(pattern, 512, 2, Sizes(2, 2)),
        ):
            with pytest.raises(ValueError, match=r"topk:4.*chosen by queries and keys.*PatternedAttention"):
                ask()


def test_its_density_is_known_before_a_call_and_with_another_rule_beside_it_is_a_bound(rings):
    for text in ("topk:3,unit=4", "topk:1,unit=4", "topk:4,causal=0,unit=7", "topk:40,unit=4"):
        case = make_case("contiguous", 1, text=text)
        _, used = run_content(case, [None])
        said = case.pattern.density(67, 1, 4, 2)
        assert not case.pattern.density_is_bound
        assert said == pytest.approx(schedule_of(used[0]).pattern.density(67), rel=1e-12)
    for text in ("topk:3,unit=4+window:7", "topk:3,unit=4+topk:2,unit=8", "topk:3,unit=4+dense"):
        case = make_case("contiguous", 1, text=text)
        _, used = run_content(case, [None])
        kept, said = schedule_of(used[0]).pattern.density(67), case.pattern.density(67, 1, 4, 2)
        assert case.pattern.density_is_bound
        assert kept <= said + 1e-12 <= 1 + 2e-12, text
    assert parse_pattern("topk:3+window:9;dense@1").density_is_bound
    assert not parse_pattern("topk:3;window:9@1").density_is_bound
    family = ContentFamily("content", "", 16, top_k=4)
    assert parse_pattern("topk:4,unit=16").density(256, 2, 4, 4) == pytest.approx(family.density(256, 2, 4))


def test_more_than_one_sequence_is_refused_before_anything_is_sent():
    x = torch.zeros(2, 8, 2, 4)
    with pytest.raises(ValueError, match="B=2: content chooses for one sequence at a time"):
        PatternedAttention(parse_pattern("topk:2,unit=2"), contiguous(8, 1), 0, None)(x, x, x)


def test_what_was_chosen_is_a_rule_of_its_document_and_prints_small():
    one, other = Chosen(2, b"\xff\xff\xff\xff\0\0\0\0", 4), Chosen(1, b"\xff" * 4, 4)
    assert one.past.tolist() == [[-1], [0]]
    assert one.kinds(2, 4).tolist() == [[FULL, NONE], [FULL, FULL]]
    assert repr(one) == "Chosen(num_units=2, unit_tokens=4)"
    both = ByDocument((one, other))
    assert (both.of_document(1), both.unit, both.for_one_call) == (other, 4, True)


def test_the_choice_in_one_process_is_the_rings():
    """`choose_blocks`, by which models are compared, against the definition; also where there are few blocks."""
    case = make_case("contiguous", 1, 64)
    q, k, *_ = (tensor[0] for tensor in case.tensors())
    sums = k.unflatten(0, (16, 4)).sum(1)
    kept = choose_blocks(q[::4], sums, list(range(16)), 3)
    for head in range(4):
        found = [[j for j in range(i) if kept[head, i, j]] for i in range(16)]
        assert found == case.choice(TopK(3, True, 4), head, 0)
        assert kept[head].diagonal().all()
    assert choose_blocks(q[:8:4], sums[:2], [0, 1], 9).tolist() == [[[True, False], [True, True]]] * 4


# ------------------------------------------------------------ all past keys fetched


@pytest.mark.thinned(num=2)
@pytest.mark.parametrize("text", ["topk:3,fetch_all=1", "topk:3,0,fetch_all=1+bigbird:2,0,0", FETCHING_HEADS])
@pytest.mark.parametrize(("name", "cp"), [("contiguous", 1), ("zigzag", 2), ("contiguous", 3)])
def test_with_all_keys_fetched_the_host_plans_once_and_the_choice_is_the_same(rings, name, cp, text, monkeypatch):
    case = make_case(name, cp, 128 * 12, text=text, block=128, document_starts=(0, 128 * 5))
    groups = rings.groups(cp) if cp > 1 else [None]
    planned: list[Any] = []

    def counted(*arguments: Any) -> Any:
        planned.append(arguments)
        return plan_sparse(*arguments)

    def work(cp_rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor], PatternedAttention]:
        leaves = [case.layout.scatter(x, cp_rank, 1).requires_grad_() for x in case.tensors()[:3]]
        attention = PatternedAttention(
            case.pattern,
            case.layout,
            cp_rank,
            groups[cp_rank],
            RingOptions(kernel="reference-sparse"),
            document_starts=case.document_starts,
        )
        dout = case.layout.scatter(case.tensors()[3], cp_rank, 1)
        passes = []
        for _ in range(2):
            out = attention(*leaves)
            passes.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
        return passes[0], passes[1], attention

    monkeypatch.setattr(layers, "plan_sparse", counted)
    results = in_threads(cp, work)
    assert len(planned) == cp  # once on each rank, for two calls
    for number, want in enumerate(masked_reference(case, "cpu")):
        for at in range(2):
            got = case.layout.gather([each[at][number] for each in results], 1)
            assert relative_error(got, want) <= 1e-12, ("out", "dq", "dk", "dv")[number]
    for _, _, attention in results:
        counts = attention.ledger.received_bytes
        received = sum(num for (way, _), num in counts.items() if way == "forward")
        assert attention.last_ring is not None
        past = attention.last_ring.schedule.received_bytes(attention.cp_rank, case.head_dim, 8)
        assert received == 2 * past
