"""`ring_model` and the factory that it makes: which config, which first values, which windows."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from elastic_ring.attention.patterns.families import BigBird
from elastic_ring.attention.patterns.layers import LayerGroup, LayerPatterns
from elastic_ring.attention.patterns.rules import Dense, Rule, Window
from elastic_ring.config import StepConfig
from elastic_ring.data.manifest import read_manifest
from elastic_ring.data.source import PreparedTokens
from elastic_ring.data.tokenizer import FAST, folder_digest
from elastic_ring.files import check_model_links, cut, few, shown_url
from elastic_ring.integrations.transformers.checks import (
    check_config,
    check_dropout,
    check_skipped_layers,
    check_step,
    check_tokenizer,
    config_of,
    num_positions,
    softcap_of,
    trace,
)
from elastic_ring.integrations.transformers.layers import (
    NO_EXPERTS,
    ExpertSizes,
    check_experts,
    expert_modules,
    expert_sizes,
    has_balancing_loss,
)
from elastic_ring.integrations.transformers.lora import (
    AdapterValues,
    BaseWeights,
    Lora,
    adapt,
    check_lora,
)
from elastic_ring.integrations.transformers.module import WHOLE_SLICE, build, checkpoint_layers, latent_of
from elastic_ring.integrations.transformers.reference import compared, layers_of_each_kind
from elastic_ring.integrations.transformers.text_part import TextPart, fitted_weights, read_config
from elastic_ring.integrations.transformers.weights import FolderWeights
from elastic_ring.model.config import (
    KNOWN_TYPES,
    ModelConfig,
    ModelSizes,
    active_parameters,
    model_flops,
    num_parameters,
)
from elastic_ring.model.init import Initialiser, seed_of
from elastic_ring.train.task import Initial, ModelParts

log = logging.getLogger(__name__)

BLOCK_TOKENS = 128
CONFIG_FILE = "huggingface.json"
WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size")
"""Names of the width of a feed-forward layer; where it has none it is four times that of the model."""
Windows = Literal["exact", "blocks", "dense"]
Positions = Literal["sequence", "document"]
Buffers = tuple[tuple[str, tuple[float, ...]], ...]
"""Values of buffers that a folder stores, by name."""


@dataclass(frozen=True)
class RingModel:
    """A picklable factory of one Hugging Face decoder, for `ElasticRingTrainer(model, ...)`; made by `ring_model`.

    Called, it builds the module in float32 with attention on rings. Parameters have their Hugging Face names.
    """

    config_json: str
    folder: str = ""
    weights: FolderWeights | None = None
    checkpoint_activations: bool = True
    loss_chunk_tokens: int = 1024
    windows: Windows = "exact"
    layer_windows: tuple[int | None, ...] = ()
    experts: ExpertSizes = NO_EXPERTS
    buffers: Buffers = ()
    lora: Lora | None = None
    num_parameters: int = 0
    """The module's parameters, without adapters."""
    num_adapter_parameters: int = 0
    latent: int = 0
    """Numbers of a token that hops carry in place of K and V."""
    num_compared_layers: int = 0
    """How many of its first layers are compared with transformers before a run."""
    positions: Positions = "sequence"
    """Where positions are counted from: "document" for families that see absolute positions."""
    num_positions: int = 0
    """Rows of its table of positions; 0 without one."""
    softcap: float = 0.0
    """Of the attention's scores; 0 without one."""
    outer_type: str = ""
    """The type of the multimodal model whose text model this is."""

    def __call__(self) -> nn.Module:
        model: nn.Module = build(self.config)
        for name, values in self.buffers:
            buffer = model.get_buffer(name)
            if not buffer.is_meta:
                buffer.copy_(torch.tensor(values, dtype=buffer.dtype).view(buffer.shape))
        if self.lora is not None:
            adapt(model, self.lora)
        model.loss_chunk_tokens = self.loss_chunk_tokens  # type: ignore[assignment]
        model.restarts_positions = self.positions == "document"  # type: ignore[assignment]
        checkpoint_layers(model, checkpoint_activations=self.checkpoint_activations)
        return model

    def __repr__(self) -> str:
        """Equal for equal models in every process: it goes into the run's digest."""
        options = f"checkpoint_activations={self.checkpoint_activations}, windows={self.windows!r}"
        options += "" if self.lora is None else f", lora={self.lora}"
        options += "" if self.positions == "sequence" else f", positions={self.positions!r}"
        digest = hashlib.sha256(self.config_json.encode()).hexdigest()[:16]
        return f"RingModel(config={digest}, weights={self.weights and self.weights.digest}, {options})"

    def ring_parts(self, step: StepConfig) -> ModelParts:
        """The trainer's defaults for this model: first values, pattern, vocabulary, records."""
        check_step(self.config, step)
        if self.num_positions and step.context_tokens > self.num_positions:
            raise ValueError(
                f"model_type={self.config.model_type!r}: context_tokens={step.context_tokens} is more than the "
                f"{self.num_positions} positions of its table; set it to at most that"
            )
        own = compared(self, step.context_tokens)
        record: dict[str, object] = {
            "folder": self.folder,
            "config": json.loads(self.config_json),
            "buffers": dict(self.buffers),
        }
        record |= {"outer_type": self.outer_type} if self.outer_type else {}
        initial: Initial = self.weights or FirstValues(self.config_json, step.seed)
        frozen, flops = None, self.flops(step.context_tokens)
        if self.lora is not None:
            assert self.weights is not None
            record |= {"lora": vars(self.lora), "weights": self.weights.digest}
            base = BaseWeights(self.weights)
            initial, frozen = AdapterValues(self.config_json, self.lora, step.seed, base), base
            # A frozen parameter's gradient is not computed: 4 instead of 6 for each and token.
            flops -= self.flops(step.context_tokens, density=0.0) / 3
        sizes = None  # for types that the forecast does not know
        if self.config.model_type in KNOWN_TYPES:
            sizes = ModelSizes(
                self.sizes(),
                self.num_parameters + self.num_adapter_parameters,
                None if self.lora is None else self.num_adapter_parameters,
                self.latent,
                one_a_pass="its balancing loss is one of a whole pass" if has_balancing_loss(self.config) else "",
            )
        return ModelParts(
            initial=initial,
            frozen=frozen,
            pattern=self.pattern(step.context_tokens),
            vocab_size=self.vocab_size,
            files={CONFIG_FILE: json.dumps(record, indent=1) + "\n"},
            flops=flops,
            check_data=self.check_data,
            sizes=sizes,
            model=None if own is self else own,
            softcap=self.softcap,
        )

    def check_data(self, data: Any) -> None:
        """Raises ValueError for a corpus that was prepared with another tokenizer than the one beside the model."""
        folder = Path(self.folder)
        if not self.folder or not (folder / FAST).exists() or not isinstance(data, PreparedTokens):
            return
        manifest = read_manifest(data.uri)
        if folder_digest(folder, manifest.end_of_document) != manifest.tokenizer_sha256:
            raise ValueError(
                f"{shown_url(data.uri)} was prepared with another tokenizer than that in {self.folder!r}, so its "
                f"tokens mean something else to the model: prepare it with --tokenizer {folder}, or name a folder "
                f"without {FAST}"
            )

    @property
    def config(self) -> Any:
        """The `PreTrainedConfig`, a new one in each call."""
        return config_of(json.loads(self.config_json))

    @cached_property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def most_positions(self) -> int:
        """The longest sequence that the config says it was trained with; 0 where it does not."""
        return int(getattr(self.config, "max_position_embeddings", None) or 0)

    def sizes(self) -> ModelConfig:
        """The sizes as those of our own decoder, for plans and patterns: norms' and biases' parameters may differ."""
        config = self.config
        config.allow_global_per_layer_attribute_access = True  # where layers differ, the plan takes the config's
        num_heads, width = _number(config, "num_attention_heads"), _number(config, "hidden_size")
        return ModelConfig(
            vocab_size=self.vocab_size,
            num_layers=_number(config, "num_hidden_layers"),
            width=width,
            num_heads=num_heads,
            num_kv_heads=_number(config, "num_key_value_heads") or num_heads,
            # Width of queries and keys; narrower values are padded.
            head_dim=_number(config, "qk_head_dim", "head_dim") or width // num_heads,
            ffn_width=_number(config, *WIDTHS) or 4 * width,
            **asdict(self.experts),
            tie_embeddings=bool(config.tie_word_embeddings),
            checkpoint_activations=self.checkpoint_activations,
            loss_chunk_tokens=self.loss_chunk_tokens if config.model_type in KNOWN_TYPES else WHOLE_SLICE,
        )

    def flops(self, context_tokens: int, density: float = 1.0) -> float:
        """FLOP of one sequence, forward and backward. Values narrower than keys cost by their own width."""
        sizes, width = self.sizes(), getattr(self.config, "v_head_dim", None)
        if width:
            density *= (sizes.head_dim + int(width)) / (2 * sizes.head_dim)
        num_active = self.num_parameters - num_parameters(sizes) + active_parameters(sizes)
        return model_flops(sizes, context_tokens, density, num_active if self.num_parameters else None)

    def description(self) -> str:
        begins = "weights from the folder" if self.weights is not None else "values drawn from the seed"
        adapters = ""
        if self.lora is not None:
            adapters = f", frozen; {self.num_adapter_parameters:,} parameters of adapters are trained ({self.lora})"
        inside = f", the text model of a {self.outer_type} by itself" if self.outer_type else ""
        return f"{self.config.model_type}{inside}, {self.num_parameters:,} parameters, {begins}{adapters}"

    def pattern(self, context_tokens: int) -> LayerPatterns | None:
        """The sliding windows shorter than `context_tokens`, by layer; None where there are none.

        With windows="blocks" they are rounded up to whole blocks of 128 tokens, which GPUs run faster: a query sees its
        window and at most 254 tokens more.
        """
        windows = [w if w is not None and w < context_tokens else None for w in self.layer_windows]
        if self.windows == "dense" or not any(windows):
            return None
        rules: dict[Rule, list[int]] = {}
        for layer, window in enumerate(windows):
            rule: Rule = Dense() if window is None else Window(window)
            if window is not None and self.windows == "blocks":
                rule = BigBird(window=Window(window).num_blocks(BLOCK_TOKENS), globals=0, randoms=0)
            rules.setdefault(rule, []).append(layer)
        if len(rules) == 1:
            return LayerPatterns((LayerGroup(tuple(rules)),))
        return LayerPatterns(tuple(LayerGroup((rule,), tuple(layers)) for rule, layers in rules.items()))


def ring_model(
    source: str | Path | Mapping[str, object] | Any,
    *,
    weights: bool = True,
    checkpoint_activations: bool = True,
    loss_chunk_tokens: int = 1024,
    windows: Windows = "exact",
    lora: Lora | str | Mapping[str, object] | Any | None = None,
) -> RingModel:
    """A Hugging Face decoder for `ElasticRingTrainer`.

    Args:
        source: a folder as `save_pretrained` writes it, or a config (`PreTrainedConfig`, or its dictionary); of a
            multimodal one the text model by itself. A folder with safetensors files gives the first values; each rank
            reads the rows of its own shard only, so workers must see the folder. Otherwise first values are those of
            transformers, drawn from the run's seed.
        weights: False ignores the folder's weights.
        checkpoint_activations: keep each layer's input and attention result only; recompute the rest in backward.
        loss_chunk_tokens: tokens whose logits exist at a time.
        windows: "exact" keeps the config's sliding windows; "blocks" rounds them up to blocks of 128 tokens, which
            GPUs run faster; "dense" ignores them.
        lora: `r=16,alpha=32,target=q_proj+v_proj`, the same options as a mapping, or peft's `LoraConfig`: trains
            adapters of peft on these layers; the folder's weights stay frozen.

    Raises: ValueError for what cannot train on a ring (attention's dropout, masks of its own, layers without attention
    of transformers' interface), for weights that do not fit the model, and for a tokenizer with more tokens than it.
    """
    if windows not in ("exact", "blocks", "dense"):
        raise ValueError(f"windows={windows!r}: must be one of exact, blocks, dense")
    if loss_chunk_tokens < 1:
        raise ValueError(f"loss_chunk_tokens={loss_chunk_tokens}: must be at least 1")
    folder = Path(source).expanduser().absolute() if isinstance(source, str | Path) else None
    config: Any = source
    if folder is not None:
        check_model_links(folder)
        config = read_config(folder)
        if "model_type" not in config:
            raise ValueError(f"{folder / 'config.json'} has no model_type: give the config of a transformers model")
    plain = dict(config) if isinstance(config, Mapping) else config.to_dict()
    plain.pop("_name_or_path", None)  # where it was loaded from, which is not what it is
    part = TextPart.of(plain)
    ring = RingModel(
        json.dumps(plain if part is None else part.config, sort_keys=True),
        str(folder or ""),
        None,
        checkpoint_activations,
        loss_chunk_tokens,
        windows,
        outer_type="" if part is None else part.outer_type,
    )
    check_config(ring.config)
    if folder is not None:
        check_tokenizer(folder, ring.vocab_size)
    ring, model = traced_model(ring)
    if (adapters := None if lora is None else Lora.of(lora, ring.config.model_type)) is not None:
        check_lora(adapters, model, has_base=folder is not None and weights)
    return ring if folder is None or not weights else _with_weights(ring, folder, model, adapters, part)


def traced_model(ring: RingModel) -> tuple[RingModel, Any]:
    """The same with what its module shows, and the module on the meta device. Raises ValueError for one that rings do
    not train."""
    try:
        with torch.device("meta"):
            model = build(ring.config)
    except Exception as error:  # each family fails in its own way
        raise ValueError(
            f"model_type={ring.config.model_type!r}: its module cannot be built of this config "
            f"({type(error).__name__}: {cut(str(error), 300)}); complete the config, or choose another model"
        ) from error
    check_skipped_layers(ring.config)
    layer_windows, traced = trace(model, ring.config)
    check_dropout(ring.config, traced)
    check_experts(model, ring.config, adds_loss=ring.config.model_type in KNOWN_TYPES)
    ring = replace(
        ring,
        layer_windows=layer_windows,
        experts=expert_sizes(model, ring.config),
        num_parameters=model.num_parameters(),
        latent=latent_of(model),
        num_compared_layers=layers_of_each_kind(model),
        num_positions=num_positions(model, ring.config, traced),
        softcap=softcap_of(ring.config, traced),
    )
    return ring, model


def _with_weights(ring: RingModel, folder: Path, model: Any, adapters: Lora | None, part: TextPart | None) -> RingModel:
    fitted = fitted_weights(folder, model, part)
    if fitted is None and adapters is not None:
        raise ValueError(
            f"lora={adapters}: {str(folder)!r} has no weights to freeze; give the folder of a trained model"
        )
    if fitted is None:
        log.warning("%s has a config and no weights: first values are drawn from the seed", folder)
        return ring
    buffers = {  # experts' correction biases and the like, where the folder stores them
        name: tuple(fitted.tensor(name, tuple(buffer.shape)).to(buffer.dtype).flatten().tolist())
        for name, buffer in model.named_buffers()
        if fitted.aliases.get(name, name) in fitted.files
    }
    if buffers:
        log.info("%s: %s stay as they are in the folder; nothing trains them", folder, few([*buffers], 3))
    if adapters is not None:
        adapt(model, adapters)
    return replace(
        ring,
        weights=fitted,
        buffers=tuple(buffers.items()),
        lora=adapters,
        num_adapter_parameters=0 if adapters is None else model.num_parameters(only_trainable=True),
        latent=latent_of(model),
    )


def _number(config: Any, *names: str) -> int:
    """The first setting of these names that has a value, the largest of one by layer; 0 without any."""
    value = next((value for name in names if (value := getattr(config, name, None))), 0)
    return int(max(value) if isinstance(value, list | tuple) else value)


@dataclass(frozen=True)
class FirstValues:
    """First values by transformers' own rules: a function of the run's seed and a parameter's name and shape.

    Experts are drawn one by one. Of another parameter a rank that holds some rows draws the whole; at most two exist.
    """

    config_json: str
    seed: int

    def tensor(self, name: str, shape: Sequence[int], rows: tuple[int, int] | None = None) -> Tensor:
        if name in self._of_experts:
            row = (1, *shape[1:])
            return torch.cat([self._drawn(name, row, expert) for expert in range(*(rows or (0, shape[0])))])
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
        key = f"{self.seed} {name} {shape}{'' if expert is None else f' {expert}'}"
        owner._parameters[leaf] = nn.Parameter(torch.full(shape, torch.nan, device="cpu"))
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(seed_of(key))
                self._empty._init_weights(owner)
            value: Tensor = owner._parameters[leaf].detach()
        finally:
            owner._parameters.update(kept)
        if torch.isnan(value).any():  # transformers has no rule for it, and leaves it to the constructor
            seed = self.seed if expert is None else seed_of(key) & ((1 << 56) - 1)
            return Initialiser(seed, int(self._empty.config.num_hidden_layers)).tensor(name, shape)
        return value

    def __getstate__(self) -> dict[str, object]:
        return {"config_json": self.config_json, "seed": self.seed}  # without the module

    def __repr__(self) -> str:
        return f"FirstValues({hashlib.sha256(self.config_json.encode()).hexdigest()[:16]}, {self.seed})"
