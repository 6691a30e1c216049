"""Configurations of transformers' models that are small enough for a test."""

from __future__ import annotations

from typing import Any

import pytest

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 256,
}


def small_config(family: str = "Llama", **sizes: Any) -> Any:
    """Of this family; skips the test where transformers is not installed."""
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, f"{family}Config")(**{**SIZES, **sizes})
