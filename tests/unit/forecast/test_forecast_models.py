"""What is forecast of: a model folder's sizes by its config alone, and what a pattern leaves of a ring's attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.cli.forecasts import command
from elastic_ring.cli.forecasts.attention import attention_of, read
from elastic_ring.cli.forecasts.folders import sizes_of
from elastic_ring.cli.settings import parse
from elastic_ring.config import ScalingConfig, StepConfig
from elastic_ring.forecast.sizing import step_time
from elastic_ring.forecast.sizing.machines import efficiency_of
from elastic_ring.forecast.sizing.step_time import Latent, job_of
from elastic_ring.gpus import GPUS
from elastic_ring.model.config import KNOWN_TYPES, ModelConfig, preset

CONTEXT = 64
SMALL: dict[str, Any] = {
    **{"vocab_size": 301, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1},
    **{"topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
    **{"v_head_dim": 16, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0], "n_routed_experts": 6},
    **{"num_local_experts": 6, "num_experts": 6, "moe_num_experts": 6, "sliding_window": 24, "attention_dropout": 0.0},
    **{"attn_logit_softcapping": None, "use_sliding_window": True, "max_window_layers": 2, "moe_k": 2},
    "n_shared_experts": 1,
}
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_key_value_heads": 4, "topk_method": "greedy"},
    "deepseek_v3": {"num_key_value_heads": 4},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
"""What a family needs in place of these."""


def same(patterns: LayerPatterns | None, wanted: LayerPatterns | None, num_layers: int) -> bool:
    if patterns is None or wanted is None:
        return patterns is wanted
    return all(patterns.of_layer(layer).rules == wanted.of_layer(layer).rules for layer in range(num_layers))


@pytest.mark.parametrize("windows", ["exact", "blocks"])
@pytest.mark.parametrize("kind", sorted(KNOWN_TYPES))
def test_a_folder_has_the_sizes_and_windows_of_its_module(kind: str, windows: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from elastic_ring.integrations.transformers import ring_model

    known = transformers.CONFIG_MAPPING[kind]()
    sizes = {key: value for key, value in SMALL.items() if hasattr(known, key)}
    type(known)(**sizes | OWN.get(kind, {})).save_pretrained(tmp_path)
    asked = parse(["--model-folder", str(tmp_path), "--context", str(CONTEXT), "--windows", windows])
    model, patterns, number, latent = sizes_of(asked)
    made = ring_model(tmp_path, checkpoint_activations=asked.model.checkpoint_activations, windows=windows)
    assert model == made.sizes()
    assert same(patterns, made.pattern(CONTEXT), model.num_layers)
    assert (latent is not None) == kind.startswith("deepseek")
    assert made.latent == (0 if latent is None else latent.numbers)
    if latent is not None:
        assert latent == Latent(16 + 8, made().model.layers[0].self_attn.kv_b_proj.weight.numel())
        assert number == pytest.approx(made.num_parameters, rel=1e-3), "but for the router's biases"
    if kind.startswith("gemma"):  # as published
        plain = json.loads((tmp_path / "config.json").read_text())
        plain.pop("layer_types", None)
        (tmp_path / "config.json").write_text(json.dumps(plain))
        assert same(sizes_of(asked)[1], made.pattern(CONTEXT), model.num_layers)


def with_config(folder: Path, kind: str, **keys: Any) -> ModelConfig:
    """A folder's sizes where its config has these keys; ... stands for one that it does not have."""
    plain = {key: value for key, value in (SMALL | {"model_type": kind} | keys).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(plain))
    return sizes_of(parse(["--model-folder", str(folder), "--context", str(CONTEXT)]))[0]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"v_head_dim": ...}, "config.json has no v_head_dim"),
        ({"qk_rope_head_dim": None}, "config.json has no qk_rope_head_dim"),
        ({"sliding_window": -1}, "tokens=-1: must be at least 1"),
    ],
)
def test_a_config_that_does_not_say_a_size_is_refused_by_folder_and_name(
    keys: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"--model-folder {tmp_path}: .*{problem}"):
        with_config(tmp_path, "deepseek_v3", layer_types=["sliding_attention"], **keys)


def test_zeros_and_layers_that_no_model_has_are_values(tmp_path: Path) -> None:
    dense = {"first_k_dense_replace": ..., "mlp_only_layers": []}
    for last, num_dense in ((0, 3), (10**12, 0), (-1, 0)):
        model = with_config(tmp_path, "ernie4_5_moe", moe_layer_end_index=last, **dense)
        assert model.num_dense_layers == num_dense
    assert with_config(tmp_path, "deepseek_v3", first_k_dense_replace=-(10**12)).num_dense_layers == 1
    shared = [with_config(tmp_path, "qwen2_moe", shared_expert_intermediate_size=n).shared_width for n in (0, 48, ...)]
    assert shared == [0, 48, 16]
    tied = [with_config(tmp_path, "gemma2", tie_word_embeddings=tie, num_experts=0) for tie in (None, True, ...)]
    assert [model.tie_embeddings for model in tied] == [False, True, True]


@pytest.mark.parametrize("text", ["window:512", "bigbird:5,0,5", "sinks:64+window:300", "longnet:512/1,2048/4,unit=64"])
def test_a_pattern_is_counted_by_its_plan(text: str) -> None:
    model, step = preset("1b"), StepConfig(steps=1, global_batch=1, context_tokens=8192)
    found = attention_of(read(text, model), model, step, model.num_kv_heads)(4)
    layout, patterns = make_layout("zigzag", 8192, 4), read(text, model)
    rules = patterns.of_layer(0).heads(model.num_heads, model.num_kv_heads)
    plan = plan_sparse(SparsePattern(rules), layout, model.num_heads, model.num_kv_heads)
    received = [plan.received_bytes(rank, model.head_dim, 2) for rank in range(4)]
    work = [plan.work(rank) for rank in range(4)]
    whole = 3 * 2 * model.num_kv_heads * model.head_dim * 2 * 2048
    assert found.density == pytest.approx(patterns.density(8192, model.num_layers, model.num_heads, model.num_kv_heads))
    assert found.slowest == pytest.approx(4 * max(work) / sum(work))
    assert min(received) <= found.fetched * whole * (1 + 1e-9)
    assert found.fetched * whole == pytest.approx(max(received), rel=0.1), "of the first, middle and last rank"


def test_a_pattern_makes_a_step_shorter_and_content_is_told_as_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--preset", "8b", "--dp", "64", "--global-batch", "64"]
    steps = {}
    for text in ("dense", "window:4096;dense@3", "window:4096", "topk:8+window:512"):
        assert command.main([*run, "--pattern", text]) == 0
        out = capsys.readouterr().out
        steps[text] = float(out.split("step ")[1].split()[0])
        assert ("at most" in out) == text.startswith("topk")
    assert command.main([*run, "--linears", "fp8"]) == 0
    assert "warning: --linears fp8" in capsys.readouterr().out
    dense, mixed, window, _ = steps.values()
    assert window < mixed < dense


def test_hops_of_latents_are_shorter_and_their_projection_is_counted() -> None:
    """The attention of DeepSeek-V3 as released: 576 numbers in place of 2 x 128 heads of 192."""
    model = ModelConfig(129280, 61, 7168, 128, 128, 192, 18432)
    scaling = ScalingConfig(cp=512, device="cuda")
    step = StepConfig(steps=1, global_batch=1, context_tokens=1 << 20, param_dtype="bfloat16")
    latent = Latent(512 + 64, 512 * 128 * (128 + 128))
    gpu, eff = GPUS["H100-80"], efficiency_of("hopper")
    keys, ours = (job_of(model, scaling, step, latent=one) for one in (None, latent))
    assert keys.carried[0] / ours.carried[0] == pytest.approx(85.3, abs=0.1)
    there, back = step_time.hop_times_s(ours, gpu, eff, 8)
    latency = 511 * step_time.MESSAGE_S
    assert (step_time.hop_times_s(keys, gpu, eff, 8)[0] - latency) / (there - latency) == pytest.approx(85.3, abs=0.1)
    assert back == 2 * there
    parts = [step_time.step_time(job, gpu, eff).parts["matrix products"] for job in (keys, ours)]
    # Twice in products, and twice again for gradients, of each fetched token of each layer.
    matmul = gpu.peak_flops * eff.matmul / (1 + eff.half_width / model.width)
    assert parts[1] - parts[0] == pytest.approx(61 * 4 * 2 * latent.parameters * 511 * 2048 / matmul)


@pytest.mark.parametrize(("keeps", "recompute"), [(True, "none"), (False, "all but attention")])
def test_a_step_that_keeps_activations_recomputes_nothing(keeps: bool, recompute: str) -> None:
    scaling = ScalingConfig(dp=2, cp=1, device="cuda", keep_activations=keeps)
    step = StepConfig(steps=1, global_batch=2, context_tokens=8192, param_dtype="bfloat16")
    assert job_of(preset("1b"), scaling, step).recompute == recompute
