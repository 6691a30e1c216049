"""The frozen part of a model: parameters whose values no step changes.

They are no state: shards, gradients, checkpoints, heals and copies have those that are trained, and a member reads its
own rows of the others when it joins the mesh. They stay in memory between generations. No communication in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from elastic_ring.train.task import FrozenValues
from elastic_ring.train.wrap import ModuleMaker, full_shapes, local_params

T = TypeVar("T")


def trained(model: nn.Module, found: Mapping[str, T]) -> dict[str, T]:
    """The entries of the parameters that are not frozen, in the module's order."""
    return {name: found[name] for name, param in model.named_parameters() if param.requires_grad}


def trained_params(model: nn.Module, frozen: FrozenValues | None) -> dict[str, Tensor]:
    """This rank's rows of the parameters that are state: all of them where no values are `frozen`."""
    params = local_params(model)
    return params if frozen is None else trained(model, params)


def trained_shapes(model: nn.Module, frozen: FrozenValues | None) -> dict[str, tuple[int, ...]]:
    """The unsharded shape of every parameter that is state."""
    shapes = full_shapes(model)
    return shapes if frozen is None else trained(model, shapes)


class FrozenRows:
    """A rank's rows of the frozen parameters."""

    def __init__(self) -> None:
        self._rows: dict[str, Tensor] = {}
        self._place: tuple[int, int] | None = None  # (cp_rank, cp) whose rows they are

    def fill(self, maker: ModuleMaker, model: nn.Module, values: FrozenValues, place: tuple[int, int]) -> None:
        """Give the frozen parameters of a wrapped module the values that they have at `place`, (cp_rank, cp): those of
        the last generation, or, where that had another place or none, read anew. Raises ValueError."""
        params = local_params(model)
        rows = {name: params[name] for name, param in model.named_parameters() if not param.requires_grad}
        with torch.no_grad():
            if place == self._place:
                for name, row in rows.items():
                    row.copy_(self._rows[name])
            else:
                self.drop()
                values.check()
                maker.read(model, values, rows, *place)
        self._rows, self._place = rows, place

    def drop(self) -> None:
        self._rows, self._place = {}, None
