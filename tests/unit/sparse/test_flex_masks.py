"""What FlexAttention is told of the tables: the same pairs, in memory and in shapes that do not follow every number."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from elastic_ring.attention.kernels.adapters import flex, reference
from elastic_ring.attention.kernels.adapters.flex import LEAST, _power_of_four, _width, flex_mask, padded_blocks
from elastic_ring.attention.kernels.block_tables import BlockTables, tables_apart
from elastic_ring.attention.layouts.layout import zigzag
from elastic_ring.attention.lowering.device_blocks import on_device
from elastic_ring.attention.patterns.families import BigBird
from elastic_ring.attention.patterns.rules import Dense, Window
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.padded_blocks import padded
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from experiments.block_sparse import tables_for

CPU = torch.device("cpu")


def listed(counts: torch.Tensor, indices: torch.Tensor, num_columns: int) -> torch.Tensor:
    """(H, n, num_columns) bool, entry by entry."""
    dense = torch.zeros(*counts.shape[1:], num_columns, dtype=torch.bool)
    for head, row in np.ndindex(*counts.shape[1:]):
        dense[head, row, indices[0, head, row, : counts[0, head, row]].long()] = True
    return dense


def told(mask: Any) -> dict[str, torch.Tensor]:
    num_q, num_k = (length // 128 for length in mask.seq_lengths)
    return {
        "own": listed(mask.kv_num_blocks, mask.kv_indices, num_k),
        "full": listed(mask.full_kv_num_blocks, mask.full_kv_indices, num_k),
        "own by key": listed(mask.q_num_blocks, mask.q_indices, num_q).transpose(1, 2),
        "full by key": listed(mask.full_q_num_blocks, mask.full_q_indices, num_q).transpose(1, 2),
    }


@pytest.mark.parametrize("all_rows", [True, False])
def test_rectangles_mean_the_same_in_both_directions_and_are_padded_with_nothing(all_rows):
    generator = torch.Generator().manual_seed(0)
    full = torch.rand(2, 5, 9, generator=generator) < 0.3
    full[:, 1] = False
    tables = tables_apart([full.numpy()], [np.arange(9)], CPU, all_rows=all_rows)
    assert padded_blocks(tables) == (LEAST, LEAST)
    assert padded_blocks(replace(tables, num_q_blocks=65)) == (65 if all_rows else 96, LEAST)
    mask = flex_mask(tables)
    assert mask.seq_lengths == (128 * LEAST, 128 * LEAST)
    found = told(mask)
    want = torch.zeros_like(found["full"])
    want[:, :5, :9] = full
    assert torch.equal(found["full"], want)
    assert torch.equal(found["full by key"], want)
    assert not found["own"].any()
    assert not found["own by key"].any()
    assert flex_mask(tables) is mask


@pytest.mark.parametrize("rule", [BigBird(3, 1, 0, unit_tokens=512), BigBird(6, 1, 0, unit_tokens=512)], ids=str)
def test_lists_in_part_and_whole_have_the_same_strides(rule):
    """FlexAttention's kernels of torch 2.11 read both by the strides of the first."""
    mask = flex_mask(tables_for(SparsePattern((rule,), 128), 128 * 80, 4, CPU))
    assert mask.full_q_indices.size(-1) == 80
    assert mask.kv_indices.stride() == mask.full_kv_indices.stride()
    assert mask.q_indices.stride() == mask.full_q_indices.stride()
    assert mask.kv_num_blocks.stride() == mask.full_kv_num_blocks.stride()
    assert mask.q_num_blocks.stride() == mask.full_q_num_blocks.stride()


def test_masks_of_blocks_say_of_every_pair_what_the_tables_mean(monkeypatch):
    monkeypatch.setattr(flex, "LEAST", 16)  # pairs of so many blocks
    rules = (Window(200), Dense(), Window(130), Dense())
    schedule = padded(plan_sparse(SparsePattern(rules, 128, (0, 77)), zigzag(900, 2), 4, 2))
    blocks = on_device(schedule, 1, CPU)
    calls = [call.tables for stage in blocks.stages for call in stage.calls]
    for tables in (blocks.own, *blocks.own_parts, *calls):
        mask, (num_q, num_k) = flex_mask(tables), padded_blocks(tables)
        head, row, column = (torch.arange(n) for n in (tables.num_heads, 128 * num_q, 128 * num_k))
        seen = mask.mask_mod(0, head[:, None, None], row[:, None], column)
        part = torch.from_numpy(np.kron(told(mask)["own"].numpy(), np.ones((128, 128), dtype=bool)))
        full = torch.from_numpy(np.kron(told(mask)["full"].numpy(), np.ones((128, 128), dtype=bool)))
        found = (seen & part | full)[:, : 128 * tables.num_q_blocks, : 128 * tables.num_k_blocks]
        assert torch.equal(found, reference.seen_by(tables))
        assert tables.masks is not None
        assert len(tables.masks.masks) > 2


def test_halves_of_the_heads_are_views_of_the_mask_of_all():
    pattern = SparsePattern((BigBird(2, 0, 2), BigBird(3, 0, 1), BigBird(2, 0, 0), BigBird(1, 0, 3)), 128)
    whole = tables_for(pattern, 128 * 24, 4, CPU)
    halves = whole.of_heads(0, 2), whole.of_heads(2, 4)
    of_all = told(flex_mask(whole))
    for number, half in enumerate(halves):
        mask, some = flex_mask(half), slice(2 * number, 2 * number + 2)
        for name, found in told(mask).items():
            assert torch.equal(found, of_all[name][some]), name
        of_whole = flex_mask(whole).full_kv_indices
        assert mask.full_kv_indices.untyped_storage().data_ptr() == of_whole.untyped_storage().data_ptr()
    shared = tables_for(SparsePattern((BigBird(2, 0, 2),), 128), 128 * 24, 4, CPU)
    assert flex_mask(shared.of_heads(2, 4)) is flex_mask(shared)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles for the CPU")
@pytest.mark.filterwarnings("default")  # the compiler warns of its own deprecations
def test_a_compiled_kernel_reads_narrow_lists(monkeypatch):
    """Its CPU form, which gives no lse and, unlike that of GPUs, insists on wide lists of masked blocks by query."""
    monkeypatch.setattr(flex, "LEAST", 16)
    monkeypatch.setattr(flex, "MOST_COLUMNS", 16)
    generator = torch.Generator().manual_seed(0)
    full = torch.rand(2, 18, 22, generator=generator) < 0.3
    full[:, 1] = False
    tables = tables_apart([full.numpy()], [np.arange(22)], CPU, all_rows=False)
    mask, (num_q, num_k) = flex_mask(tables), padded_blocks(tables)
    assert mask.full_kv_indices.size(-1) == 16 < num_k
    mask.kv_indices = functional.pad(mask.kv_indices, (0, num_k - mask.kv_indices.size(-1)))
    q, k, v = (torch.randn(1, 128 * num, 2, 64, generator=generator) for num in (18, 22, 22))
    padded = [
        functional.pad(x, (0, 0, 0, 0, 0, 128 * num - x.size(1))).transpose(1, 2)
        for x, num in ((q, num_q), (k, num_k), (v, num_k))
    ]
    with torch.no_grad():
        found = torch.compile(flex_attention, dynamic=False, fullgraph=True)(*padded, block_mask=mask, scale=0.125)
    want, _ = reference.sparse_forward(q, k, v, tables, 0.125)
    assert (found.transpose(1, 2)[:, : q.size(1)] - want).abs().max() < 1e-6
    assert not found[:, :, 128:256].any()


@pytest.mark.parametrize("causal", [True, False])
def test_what_is_compiled_takes_and_gives_tokens_first(causal, monkeypatch):
    """The shipped function, traced whole; its kernels are a GPU's, so here it runs as it is written."""
    traced = torch.compile(flex._by_token(), backend="eager", fullgraph=True)
    monkeypatch.setattr(flex, "_compiled", lambda fullgraph: traced)
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 300, heads, 16, generator=generator) for heads in (4, 2, 2))
    out, lse = flex.forward(q, k, v, causal=causal, scale=0.25)
    want, want_lse = (x.float() for x in reference.forward(q, k, v, causal=causal, scale=0.25))
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-5)


def num_ints(tables: BlockTables) -> int:
    mask = flex_mask(tables)
    names = ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices")
    storages = {getattr(mask, name).untyped_storage().data_ptr(): getattr(mask, name).numel() for name in names}
    return sum(storages.values())


def test_a_mask_grows_with_what_is_kept_not_with_the_square_of_the_length():
    for num_blocks in (512, 1024):
        tables = tables_for(SparsePattern((BigBird(8, 0, 0),), 128), 128 * num_blocks, 4, CPU)
        assert num_ints(tables) == num_blocks * 4 * 16  # own blocks, and the seven before or after


def shapes(starts: tuple[int, ...]) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Over all ranks of a ring, what is compiled, and what would be if every number were taken as it is."""
    pattern = SparsePattern((BigBird(6, 0, 4),), 128, starts)
    schedule = plan_sparse(pattern, zigzag(128 * 256, 4), 4, 2)
    found, exact = set(), set()
    for cp_rank in range(4):
        blocks = on_device(schedule, cp_rank, CPU, 1)
        for tables in (blocks.own, *(call.tables for stage in blocks.stages for call in stage.calls)):
            found.add(compiled_shape(tables, 4, 2))
            lists = (tables.own, tables.full, tables.own_by_key, tables.full_by_key)
            exact.add((tables.num_q_blocks, tables.num_k_blocks, *(x.indices.size(-1) for x in lists)))
    return found, exact


def test_plans_that_all_differ_are_compiled_for_a_few_shapes():
    found: set[tuple[int, ...]] = set()
    exact: set[tuple[int, ...]] = set()
    generator = np.random.default_rng(0)
    for _ in range(8):
        starts = (0, *(128 * np.sort(generator.choice(np.arange(1, 256), 3, replace=False))).tolist())
        few, many = shapes(starts)
        found |= few
        exact |= many
    assert len(exact) > 70
    assert len(found) <= 6


def test_masks_of_causal_tiles_of_many_lengths_are_bounded_by_bytes(monkeypatch):
    """As packed documents give them."""
    masks = flex._causal_mask
    one = masks._weigh(masks(2048, CPU))
    assert one > 0
    monkeypatch.setattr(masks, "_limit_bytes", 2 * one)
    for num_rows in range(256, 2304, 256):
        assert masks(num_rows, CPU) is masks(num_rows, CPU)
        assert masks.num_bytes <= 2 * one
    assert masks.num_kept < 8


def compiled_shape(tables: BlockTables, num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """The sizes of such a call for which FlexAttention's kernels are compiled."""
    num_q, num_k = padded_blocks(tables)
    num_masks = 0 if tables.masks is None else _power_of_four(len(tables.masks.masks), LEAST)
    widths = _width((tables.own, tables.full), num_k), _width((tables.own_by_key, tables.full_by_key), num_q)
    return (num_heads, num_kv_heads, tables.own.counts.size(1), num_q, num_k, *widths, num_masks)
