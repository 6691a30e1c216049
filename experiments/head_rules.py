"""Rules for each query head of a call: LongNet's shifted heads, mixes of heads, learned profiles. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_ring.attention.patterns.families import Dilated, Profile
from elastic_ring.attention.patterns.rules import Rule, require
from elastic_ring.files import plain_json, read_small


def longnet(
    num_heads: int,
    segments: Sequence[int],
    rates: Sequence[int],
    *,
    heads_per_offset: int = 1,
    unit_tokens: int = 1,
) -> tuple[Dilated, ...]:
    """One rule per query head; head h is offset by h // heads_per_offset units (Ding et al. 2023, arXiv:2307.02486).

    With grouped K/V heads set `heads_per_offset` to the number of query heads per K/V head: they then keep the same
    keys, which minimises the K/V tokens to transfer.
    """
    require("num_heads", num_heads, 1, "give the number of query heads")
    require("heads_per_offset", heads_per_offset, 1, "1 shifts each head")
    rules = (
        Dilated(tuple(segments), tuple(rates), (head // heads_per_offset) % max(rates, default=1), unit_tokens)
        for head in range(num_heads)
    )
    return tuple(rules)


def mixed(*parts: tuple[int, Rule]) -> tuple[Rule, ...]:
    """Rules for a mix of heads: `mixed((6, Window(1024)), (2, Dense()))` gives 6 local heads and 2 dense ones.

    Raises `ValueError` for no heads.
    """
    rules = tuple(rule for num_heads, rule in parts for _ in range(num_heads))
    if not rules:
        raise ValueError(f"parts={parts}: give at least one head")
    return rules


def load_profile(path: str | Path, *, keep: float) -> tuple[Profile, ...]:
    """Read a learned profile: one rule per head.

    The file is JSON: `{"unit_tokens": 128, "counts": [[...], ...]}`, where counts[head][d] is the number of times
    the head chose the block d units back during training. Each head keeps distance 0 and its most frequent
    distances (ties: the nearer first) until they cover the share `keep` (0 to 1) of its counts. Raises `ValueError`
    for another format or `keep`, and `OSError` if the file cannot be read.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep}: a share of the counts, above 0 and at most 1")
    try:
        loaded: Any = plain_json(read_small(path))
        unit_tokens, heads = int(loaded["unit_tokens"]), [[int(n) for n in head] for head in loaded["counts"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"profile {path}: not a JSON object with unit_tokens and counts by head: {error}") from error
    if not heads or any(not head or min(head) < 0 for head in heads):
        raise ValueError(f"profile {path}: every head needs counts, none below 0")
    return tuple(Profile(_most_counted(counts, keep), unit_tokens) for counts in heads)


def _most_counted(counts: list[int], keep: float) -> tuple[int, ...]:
    kept, covered = [0], counts[0]
    for distance in sorted(range(1, len(counts)), key=lambda d: (-counts[d], d)):
        if covered >= keep * sum(counts) or counts[distance] == 0:
            break
        kept.append(distance)
        covered += counts[distance]
    return tuple(sorted(kept))
