"""A shard keeps its bits wherever it is moved: into fresh tensors, through a pack, before and after any step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from elastic_ring.state.header import Counters, Header
from elastic_ring.state.shard import Shard, digest_of

MakeOptimizer = Callable[[list[Tensor]], Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": lambda params: AdamW(params, foreach=True),
    "AdamW in two groups": lambda params: AdamW([{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}]),
    "SGD with momentum": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "SGD without state": lambda params: SGD(params, lr=0.1),
    "Adam with the learning rate in a tensor": lambda params: Adam(params, lr=torch.tensor(1e-3), capturable=False),
    "Adagrad, which has state before its first step": lambda params: Adagrad(params),
}
SHAPES = {"matrix": (3, 4), "gain": (5,), "empty": (0, 4)}


def random_params(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def make_shard(optimizer: str, *, steps: int = 0, seed: int = 0) -> Shard:
    params = random_params(seed)
    shard = Shard(1, params, OPTIMIZERS[optimizer](list(params.values())))
    for step in range(steps):
        take_step(shard, step)
    return shard


def take_step(shard: Shard, step: int) -> None:
    shard.apply(random_params(100 + step), 0.01 * (step + 1))
    shard.advance(skipped=False)


def bits(shard: Shard) -> list[bytes]:
    _, tensors = shard.pack()
    return [tensor.numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rebinding_keeps_every_bit_and_every_later_step(optimizer, steps):
    moved, kept = make_shard(optimizer, steps=steps), make_shard(optimizer, steps=steps)
    fresh = {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}
    moved.rebind(fresh)
    assert all(moved.params[name] is fresh[name] for name in SHAPES)
    assert moved.digest() == kept.digest()
    for shard in (moved, kept):
        take_step(shard, steps)
    assert bits(moved) == bits(kept)
    assert [group["lr"] for group in moved.optimizer.param_groups] == [
        group["lr"] for group in kept.optimizer.param_groups
    ]


def test_rebinding_leaves_nothing_of_the_old_tensors_in_the_optimizer():
    shard = make_shard("AdamW", steps=2)
    old = list(shard.params.values())
    shard.rebind({name: torch.empty(shape) for name, shape in SHAPES.items()})
    kept = [p for group in shard.optimizer.param_groups for p in group["params"]] + list(shard.optimizer.state)
    assert not any(tensor is stale for tensor in kept for stale in old)


def test_a_module_with_other_parameters_is_not_taken():
    with pytest.raises(AssertionError, match="changed between generations"):
        make_shard("AdamW").rebind({"gain": torch.empty(5), "matrix": torch.empty(3, 4), "empty": torch.empty(0, 4)})


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_was_packed_loads_into_another_shard_bit_by_bit(optimizer, steps):
    donor, newcomer = make_shard(optimizer, steps=steps), make_shard(optimizer, seed=7)
    newcomer.cp_rank = 0
    header, tensors = unpacked(donor)
    newcomer.load(header, tensors)
    assert (newcomer.cp_rank, newcomer.counters) == (1, donor.counters)
    assert bits(newcomer) == bits(donor)
    assert newcomer.digest() == donor.digest() == header.digest
    for shard in (donor, newcomer):
        take_step(shard, steps)
    assert bits(newcomer) == bits(donor)


def test_a_newcomer_that_had_steps_of_its_own_forgets_them():
    donor, newcomer = make_shard("AdamW"), make_shard("AdamW", steps=4, seed=7)
    newcomer.load(*unpacked(donor))
    for shard in (donor, newcomer):
        take_step(shard, 0)
    assert bits(newcomer) == bits(donor)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_state_goes_where_the_old_one_lay_and_takes_no_memory_beside_it(optimizer):
    donor, survivor = make_shard(optimizer, steps=2), make_shard(optimizer, steps=4, seed=7)
    before = where(survivor)
    header, tensors = unpacked(donor)
    places = survivor.places(header)
    for place, tensor in zip(places, tensors, strict=True):
        place.copy_(tensor)
    survivor.load(header, places)
    assert bits(survivor) == bits(donor)
    assert where(survivor) == before


def where(shard: Shard) -> list[int]:
    """Of all tensors but scalars."""
    return [tensor.data_ptr() for tensor in shard.describe()[1] if tensor.numel() > 1]


def unpacked(shard: Shard) -> tuple[Header, list[Tensor]]:
    """As it arrives elsewhere: nothing is shared with the shard."""
    header, tensors = shard.pack()
    return Header.from_bytes(header.to_bytes()), [tensor.clone() for tensor in tensors]


def test_a_shard_of_empty_parameters_packs_loads_and_steps():
    params = {"a": torch.empty(0, 3), "b": torch.empty(0)}
    shards = [Shard(3, dict(params), AdamW(list(params.values()), foreach=True)) for _ in range(2)]
    shards[0].apply({name: torch.empty_like(p) for name, p in params.items()}, 0.1)
    shards[0].advance(skipped=False)
    shards[1].load(*unpacked(shards[0]))
    assert shards[1].digest() == shards[0].digest()


def test_the_digest_sees_each_kind_of_change():
    reference = make_shard("AdamW", steps=2)
    digests = {reference.digest()}
    for index in range(len(bits(reference))):
        changed = make_shard("AdamW", steps=2)
        tensor = changed.pack()[1][index]
        if tensor.numel():
            tensor.reshape(-1)[-1] += 1
            digests.add(changed.digest())
    counted = make_shard("AdamW", steps=2)
    counted.counters = Counters(applied=2, skipped=1)
    digests.add(counted.digest())
    # Two parameters that are not empty, with three tensors of Adam's each; Adam counts for the empty one too.
    assert len(digests) == 1 + 2 * 4 + 1 + 1


def test_optimizer_state_that_belongs_to_no_parameter_is_refused_and_not_lost():
    shard = make_shard("SGD without state", steps=1)
    shard.optimizer.state["global"] = {"k": 3}  # type: ignore[index]
    with pytest.raises(ValueError, match="optimizer=SGD keeps state by 'global': it may keep state by parameter only"):
        shard.pack()


def test_equal_bits_give_equal_digests_whatever_the_strides():
    matrix = torch.arange(12.0).reshape(3, 4)
    assert digest_of(Counters(), [matrix.t().contiguous().t()]) == digest_of(Counters(), [matrix])
    assert digest_of(Counters(), [-torch.zeros(3)]) != digest_of(Counters(), [torch.zeros(3)])


def test_the_learning_rate_of_a_step_reaches_each_group_by_its_scale():
    params = random_params()
    groups = [{"params": [params["matrix"]], "lr_scale": 0.5}, {"params": [params["gain"], params["empty"]]}]
    shard, before = Shard(0, params, SGD(groups, lr=1.0)), random_params()
    shard.apply({name: torch.ones(shape) for name, shape in SHAPES.items()}, 0.25)
    assert torch.equal(shard.params["matrix"], before["matrix"] - 0.125)
    assert torch.equal(shard.params["gain"], before["gain"] - 0.25)
    assert all(param.grad is None for param in params.values())


def test_skips_are_counted_and_a_good_step_ends_the_row():
    shard = make_shard("AdamW")
    for in_a_row in (1, 2, 0, 1):
        shard.advance(skipped=in_a_row > 0, in_a_row=in_a_row)
    assert shard.counters == Counters(applied=4, skipped=3, skipped_in_a_row=1)
