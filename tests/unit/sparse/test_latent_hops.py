"""Hops that carry latents: the values and gradients of attention on the keys that they are projected up to, and the
bytes of the latents alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.kernels.registry import named
from elastic_ring.attention.layers import PatternedAttention, of_layer
from elastic_ring.attention.layouts.layout import contiguous, zigzag
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.layers import LayerGroup, LayerPatterns
from elastic_ring.attention.patterns.rules import Dense, Window
from elastic_ring.attention.patterns.sparse import Pattern, SparsePattern
from elastic_ring.attention.plan.padded_blocks import padded
from elastic_ring.attention.plan.schedule import Schedule, plan
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.ring import RingAttention
from tests.gpu.gpu_rings import run_latents_on
from tests.unit.attention.attention_rings import in_threads, relative_error

HEADS, KEY, ROTATED, VALUE, RANK = 4, 6, 4, 7, 8
BLOCKS = {"kernel": named("reference-sparse")}
SHIFTED = LayerGroup((Window(9), Window(30)), dealt=True)
CASES: dict[str, tuple[LayerGroup | None, int, int, tuple[int, ...], dict[str, Any]]] = {
    "dense": (None, 61, 3, (0,), {}),
    "dense, two hops a stage, documents": (None, 61, 4, (0, 22, 43), {"hops_per_stage": 2}),
    "dense between hosts": (None, 61, 3, (0, 22), {"hosts": ("a", "a", "b")}),
    "window": (LayerGroup((Window(9),)), 67, 4, (0, 22), {}),
    "rules of heads": (LayerGroup((Window(9), Dense(), Window(9), Window(20))), 61, 3, (0,), {}),
    "rules dealt to heads": (SHIFTED, 61, 4, (0,), {}),
    "blocks": (LayerGroup((Window(129),)), 1024, 2, (0,), BLOCKS),
    "blocks of heads, in stages": (
        LayerGroup((Window(129), Dense(), Dense(), Window(300))),
        777,
        3,
        (0, 300),
        {**BLOCKS, "stage_bytes": 1 << 18},
    ),
}


def schedule_of(name: str, cp: int, kv_heads: int) -> Schedule:
    rules, length, _, starts, options = CASES[name]
    layout = zigzag(length, cp) if cp > 1 else contiguous(length, 1)
    if rules is None:
        return plan(Pattern(True, starts), layout)
    pattern = SparsePattern(rules.heads(HEADS, HEADS), block_of(options), starts)
    return plan_sparse(pattern, layout, HEADS, kv_heads)


def block_of(options: dict[str, Any]) -> int:
    return 128 if "kernel" in options else 4


def ring_of(name: str, cp: int, cp_rank: int, group: Any, **more: Any) -> Any:
    """The attention of a layer, and what has its ledger."""
    rules, _, _, starts, options = CASES[name]
    schedule, asked = schedule_of(name, cp, 1), RingOptions(**more)
    if rules is None:
        return RingAttention(schedule, cp_rank, group, asked)
    patterns = LayerPatterns((rules,), block_of(options))
    return PatternedAttention(patterns, schedule.layout, cp_rank, group, asked, document_starts=starts)


def values(length: int) -> list[torch.Tensor]:
    """q, latents with rotated keys, the projection, and the gradient of out."""
    made = torch.Generator().manual_seed(0)
    shapes = (1, length, HEADS, KEY + ROTATED), (1, length, 1, RANK + ROTATED), (HEADS * (KEY + VALUE), RANK)
    return [torch.randn(shape, generator=made, dtype=torch.float64) for shape in (*shapes, shapes[0])]


def on_keys(name: str, scale: float | None = None) -> list[torch.Tensor]:
    """out and the gradients of q, latents and projection, from one rank's attention on keys that autograd projects."""
    q, both, up, dout = values(CASES[name][1])
    leaves = [x.requires_grad_() for x in (q, both, up)]
    rotated = both[..., RANK:].expand(-1, -1, HEADS, -1)
    key, value = F.linear(both[:, :, 0, :RANK], up).unflatten(2, (HEADS, -1)).split((KEY, VALUE), -1)
    v = F.pad(value, (0, KEY + ROTATED - VALUE))
    scaled = q if scale is None else q * (scale * (KEY + ROTATED) ** 0.5)
    out = of_layer(ring_of(name, 1, 0, None), 0)(scaled, torch.cat((key, rotated), -1), v)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def on_latents(
    name: str, groups: list[Any], **more: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[HopLedger]]:
    """The same on a ring; of the projection each rank's part; and the ledgers."""
    _, length, cp, _, options = CASES[name]
    schedule = schedule_of(name, cp, 1)
    q, both, up, dout = values(length)

    def work(cp_rank: int) -> tuple[list[torch.Tensor], torch.Tensor, HopLedger]:
        own = [schedule.layout.scatter(x, cp_rank, 1).requires_grad_() for x in (q, both)]
        leaf = up.clone().requires_grad_()
        ring = ring_of(name, cp, cp_rank, groups[cp_rank], **options, **more)
        attend: Any = of_layer(ring, 0)
        assert attend.takes_latents
        out = attend(own[0], *own[1].chunk(2, -1), up=leaf)
        grads = torch.autograd.grad(out, (*own, leaf), schedule.layout.scatter(dout, cp_rank, 1))
        return [out.detach(), *grads[:2]], grads[2], ring.ledger

    found = in_threads(cp, work)
    gathered = [schedule.layout.gather([one[0][i] for one in found], 1) for i in range(3)]
    return gathered, [one[1] for one in found], [one[2] for one in found]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_attention_on_keys_and_only_needed_latents_move(rings, name):
    cp = CASES[name][2]
    found, parts, ledgers = on_latents(name, rings.groups(cp))
    for got, want in zip((*found, sum(parts)), on_keys(name), strict=True):
        assert relative_error(torch.as_tensor(got), want) <= 1e-12
    again, same, _ = on_latents(name, rings.groups(cp, fresh=True))
    assert all(torch.equal(*pair) for pair in zip((*found, *parts), (*again, *same), strict=True))

    schedule, of_keys = schedule_of(name, cp, 1), schedule_of(name, cp, HEADS)
    if "kernel" in CASES[name][4]:
        schedule, of_keys = padded(schedule), padded(of_keys)
    for cp_rank, ledger in enumerate(ledgers):
        received = sum(size for (way, _), size in ledger.received_bytes.items() if way == "forward")
        assert received == schedule.received_bytes(cp_rank, (RANK + ROTATED) // 2, 8, kv_heads=1) > 0
        # A latent crosses where any head reads it; K and V of each head that does.
        whole = of_keys.received_bytes(cp_rank, KEY + ROTATED, 8, kv_heads=HEADS)
        assert received <= whole * (RANK + ROTATED) / (2 * (KEY + ROTATED)) <= whole
        if CASES[name][0] is None or len(CASES[name][0].rules) == 1:
            assert received / whole == (RANK + ROTATED) / (2 * HEADS * (KEY + ROTATED))


@pytest.mark.parametrize("name", ["dense, two hops a stage, documents", "blocks"])
def test_through_the_messages_of_a_gpu_they_are_the_same(name):
    _, length, cp, _, options = CASES[name]
    found, _ = run_latents_on("cpu", schedule_of(name, cp, 1), values(length), **options)
    for got, want in zip(found, on_keys(name, 0.25), strict=True):
        assert relative_error(got, want) <= 1e-12


def test_latents_cross_in_8_bits_as_keys_do(rings):
    found, _, ledgers = on_latents("dense", rings.groups(3), kv_wire="fp8")
    want = on_keys("dense")
    assert all(relative_error(got, right) < 0.1 for got, right in zip(found, want[:3], strict=True))
    assert ledgers[0].wire_error is not None
