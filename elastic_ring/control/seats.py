"""Who can sit at once where nodes have only so many GPUs. Pure arithmetic: no preference and no plan.

Whoever took part in the last mesh keeps its GPU until it is told to stand by, whether or not it gets a place in the
next one. So a node's members may stay, and others get only the seats that no such worker still holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


def able_to_sit(
    workers: Iterable[str], held_by: Iterable[str], node_of: Mapping[str, str], seats_on: Mapping[str, int]
) -> list[str]:
    """Those of `workers` that can sit at once, in their order: on each node the first for whom there is a seat.

    `held_by`: who holds a GPU now, among `workers` or not (a draining one does, but is to leave). `seats_on`: the
    nodes with a limit. Any part of the answer keeps to every limit: of a node's s seats h are held; of those who
    hold one at most min(h, s) are taken up, and of all others at most max(0, s - h).
    """
    if not seats_on:
        return list(workers)
    holders = set(held_by)
    held_on = Counter(node_of[worker] for worker in holders)
    for_holders = dict(seats_on)
    for_others = {node: num_seats - held_on[node] for node, num_seats in seats_on.items()}
    able = []
    for worker in workers:
        node, left = node_of[worker], for_holders if worker in holders else for_others
        if left.get(node, 1) <= 0:
            continue
        able.append(worker)
        if node in left:
            left[node] -= 1
    return able
