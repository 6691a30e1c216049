"""What the digests of batches say, decoded."""

from __future__ import annotations

from collections.abc import Iterable


def digest_value(limbs: Iterable[float]) -> tuple[int, int]:
    """The two 64-bit sums of limbs that were added over ranks, steps or both."""
    low_a, high_a, low_b, high_b = (int(limb) for limb in limbs)
    return (low_a + (high_a << 32)) % 2**64, (low_b + (high_b << 32)) % 2**64
