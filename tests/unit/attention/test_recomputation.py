"""Checkpointing runs a block's attention once: the same bits, half the kernels and hops, in a ring and alone.

An offloaded tensor is itself until it is copied out, then freed, and copied back with the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import noop_context_fn

from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.kernels.adapters.flex import result_of
from elastic_ring.attention.kernels.registry import named
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import Layout, make_layout
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.recomputation import OffloadedTensor
from elastic_ring.attention.ring import RingAttention
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.init import Initialiser, initialise_module
from elastic_ring.model.transformer import Transformer
from tests.unit.attention.attention_rings import ThreadRings, in_threads, one_thread

CONFIG = ModelConfig(64, 3, 32, 4, 2, 8, 64)
PATTERN = '{"block": 128, "groups": [{"layers": [1], "rule": "dense"}, {"rule": "bigbird:1,0,1"}]}'


class Plain:
    """The same attention without what checkpointing looks for: it is run again."""

    def __init__(self, ring: RingAttention) -> None:
        self._ring = ring

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._ring(q, k, v)


def run_model(layout: Layout, cp_rank: int, attention: Any, ledger: HopLedger, offload: bool) -> tuple[Any, int]:
    """(loss and gradients, bytes of forward hops) of one sequence's slice."""
    model = Transformer(replace(CONFIG, offload_activations=offload))
    initialise_module(model, Initialiser(0, CONFIG.num_layers))
    mine = layout.scatter(torch.arange(layout.seq_len).unsqueeze(0) * 7 % 64, cp_rank, 1)
    positions = layout.positions(cp_rank).unsqueeze(0)
    loss, _ = model(mine, positions=positions, document_ids=mine, attention=attention, targets=mine)
    loss.backward()
    num_bytes = sum(n for (direction, _), n in ledger.sent_bytes.items() if direction == "forward")
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], num_bytes


def train(
    cp: int, group: Any, cp_rank: int, *, keep: bool, offload: bool = False, graphed: bool = False
) -> tuple[list[Tensor], int, int]:
    """(loss and gradients, kernels run forward, bytes of forward hops) of a dense ring."""
    backend, counted = named("aten-cpu"), [0]

    def forward(*args: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        counted[0] += 1
        if not graphed:
            return backend.forward(*args, **options)
        return result_of(lambda q, k, v: with_graph(q, backend.forward(q.detach(), k, v, **options)), args)

    layout, options = make_layout("zigzag", 32, cp), RingOptions(backend=replace(backend, forward=forward))
    ring = RingAttention(plan(Pattern(), layout), cp_rank, group, options)
    results, num_bytes = run_model(layout, cp_rank, ring if keep else Plain(ring), ring.ledger, offload)
    return results, counted[0], num_bytes


def train_patterned(
    cp: int, group: Any, cp_rank: int, *, keep: bool, offload: bool = False, kernel: str | None = None
) -> tuple[list[Tensor], int, int]:
    """As `train`, layers 0 and 2 sparse and layer 1 dense; hops forward instead of kernels."""
    layout, heard = make_layout("zigzag", 128 * 2 * cp, cp), [0]

    def observe(direction: str, call_index: int, hop: int) -> None:
        heard[0] += direction == "forward"

    options = RingOptions(observer=observe, kernel=kernel)
    attention: Any = PatternedAttention(parse_pattern(PATTERN), layout, cp_rank, group, options)
    if not keep:
        attention.recomputation = noop_context_fn  # what a layer's callable hands on
    results, num_bytes = run_model(layout, cp_rank, attention, attention.ledger, offload)
    return results, heard[0], num_bytes


def check_that_nothing_runs_again(cp: int, train: Callable[..., Any]) -> list[Any]:
    """Kept or offloaded results give the bits of running again, with half the calls and bytes; the results of both."""
    with one_thread():
        rings, found = ThreadRings(), {}
        for way in ("kept", "offloaded", "run again"):
            groups = rings.groups(cp) if cp > 1 else [None]
            how = {"keep": way != "run again", "offload": way == "offloaded"}
            # Autograd's one thread for the CPU is the caller's own: the ranks may run side by side.
            found[way] = in_threads(cp, lambda rank, how=how, groups=groups: train(cp, groups[rank], rank, **how))
    once = found["kept"] + found["offloaded"]
    for kept, again in zip(once, 2 * found["run again"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kept[0], again[0], strict=True))
        assert [2 * number for number in kept[1:]] == list(again[1:])
    return once


def with_graph(q: Tensor, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The same numbers from a graph that saves q, as FlexAttention's forward does."""
    nothing = 0.0 * (q * q).sum()
    return found[0].detach() + nothing, found[1].detach() + nothing


def test_a_kernel_that_runs_with_gradients_adds_nothing_to_what_a_checkpointed_layer_saves():
    with one_thread():
        found, other = (train(1, None, 0, keep=True, graphed=graphed)[0] for graphed in (True, False))
    assert all(map(torch.equal, found, other))


@pytest.mark.parametrize("cp", [1, 2])
def test_attention_is_not_run_again_and_no_bit_changes(cp):
    check_that_nothing_runs_again(cp, train)


@pytest.mark.slow
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("sparse_kernel", [None, "reference-sparse"], ids=["tiles", "blocks"])
def test_layers_with_patterns_of_their_own_are_not_run_again_either(sparse_kernel, cp):
    for _, num_hops, _ in check_that_nothing_runs_again(cp, partial(train_patterned, kernel=sparse_kernel)):
        assert num_hops == CONFIG.num_layers * cp


def is_itself_until_it_leaves_and_equal_every_time_it_comes_back(device: str) -> None:
    tensor = torch.randn(3, 5, device=device).requires_grad_()
    wanted, there = tensor.detach().cpu().clone(), weakref.ref(tensor)
    offloaded = OffloadedTensor(tensor)
    assert offloaded.tensor() is tensor
    offloaded.leave()
    del tensor
    assert there() is None
    for _ in range(2):
        back = offloaded.tensor()
        assert back.requires_grad
        assert back.device.type == device
        assert torch.equal(back.detach().cpu(), wanted)
        back.detach().zero_()  # whoever brought it back may do with it as they please


def test_it_is_itself_until_it_leaves_and_equal_every_time_it_comes_back():
    is_itself_until_it_leaves_and_equal_every_time_it_comes_back("cpu")


def test_without_a_gradient_it_comes_back_without_one():
    offloaded = OffloadedTensor(torch.ones(2, dtype=torch.int64))
    offloaded.leave()
    assert not offloaded.tensor().requires_grad
    with pytest.raises(AssertionError, match="left already"):
        offloaded.leave()
