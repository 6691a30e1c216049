"""Liger's kernels on a GPU: loss, gradients and layers beside torch's own operators, and the same bits each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from elastic_ring.model import liger
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.init import Initialiser, initialise_module
from elastic_ring.model.loss import chunked_cross_entropy
from elastic_ring.model.transformer import Transformer

pytest.importorskip("liger_kernel")

GPU = torch.device("cuda", 0)
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 3e-2}  # fp32 products may be of TF32
NUM_TOKENS = 512


@pytest.fixture(params=list(TOLERANCES), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def assert_close(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert (a.double() - b.double()).norm() <= TOLERANCES[dtype] * b.double().norm() + 1e-6


def without(monkeypatch: pytest.MonkeyPatch, compute: Callable[[], list[Tensor]]) -> list[Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(liger, "kernels", lambda: None)
        return compute()


def loss_of(dtype: torch.dtype, softcap: float | None) -> list[Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, 256, device=GPU).to(dtype).requires_grad_()
    weight = (torch.randn(1000, 256, device=GPU) * 0.1).to(dtype).requires_grad_()
    targets = torch.randint(0, 1000, (NUM_TOKENS,), device=GPU)
    targets[5:90] = -100
    loss_sum, count = chunked_cross_entropy(hidden, weight, targets, 128, softcap=softcap)
    (loss_sum * 0.9).backward()
    with torch.no_grad():
        validated, _ = chunked_cross_entropy(hidden.detach(), weight, targets, 128, softcap=softcap)
    assert hidden.grad is not None
    assert weight.grad is not None
    return [loss_sum.detach(), validated, count, hidden.grad, weight.grad]


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_loss_and_its_gradients_are_those_of_our_own_function(dtype, softcap, monkeypatch):
    wanted = without(monkeypatch, lambda: loss_of(dtype, softcap))
    found = loss_of(dtype, softcap)
    assert_close(found, wanted, dtype)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(loss_of(dtype, softcap), found, strict=True))


def test_a_frozen_body_still_gives_the_head_its_gradient():
    weight = torch.randn(64, 32, device=GPU, requires_grad=True)
    loss_sum, _ = chunked_cross_entropy(torch.randn(9, 32, device=GPU), weight, torch.arange(9, device=GPU), 4)
    loss_sum.backward()
    assert weight.grad is not None


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    times = q.size(2) // k.size(2)
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(times, 2), v.repeat_interleave(times, 2)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def pass_of(model: Any) -> list[Tensor]:
    tokens = (torch.arange(NUM_TOKENS, device=GPU) * 7 % 500).unsqueeze(0)
    positions = torch.arange(NUM_TOKENS, device=GPU).unsqueeze(0) + 1000
    loss, _ = model(tokens, positions=positions, document_ids=tokens, attention=attend, targets=tokens)
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters())]


def decoder(dtype: torch.dtype, checkpoint: bool) -> list[Tensor]:
    model = Transformer(ModelConfig(500, 2, 256, 4, 2, 64, 768, checkpoint_activations=checkpoint))
    initialise_module(model, Initialiser(0, 2))
    return pass_of(model.to(GPU, dtype))


def test_the_decoder_computes_what_it_does_without(dtype, monkeypatch):
    wanted = without(monkeypatch, lambda: decoder(dtype, True))
    found = decoder(dtype, True)
    assert_close(found, wanted, dtype)
    for checkpoint in (True, False):
        assert all(torch.equal(a, b) for a, b in zip(decoder(dtype, checkpoint), found, strict=True))


def test_a_pass_does_not_wait_for_the_device():
    model = Transformer(ModelConfig(500, 2, 256, 4, 2, 64, 768, checkpoint_activations=False))
    initialise_module(model, Initialiser(0, 2))
    model.to(GPU, torch.bfloat16)
    pass_of(model)  # compiles
    model.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pass_of(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Phi3", "Olmo2", "Gemma"])
def test_transformers_models_compute_what_they_do_without(family, dtype, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from elastic_ring.integrations.transformers.module import build, checkpoint_layers

    def compute() -> list[Tensor]:
        config = getattr(transformers, f"{family}Config")(
            vocab_size=500,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        model = build(config)
        checkpoint_layers(model)
        return pass_of(model.to(GPU, dtype))

    wanted = without(monkeypatch, compute)
    found = compute()
    assert_close(found, wanted, dtype)
    assert all(torch.equal(a, b) for a, b in zip(compute(), found, strict=True))
