"""Whether weights or tokens cross a ring: by bytes, the same on all ranks and in plans. No torch in here."""

from __future__ import annotations

from typing import Literal

Placement = Literal["auto", "gather", "send"]
REDUCED_BYTES = 4
"""Bytes of a gradient that the ring sums in fp32."""
MOST_SHARES = 2.0
"""A rank gets at most so many times its fair share of rows at a time; plans have room for them."""
GATHERS, TRIPS = 2, 6
"""Weights are gathered in forward and in backward; rows go there and back in forward, recomputation and backward."""


def sends_tokens(
    asked: Placement, cp: int, num_parameters: int, tokens: int, experts_per_token: int, width: int, element_bytes: int
) -> bool:
    """Whether the tokens of a rank travel to a layer's experts, which have `num_parameters` in all."""
    if cp == 1 or asked != "auto":
        return cp > 1 and asked == "send"
    gathered = (GATHERS * element_bytes + REDUCED_BYTES) * num_parameters
    return gathered > TRIPS * element_bytes * tokens * experts_per_token * width
