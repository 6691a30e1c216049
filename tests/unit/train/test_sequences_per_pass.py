"""Several sequences in a pass: the sums of each alone, on any ring, and the same bits after a step that broke off."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.data.loader import joined, samples_text, slice_sample
from elastic_ring.data.sampling.order import passes
from elastic_ring.mesh import Mesh
from elastic_ring.model.init import Initialiser, initialise_module
from elastic_ring.model.loss import language_model_loss
from elastic_ring.model.transformer import Transformer
from elastic_ring.train.task import attention_of, batch_of
from tests.unit.attention.attention_rings import ThreadRings, in_threads
from tests.unit.groups.processes import Membership, membership
from tests.unit.train.test_corruption import CHECKED, attempt, detect, flip
from tests.unit.train.tiny_task import (
    CONTEXT,
    MODEL,
    STEP,
    RandomText,
    begin,
    facts_after_a_break,
    facts_of_steps,
    make_task,
    plain_training,
    run_steps,
)

NUM_SEQUENCES, NUM_STEPS = 5, 3
PATTERNS = {
    "dense": None,
    "mixed": '{"block": 4, "groups": [{"layers": [0], "rule": "sinks:2+window:5"},'
    ' {"heads": [{"rule": "random:1,unit=4"}, {"rule": "window:3"}]}]}',
    "by content": "topk:2,unit=3;topk:2,causal=0,unit=2+window:2@1",
}


@pytest.fixture(scope="module")
def rings() -> ThreadRings:
    return ThreadRings()


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_passes_of_several_sequences_sum_up_to_the_loss_and_gradient_of_each_alone(
    rings: ThreadRings, cp: int, pattern: str
) -> None:
    """Five sequences of two documents in fp64: one at a time, then two, two and one, then all."""
    text = PATTERNS[pattern]
    task = make_task(pattern=None if text is None else parse_pattern(text))
    model = Transformer(replace(MODEL, dtype="float64"))
    initialise_module(model, Initialiser(0, MODEL.num_layers))
    layout, groups = make_layout("zigzag", CONTEXT, cp), rings.groups(cp) if cp > 1 else [None]

    def work(cp_rank: int, together: int) -> list[Tensor]:
        own, found = copy.deepcopy(model), torch.zeros(2, dtype=torch.float64)
        for group in passes(NUM_SEQUENCES, together):
            slices = [slice_sample(RandomText().read(i), layout, cp_rank, sample_id=i, index_in_batch=i) for i in group]
            piece = joined(slices, CONTEXT)
            assert piece.document_ids[0].unique().tolist() <= list(range(2 * len(group)))
            attention = attention_of(task, piece, layout.repeated(len(group)), cp_rank, groups[cp_rank])
            loss, num_targets = language_model_loss(own, batch_of(piece, attention, torch.device("cpu")))
            loss.backward()
            found += torch.stack([loss.detach(), torch.tensor(float(num_targets))])
        return [found, *(param.grad for param in own.parameters() if param.grad is not None)]

    alone, *others = (
        [torch.stack(ranks).sum(0) for ranks in zip(*in_threads(cp, partial(work, together=n)), strict=True)]
        for n in (1, 2, NUM_SEQUENCES)
    )
    for found in others:
        for one, other in zip(found, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------ steps


@pytest.fixture(scope="module")
def pair() -> Iterator[Membership]:
    with membership(2) as made:
        yield made


def steps_on(pair: Membership, mesh: Mesh, together: int) -> list[tuple[str, tuple[float, ...]]]:
    ranks = range(mesh.size)
    task = make_task(step=replace(STEP, sequences_per_pass=together))
    pair.all(begin, pair.meeting(), mesh, task, ranks=ranks)
    results: list[Any] = pair.all(run_steps, NUM_STEPS, ranks=ranks)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.slow
def test_training_two_at_a_time_is_plain_training_with_the_samples_of_one_at_a_time(pair: Membership) -> None:
    """Three sequences a step: a pass of two and one of one, and on two rings one pass each of two and of one."""
    wanted, _ = plain_training(make_task(), NUM_STEPS)
    samples = [samples_text(limbs) for _, limbs in steps_on(pair, Mesh(1, 1), 1)]
    for mesh in (Mesh(1, 1), Mesh(1, 2), Mesh(2, 1)):
        found = steps_on(pair, mesh, 2)
        assert [float.fromhex(loss) for loss, _ in found] == pytest.approx(wanted, abs=1e-5), mesh
        assert [samples_text(limbs) for _, limbs in found] == samples, mesh


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("mesh", [Mesh(1, 2), Mesh(2, 1)], ids=str)
def test_a_step_that_breaks_off_runs_again_with_the_same_bits(pair: Membership, mesh: Mesh) -> None:
    task = make_task(step=replace(STEP, sequences_per_pass=2))
    assert facts_after_a_break(pair, mesh, task, 1, "reduce") == facts_of_steps(pair, mesh, task)


@pytest.mark.slow
def test_rings_recompute_a_whole_pass_of_each_other(pair: Membership) -> None:
    """The first passes of the two rings have two sequences and one."""
    for wrong in (None, 0, 1):
        pair.all(begin, pair.meeting(), Mesh(2, 1), make_task(step=replace(STEP, sequences_per_pass=2)))
        pair.all(detect, "act")
        pair.all(run_steps, CHECKED)
        if wrong is not None:
            pair.call(wrong, flip, "backward")
        for name, text, _ in pair.all(attempt, 1):
            assert (name, "local gradient" in text) == (("", False) if wrong is None else ("ComputedWrongly", True))
