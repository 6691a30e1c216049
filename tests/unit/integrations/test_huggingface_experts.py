"""Mixture-of-experts models of transformers: its loss and gradients on rings, its folders in and out bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from elastic_ring import ElasticRingTrainer, OptimConfig, RunConfig, ScalingConfig, StepConfig, load_weights
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.data.loader import slice_sample
from elastic_ring.data.packing import Sample
from elastic_ring.data.source import StdlibText
from elastic_ring.forecast.sizing.memory import plan_of
from elastic_ring.integrations.transformers import export, ring_model
from elastic_ring.integrations.transformers.model import FirstValues
from elastic_ring.integrations.transformers.weights import SINGLE
from elastic_ring.model.config import ModelConfig, active_parameters, num_parameters
from elastic_ring.model.loss import language_model_loss
from elastic_ring.state.checkpoints.weight_files import WEIGHTS
from elastic_ring.train.task import TrainingTask, attention_of, batch_of
from elastic_ring.train.wrap import largest_list
from tests.unit.attention.attention_rings import ThreadRings, in_threads
from tests.unit.integrations.test_transformers import CONTEXT, SMALL, filled

T = pytest.importorskip("transformers")

ALIKE = {**SMALL, "num_hidden_layers": 2, "num_experts_per_tok": 2}
WIDTH = {"moe_intermediate_size": 16}
ROUTED = {**ALIKE, **WIDTH, "n_routed_experts": 6, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
FAMILIES: dict[str, Any] = {
    "mixtral": lambda: T.MixtralConfig(**ALIKE, num_local_experts=6),
    "mixtral, balanced": lambda: T.MixtralConfig(
        **ALIKE, num_local_experts=6, output_router_logits=True, router_aux_loss_coef=0.5
    ),
    "qwen2_moe": lambda: T.Qwen2MoeConfig(**ALIKE, **WIDTH, num_experts=6, shared_expert_intermediate_size=32),
    "qwen3_moe": lambda: T.Qwen3MoeConfig(**ALIKE, **WIDTH, num_experts=6, head_dim=8, mlp_only_layers=[0]),
    "olmoe": lambda: T.OlmoeConfig(**ALIKE, num_experts=6),
    "granitemoe": lambda: T.GraniteMoeConfig(**ALIKE, num_local_experts=6, logits_scaling=3.0),
    "glm4_moe": lambda: T.Glm4MoeConfig(**ROUTED, head_dim=8, n_shared_experts=1),
    "dots1": lambda: T.Dots1Config(**ROUTED, head_dim=8, n_shared_experts=1),
    "ernie4_5_moe": lambda: T.Ernie4_5_MoeConfig(**{**SMALL, **WIDTH}, moe_num_experts=6, moe_k=2),
    "ernie4_5_moe, biased": lambda: T.Ernie4_5_MoeConfig(
        **{**SMALL, **WIDTH}, moe_num_experts=6, moe_k=2, use_bias=True
    ),
    "gpt_oss": lambda: T.GptOssConfig(
        **ALIKE,
        head_dim=8,
        num_local_experts=6,
        sliding_window=24,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "deepseek_v3": lambda: T.DeepseekV3Config(**{**ROUTED, **LATENT, "num_key_value_heads": 4}),
    "deepseek_v2": lambda: T.DeepseekV2Config(
        **{**ROUTED, **LATENT, "num_key_value_heads": 4, "q_lora_rank": None, "topk_method": "greedy"}
    ),
}


@pytest.mark.thinned(num=11)
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_on_a_ring_are_those_of_transformers(family: str, cp: int) -> None:
    config = FAMILIES[family]()
    model, layout = ring_model(config, loss_chunk_tokens=24), make_layout("zigzag", CONTEXT, cp)
    step, pattern = StepConfig(context_tokens=CONTEXT), model.pattern(CONTEXT)
    task = TrainingTask(model, StdlibText(CONTEXT), step, OptimConfig(), pattern=pattern)
    ours, groups = [filled(model).train() for _ in range(cp)], ThreadRings().groups(cp)
    sample = Sample(torch.randint(0, 301, (CONTEXT + 1,)).numpy(), (0,))

    def work(cp_rank: int) -> torch.Tensor:
        piece = slice_sample(sample, layout, cp_rank, sample_id=0, index_in_batch=0)
        ring = attention_of(task, piece, layout, cp_rank, groups[cp_rank] if cp > 1 else None)
        loss, _ = language_model_loss(ours[cp_rank], batch_of(piece, ring, torch.device("cpu")))
        loss.backward()
        if family.startswith("deepseek"):  # in each layer 24 numbers a token crossed, where K and V have 192
            hops = [size for (way, _), size in ring.ledger.received_bytes.items() if way == "forward"]
            assert sum(hops) == 2 * ring.schedule.received_bytes(cp_rank, 12, 4, kv_heads=1)
            planned = plan_of(model.sizes(), ScalingConfig(cp=cp), step, built_in=False, latent=model.latent).memory
            slots = (0, 1, 0, 2)[cp - 1]
            if cp_rank == 0:  # which fetches all keys
                assert planned.activations.hop_buffers == 3 * slots * max(hops, default=0) / 2
        return loss.detach()

    loss = torch.stack(in_threads(cp, work)).sum()
    theirs = T.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).train()
    theirs.load_state_dict(ours[0].state_dict())
    tokens = torch.from_numpy(sample.tokens)
    found = theirs(tokens[None, :-1], use_cache=False)
    expected = F.cross_entropy(found.logits[0], tokens[1:], reduction="sum")
    if config.to_dict().get("output_router_logits"):
        expected = expected + config.router_aux_loss_coef * found.aux_loss * CONTEXT
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-3)
    for (name, param), *others in zip(theirs.named_parameters(), *(one.parameters() for one in ours), strict=True):
        if param.grad is not None:  # ERNIE's correction biases have none
            error = (sum(each.grad for each in others) - param.grad).norm() / param.grad.norm().clamp_min(1e-6)
            assert float(error) < 1e-4, name


@pytest.mark.thinned(num=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mixtral, balanced"])
def test_a_folder_goes_in_and_comes_out_bit_for_bit(
    tmp_path: Path, family: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts lie in it one by one; the correction bias that nothing trains is among the rest, in fp32 like routers."""
    torch.manual_seed(0)
    saved = T.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype)
    biases = {name: value for name, value in saved.state_dict().items() if name.endswith("correction_bias")}
    assert bool(biases) == family.startswith(("glm4_moe", "dots1", "ernie4_5_moe", "deepseek_v3"))
    for bias in biases.values():
        bias.normal_()
    saved.save_pretrained(tmp_path / "in", max_shard_size="30KB")
    model, run = ring_model(tmp_path / "in"), tmp_path / "run"
    assert model.weights is not None
    step = StepConfig(context_tokens=32, global_batch=4)
    trainer = ElasticRingTrainer(model, StdlibText(32), step_config=step, run_config=RunConfig("run", run_dir=str(run)))
    trainer.submission().write_record()
    whole = dict(model().named_parameters())
    values = {name: model.weights.tensor(name, param.shape) for name, param in whole.items()}
    for name, param in saved.named_parameters():
        assert torch.equal(values[name], param), name
        if param.dim() == 3:
            assert torch.equal(model.weights.tensor(name, param.shape, rows=(2, 5)), param[2:5]), name
    save_file(values, run / WEIGHTS, metadata={"format": "pt", "sha256": ""})
    trained = model()
    caplog.clear()
    load_weights(trained, run)
    named = {name for name, _ in saved.named_buffers() if name in biases}
    assert all(name in caplog.text for name in named), "a run keeps no buffers"
    assert ("has no buffers" in caplog.text) == bool(named)
    assert all(torch.equal(value, trained.state_dict()[name]) for name, value in biases.items())
    export(run, tmp_path / "out", dtype=str(dtype).removeprefix("torch."), max_file_size="30KB")
    stored = {
        name: value for file in (tmp_path / "in").glob("*.safetensors") for name, value in load_file(file).items()
    }
    written = {
        name: value for file in (tmp_path / "out").glob("*.safetensors") for name, value in load_file(file).items()
    }
    assert written.keys() == stored.keys()
    for file in (tmp_path / "out").glob("*.safetensors"):
        held = load_file(file).values()
        assert len(held) == 1 or sum(value.nbytes for value in held) <= 30_000, "experts of one layer, too"
    assert all(
        torch.equal(written[name], value) and written[name].dtype == value.dtype for name, value in stored.items()
    )
    loaded = T.AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in saved.state_dict().items())


def test_experts_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    T.AutoModelForCausalLM.from_config(FAMILIES["mixtral"]()).save_pretrained(tmp_path)
    stored = load_file(tmp_path / SINGLE)
    one = next(name for name in stored if ".1." in name and name.endswith("experts.3.w2.weight"))
    for change, told in (
        (stored | {one: torch.ones(32, 65)}, r"down_proj: .*experts\.3\.w2\.weight \(32, 65\) instead of \(32, 64\)"),
        ({name: value for name, value in stored.items() if name != one}, "has 5 rows instead of 6"),
        ({name: value for name, value in stored.items() if name != one.replace("w2", "w1")}, "some are missing"),
    ):
        save_file(change, tmp_path / SINGLE, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=told):
            ring_model(tmp_path)


def test_a_rank_draws_its_own_experts_only_and_they_are_rows_of_the_whole() -> None:
    first = ring_model(FAMILIES["qwen3_moe"]()).ring_parts(StepConfig(context_tokens=32)).initial
    assert isinstance(first, FirstValues)
    name = "model.layers.1.mlp.experts.down_proj"
    whole = first.tensor(name, (6, 32, 16))
    assert torch.equal(first.tensor(name, (6, 32, 16), rows=(2, 4)), whole[2:4])
    assert len({tuple(expert.flatten().tolist()) for expert in whole}) == 6
    assert float(whole.std()) == pytest.approx(0.02, rel=0.1), "transformers' own rule"
    # 8 of 6,000,000 experts: the whole would be 12 TB.
    assert first.tensor(name, (6_000_000, 32, 16), rows=(8, 16)).shape == (8, 32, 16)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_in_all_and_for_a_token(family: str) -> None:
    model = ring_model(FAMILIES[family]())
    sizes = model.sizes()
    built = sum(param.numel() for param in model().parameters())
    assert (sizes.num_experts, sizes.experts_per_token) == (6, 2)
    if not family.startswith("deepseek"):  # whose projections to latents our decoder does not have
        assert num_parameters(sizes) == pytest.approx(built, rel=0.03), "norms, gates and biases apart"
    assert model.num_parameters == built
    assert f"{built:,} parameters" in model.description()
    layers = sizes.num_layers - sizes.num_dense_layers
    assert num_parameters(sizes) - active_parameters(sizes) == 4 * 3 * 32 * sizes.expert_width * layers
    memory = plan_of(sizes, ScalingConfig(), StepConfig(), built_in=False, num_own=built).memory
    assert (memory.num_parameters, memory.units.table) == (built, sizes.vocab_size * sizes.width)
    blocks = [sum(param.numel() for param in block.parameters()) for block in largest_list(model())]
    assert memory.units.block == pytest.approx(max(blocks), rel=0.02), "also where attention has latents"


def test_the_plan_of_a_released_shape_counts_what_its_name_says() -> None:
    config = T.Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
    )
    sizes: ModelConfig = ring_model(config).sizes()
    assert (num_parameters(sizes), active_parameters(sizes)) == (
        pytest.approx(30.5e9, rel=0.01),
        pytest.approx(3.35e9, rel=0.01),
    )
    assert sizes.loss_chunk_tokens == 1024


def test_latent_attention_counts_what_it_multiplies() -> None:
    model = ring_model(T.DeepseekV3Config())
    assert model.num_parameters == pytest.approx(671e9, rel=0.001)
    dense = model.flops(4096, density=0.0) / (6 * 4096)
    assert dense == pytest.approx(36.6e9, rel=0.02), "37.6 of which the embedding is only read"
    attention = model.flops(4096) - model.flops(4096, density=0.0)
    assert attention == pytest.approx(6 * 4096**2 * 128 * (192 + 128) / 2 * 61)
