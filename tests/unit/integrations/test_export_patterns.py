"""An exported model attends as it was trained, or says that it does not; a preset's run is exported as a Llama."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import elastic_ring
from elastic_ring import ElasticRingTrainer, StepConfig
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.patterns.layers import LayerGroup, LayerPatterns
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.rules import Dense, Window
from elastic_ring.cli import main as command
from elastic_ring.cli import train
from elastic_ring.cli.settings import parse
from elastic_ring.data.preparation.prepare import PrepareConfig, prepare
from elastic_ring.data.source import StdlibText
from elastic_ring.integrations.transformers import export, ring_model
from elastic_ring.integrations.transformers.export_config import BY_LAYER, IN_ALL, NOTE
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.transformer import Transformer
from elastic_ring.state.checkpoints.weight_files import WEIGHTS

T = pytest.importorskip("transformers")

CONTEXT = 48
TINY = ModelConfig(257, 2, 32, 4, 2, 8, 64, tie_embeddings=True)
TEXT = "def größe(x):\n\treturn x  # ±1 <|endoftext|> 你好\r\n"


def run_of(model: Any, folder: Path, pattern: LayerPatterns | str | None = None, context: int = CONTEXT) -> Any:
    """The folder of a run as it is at its end, and its module with the run's random weights."""
    ElasticRingTrainer(
        model,
        StdlibText(context),
        step_config=StepConfig(context_tokens=context, global_batch=4),
        pattern=pattern,
        run_config=elastic_ring.RunConfig("run", run_dir=str(folder)),
    ).submission().write_record()
    return with_weights(model(), folder)


def with_weights(module: Any, folder: Path) -> Any:
    torch.manual_seed(3)
    values = {name: 0.3 * torch.randn(param.shape) for name, param in module.named_parameters()}
    save_file(values, folder / WEIGHTS, metadata={"format": "pt", "sha256": ""})
    elastic_ring.load_weights(module, folder)
    return module.eval()


def logits(module: Any, tokens: Tensor, pattern: LayerPatterns | str | None = None) -> Tensor:
    """By the module that trains, in a ring of one."""
    found = LayerPatterns((LayerGroup((Dense(),)),)) if pattern is None else pattern
    found = parse_pattern(found) if isinstance(found, str) else found
    attention = PatternedAttention(found, make_layout("contiguous", tokens.size(1), 1), 0, None)
    with torch.no_grad():
        made: Tensor = module(
            tokens, positions=torch.arange(tokens.size(1))[None], document_ids=tokens.int(), attention=attention
        )
    return made


def load(folder: Path) -> Any:
    return T.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", local_files_only=True).eval()


def check_same(loaded: Any, module: Any, pattern: LayerPatterns | str | None = None, num_tokens: int = CONTEXT) -> None:
    """Equal logits, and equal greedy tokens one by one."""
    tokens = torch.randint(0, 256, (1, num_tokens))
    with torch.no_grad():
        torch.testing.assert_close(logits(module, tokens, pattern), loaded(tokens).logits, rtol=1e-5, atol=1e-5)
    greedy = tokens
    for _ in range(3):
        greedy = torch.cat((greedy, logits(module, greedy, pattern)[:, -1:].argmax(-1)), dim=1)
    with torch.no_grad():
        made = loaded.generate(tokens, do_sample=False, max_new_tokens=3, eos_token_id=None, pad_token_id=0)
    assert made.tolist() == greedy.tolist()


@pytest.mark.parametrize(("tied", "in_slices"), [(True, False), (False, False), (False, True)])
def test_a_presets_run_is_a_llama_with_equal_logits_and_greedy_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, in_slices: bool
) -> None:
    if in_slices:
        monkeypatch.setattr("elastic_ring.model.config.UNIT_PARAMETERS", 500)
        monkeypatch.setattr("elastic_ring.model.config._TILE", 4)
        assert (len(TINY.ffn_slices), len(replace(TINY, tie_embeddings=False).head_slices)) == (8, 17)
    module = run_of(partial(Transformer, replace(TINY, tie_embeddings=tied, rope_theta=5e5)), tmp_path / "run")
    assert command(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    loaded = load(tmp_path / "out")
    assert (loaded.config.model_type, loaded.config.eos_token_id) == ("llama", 256)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    check_same(loaded, module)
    tokenizer = T.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert tokenizer.eos_token_id == 256
    plain = TEXT.replace("<|endoftext|>", "")
    assert tokenizer(plain)["input_ids"] == list(plain.encode())
    assert tokenizer.decode(list(TEXT.encode())) == TEXT
    assert len(tokenizer) == 257


@pytest.mark.parametrize("shared", [0, 16])
def test_a_presets_run_with_experts_is_a_glm4_moe_with_equal_logits(tmp_path: Path, shared: int) -> None:
    config = replace(TINY, num_experts=4, experts_per_token=2, expert_width=16, shared_width=shared, num_dense_layers=1)
    module = run_of(partial(Transformer, config), tmp_path / "run")
    assert command(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    loaded = load(tmp_path / "out")
    assert loaded.config.model_type == "glm4_moe"
    check_same(loaded, module)
    run_of(partial(Transformer, replace(config, shared_width=8)), tmp_path / "odd")
    with pytest.raises(ValueError, match="shared_width=8 is no multiple of expert_width=16"):
        export(tmp_path / "odd", tmp_path / "none")


def test_a_presets_run_of_the_command_line_is_exported_with_the_tokenizer_of_its_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "corpus.txt").write_text("def main(): return 0\n" * 200)
    prepare(PrepareConfig(sources=(str(tmp_path / "corpus.txt"),), out=str(tmp_path / "data"), workers=0))
    sizes = ["--model.num-layers", "1", "--model.width", "32", "--model.ffn-width", "32", "--context", "32"]
    manifest = tmp_path / "data" / "manifest.json"
    run = tmp_path / "run"
    trainer = train.build(parse(["--data", str(manifest), "--run-dir", str(run), *sizes]))
    trainer.submission().write_record()
    module = with_weights(trainer.task.model(), run)
    config = json.loads((run / "config.json").read_text())
    export(run, tmp_path / "out")
    check_same(load(tmp_path / "out"), module, num_tokens=24)
    assert T.AutoTokenizer.from_pretrained(tmp_path / "out")("ab")["input_ids"] == [97, 98]

    manifest.unlink()
    export(run, tmp_path / "without")
    assert "name its folder, or bytes" in caplog.text
    export(run, tmp_path / "with", tokenizer="bytes")
    assert (tmp_path / "with" / "tokenizer.json").exists() > (tmp_path / "without" / "tokenizer.json").exists()
    (run / "config.json").write_text(json.dumps(config | {"model": None}))
    with pytest.raises(ValueError, match=r"neither one of transformers .* nor a preset's"):
        export(run, tmp_path / "none")


@pytest.mark.parametrize(("pattern", "kind"), [("window:8", "mistral"), ("dense@1;window:8", "ministral")])
def test_a_presets_windows_are_exported(tmp_path: Path, pattern: str, kind: str) -> None:
    module = run_of(partial(Transformer, TINY), tmp_path / "run", pattern)
    export(tmp_path / "run", tmp_path / "out")
    loaded = load(tmp_path / "out")
    assert loaded.config.model_type == kind
    assert not hasattr(loaded.config, NOTE)
    check_same(loaded, module, pattern)


def config_of(kind: str, **more: Any) -> Any:
    return T.CONFIG_MAPPING[kind](
        **{
            "vocab_size": 257,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "bos_token_id": None,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "eos_token_id": None,
            "pad_token_id": None,
            **({"attn_logit_softcapping": None} if kind == "gemma2" else {}),
            **({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if "moe" in kind else {}),
            **({"num_local_experts": 4, "router_jitter_noise": 0.0} if kind == "phimoe" else {}),
            **more,
        }
    )


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        *((kind, "window:8@0;dense@1") for kind in sorted(BY_LAYER - {"ministral"})),
        *((kind, "window:8") for kind in sorted(IN_ALL - {"mistral"})),
        ("qwen2", "dense"),
        ("qwen2_moe", "dense"),
        ("phimoe", "dense"),
        ("mistral", "dense@0;window:8@1"),
        ("gemma3_text", "dense"),
        ("gemma3_text", "window:8@0;dense@1"),
    ],
)
def test_a_pattern_of_windows_is_exported_for_the_models_that_have_layers_of_them(
    tmp_path: Path, kind: str, pattern: str
) -> None:
    types = {"layer_types": ["sliding_attention", "full_attention"]} if kind == "gemma3_text" else {}
    windows = {"sliding_window": 16, "use_sliding_window": True} if kind != "phi3" else {"sliding_window": None}
    config = config_of(kind, **windows, **types)
    in_masks = kind.endswith("moe")
    model = ring_model(config, windows="dense" if in_masks else "exact")
    module = run_of(model, tmp_path / "run", pattern)
    export(tmp_path / "run", tmp_path / "out")
    loaded = load(tmp_path / "out")
    tokens = torch.randint(0, 257, (1, CONTEXT))
    with torch.no_grad():
        found = loaded(tokens, use_cache=False).logits
    torch.testing.assert_close(logits(module, tokens, pattern), found, rtol=1e-4, atol=1e-4)
    other = "window:4" if pattern == "dense" else "dense"
    assert (logits(module, tokens, other) - found).abs().max() > 1e-2, "the pattern makes a difference"


@pytest.mark.parametrize(
    ("pattern", "lost"),
    [
        ("sinks:4+window:8", "sinks:4+window:8 in 2 of 2 layers"),
        ("window:8@0;window:16@1", "window:16 in 1 of 2 layers"),
        (LayerPatterns((LayerGroup((Window(8), Dense(), Window(8), Dense())),)), "2 x window:8; 2 x dense in 2 of 2"),
    ],
)
def test_what_no_config_says_is_refused_and_said_where_it_is_allowed(
    tmp_path: Path,
    pattern: LayerPatterns | str,
    lost: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = run_of(partial(Transformer, TINY), tmp_path / "run", pattern)
    words = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    assert command(words) == 2
    told = capsys.readouterr().err
    assert "--allow-dense" in told
    assert not (tmp_path / "out").exists()
    assert command([*words, "--allow-dense"]) == 0
    loaded = load(tmp_path / "out")
    note = loaded.config.elastic_ring["lost"]
    assert note in caplog.text
    assert lost in told
    assert lost in note
    if "window:16" in lost:
        check_same(loaded, module, "window:8@0;dense@1")


def test_windows_that_training_rounded_or_left_out_are_exported_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of("mistral", sliding_window=130)
    runs = {windows: tmp_path / windows for windows in ("exact", "blocks", "dense")}
    written = {}
    for windows, run in runs.items():
        caplog.clear()
        run_of(ring_model(config, windows=windows), run, context=256)  # type: ignore[arg-type]
        export(run, tmp_path / f"{windows}-out")
        found = T.AutoConfig.from_pretrained(tmp_path / f"{windows}-out")
        written[windows] = (found.sliding_window, "whole blocks of 128 tokens" in caplog.text)
        assert hasattr(found, NOTE) == (windows == "blocks")
    assert written == {"exact": (130, False), "blocks": (130, True), "dense": (None, False)}
