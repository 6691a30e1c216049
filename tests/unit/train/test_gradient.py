"""Where gradients go: added up at once, and summed over the rings beside the last pass."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from elastic_ring.errors import UserCodeFailed
from elastic_ring.train import gradient as module
from elastic_ring.train.gradient import Gradient
from elastic_ring.train.wrap import keep_whole, local_params

WIDTH = 8


class Layers(nn.Module):
    """`spare`, the first, gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        for layer in self.layers:
            for _ in range(times):
                x = layer(x)
        return x


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


class Sums:
    """The sum over one ring: leaves what it is given, and notes it."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.given: list[tuple[Tensor, Tensor]] = []

    def __call__(self, bucket: Tensor) -> Any:
        self.started.append(bucket.storage_offset() // (WIDTH * WIDTH))
        self.given.append((bucket, bucket.clone()))
        return SimpleNamespace(wait=lambda: None)


def built(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, together: int | None = None
) -> tuple[Layers, Layers, Gradient]:
    """The same module plain and wrapped, and a gradient of one bucket a layer. With `together` the wrapped one is
    whole, and shares of so many layers are moved together."""
    monkeypatch.setattr(module, "BUCKET_ELEMENTS", WIDTH * WIDTH)
    plain, wrapped = Layers(), Layers()
    if together:
        monkeypatch.setattr(module, "TOGETHER_BYTES", together * WIDTH * WIDTH * 4)
        keep_whole(wrapped, torch.device("cpu"), torch.float32)
    wrapped.load_state_dict(plain.state_dict())
    if not together:
        for layer in wrapped.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(wrapped, mesh=mesh)
    gradient = Gradient.like(local_params(wrapped), torch.device("cpu"))
    gradient.attach(wrapped, in_host=False)
    return plain, wrapped, gradient


@pytest.mark.parametrize("together", [None, 1, 3, 9])
def test_buckets_are_summed_from_the_end_and_beside_the_last_pass_once_all_is_known(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, together: int | None
) -> None:
    plain, wrapped, gradient = built(mesh, monkeypatch, together)
    inputs = torch.randn(3, 2, WIDTH)
    for x in inputs:
        plain(x).sum().backward()
    for in_backward in ([], [4, 3, 2, 1]):  # the first step shows that each has its share in one piece
        sums = Sums()
        gradient.begin()
        for index, x in enumerate(inputs):
            gradient.begin_pass(sums if index == 2 else None)
            wrapped(x).sum().backward()
            assert all(param.grad is None for param in wrapped.parameters())
        assert sums.started == in_backward
        gradient.end()
        gradient.finish(sums)
        assert sums.started == [4, 3, 2, 1, 0]
        assert all(torch.equal(bucket, then) for bucket, then in sums.given), "a sum began before its shares were there"
        for name, param in plain.named_parameters():
            want = torch.zeros(WIDTH, WIDTH) if param.grad is None else param.grad
            assert torch.allclose(gradient.views[name], want, rtol=1e-6, atol=1e-6)


def test_a_layer_that_comes_to_be_used_twice_is_right(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 hands over its gradient once all its uses are added up, or in pieces, which would be refused."""
    plain, wrapped, gradient = built(mesh, monkeypatch)
    x = torch.randn(2, WIDTH)
    plain(x, times=2).sum().backward()
    for times in (1, 2):
        gradient.begin()
        gradient.begin_pass(Sums())
        wrapped(x, times=times).sum().backward()
        gradient.end()
        gradient.finish(Sums())
    for name, param in plain.named_parameters():
        if param.grad is not None:
            assert torch.allclose(gradient.views[name], param.grad, rtol=1e-5, atol=1e-5)


def test_a_gradient_in_pieces_after_its_sum_has_begun_is_refused(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, wrapped, gradient = built(mesh, monkeypatch)
    x = torch.randn(2, WIDTH)
    gradient.begin()
    for beside in (None, Sums()):  # two backward passes in one, as far as the gradient knows
        gradient.begin_pass(beside)
        wrapped(x).sum().backward()
        gradient.end()
        gradient.begin()
    gradient.begin_pass(Sums())
    wrapped(x).sum().backward()
    with pytest.raises(UserCodeFailed, match="has its gradient in several pieces"):
        wrapped(x).sum().backward()
