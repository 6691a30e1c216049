"""A run with sparse attention that loses workers ends with the bits of the undisturbed one, on a real cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_ring.attention.patterns.parse import parse_pattern
from tests.ray.conftest import bits, finished, tiny_trainer

PATTERN = (
    '{"block": 16, "groups": [{"layers": [0], "rule": "sinks:4+window:24"}, {"rule": "longnet:32/1,96/4+window:8"}]}'
)
FAULTS = "kill@step=1,phase=forward,hop=1,rank=0; kill@step=3,phase=backward,rank=3"


def run(folder: Path, name: str, **options: Any) -> dict[str, Any]:
    trainer = tiny_trainer(folder, name, steps=6, **options)
    trainer.task = replace(trainer.task, pattern=parse_pattern(PATTERN))
    return finished(trainer).summary


@pytest.fixture(scope="module")
def calm(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("calm"), "calm", spares=0)


@pytest.mark.slow
def test_kills_under_a_pattern_leave_no_trace(calm, tmp_path):
    killed = run(tmp_path, "killed", faults=FAULTS, spares=2)
    assert len(killed["recoveries"]) == 2
    assert bits(killed) == bits(calm)
    assert killed["exact"]


@pytest.mark.soak
def test_a_larger_ring_under_a_pattern_gives_the_same_losses(calm, tmp_path):
    larger = run(tmp_path, "larger", dp=1, cp=3, spares=0)
    assert larger["samples_sha256"] == calm["samples_sha256"]
    pairs = zip(larger["losses"], calm["losses"], strict=True)
    assert max(abs(float.fromhex(a) - float.fromhex(b)) for a, b in pairs) <= 1e-4
