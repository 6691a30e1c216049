"""Accumulates dK and dV of a rank's own keys: its own share and the partials that other ranks return."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class KVGradAccumulator:
    """`totals` are dK and dV, each (B, S, Hkv, D), of type `dtype`; own shares come by some heads or all.

    `early` says that other shares are added before some heads' own one, so that it must start from zeros. `writes`,
    that kernels can write to places of the inputs' type.
    """

    def __init__(self, k: torch.Tensor, dtype: torch.dtype, *, early: bool, writes: bool) -> None:
        self._shape, self._dtype, self._device = k.shape, dtype, k.device
        self._early = early
        self._writes = writes and dtype == k.dtype and not early
        self._totals: list[torch.Tensor] = []

    @property
    def totals(self) -> list[torch.Tensor]:
        if not self._totals:
            make = torch.zeros if self._early else torch.empty
            self._totals = [make(self._shape, dtype=self._dtype, device=self._device) for _ in range(2)]
        return self._totals

    def places(self, heads: slice) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where a kernel may write the own share of some heads, or None where that is `put`."""
        return (self.totals[0][:, :, heads], self.totals[1][:, :, heads]) if self._writes else None

    def put(self, heads: slice, shares: Sequence[torch.Tensor]) -> None:
        """The own share of some heads; that of all is taken over as it is where the types agree."""
        if not self._totals and not self._early and shares[0].shape == self._shape:
            self._totals = [share.to(self._dtype).contiguous() for share in shares]
            return
        for total, share in zip(self.totals, shares, strict=True):
            some = total[:, :, heads]
            some.add_(share) if self._early else some.copy_(share)
