"""Blocks chosen by content: the choice is the definition's, the result exact, and only the union moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from elastic_ring.attention.adaptive import AdaptiveRingAttention, Chosen
from elastic_ring.attention.layout import Layout, contiguous, zigzag
from elastic_ring.attention.placement import striped
from tests.unit.attention_rings import ThreadRings, in_threads, one_thread, relative_error
from tests.unit.pattern_cases import SparseCase, masked_attention

BLOCK, TOP_K, LENGTH = 4, 3, 67
LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": lambda s, c: striped(s, c, unit_tokens=3)}


@pytest.fixture(scope="module")
def rings() -> Iterator[ThreadRings]:
    with one_thread():
        yield ThreadRings()


class Alone(SparseCase):
    """One sequence, and the mask that the definition gives for its content."""

    def tensors(self) -> list[torch.Tensor]:
        return [tensor[:1] for tensor in super().tensors()]

    def mask(self) -> torch.Tensor:
        q, k, *_ = (tensor[0].double() for tensor in self.tensors())
        blocks = [range(start, min(start + BLOCK, LENGTH)) for start in range(0, LENGTH, BLOCK)]
        mask = torch.zeros(self.num_heads, LENGTH, LENGTH, dtype=torch.bool)
        for head in range(self.num_heads):
            kv_head = head // (self.num_heads // self.num_kv_heads)
            for i, rows in enumerate(blocks):
                mean_q = q[list(rows), head].mean(0)
                scores = [float(mean_q @ k[list(columns), kv_head].mean(0)) for columns in blocks[:i]]
                best = sorted(range(i), key=lambda j: -scores[j])[: TOP_K - 1]
                for j in (*best, i):
                    mask[head, rows[0] : rows[-1] + 1, blocks[j][0] : blocks[j][-1] + 1] = True
        return mask.tril()


def run(case: SparseCase, groups: list[Any]) -> tuple[list[torch.Tensor], list[AdaptiveRingAttention]]:
    layout = case.layout

    def work(cp_rank: int) -> tuple[list[torch.Tensor], AdaptiveRingAttention]:
        q, k, v, dout = (layout.scatter(tensor, cp_rank, 1) for tensor in case.tensors())
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        ring = AdaptiveRingAttention(layout, cp_rank, groups[cp_rank], top_k=TOP_K, block=BLOCK)
        out = ring(*leaves)
        out.backward(dout)
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)], ring

    results = in_threads(layout.cp, work)
    return [layout.gather([found[i] for found, _ in results], 1) for i in range(4)], [ring for _, ring in results]


def make_case(name: str, cp: int, dtype: torch.dtype = torch.float64) -> SparseCase:
    layout: Layout = LAYOUTS[name](LENGTH, cp)
    return Alone((), (), layout, dtype=dtype)


@pytest.mark.parametrize("cp", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_chosen_blocks_are_the_definitions_and_the_result_is_exact(rings: ThreadRings, name: str, cp: int) -> None:
    case = make_case(name, cp)
    found, used = run(case, rings.groups(cp))
    for got, want in zip(found, masked_attention(case), strict=True):
        assert relative_error(got, want) <= 1e-12
    assert all(ring.schedule == used[0].schedule for ring in used)


@pytest.mark.parametrize("name", LAYOUTS)
def test_only_the_union_of_what_was_chosen_moves_besides_small_summaries(rings: ThreadRings, name: str) -> None:
    case = make_case(name, 4, torch.float32)
    _, used = run(case, rings.groups(4))
    mask = case.mask()
    for rank, ring in enumerate(used):
        rows = case.layout.positions(rank)
        others = torch.ones(LENGTH, dtype=torch.bool)
        others[rows] = False
        seen = mask[:, rows].any(1).view(case.num_kv_heads, -1, LENGTH).any(1) & others
        received = sum(num for (way, _), num in ring.ledger.received_bytes.items() if way == "forward")
        assert received == int(seen.sum()) * 2 * case.head_dim * 4
        assert ring.routing_bytes > 0
    num_blocks, num_chunks = -(-LENGTH // BLOCK), sum(len(ring._chunks(rank)) for rank, ring in enumerate(used))
    per_block = (case.num_heads + case.num_kv_heads) * case.head_dim * 4
    routed = 3 * (num_chunks * per_block + case.num_heads * num_blocks**2)
    assert sum(ring.routing_bytes for ring in used) == routed


def test_calls_after_one_another_do_not_mix_and_repeat_bit_for_bit(rings: ThreadRings) -> None:
    case, groups = make_case("zigzag", 3), rings.groups(3, fresh=True)

    def work(cp_rank: int) -> list[torch.Tensor]:
        q, k, v, dout = (case.layout.scatter(tensor, cp_rank, 1) for tensor in case.tensors())
        ring = AdaptiveRingAttention(case.layout, cp_rank, groups[cp_rank], top_k=TOP_K, block=BLOCK)
        outs = []
        for _ in range(2):
            leaf = q.clone().requires_grad_()
            first = ring(leaf, k, v)
            second = ring(first, k, v)
            second.backward(dout)
            assert leaf.grad is not None
            outs += [second.detach(), leaf.grad]
            ring.reset_calls()
        return outs

    for out, grad, again, grad_again in in_threads(3, work):
        assert torch.equal(out, again)
        assert torch.equal(grad, grad_again)


def test_the_own_block_alone_and_every_block_are_the_two_ends() -> None:
    case = make_case("contiguous", 1)
    q, k, v, _ = case.tensors()
    for top_k, density in ((1, 1 / 9), (17, 1.0)):
        ring = AdaptiveRingAttention(case.layout, 0, None, top_k=top_k, block=BLOCK)
        ring(q, k, v)
        assert ring.schedule is not None
        rule = ring.schedule.pattern.heads[0]
        assert isinstance(rule, Chosen)
        assert rule.table.sum() == (17 if top_k == 1 else 17 * 18 // 2)
        assert "of 17 blocks of 4" in repr(rule)
        assert ring.schedule.pattern.density(LENGTH) == pytest.approx(density, rel=0.4)


def test_what_cannot_be_routed_is_refused() -> None:
    with pytest.raises(ValueError, match="top_k=0"):
        AdaptiveRingAttention(contiguous(8, 1), 0, None, top_k=0)
    with pytest.raises(ValueError, match="needs a group"):
        AdaptiveRingAttention(contiguous(8, 2), 0, None, top_k=1)
    x = torch.zeros(2, 8, 2, 4)
    with pytest.raises(ValueError, match="one sequence at a time"):
        AdaptiveRingAttention(contiguous(8, 1), 0, None, top_k=1)(x, x, x)
