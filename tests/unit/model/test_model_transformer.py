"""The decoder: rotary positions are relative, heads are grouped, recomputation and FSDP2 change no bit."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastic_ring.model.config import ModelConfig, num_parameters, preset
from elastic_ring.model.init import Initialiser, initialise_module
from elastic_ring.model.loss import language_model_loss
from elastic_ring.model.transformer import AttentionFn, Rotation, Transformer
from elastic_ring.train.task import Batch

TINY = ModelConfig(31, 2, 24, 4, 2, 8, 40, loss_chunk_tokens=5)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def dense_attention(document_ids: Tensor) -> AttentionFn:
    """Causal attention inside each document, on one process. Checks the shapes that the model promises."""
    same = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)
    mask = (same & torch.ones_like(same).tril()).unsqueeze(1)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert k.shape == v.shape == (*q.shape[:2], TINY.num_kv_heads, TINY.head_dim)
        assert q.shape[2:] == (TINY.num_heads, TINY.head_dim)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    return attention


def batch(num_tokens: int = 17, shift: int = 0) -> Batch:
    drawn = torch.randint(0, TINY.vocab_size, (1, num_tokens + 1), generator=torch.Generator().manual_seed(1))
    document_ids = (torch.arange(num_tokens) >= 6).int().unsqueeze(0)
    targets = drawn[:, 1:].clone()
    targets[0, 5] = -100
    positions = torch.arange(num_tokens).unsqueeze(0) + shift
    return Batch(drawn[:, :-1], targets, positions, document_ids, dense_attention(document_ids))


def build(config: ModelConfig = TINY) -> Transformer:
    model = Transformer(config)
    initialise_module(model, Initialiser(0, config.num_layers))
    return model


def logits(model: Transformer, data: Batch) -> Tensor:
    out: Tensor = model(data.tokens, positions=data.positions, document_ids=data.document_ids, attention=data.attention)
    return out


def gradients(model: Transformer, data: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    loss, num_tokens = language_model_loss(model, data)
    assert num_tokens == int((data.targets != -100).sum())
    assert loss.dtype == torch.promote_types(next(model.parameters()).dtype, torch.float32)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_scores_depend_on_the_distance_of_positions_only() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64).unbind()

    def score(at_q: int, at_k: int) -> Tensor:
        turned = [Rotation.at(torch.tensor([[at]]), 16, 10_000.0, torch.float64)(x) for at, x in ((at_q, q), (at_k, k))]
        return (turned[0] * turned[1]).sum()

    for shift in (1, 1000, 10**6):
        torch.testing.assert_close(score(9 + shift, 4 + shift), score(9, 4), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(score(9, 5), score(9, 4))
    torch.testing.assert_close(score(3, 3), (q * k).sum())


def test_angles_stay_sharp_a_million_tokens_in_and_in_bfloat16() -> None:
    near, far = (torch.tensor([[at]]) for at in (5, 5 + 2**20))
    exact, kept = (Rotation.at(far, 128, 500_000.0, dtype) for dtype in (torch.float64, torch.bfloat16))
    assert kept.cos.dtype == torch.float32
    torch.testing.assert_close(kept.sin.double(), exact.sin, rtol=0, atol=1e-7)
    x = torch.randn(1, 1, 2, 128).bfloat16()
    assert Rotation.at(near, 128, 500_000.0, x.dtype)(x).dtype == torch.bfloat16


def test_shifted_positions_give_the_same_logits_and_other_distances_do_not() -> None:
    model = build(replace(TINY, dtype="float64"))
    here, there = logits(model, batch()), logits(model, batch(shift=5000))
    assert here.shape == (1, 17, TINY.vocab_size)
    torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-9)
    spread = replace(batch(), positions=batch().positions * 3)
    assert not torch.allclose(here, logits(model, spread), atol=1e-6)


def test_a_token_reaches_only_later_positions_of_its_own_document() -> None:
    model = build()
    data = batch()
    changed = data.tokens.clone()
    changed[0, 2] = (changed[0, 2] + 1) % TINY.vocab_size
    moved = (logits(model, data) != logits(model, replace(data, tokens=changed))).any(dim=-1).squeeze(0)
    assert moved.tolist() == [2 <= position < 6 for position in range(17)]


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_recomputing_activations_changes_no_bit(tie_embeddings: bool) -> None:
    config = replace(TINY, tie_embeddings=tie_embeddings)
    kept = gradients(build(replace(config, checkpoint_activations=False)), batch())
    calls = 0
    inner = batch().attention

    def counted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return inner(q, k, v)

    again = gradients(build(replace(config, checkpoint_activations=True)), replace(batch(), attention=counted))
    assert calls == 2 * TINY.num_layers  # it really was recomputed
    assert torch.equal(kept[0], again[0])
    assert kept[1].keys() == again[1].keys()
    for name, grad in kept[1].items():
        assert torch.equal(grad, again[1][name]), name


@pytest.mark.parametrize("offload", [False, True])
def test_offloaded_activations_leave_and_come_back_with_the_same_bits(offload: bool) -> None:
    kept = gradients(build(replace(TINY, checkpoint_activations=True)), batch())
    model = build(replace(TINY, checkpoint_activations=True, offload_activations=offload))
    inputs: list[weakref.ref[Tensor]] = []
    for block in model.blocks[1:]:  # the first one's input is looked at by the embedding's backward
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    loss, _ = language_model_loss(model, batch())
    assert [there() is None for there in inputs] == [offload] * (TINY.num_layers - 1)
    loss.backward()
    assert torch.equal(kept[0], loss.detach())
    for name, param in model.named_parameters():
        assert param.grad is not None
        assert torch.equal(kept[1][name], param.grad), name


def test_offloading_what_is_not_kept_is_refused() -> None:
    with pytest.raises(ValueError, match="offload_activations=True moves what checkpointing keeps"):
        replace(TINY, checkpoint_activations=False, offload_activations=True)


def test_the_loss_is_that_of_the_logits() -> None:
    for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-5)):
        model = build(replace(TINY, dtype=dtype))
        data = batch()
        plain = F.cross_entropy(logits(model, data).flatten(0, 1), data.targets.flatten(), reduction="sum")
        loss, _ = language_model_loss(model, data)
        torch.testing.assert_close(loss, plain, rtol=tolerance, atol=0)
        with torch.no_grad():
            assert torch.equal(language_model_loss(model, data)[0], loss)


def test_a_slice_without_targets_still_runs_backward() -> None:
    data = replace(batch(), targets=torch.full((1, 17), -100))
    model = build()
    loss, grads = gradients(model, data)
    assert loss == 0
    assert len(grads) == len(list(model.parameters()))
    assert all(not grad.any() for grad in grads.values())


@pytest.mark.parametrize("settings", [{}, {"offload_activations": True}, {"checkpoint_activations": False}])
def test_slices_of_a_large_model_compute_what_it_computes_whole(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, bool]
) -> None:
    config = replace(TINY, dtype="float64", **settings)
    whole, (loss, grads) = build(config), gradients(build(config), batch())
    monkeypatch.setattr("elastic_ring.model.config.UNIT_PARAMETERS", 500)
    monkeypatch.setattr("elastic_ring.model.config._TILE", 4)
    parted = Transformer(config)
    assert (config.ffn_slices, config.head_slices) == ((8,) * 5, (16, 15))
    assert len(parted.own_units()) == 3
    own = {name: param for name, param in parted.named_parameters() if name in grads}
    with torch.no_grad():
        for name, param in own.items():
            param.copy_(whole.get_parameter(name))
        for name, dim, sizes in joined(config):
            for index, piece in enumerate(whole.get_parameter(f"{name}.weight").split(sizes, dim)):
                parted.get_parameter(sliced(name, index)).copy_(piece)
    torch.testing.assert_close(logits(parted, batch()), logits(whole, batch()), rtol=1e-12, atol=1e-12)
    found, parts = gradients(parted, batch())
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    for name, dim, sizes in joined(config):
        parts[f"{name}.weight"] = torch.cat([parts.pop(sliced(name, index)) for index in range(len(sizes))], dim)
    assert parts.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(parts[name], grad, rtol=1e-11, atol=1e-12, msg=name)


def joined(config: ModelConfig) -> list[tuple[str, int, tuple[int, ...]]]:
    """Matrices that are kept in slices: name, dimension, sizes."""
    ffn = [(f"blocks.{layer}.ffn.{kind}", int(kind == "down")) for layer in range(2) for kind in ("gate", "up", "down")]
    return [("head", 0, config.head_slices), *((name, dim, config.ffn_slices) for name, dim in ffn)]


def sliced(name: str, index: int) -> str:
    """Of a slice of `head` or of a matrix of the feed-forward part."""
    return f"head.{index}.weight" if name == "head" else name.replace(".ffn.", f".ffn.{index}.") + ".weight"


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_the_parameter_count_is_that_of_the_module(tie_embeddings: bool) -> None:
    for config in (TINY, preset("laptop"), preset("100m"), preset("1b"), preset("8b"), preset("1t")):
        wanted = replace(config, tie_embeddings=tie_embeddings)
        if wanted.num_layers > 100:
            wanted = replace(wanted, num_layers=2)
        with torch.device("meta"):
            model = Transformer(wanted)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert not list(model.buffers())
        assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(wanted)


def test_from_meta_it_computes_the_same() -> None:
    with torch.device("meta"):
        model = Transformer(TINY)
    model.to_empty(device="cpu")
    initialise_module(model, Initialiser(0, TINY.num_layers))
    assert torch.equal(logits(model, batch()), logits(build(), batch()))


@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize("checkpoint_activations", [False, True])
def test_under_fsdp2_on_one_rank_no_bit_changes(
    tmp_path: Path, tie_embeddings: bool, checkpoint_activations: bool
) -> None:
    config = replace(TINY, tie_embeddings=tie_embeddings, checkpoint_activations=checkpoint_activations)
    plain = gradients(build(config), batch())
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = build(config)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        loss, grads = gradients(model, batch())
        assert torch.equal(loss, plain[0])
        assert grads.keys() == plain[1].keys()
        for name, grad in grads.items():
            assert torch.equal(grad.to_local(), plain[1][name]), name  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()
