"""Final weights are written whole, from exchanges that nobody gave up, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from elastic_ring.errors import GroupAborted
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.groups.batched_p2p import LaunchGate
from elastic_ring.train.weights import load_weights
from tests.unit.groups.processes import Membership, membership
from tests.unit.train.tiny_task import begin, make_task, weights_sha256

RING = Mesh(1, 2)


@pytest.fixture(scope="module")
def two() -> Iterator[Membership]:
    with membership(2) as made:
        yield made


def give_up_in_silence(me: Any) -> None:
    """As an abort of NCCL's groups does that comes after the launch: the gather ends, and nothing is raised."""
    me.connector.gate = LaunchGate(lambda: None)
    me.connector.aborted = True


def test_weights_from_an_aborted_gather_are_not_written(two: Membership, tmp_path: Path) -> None:
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


class Tied(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(6, width), nn.Linear(width, 6, bias=False)
        self.head.weight = self.token.weight


def test_weights_that_are_tied_load_strictly_from_the_one_name_that_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    model, loaded = Tied(), Tied()
    save_file(dict(model.named_parameters()), path)
    load_weights(loaded, path)
    assert torch.equal(loaded.head.weight, model.token.weight)
    assert loaded.head.weight is loaded.token.weight
    with pytest.raises(ValueError, match="holds other parameters than a Tied"):
        load_weights(Tied(5), path)
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        load_weights(loaded, tmp_path / "none")
