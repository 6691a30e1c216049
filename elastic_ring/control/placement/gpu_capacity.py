"""Chooses workers that can be members at the same time on nodes with a limited number of GPUs. Pure arithmetic.

A member of the last mesh keeps its GPU until it gets `Standby`, whether or not it is in the next mesh. So a node's
members may stay, and other workers get only GPUs that no such worker uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


def placeable(
    workers: Iterable[str], using_gpu: Iterable[str], node_of: Mapping[str, str], gpus_on: Mapping[str, int]
) -> list[str]:
    """The `workers` that can be members at the same time, in the given order; earlier ones take precedence.

    `using_gpu`: workers that use a GPU now; they need not be in `workers` (draining ones are not). `gpus_on`: number
    of GPUs of each node that has a limit. Any subset of the result respects every limit: on a node with g GPUs, u of
    them in use, at most min(u, g) users and at most max(0, g - u) others are returned.
    """
    if not gpus_on:
        return list(workers)
    users = set(using_gpu)
    used_on = Counter(node_of[worker] for worker in users)
    for_users = dict(gpus_on)
    for_others = {node: num_gpus - used_on[node] for node, num_gpus in gpus_on.items()}
    able = []
    for worker in workers:
        node, left = node_of[worker], for_users if worker in users else for_others
        if left.get(node, 1) <= 0:
            continue
        able.append(worker)
        if node in left:
            left[node] -= 1
    return able
