"""Full garbage collections at the same steps on all ranks.

One takes tens of milliseconds, in which every other rank waits for this one's part of a sum; Python begins one whenever
it likes. Megatron and torchtitan do the same (`--manual-gc`, `gc_freq`).
"""

from __future__ import annotations

import gc

COLLECT_EVERY_STEPS = 500
NEVER = 1_000_000_000


def settle() -> None:
    """Leave out what lives as long as this process, and begin no full collection unasked; younger objects are collected
    as ever."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)


def collect_if_due(num_steps: int) -> None:
    """After so many steps of the run."""
    if num_steps % COLLECT_EVERY_STEPS == 0:
        gc.collect()
