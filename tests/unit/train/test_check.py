"""The start-up check lets a right model through and names what is wrong with another, on a real ring of two."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.mesh import Mesh
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.init import Initialiser
from elastic_ring.model.loss import language_model_loss
from elastic_ring.model.transformer import Transformer
from elastic_ring.train.startup.check import ModelRefused, check_model
from elastic_ring.train.task import Batch, TrainingTask
from tests.small_models import small_config
from tests.unit.groups.processes import Membership, membership
from tests.unit.train.tiny_task import MODEL, STEP, RandomText, begin, facts, make_task, run_steps

RING = Mesh(1, 2)


@pytest.fixture(scope="module")
def pair() -> Iterator[Membership]:
    with membership(2) as made:
        yield made


# ------------------------------------------------------------ the models and losses of users


def blind_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What most models call: it sees the rank's own slice only."""
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)


def blind_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return language_model_loss(model, replace(batch, attention=blind_attention))


def local_positions_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return language_model_loss(model, replace(batch, positions=torch.arange(batch.tokens.shape[1])[None]))


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss, num_targets = language_model_loss(model, batch)
    return loss / num_targets


def uncounted_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """Counts tokens where it should count targets."""
    loss, num_targets = language_model_loss(model, batch)
    return loss, num_targets + 1


class Normalised(Transformer):
    """A decoder with running statistics over what this rank has seen."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.batch_norm = nn.BatchNorm1d(config.width)

    def forward(self, tokens: Tensor, **rest: Any) -> Any:
        self.batch_norm(self.embedding(tokens)[0])
        return super().forward(tokens, **rest)


class WithTable(Transformer):
    """A decoder with a buffer that no pass changes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.register_buffer("table", torch.arange(config.width, dtype=torch.float32))


class Mixing(Transformer):
    """Lets tokens see each other outside attention, by a mean over the slice."""

    def forward(self, tokens: Tensor, *, attention: Any, **rest: Any) -> Any:
        def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v - v.mean(1, keepdim=True))

        return super().forward(tokens, attention=mixed, **rest)


class Wide(Initialiser):
    """First values at which attention matters: near zero all attention is a mean."""

    def tensor(self, name: str, shape: Any, rows: tuple[int, int] | None = None) -> Tensor:
        value = super().tensor(name, shape, rows)
        return value * 10 if value.dim() > 1 else value


# ------------------------------------------------------------ jobs


def check(me: Any) -> None:
    check_model(me.state.task, me.groups, me.state)


def refusals(pair: Membership, **settings: Any) -> list[str]:
    """What each rank says of a task; "" where it passes."""
    return verdicts(pair, make_task(**settings))


def verdicts(pair: Membership, task: TrainingTask) -> list[str]:
    pair.all(begin, pair.meeting(), RING, task)
    said = []
    for rank in (0, 1):
        pair.start(rank, check)
    for rank in (0, 1):
        try:
            pair.result(rank)
            said.append("")
        except ModelRefused as error:
            said.append(str(error))
    return said


@pytest.mark.thinned(num=2)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"step": replace(STEP, layout="contiguous")},
        {"step": replace(STEP, param_dtype="bfloat16")},
        {"step": replace(STEP, sequences_per_pass=3)},
        {"initial": Wide(0, 2)},
        {"initial": None},
        {"model": WithTable},
    ],
    ids=str,
)
def test_a_right_model_passes(pair: Membership, settings: dict[str, Any]) -> None:
    assert refusals(pair, **settings) == ["", ""]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_is_compared_as_it_trains_with_dropout(pair: Membership, dtype: Any) -> None:
    pytest.importorskip("transformers")
    from elastic_ring.integrations.transformers import ring_model

    ring = ring_model(small_config("Starcoder2", residual_dropout=0.2, embedding_dropout=0.1))
    step = replace(STEP, param_dtype=dtype, sequences_per_pass=2)
    task = replace(make_task(), model=ring, loss=language_model_loss, initial=ring.ring_parts(step).initial, step=step)
    assert verdicts(pair, task) == ["", ""]
    for verdict in verdicts(pair, replace(task, loss=local_positions_loss)):
        assert "take positions from batch.positions" in verdict


def check_in_blocks(me: Any) -> int:
    """The check with what GPUs run for sparse layers; returns how many of them ran."""
    made: list[PatternedAttention] = []

    def in_blocks(*arguments: Any, **options: Any) -> PatternedAttention:
        task, _, layout, cp_rank, group, _ = arguments
        made.append(PatternedAttention(task.pattern, layout, cp_rank, group, RingOptions(kernel="reference-sparse")))
        return made[-1]

    with mock.patch("elastic_ring.train.startup.check.attention_of", in_blocks):
        check_model(me.state.task, me.groups, me.state)
    return len(made)


@pytest.mark.slow
@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_pattern_for_gpus_is_checked_in_whole_blocks(pair: Membership, layout: str) -> None:
    task = make_task(
        step=replace(STEP, context_tokens=2048, layout=layout),
        data=RandomText(2048),
        pattern=parse_pattern("bigbird:2,0,0;dense@1"),
    )
    pair.all(begin, pair.meeting(), RING, task)
    assert pair.all(check_in_blocks) == [2, 2]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("initial", [Initialiser(0, 2), Wide(0, 2)], ids=["as built", "wide"])
def test_a_model_that_attends_to_its_own_slice_only_is_refused(pair: Membership, layout: str, initial: Any) -> None:
    for said in refusals(pair, loss=blind_loss, step=replace(STEP, layout=layout), initial=initial):
        assert "on a ring the model gives another result than on one rank" in said
        assert "attend through batch.attention" in said


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"loss": local_positions_loss}, "take positions from batch.positions"),
        ({"model": Mixing}, "let no token see another in any other way"),
        ({"model": Normalised}, "changes the buffer batch_norm.running_mean"),
        ({"loss": mean_loss}, r"returned Tensor: return \(sum of the loss"),
        ({"loss": uncounted_loss}, "count the targets of the slice"),
    ],
    ids=["positions", "mixing", "buffers", "mean", "uncounted"],
)
def test_what_would_train_wrongly_without_any_error_is_refused(
    pair: Membership, settings: dict[str, Any], named: str
) -> None:
    assert all(re.search(named, said) for said in refusals(pair, **settings))


@pytest.mark.parametrize("together", [1, 2])
def test_a_model_whose_sequences_of_one_pass_see_each_other_is_refused_on_one_rank(
    pair: Membership, together: int
) -> None:
    task = make_task(step=replace(STEP, sequences_per_pass=together), initial=Wide(0, 2), model=Mixing)
    pair.call(0, begin, pair.meeting(), Mesh(1, 1), task)
    if together == 1:
        pair.call(0, check)
    else:
        with pytest.raises(ModelRefused, match=r"with sequences_per_pass=2 the model gives another result"):
            pair.call(0, check)


@pytest.mark.slow
def test_the_check_changes_nothing_of_what_is_trained(pair: Membership) -> None:
    pair.all(begin, pair.meeting(), RING, make_task())
    pair.all(run_steps, 3)
    unchecked = pair.all(facts)
    pair.all(begin, pair.meeting(), RING, make_task())
    pair.all(check)
    pair.all(run_steps, 3)
    assert pair.all(facts) == unchecked


class ScalarOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


class PlainTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.inner.table = torch.arange(3.0)
        self.inner.register_buffer("kept", torch.arange(3.0))
        self.inner.same = self.inner.kept


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (PlainTable, r"inner\.table is a plain tensor of Linear, .* use self\.register_buffer\('table', \.\.\.\)"),
        (partial(nn.Linear, 3, 3, dtype=torch.float16), "parameter weight is torch.float16: build .* in float32"),
        (partial(Transformer, replace(MODEL, dtype="float64")), "is torch.float64: build the model in float32"),
        (ScalarOnly, r"parameter scale has no dimension: .* give it the shape \(1,\)"),
    ],
    ids=["a plain tensor", "float16", "float64", "scalar"],
)
def test_parameters_that_cannot_be_trained_as_shards_are_refused(pair: Membership, model: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        pair.call(0, begin, pair.meeting(), Mesh(1, 1), replace(make_task(), model=model))
