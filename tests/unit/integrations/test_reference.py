"""Before a run a shrunk model is compared with plain transformers: another model is refused by name."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from elastic_ring import ElasticRingTrainer, StepConfig
from elastic_ring.data.source import StdlibText
from elastic_ring.integrations.transformers import RingModel, reference, ring_model
from elastic_ring.integrations.transformers.reference import compared, shrunk
from tests.unit.integrations.test_transformers import FAMILIES, SMALL, llama4, ministral3

T = pytest.importorskip("transformers")

CONTEXT = 4096
RATES = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 301, **RATES}
ABSOLUTE: dict[str, Any] = {
    "norms after the rotation": lambda: T.HunYuanDenseV1Config(**SMALL, head_dim=8),
    "queries scaled by their position": lambda: ministral3(48),
    "an embedding of positions": lambda: T.GPT2Config(**GPT2),
}
OTHER: dict[str, tuple[Any, str]] = {
    "queries scaled by their place in a pass": (lambda: llama4(floor_scale=48), "llama4_text"),
}


@pytest.mark.parametrize("what", OTHER)
def test_what_trains_another_model_is_refused_without_a_table_that_names_it(what: str) -> None:
    config, kind = OTHER[what]
    with pytest.raises(ValueError, match=rf"'{kind}': on a ring it would train another .* differs by .* choose"):
        compared(ring_model(config()), CONTEXT)


@pytest.mark.parametrize("what", ABSOLUTE)
def test_positions_restart_at_documents_where_the_model_sees_absolute_ones(what: str) -> None:
    ring, plain = ring_model(ABSOLUTE[what]()), ring_model(FAMILIES["qwen2"]())
    step = StepConfig(context_tokens=64, global_batch=4)
    trainer = ElasticRingTrainer(ring, StdlibText(64), step_config=step)
    assert repr(trainer.task.model) == repr(ring).replace(")", ", positions='document')")
    assert ring_model(FAMILIES["qwen2"]()).ring_parts(step).model is None
    assert "positions" not in repr(plain), "runs on record go on"


def test_a_context_longer_than_the_table_of_positions_is_refused() -> None:
    ring = ring_model(ABSOLUTE["an embedding of positions"]())
    with pytest.raises(ValueError, match="'gpt2': context_tokens=1025 is more than the 1024 positions of its table"):
        ring.ring_parts(StepConfig(context_tokens=1025))


def test_lengths_that_the_context_does_not_reach_change_nothing() -> None:
    ring = ring_model(ministral3(48))
    assert compared(ring, 48) is ring


@pytest.mark.parametrize("family", ["phimoe, windows in masks", "mistral"])
def test_windows_are_compared_unless_the_user_wants_none(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = ring_model(FAMILIES[family]())
    compared(ring, CONTEXT)
    compared(replace(ring, windows="dense"), CONTEXT)
    monkeypatch.setattr(RingModel, "pattern", lambda *_: None)
    reference._worst.cache_clear()
    with pytest.raises(ValueError, match="it would train another model than transformers: the gradient of"):
        compared(ring, CONTEXT)


def test_a_run_compares_once_and_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, state, number = ring_model(FAMILIES["gemma3"]()), torch.get_rng_state(), torch.get_num_threads()
    reference._worst.cache_clear()
    for context in (2048, CONTEXT, CONTEXT):
        ring.ring_parts(StepConfig(context_tokens=context))
    assert reference._worst.cache_info().misses == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == number


def medium() -> Any:
    stack = ExitStack()
    stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("medium")
    return stack


SETTINGS = {
    "coarse products": medium,
    "another device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "bf16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_the_process_has_set_refuses_no_model(name: str) -> None:
    ring = ring_model(FAMILIES["llama, tied"]())
    reference._worst.cache_clear()
    with SETTINGS[name]():
        assert compared(ring, CONTEXT) is ring


def test_layers_that_differ_by_a_number_are_two_kinds() -> None:
    ring = ring_model(T.SmolLM3Config(**{**SMALL, "num_hidden_layers": 8}))
    assert ring.num_compared_layers == 8, "its fourth and eighth layers have no rotation"


def test_what_cannot_be_compared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = ring_model(FAMILIES["llama, tied"]())
    monkeypatch.setattr(reference, "_fill", lambda _: 1 // 0)
    reference._worst.cache_clear()
    with pytest.raises(ValueError, match=r"'llama': a small model .* cannot be compared .* \(ZeroDivisionError"):
        ring.ring_parts(StepConfig(context_tokens=32))
    monkeypatch.undo()
    ring.ring_parts(StepConfig(context_tokens=32))


def test_a_shrunk_model_has_two_layers_of_each_kind_and_small_sizes() -> None:
    config = T.Gemma3TextConfig(num_hidden_layers=34, hidden_size=2560, sliding_window=1024, layer_types=None)
    ring = ring_model(config)
    small = shrunk(json.loads(ring.config_json), CONTEXT, ring.num_compared_layers, is_dense=False)
    assert (small["num_hidden_layers"], small["hidden_size"], small["sliding_window"]) == (12, 64, 16)
    assert small["layer_types"] == config.layer_types[:12]
