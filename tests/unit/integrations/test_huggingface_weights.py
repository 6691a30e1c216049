"""Weights in a Hugging Face folder: read by rows in any spelling, and refused by name where they do not fit."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from elastic_ring import StepConfig
from elastic_ring.integrations.transformers import ring_model
from elastic_ring.integrations.transformers.model import FirstValues
from elastic_ring.integrations.transformers.weights import INDEX, SINGLE, FolderWeights

T = pytest.importorskip("transformers")


def config(**changes: Any) -> Any:
    return T.LlamaConfig(
        **{
            "vocab_size": 67,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            "bos_token_id": None,
            "eos_token_id": None,
            **changes,
        }
    )


def saved(folder: Path, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = T.LlamaForCausalLM(config(**changes)).to(dtype)
    model.save_pretrained(folder)
    return model


def initial_of(folder: Path) -> Any:
    return ring_model(folder).ring_parts(StepConfig(context_tokens=32)).initial


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_come_row_by_row_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    model = saved(tmp_path, dtype=dtype)
    initial = initial_of(tmp_path)
    for name, param in model.named_parameters():
        assert torch.equal(initial.tensor(name, param.shape), param.detach().float()), name
        if param.dim() == 2:
            rows = initial.tensor(name, param.shape, rows=(3, 7))
            assert torch.equal(rows, param.detach()[3:7].float()), name


def test_a_read_of_rows_takes_no_memory_for_the_rest(tmp_path: Path) -> None:
    """A file of 4 GiB that is a hole: reading it whole would fail here or take minutes."""
    rows, width = 1 << 20, 1 << 10
    header = json.dumps({"w": {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, rows * width * 4]}}).encode()
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + rows * width * 4)
    weights = FolderWeights.open(tmp_path)
    assert weights is not None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert weights.tensor("w", (rows, width), rows=(500_000, 500_016)).shape == (16, width)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10, "KiB"


def test_tied_and_base_model_spellings_are_found(tmp_path: Path) -> None:
    model = saved(tmp_path, tie_word_embeddings=True)
    stored = load_file(tmp_path / SINGLE)
    assert "lm_head.weight" not in stored
    tensor = initial_of(tmp_path).tensor("model.embed_tokens.weight", (67, 16))
    assert torch.equal(tensor, model.lm_head.weight.detach())
    bare = {name.removeprefix("model."): value for name, value in stored.items()}
    bare["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(bare, tmp_path / SINGLE, metadata={"format": "pt"})
    assert torch.equal(initial_of(tmp_path).tensor("model.embed_tokens.weight", (67, 16)), tensor)
    only_head = {("lm_head.weight" if name == "embed_tokens.weight" else name): value for name, value in bare.items()}
    save_file(only_head, tmp_path / SINGLE, metadata={"format": "pt"})
    assert torch.equal(initial_of(tmp_path).tensor("model.embed_tokens.weight", (67, 16)), tensor)
    save_file({**bare, "lm_head.weight": tensor.clone()}, tmp_path / SINGLE, metadata={"format": "pt"})
    assert torch.equal(initial_of(tmp_path).tensor("model.embed_tokens.weight", (67, 16)), tensor)
    save_file({**bare, "lm_head.weight": tensor + 1}, tmp_path / SINGLE, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"embed_tokens.weight and lm_head.weight, which differ, and its config makes"):
        ring_model(tmp_path)


def test_weights_that_do_not_fit_are_named_the_first_five(tmp_path: Path) -> None:
    saved(tmp_path)
    stored = load_file(tmp_path / SINGLE)
    for number in range(7):
        stored[f"extra.{number}"] = torch.ones(1)
    del stored["model.norm.weight"]
    stored["lm_head.weight"] = torch.ones(66, 16)
    save_file(stored, tmp_path / SINGLE)
    with pytest.raises(ValueError, match="do not fit a LlamaForCausalLM") as caught:
        ring_model(tmp_path)
    told = str(caught.value)
    assert "1 missing: model.norm.weight" in told
    assert "7 unknown to the model: extra.0, extra.1, extra.2, extra.3, extra.4 and 2 more" in told
    assert "1 of another shape: lm_head.weight (66, 16) instead of (67, 16)" in told
    assert ring_model(tmp_path, weights=False).weights is None


def test_a_folder_without_weights_begins_with_drawn_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config().save_pretrained(tmp_path)
    assert isinstance(initial_of(tmp_path), FirstValues)
    assert "has a config and no weights" in caplog.text


def test_other_formats_and_damaged_files_are_refused(tmp_path: Path) -> None:
    config().save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin and no safetensors"):
        ring_model(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        ring_model(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(ValueError, match="cannot be read as an index of weights"):
        ring_model(tmp_path)


def test_other_values_are_another_run(tmp_path: Path) -> None:
    saved(tmp_path)
    first = repr(ring_model(tmp_path))
    assert repr(ring_model(tmp_path)) == first
    stored = load_file(tmp_path / SINGLE)
    stored["model.norm.weight"] += 1
    save_file(stored, tmp_path / SINGLE, metadata={"format": "pt"})
    assert repr(ring_model(tmp_path)) != first
