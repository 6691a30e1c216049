"""Where Liger's kernels are not used: CPUs, fp64, the meta device; and that only known layers are changed."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from elastic_ring.model import liger, loss
from elastic_ring.model.memory import rows_of_logits


@pytest.mark.parametrize("of_a_folder", [False, True])
def test_peft_is_hidden_from_ligers_import_unless_the_task_imports_transformers(
    of_a_folder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "elastic_ring.integrations.transformers"
    for name in ("peft", module):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if of_a_folder:
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    with liger._without_peft():
        assert ("peft" in sys.modules) != of_a_folder
    assert "peft" not in sys.modules


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tensors_that_are_not_on_a_gpu_never_fit(device: str, dtype: torch.dtype) -> None:
    assert not liger.fits(torch.empty(2, 3, device=device, dtype=dtype))


class OnGpu:
    """What `fits` asks of a tensor, as one on a GPU would answer."""

    def __init__(self, dtype: torch.dtype, size: int = 6) -> None:
        self.is_cuda, self.dtype, self.size = True, dtype, size

    def numel(self) -> int:
        return self.size


def test_fp64_mixed_types_empty_tensors_and_a_missing_package_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: Any = object()
    monkeypatch.setattr(liger, "kernels", lambda: kernels)
    half, wide = OnGpu(torch.bfloat16), OnGpu(torch.float32)
    fits: Any = liger.fits
    assert fits(half, half)
    assert fits(wide)
    assert not fits(OnGpu(torch.float64))
    assert not fits(half, wide)
    assert not fits(half, OnGpu(torch.bfloat16, 0))
    assert not fits(half, torch.empty(2, dtype=torch.bfloat16))
    monkeypatch.setattr(liger, "kernels", lambda: None)
    assert not fits(half, half)


@pytest.mark.parametrize(
    ("num_tokens", "chunk_tokens", "wanted"),
    [
        (8_192, 1_024, True),
        (8_192, 128, True),  # 512 rows of bf16 are less than 128 of our own, twelve bytes a logit
        (32_768, 128, False),  # as a memory relief asks
        (131_072, 1_024, False),
    ],
)
def test_a_loss_whose_logits_would_need_more_memory_stays_in_chunks(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, chunk_tokens: int, wanted: bool
) -> None:
    monkeypatch.setattr(liger, "fits", lambda *tensors: True)
    hidden = torch.empty(num_tokens, 2_048, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(32_000, 2_048, device="meta", dtype=torch.bfloat16, requires_grad=True)
    assert loss._is_for_liger(hidden, weight, chunk_tokens) is wanted
    assert not loss._is_for_liger(hidden.detach(), weight, chunk_tokens), "the weight would get no gradient"


def test_rows_of_logits_are_as_many_as_fill_the_memory_of_the_hidden_states() -> None:
    assert rows_of_logits(8_192, 32_000, 2_048) == 512
    assert rows_of_logits(1_000, 128_256, 4_096) == 32
    assert rows_of_logits(10, 16, 32) == 10


def test_layers_of_one_transformers_model_change_and_its_class_stays() -> None:
    transformers = pytest.importorskip("transformers")
    from elastic_ring.integrations.transformers.module import build

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    model: Any = build(config)
    layer, x = model.model.layers[0], torch.randn(1, 5, 16)
    for module in (layer.mlp, layer.input_layernorm):
        assert "forward" in vars(module)
        assert torch.equal(module(x), type(module).forward(module, x))
    other: Any = transformers.LlamaForCausalLM(config).model.layers[0]
    assert not any("forward" in vars(module) for module in other.modules())
    own = layer.self_attn.forward.__func__.__globals__
    usual = inspect.unwrap(type(layer.self_attn).forward).__globals__
    assert own["apply_rotary_pos_emb"] is not usual["apply_rotary_pos_emb"]
