"""Which pairs of hosts are measured at the same time: rounds in which each host has one partner. Pure."""

from __future__ import annotations

Pair = tuple[int, int]

ALL_PAIRS_HOSTS = 16
"""The most hosts for which each pair is measured."""


def rounds(num_hosts: int, most: int) -> list[list[Pair]]:
    """Rounds of disjoint pairs of the hosts 0 to num_hosts - 1, in which no pair comes twice.

    All pairs up to ALL_PAIRS_HOSTS hosts; of more at most `most` rounds, spread over all, so that each host is measured
    with about as many partners, near and far. The circle method of tournaments: one host stays, the others move on.
    """
    size = num_hosts + num_hosts % 2  # with an odd number one host rests in each round
    total = max(0, size - 1)
    if num_hosts <= ALL_PAIRS_HOSTS or most >= total:
        chosen = list(range(total))
    else:
        chosen = sorted({round_ * total // most for round_ in range(most)})
    return [_round(num_hosts, size, number) for number in chosen]


def _round(num_hosts: int, size: int, number: int) -> list[Pair]:
    circle = [size - 1, *((number + place) % (size - 1) for place in range(size - 1))]
    pairs = [(circle[place], circle[size - 1 - place]) for place in range(size // 2)]
    return [(min(pair), max(pair)) for pair in pairs if max(pair) < num_hosts]
