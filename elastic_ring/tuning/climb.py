"""The lengths of a search's fidelities. No torch and no Ray here: a command reads its defaults for its help."""

from __future__ import annotations

from dataclasses import dataclass

NUM_LAYERS = 2
"""Layers of the models that a search trains."""


@dataclass(frozen=True)
class Climb:
    """Lengths of the fidelities and limits of fidelity 0.

    `least_reach`: the least share of causal block pairs between which information must be able to flow within the
    model's depth; `most_bytes` and `most_density` are relative to dense.
    """

    short_steps: int = 30
    long_steps: int = 90
    seq_len: int = 512
    cost_len: int = 4096
    cp: int = 8
    seed: int = 0
    num_sequences: int = 1024
    batch: int = 2
    least_reach: float = 0.5
    most_density: float = 0.9
    most_bytes: float = 1.0
