"""The rungs that a pattern climbs, from cheap to honest, and what each of them says. No Ray in here.

0 plan: density, reach over the model's depth, bytes on a ring; hopeless ones are rejected. 1 kernel: CPU seconds
of one attention call. Both are so cheap that the whole space climbs them before anything is trained. 2 short
training and 3 longer training: the gap to dense on the trailing tokens after the same steps from the same seed.
The proxy beside rung 0 is the attention mass that a trained dense model would keep.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from elastic_ring.attention.layers import LayerPatterns
from elastic_ring.attention.machine import Machine
from elastic_ring.attention.sparse import SparsePattern
from tune.quality.cost import ring_costs, step_s
from tune.quality.families import Family
from tune.quality.fidelity import fidelity
from tune.quality.text import Corpus, corpus
from tune.quality.train import Settings, train_text
from tune.space import Candidate, candidates

NUM_LAYERS, NUM_HEADS = 2, 4
REJECTED_GAP = 1.0
"""The gap, in nats, told for a pattern that was not trained: worse than any trained one."""


@dataclass(frozen=True)
class Climb:
    """How far and how long. `least_reach` is the share of causal block pairs between which information must be
    able to flow in the model's depth; `most_bytes` and `most_density` are shares of dense. `machine` are the figures
    that rung 0 plans with, as JSON so that a search knows its own again; left empty, those of an H200."""

    short_steps: int = 30
    long_steps: int = 90
    seq_len: int = 512
    cost_len: int = 2048
    cp: int = 8
    seed: int = 0
    num_sequences: int = 1024
    batch: int = 4
    least_reach: float = 0.5
    most_density: float = 0.9
    most_bytes: float = 1.0
    machine: str = ""

    @property
    def figures(self) -> Machine:
        return Machine.of(json.loads(self.machine)) if self.machine else Machine()

    def settings(self, steps: int) -> Settings:
        return replace(Settings(), steps=steps, seq_len=self.seq_len, block=self.seq_len // 32, batch=self.batch)


@lru_cache(maxsize=2)
def texts(climb: Climb) -> Corpus:
    return corpus(climb.seq_len, num_held=32, limit=climb.num_sequences)


def dense_family(climb: Climb) -> Family:
    return Family("dense", "dense", climb.seq_len // 32)


def planned(candidate: Candidate, climb: Climb) -> dict[str, Any]:
    """Rung 0: {"density", "reach", "bytes", "ring_s", "rejected": why or ""}. `ring_s` is a ring's forward time by the
    machine's figures over dense's."""
    family = candidate.scaled(climb.cost_len)
    density = family.density(climb.cost_len, NUM_LAYERS, NUM_HEADS)
    pattern = family.pattern()
    assert pattern is not None
    num_bytes, ring_s = ring_costs(family, climb.cost_len, climb.cp, NUM_LAYERS, machine=climb.figures)
    found = {"density": density, "reach": reach(pattern, climb.cost_len), "bytes": num_bytes, "ring_s": ring_s}
    limits = (
        ("density", density > climb.most_density, climb.most_density),
        ("reach", found["reach"] < climb.least_reach, climb.least_reach),
        ("bytes", found["bytes"] > climb.most_bytes, climb.most_bytes),
    )
    why = [f"{name} {found[name]:.3f} beyond {limit}" for name, beyond, limit in limits if beyond]
    return {**found, "rejected": "; ".join(why)}


def reach(pattern: LayerPatterns, seq_len: int) -> float:
    """After all layers, the share of causal block pairs between which information can have flowed."""
    flows = torch.eye(-(-seq_len // pattern.block))
    for layer in range(NUM_LAYERS):
        rules = pattern.of_layer(layer).heads(NUM_HEADS, NUM_HEADS)
        kept = torch.from_numpy(SparsePattern(rules, pattern.block).kinds(seq_len) != 0).float()
        flows = (((kept + torch.eye(len(kept))) @ flows) > 0).float()
    num_blocks = len(flows)
    return float(flows.sum()) / (num_blocks * (num_blocks + 1) / 2)


def kernel_s(family: Family, climb: Climb) -> float:
    """Rung 1: CPU seconds of one attention call, both passes, the mean over layers."""
    return step_s(family, climb.cost_len, NUM_LAYERS, head_dim=32)


def tail_loss(family: Family, climb: Climb, steps: int) -> tuple[float, float]:
    """Rungs 2 and 3: (nats on the trailing tokens after `steps` steps, CPU seconds)."""
    _, value = train_text(family, climb.seed, climb.settings(steps), texts(climb))
    return value["tail_loss"], value["train_s"]


def proxies(climb: Climb, steps: int) -> dict[str, dict[str, float]]:
    """By name of every point: {"mass", "worst_head", "error"} under one dense model of `steps` steps."""
    settings = climb.settings(steps)
    model, _ = train_text(dense_family(climb), climb.seed, settings, texts(climb))
    tokens = torch.from_numpy(texts(climb).held[:8, :-1]).to(settings.device)
    every = [candidate.scaled(climb.seq_len) for candidate in candidates()]
    return fidelity(model, tokens, every, settings)


def baseline(path: Path, climb: Climb) -> dict[str, Any]:
    """What is measured once and kept in `path`: dense's losses, and of every point the plan, the proxies and, unless
    the plan rejects it, the time of its kernel over dense's.

    Raises `ValueError` for a file that was made with other settings.
    """
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if Climb(**found["climb"]) != climb:
            raise ValueError(f"{path} was measured with other settings; name another --out, or give the same")
        return found
    dense = dense_family(climb)
    plans = {candidate.name: planned(candidate, climb) for candidate in candidates()}
    dense_s = kernel_s(Family("dense", "dense", climb.cost_len // 32), climb)
    timed = [candidate for candidate in candidates() if not plans[candidate.name]["rejected"]]
    found = {
        "climb": asdict(climb),
        "short": tail_loss(dense, climb, climb.short_steps)[0],
        "long": tail_loss(dense, climb, climb.long_steps)[0],
        "step_s": dense_s,
        "plans": plans,
        "kernels": {c.name: kernel_s(c.scaled(climb.cost_len), climb) / dense_s for c in timed},
        "proxies": proxies(climb, climb.short_steps),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found
