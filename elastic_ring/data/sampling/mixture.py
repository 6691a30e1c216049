"""Which source of a mixture each sequence of a run comes from: a pure function of (seed, index).

Index i falls to the source whose part of [0, 1) has the point b + i * 0.618..., of which any stretch is spread evenly
(Weyl's sequence for the golden ratio): after n sequences each source has had its share of n to within a few, and how
many it has had is known without counting. Whole numbers only, so that all machines agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from elastic_ring.data.sampling.order import philox

MODULUS = 2**32
STEP = 2654435769  # odd, next to MODULUS divided by the golden ratio
_PURPOSE = 2**32  # of the random word among those of the seed


class Mixture:
    """Sources by index, in the proportion of `weights`."""

    def __init__(self, seed: int, weights: Sequence[float]) -> None:
        """Raises ValueError where a weight is not above 0, or too small beside the others."""
        if not weights or not all(weight > 0 for weight in weights):
            raise ValueError(f"weights={tuple(weights)}: each source needs a weight above 0")
        ends = np.cumsum(np.asarray(weights, dtype=np.float64))
        self._ends = [round(float(end / ends[-1]) * MODULUS) for end in ends]
        if any(high <= low for low, high in zip([0, *self._ends], self._ends, strict=False)):
            raise ValueError(f"weights={tuple(weights)}: one is less than 1 in {MODULUS} of all; leave that source out")
        self._begin = int(philox(seed, 0, _PURPOSE).random_raw(1)[0] % MODULUS)

    def source(self, index: int) -> int:
        point = (self._begin + STEP * index) % MODULUS
        return next(source for source, end in enumerate(self._ends) if point < end)

    def counts(self, num: int) -> tuple[int, ...]:
        """How many of the first `num` indices fall to each source."""
        below = [0, *(self._num_below(end, num) for end in self._ends)]
        return tuple(high - low for low, high in pairwise(below))

    def _num_below(self, end: int, num: int) -> int:
        """How many of the first `num` points are less than `end`: the multiples of MODULUS that b + STEP * i passes,
        less those that it passes when it starts `end` earlier."""
        late = floor_sum(num, MODULUS, STEP, self._begin + MODULUS - end)
        return floor_sum(num, MODULUS, STEP, self._begin + MODULUS) - late


def floor_sum(num: int, modulus: int, step: int, begin: int) -> int:
    """The sum of (step * i + begin) // modulus over 0 <= i < num, in as many turns as Euclid's algorithm takes.

    step and begin at least 0.
    """
    total = 0
    while True:
        total += num * (num - 1) // 2 * (step // modulus) + num * (begin // modulus)
        step, begin = step % modulus, begin % modulus
        last = step * num + begin
        if last < modulus:
            return total
        num, begin = divmod(last, modulus)
        modulus, step = step, modulus
