"""Dropout's masks are a function of where they are used: the same bits on any ring, recomputed or not, as plain
transformers would train with them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from elastic_ring import OptimConfig, StepConfig
from elastic_ring.attention.layouts.layout import Layout, make_layout, striped
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.data.loader import joined, slice_sample
from elastic_ring.data.source import StdlibText
from elastic_ring.integrations.transformers import dropout, ring_model
from elastic_ring.integrations.transformers.dropout import DropoutMasks, install_masks
from elastic_ring.model.dropout import dropped, sequence_seed, token_keys
from elastic_ring.model.init import seed_of
from elastic_ring.model.loss import language_model_loss
from elastic_ring.train.startup.layouts import attention_shapes
from elastic_ring.train.task import TrainingTask, attention_of, batch_of
from tests.unit.attention.attention_rings import ThreadRings, in_threads
from tests.unit.integrations.model_fuzz import EQUAL, outcome
from tests.unit.integrations.test_transformers import CONTEXT, OPT, SMALL

T = pytest.importorskip("transformers")

GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128, "attn_pdrop": 0.0}
FAMILIES: dict[str, Any] = {
    "functions": lambda: T.Starcoder2Config(**SMALL, residual_dropout=0.1, embedding_dropout=0.3),
    "modules": lambda: T.GPT2Config(**GPT2, resid_pdrop=0.2, embd_pdrop=0.1),
    "functions in layers without activations kept": lambda: T.OPTConfig(**OPT, dropout=0.2),
}
WORDS = 1 << 64


def split_mix(state: int) -> int:
    """The next word of SplitMix64, as its authors' C has it."""
    word = state = (state + 0x9E3779B97F4A7C15) % WORDS
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORDS
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORDS
    return word ^ (word >> 31)


def test_masks_are_words_of_split_mix_and_keep_the_rate() -> None:
    assert split_mix(1234567) == 6457827717110365317, "as published"
    keys, gamma = token_keys((5, -3), torch.arange(512)[None]), 0x9E3779B97F4A7C15
    zeros = dropped(0.3, keys, 2, 1, 1025)
    assert abs(float(zeros.float().mean()) - 0.3) < 0.003
    for token, channel in ((0, 0), (7, 1023), (300, 1024)):
        begin = (int(keys[token]) ^ seed_of("dropout in layer 2, call 1")) % WORDS
        word = split_mix(begin + channel // 2 * gamma) >> 32 * (channel % 2)
        signed = (word % (1 << 32) + (1 << 31)) % (1 << 32) - (1 << 31)
        assert bool(zeros[token, channel]) == (signed < round(0.3 * (1 << 32)) - (1 << 31))
    others = [dropped(0.3, keys, 2, 0, 1025), dropped(0.3, keys, 1, 1, 1025), zeros.roll(1, 0), zeros.roll(256, 0)]
    for other in others:
        assert abs(float((zeros & other).float().mean()) - 0.09) < 0.003


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ring_of_two_trains_as_transformers_does_with_the_same_masks(family: str) -> None:
    assert outcome(json.loads(json.dumps(FAMILIES[family]().to_dict()))) == EQUAL


def one_pass(layout: Layout, *, recomputes: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """(the inputs' numbers that each call keeps, by layer and call, over the ring; the gradients of a ring of one) of
    two packed sequences in a pass."""
    ring = ring_model(FAMILIES["functions"](), checkpoint_activations=recomputes)
    task = TrainingTask(ring, StdlibText(CONTEXT), StepConfig(context_tokens=CONTEXT), OptimConfig())
    groups, calls, own = ThreadRings().groups(layout.cp), dict[Any, torch.Tensor](), dropout.dropout
    torch.manual_seed(0)
    models = [ring().train() for _ in range(layout.cp)]
    models[-1].load_state_dict(models[0].state_dict())

    def recorded(x: Any, rate: float, keys: Any, layer: int, call: int) -> Any:
        cp_rank = next(rank for rank, model in enumerate(models) if model.dropout_masks.place.keys is keys)
        zeros = dropped(rate, keys, layer, call, x.size(-1))
        assert torch.equal(calls.setdefault((cp_rank, layer, call), zeros), zeros), "recomputed with the same bits"
        return own(x, rate, keys, layer, call)

    def work(cp_rank: int) -> Any:
        model = models[cp_rank]
        samples = [task.data.open().read(number) for number in (3, 4)]
        slices = [slice_sample(s, layout, cp_rank, sample_id=i, index_in_batch=i) for i, s in enumerate(samples)]
        piece = joined(slices, CONTEXT)
        group = groups[cp_rank] if layout.cp > 1 else None
        attention = attention_of(task, piece, layout.repeated(2), cp_rank, group, step=6)
        loss, _ = language_model_loss(model, batch_of(piece, attention, torch.device("cpu")))
        loss.backward()
        return [param.grad for param in model.parameters()]

    with monkeypatch.context() as patch:
        patch.setattr(dropout, "dropout", recorded)
        gradients = in_threads(layout.cp, work)
    keys = {key[1:] for key in calls}
    whole = layout.repeated(2)
    return {k: whole.gather([calls[r, *k] for r in range(layout.cp)], 0) for k in keys}, gradients[0]


def test_masks_have_the_same_bits_on_any_ring_and_layout_and_when_layers_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layouts = [make_layout("contiguous", CONTEXT, 1), make_layout("zigzag", CONTEXT, 2)]
    layouts += [striped(CONTEXT, 2, unit_tokens=8)]
    alone, *others = [one_pass(each, recomputes=True, monkeypatch=monkeypatch) for each in layouts]
    assert sorted(alone[0]) == [(-1, 0), *((layer, call) for layer in range(3) for call in range(2))]
    for masks, _ in others:
        assert all(torch.equal(masks[key], alone[0][key]) for key in alone[0])
    first = alone[0][0, 0]
    assert not torch.equal(first[:CONTEXT], first[CONTEXT:]), "two sequences of a pass differ"
    kept = one_pass(layouts[0], recomputes=False, monkeypatch=monkeypatch)[1]
    assert all(torch.equal(a, b) for a, b in zip(alone[1], kept, strict=True))


@pytest.mark.parametrize("config_of", [*FAMILIES.values(), lambda: T.GptOssConfig(**{**SMALL, "head_dim": 8})])
@pytest.mark.parametrize("pattern", ["", "window:16"])
def test_the_shapes_of_attention_are_known_with_dropout_and_with_sinks(config_of: Any, pattern: str) -> None:
    config = config_of()
    heads, step = config.num_attention_heads, StepConfig(context_tokens=CONTEXT)
    task = TrainingTask(ring_model(config), StdlibText(CONTEXT), step, OptimConfig())
    shapes = attention_shapes(replace(task, pattern=parse_pattern(pattern) if pattern else None))
    assert shapes == ((heads, getattr(config, "num_key_value_heads", heads), config.hidden_size // heads),)


def test_steps_and_places_in_them_differ_and_validation_drops_nothing() -> None:
    assert len({sequence_seed(*place) for place in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1))}) == 5
    masks, x = DropoutMasks(), torch.ones(1, 8, 4)
    assert masks.dropout(x, 0.5, training=False) is x
    with pytest.raises(ValueError, match=r"dropout=0\.5 without the step of the pass: give attention_of\(step=...\)"):
        masks.dropout(x, 0.5)
    masks.begin(type("Ring", (), {"options": type("Options", (), {"sequence_seeds": (1,)})}), torch.arange(8)[None])
    with pytest.raises(ValueError, match=r"dropout=0\.5 of a tensor \(1, 4, 8\), which has not a vector for each of 8"):
        masks.dropout(x.mT, 0.5)
    assert float(masks.dropout(x, 1.0).abs().sum()) == 0.0


def test_modules_that_come_later_take_masks_too_and_transformers_own_stay() -> None:
    ring, plain = ring_model(FAMILIES["functions"]()), T.AutoModelForCausalLM.from_config(FAMILIES["functions"]())
    model: Any = ring()
    late = model.model.layers[1].mlp.late = torch.nn.Dropout(0.5)
    install_masks(model)
    model.dropout_masks.place = dropout._Place(token_keys((1,), torch.arange(8)[None]))
    x = torch.ones(1, 8, 64)
    twice = [late(x), late(x)]
    assert not torch.equal(*twice)
    assert torch.equal(twice[1] == 0, dropped(0.5, model.dropout_masks.place.keys, -1, 1, 64)[None])
    assert "forward" not in vars(plain.model)
    assert type(plain.model).forward is type(model.model).forward
