"""The order: from (seed, step) alone, every sequence once an epoch, shared out whole."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ring.config import StepConfig
from elastic_ring.data.sampling.order import Order, pass_sizes, passes, sample_ids, share


@settings(max_examples=60, deadline=None)
@given(num_sequences=st.integers(1, 60), data=st.data(), seed=st.integers(0, 2**64 - 1))
def test_each_epoch_uses_every_sequence_once(num_sequences: int, data: st.DataObject, seed: int) -> None:
    global_batch = data.draw(st.integers(1, num_sequences))
    order = Order(seed, global_batch, num_sequences)
    num_steps = -(-3 * num_sequences // global_batch)
    walked = list(chain.from_iterable(order.sample_ids(step) for step in range(num_steps)))
    assert len(walked) == num_steps * global_batch
    for epoch in range(3):
        assert sorted(walked[epoch * num_sequences : (epoch + 1) * num_sequences]) == list(range(num_sequences))


def test_a_step_does_not_depend_on_which_were_asked_for_before() -> None:
    order = Order(7, 6, 20)
    forward = [order.sample_ids(step) for step in range(40)]
    backward = [order.sample_ids(step) for step in reversed(range(40))]
    assert forward == backward[::-1]
    assert forward == [sample_ids(7, step, 6, 20) for step in range(40)]


def test_seeds_and_epochs_give_different_orders() -> None:
    epochs = [Order(seed, 50, 50).sample_ids(step) for seed in (0, 1) for step in (0, 1)]
    assert len(set(epochs)) == 4
    assert tuple(range(50)) not in epochs


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    order = Order(0, 8, 1000)
    written = repr([order.sample_ids(step) for step in range(200)])
    assert hashlib.sha256(written.encode()).hexdigest()[:16] == "2a49c1df24b80755"


@pytest.mark.parametrize("dp", [1, 2, 3, 5, 8])
def test_the_rings_share_a_batch_without_rest(dp: int) -> None:
    ids = Order(3, 13, 40).sample_ids(2)
    shares = [share(ids, dp_rank, dp) for dp_rank in range(dp)]
    assert sorted(chain.from_iterable(shares)) == list(enumerate(ids))
    sizes = [len(part) for part in shares]
    assert max(sizes) - min(sizes) <= 1


def test_numbers_out_of_range_are_named() -> None:
    with pytest.raises(ValueError, match="global_batch=9: the corpus has only 8 sequences"):
        Order(0, 9, 8)
    with pytest.raises(ValueError, match="global_batch=0"):
        Order(0, 0, 8)
    with pytest.raises(ValueError, match="seed=-1"):
        Order(-1, 1, 8)
    with pytest.raises(ValueError, match="step=-1"):
        Order(0, 1, 8).sample_ids(-1)
    with pytest.raises(ValueError, match="dp_rank=2"):
        share((1, 2, 3), 2, 2)


def test_passes_take_a_share_in_order_and_their_sizes_are_known_for_every_mesh() -> None:
    assert [list(group) for group in passes(7, 3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert passes(0, 3) == ()
    for batch in range(1, 9):
        for together in range(1, batch + 1):
            shares = {len(share(range(batch), rank, dp)) for dp in range(1, batch + 1) for rank in range(dp)}
            found = {len(group) for size in shares for group in passes(size, together)}
            step = StepConfig(global_batch=batch, sequences_per_pass=together)
            assert pass_sizes(step) == tuple(sorted(found))
            assert pass_sizes(replace(step, val_every_steps=2)) == tuple(sorted(found | {1}))
