"""The files that handle q in a forward call, counted while the model runs, are those that docs/attention.md names."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from elastic_ring.attention.kernels.registry import named
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.ring import RingAttention
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.transformer import Transformer

ROOT = Path(__file__).resolve().parents[3]
ADAPTERS = "elastic_ring/attention/kernels/adapters"
NUM_TOKENS = 256
WAYS = {
    "dense": (None, RingOptions(backend=named("aten-cpu"))),
    "sparse, CPU": ("window:64", RingOptions()),
    "sparse, GPU": ("window:128", RingOptions(kernel=named("reference-sparse"))),
}
"""The pattern of each way, and how it runs; tables of GPUs run on a CPU with the kernel that is their reference."""


def walk(attention: Any) -> set[str]:
    """The package's files that get q, from the model's call on, once plans are made; adapters of kernels as one."""
    model = Transformer(ModelConfig(64, 1, 32, 4, 2, 8, 64))
    tokens = torch.arange(NUM_TOKENS).unsqueeze(0) % 64
    found = set[str]()
    storage: list[int] = []
    alive: list[torch.Tensor] = []

    def is_q(value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in storage

    def entered(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(ROOT / "elastic_ring"):
            return
        if not storage and "attention" in path.parts and isinstance(frame.f_locals.get("q"), torch.Tensor):
            alive.append(frame.f_locals["q"])  # what comes later must not have its address
            storage.append(alive[0].untyped_storage().data_ptr())
            assert frame.f_back is not None
            found.add(Path(frame.f_back.f_code.co_filename).relative_to(ROOT).as_posix())
        values = [each for value in frame.f_locals.values() for each in (value if type(value) is tuple else [value])]
        if any(map(is_q, values)):
            found.add(path.relative_to(ROOT).as_posix())

    for watch in (None, entered):
        sys.setprofile(watch)
        try:
            model(tokens, positions=tokens, document_ids=tokens.int(), attention=attention)
        finally:
            sys.setprofile(None)
    return {ADAPTERS if path.startswith(ADAPTERS) else path for path in found}


@pytest.mark.parametrize("way", WAYS)
def test_the_walk_of_q_is_the_one_that_the_documents_name(way: str) -> None:
    pattern, options = WAYS[way]
    layout = make_layout("zigzag", NUM_TOKENS, 1)
    if pattern is None:
        found = walk(RingAttention(plan(Pattern(), layout), 0, None, options))
    else:
        found = walk(PatternedAttention(parse_pattern(pattern), layout, 0, None, options))
    text = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8").split("## The walk of q")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in text.splitlines() if line.startswith("|")]
    column = 0 if way == "dense" else 1
    cells = [row[0] if row[column] == "the same" else row[column] for row in rows]
    assert found == {path for cell in cells for path in re.findall(r"`([^`]+)`", cell)}
