"""A saved model with experts trains on rings through a killed worker, and comes back as transformers loads it."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from elastic_ring import (
    CheckpointConfig,
    ElasticRingTrainer,
    OptimConfig,
    Result,
    RunConfig,
    ScalingConfig,
    StepConfig,
    load_weights,
)
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.ring import RingAttention
from elastic_ring.cli import main as command
from elastic_ring.data.preparation.prepare import PrepareConfig, prepare
from elastic_ring.data.source import StdlibText
from elastic_ring.integrations.transformers import ring_model
from elastic_ring.state.checkpoints.stored_weights import StoredWeights
from tests.ray.conftest import ROOT, Heard, bits, finished, ran, tiny_trainer
from tests.small_models import small_config
from tests.unit.integrations.test_export_patterns import check_same, load

transformers = pytest.importorskip("transformers")

CONTEXT, STEPS = 96, 4


def saved(parent: Path, name: str, config: Any) -> Path:
    """Random values, saved in bfloat16 in several files."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(parent / name, max_shard_size="30KB")
    assert len(list((parent / name).glob("*.safetensors"))) > 1
    return parent / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tied Qwen3-MoE. Its first layer has no experts; of the second's five a rank has three."""
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
    config = small_config("Qwen3Moe", **experts, head_dim=8)
    return saved(tmp_path_factory.mktemp("model"), "qwen3-moe", config)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small DeepSeek-V2, whose hops carry latents."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
    widths = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    others = {"topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, "tie_word_embeddings": False}
    config = small_config("DeepseekV2", **experts, **widths, **others)
    return saved(tmp_path_factory.mktemp("model"), "deepseek-v2", config)


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config("Starcoder2", residual_dropout=0.2, embedding_dropout=0.1)
    return saved(tmp_path_factory.mktemp("model"), "starcoder2", config)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of the same sizes."""
    return saved(tmp_path_factory.mktemp("model"), "llama", small_config())


def fit(
    folder: Path,
    runs: Path,
    name: str,
    faults: str = "",
    dtype: Any = "bfloat16",
    lora: str | None = None,
    resume: str = "auto",
    every_steps: int | None = None,
    **scaling: Any,
) -> Result:
    """Four steps that compute in `dtype` over fp32 masters, with activation checkpointing."""
    heard = Heard()
    trainer = ElasticRingTrainer(
        ring_model(folder, lora=lora),
        StdlibText(CONTEXT),
        step_config=StepConfig(steps=STEPS, global_batch=4, context_tokens=CONTEXT, param_dtype=dtype),
        optim_config=OptimConfig(peak_lr=1e-2, total_steps=STEPS),
        scaling_config=ScalingConfig(dp=2, cp=2, resources_per_worker={"CPU": 0.25}, **scaling),
        run_config=RunConfig(
            name,
            run_dir=str(runs / name),
            faults=faults,  # type: ignore[arg-type]
            progress=False,
            resume=resume,
            checkpoint_config=CheckpointConfig(every_steps=every_steps),
        ),
        callbacks=[heard],
    )
    result = finished(trainer)
    heard.check(result.summary)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "latent", "dropping"])
def test_a_saved_model_with_experts_or_dropout_trains_through_a_kill_and_has_the_bits_of_the_undisturbed_run(
    local_ray, kind, request, tmp_path
):
    folder: Path = request.getfixturevalue(kind)
    calm = fit(folder, tmp_path, "hf-calm", spares=0)
    struck = fit(folder, tmp_path, "hf-struck", "kill@step=1,phase=backward,rank=3", spares=1)
    assert bits(struck.summary) == bits(calm.summary)
    assert [recovery["action"] for recovery in struck.summary["recoveries"]] == ["spare took its place"]

    out = tmp_path / "out"
    assert command(["export", str(struck.path), "--format", "huggingface", "--out", str(out)]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    trained = ring_model(folder)()
    load_weights(trained, struck.weights)
    trained.to(torch.bfloat16).eval()
    before = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokens, positions = torch.randint(0, 257, (1, CONTEXT)), torch.arange(CONTEXT)[None]
    ring = RingAttention(plan(Pattern(), make_layout("zigzag", CONTEXT, 1)), 0, None)
    with torch.no_grad():
        expected = trained(tokens, positions=positions, document_ids=positions, attention=ring)
        torch.testing.assert_close(loaded(tokens).logits, expected, rtol=0.02, atol=0.02)
        assert (before(tokens).logits - expected).abs().max() > 0.1, "it has learned something"


@pytest.mark.slow
def test_a_presets_run_comes_back_as_a_llama_with_the_same_logits_and_greedy_tokens(local_ray, tmp_path):
    trainer = tiny_trainer(tmp_path, "preset", dp=1, spares=0, steps=4)
    result = trainer.fit()
    assert command(["export", str(result.path), "--out", str(tmp_path / "out")]) == 0
    trained = trainer.task.model()
    load_weights(trained, result.weights)
    loaded = load(tmp_path / "out")
    check_same(loaded, trained.eval(), num_tokens=CONTEXT)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("def f(): ±")["input_ids"] == list("def f(): ±".encode())
    assert (loaded.config.eos_token_id, tokenizer.eos_token_id) == (256, 256)


@pytest.mark.soak
def test_the_example_tunes_a_saved_model_and_exports_it(folder, tmp_path):
    (tmp_path / "text.txt").write_text("def main() -> int:\n    return 0\n" * 400)
    prepare(PrepareConfig(sources=(str(tmp_path / "text.txt"),), out=str(tmp_path / "prepared"), workers=0))
    manifest = str(tmp_path / "prepared" / "manifest.json")
    words = [sys.executable, str(ROOT / "examples" / "finetune_hf.py"), str(folder), manifest, "tuned", "2"]
    ran(*words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert loaded.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's own
@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("dense", "r=4,target=q_proj+v_proj+down_proj,use_rslora=true,use_dora=true,modules_to_save=norm"),
        ("folder", "r=4,alpha=8,target=o_proj,target_parameters=experts.gate_up_proj+experts.down_proj"),
    ],
)
def test_adapters_train_through_two_kills_and_come_back_as_peft_loads_them(local_ray, kind, lora, request, tmp_path):
    """Newcomers, and a run that goes on from a checkpoint, read the base from its folder."""
    peft, dense = pytest.importorskip("peft"), request.getfixturevalue(kind)
    calm = fit(dense, tmp_path, "lora-calm", lora=lora, spares=0, every_steps=2)
    kills = "kill@step=1,phase=backward,rank=3; kill@step=2,phase=apply,rank=0"
    struck = fit(dense, tmp_path, "lora-struck", kills, lora=lora, spares=2)
    middle = next(one["path"] for one in calm.summary["checkpoints"] if one["step"] == 2)
    resumed = fit(dense, tmp_path, "lora-resumed", lora=lora, spares=0, resume=middle)
    assert resumed.summary["resumed_from"] == [{"step": 2, "path": middle}]
    assert resumed.summary["weights_sha256"] == calm.summary["weights_sha256"]
    assert bits(struck.summary) == bits(calm.summary)
    assert [one["action"] for one in struck.summary["recoveries"]] == 2 * ["spare took its place"]

    model = ring_model(dense, lora=lora)
    adapters = {name for name, param in model().named_parameters() if param.requires_grad}
    trained = StoredWeights.open(struck.path)
    assert set(trained.places) == adapters
    saved = {key for file in calm.path.rglob("attempt-*/shard-*.safetensors") for key in load_file(file)}
    assert {key.split("/")[1] for key in saved} == adapters, "values and moments of adapters alone"

    parts = model.ring_parts(StepConfig(context_tokens=CONTEXT))
    made = model().eval()
    with torch.no_grad():
        for name, param in made.named_parameters():
            values: Any = trained.tensor(name) if name in adapters else parts.frozen.tensor(name, param.shape)
            param.copy_(values)
    tokens, positions = torch.randint(0, 257, (1, CONTEXT)), torch.arange(CONTEXT)[None]
    ring = RingAttention(plan(Pattern(), make_layout("zigzag", CONTEXT, 1)), 0, None)
    opened = partial(transformers.AutoModelForCausalLM.from_pretrained, attn_implementation="eager", dtype="float32")
    with torch.no_grad():
        expected = made(tokens, positions=positions, document_ids=positions, attention=ring)
        for flags in ([], ["--merge"]):
            out = tmp_path / f"out{len(flags)}"
            assert command(["export", str(struck.path), "--out", str(out), "--dtype", "float32", *flags]) == 0
            loaded = opened(out) if flags else peft.PeftModel.from_pretrained(opened(dense), out)
            torch.testing.assert_close(loaded.eval()(tokens).logits, expected, rtol=0, atol=1e-5)
        assert (opened(dense)(tokens).logits - expected).abs().max() > 0.02, "it has learned something"
    assert command(["export", str(calm.path), "--step", "2", "--out", str(tmp_path / "middle")]) == 0
    assert "| steps | 2 of 4, each of 4 sequences" in (tmp_path / "middle" / "README.md").read_text()
