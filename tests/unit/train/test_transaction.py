"""The step as a transaction, on real processes, groups and shards: right, repeatable, and whole or not at all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic_ring.control.decisions.loss_spikes import Action, SpikeWatch
from elastic_ring.costs import MOST_SHARES
from elastic_ring.data.loader import Loader, samples_text
from elastic_ring.data.sampling.validation import ValidationSet, ValidationSource, measured
from elastic_ring.data.source import hold_out
from elastic_ring.errors import LossSpike, TooManySkipped
from elastic_ring.mesh import Mesh
from elastic_ring.model.transformer import Transformer
from elastic_ring.state import device_sums
from elastic_ring.state.device_sums import squared_norm
from elastic_ring.state.header import Counters
from elastic_ring.train import passes
from elastic_ring.train.passes import sequence_seed
from elastic_ring.train.task import TrainingTask
from elastic_ring.train.transaction import TransactionOptions
from elastic_ring.train.vote import MustGoBack
from tests.unit.groups.processes import Membership, membership
from tests.unit.train import tiny_task
from tests.unit.train.tiny_task import (
    CONTEXT,
    EXPERTS,
    MODEL,
    OPTIM,
    STEP,
    MaskedText,
    WithUnused,
    abort_at_a_break,
    abort_until_paused,
    applying_when_waiting,
    ask_late,
    begin,
    break_off,
    by_its_forward,
    facts,
    facts_after_a_break,
    facts_after_a_rebuild,
    facts_of_steps,
    in_parts,
    last_vote,
    limit_rows,
    loads_of_a_step,
    make_task,
    momentum,
    own_slices,
    parted,
    plain_training,
    plan_break,
    rebuild,
    roll_forward,
    run_steps,
    sums_under_way,
)

ALONE, RING, REPLICAS, SQUARE = Mesh(1, 1), Mesh(1, 2), Mesh(2, 1), Mesh(2, 2)
NUM_STEPS = 3
GATHERED = {"model": partial(Transformer, EXPERTS), "step": replace(STEP, experts="gather")}
PARTS = {"model": in_parts}
SENT = {"model": partial(Transformer, EXPERTS), "step": replace(STEP, experts="send")}


@pytest.fixture(scope="module")
def four() -> Iterator[Membership]:
    with membership(4) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(four: Membership) -> list[dict[str, Any]]:
    """What the ranks of the square hold after NUM_STEPS steps without a fault."""
    return facts_of_steps(four, SQUARE, make_task())


def whole(slices: list[dict[str, Tensor]], cp: int) -> dict[str, Tensor]:
    """The weights of the first ring."""
    return {name: torch.cat([part[name] for part in slices[:cp]]) for name in slices[0]}


def train_as_plain(
    four: Membership,
    mesh: Mesh,
    task: TrainingTask,
    plain: tuple[list[float], dict[str, Tensor]],
    atol: float = 1e-6,
) -> list[tuple[str, tuple[float, ...]]]:
    """The steps of a mesh, whose losses and weights are those of plain training."""
    (losses, weights), ranks = plain, range(mesh.size)
    four.all(begin, four.meeting(), mesh, task, ranks=ranks)
    results: list[Any] = four.all(run_steps, len(losses), ranks=ranks)
    assert all(result == results[0] for result in results)
    assert [float.fromhex(loss) for loss, _ in results[0]] == pytest.approx(losses, rel=1e-6), mesh
    trained = whole(four.all(own_slices, ranks=ranks), mesh.cp)
    assert list(trained) == list(weights)
    for name, tensor in weights.items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=atol, msg=f"{mesh} {name}")
    return results[0]


# ------------------------------------------------------------ right


@pytest.mark.thinned(num=3)
@pytest.mark.parametrize(
    "settings",
    [{}, {"optimizer": momentum}, GATHERED, SENT, PARTS],
    ids=["AdamW", "SGD", "experts", "experts that tokens are sent to", "parts"],
)
@pytest.mark.parametrize("mesh", [ALONE, RING, REPLICAS, SQUARE, Mesh(1, 4)], ids=str)
def test_steps_on_a_mesh_are_those_of_plain_training(four: Membership, mesh: Mesh, settings: dict[str, Any]) -> None:
    """Three sequences on two rings: one ring has twice the tokens of the other. In a ring of four one has no expert."""
    task = replace(make_task(), **settings)
    train_as_plain(four, mesh, task, plain_training(task, NUM_STEPS))


@pytest.mark.thinned(num=2)
@pytest.mark.parametrize("settings", [GATHERED, SENT], ids=["gathered", "sent"])
@pytest.mark.parametrize("mesh", [ALONE, RING, Mesh(1, 4)], ids=str)
def test_the_vote_has_the_largest_load_of_an_expert(four: Membership, mesh: Mesh, settings: dict[str, Any]) -> None:
    """A ring of all sequences has what the gradient of the bias says, which recomputation does not count twice."""
    task, ranks = replace(make_task(), **settings), range(mesh.size)
    four.all(begin, four.meeting(), mesh, task, ranks=ranks)
    found = four.all(loads_of_a_step, ranks=ranks)
    fair = STEP.global_batch * CONTEXT * EXPERTS.experts_per_token / EXPERTS.num_experts
    excess = max(excess for _, excess in found)
    assert excess > 1
    assert [load for load, _ in found] == pytest.approx([1 + excess / fair] * mesh.size, rel=1e-5)


def test_the_mean_over_tokens_that_count_is_the_same_on_every_mesh(four: Membership) -> None:
    """Slices, sequences and rings of which nothing counts among them; and a batch of which nothing does."""
    task = make_task(data=MaskedText(), step=replace(STEP, global_batch=4))
    plain, meshes = plain_training(task, 2), (ALONE, SQUARE, Mesh(4, 1), Mesh(1, 4))
    steps = [train_as_plain(four, mesh, task, plain) for mesh in meshes]
    assert len({tuple(samples_text(samples) for _, samples in results) for results in steps}) == 1
    four.all(begin, four.meeting(), SQUARE, replace(task, data=MaskedText(counts=False)))
    assert all(math.isnan(float.fromhex(loss)) for loss, _ in four.all(run_steps, 2)[0])
    assert math.isnan(four.all(validate)[0]["val_loss"])
    assert all(part.isfinite().all() for slices in four.all(own_slices) for part in slices.values())


def test_weights_that_embedding_and_head_share_stay_one_on_every_mesh(four: Membership) -> None:
    task = replace(make_task(), model=partial(Transformer, replace(MODEL, tie_embeddings=True)))
    plain = plain_training(task, 2)
    assert "head.weight" not in plain[1]
    for mesh in (ALONE, RING):
        train_as_plain(four, mesh, task, plain)


def accuracy(model: Any, batch: Any) -> tuple[Tensor, int]:
    """A metric of one's own: how many targets the model ranks first."""
    logits = model(batch.tokens, positions=batch.positions, document_ids=batch.document_ids, attention=batch.attention)
    counts = batch.targets != -100
    return (logits.argmax(-1) == batch.targets)[counts].sum(), int(counts.sum())


def validate(me: Any) -> dict[str, float]:
    """On three sequences, or on these as one set and on five as another."""
    source = me.state.loader.source
    of = ValidationSource(me.state.task.validation, hold_out(source, num_sequences=3)[1], {"code": source})
    found: dict[str, float] = passes.validate(me.state, Loader(of), of)
    return found


def test_metrics_of_sets_are_the_same_on_every_rank_and_mesh(four: Membership) -> None:
    """On rings of one size bit for bit, as long as the weights are."""
    sets = {"first": ValidationSet(), "code": ValidationSet("its own", weight=3.0, num_sequences=5)}
    task, found, before = make_task(metrics={"accuracy": accuracy}, validation=sets), [], {}
    for mesh in (ALONE, SQUARE, RING, Mesh(4, 1)):
        ranks = range(mesh.size)
        four.all(begin, four.meeting(), mesh, task, ranks=ranks)
        assert before.setdefault(mesh.cp, told := four.all(validate, ranks=ranks)[0]) == told
        four.all(run_steps, 2, ranks=ranks)
        told = four.all(validate, ranks=ranks)
        assert all(one == told[0] for one in told)
        found.append(told[0])
    assert list(found[0]) == measured(sets, ["accuracy"])
    first, code, both = (found[0][f"val_{name}accuracy"] for name in ("first_", "code_", ""))
    assert 0 < both < 1
    assert both == pytest.approx((first + 3 * code) / 4)
    assert found[0]["val_code_perplexity"] == pytest.approx(math.exp(found[0]["val_code_loss"]))
    assert all(one == pytest.approx(found[0], rel=1e-5) for one in found[1:])


@pytest.mark.slow
def test_what_is_busy_when_a_step_begins_may_be_done_when_it_votes(four: Membership) -> None:
    four.all(begin, four.meeting(), SQUARE, make_task())
    assert four.all(ask_late) == [(False, False)] * 4


def test_every_mesh_uses_the_same_samples(four: Membership) -> None:
    digests = []
    for mesh in (ALONE, RING, REPLICAS, SQUARE):
        four.all(begin, four.meeting(), mesh, make_task(), ranks=range(mesh.size))
        results = four.all(run_steps, 2, ranks=range(mesh.size))
        digests.append([samples_text(samples) for _, samples in results[0]])
    assert all(digest == digests[0] for digest in digests)
    assert digests[0][0] != digests[0][1]


def test_replicas_end_with_the_same_bits(undisturbed: list[dict[str, Any]]) -> None:
    digests = [fact["digest"] for fact in undisturbed]
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]
    assert all(fact["valid"] and not fact["unapplied"] and not fact["has_gradient"] for fact in undisturbed)


def test_a_parameter_that_no_pass_uses_has_a_gradient_of_zero(four: Membership) -> None:
    four.all(begin, four.meeting(), SQUARE, make_task(WithUnused))
    before = whole(four.all(own_slices), 2)["unused"]
    four.all(run_steps, 2)
    after = whole(four.all(own_slices), 2)["unused"]
    assert torch.equal(before, after)
    assert before.abs().sum() > 0


# ------------------------------------------------------------ broken off


@pytest.mark.thinned(num=2)
@pytest.mark.parametrize("phase", ["forward", "backward", "reduce"])
def test_a_step_that_breaks_off_and_runs_again_gives_the_same_bits(
    four: Membership, undisturbed: list[dict[str, Any]], phase: str
) -> None:
    assert facts_after_a_break(four, SQUARE, make_task(), 2, phase) == undisturbed


def test_a_step_that_breaks_off_in_any_exchange_of_experts_and_runs_again_gives_the_same_bits(four: Membership) -> None:
    """Of rows and of results, in forward, recomputation and backward, on each rank once; and in the sum of loads, which
    the other ranks of two rings wait in where one breaks off before it."""
    task = replace(make_task(), **SENT)
    calm = facts_of_steps(four, SQUARE, task)
    for number, phase in [*product(range(3), ("dispatch", "combine")), (0, "reduce")]:
        breaking = (2 * number + (phase == "combine")) % 4
        assert facts_after_a_break(four, SQUARE, task, breaking, phase, number) == calm, (phase, number)


@pytest.mark.slow
def test_rows_that_come_in_parts_give_the_bits_of_rows_that_come_at_once(four: Membership) -> None:
    """At most a fair share at a time: one of the two ranks has two of the three experts. A step that breaks off in an
    exchange of a part runs again. With less than an expert's rows, which are cut then, it is plain training's result.
    """
    task, ring, found = replace(make_task(), **SENT), range(2), []
    try:
        for shares in (2.0, 1.0):
            four.all(limit_rows, shares)
            four.all(begin, four.meeting(), RING, task, ranks=ring)
            one, other = four.all(parted, NUM_STEPS, ranks=ring)
            assert one == other
            assert (sum(one) > 0, sum(one) % 2) == (shares == 1.0, 0)  # in forward and in recomputation
            found.append(four.all(facts, ranks=ring))
        assert found[0] == found[1]
        assert facts_after_a_break(four, RING, task, 1, "dispatch", 2) == found[0]
        four.all(limit_rows, 0.3)
        four.all(begin, four.meeting(), Mesh(1, 4), task)
        assert four.all(parted, NUM_STEPS) == [[6] * NUM_STEPS] * 4
        trained = whole(four.all(own_slices), 4)
        for name, tensor in plain_training(task, NUM_STEPS)[1].items():
            torch.testing.assert_close(trained[name], tensor, rtol=0, atol=1e-6, msg=name)
    finally:
        four.all(limit_rows, MOST_SHARES)


def test_a_break_between_the_parts_of_a_layer_changes_no_bit_nor_do_copies_of_state_in_host_memory(
    four: Membership,
) -> None:
    task = replace(make_task(), **PARTS)
    calm = facts_of_steps(four, SQUARE, task)
    assert facts_after_a_break(four, SQUARE, task, 2, "backward", cpu_offload="all") == calm


def test_a_break_while_gradients_are_summed_over_the_rings_changes_no_bit(four: Membership) -> None:
    """Rings of one: the last layers' buckets are under way when rank 1 breaks off, and rank 0 goes on alone."""
    calm = facts_of_steps(four, REPLICAS, make_task())
    four.all(begin, four.meeting(), REPLICAS, make_task(), ranks=range(2))
    four.call(1, plan_break, "backward", 1, MODEL.num_layers - 1)
    abort_at_a_break(four, REPLICAS, 1)
    num_begun, num_buckets = four.call(1, sums_under_way)
    assert 0 < num_begun < num_buckets
    assert facts_after_a_rebuild(four, REPLICAS) == calm


def test_a_ring_of_one_computes_with_the_newest_values_of_its_masters_whatever_the_loss_calls(four: Membership) -> None:
    found = []
    for change in ({}, {"loss": by_its_forward}, {"step": STEP}):
        task = make_task(**{"step": replace(STEP, param_dtype="bfloat16"), **change})
        four.all(begin, four.meeting(), ALONE, task, ranks=range(1))
        found.append([float.fromhex(loss) for loss, _ in four.call(0, run_steps, NUM_STEPS)])
    half, direct, exact = found
    assert direct == half
    assert half == pytest.approx(exact, rel=1e-2)
    assert half != exact


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("what", ["optimizer", "all"])
def test_state_in_host_memory_has_the_same_bits_also_in_the_module_of_another_generation(
    four: Membership, undisturbed: list[dict[str, Any]], what: str
) -> None:
    four.all(begin, four.meeting(), SQUARE, make_task(), what)
    four.all(run_steps, 1)
    assert facts_after_a_rebuild(four, SQUARE) == undisturbed


def test_a_rank_that_misses_the_result_applies_it_later_and_only_once(
    four: Membership, undisturbed: list[dict[str, Any]]
) -> None:
    four.all(begin, four.meeting(), SQUARE, make_task())
    four.call(3, plan_break, "vote", 1)
    ends = []
    for rank in range(4):
        four.start(rank, break_off, 2)
    for rank in range(4):  # rank 3 has entered the vote, so it completes on the others
        ends.append(four.result(rank))
    assert ends == ["completed"] * 3 + ["Broken"]
    assert all(four.now(rank, abort_until_paused) for rank in range(4))
    before = four.all(facts)
    assert [fact["applied"] for fact in before] == [2, 2, 2, 1]
    assert (before[3]["valid"], before[3]["has_gradient"], before[3]["gradient_membership_id"]) == (True, True, (1, 0))
    vote = four.call(0, last_vote)
    assert vote.step == 1
    assert vote.membership_id == before[3]["gradient_membership_id"]
    four.all(rebuild, four.meeting(), SQUARE)
    four.all(roll_forward, vote)
    rolled = four.all(facts)
    assert [fact["applied"] for fact in rolled] == [2] * 4
    assert rolled[3]["digest"] == rolled[1]["digest"]
    four.all(roll_forward, vote)
    assert four.all(facts) == rolled
    four.all(run_steps, NUM_STEPS - 2)
    assert four.all(facts) == [{**fact, "gradient_membership_id": (1, 1)} for fact in undisturbed]


def test_a_shard_whose_apply_broke_off_is_not_valid(four: Membership) -> None:
    four.all(begin, four.meeting(), ALONE, make_task(), ranks=(0,))
    four.call(0, plan_break, "apply", 1)
    assert four.call(0, break_off, 3) == "Broken"
    fact = four.call(0, facts)
    assert (fact["applied"], fact["valid"]) == (1, False)


def test_a_thread_that_waits_for_readers_of_the_shard_counts_as_one_that_writes_it(four: Membership) -> None:
    """One that was abandoned there would write when the wait ends."""
    four.all(begin, four.meeting(), ALONE, make_task(), ranks=(0,))
    assert four.call(0, applying_when_waiting) == [True]


# ------------------------------------------------------------ skipped


def poison(me: Any, on: bool) -> None:
    tiny_task.POISON.on = on


def test_a_step_with_a_non_finite_gradient_anywhere_changes_nothing_but_the_counters(four: Membership) -> None:
    four.all(begin, four.meeting(), SQUARE, make_task())
    four.all(run_steps, 1)
    before = four.all(own_slices)
    four.call(1, poison, True)
    losses = [results[0][0] for results in four.all(run_steps, 2)]
    assert losses == ["nan"] * 4
    for old, new in zip(before, four.all(own_slices), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert [fact["counters"] for fact in four.all(facts)] == [Counters(3, 2, 2)] * 4
    four.call(1, poison, False)
    four.all(run_steps, 1)
    assert [fact["counters"] for fact in four.all(facts)] == [Counters(4, 2, 0)] * 4
    assert not torch.equal(before[0]["embedding.weight"], four.all(own_slices)[0]["embedding.weight"])


def ignore_targets(me: Any, on: bool) -> None:
    tiny_task.POISON.ignores_targets = on


def skip_a_step_of_which_rank_3_hears_later(four: Membership, before: list[Any], break_at: int) -> None:
    """Rank 3 breaks off in the vote of step `break_at` and applies its result after a rebuild: no weight has moved."""
    four.call(3, plan_break, "vote", break_at)
    for rank in range(4):
        four.start(rank, break_off, 1)
    assert [four.result(rank) for rank in range(4)] == ["completed"] * 3 + ["Broken"]
    assert all(four.now(rank, abort_until_paused) for rank in range(4))
    vote = four.call(0, last_vote)
    four.all(rebuild, four.meeting(), SQUARE)
    four.all(roll_forward, vote)
    for old, new in zip(before, four.all(own_slices), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)


def test_a_step_without_a_target_moves_no_weight_on_any_rank_and_counts_for_no_row(four: Membership) -> None:
    """Momentum and weight decay would. Rank 3 learns of one such step from the vote that the others had."""
    optimizer = partial(tiny_task.momentum, weight_decay=0.1)
    four.all(begin, four.meeting(), SQUARE, make_task(optim=replace(OPTIM, max_skipped=0), optimizer=optimizer))
    four.all(run_steps, 1)
    before = four.all(own_slices)
    four.all(ignore_targets, True, ranks=(0, 1, 2))
    four.all(run_steps, 1)
    assert not torch.equal(before[0]["embedding.weight"], four.all(own_slices)[0]["embedding.weight"]), (
        "rank 3 has some"
    )
    before = four.all(own_slices)
    four.call(3, ignore_targets, True)
    assert [results[0][0] for results in four.all(run_steps, 1)] == ["nan"] * 4
    skip_a_step_of_which_rank_3_hears_later(four, before, 3)
    assert [fact["counters"] for fact in four.all(facts)] == [Counters(4, 2, 0)] * 4
    four.all(ignore_targets, False)
    four.all(run_steps, 1)
    assert not torch.equal(before[0]["embedding.weight"], four.all(own_slices)[0]["embedding.weight"])


@pytest.mark.parametrize(
    ("max_skipped", "num_steps", "named"),
    [
        (1, 2, r"step 1: 2 steps in a row .*max_skipped=1\); lower the learning rate"),
        (STEP.steps, STEP.steps, f"each of the {STEP.steps} steps was skipped.*nothing was trained"),
    ],
)
def test_more_skipped_steps_in_a_row_than_allowed_raise_on_every_rank_after_they_are_counted(
    four: Membership, max_skipped: int, num_steps: int, named: str
) -> None:
    four.all(begin, four.meeting(), REPLICAS, make_task(optim=replace(OPTIM, max_skipped=max_skipped)), ranks=(0, 1))
    four.call(0, poison, True)
    for rank in (0, 1):
        four.start(rank, run_steps, STEP.steps)
    for rank in (0, 1):
        with pytest.raises(TooManySkipped, match=named):
            four.result(rank)
    assert [fact["counters"] for fact in four.all(facts, ranks=(0, 1))] == [
        Counters(num_steps, num_steps, num_steps)
    ] * 2
    assert all(fact["valid"] for fact in four.all(facts, ranks=(0, 1)))


def test_random_numbers_depend_on_what_is_computed_and_not_on_what_came_before() -> None:
    seeds = {sequence_seed(*key) for key in [(0, 1, 2, 3), (1, 1, 2, 3), (0, 2, 2, 3), (0, 1, 3, 3), (0, 1, 2, 0)]}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sequence_seed(0, 12, 3, 4) != sequence_seed(0, 1, 23, 4)


def test_the_norm_is_summed_piece_by_piece_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.randn(100, generator=torch.Generator().manual_seed(0))
    wanted = float(flat.double().square().sum())
    assert float(squared_norm(flat)) == pytest.approx(wanted, rel=1e-14)
    monkeypatch.setattr(device_sums, "PIECE_ELEMENTS", 7)
    assert float(squared_norm(flat)) == pytest.approx(wanted, rel=1e-14)
    assert float(squared_norm(flat[:0])) == 0.0
    flat[50] = float("nan")
    assert not torch.isfinite(squared_norm(flat))


# ------------------------------------------------------------ loss spikes


def expect_losses_below(me: Any, loss: float, action: Action) -> None:
    """As if 40 steps before the first had had this loss."""
    me.state.options = TransactionOptions(spikes=SpikeWatch((action,)))
    for step in range(-40, 0):
        me.state.options.spikes.saw(step, loss, "")


def test_a_loss_spike_is_skipped_on_every_rank_also_by_one_that_applies_the_step_later(four: Membership) -> None:
    four.all(begin, four.meeting(), SQUARE, make_task())
    four.all(expect_losses_below, 0.5, "skip", ranks=(0, 1, 2))  # rank 3 has seen nothing
    before = four.all(own_slices)
    skip_a_step_of_which_rank_3_hears_later(four, before, 0)
    assert [fact["counters"] for fact in four.all(facts)] == [Counters(1, 1, 1)] * 4


def test_a_loss_spike_that_is_to_end_the_run_raises_on_every_rank_and_names_its_sequences(four: Membership) -> None:
    four.all(begin, four.meeting(), REPLICAS, make_task(), ranks=(0, 1))
    four.all(expect_losses_below, 0.5, "stop", ranks=(0, 1))
    for rank in (0, 1):
        four.start(rank, run_steps, 2)
    for rank in (0, 1):
        with pytest.raises(LossSpike, match=r"step 0: the loss is .*, and more than 0\.54 .* sequences \(\d+, "):
            four.result(rank)
    assert [fact["counters"] for fact in four.all(facts, ranks=(0, 1))] == [Counters(1, 1, 1)] * 2


def frames_that_keep_the_state(me: Any) -> bool:
    """Of the request to go back: a new shard needs the memory of the old one at once."""
    return me.state.held.back.__traceback__ is not None


def test_going_back_is_asked_for_again_where_the_generation_that_should_have_heard_it_had_ended(
    four: Membership,
) -> None:
    """As where a member dies in the very step: its loss is known first, and the others' request is out of date."""
    ranks = (0, 1)
    four.all(begin, four.meeting(), REPLICAS, make_task(), ranks=ranks)
    four.all(expect_losses_below, 0.5, "back", ranks=ranks)
    for attempt in range(2):
        for rank in ranks:
            four.start(rank, run_steps, 2)
        for rank in ranks:
            with pytest.raises(MustGoBack, match=r"the loss of step 0 is .*, above 0\.54"):
                four.result(rank)
        assert [fact["counters"] for fact in four.all(facts, ranks=ranks)] == [Counters(1, 1, 1)] * 2, attempt
        assert four.all(frames_that_keep_the_state, ranks=ranks) == [False] * 2, attempt
        four.all(abort_until_paused, ranks=ranks)
        four.all(rebuild, four.meeting(), REPLICAS, ranks=ranks)
