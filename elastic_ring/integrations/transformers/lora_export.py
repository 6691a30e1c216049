"""Trained adapters as peft loads them, or merged into their base, by peft's own code."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from elastic_ring.files import few
from elastic_ring.integrations.transformers.checks import config_of
from elastic_ring.integrations.transformers.conversions import stored_names
from elastic_ring.integrations.transformers.lora import ADAPTER, BaseWeights, Lora, base_name, check_peft, empty
from elastic_ring.integrations.transformers.module import build
from elastic_ring.integrations.transformers.weights import FolderWeights

NUM_NAMED = 3
ADAPTERS = "adapter_model.safetensors"
"""The file of peft."""


class Weights(Protocol):
    """A model's weights by name, as `StoredWeights`."""

    @property
    def places(self) -> Mapping[str, Any]: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class TrainedAdapters:
    """What a run's record says of its adapters: of which rank and where, above which base."""

    lora: Lora
    config: dict[str, Any]
    folder: str
    digest: str

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> TrainedAdapters | None:
        """None for a run without adapters. Raises KeyError, TypeError or ValueError for a file that no run writes."""
        if "lora" not in record:
            return None
        asked = record["lora"]
        lora = Lora(int(asked["r"]), float(asked["alpha"]), tuple(map(str, asked["target"])))
        return cls(lora, dict(record["config"]), str(record["folder"]), str(record["weights"]))

    def model(self) -> Any:
        """With adapters, on the meta device. Raises ValueError without peft."""
        check_peft()
        return empty(self.config, self.lora)


def check_config_of_base(trained: TrainedAdapters, wanted: Mapping[str, Any]) -> None:
    """Raises ValueError where the model that was trained needs another config than its base has: a folder of peft has
    none."""
    own, needed = ({**config, "architectures": None} for config in (trained.config, wanted))
    if needed != own:
        raise ValueError(
            "the run trained with other windows than its base has, and a folder of adapters has no config to say so: "
            "give --merge (merge=True), or --allow-dense (allow_dense=True) to export the adapters all the same"
        )


def write_adapters(weights: Weights, trained: TrainedAdapters, out: Path, dtype: torch.dtype) -> tuple[int, int]:
    """Write the folder that `peft.PeftModel.from_pretrained` loads; returns (tensors, bytes).

    Raises ValueError where the run's weights are not those of its adapters.
    """
    check_peft()
    from peft import get_peft_model

    _check_names(weights, trained.model())
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that will go
        base = build(config_of(dict(trained.config)))
        base.name_or_path = trained.folder
        model = get_peft_model(base, trained.lora.config())
    # peft's own model has the model below two parts of its name.
    held = {f"base_model.model.{name}": weights.tensor(name).to(dtype) for name in weights.places}
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(out), state_dict=held, save_embedding_layers=False)
    return len(held), sum(tensor.numel() * tensor.element_size() for tensor in held.values())


def _check_names(weights: Weights, model: Any) -> None:
    wanted = {name: tuple(param.shape) for name, param in model.named_parameters() if param.requires_grad}
    if wanted != dict(weights.shapes):
        odd = sorted({name for name, _ in set(wanted.items()) ^ set(weights.shapes.items())})
        raise ValueError(
            f"the run's adapters are not those that this version of peft makes: {few(odd, NUM_NAMED)} differ; export "
            "with the version that they were trained with"
        )


@dataclass(frozen=True)
class MergedWeights:
    """The base with a run's adapters in it, by the names of the model without adapters; one tensor at a time."""

    adapters: Weights
    base: FolderWeights
    model: Any
    """With adapters, on the meta device."""

    @classmethod
    def open(cls, adapters: Weights, trained: TrainedAdapters) -> MergedWeights:
        """Raises ValueError where the base is missing or another one, or the adapters are not those of the run."""
        model = trained.model()
        _check_names(adapters, model)
        with torch.device("meta"):
            plain = build(config_of(dict(trained.config)))
        BaseWeights(FolderWeights(trained.folder, {}, trained.digest, {}, {})).check()
        found = FolderWeights.open(Path(trained.folder))
        assert found is not None
        return cls(adapters, found.fitted(plain, stored_names(plain, found.files)), model)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            base_name(name): tuple(param.shape)
            for name, param in self.model.named_parameters()
            if not param.requires_grad
        }

    @property
    def places(self) -> Mapping[str, Any]:
        return self.shapes

    def tensor(self, name: str) -> Tensor:
        value = self.base.tensor(name, self.shapes[name])
        of_layer, _, leaf = name.rpartition(".")
        layer = self.model.get_submodule(of_layer)
        if leaf != "weight" or not hasattr(layer, "get_delta_weight"):
            return value
        for part in ("lora_A", "lora_B"):
            own = getattr(layer, part)[ADAPTER]
            own.weight = nn.Parameter(self.adapters.tensor(f"{of_layer}.{part}.{ADAPTER}.weight"))
        with torch.no_grad():
            merged: Tensor = value + layer.get_delta_weight(ADAPTER)
        for part in ("lora_A", "lora_B"):
            own = getattr(layer, part)[ADAPTER]
            own.weight = nn.Parameter(own.weight.to("meta"))
        return merged
