"""A shrunk model on a ring beside plain transformers: what trains is what transformers computes, or it is refused.

On the CPU, in fp32 and train mode: packed documents in the local order of a rank of two, longer than any window. The
reference is the class itself with its own masks and eager attention, a document at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.layers import LayerGroup, LayerPatterns
from elastic_ring.attention.patterns.rules import Dense
from elastic_ring.data.loader import TENSORS, slice_sample
from elastic_ring.data.packing import Sample
from elastic_ring.files import cut
from elastic_ring.integrations.transformers.layers import has_balancing_loss
from elastic_ring.integrations.transformers.module import class_of
from elastic_ring.model.dropout import dropout, token_keys
from elastic_ring.model.loss import language_model_loss
from elastic_ring.train.task import Batch
from elastic_ring.train.wrap import largest_list

if TYPE_CHECKING:
    from elastic_ring.integrations.transformers.model import Positions, RingModel

NUM_TOKENS = 96
DOCUMENT_STARTS = (0, 19, 55)
SHORT_TOKENS, LONG_TOKENS = 16, 4 * NUM_TOKENS
BETWEEN_TOKENS = 30
"""Lengths of a config below the context, and from it on; and one between those of the documents."""
TOLERANCE, FLOOR = 1e-4, 1e-3
"""Relative errors of each gradient. A gradient below this share of the largest is compared with that share."""
VOCAB_SIZE, WIDTH, NUM_HEADS = 128, 64, 4
SEED = 7
SOFTCAP = 0.5
NUMBERS_OF_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_SIZES: tuple[tuple[str, int], ...] = (
    (r"hidden_size|n_embd|d_model|embedding_size|word_embed_proj_dim|dim_model_base", WIDTH),
    (r"\w*intermediate_size|(expert_)?ffn_(hidden_size|dim|width)|n_inner|shared_expert_width", 96),
    (r"(num_attention|n)_heads?", NUM_HEADS),
    (r"(global_)?head_dim|kv_channels|qk_nope_head_dim|v_head_dim|hidden_size_per_layer_input", 16),
    (r"qk_rope_head_dim|rotary_dim|conv_L_cache", 8),
    (r"qk_head_dim", 24),
    (r"(q|kv)_lora_rank", 32),
    (r"(moe_|zero_)?(num|n)_(local_|routed_)?experts|zero_expert_num", 8),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|moe_top_k|top_k_experts|n_group", 2),
    (r"topk_group", 1),
    (r"\w*vocab_size(_per_layer_input)?", VOCAB_SIZE),
)
"""Names of sizes, of any family, and the most that a shrunk model has of each."""
_LENGTHS = re.compile(r"sliding_window(_size)?|local_attention|floor_scale|original_max_position_embeddings")
_PLACES = re.compile(r"layer_?(idx|index|id|number)$")
_POSITIONS = re.compile(r"max_position_embeddings|n_positions|n_ctx|max_seq_len")


def compared(model: RingModel, context_tokens: int) -> RingModel:
    """The model, or where only that is equal the one whose positions restart at packed documents.

    Raises ValueError where the model, shrunk, trains something else than transformers, or cannot be compared.
    """
    plain = shrunk(model.config.to_dict(), context_tokens, model.num_compared_layers, is_dense=model.windows == "dense")
    # A balancing loss counts a sequence, so that with one there is one document.
    packed = [{**plain, "output_router_logits": False}] if plain.get("output_router_logits") else []
    configs = [json.dumps(each, sort_keys=True) for each in (plain, *packed)]

    def differs(positions: Positions) -> str:
        return next(filter(None, (_difference(config_json, positions) for config_json in configs)), "")

    if not (difference := differs(model.positions)):
        return model
    if not differs("document"):
        return replace(model, positions="document")
    raise ValueError(f"model_type={plain['model_type']!r}: {difference}; choose another model")


def layers_of_each_kind(model: nn.Module) -> int:
    """How many of the first layers have two of each kind, as far as there are two."""
    kinds: dict[object, list[int]] = {}
    for number, layer in enumerate(largest_list(model)):
        kinds.setdefault(_kind(layer), []).append(number)
    return max(indices[:2][-1] for indices in kinds.values()) + 1


def _kind(layer: nn.Module) -> object:
    """What the modules of a layer are, but for their number."""
    return tuple(
        (
            name,
            type(module).__name__,
            *((key, value) for key, value in vars(module).items() if _is_setting(key, value)),
            *((key, tuple(param.shape)) for key, param in module.named_parameters(recurse=False)),
        )
        for name, module in layer.named_modules()
    )


def _is_setting(name: str, value: object) -> bool:
    return isinstance(value, str | int | None) and not _PLACES.search(name)


def shrunk(config: Any, context_tokens: int, num_layers: int, *, is_dense: bool) -> Any:
    """The dictionary of a config, for a model of the same class with small sizes. Lengths below `context_tokens` stay
    below that of the comparison, longer ones stay longer."""
    total = next((config[name] for name in NUMBERS_OF_LAYERS if config.get(name)), num_layers)
    heads = next((int(config[name]) for name in ("num_attention_heads", "n_head", "n_heads") if config.get(name)), 1)

    def small(name: str, value: Any) -> Any:
        if isinstance(value, Mapping) and {*NUMBERS_OF_LAYERS} & {*value}:  # a config inside
            return shrunk(value, context_tokens, num_layers, is_dense=is_dense)
        if isinstance(value, Mapping):
            of_layers = {key: inner for key, inner in value.items() if not f"{key}".isdigit() or int(key) < num_layers}
            return {key: small(key, inner) for key, inner in of_layers.items()}
        if name in ("long_factor", "short_factor"):
            return _of_small_head(value, config, heads)
        if isinstance(value, list):
            kept = value[:num_layers] if len(value) == total else value
            return [small(name, inner) for inner in kept]
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        if name in NUMBERS_OF_LAYERS:
            return min(int(value), num_layers)
        if name.endswith("token_id"):
            return min(int(value), VOCAB_SIZE - 1)
        if name == "original_max_position_embeddings" and value < context_tokens:
            return BETWEEN_TOKENS
        if _LENGTHS.fullmatch(name):
            is_short = 0 < value < context_tokens and not (is_dense and "window" in name)
            return SHORT_TOKENS if is_short else LONG_TOKENS if value else value
        if name.endswith("logit_softcapping"):  # small enough for the small scores of a small model
            return min(value, SOFTCAP)
        if name in ("partial_rotary_factor", "rotary_pct"):  # of a head of 16, an even number
            return max(2, 2 * round(8 * value)) / 16
        if _POSITIONS.fullmatch(name):
            return LONG_TOKENS
        if name in ("num_key_value_heads", "kv_n_heads", "num_global_key_value_heads"):  # groups stay groups
            return NUM_HEADS if value >= heads else min(int(value), 2)
        if name == "head_dim" and value == config.get("qk_rope_head_dim"):
            return min(int(value), 8)
        most = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), value)
        return most if value and most in (WIDTH, NUM_HEADS) else min(value, most)  # these divide each other

    return {name: small(name, value) for name, value in config.items()}


def _of_small_head(factors: list[float], config: Any, num_heads: int) -> list[float]:
    """LongRoPE's factors, of which a head has one for each pair of numbers that rotate."""
    of_rope = config.get("qk_rope_head_dim")
    width = of_rope or config.get("head_dim") or config["hidden_size"] // num_heads
    small = min(width, 8) if of_rope else min(config.get("head_dim") or 16, 16)
    number = max(1, round(len(factors) * small / width))
    return [factors[index * len(factors) // number] for index in range(number)]


class _Shuffled(PatternedAttention):
    """Attention of a whole sequence whose tokens stand in the order `order`: a rank's slice is no range either."""

    order: Tensor

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, up: Tensor | None = None
    ) -> Tensor:
        back = self.order.argsort()
        return super()._attend(layer, q[:, back], k[:, back], v[:, back], sinks, up)[:, self.order]

    def documents(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        begin, length = super().documents(positions)
        return begin[:, self.order], length[:, self.order]


def _difference(config_json: str, positions: Positions) -> str:
    """Why the model of this config is not that of transformers; empty if it is."""
    try:
        worst, part = _worst(config_json, positions)
    except Exception as error:  # whatever a family's code raises
        return (
            "a small model of its config cannot be compared with transformers "
            f"({type(error).__name__}: {cut(str(error), 300)})"
        )
    if worst <= TOLERANCE:
        return ""
    return (
        f"on a ring it would train another model than transformers: {part} of a small model of its config differs by "
        f"{worst:.1e} (allowed {TOLERANCE:.0e})"
    )


@lru_cache(maxsize=64)
def _worst(config_json: str, positions: Positions) -> tuple[float, str]:
    """The largest relative error, and of what."""
    from elastic_ring.integrations.transformers.model import RingModel, traced_model

    with _own_settings():
        own, _ = traced_model(RingModel(config_json, loss_chunk_tokens=NUM_TOKENS // 4, positions=positions))
        config = own.config
        module = own().train()
        base = class_of(config)._from_config(
            config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        _fill(module)
        base.load_state_dict(module.state_dict())
        sample = _sample(1 if has_balancing_loss(config) else len(DOCUMENT_STARTS), int(config.vocab_size))
        ring = _ring_gradients(own, module, sample)
        return max(_errors(ring, _plain_gradients(base.train(), sample)))


@contextmanager
def _own_settings() -> Iterator[None]:
    """On the CPU in fp32 whatever the process has set, with random numbers of its own, and without transformers' words
    about small sizes. Small products are not cut among threads: it takes longer, and sums in another order."""
    from transformers.utils import logging

    mkldnn: Any = torch.backends.mkldnn
    number, verbosity, matmul = torch.get_num_threads(), logging.get_verbosity(), mkldnn.matmul
    precision, matmul.fp32_precision = matmul.fp32_precision, "ieee"  # fp32 as bf16, on some CPUs
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    try:
        with (
            torch.device("cpu"),
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            torch.default_generator.manual_seed(SEED)
            yield
    finally:
        logging.set_verbosity(verbosity)
        torch.set_num_threads(number)
        matmul.fp32_precision = precision


def _fill(module: nn.Module) -> None:
    """Values at which each part changes the loss: no scores near zero, no biases of zero."""
    with torch.no_grad():
        for name, param in module.named_parameters():
            if re.search(r"\b(q|k)_norm\b", name):  # no sharp scores, which make much of a rounding
                param.fill_(0.5).add_(0.1 * torch.randn(param.shape))
            elif param.dim() > 1:
                param.normal_(std=0.25 * param.size(-1) ** -0.5)
            else:
                param.copy_(bool((param == 1).all()) + 0.1 * torch.randn(param.shape))
        for buffer in module.state_dict(keep_vars=True).values():
            if not isinstance(buffer, nn.Parameter) and buffer.is_floating_point():
                buffer.add_(0.1 * torch.randn(buffer.shape))


def _sample(num_documents: int, vocab_size: int) -> Sample:
    tokens = np.random.default_rng(SEED).integers(0, vocab_size, NUM_TOKENS + 1)
    return Sample(tokens, DOCUMENT_STARTS[:num_documents])


def _ring_gradients(own: RingModel, module: nn.Module, sample: Sample) -> dict[str, Tensor]:
    """The loss and each gradient of one pass."""
    layout, halves = make_layout("contiguous", NUM_TOKENS, 1), make_layout("zigzag", NUM_TOKENS, 2)
    order = torch.cat([halves.positions(cp_rank) for cp_rank in range(2)])
    piece = slice_sample(sample, layout, 0, sample_id=0, index_in_batch=0)
    patterns = own.pattern(NUM_TOKENS) or LayerPatterns((LayerGroup((Dense(),)),))
    options = RingOptions(sequence_seeds=(SEED,), softcap=own.softcap)
    attention = _Shuffled(patterns, layout, 0, None, options, document_starts=piece.document_starts)
    attention.order = order
    fields = {name: getattr(piece, name)[:, order] for name in TENSORS}
    loss, _ = language_model_loss(module, Batch(**fields, attention=attention))
    return _gradients(module, loss)


class _SameMasks(TorchFunctionMode):
    """Dropout of plain transformers with the masks of a run, for tokens of these keys."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.keys, self.layer, self.num_calls, self.num_outside = torch.empty(0), -1, 0, 0
        for number, layer in enumerate(largest_list(base)):
            layer.register_forward_pre_hook(partial(self._enter, number))
            layer.register_forward_hook(partial(self._enter, -1))

    def begin(self, keys: Tensor) -> _SameMasks:
        self.keys, self.num_outside = keys, 0
        self._enter(-1)
        return self

    def _enter(self, layer: int, *_: Any) -> None:
        if layer < 0:
            self.num_calls = self.num_outside
        else:
            self.num_outside, self.num_calls = self.num_calls, 0
        self.layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.dropout:
            return func(*args, **(kwargs or {}))

        def masked(x: Tensor, p: float = 0.5, training: bool = True, *_: bool, **__: bool) -> Tensor:
            if not training or not p:
                return x
            self.num_calls += 1
            return dropout(x, p, self.keys, self.layer, self.num_calls - 1)

        return masked(*args, **(kwargs or {}))


def _plain_gradients(base: Any, sample: Sample, sequence_seed: int = SEED) -> dict[str, Tensor]:
    loss, bounds = torch.zeros(()), (*sample.document_starts, NUM_TOKENS)
    keys, masks = token_keys((sequence_seed,), torch.arange(NUM_TOKENS)[None]), _SameMasks(base)
    for start, stop in pairwise(bounds):
        tokens = torch.from_numpy(sample.tokens[start : stop + 1])
        targets = tokens[1:].clone()
        if stop < NUM_TOKENS:
            targets[-1] = -100
        with masks.begin(keys[start:stop]):
            output = base(tokens[None, :-1], use_cache=False)
        loss = loss + nn.functional.cross_entropy(output.logits[0].float(), targets, reduction="sum")
        if has_balancing_loss(base.config):
            loss = loss + base.config.router_aux_loss_coef * output.aux_loss * len(targets)
    return _gradients(base, loss)


def _gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    named = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()}
    return {"its loss": loss.detach()} | {f"the gradient of {name}": gradient for name, gradient in named.items()}


def _errors(ring: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> Iterator[tuple[float, str]]:
    """(relative error, name) of the loss and each gradient."""
    floor = FLOOR * max(float(tensor.norm()) for tensor in plain.values() if tensor.dim())
    for name, expected in plain.items():
        error = float((ring[name] - expected).norm()) / max(float(expected.norm()), floor)
        yield error if error == error else torch.inf, name  # NaN is no number of its own
