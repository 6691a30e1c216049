"""The sizes for which FlexAttention's kernels are compiled, as tests count them."""

from __future__ import annotations

from elastic_ring.attention.kernels.adapters.flex import LEAST, _power_of_four, _width, padded_blocks
from elastic_ring.attention.kernels.block_tables import BlockTables


def compiled_shape(tables: BlockTables, num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """The sizes of such a call for which FlexAttention's kernels are compiled."""
    num_q, num_k = padded_blocks(tables)
    num_masks = 0 if tables.masks is None else _power_of_four(len(tables.masks.masks), LEAST)
    widths = _width((tables.own, tables.full), num_k), _width((tables.own_by_key, tables.full_by_key), num_q)
    return (num_heads, num_kv_heads, tables.own.counts.size(1), num_q, num_k, *widths, num_masks)
