"""Final weights are written whole, from exchanges that nobody gave up, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from elastic_ring.errors import GroupAborted
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.joined import LaunchGate
from tests.unit.crew import Crew, crew
from tests.unit.tiny_task import begin, make_task, weights_sha256

RING = Mesh(1, 2)


@pytest.fixture(scope="module")
def two() -> Iterator[Crew]:
    with crew(2) as made:
        yield made


def give_up_in_silence(me: Any) -> None:
    """As an abort of NCCL's groups does that comes after the launch: the gather ends, and nothing is raised."""
    me.connector.gate = LaunchGate(lambda: None)
    me.connector.aborted = True


def test_weights_from_an_aborted_gather_are_not_written(two: Crew, tmp_path: Path) -> None:
    two.all(begin, two.meeting(), RING, make_task())
    digest, none = two.all(weights_sha256, str(tmp_path))
    assert (len(digest), none) == (64, None)
    before = {name: tensor.clone() for name, tensor in load_file(tmp_path / "weights.safetensors").items()}
    (tmp_path / "other").mkdir()
    two.now(0, give_up_in_silence)
    for rank in (0, 1):
        two.start(rank, weights_sha256, str(tmp_path / "other"))
    with pytest.raises(GroupAborted):
        two.result(0)
    two.result(1)
    assert list((tmp_path / "other").iterdir()) == []
    assert before.keys() == load_file(tmp_path / "weights.safetensors").keys()
