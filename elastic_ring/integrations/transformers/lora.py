"""Low-rank adapters through `peft`: which, on which layers, their first values, the frozen base below them, and trained
ones as peft loads them or merged into their base.

`peft` adapts the layers, initialises and merges them; only this file imports it, and only where a run has adapters.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from elastic_ring.files import few
from elastic_ring.integrations.transformers.checks import config_of
from elastic_ring.integrations.transformers.dropout import install_masks
from elastic_ring.integrations.transformers.layers import expert_modules
from elastic_ring.integrations.transformers.module import build
from elastic_ring.integrations.transformers.text_part import TextPart, fitted_weights, read_config
from elastic_ring.integrations.transformers.weights import FolderWeights
from elastic_ring.model.init import seed_of
from elastic_ring.validation import option_text

ALL = "all-linear"
ADAPTER = "default"
"""The name under which peft keeps the only adapter."""
SMALLEST, LARGEST_RANK = 1, 4096
FORM = "r=16,alpha=32,target=q_proj+v_proj"
ALIASES = {"lora_alpha": "alpha", "target_modules": "target"}
"""Options by peft's name, where a field of `Lora` has another."""
ABOUT = {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"}
"""Fields of peft's config that change no adapter of a causal language model."""
NUM_NAMED = 12
NUM_DIFFERENT = 3
ADAPTERS = "adapter_model.safetensors"
"""The file of peft."""
MAGNITUDE, SAVED = ".lora_magnitude_vector.", f".modules_to_save.{ADAPTER}."
"""In names of parameters: of DoRA's magnitudes, and of modules that are trained whole."""
_BELOW_ADAPTERS = re.compile(rf"(\.base_layer|\.original_module|\.modules_to_save\.{ADAPTER})(?=\.|$)")


@dataclass(frozen=True)
class Lora:
    """Adapters of rank `r` on the layers `target`, by the end of their names; their sum is multiplied by `alpha` / `r`,
    or with `use_rslora` by `alpha` / sqrt(r) (arXiv:2312.03732). ("all-linear",) is every linear layer below the head.

    `use_dora`: a trained magnitude for each row of the adapted weights (arXiv:2402.09353). `modules_to_save` are
    trained whole. `target_parameters`: of experts, each of which has adapters of its own.
    """

    r: int
    alpha: float
    target: tuple[str, ...] = (ALL,)
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()
    lora_dropout: float = 0.0

    def __post_init__(self) -> None:
        if not SMALLEST <= self.r <= LARGEST_RANK:
            raise ValueError(f"lora r={self.r}: must be between {SMALLEST} and {LARGEST_RANK}")
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"lora alpha={self.alpha}: must be a finite number above 0")
        if not (self.target or self.target_parameters) or (ALL in self.target and len(self.target) > 1):
            raise ValueError(f"lora target={'+'.join(self.target)!r}: must be {ALL}, or names such as q_proj+v_proj")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout={self.lora_dropout}: must be at least 0 and below 1")
        if (self.use_dora or self.lora_dropout) and self.target_parameters:
            raise ValueError("lora: peft has neither use_dora nor lora_dropout of target_parameters; leave one out")

    @classmethod
    def of(cls, options: Any, model_type: str = "") -> Lora:
        """Read the form `r=16,alpha=32,target=q_proj+v_proj,use_dora=true`, a mapping of options, or peft's LoraConfig
        for a model of this type. `alpha` is 2 r and `target` all-linear if left out. Raises ValueError for others."""
        if isinstance(options, Lora):
            return options
        if isinstance(options, str):
            pairs = [tuple(word.strip() for word in part.partition("=")[::2]) for part in options.split(",")]
        else:
            pairs = [*(options if isinstance(options, Mapping) else _options_of_peft(options, model_type)).items()]
        values = dict[str, Any]()
        for key, value in pairs:
            name = ALIASES.get(key, key)
            if name not in (own := cls.__dataclass_fields__) or name in values:
                raise ValueError(
                    f"lora: '{key}={value}' is none of {', '.join(own)}, each at most once; give {FORM}. Other options "
                    "of peft are not for rings"
                )
            values[name] = _value(name, value, str(own[name].type))
        if "r" not in values:
            raise ValueError(f"lora={options!r}: has no r, the adapters' rank; give {FORM}")
        usual_target = () if "target_parameters" in values else (ALL,)
        return cls(**{"alpha": 2.0 * values["r"], "target": usual_target, **values})

    def __str__(self) -> str:
        values = {name: value for name, value in vars(self).items() if value or name == "target"}
        return option_text({**values, "alpha": f"{self.alpha:g}"})

    def config(self) -> Any:
        """The same as peft's config."""
        from peft import LoraConfig

        alpha: Any = int(self.alpha) if self.alpha == int(self.alpha) else self.alpha  # peft's own type is int
        return LoraConfig(
            r=self.r,
            lora_alpha=alpha,
            target_modules=ALL if self.target == (ALL,) else list(self.target),
            use_rslora=self.use_rslora,
            use_dora=self.use_dora,
            modules_to_save=list(self.modules_to_save) or None,
            target_parameters=list(self.target_parameters) or None,
            lora_dropout=self.lora_dropout,
            task_type="CAUSAL_LM",
        )


def _value(name: str, value: Any, kind: str) -> Any:
    """An option's value from a text, a settings file or peft."""
    if kind == "tuple[str, ...]":
        return tuple(part.strip() for part in value.split("+") if part.strip()) if isinstance(value, str) else (*value,)
    reads: dict[str, Any] = {"int": int, "float": float, "bool": {"true": True, "false": False}.__getitem__}
    try:
        return reads[kind](str(value).lower())
    except (ValueError, KeyError) as error:
        raise ValueError(f"lora {name}={value}: is no {kind}; give {FORM}") from error


def _options_of_peft(config: Any, model_type: str) -> dict[str, object]:
    """What a LoraConfig says that is not peft's default, and its rank, alpha and layers."""
    check_peft()
    from peft import LoraConfig
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    if type(config) is not LoraConfig or config.task_type not in (None, "CAUSAL_LM"):
        raise ValueError(f"lora is a {type(config).__name__}: give a LoraConfig for CAUSAL_LM, or {FORM}")
    own, usual = vars(config), vars(LoraConfig())
    target = config.target_modules
    if target is None:
        target = () if config.target_parameters else USUAL.get(model_type)
    if target is None or (isinstance(target, str) and target != ALL):
        raise ValueError(
            f"lora: LoraConfig(target_modules={config.target_modules!r}) names no layers of a {model_type}: give their "
            f"names in a list, or {ALL!r}"
        )
    changed = {name: value for name, value in own.items() if name not in ABOUT and value != usual.get(name)}
    layers = target if isinstance(target, str) else sorted(target)
    return {**changed, "r": config.r, "lora_alpha": config.lora_alpha, "target_modules": layers}


def check_peft() -> None:
    """Raises ValueError without the library."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ValueError("lora= needs peft: pip install '.[lora]', on every node") from error


def check_lora(lora: Lora, model: Any, *, has_base: bool) -> None:
    """Raises ValueError for adapters without a base, for layers and parameters that the model does not have, tables of
    the vocabulary among the adapted layers, and modules to save that are none or adapted too."""
    check_peft()
    if not has_base:
        raise ValueError(f"lora={lora}: the base is frozen, so it must have weights; give a model folder")
    kind, tables = type(model).__name__, [model.get_input_embeddings(), model.get_output_embeddings()]
    modules = dict(model.named_modules())
    linear = {
        name: module for name, module in modules.items() if isinstance(module, nn.Linear) and module not in tables
    }
    usual = few(sorted({name.rpartition(".")[2] for name in linear}), NUM_NAMED)
    adapted = set(linear if lora.target == (ALL,) else ())
    for target in lora.target if lora.target != (ALL,) else ():
        if any(_ends_with(name, target) for name, module in modules.items() if module in tables):
            raise ValueError(
                f"lora target={target!r}: is a table of the vocabulary, which has no adapters; give some of {usual}, "
                "and a table in modules_to_save"
            )
        own = {name for name in linear if _ends_with(name, target)}
        if not own:
            raise ValueError(
                f"lora target={target!r}: no linear layer of a {kind} has this name; give {ALL}, or some of {usual}"
            )
        adapted |= own
    for saved in lora.modules_to_save:
        matches = [name for name in modules if name.endswith(saved)]  # as peft finds them
        leaves = [name for name in matches if [*modules[name].parameters()] and not [*modules[name].children()]]
        if not matches or leaves != matches or adapted & {*matches}:
            raise ValueError(
                f"lora modules_to_save={saved!r}: must be the end of names of modules with weights of their own and "
                f"without adapters, such as embed_tokens or lm_head; of a {kind} it is of {few(matches, 3) or 'none'}"
            )
    experts = {f"{owner}.{name}" for owner, module in expert_modules(model) for name, _ in module.named_parameters()}
    for parameter in lora.target_parameters:
        own = {name for name, _ in model.named_parameters() if _ends_with(name, parameter)}
        if not own or not own <= experts:
            names = few(sorted({name.rpartition(".")[2] for name in experts}), NUM_NAMED) or "none"
            raise ValueError(
                f"lora target_parameters={parameter!r}: must be the end of names of experts' parameters, of a {kind} "
                f"{names}; adapters of layers are given by target_modules"
            )


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def adapt(model: nn.Module, lora: Lora) -> None:
    """Put adapters into the layers and freeze all else. Parameters of adapted layers get names with `base_layer`.

    Raises ValueError where peft would adapt other parameters than `lora` says, as by names that a family's experts had
    in earlier versions of transformers.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora.layer import ParamWrapper
    from peft.utils import ModulesToSaveWrapper

    config, uses = lora.config(), Counter(map(id, (p for _, p in model.named_parameters(remove_duplicate=False))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied tables one is trained; other targets are refused below
        inject_adapter_in_model(config, model, ADAPTER)
    if odd := {*(config.target_parameters or ())} - {*lora.target_parameters}:
        raise ValueError(
            f"lora target={'+'.join(lora.target)!r}: peft takes it for {few(sorted(odd), 3)} of a "
            f"{type(model).__name__}, among which are its routers or experts of another rank; give layers of its "
            "attention as target, and its experts by target_parameters=gate_up_proj+down_proj"
        )
    if lora.lora_dropout:
        install_masks(model)
    for module in list(model.modules()):
        if isinstance(module, ModulesToSaveWrapper):
            own = module.original_module
            if all(uses[id(param)] == 1 for param in own.parameters()):  # a tied one is still read elsewhere
                module.original_module = nn.Module()
        elif isinstance(module, ParamWrapper):  # whose own forward replaces the parameter, which FSDP2 holds
            experts = module.get_base_layer()
            experts.adapters = {**experts.adapters, module.parameter_name: partial(add_adapter, module)}
            module.forward = module.base_layer.__call__


def add_adapter(wrapper: Any, weight: Tensor, first: int = 0) -> Tensor:
    """The weights of experts from `first` on, (experts, rows, columns), and their adapters of peft's `ParamWrapper`."""
    left, right, scaling = wrapper.get_delta_factors(ADAPTER)
    left, right = (part[first : first + len(weight)].to(weight.dtype) for part in (left, right))
    return torch.baddbmm(weight, left, right, alpha=scaling)


def base_name(name: str) -> str:
    """The name that a parameter has without adapters."""
    return _BELOW_ADAPTERS.sub("", name)


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
    """First values of adapters by peft's own rules: a function of the run's seed and a parameter's name and shape, and
    of the base's weights for DoRA's magnitudes and for modules that are trained whole."""

    config_json: str
    lora: Lora
    seed: int
    base: BaseWeights

    def tensor(self, name: str, shape: Sequence[int], rows: tuple[int, int] | None = None) -> Tensor:
        if SAVED in name:
            return self.base.tensor(name, shape, rows)
        if MAGNITUDE in name:
            below = f"{name.partition(MAGNITUDE)[0]}.base_layer.weight"
            weight = self.base.tensor(below, self._empty.get_parameter(below).shape, rows)
            return torch.linalg.norm(weight, dim=1)
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
        return {name: value for name, value in vars(self).items() if name != "_empty"}  # without the module

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
        lora, outer_type = Lora.of(dict(record["lora"])), str(record.get("outer_type", ""))
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
        warnings.simplefilter("ignore")  # as in `adapt`; peft asks transformers by a name that will go
        base = build(config_of(dict(trained.config)))
        base.name_or_path = base_name
        model = get_peft_model(base, trained.lora.config())
    # peft's own model has the model below two parts of its name.
    held = {f"base_model.model.{name}": weights.tensor(name).to(dtype) for name in weights.shapes}
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
        if any(".original_module." in name for name, _ in model.named_parameters(remove_duplicate=False)):
            raise ValueError(
                f"merge=True: of tied tables the run trained one ({'+'.join(trained.lora.modules_to_save)}), and a "
                "merged model has one for both; export the adapters alone"
            )
        BaseWeights(FolderWeights(trained.folder, trained.digest)).check()
        folder = Path(trained.folder)
        base = fitted_weights(folder, plain, TextPart.of(read_config(folder)) if trained.outer_type else None)
        assert base is not None
        return cls(adapters, base, model)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        named = self.model.named_parameters()
        return {base_name(name): tuple(param.shape) for name, param in named if ".lora_" not in name}

    @cached_property
    def _adapted(self) -> dict[str, tuple[str, Any]]:
        """(name, layer of peft) of each adapted parameter, by the parameter's name."""
        layers = [(name, layer) for name, layer in self.model.named_modules() if hasattr(layer, "get_delta_weight")]
        return {
            base_name(f"{name}.{getattr(layer, 'parameter_name', 'weight')}"): (name, layer) for name, layer in layers
        }

    def tensor(self, name: str) -> Tensor:
        saved = "{}{}{}".format(*name.rpartition(".")[:1], SAVED, name.rpartition(".")[2])
        if saved in self.adapters.shapes:
            return self.adapters.tensor(saved)
        value = self.base.tensor(name, self.shapes[name])
        if name not in self._adapted:
            return value
        of_layer, layer = self._adapted[name]
        for part in ("lora_A", "lora_B"):
            own = getattr(layer, part)[ADAPTER]
            own.weight = nn.Parameter(self.adapters.tensor(f"{of_layer}.{part}.{ADAPTER}.weight"))
        with torch.no_grad():
            is_of_experts = hasattr(layer, "parameter_name")
            merged: Tensor = add_adapter(layer, value) if is_of_experts else value + layer.get_delta_weight(ADAPTER)
            if (magnitude := f"{of_layer}{MAGNITUDE}{ADAPTER}.weight") in self.adapters.shapes:
                merged *= (self.adapters.tensor(magnitude) / torch.linalg.norm(merged, dim=1))[:, None]
        for part in ("lora_A", "lora_B"):
            own = getattr(layer, part)[ADAPTER]
            own.weight = nn.Parameter(own.weight.to("meta"))
        return merged
