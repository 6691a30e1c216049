"""The fidelities at which a pattern is evaluated, from cheap to expensive. No Ray in here.

0 plan: density, reach over the model's depth, bytes and balance of a ring in each layout; rejects hopeless patterns. 1
kernel: CPU time of an attention call relative to dense. Both are cheap enough for the whole space. 2 short and 3
longer training: the gap to dense on the trailing tokens after the same steps from the same seed. A further proxy at
fidelity 0 is the attention mass that a trained dense model would keep.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.files import plain_json, read_small
from elastic_ring.tuning.climb import NUM_LAYERS, Climb
from elastic_ring.tuning.quality.attention_error import fidelity
from elastic_ring.tuning.quality.cost import placed, step_ratio
from elastic_ring.tuning.quality.families import Family
from elastic_ring.tuning.quality.text import Corpus, corpus
from elastic_ring.tuning.quality.train import Settings, train_text
from elastic_ring.tuning.space import LAYOUTS, Candidate, candidates

NUM_HEADS = 4
REJECTED_GAP = 1.0
"""The gap, in nats, reported for a pattern that was not trained or diverged: worse than any trained one."""

Places = dict[str, tuple[float, float]]
"""Layout -> (step time, bytes), both relative to the dense zigzag ring."""


def settings_of(climb: Climb, steps: int) -> Settings:
    """What a model of `climb` trains with for `steps`."""
    return replace(Settings(), steps=steps, seq_len=climb.seq_len, block=climb.seq_len // 32, batch=climb.batch)


@lru_cache(maxsize=2)
def texts(climb: Climb) -> Corpus:
    return corpus(climb.seq_len, num_held=32, limit=climb.num_sequences)


def dense_family(climb: Climb) -> Family:
    return Family("dense", "dense", climb.seq_len // 32)


def planned(candidate: Candidate, climb: Climb, rules: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Fidelity 0: {"density", "reach", "bytes": by layout, "rejected": reason or ""}; `rules`: from `rule_costs`."""
    family = candidate.scaled(climb.cost_len)
    pattern = family.pattern()
    assert pattern is not None
    layers = [rules[rule] for rule in candidate.layers(climb.cost_len, NUM_LAYERS)]
    density = family.density(climb.cost_len, NUM_LAYERS, NUM_HEADS)
    reached = reach(pattern, climb.cost_len)
    num_bytes = {at: sum(layer["bytes"][at] for layer in layers) / NUM_LAYERS for at in LAYOUTS}
    fewest = min(num_bytes.values())
    limits = (
        ("density", density, density > climb.most_density, climb.most_density),
        ("reach", reached, reached < climb.least_reach, climb.least_reach),
        ("bytes", fewest, fewest > climb.most_bytes, climb.most_bytes),
    )
    why = [f"{name} {value:.3f} beyond {limit}" for name, value, beyond, limit in limits if beyond]
    return {"density": density, "reach": reached, "bytes": num_bytes, "rejected": "; ".join(why)}


def rule_costs(rule: str, unit: int, climb: Climb) -> dict[str, Any]:
    """{"bytes", "work": by layout} of one layer that follows `rule`, counted from its plan."""
    layouts = {name: make_layout(name, climb.cost_len, climb.cp) for name in LAYOUTS}
    costs = {name: placed(Family(rule, rule, unit), layout) for name, layout in layouts.items()}
    return {"bytes": {at: c[0] for at, c in costs.items()}, "work": {at: c[1] for at, c in costs.items()}}


def reach(pattern: LayerPatterns, seq_len: int) -> float:
    """The share of causal block pairs between which information can flow through all layers."""
    flows = torch.eye(-(-seq_len // pattern.block))
    for layer in range(NUM_LAYERS):
        rules = pattern.of_layer(layer).heads(NUM_HEADS, NUM_HEADS)
        kept = torch.from_numpy(SparsePattern(rules, pattern.block).kinds(seq_len) != 0).float()
        flows = (((kept + torch.eye(len(kept))) @ flows) > 0).float()
    num_blocks = len(flows)
    return float(flows.sum()) / (num_blocks * (num_blocks + 1) / 2)


def tail_loss(family: Family, climb: Climb, steps: int) -> tuple[float, float]:
    """Fidelities 2 and 3: (nats on the trailing tokens after `steps` steps, CPU seconds)."""
    _, value = train_text(family, climb.seed, settings_of(climb, steps), texts(climb))
    return value["tail_loss"], value["train_s"]


def proxies(climb: Climb, steps: int) -> dict[str, dict[str, float]]:
    """{point name: {"mass", "worst_head", "error"}} for all points, from a dense model trained for `steps` steps."""
    settings = settings_of(climb, steps)
    model, _ = train_text(dense_family(climb), climb.seed, settings, texts(climb))
    tokens = torch.from_numpy(texts(climb).held[:8, :-1]).to(settings.device)
    every = [candidate.scaled(climb.seq_len) for candidate in candidates()]
    return fidelity(model, tokens, every, settings)


def baseline(path: Path, climb: Climb) -> dict[str, Any]:
    """The measurements shared by all trials, cached in `path`.

    {"climb", "short", "long": losses of dense, "plans", "proxies": by point, "rules": cost of one layer by rule}.
    Rules that occur only in rejected points are not timed. Raises: ValueError for a file with other settings, and
    where dense itself diverges.
    """
    if path.exists():
        found: Any = plain_json(read_small(path))
        if not isinstance(found, dict) or found.get("climb") != asdict(climb):
            raise ValueError(f"{path} was measured with other settings; name another --out, or give the same")
        return found
    every = list(candidates())
    rules: dict[str, dict[str, Any]] = {}
    units = {rule: c.unit(climb.cost_len) for c in every for rule in c.layers(climb.cost_len, NUM_LAYERS)}
    for rule, unit in units.items():
        rules[rule] = rule_costs(rule, unit, climb)
    plans = {candidate.name: planned(candidate, climb, rules) for candidate in every}
    admitted = [candidate for candidate in every if not plans[candidate.name]["rejected"]]
    for rule in {rule: None for c in admitted for rule in c.layers(climb.cost_len, NUM_LAYERS)}:
        rules[rule]["ratio"] = step_ratio(Family(rule, rule, units[rule]), climb.cost_len) if rule != "dense" else 1.0
    found = {
        "climb": asdict(climb),
        "short": tail_loss(dense_family(climb), climb, climb.short_steps)[0],
        "long": tail_loss(dense_family(climb), climb, climb.long_steps)[0],
        "plans": plans,
        "rules": rules,
        "proxies": proxies(climb, climb.short_steps),
    }
    if not math.isfinite(found["short"] + found["long"]):
        raise ValueError("dense itself diverged in these steps, so no gap to it can be told; give other --long-steps")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def places(base: dict[str, Any], candidate: Candidate) -> Places:
    """Fidelity 1 of an admitted point: step time and bytes in each layout, from its layers' measured times.

    In the step time every layer waits for its busiest rank.
    """
    layers = [base["rules"][rule] for rule in candidate.layers(base["climb"]["cost_len"], NUM_LAYERS)]
    found: Places = {}
    for at in LAYOUTS:
        step = sum(layer["ratio"] * layer["work"][at] for layer in layers) / NUM_LAYERS
        found[at] = (step, base["plans"][candidate.name]["bytes"][at])
    return found


def handiest(found: Places) -> str:
    """The layout with the fewest bytes among those within 5 % of the least step time."""
    least = min(step for step, _ in found.values())
    return min((at for at in found if found[at][0] <= 1.05 * least), key=lambda at: (found[at][1], at))
