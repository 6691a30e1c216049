"""First values of a model without weights, by transformers' own rules."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from elastic_ring.integrations.transformers.checks import config_of
from elastic_ring.integrations.transformers.experts import expert_modules
from elastic_ring.integrations.transformers.module import build
from elastic_ring.model.init import Initialiser


@dataclass(frozen=True)
class FirstValues:
    """First values by transformers' own rules: a function of the run's seed and a parameter's name and shape.

    Experts are drawn one by one. Of another parameter a rank that holds some rows draws the whole; never more than one
    exists.
    """

    config_json: str
    seed: int

    def tensor(self, name: str, shape: Sequence[int], rows: tuple[int, int] | None = None) -> Tensor:
        if name in self._of_experts:
            one = (1, *shape[1:])
            return torch.cat([self._drawn(name, one, expert) for expert in range(*(rows or (0, shape[0])))])
        drawn = self._drawn(name, tuple(shape))
        return drawn if rows is None else drawn[rows[0] : rows[1]].clone()

    @cached_property
    def _of_experts(self) -> frozenset[str]:
        return frozenset(
            f"{owner}.{name}" for owner, module in expert_modules(self._empty) for name, _ in module.named_parameters()
        )

    @cached_property
    def _empty(self) -> Any:
        with torch.device("meta"):
            return build(config_of(json.loads(self.config_json)))

    def _drawn(self, name: str, shape: tuple[int, ...], expert: int | None = None) -> Tensor:
        owner_name, _, leaf = name.rpartition(".")
        owner = self._empty.get_submodule(owner_name)
        kept, on_meta = dict(owner._parameters), owner._parameters[leaf]
        assert on_meta is not None
        which = "" if expert is None else f" {expert}"
        digest = hashlib.sha256(f"{self.seed} {name} {shape}{which}".encode()).digest()
        owner._parameters[leaf] = nn.Parameter(torch.full(shape, torch.nan, device="cpu"))
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
                self._empty._init_weights(owner)
            value: Tensor = owner._parameters[leaf].detach()
        finally:
            owner._parameters.update(kept)
        if torch.isnan(value).any():  # transformers has no rule for it, and leaves it to the constructor
            seed = self.seed if expert is None else int.from_bytes(digest[:7], "little")
            return Initialiser(seed, int(self._empty.config.num_hidden_layers)).tensor(name, shape)
        return value

    def __getstate__(self) -> dict[str, Any]:
        return {"config_json": self.config_json, "seed": self.seed}  # without the module

    def __repr__(self) -> str:
        return f"FirstValues({hashlib.sha256(self.config_json.encode()).hexdigest()[:16]}, {self.seed})"
