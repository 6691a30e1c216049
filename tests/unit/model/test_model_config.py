"""Model sizes: presets are as large as their names, shapes that do not fit are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_ring.model.config import ModelConfig, num_parameters, preset


@pytest.mark.parametrize(("name", "wanted"), [("100m", 1e8), ("1b", 1e9), ("8b", 8e9), ("70b", 70e9), ("1t", 1e12)])
def test_a_preset_is_as_large_as_its_name(name: str, wanted: float) -> None:
    assert num_parameters(preset(name)) == pytest.approx(wanted, rel=0.03)


def test_the_laptop_speaks_bytes_and_the_end_of_a_document() -> None:
    laptop = preset("laptop")
    assert (laptop.vocab_size, laptop.num_layers, laptop.width) == (257, 4, 128)
    assert num_parameters(laptop) == 853_376


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads=3"),
        ({"head_dim": 31}, "head_dim=31"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"loss_chunk_tokens": 0}, "loss_chunk_tokens=0"),
        ({"rope_theta": 0.0}, "rope_theta=0.0: must be a finite number above 1"),
        ({"rope_theta": float("nan")}, "rope_theta=nan: must be a finite number above 1"),
        ({"norm_eps": float("inf")}, "norm_eps=inf: must be a finite number above 0"),
        ({"norm_eps": 0.0}, "norm_eps=0.0"),
        ({"dtype": "float16"}, "dtype='float16'"),
    ],
)
def test_a_shape_that_does_not_fit_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(preset("laptop"), **settings)


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'2b': choose one of laptop, 100m"):
        preset("2b")


def test_heads_may_be_wider_than_the_model() -> None:
    assert num_parameters(ModelConfig(10, 1, 8, 4, 1, 16, 8)) == 2 * 80 + 2 * 8 * 16 * 5 + 3 * 64 + 3 * 8
