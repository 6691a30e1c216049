"""First values depend on (seed, name, shape) and on nothing else."""

from __future__ import annotations

import math
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from elastic_ring.model.config import ModelConfig
from elastic_ring.model.init import Initialiser, initialise_module
from elastic_ring.model.transformer import Transformer
from elastic_ring.train.wrap import read_ahead

TINY = ModelConfig(31, 2, 24, 4, 2, 8, 40)


def test_order_device_and_the_global_generator_do_not_matter() -> None:
    names = [(f"blocks.{index}.attention.query.weight", (5, 3 + index)) for index in range(6)]
    forward = {name: Initialiser(3, 1).tensor(name, shape) for name, shape in names}
    torch.manual_seed(99)
    state = torch.get_rng_state()
    with torch.device("meta"):
        backward = {name: Initialiser(3, 1).tensor(name, shape) for name, shape in reversed(names)}
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in forward.items():
        assert torch.equal(value, backward[name])
        assert value.dtype == torch.float32


def test_seed_name_and_shape_each_matter() -> None:
    values = [
        Initialiser(0, 1).tensor("a.weight", (4, 6)),
        Initialiser(1, 1).tensor("a.weight", (4, 6)),
        Initialiser(0, 1).tensor("b.weight", (4, 6)),
        Initialiser(0, 1).tensor("a.weight", (6, 4)),
    ]
    assert len({tuple(value.flatten().tolist()) for value in values}) == 4


@pytest.mark.parametrize("block_elements", [1, 20, 64, 2**20])
@pytest.mark.parametrize("cp", [1, 2, 3, 5, 8])
def test_the_rows_of_any_number_of_ranks_make_up_the_parameter(
    cp: int, block_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ring.model.init._BLOCK_ELEMENTS", block_elements)
    initialiser = Initialiser(5)
    for name, shape in (("a.weight", (7, 3, 2)), ("norm.weight", (7,)), ("a.bias", (7,)), ("table", (7,))):
        whole = initialiser.tensor(name, shape)
        assert whole.shape == shape
        each = -(-7 // cp)
        bounds = [(min(7, rank * each), min(7, (rank + 1) * each)) for rank in range(cp)]
        assert torch.equal(torch.cat([initialiser.tensor(name, shape, rows) for rows in bounds]), whole)


def test_large_parameters_do_not_repeat_themselves() -> None:
    drawn = Initialiser(0, 1).tensor("a.weight", (3000, 1000))
    assert len(torch.unique(drawn[:, 0])) > 2990
    assert drawn.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(drawn.mean().item()) < 1e-4


def test_each_role_gets_its_own_scale() -> None:
    model = Transformer(TINY)
    initialise_module(model, Initialiser(0, num_layers=50))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("output.weight", "down.weight"))
            std = 0.02 / math.sqrt(100) if residual else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.15), name


def test_modules_of_others_follow_the_same_rules() -> None:
    model = nn.Sequential(nn.Linear(30, 40), nn.LayerNorm(40), nn.Conv1d(40, 8, 3))
    initialise_module(model, Initialiser(0))
    values = dict(model.named_parameters())
    assert all((values[name] == 0).all() for name in ("0.bias", "1.bias", "2.bias"))
    assert (values["1.weight"] == 1).all()
    assert values["0.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert values["2.weight"].std().item() == pytest.approx(0.02, rel=0.1)


def fill_uniform(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    tensor.uniform_(-1.0, 1.0, generator=generator)


def test_a_users_own_function_takes_over_and_stays_independent_of_the_mesh() -> None:
    initialiser = pickle.loads(pickle.dumps(Initialiser(0, init_fn=fill_uniform)))
    whole = initialiser.tensor("norm.weight", (9, 2))
    assert whole.abs().max() > 0.5
    assert torch.equal(initialiser.tensor("norm.weight", (9, 2), (3, 5)), whole[3:5])


def test_tied_parameters_are_filled_once_and_stay_tied() -> None:
    model = Transformer(ModelConfig(31, 1, 24, 4, 2, 8, 40, tie_embeddings=True))
    initialise_module(model, Initialiser(0))
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, Initialiser(0, 1).tensor("embedding.weight", (31, 24)))


def test_no_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="num_layers=0"):
        Initialiser(0, num_layers=0)


def test_first_values_are_made_one_ahead_in_order_and_without_gradients() -> None:
    made: list[int] = []

    def make(number: int) -> torch.Tensor:
        made.append(number)
        return torch.nn.Parameter(torch.zeros(2)).fill_(number)  # in place, which gradients would forbid

    cpu = torch.device("cpu")
    values = read_ahead([partial(make, number) for number in range(4)], cpu)
    assert next(values)[0] == 0.0
    assert [value[0].item() for value in values] == [1.0, 2.0, 3.0]
    assert made == [0, 1, 2, 3]
    assert list(read_ahead([], cpu)) == []
    with pytest.raises(ZeroDivisionError):
        list(read_ahead([lambda: torch.zeros(1 // 0)], cpu))
