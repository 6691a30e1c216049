"""The error of a killed peer is known as such wherever it surfaces, and a user's error with the same words is not.

Real gloo between real processes; each case kills one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from elastic_ring.mesh import Mesh
from elastic_ring.runtime.groups.transport import is_transport_error, translated
from elastic_ring.runtime.worker.training_thread import error_kind, error_text
from elastic_ring.train.abortable_collectives import make_abortable
from tests.unit.groups.processes import Membership, connect, membership

PAIR = Mesh(1, 2)
WORDS = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Gloo connectFullMesh failed; NCCL error"


# ------------------------------------------------------------ what rank 0 does while rank 1 is killed


def all_reduce(me: Any) -> None:
    me.groups.world.allreduce([torch.ones(4)]).wait()


def receive(me: Any) -> None:
    me.groups.ring.recv([torch.ones(4)], 1, 7).wait()


def all_gather(me: Any) -> None:
    me.groups.shard.allgather([[torch.empty(4), torch.empty(4)]], [torch.ones(4)]).wait()


def fsdp_forward(me: Any) -> None:
    sharded(me)(torch.ones(2, 4))


def fsdp_backward(me: Any) -> None:
    model = sharded(me)
    model.set_requires_gradient_sync(True)
    loss = model(torch.ones(2, 4)).sum()
    forward_done(me)
    loss.backward()


def own_collective(me: Any) -> None:
    """As a user's loss may contain."""
    dist.all_reduce(torch.ones(4))


def own_collective_in_backward(me: Any) -> None:
    Summed.apply(torch.ones(4, requires_grad=True)).sum().backward()


def own_error_after_it(me: Any) -> None:
    """A user's `except` that raises something of its own."""
    try:
        all_reduce(me)
    except RuntimeError as error:
        raise ValueError("no mean over all ranks") from error


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


def sharded(me: Any) -> Any:
    model = fully_shard(nn.Linear(4, 4), mesh=me.groups.device_mesh, reshard_after_forward=False)
    make_abortable(model, me.groups.launching)
    return model


def forward_done(me: Any) -> None:
    me.groups.world.allreduce([torch.ones(1)]).wait()


# ------------------------------------------------------------ jobs


def outcome(me: Any, work: Callable[[Any], None]) -> tuple[str, str]:
    """How the error of `work` is named, inside and outside of `translated`."""
    try:
        with translated(me.connector):
            work(me)
    except Exception as error:
        inner = error.__cause__ if type(error).__name__ == "PeerFailed" else error
        assert inner is not None
        return type(error).__name__, error_kind(inner)
    return "completed", ""


def halt(me: Any, work: Callable[[Any], None]) -> None:
    """Rank 1's part until it is killed."""
    if work is fsdp_backward:
        sharded(me)(torch.ones(2, 4))
        forward_done(me)
    me.halted.set()
    threading.Event().wait()


def prepare(me: Any) -> None:
    me.halted = threading.Event()


def await_halt(me: Any) -> None:
    assert me.halted.wait(30)


@pytest.fixture
def pair() -> Iterator[Membership]:
    with membership(2) as made:
        yield made


@pytest.mark.thinned(num=4)
@pytest.mark.parametrize(
    "work",
    [
        all_reduce,
        receive,
        all_gather,
        fsdp_forward,
        fsdp_backward,
        own_collective,
        own_collective_in_backward,
        own_error_after_it,
    ],
)
def test_the_error_of_a_killed_peer_is_the_peers_wherever_it_surfaces(pair: Membership, work: Any) -> None:
    pair.all(connect, pair.meeting(), PAIR)
    pair.all(prepare)
    pair.start(1, halt, work)
    pair.start(0, outcome, work)
    pair.now(1, await_halt)
    pair.kill(1)
    assert pair.result(0) == ("PeerFailed", "peer")


# ------------------------------------------------------------ the user's own errors


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError(WORDS)


class RaisingModel(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError(WORDS)


def raise_in_fsdp_forward(me: Any) -> None:
    fully_shard(RaisingModel(4, 4), mesh=me.groups.device_mesh)(torch.ones(2, 4))


def raise_in_backward(me: Any) -> None:
    Raising.apply(sharded(me)(torch.ones(2, 4))).sum().backward()


def raise_from_another(me: Any) -> None:
    try:
        raise KeyError("NCCL")
    except KeyError:
        raise RuntimeError(WORDS)  # noqa: B904


def ask_torch_for_the_impossible(me: Any) -> None:
    """A mistake of the user's that torch itself names with such a word."""
    me.groups.world.send([torch.ones(4), torch.ones(4)], 1 - me.rank, 0)


@pytest.fixture(scope="module")
def kept_pair() -> Iterator[Membership]:
    with membership(2) as made:
        made.all(connect, made.meeting(), PAIR)
        yield made


def user_error(me: Any, work: Callable[[Any], None]) -> tuple[str, str, str]:
    try:
        with translated(me.connector):
            work(me)
    except Exception as error:
        return type(error).__name__, error_kind(error), error_text(error)
    return "completed", "", ""


@pytest.mark.parametrize(
    "work", [raise_in_fsdp_forward, raise_in_backward, raise_from_another, ask_torch_for_the_impossible]
)
def test_a_users_error_with_the_transports_words_is_the_users_and_keeps_its_traceback(
    kept_pair: Membership, work: Any
) -> None:
    for name, kind, text in kept_pair.all(user_error, work):
        assert kind == "user"
        assert name in ("RuntimeError", "ValueError")
        assert text.startswith("Traceback")
        assert work.__name__ in text


def test_words_alone_are_no_transport_error() -> None:
    assert not is_transport_error(RuntimeError(WORDS))
    assert not is_transport_error(None)
