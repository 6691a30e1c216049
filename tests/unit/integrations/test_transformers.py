"""Decoders of transformers compute on a ring what transformers computes; what rings cannot do is refused by name."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from elastic_ring import ElasticRingTrainer, OptimConfig, StepConfig
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.families import BigBird
from elastic_ring.attention.patterns.rules import Window
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.plan.sparse_blocks import check_layer_blocks
from elastic_ring.attention.ring import RingAttention
from elastic_ring.data.loader import joined, slice_sample
from elastic_ring.data.packing import Sample
from elastic_ring.data.source import StdlibText
from elastic_ring.integrations.transformers import RingModel, ring_model
from elastic_ring.integrations.transformers.checks import check_dropout, trace
from elastic_ring.integrations.transformers.module import TracedRing, attend, build
from elastic_ring.model.loss import language_model_loss
from elastic_ring.train.memory import keep_activations, recompute
from elastic_ring.train.task import TrainingTask, batch_of
from elastic_ring.train.task import attention_of as ring_attention_of
from elastic_ring.train.wrap import ModuleMaker, check_buildable, parameters_on_meta
from tests.unit.attention.attention_rings import ThreadRings, in_threads

T = pytest.importorskip("transformers")

CONTEXT = 64
SMALL: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, Any] = {
    "llama, tied": lambda: T.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "mistral": lambda: T.MistralConfig(**SMALL, sliding_window=24),
    "qwen2": lambda: T.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "qwen3": lambda: T.Qwen3Config(**SMALL, head_dim=8),
    "gemma": lambda: T.GemmaConfig(**SMALL, head_dim=16),
    "gemma2, final softcap and scale of its own": lambda: T.Gemma2Config(
        **SMALL,
        head_dim=16,
        sliding_window=24,
        attn_logit_softcapping=None,
        query_pre_attn_scalar=32,
        final_logit_softcapping=1.0,
    ),
    "gemma2, capped scores": lambda: T.Gemma2Config(
        **SMALL, head_dim=16, sliding_window=24, attn_logit_softcapping=0.05, final_logit_softcapping=1.0
    ),
    "phi3, long factors": lambda: phi3(original=CONTEXT - 1),
    "phi3, short factors": lambda: phi3(original=CONTEXT),
    "gemma3": lambda: T.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=24),
    "granite, logits scaled": lambda: T.GraniteConfig(**SMALL, attention_multiplier=0.3, logits_scaling=3.0),
    "llama4 below its floor": lambda: llama4(floor_scale=CONTEXT + 1),
    "qwen2_moe, windows in masks": lambda: qwen2_moe(max_window_layers=9),
    "phimoe, windows in masks": lambda: T.PhimoeConfig(
        **SMALL, num_local_experts=4, router_jitter_noise=0.0, sliding_window=24
    ),
}


def llama4(**settings: Any) -> Any:
    """Without experts; its second layer has no rotary embedding and scales queries by their position."""
    full = ["full_attention"] * 3
    return T.Llama4TextConfig(
        **SMALL,
        head_dim=8,
        intermediate_size_mlp=64,
        moe_layers=[],
        layer_types=full,
        no_rope_layers=[1, 0, 1],
        **settings,
    )


def phi3(original: int) -> Any:
    """Factors of documents of at most `original` tokens, and of longer ones."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.3, 1.6]}
    rope |= {"long_factor": [1.5, 2.5, 4.0, 7.0], "original_max_position_embeddings": original}
    return T.Phi3Config(**SMALL, original_max_position_embeddings=original, rope_parameters=rope)


def ministral3(floor: int) -> Any:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": floor}
    return T.Ministral3Config(**SMALL, head_dim=8, rope_parameters={**rope, "llama_4_scaling_beta": 0.1})


def qwen2_moe(**settings: Any) -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return T.Qwen2MoeConfig(**SMALL, **experts, use_sliding_window=True, sliding_window=24, **settings)


def attention_of(model: RingModel) -> Any:
    layout, pattern = make_layout("zigzag", CONTEXT, 1), model.pattern(CONTEXT)
    if pattern is None:
        return RingAttention(plan(Pattern(), layout), 0, None, RingOptions(softcap=model.softcap))
    return PatternedAttention(pattern, layout, 0, None, RingOptions(softcap=model.softcap))


def filled(model: RingModel) -> Any:
    """The module with the first values of a run, its one-dimensional ones moved a little."""
    made, initial = model(), model.ring_parts(StepConfig(context_tokens=CONTEXT)).initial
    assert initial is not None
    torch.manual_seed(1)
    with torch.no_grad():
        for name, param in made.named_parameters():
            param.copy_(initial.tensor(name, param.shape))
            if param.dim() == 1:
                param.add_(torch.randn_like(param), alpha=0.1)
    return made


def loss_of(made: Any, model: RingModel, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
    positions = torch.arange(CONTEXT)[None]
    return made(
        tokens, positions=positions, document_ids=positions.int(), attention=attention_of(model), targets=targets
    )


TOWER = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN_TOWER = {"depth": 1, "embed_dim": 32, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
QWEN_TEXT = {**SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
WIDTHS = {"hidden_size": 32, "intermediate_size": 32}
MULTIMODAL: dict[str, Any] = {
    "gemma3_text": lambda: T.Gemma3Config(
        text_config={**SMALL, "head_dim": 8, "sliding_window": 24}, vision_config={**TOWER, **WIDTHS}
    ),
    "mistral": lambda: T.Mistral3Config(
        text_config={**SMALL, "model_type": "mistral"},
        vision_config={**TOWER, **WIDTHS, "model_type": "pixtral", "head_dim": 16},
        tie_word_embeddings=False,
    ),
    "qwen2": lambda: T.Qwen2VLConfig(text_config=QWEN_TEXT, vision_config=QWEN_TOWER, tie_word_embeddings=True),
    "qwen3": lambda: T.Qwen3VLConfig(
        text_config={**QWEN_TEXT, "head_dim": 8},
        vision_config={**QWEN_TOWER, **WIDTHS, "deepstack_visual_indexes": [0]},
    ),
    "llama4_text": lambda: T.Llama4Config(
        text_config=llama4(floor_scale=CONTEXT + 1).to_dict(),
        vision_config={**TOWER, "hidden_size": 32, "intermediate_size": 128, "projector_output_dim": 32},
    ),
}


@pytest.mark.thinned(num=3)
@pytest.mark.parametrize("kind", MULTIMODAL)
def test_the_text_model_inside_a_multimodal_folder_is_taken_by_itself(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(4)
    outer = T.AutoModelForImageTextToText.from_config(
        MULTIMODAL[kind](), dtype=torch.float32, attn_implementation="eager"
    )
    outer.train().save_pretrained(tmp_path)
    model = ring_model(tmp_path, loss_chunk_tokens=24)
    assert model.description().startswith(f"{kind}, the text model of a {outer.config.model_type} by itself, ")
    assert model.weights is not None
    ours = model().train()
    for name, param in ours.named_parameters():
        param.data.copy_(model.weights.tensor(name, param.shape))
    tokens, targets = torch.randint(301, (2, 1, CONTEXT)).unbind()
    loss, _ = loss_of(ours, model, tokens, targets)
    loss.backward()
    whole = outer.language_model if kind == "llama4_text" else outer
    logits = whole(input_ids=tokens, use_cache=False).logits
    expected = F.cross_entropy(logits[0], targets[0], reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    theirs = {name.replace("language_model.model.", "model.language_model."): p for name, p in outer.named_parameters()}
    for name, param in ours.named_parameters():
        ending = name if name.startswith("lm_head") else name.replace("model.", "model.language_model.", 1)
        wanted = next(p.grad for each, p in theirs.items() if each.endswith(ending))
        torch.testing.assert_close(param.grad, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()), msg=name)


@pytest.mark.thinned(num=3)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradient_are_those_of_transformers_own_attention(family: str) -> None:
    config = FAMILIES[family]()
    model = ring_model(config, loss_chunk_tokens=24)
    ours = filled(model).train()
    theirs = T.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).train()
    theirs.load_state_dict(ours.state_dict())
    tokens, targets = torch.randint(0, 301, (2, 1, CONTEXT))
    targets[0, 5] = -100
    loss, num_targets = loss_of(ours, model, tokens, targets)
    loss.backward()
    expected = F.cross_entropy(theirs(tokens, use_cache=False).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-3)
    assert int(num_targets) == CONTEXT - 1
    for (name, own), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert own.grad is not None, name
        error = (own.grad - other.grad).norm() / other.grad.norm().clamp_min(1e-6)
        assert float(error) < 1e-4, name


@pytest.mark.thinned(num=3)
@pytest.mark.parametrize(
    "family", ["gemma2, capped scores", "phi3, long factors", "mistral", "llama4 below its floor", "gemma3", "qwen2"]
)
def test_two_sequences_on_a_ring_of_two_have_loss_and_gradient_of_transformers_own_attention(family: str) -> None:
    """Both in one pass. What the ranks find, summed, is what transformers finds for each document alone, summed."""
    config = FAMILIES[family]()
    model, layout = ring_model(config, loss_chunk_tokens=24), make_layout("zigzag", CONTEXT, 2)
    task = TrainingTask(
        model,
        StdlibText(CONTEXT),
        StepConfig(context_tokens=CONTEXT),
        OptimConfig(),
        pattern=model.pattern(CONTEXT),
        softcap=model.softcap,
    )
    ours, groups = [filled(model).train() for _ in range(2)], ThreadRings().groups(2)
    samples = [Sample(torch.randint(0, 301, (CONTEXT + 1,)).numpy(), starts) for starts in ((0,), (0, 40))]

    def work(cp_rank: int) -> torch.Tensor:
        slices = [slice_sample(each, layout, cp_rank, sample_id=0, index_in_batch=0) for each in samples]
        piece = joined(slices, CONTEXT)
        ring = ring_attention_of(task, piece, layout.repeated(2), cp_rank, groups[cp_rank])
        batch = batch_of(piece, ring, torch.device("cpu"))
        loss, num_targets = language_model_loss(ours[cp_rank], batch)
        loss.backward()
        return torch.stack([loss.detach(), torch.tensor(float(num_targets))])

    loss, num_targets = torch.stack(in_threads(2, work)).sum(0)
    theirs = T.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).train()
    theirs.load_state_dict(ours[0].state_dict())
    expected = torch.zeros(())
    for sample, (start, stop) in [
        (each, bounds) for each in samples for bounds in pairwise((*each.document_starts, 64))
    ]:
        tokens = torch.from_numpy(sample.tokens[start : stop + 1])
        targets = tokens[1:].masked_fill(torch.arange(start + 1, stop + 1) == sample.document_starts[-1], -100)
        expected += F.cross_entropy(theirs(tokens[None, :-1], use_cache=False).logits[0], targets, reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-3)
    assert int(num_targets) == 2 * CONTEXT - 1
    for (name, first), second, other in zip(
        ours[0].named_parameters(), ours[1].parameters(), theirs.parameters(), strict=True
    ):
        assert first.grad is not None, name
        assert second.grad is not None, name
        error = (first.grad + second.grad - other.grad).norm() / other.grad.norm().clamp_min(1e-6)
        assert float(error) < 1e-4, name


def test_a_window_that_is_ignored_changes_the_loss() -> None:
    """The comparison above would notice it."""
    config = FAMILIES["mistral"]()
    tokens, targets = torch.randint(0, 301, (2, 1, CONTEXT))
    models = [ring_model(config), ring_model(config, windows="dense")]
    exact, dense = (float(loss_of(filled(model), model, tokens, targets)[0].detach()) for model in models)
    assert abs(exact - dense) > 1e-3


def test_recomputing_a_layer_gives_the_same_bits_and_calls_attention_once() -> None:
    tokens, targets = torch.randint(0, 301, (2, 1, CONTEXT))
    gradients, calls = [], []
    kept, taken_back = [keep_activations], [keep_activations, recompute]
    for recomputed, change in ((True, []), (False, []), (True, kept), (True, taken_back)):
        model = ring_model(FAMILIES["mistral"](), checkpoint_activations=recomputed)
        made, ring = filled(model).train(), attention_of(model)
        for switch in change:  # as a rank with room does, and the memory ladder after it
            for layer in made.model.layers:
                switch(layer)
        run_forward, seen = ring.layer, []
        ring.layer = lambda index, run=run_forward, seen=seen: (seen.append(index), run(index))[1]
        positions = torch.arange(CONTEXT)[None]
        loss, _ = made(tokens, positions=positions, document_ids=positions, attention=ring, targets=targets)
        loss.backward()
        gradients.append([param.grad for param in made.parameters()])
        calls.append((len(seen), ring._num_calls))
    for first, *others in zip(*gradients, strict=True):
        assert all(torch.equal(first, other) for other in others)
    assert calls == [(6, 3), (3, 3), (3, 3), (6, 3)], "each layer runs twice, its attention is planned and run once"


@pytest.mark.parametrize(
    ("family", "context", "expected"),
    [
        ("mistral", 64, "window:24"),
        ("mistral", 24, "None"),
        ("qwen2", 64, "dense@0;window:24@1,2"),
        ("gemma2, final softcap and scale of its own", 64, "window:24@0,2;dense@1"),
        ("gemma3", 64, "window:24"),
        ("gemma3", 20, "None"),
        ("llama, tied", 64, "None"),
        ("qwen2_moe, windows in masks", 64, "window:24@0,2;dense@1"),
        ("phimoe, windows in masks", 64, "window:24"),
    ],
)
def test_sliding_windows_become_patterns_where_a_sequence_notices_them(
    family: str, context: int, expected: str
) -> None:
    parts = ring_model(FAMILIES[family]()).ring_parts(StepConfig(context_tokens=context))
    assert str(parts.pattern) == expected


@pytest.mark.parametrize("window", [1, 2, 24, 128, 129, 4096])
def test_windows_in_blocks_keep_the_window_and_at_most_254_tokens_more(window: int) -> None:
    model = RingModel("{}", windows="blocks", layer_windows=(window,))
    pattern = model.pattern(8192)
    assert pattern is not None
    (rule,) = pattern.groups[0].rules
    assert isinstance(rule, BigBird)
    queries, keys = np.arange(7000, 7300)[:, None], np.arange(7300)[None]
    past = keys <= queries
    kept, wanted = rule.sees(queries, keys) & past, Window(window).sees(queries, keys) & past
    assert not (wanted & ~kept).any()
    assert (kept.sum(1) - wanted.sum(1)).max() <= 254
    check_layer_blocks(pattern, make_layout("zigzag", 8192, 2))


OPT: dict[str, Any] = {k: v for k, v in SMALL.items() if k not in ("intermediate_size", "num_key_value_heads")}
OPT |= {"ffn_dim": 64}
REFUSED: dict[str, tuple[Any, str]] = {
    "router noise": (
        lambda: T.MixtralConfig(**SMALL, router_jitter_noise=0.1),
        r"router_jitter_noise=0\.1: .* a step that runs again must choose the same experts",
    ),
    "capacity": (lambda: T.MixtralConfig(**SMALL, capacity_factor=1.5), "which tokens are dropped would depend on"),
    "dropout": (lambda: T.LlamaConfig(**SMALL, attention_dropout=0.1), r"attention_dropout=0\.1: .* set it to 0\.0"),
    "dropout of attention only": (
        lambda: T.Starcoder2Config(**SMALL, residual_dropout=0.1, attention_dropout=0.1, classifier_dropout=0.1),
        r"'starcoder2' attention_dropout=0\.1: attention on rings has no dropout; set it to 0\.0",
    ),
    "skipped layers": (lambda: T.OPTConfig(**OPT, layerdrop=0.2), r"'opt' layerdrop=0\.2: rings skip no layers"),
    "dynamic rope": (
        lambda: T.LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "rope_type='dynamic' depends on the largest position",
    ),
    "not causal": (lambda: T.Gemma3TextConfig(**SMALL, use_bidirectional_attention=True), "rings of a trainer are"),
    "another kind of layer": (
        lambda: T.Qwen2Config(**SMALL, layer_types=["full_attention", "chunked_attention", "full_attention"]),
        "layer_types has chunked_attention: rings have full and sliding",
    ),
    "recurrent layers": (lambda: T.Qwen3NextConfig(**SMALL, head_dim=8), "layer_types has linear_attention"),
    "a text model that reads images in its layers": (
        lambda: T.MllamaConfig(),
        "'mllama' has more than a decoder of text, and its text model stays in it: model_type='mllama_text_model' is",
    ),
    "layers of a text model": (lambda: T.Llama4Config(), "'llama4_text' layer_types has chunked_attention"),
    "a tower of 10^8 layers": (
        lambda: {"model_type": "gemma3", "vision_config": {"num_hidden_layers": 10**8}},
        "num_hidden_layers=100000000: must",
    ),
    "an encoder and a decoder": (lambda: T.T5Config(), "no causal language model|AttentionInterface"),
    "quantised": (lambda: T.LlamaConfig(**SMALL, quantization_config={"quant_method": "fp8"}), "is quantised"),
    "too many layers": (
        lambda: {"model_type": "llama", "num_hidden_layers": 10**8},
        "num_hidden_layers=100000000: must",
    ),
    "no heads": (lambda: {"model_type": "llama", "num_attention_heads": 0}, "num_attention_heads=0: must be a whole"),
    "words for sizes": (lambda: {"model_type": "llama", "num_hidden_layers": "x"}, "num_hidden_layers='x': must be a"),
    "a vocabulary": (lambda: {"model_type": "llama", "vocab_size": 10**15}, "vocab_size=1000000000000000: must be"),
    "code for a type": (
        lambda: {"model_type": "llama", "torch_dtype": "__import__('os')"},
        "'llama': its config cannot be read",
    ),
    "a rotation of its own": (
        lambda: {"model_type": "llama", "rope_scaling": {"rope_type": "zzz", "factor": 2.0}},
        "rope_type='zzz'|its config cannot be read",
    ),
    "a mask of its own": (lambda: T.DogeConfig(**SMALL), "DogeAttention: layer 0 has a mask of its own"),
    "an indexer": (
        lambda: T.DeepseekV32Config(**SMALL, layer_types=["full_attention"] * 3),
        "'deepseek_v32' index_topk=2048: an indexer chooses tokens",
    ),
    "a module that cannot be built": (
        lambda: T.NemotronConfig(**{**SMALL, "num_key_value_heads": None}),
        r"'nemotron': its module cannot be built of this config \(TypeError",
    ),
    "text beside images": (lambda: T.GitConfig(), "'git' has more than a decoder of text: give"),
    "unknown": (lambda: {"model_type": "of_tomorrow"}, "model_type='of_tomorrow': this version of transformers"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_ring_cannot_do_is_refused_by_name(what: str) -> None:
    config, told = REFUSED[what]
    with pytest.raises(ValueError, match=told):
        ring_model(config())


REFUSED_IN_A_CONTEXT: dict[str, tuple[Any, int, str]] = {
    "queries scaled by their position in a pass": (
        lambda: llama4(floor_scale=48),
        47,
        "attn_temperature_tuning=True scales queries of a pass of floor_scale=48 tokens or more, .* to less",
    ),
}


@pytest.mark.parametrize("what", REFUSED_IN_A_CONTEXT)
def test_a_context_in_which_a_ring_computes_something_else_is_refused_and_a_shorter_one_is_not(what: str) -> None:
    config, longest, told = REFUSED_IN_A_CONTEXT[what]
    model = ring_model(config())
    model.ring_parts(StepConfig(context_tokens=longest))
    with pytest.raises(ValueError, match=told):
        model.ring_parts(StepConfig(context_tokens=longest + 1))


def test_an_argument_of_an_attention_that_rings_do_not_have_is_refused_by_name() -> None:
    heads, layer = torch.zeros(3, 1, 2, 4, 8), type("Attention", (), {"layer_idx": 1})()
    attend(layer, *heads, ring=TracedRing(), position_ids=heads, indices=None)
    with pytest.raises(ValueError, match="Attention: layer 1 gives block_indices, indices to its attention, which"):
        attend(layer, *heads, ring=TracedRing(), indices=heads, block_indices=heads)


def test_sequences_of_a_pass_count_together_where_positions_are_counted_in_it() -> None:
    model, step = (
        ring_model(llama4(floor_scale=48)),
        StepConfig(context_tokens=24, global_batch=4, sequences_per_pass=2),
    )
    with pytest.raises(ValueError, match="set context_tokens=24 x sequences_per_pass=2 to less"):
        model.ring_parts(step)
    off = ring_model(llama4(floor_scale=48, attn_temperature_tuning=False))
    off.ring_parts(replace(step, context_tokens=48))


def test_rates_of_dropout_that_the_decoder_does_not_apply_are_no_reason_to_refuse_it() -> None:
    rates = {"classifier_dropout": 0.1, "summary_first_dropout": 0.1, "hidden_dropout": 0.1}
    assert ring_model(T.LlamaConfig(**SMALL, **rates)).num_parameters > 0


def test_dropout_of_an_attention_beside_the_interface_is_seen() -> None:
    config = FAMILIES["llama, tied"]()
    with torch.device("meta"):
        made = build(config)
    made.model.norm.forward = lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.2)
    _, traced = trace(made, config)
    with pytest.raises(ValueError, match=r"'llama' dropout=0\.2: attention on rings has no dropout"):
        check_dropout(config, traced)


def test_folders_and_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        ring_model(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="is no object; give a model folder"):
        ring_model(tmp_path)
    with pytest.raises(ValueError, match="windows='some': must be one of exact, blocks, dense"):
        ring_model(FAMILIES["mistral"](), windows="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loss_chunk_tokens=0"):
        ring_model(FAMILIES["mistral"](), loss_chunk_tokens=0)


def test_a_trainer_takes_the_parts_that_the_factory_brings_unless_it_is_given_others() -> None:
    model, step = ring_model(FAMILIES["mistral"]()), StepConfig(context_tokens=CONTEXT, global_batch=4)
    trainer = ElasticRingTrainer(model, StdlibText(CONTEXT), step_config=step)
    assert str(trainer.task.pattern) == "window:24"
    assert trainer.task.initial is not None
    assert json.loads(trainer.config_files["huggingface.json"])["config"]["model_type"] == "mistral"
    check_buildable(trainer.task)
    sent = replace(trainer.task, step=replace(trainer.task.step, experts="send"))
    with pytest.raises(ValueError, match="experts='send': says how tokens meet experts, and the model has none"):
        check_buildable(sent)
    other = ElasticRingTrainer(model, StdlibText(CONTEXT), step_config=step, pattern="window:12")
    assert str(other.task.pattern) == "window:12"
    assert other.submission().digest != trainer.submission().digest


def test_where_a_config_was_loaded_from_is_no_part_of_the_model() -> None:
    places = ["/a/llama", "/b/llama"]
    configs = [T.LlamaConfig(**SMALL, name_or_path=place) for place in places]
    assert [config.to_dict()["_name_or_path"] for config in configs] == places
    assert len({repr(ring_model(config)) for config in configs}) == 1


def test_data_with_more_tokens_than_the_model_has_rows_is_refused() -> None:
    model = ring_model(T.LlamaConfig(**{**SMALL, "vocab_size": 200}))
    with pytest.raises(ValueError, match=r"data\.vocab_size=257 is more than the model's 200"):
        ElasticRingTrainer(model, StdlibText(CONTEXT), step_config=StepConfig(context_tokens=CONTEXT, global_batch=4))


@pytest.mark.slow
def test_the_factory_is_the_same_in_every_process_and_survives_a_pickle() -> None:
    model = ring_model(FAMILIES["qwen2"]())
    assert isinstance(pickle.loads(pickle.dumps(model))(), T.Qwen2ForCausalLM)
    source = (
        "import pickle, sys; from elastic_ring.integrations.transformers import *; "
        "model = pickle.load(sys.stdin.buffer); print(model, 'transformers' in sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-c", source],
        input=pickle.dumps(model),
        capture_output=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    ).stdout.decode()
    assert told.split("\n")[0] == f"{model} False", "and transformers is imported only once a model is built"


def test_first_values_are_those_of_transformers_rules_and_rows_of_the_whole() -> None:
    model = ring_model(FAMILIES["gemma3"]())
    initial = model.ring_parts(StepConfig(seed=3, context_tokens=CONTEXT)).initial
    assert initial is not None
    shapes = {name: tuple(param.shape) for name, param in model().named_parameters()}
    weight = initial.tensor("model.layers.1.mlp.up_proj.weight", shapes["model.layers.1.mlp.up_proj.weight"])
    assert 0.015 < float(weight.std()) < 0.025, "the config's initializer_range"
    norm = initial.tensor("model.norm.weight", shapes["model.norm.weight"])
    assert torch.equal(norm, torch.zeros(32)), "Gemma's norms scale by 1 + weight"
    again = pickle.loads(pickle.dumps(initial))
    rows = again.tensor("model.layers.1.mlp.up_proj.weight", weight.shape, rows=(10, 20))
    assert torch.equal(rows, weight[10:20])
    other = model.ring_parts(StepConfig(seed=4, context_tokens=CONTEXT)).initial
    assert not torch.equal(other.tensor("model.layers.1.mlp.up_proj.weight", weight.shape), weight)


def test_buffers_are_made_without_the_parameters_and_are_those_of_the_whole_model() -> None:
    model = ring_model(FAMILIES["gemma3"]())
    with parameters_on_meta():
        bare = model()
    whole = model()
    assert all(param.is_meta for param in bare.parameters())
    assert len(list(bare.buffers())) > 2
    for (name, found), (_, expected) in zip(bare.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(found, expected), name
    assert not any(param.is_meta for param in nn.Linear(2, 2).parameters()), "only within"


def test_the_buffers_of_an_8_b_model_take_no_memory_for_its_parameters() -> None:
    model = ring_model(
        T.LlamaConfig(
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_attention_heads=32,
            num_key_value_heads=8,
        )
    )
    task = TrainingTask(model, StdlibText(8), StepConfig(), optim=None, initial=model.ring_parts(StepConfig()).initial)  # type: ignore[arg-type]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    maker = ModuleMaker(task)
    maker.keep_buffers()
    assert maker._buffers is not None
    assert sum(value.numel() for value in maker._buffers.values()) == 128
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10, "KiB, where the model has 30 GiB"


class Derived(nn.Module):
    """A model whose buffer is computed from its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("twice", 2 * self.weight.detach())


def test_a_buffer_that_is_computed_from_parameters_still_has_its_value() -> None:
    ones: Any = type("Ones", (), {"tensor": lambda self, name, shape, rows=None: torch.ones(shape)})()
    maker = ModuleMaker(TrainingTask(Derived, StdlibText(8), StepConfig(), optim=None, initial=ones))  # type: ignore[arg-type]
    maker.keep_buffers()
    assert maker._buffers is not None
    assert torch.equal(maker._buffers["twice"], torch.full((4,), 2.0))
