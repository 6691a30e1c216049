"""Copies of a shard or of a tensor to the host's memory, made beside what follows, and back."""

from __future__ import annotations

import threading
import time
from secrets import token_hex

import psutil
import pytest
import torch
from torch.optim import AdamW

from elastic_ring.attention.recomputation import OffloadedTensor
from elastic_ring.control.messages import SnapshotId
from elastic_ring.errors import DigestMismatch
from elastic_ring.state import pinned
from elastic_ring.state.checkpoints import checkpoint
from elastic_ring.state.checkpoints.manifest import attempt_folder
from elastic_ring.state.shard import Shard
from elastic_ring.state.snapshot import Buffers, load, size_of, take
from elastic_ring.state.storage.folder import Storage
from tests.unit.attention.test_recomputation import is_itself_until_it_leaves_and_equal_every_time_it_comes_back

AT = (1, 4)
ROWS, NUM_LAYERS = 2048, 8


def make_shard(seed: int) -> Shard:
    generator = torch.Generator("cuda").manual_seed(seed)
    params = {f"layer{i}": torch.randn(ROWS, ROWS, device="cuda", generator=generator) for i in range(NUM_LAYERS)}
    return Shard(0, params, AdamW(params.values(), fused=True))


def step(shard: Shard) -> None:
    shard.apply({name: torch.full_like(param, 0.25) for name, param in shard.params.items()}, 0.01)
    shard.advance(skipped=False)


def test_a_snapshot_is_the_state_before_the_step_that_is_queued_right_after_it():
    shard, buffers, stream = make_shard(0), Buffers(is_pinned=True), torch.cuda.Stream()
    step(shard)
    before = shard.digest()
    for _ in range(3):
        taken = take(shard, AT, buffers, stream)
        assert taken.data.is_pinned()
        copying = threading.Thread(target=taken.wait)  # whoever comes first copies
        copying.start()
        taken.wait()
        step(shard)
        taken.finish()
        other = make_shard(1)
        load(taken.data, SnapshotId(taken.id.step, AT), 0, other, "it")
        assert other.digest() == before
        step(other)
        assert other.digest() == shard.digest() != before
        before = shard.digest()
        buffers.give_back(taken.data)


def test_memory_that_was_reserved_is_pinned_and_taken():
    shard, buffers, stream = make_shard(0), Buffers(is_pinned=True), torch.cuda.Stream()
    step(shard)
    buffers.reserve(size_of(shard), 2)
    ready = {one.data_ptr() for one in buffers._free}
    taken = [take(shard, AT, buffers, stream) for _ in range(2)]
    assert {one.data.data_ptr() for one in taken} == ready
    assert all(one.data.is_pinned() for one in taken)


def test_kernels_are_launched_while_memory_is_pinned_and_it_goes_with_its_last_tensor():
    """cudaHostAlloc would hold every launch of the process until all of it is there."""
    mark, taken = torch.zeros(1, device="cuda"), list[torch.Tensor]()
    num_bytes = 2 << 30
    thread = threading.Thread(target=lambda: taken.append(pinned.empty(num_bytes)))
    mark.add_(1)
    torch.cuda.synchronize()
    thread.start()
    num_launched = 0
    while thread.is_alive():
        mark.add_(1)
        torch.cuda.synchronize()
        num_launched += 1
    assert num_launched > 100
    assert taken[0].is_pinned()
    last = taken.pop()[-8:]
    assert last.is_pinned()
    copied = last.copy_(torch.arange(8, dtype=torch.uint8, device="cuda"), non_blocking=True)
    torch.cuda.synchronize()
    assert copied.tolist() == list(range(8))
    resident = psutil.Process().memory_info().rss
    del last, copied
    assert resident - psutil.Process().memory_info().rss > 0.9 * num_bytes


def test_while_it_is_copied_others_that_copy_to_the_host_come_in_between():
    shard, buffers, stream = make_shard(0), Buffers(is_pinned=True), torch.cuda.Stream()
    step(shard)
    number = torch.zeros(1, device="cuda")
    number.item()
    for _ in range(2):  # memory is pinned in the first round
        taken, reads_s, begun = take(shard, AT, buffers, stream), list[float](), time.monotonic()
        copying = threading.Thread(target=taken.wait)
        copying.start()
        while copying.is_alive():
            asked = time.monotonic()
            number.item()
            reads_s.append(time.monotonic() - asked)
        took_s = time.monotonic() - begun
        buffers.give_back(taken.data)
    assert took_s > 4e-3, "too little is copied for this test to see anything"
    assert max(reads_s) < 0.5 * took_s


def test_a_flipped_byte_is_found_before_anything_is_on_the_device():
    shard, stream = make_shard(0), torch.cuda.Stream()
    taken, before = take(shard, AT, Buffers(is_pinned=True), stream), shard.digest()
    taken.finish()
    taken.data[-5] ^= 1
    with pytest.raises(DigestMismatch, match="it has digest"):
        load(taken.data, taken.id, 0, shard, "it")
    assert shard.digest() == before


def test_a_checkpoint_is_the_state_before_the_step_that_is_queued_right_after_it(tmp_path):
    shard, stream = make_shard(0), torch.cuda.Stream()
    shapes = {name: tuple(param.shape) for name, param in shard.params.items()}
    last: checkpoint.ShardPart | None = None
    storage = Storage(str(tmp_path)).open(write=False)
    for number in range(1, 4):
        step(shard)
        before = shard.digest()
        described = checkpoint.describe(shard, shapes, 1)
        last = checkpoint.take(shard, described, 0, last, stream)
        assert all(tensor.is_pinned() for tensor in last.tensors.values() if tensor.numel() > 1)
        last.wait()
        step(shard)
        last.wait()
        attempt = attempt_folder(number, 1, token_hex(8))
        file = checkpoint.write_part(storage, attempt, last)
        manifest = checkpoint.Manifest(number, 1, 1, "run", attempt, 1, 1, (file,), described, last.meta)
        assert checkpoint.commit(storage, manifest)
        other = make_shard(1)
        checkpoint.Reader(storage, manifest).fill(other, 1)
        assert other.digest() == before != shard.digest()


def test_it_is_itself_until_it_leaves_and_equal_every_time_it_comes_back():
    is_itself_until_it_leaves_and_equal_every_time_it_comes_back("cuda")


def test_memory_that_was_left_is_not_used_again_before_the_copy_is_done():
    for number in range(50):
        tensor = torch.full((4 << 20,), float(number), device="cuda")
        offloaded = OffloadedTensor(tensor)
        offloaded.leave()
        del tensor
        torch.full((4 << 20,), -1.0, device="cuda")  # would take the same memory
        assert float(offloaded.tensor().min()) == number
