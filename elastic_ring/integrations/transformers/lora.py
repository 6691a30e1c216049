"""Low-rank adapters through `peft`: which, on which layers, their first values, the frozen base below them, and trained
ones as peft loads them or merged into their base.

`peft` adapts the layers, initialises and merges them; only this file imports it, and only where a run has adapters.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from elastic_ring.files import few
from elastic_ring.integrations.transformers.checks import config_of
from elastic_ring.integrations.transformers.module import build
from elastic_ring.integrations.transformers.text_part import TextPart, fitted_weights, read_config
from elastic_ring.integrations.transformers.weights import FolderWeights
from elastic_ring.model.init import seed_of

ALL = "all-linear"
ADAPTER = "default"
"""The name under which peft keeps the only adapter."""
SMALLEST, LARGEST_RANK = 1, 4096
FORM = "r=16,alpha=32,target=q_proj+v_proj"
NUM_NAMED = 12
NUM_DIFFERENT = 3
ADAPTERS = "adapter_model.safetensors"
"""The file of peft."""


@dataclass(frozen=True)
class Lora:
    """Adapters of rank `r` on the layers `target`, by the last part of their names; their sum is multiplied by
    `alpha` / `r`. ("all-linear",) is every linear layer below the head."""

    r: int
    alpha: float
    target: tuple[str, ...] = (ALL,)

    def __post_init__(self) -> None:
        if not SMALLEST <= self.r <= LARGEST_RANK:
            raise ValueError(f"lora r={self.r}: must be between {SMALLEST} and {LARGEST_RANK}")
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"lora alpha={self.alpha}: must be a finite number above 0")
        if not self.target or (ALL in self.target and len(self.target) > 1):
            raise ValueError(f"lora target={'+'.join(self.target)!r}: must be {ALL}, or names such as q_proj+v_proj")

    @classmethod
    def parse(cls, text: str) -> Lora:
        """Read the form `r=16,alpha=32,target=q_proj+v_proj`. `alpha` is 2 r and `target` all-linear if left out."""
        options: dict[str, str] = {}
        for part in text.split(","):
            key, equals, value = (word.strip() for word in part.partition("="))
            if not equals or key not in ("r", "alpha", "target") or key in options:
                raise ValueError(
                    f"lora={text!r}: {part.strip()!r} is none of r, alpha and target, each at most once; give {FORM}. "
                    "Other options of peft, dropout among them, are not for rings"
                )
            options[key] = value
        if "r" not in options:
            raise ValueError(f"lora={text!r}: has no r, the adapters' rank; give {FORM}")
        try:
            rank = int(options["r"])
            alpha = float(options.get("alpha", 2 * rank))
        except ValueError as error:
            raise ValueError(f"lora={text!r}: r must be a whole number and alpha a number; give {FORM}") from error
        return cls(rank, alpha, tuple(name.strip() for name in options.get("target", ALL).split("+")))

    def __str__(self) -> str:
        return f"r={self.r},alpha={self.alpha:g},target={'+'.join(self.target)}"

    def config(self) -> Any:
        """The same as peft's config."""
        from peft import LoraConfig

        alpha: Any = int(self.alpha) if self.alpha == int(self.alpha) else self.alpha  # peft's own type is int
        target = ALL if self.target == (ALL,) else list(self.target)
        return LoraConfig(r=self.r, lora_alpha=alpha, target_modules=target, task_type="CAUSAL_LM")


def check_peft() -> None:
    """Raises ValueError without the library."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ValueError("lora= needs peft: pip install '.[lora]', on every node") from error


def check_lora(lora: Lora, model: Any, *, has_base: bool, has_experts: bool) -> None:
    """Raises ValueError for adapters without a base, on a model with experts, and for names that no layer has or that
    are of tables of the vocabulary."""
    check_peft()
    if not has_base:
        raise ValueError(f"lora={lora}: the base is frozen, so it must have weights; give a model folder")
    if has_experts:
        raise ValueError(f"lora={lora}: adapters do not reach the experts of a {type(model).__name__}; train it whole")
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    modules = [(name.rpartition(".")[2], module) for name, module in model.named_modules()]
    linear = sorted({name for name, module in modules if isinstance(module, nn.Linear) and module not in tables})
    for target in lora.target if lora.target != (ALL,) else ():
        if any(name == target for name, module in modules if module in tables):
            raise ValueError(
                f"lora target={target!r}: is a table of the vocabulary, which stays frozen; give some of "
                f"{few(linear, NUM_NAMED)}"
            )
        if target not in linear:
            raise ValueError(
                f"lora target={target!r}: no linear layer of a {type(model).__name__} has this name; give {ALL}, or "
                f"some of {few(linear, NUM_NAMED)}"
            )


def adapt(model: nn.Module, lora: Lora) -> None:
    """Put adapters into the layers and freeze all else. Parameters of adapted layers get names with `base_layer`."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(lora.config(), model, ADAPTER)


def base_name(name: str) -> str:
    """The name that a frozen parameter has without adapters."""
    return name.replace(".base_layer.", ".")


@dataclass(frozen=True)
class BaseWeights:
    """The frozen base in its folder, by the names of a model with adapters, as the trainer's `frozen`."""

    weights: FolderWeights

    def check(self) -> None:
        """Raises ValueError where the folder is missing, or has not the weights that the run began with."""
        there = FolderWeights.open(Path(self.weights.folder))
        digest = "none" if there is None else there.digest
        if digest != self.weights.digest:
            raise ValueError(
                f"model folder {self.weights.folder!r}: its weights are {digest}, and the adapters belong to "
                f"{self.weights.digest}: bring back the folder that the run began with; every worker must see it"
            )

    def tensor(self, name: str, shape: Sequence[int], rows: tuple[int, int] | None = None) -> Tensor:
        return self.weights.tensor(base_name(name), shape, rows)

    def __repr__(self) -> str:
        return f"BaseWeights({self.weights.digest})"


@dataclass(frozen=True)
class AdapterValues:
    """First values of adapters by peft's own rules: a function of the run's seed and a parameter's name and shape."""

    config_json: str
    lora: Lora
    seed: int

    def tensor(self, name: str, shape: Sequence[int], rows: tuple[int, int] | None = None) -> Tensor:
        of_layer, _, leaf = name.rpartition(".lora_")
        layer = self._empty.get_submodule(of_layer)
        owner = layer.get_submodule(f"lora_{leaf.rpartition('.')[0]}")
        on_meta, owner.weight = owner.weight, nn.Parameter(torch.full(tuple(shape), torch.nan, device="cpu"))
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(seed_of(f"{self.seed} {name} {tuple(shape)}"))
                layer.reset_lora_parameters(ADAPTER, True)
            drawn: Tensor = owner.weight.detach()
        finally:
            owner.weight = on_meta
        return drawn if rows is None else drawn[rows[0] : rows[1]].clone()

    @cached_property
    def _empty(self) -> Any:
        return empty(json.loads(self.config_json), self.lora)

    def __getstate__(self) -> dict[str, object]:
        return {"config_json": self.config_json, "lora": self.lora, "seed": self.seed}  # without the module

    def __repr__(self) -> str:
        return f"AdapterValues({hashlib.sha256(self.config_json.encode()).hexdigest()[:16]}, {self.lora}, {self.seed})"


def empty(plain: Mapping[str, object], lora: Lora) -> Any:
    """The model with adapters on the meta device."""
    with torch.device("meta"):
        model = build(config_of(dict(plain)))
        adapt(model, lora)
    return model


# ------------------------------------------------------------ trained adapters


class Weights(Protocol):
    """A model's weights by name, as `StoredWeights`."""

    @property
    def places(self) -> Mapping[str, Any]: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class TrainedAdapters:
    """A run's record of its adapters: their rank and layers, and the base below them."""

    lora: Lora
    config: Mapping[str, object]
    folder: str
    digest: str
    outer_type: str = ""

    @classmethod
    def of(cls, record: Any) -> TrainedAdapters | None:
        """None for a run without adapters. Raises KeyError, TypeError or ValueError for a file that no run writes."""
        if "lora" not in record:
            return None
        options = record["lora"]
        lora = Lora(int(options["r"]), float(options["alpha"]), tuple(map(str, options["target"])))
        outer_type = str(record.get("outer_type", ""))
        return cls(lora, dict(record["config"]), str(record["folder"]), str(record["weights"]), outer_type)


def write_adapters(
    weights: Weights, trained: TrainedAdapters, base_name: str, out: Path, dtype: torch.dtype
) -> tuple[int, int]:
    """Write the folder that `peft.PeftModel.from_pretrained` loads; returns (tensors, bytes). Its config has the base
    by `base_name`: only peft's `AutoPeftModel` loads it by that.

    Raises ValueError where the run's weights are not those of its adapters.
    """
    check_peft()
    from peft import get_peft_model

    _check_names(weights, empty(trained.config, trained.lora))
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that will go
        base = build(config_of(dict(trained.config)))
        base.name_or_path = base_name
        model = get_peft_model(base, trained.lora.config())
    # peft's own model has the model below two parts of its name.
    held = {f"base_model.model.{name}": weights.tensor(name).to(dtype) for name in weights.places}
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(out), state_dict=held, save_embedding_layers=False)
    return len(held), sum(tensor.numel() * tensor.element_size() for tensor in held.values())


def _check_names(weights: Weights, model: Any) -> None:
    adapters = {name: tuple(param.shape) for name, param in model.named_parameters() if param.requires_grad}
    if adapters != dict(weights.shapes):
        odd = sorted({name for name, _ in set(adapters.items()) ^ set(weights.shapes.items())})
        raise ValueError(
            f"the run's adapters are not those that this version of peft makes: {few(odd, NUM_DIFFERENT)} differ; "
            "export with the version that they were trained with"
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
        check_peft()
        model = empty(trained.config, trained.lora)
        _check_names(adapters, model)
        with torch.device("meta"):
            plain = build(config_of(dict(trained.config)))
        BaseWeights(FolderWeights(trained.folder, trained.digest)).check()
        folder = Path(trained.folder)
        base = fitted_weights(folder, plain, TextPart.of(read_config(folder)) if trained.outer_type else None)
        assert base is not None
        return cls(adapters, base, model)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        frozen = [(name, param) for name, param in self.model.named_parameters() if not param.requires_grad]
        return {base_name(name): tuple(param.shape) for name, param in frozen}

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
