"""Checkpointing runs a block's attention once: the same bits, half the kernels and hops, in a ring and alone.

An offloaded tensor is itself until it is copied out, then freed, and copied back with the same bits.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import noop_context_fn

from elastic_ring.attention.kernels.adapters.flex import result_of
from elastic_ring.attention.kernels.registry import named
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import make_layout
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
NUM_TOKENS = 32


class Plain:
    """The same attention without what checkpointing looks for: it is run again."""

    def __init__(self, ring: RingAttention) -> None:
        self._ring = ring

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._ring(q, k, v)


def train(
    cp: int, cp_rank: int, group: Any, *, keep: bool, offload: bool = False, graphed: bool = False
) -> tuple[list[Tensor], int, int]:
    """(loss and gradients, kernels run forward, bytes of forward hops) of one sequence's slice."""
    backend, counted = named("aten-cpu"), [0]

    def forward(*args: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        counted[0] += 1
        if not graphed:
            return backend.forward(*args, **options)
        return result_of(lambda q, k, v: with_graph(q, backend.forward(q.detach(), k, v, **options)), args)

    layout = make_layout("zigzag", NUM_TOKENS, cp)
    ring = RingAttention(
        plan(Pattern(), layout), cp_rank, group, RingOptions(backend=replace(backend, forward=forward))
    )
    model = Transformer(replace(CONFIG, offload_activations=offload))
    initialise_module(model, Initialiser(0, CONFIG.num_layers))
    tokens = torch.arange(NUM_TOKENS).unsqueeze(0) * 7 % 64
    positions = layout.scatter(torch.arange(NUM_TOKENS).unsqueeze(0), cp_rank, 1)
    mine = layout.scatter(tokens, cp_rank, 1)
    loss, _ = model(mine, positions=positions, document_ids=mine, attention=ring if keep else Plain(ring), targets=mine)
    loss.backward()
    num_bytes = sum(n for (direction, _), n in ring.ledger.sent_bytes.items() if direction == "forward")
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], counted[0], num_bytes


def with_graph(q: Tensor, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The same numbers from a graph that saves q, as FlexAttention's forward does."""
    nothing = 0.0 * (q * q).sum()
    return found[0].detach() + nothing, found[1].detach() + nothing


def test_a_kernel_that_runs_with_gradients_adds_nothing_to_what_a_checkpointed_layer_saves() -> None:
    with one_thread():
        found, other = (train(1, 0, None, keep=True, graphed=graphed)[0] for graphed in (True, False))
    assert all(map(torch.equal, found, other))


def one_rank(cp: int, groups: Any, way: str, cp_rank: int) -> tuple[list[Tensor], int, int]:
    return train(cp, cp_rank, groups[cp_rank], keep=way != "run again", offload=way == "offloaded")


@pytest.mark.parametrize("cp", [1, 2])
def test_attention_is_not_run_again_and_no_bit_changes(cp: int) -> None:
    with one_thread():
        rings = ThreadRings()
        found = {}
        for way in ("kept", "offloaded", "run again"):
            groups = rings.groups(cp) if cp > 1 else [None]
            # Autograd's one thread for the CPU is the caller's own: the ranks may run side by side.
            found[way] = in_threads(cp, partial(one_rank, cp, groups, way))
    for kept, again in zip(found["kept"] + found["offloaded"], 2 * found["run again"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kept[0], again[0], strict=True))
        assert 2 * kept[1] == again[1]
        assert 2 * kept[2] == again[2]


PATTERN = '{"block": 128, "groups": [{"layers": [1], "rule": "dense"}, {"rule": "bigbird:1,0,1"}]}'


def train_patterned(
    cp: int, sparse_kernel: str | None, group: Any, cp_rank: int, *, keep: bool, offload: bool = False
) -> Any:
    """As `train`, layers 0 and 2 sparse and layer 1 dense; hops forward instead of kernels."""
    num_tokens, heard = 128 * 2 * cp, [0]
    layout = make_layout("zigzag", num_tokens, cp)

    def observe(direction: str, call_index: int, hop: int) -> None:
        heard[0] += direction == "forward"

    attention: Any = PatternedAttention(
        parse_pattern(PATTERN), layout, cp_rank, group, RingOptions(observer=observe, kernel=sparse_kernel)
    )
    model = Transformer(replace(CONFIG, offload_activations=offload))
    initialise_module(model, Initialiser(0, CONFIG.num_layers))
    tokens = torch.arange(num_tokens).unsqueeze(0) * 7 % 64
    mine = layout.scatter(tokens, cp_rank, 1)
    positions = layout.positions(cp_rank).unsqueeze(0)
    ledger = attention.ledger
    if not keep:
        attention.recomputation = noop_context_fn  # what a layer's callable hands on
    loss, _ = model(mine, positions=positions, document_ids=mine, attention=attention, targets=mine)
    loss.backward()
    num_bytes = sum(n for (direction, _), n in ledger.sent_bytes.items() if direction == "forward")
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], heard[0], num_bytes


@pytest.mark.slow
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("sparse_kernel", [None, "reference-sparse"], ids=["tiles", "blocks"])
def test_layers_with_patterns_of_their_own_are_not_run_again_either(sparse_kernel: str | None, cp: int) -> None:
    with one_thread():
        rings = ThreadRings()
        found = {}
        for way in ("kept", "offloaded", "run again"):
            groups = rings.groups(cp) if cp > 1 else [None]

            def work(cp_rank: int, groups: Any = groups, way: str = way) -> Any:
                keep, offload = way != "run again", way == "offloaded"
                return train_patterned(cp, sparse_kernel, groups[cp_rank], cp_rank, keep=keep, offload=offload)

            found[way] = in_threads(cp, work)
    for kept, again in zip(found["kept"] + found["offloaded"], 2 * found["run again"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kept[0], again[0], strict=True))
        assert kept[1] == CONFIG.num_layers * cp
        assert 2 * kept[1] == again[1]
        assert 2 * kept[2] == again[2]


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


def test_it_is_itself_until_it_leaves_and_equal_every_time_it_comes_back() -> None:
    is_itself_until_it_leaves_and_equal_every_time_it_comes_back("cpu")


def test_without_a_gradient_it_comes_back_without_one() -> None:
    offloaded = OffloadedTensor(torch.ones(2, dtype=torch.int64))
    offloaded.leave()
    assert not offloaded.tensor().requires_grad
    with pytest.raises(AssertionError, match="left already"):
        offloaded.leave()
