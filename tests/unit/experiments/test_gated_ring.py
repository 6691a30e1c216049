"""Gated attention over a ring is the one-process definition, and sends what its three views need and no more."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from elastic_ring.attention.layouts.layout import Layout, contiguous, zigzag
from elastic_ring.attention.patterns.content import Chosen
from elastic_ring.attention.patterns.pattern import Pattern
from elastic_ring.attention.plan.schedule import plan
from experiments import compressed
from experiments.block_means import block_map, means_of_blocks
from experiments.gated import GatedSparseAttention
from experiments.gated_ring import GatedRing, ViewSizes
from tests.unit.attention.attention_rings import ThreadRings, in_threads, one_thread, relative_error
from tests.unit.attention.test_attention_bytes import WireTap
from tests.unit.experiments.gated_cases import (
    BATCH,
    BLOCK,
    DIM,
    LAYOUTS,
    LENGTH,
    TOP_K,
    WIDTH,
    WINDOW,
    assert_same,
    make_module,
    run,
    sample,
    step,
)


@pytest.fixture(scope="module")
def rings() -> Iterator[ThreadRings]:
    with one_thread():
        yield ThreadRings()


@pytest.mark.thinned(num=2)
@pytest.mark.parametrize("first_query", [False, True])
@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_ring_gives_what_one_process_gives(rings: ThreadRings, name: str, cp: int, first_query: bool) -> None:
    """67 tokens in blocks of 4: the last block is ragged, and most lie on two ranks."""
    made, tensors = make_module(first_query=first_query), sample()
    found = run(LAYOUTS[name](LENGTH, cp), rings.groups(cp), made, tensors)
    assert_same(found.tensors, step(made, tensors))
    mask = made.selected(tensors[1], tensors[2])
    for ring in found.rings:
        assert ring.schedules == found.rings[0].schedules
        assert torch.equal(chosen_pairs(ring), mask)


def chosen_pairs(ring: GatedRing) -> torch.Tensor:
    """Bool (B, H, S, S) of the last call's chosen blocks."""
    at = torch.arange(ring.layout.seq_len).numpy()
    tables = []
    for schedule in ring.schedules:
        rules = schedule.pattern.rules(schedule.num_heads)
        assert all(isinstance(rule, Chosen) for rule in rules)
        tables.append(torch.stack([torch.from_numpy(rule.sees(at[:, None], at[None, :])) for rule in rules]))
    return torch.stack(tables).tril()


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (1, 1), (6, 2)])
def test_any_sharing_of_heads_is_exact(rings: ThreadRings, heads: tuple[int, int]) -> None:
    made, tensors = make_module(heads[0]), sample(heads=heads)
    assert_same(run(zigzag(LENGTH, 3), rings.groups(3), made, tensors).tensors, step(made, tensors))


@pytest.mark.parametrize(
    "sizes",
    [
        {"block": 1, "top_k": 2, "window": 1},
        {"block": 16, "top_k": 1, "window": 40},
        {"block": 67, "top_k": 2, "window": 67},
        {"block": 100, "top_k": 2, "window": 3},
        {"block": 8, "top_k": 100, "window": 3},
    ],
    ids=str,
)
def test_sizes_at_their_ends_are_exact(rings: ThreadRings, sizes: dict[str, int]) -> None:
    """Blocks of a token, blocks longer than the sequence, more blocks asked for than there are."""
    made, tensors = make_module(**sizes), sample(batch=1)
    for layout in (contiguous(LENGTH, 3), LAYOUTS["striped"](LENGTH, 3)):
        assert_same(run(layout, rings.groups(3), made, tensors).tensors, step(made, tensors))


def test_ranks_without_tokens_take_part(rings: ThreadRings) -> None:
    made, tensors = make_module(block=2), sample(length=5)
    layout = contiguous(5, 8)
    assert layout.num_tokens(7) == 0
    assert_same(run(layout, rings.groups(8), made, tensors).tensors, step(made, tensors))


def test_one_choice_serves_every_ring_size_and_layout(rings: ThreadRings) -> None:
    _, q, k, v, _ = sample()
    patterns = set()
    for name, cp in (("contiguous", 1), ("zigzag", 4), ("striped", 8)):
        layout, groups = LAYOUTS[name](LENGTH, cp), rings.groups(cp)

        def work(cp_rank: int, layout: Layout = layout, groups: list[Any] = groups) -> list[Any]:
            ring = GatedRing(layout, cp_rank, groups[cp_rank])
            ring.views(*(layout.scatter(x, cp_rank, 1) for x in (q, k, v)), ViewSizes(BLOCK, TOP_K, WINDOW))
            return [schedule.pattern for schedule in ring.schedules]

        patterns |= {tuple(found) for found in in_threads(cp, work)}
    assert len(patterns) == 1


@pytest.mark.slow
def test_bytes_are_the_halo_the_chosen_union_and_one_sum_a_block(rings: ThreadRings) -> None:
    item = 8
    for (name, make), first_query in itertools.product(LAYOUTS.items(), (False, True)):
        made, tensors = make_module(first_query=first_query), sample()
        layout = make(LENGTH, 4)
        taps = [WireTap(group) for group in rings.groups(4)]
        used = run(layout, taps, made, tensors).rings
        at = torch.arange(LENGTH)
        near = (at[:, None] >= at[None]) & (at[:, None] - at[None] < WINDOW)
        pairs = made.selected(tensors[1], tensors[2]).unflatten(1, (2, 2)).any(2)  # of K/V heads
        for rank, ring in enumerate(used):
            rows = layout.positions(rank)
            others = torch.ones(LENGTH, dtype=torch.bool)
            others[rows] = False
            halo = int((near[rows].any(0) & others).sum()) * 2 * BATCH
            assert received(ring.ledgers.window, "forward") == halo * 2 * DIM * item, (name, rank)
            union = int((pairs[:, :, rows].any(2) & others).sum())
            assert received(ring.ledgers.selected, "forward") == union * 2 * DIM * item, (name, rank)
            sums, shares, choices = wanted_summaries(layout, rank, first_query)
            per_row = BATCH * 4 * (TOP_K - 1) * 4
            wanted = sums * BATCH * DIM * item + choices * per_row
            assert received(ring.ledgers.block_means, "forward") == wanted, (name, rank)
            assert received(ring.ledgers.block_means, "backward") == shares * 4 * BATCH * DIM * item, (name, rank)
        for tap, ring in zip(taps, used, strict=True):
            ledgers = (ring.ledgers.block_means, ring.ledgers.selected, ring.ledgers.window)
            assert tap.sent_bytes == sum(sum(ledger.sent_bytes.values()) for ledger in ledgers)


def received(ledger: Any, way: str) -> int:
    return sum(num for (direction, _), num in ledger.received_bytes.items() if direction == way)


def wanted_summaries(layout: Layout, rank: int, first_query: bool) -> tuple[int, int, int]:
    """What `rank` receives, counted position by position: heads' sums going forward, parts whose gradients come
    back, and blocks that others choose for."""
    blocks = [set((layout.positions(r) // BLOCK).tolist()) for r in range(layout.cp)]
    owners = {at // BLOCK: r for r in range(layout.cp) for at in layout.positions(r).tolist() if at % BLOCK == 0}
    sums = shares = choices = 0
    for other in range(layout.cp):
        if other == rank:
            continue
        sums += 4 * sum(block < max(blocks[rank]) for block in blocks[other])  # K and V of two heads
        if not first_query:
            sums += 4 * sum(owners[block] == rank for block in blocks[other])  # four query heads
        shares += sum(block < max(blocks[other]) for block in blocks[rank])
        choices += sum(owner == other for owner in owners.values())
    return sums, shares, choices


def test_a_long_sequence_moves_a_small_share_of_what_a_dense_ring_moves(rings: ThreadRings) -> None:
    """Each block chooses one block beside its own, so a rank of eight needs few of the blocks before its own."""
    length, cp, heads = 4096, 8, (2, 2)
    made = make_module(2, block=32, top_k=2, window=64).float()
    tensors = [tensor.float() for tensor in sample(length, heads, batch=1)]
    layout = contiguous(length, cp)
    used = run(layout, rings.groups(cp), made, tensors).rings
    dense = plan(Pattern(), layout)
    for way in ("forward", "backward"):
        moved = sum(ring.ledgers.received_bytes(way) for ring in used)
        whole = sum(dense.hop_bytes(r, hop, DIM, 4, way, kv_heads=2) for r in range(cp) for hop in range(cp))
        assert moved < whole / 3, way
    assert all(received(ring.ledgers.block_means, "forward") < 2 * 2 * 2 * DIM * 4 * length / 32 for ring in used)


@pytest.mark.slow
def test_calls_after_one_another_do_not_mix_and_repeat_bit_for_bit(rings: ThreadRings) -> None:
    layout, groups = zigzag(LENGTH, 3), rings.groups(3, fresh=True)
    tensors = sample()

    def work(cp_rank: int) -> list[torch.Tensor]:
        x, q, k, v, dout = (layout.scatter(tensor, cp_rank, 1) for tensor in tensors)
        made, ring = make_module(), GatedRing(layout, cp_rank, groups[cp_rank])
        found = []
        for _ in range(2):
            leaves = [tensor.clone().requires_grad_() for tensor in (x, q, k, v)]
            first = made(*leaves, ring=ring)
            second = made(leaves[0], first, *leaves[2:], ring=ring)
            wanted = [*leaves, made.gates.weight, made.gates.bias]
            found += [second.detach(), *torch.autograd.grad(second, wanted, dout)]
            ring.reset_calls()
        return found

    for found in in_threads(3, work):
        for once, again in zip(found[:7], found[7:], strict=True):
            assert torch.equal(once, again)


@pytest.mark.slow
def test_activation_checkpointing_runs_the_views_again_and_gives_the_same_bits(rings: ThreadRings) -> None:
    layout, groups, tensors = zigzag(LENGTH, 3), rings.groups(3), sample()

    def work(cp_rank: int) -> list[list[torch.Tensor]]:
        *inputs, dout = (layout.scatter(tensor, cp_rank, 1) for tensor in tensors)
        leaves, made = [tensor.requires_grad_() for tensor in inputs], make_module()
        found = []
        for again in (False, True):
            ring = GatedRing(layout, cp_rank, groups[cp_rank])
            out = checkpoint(made, *leaves, ring=ring, use_reentrant=False) if again else made(*leaves, ring=ring)
            found.append([out.detach(), *torch.autograd.grad(out, [*leaves, made.gates.weight], dout)])
        return found

    for plain, again in in_threads(3, work):
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("cp", [1, 2])
def test_the_compressed_views_gradient_is_that_of_finite_differences(rings: ThreadRings, cp: int) -> None:
    """By moving one number of q, k or v at a time, wherever it lies, and adding up what every rank's output does."""
    length, eps, sizes = 7, 1e-6, ViewSizes(2, 1, 1)
    layout, groups = LAYOUTS["striped"](length, cp), rings.groups(cp)
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, length, 2, 3), (1, length, 1, 3), (1, length, 1, 3), (1, length, 2, 3)]
    *inputs, dout = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)

    def loss(whole: list[torch.Tensor]) -> torch.Tensor:
        def work(cp_rank: int) -> torch.Tensor:
            q, k, v, down = (layout.scatter(tensor, cp_rank, 1) for tensor in (*whole, dout))
            return (GatedRing(layout, cp_rank, groups[cp_rank]).views(q, k, v, sizes)[0] * down).sum()

        return torch.stack(in_threads(cp, work)).sum()

    def gradients(cp_rank: int) -> list[torch.Tensor]:
        leaves = [layout.scatter(tensor, cp_rank, 1).requires_grad_() for tensor in inputs]
        view = GatedRing(layout, cp_rank, groups[cp_rank]).views(*leaves, sizes)[0]
        return list(torch.autograd.grad(view, leaves, layout.scatter(dout, cp_rank, 1)))

    of_ranks = in_threads(cp, gradients)
    for number, tensor in enumerate(inputs):
        slopes = torch.empty_like(tensor)
        for at in itertools.product(*map(range, tensor.shape)):
            ends = []
            for sign in (1, -1):
                moved = [each.clone() for each in inputs]
                moved[number][at] += sign * eps
                ends.append(loss(moved))
            slopes[at] = (ends[0] - ends[1]) / (2 * eps)
        found = layout.gather([of_rank[number] for of_rank in of_ranks], 1)
        torch.testing.assert_close(found, slopes, rtol=0, atol=1e-8)


def test_scores_are_made_in_strips_of_any_size(rings: ThreadRings, monkeypatch: pytest.MonkeyPatch) -> None:
    made, tensors = make_module(), sample()
    for limit in (1, 500):
        monkeypatch.setattr(compressed, "STRIP_SCORES", limit)
        assert_same(run(zigzag(LENGTH, 2), rings.groups(2), made, tensors).tensors, step(made, tensors))


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor that an operation of this thread gives."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for item in found if isinstance(found, tuple | list) else (found,):
            if isinstance(item, torch.Tensor):
                self.most = max(self.most, item.numel())
        return found


def test_no_tensor_of_every_pair_is_made_where_a_ring_computes() -> None:
    length, heads = 1024, 2
    made, tensors = make_module(heads, block=32, top_k=2, window=64), sample(length, (heads, heads), batch=1)
    ring = GatedRing(contiguous(length, 1), 0, None)
    with one_thread():
        with LargestTensor() as seen:
            found = step(made, tensors, ring)
        with LargestTensor() as whole:
            wanted = step(made, tensors)
    assert_same(found, wanted)
    assert whole.most >= heads * length**2
    assert seen.most <= heads * length * max(length // 32, 2 * DIM)


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("first_query", [False, True])
def test_with_the_first_query_no_output_depends_on_a_later_token(rings: ThreadRings, first_query: bool) -> None:
    """And with the mean query some output of the same block does: that is what the option is for."""
    cut = 30
    made = make_module(first_query=first_query)
    before, other = sample(), sample(seed=1)
    after = [torch.cat([a[:, :cut], b[:, cut:]], dim=1) for a, b in zip(before, other, strict=True)]
    layout = LAYOUTS["striped"](LENGTH, 3)
    outs = [run(layout, rings.groups(3), made, tensors).tensors[0][:, :cut] for tensors in (before, after)]
    assert torch.allclose(*outs, rtol=0, atol=1e-13) == first_query
    start = cut // BLOCK * BLOCK
    torch.testing.assert_close(outs[0][:, :start], outs[1][:, :start], rtol=0, atol=1e-13)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_shorter_types_come_out_as_they_came_in(rings: ThreadRings, dtype: torch.dtype, limit: float) -> None:
    made, tensors = make_module().to(dtype), [tensor.to(dtype) for tensor in sample()]
    found = run(zigzag(LENGTH, 3), rings.groups(3), made, tensors)
    assert {tensor.dtype for tensor in found.tensors} == {dtype}
    exact = copy.deepcopy(made).double()
    wide = [tensor.double() for tensor in tensors]
    assert torch.equal(chosen_pairs(found.rings[0]), exact.selected(wide[1], wide[2]))
    assert_same(found.tensors, step(exact, wide), limit)


def test_the_module_is_built_without_memory_filled_later_and_knows_no_ring() -> None:
    with torch.device("meta"):
        made = GatedSparseAttention(WIDTH, 4, block=BLOCK, top_k=TOP_K, window=WINDOW).double()
    assert all(parameter.is_meta for parameter in made.parameters())
    whole = make_module()
    made.load_state_dict(whole.state_dict(), assign=True)
    assert set(whole.state_dict()) == {"gates.weight", "gates.bias"}
    assert_same(step(made, sample()), step(whole, sample()), 0)


def test_inference_saves_nothing(rings: ThreadRings) -> None:
    layout, groups, tensors = contiguous(LENGTH, 2), rings.groups(2), sample()

    def work(cp_rank: int) -> torch.Tensor:
        with torch.no_grad():
            out = make_module()(
                *(layout.scatter(x, cp_rank, 1) for x in tensors[:4]), ring=GatedRing(layout, cp_rank, groups[cp_rank])
            )
        assert out.grad_fn is None
        return out

    assert relative_error(layout.gather(in_threads(2, work), 1), step(make_module(), tensors)[0]) <= 1e-12


def test_a_block_map_says_who_holds_what() -> None:
    blocks = block_map(LAYOUTS["striped"](14, 2), 4)  # units of 3: rank 0 has 0-2, 6-8, 12-13; rank 1 3-5, 9-11
    assert [(part.block, part.local, part.first) for part in blocks.parts[0]] == [
        (0, (0, 3), True),
        (1, (3, 5), False),
        (2, (5, 6), True),
        (3, (6, 8), True),
    ]
    assert [(part.block, part.local, part.first) for part in blocks.parts[1]] == [
        (0, (0, 1), False),
        (1, (1, 3), True),
        (2, (3, 6), False),
    ]
    assert (blocks.owned(0), blocks.owned(1)) == ([0, 2, 3], [1])
    assert (blocks.num_past(0), blocks.num_past(1)) == (3, 2)
    assert (blocks.num_served(0, 1), blocks.num_served(1, 0)) == (2, 3)
    assert (blocks.lent(0, 1), blocks.lent(1, 0)) == ([1], [0, 2])
    assert blocks.lengths([0, 3]).tolist() == [4, 2]
    x = torch.arange(14, dtype=torch.float64).view(1, 14, 1, 1)
    assert means_of_blocks(x, 4).flatten().tolist() == [1.5, 5.5, 9.5, 12.5]
