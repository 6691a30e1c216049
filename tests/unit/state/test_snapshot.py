"""Snapshots in host memory: the shard's bits, found damaged by any flipped byte, and rebuilt from a parity."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from elastic_ring.control.messages import SnapshotId
from elastic_ring.errors import DigestMismatch
from elastic_ring.state import sealed
from elastic_ring.state.shard import Shard
from elastic_ring.state.snapshot import Buffers, Snapshot, load, size_of, take
from tests.unit.attention.attention_rings import in_threads, one_thread
from tests.unit.state.test_transfer import make_shard, take_step

AT = (1, 4)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with one_thread():
        yield


def snapshot_of(shard: Shard, buffers: Buffers | None = None) -> Snapshot:
    taken = take(shard, AT, buffers or Buffers())
    taken.finish()
    return taken


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_shard_goes_back_to_its_snapshot_bit_by_bit_and_trains_on_alike(steps, momentum):
    shard = make_shard(steps=steps, seed=0, momentum=momentum)
    before, taken = shard.digest(), snapshot_of(shard)
    take_step(shard, steps)
    after = shard.digest()
    other = make_shard(steps=0, seed=1, momentum=momentum)
    load(taken.data, SnapshotId(steps, AT), 2, other, "it")
    assert other.digest() == before != after
    take_step(other, steps)
    assert other.digest() == after
    load(taken.data, SnapshotId(steps, AT), 2, other, "it")
    assert other.digest() == before, "a shard that trains on must not change the snapshot that it came from"


def test_any_flipped_byte_is_found_and_named_and_the_shard_stays_as_it_was():
    shard = make_shard(steps=2, seed=0)
    taken, before = snapshot_of(shard), shard.digest()
    for place in [*range(0, 24), *range(64, taken.data.numel(), 61), taken.data.numel() - 1]:
        taken.data[place] ^= 16
        with pytest.raises(DigestMismatch, match="the copy of rank 3"):
            load(taken.data, taken.id, 2, shard, "the copy of rank 3")
        taken.data[place] ^= 16
    assert shard.digest() == before
    load(taken.data, taken.id, 2, shard, "the copy of rank 3")


@pytest.mark.parametrize(
    ("wanted", "cp_rank"), [(SnapshotId(1, AT), 2), (SnapshotId(2, (1, 3)), 2), (SnapshotId(2, AT), 1)]
)
def test_a_snapshot_of_another_step_generation_or_rank_is_refused(wanted, cp_rank):
    shard = make_shard(steps=2, seed=0)
    with pytest.raises(DigestMismatch, match="not of"):
        load(snapshot_of(shard).data, wanted, cp_rank, shard, "it")


def test_a_shard_of_other_parameters_is_refused():
    taken = snapshot_of(make_shard(steps=2, seed=0))
    with pytest.raises(DigestMismatch, match="other parameters"):
        load(taken.data, taken.id, 2, make_shard(steps=0, seed=0, rows=4), "it")


def test_memory_that_was_given_back_is_used_again():
    buffers, shard = Buffers(), make_shard(steps=1, seed=0)
    first = snapshot_of(shard, buffers)
    second = snapshot_of(shard, buffers)
    assert first.data.data_ptr() != second.data.data_ptr()
    buffers.give_back(first.data)
    assert snapshot_of(shard, buffers).data.data_ptr() == first.data.data_ptr()
    assert snapshot_of(shard, buffers).data.data_ptr() not in (first.data.data_ptr(), second.data.data_ptr())


def test_a_longer_header_fits_into_the_memory_of_a_shorter_one():
    buffers, shard = Buffers(), make_shard(steps=1, seed=0)
    sizes, places = set(), set()
    for number in (1, 2**9, 2**20, 2**40):
        shard.optimizer.param_groups[0].update({f"counter {i}": number for i in range(32)})
        taken = snapshot_of(shard, buffers)
        sizes.add(taken.data.numel())
        places.add(taken.data.data_ptr())
        buffers.give_back(taken.data)
    assert len(sizes) == 4
    assert len(places) == 1


def test_memory_that_is_reserved_is_what_the_next_snapshots_take():
    buffers, shard = Buffers(), make_shard(steps=1, seed=0)
    buffers.reserve(size_of(shard), 2)
    ready = {one.data_ptr() for one in buffers._free}
    taken = [snapshot_of(shard, buffers) for _ in range(2)]
    assert {one.data.data_ptr() for one in taken} == ready
    assert len(ready) == 2
    assert {one.data.numel() for one in taken} == {size_of(shard)}


@pytest.mark.parametrize("rows", [(6, 6, 6), (6, 1, 9)])
def test_each_of_a_group_comes_back_from_the_parity_and_the_others(rows):
    pieces = [snapshot_of(make_shard(steps=2, seed=i, rows=n)).data for i, n in enumerate(rows)]
    for lost, piece in enumerate(pieces):
        parity = sealed.parity_of(pieces, Buffers().take)
        assert parity.numel() == 64 + max(each.numel() for each in pieces)
        others = [each for each in pieces if each is not piece]
        assert torch.equal(sealed.missing_piece(parity, others, f"the snapshot of rank {lost}"), piece)


def test_a_parity_with_a_wrong_part_gives_nothing():
    pieces = [snapshot_of(make_shard(steps=2, seed=i)).data for i in range(3)]
    parity = sealed.parity_of(pieces, Buffers().take)
    pieces[1][100] ^= 1
    with pytest.raises(DigestMismatch, match="rebuilt from a parity"):
        sealed.missing_piece(parity, pieces[1:], "the snapshot of rank 0")


def test_sealed_bytes_arrive_as_they_were_and_damage_on_the_way_is_found(rings):
    groups = rings.groups(2)
    data = snapshot_of(make_shard(steps=3, seed=0)).data

    def work(rank: int) -> Tensor | None:
        if rank == 0:
            for sent in (data, damaged(data)):
                for waiting in sealed.send(groups[0], sent, 1):
                    waiting.wait()
            return None
        found = sealed.receive(groups[1], 0, Buffers().take, "it")
        with pytest.raises(DigestMismatch, match="it has digest"):
            sealed.receive(groups[1], 0, Buffers().take, "it")
        return found

    found = in_threads(2, work)[1]
    assert found is not None
    assert torch.equal(found, data)


def damaged(data: Tensor) -> Tensor:
    other = data.clone()
    other[other.numel() // 2] ^= 1
    return other
