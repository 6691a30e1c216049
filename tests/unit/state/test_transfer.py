"""A healed shard is the donor's bit by bit, or it is not used. Over real gloo links between threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

from elastic_ring.errors import DigestMismatch
from elastic_ring.state import transfer
from elastic_ring.state.shard import Shard
from elastic_ring.state.transfer import Link, receive_shard, send_shard
from tests.unit.attention.attention_rings import in_threads, one_thread


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with one_thread():
        yield


def make_shard(*, steps: int, seed: int, rows: int = 6, momentum: bool = False) -> Shard:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (rows, 5), "gain": (rows,), "late": (0, 5)}
    params = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors = list(params.values())
    shard = Shard(2, params, SGD(tensors, lr=0.1, momentum=0.9) if momentum else AdamW(tensors, foreach=True))
    for step in range(steps):
        take_step(shard, step)
    return shard


def take_step(shard: Shard, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    shard.apply({name: torch.randn(p.shape, generator=generator) for name, p in shard.params.items()}, 0.01)
    shard.advance(skipped=False)


def heal(links: Any, donor: Shard, newcomers: list[Shard]) -> list[int]:
    """Bytes sent to each, then bytes received by each."""

    def work(rank: int) -> int:
        link = Link(links[rank])
        return send_shard(donor, link) if rank == 0 else receive_shard(newcomers[rank - 1], link)

    return in_threads(1 + len(newcomers), work)


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("num_newcomers", [1, 2])
def test_newcomers_get_the_donors_bits_and_train_on_alike(rings, num_newcomers, steps, momentum):
    donor = make_shard(steps=steps, seed=0, momentum=momentum)
    newcomers = [make_shard(steps=0, seed=1 + i, momentum=momentum) for i in range(num_newcomers)]
    num_bytes = heal(rings.groups(1 + num_newcomers), donor, newcomers)
    assert len(set(num_bytes)) == 1
    assert num_bytes[0] > sum(tensor.nbytes for tensor in donor.pack()[1])
    for shard in (donor, *newcomers):
        take_step(shard, steps)
    assert len({shard.digest() for shard in (donor, *newcomers)}) == 1


def test_a_shard_of_no_rows_is_healed_too(rings):
    donor, newcomer = make_shard(steps=2, seed=0, rows=0), make_shard(steps=0, seed=1, rows=0)
    heal(rings.groups(2), donor, [newcomer])
    assert newcomer.counters.applied == 2
    assert newcomer.digest() == donor.digest()


def test_tensors_larger_than_a_chunk_arrive_whole_and_chunks_are_announced(rings, monkeypatch):
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 24)
    donor, newcomer = make_shard(steps=1, seed=0), make_shard(steps=0, seed=1)
    group, seen = rings.groups(2), [0, 0]

    def work(rank: int) -> None:
        def count() -> None:
            seen[rank] += 1

        if rank == 0:
            send_shard(donor, Link(group[0]), after_chunk=count)
        else:
            receive_shard(newcomer, Link(group[1]), after_chunk=count)

    in_threads(2, work)
    num_chunks = sum(-(-tensor.nbytes // 24) for tensor in donor.pack()[1])
    assert seen == [2 + num_chunks, num_chunks]
    assert newcomer.digest() == donor.digest()


@pytest.mark.parametrize("num_newcomers", [1, 2])
def test_a_donor_stays_until_the_last_newcomer_has_everything(rings, monkeypatch, num_newcomers):
    """Taking its end of the link down earlier would take down what is still on its way."""
    donor = make_shard(steps=2, seed=0)
    newcomers = [make_shard(steps=0, seed=1 + i) for i in range(num_newcomers)]
    group, gone = rings.groups(1 + num_newcomers), threading.Event()
    digest, seen = transfer.digest_of, list[bool]()

    def digest_late(*arguments: Any) -> str:
        seen.append(gone.wait(0.2))
        return digest(*arguments)

    monkeypatch.setattr(transfer, "digest_of", digest_late)

    def work(rank: int) -> None:
        link = Link(group[rank])
        if rank > 0:
            receive_shard(newcomers[rank - 1], link)
            return
        send_shard(donor, link)
        gone.set()
        assert link.timings["answer_s"] > 0

    in_threads(1 + num_newcomers, work)
    assert seen == [False] * num_newcomers
    assert {newcomer.digest() for newcomer in newcomers} == {donor.digest()}


def test_a_newcomer_whose_shard_is_refused_lets_its_donor_go(rings):
    donor, newcomer, groups = make_shard(steps=2, seed=0), make_shard(steps=1, seed=9), rings.groups(2, fresh=True)
    returned = threading.Event()

    def work(rank: int) -> None:
        if rank == 1:
            receive_shard(newcomer, Link(FlippingLink(groups[1], 3)))
        send_shard(donor, Link(groups[0]))
        returned.set()

    with pytest.raises(DigestMismatch):
        in_threads(2, work)
    assert returned.is_set()


class FlippingLink:
    """A link that flips one bit of the n-th message that arrives."""

    def __init__(self, link: Any, message: int) -> None:
        self._link, self._message, self.num_received = link, message, 0

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._link.send(tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        self._link.recv(tensors, source, tag).wait()
        if self.num_received == self._message:
            tensors[0].view(torch.uint8).reshape(-1)[-1] ^= 1
        self.num_received += 1
        return Done()


class Done:
    def wait(self) -> None:
        return None


def messages(shard: Shard) -> int:
    """Length and description first, then a message for each tensor that has bytes."""
    return 2 + sum(tensor.numel() > 0 for tensor in shard.pack()[1])


def test_a_bit_that_flips_in_any_message_is_refused(rings):
    donor = make_shard(steps=2, seed=0)
    for message in range(1, messages(donor)):
        newcomer = make_shard(steps=1, seed=9)
        before, counters = newcomer.digest(), newcomer.counters
        groups = rings.groups(2, fresh=True)
        link = FlippingLink(groups[1], message)

        def work(rank: int, link: Any = link, groups: Any = groups, newcomer: Shard = newcomer) -> None:
            if rank == 0:
                send_shard(donor, Link(groups[0]))
            else:
                receive_shard(newcomer, Link(link))

        # A damaged description ends the transfer before its tensors: the donor's sends find no receiver.
        with pytest.raises(DigestMismatch):
            receive_only(work) if message == 1 else in_threads(2, work)
        assert newcomer.counters == counters
        assert newcomer.digest() != donor.digest()
        assert (newcomer.digest() == before) == (message == 1), "tensors arrive in the shard's own memory"


def receive_only(work: Any) -> None:
    """Run the donor on the side and do not wait for it."""

    def donate() -> None:
        with contextlib.suppress(RuntimeError):
            work(0)

    threading.Thread(target=donate, daemon=True).start()
    work(1)
