"""The choice of blocks by their means, on one process: the definition beside `Router`."""

from __future__ import annotations

import torch

from elastic_ring.attention.routing.router import best_blocks


def choose_blocks(mean_q: torch.Tensor, mean_k: torch.Tensor, rows: list[int], top_k: int) -> torch.Tensor:
    """Bool (H, len(rows), n): for each query block in `rows` its own block and the best `top_k` - 1 past blocks.

    `mean_q` (n, H, D) are the blocks' routing queries, `mean_k` (n, Hkv, D) their mean keys. The same choice as
    `Router`, on one process.
    """
    sharing, num_blocks = mean_q.size(1) // mean_k.size(1), mean_k.size(0)
    own = torch.tensor(rows, dtype=torch.int64, device=mean_q.device)
    keys = mean_k.double().repeat_interleave(sharing, dim=1)
    width = min(top_k - 1, num_blocks)
    best = best_blocks(mean_q[own].double(), keys, torch.zeros_like(own), own, width)
    chosen = torch.zeros(mean_q.size(1), len(rows), num_blocks, dtype=torch.bool, device=own.device)
    chosen = chosen.scatter_(-1, best, True) & (torch.arange(num_blocks, device=own.device) < own[:, None])
    chosen[:, torch.arange(len(rows), device=own.device), own] = True
    return chosen
