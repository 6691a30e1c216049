"""Loss spikes: what is one and what is none, over synthetic losses; what follows; that all ranks decide alike."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from elastic_ring.control.decisions.loss_spikes import (
    CLIP_STEPS,
    MIN_LOSSES,
    VERDICTS,
    WINDOW,
    Action,
    SpikeBallot,
    SpikeWatch,
    limit_of,
)

NUM_STEPS = 10_000
Losses = Callable[[int, random.Random], float]

HEALTHY: dict[str, Losses] = {
    "a plateau": lambda step, draw: 2.1 + draw.gauss(0.0, 0.05),
    "a falling curve": lambda step, draw: 1.7 + 9.0 * (step + 1) ** -0.3 + draw.gauss(0.0, 0.08),
    "a steep beginning": lambda step, draw: 11.0 * math.exp(-step / 40) + 2.0 + draw.gauss(0.0, 0.1),
    "noise with heavier tails": lambda step, draw: 2.0 + 0.03 * draw.gauss(0.0, 1.0) * draw.choice((1, 1, 1, 2)),
    "batches of two kinds": lambda step, draw: draw.choice((1.9, 2.3)) + draw.gauss(0.0, 0.03),
    "hardly any noise": lambda step, draw: 0.01 * (1 + 0.005 * draw.random()),
    "a slow wave": lambda step, draw: 2.0 + 0.2 * math.sin(step / 300) + draw.gauss(0.0, 0.02),
    "a fall to nothing": lambda step, draw: (11.0 * math.exp(-step / 10) + 0.01) * math.exp(draw.gauss(0.0, 0.2)),
    "a wave of many levels": lambda step, draw: 2.0 + 1.5 * math.sin(step / 30) + draw.gauss(0.0, 0.05),
    "levels in turn": lambda step, draw: (2.0 if step // 50 % 2 else 3.0) + draw.gauss(0.0, 0.03),
    "a loss below zero": lambda step, draw: -3.0 + draw.gauss(0.0, 0.1),
}


def verdicts(losses: Losses, actions: tuple[Action, ...] = (), num_steps: int = NUM_STEPS, seed: int = 0) -> list[str]:
    """What a rank that sees all steps says of each."""
    watch, draw, found = SpikeWatch(actions), random.Random(seed), []
    for step in range(num_steps):
        loss, ballot = losses(step, draw), watch.ballot(step)
        found.append(VERDICTS[ballot.verdict] if ballot.limit and loss > ballot.limit else "")
        watch.saw(step, loss, found[-1])
    return found


@pytest.mark.parametrize("kind", HEALTHY)
def test_ten_thousand_healthy_steps_give_no_alarm(kind: str) -> None:
    assert not any(verdicts(HEALTHY[kind]))


DOUBLED_IS_HEALTHY = (
    "a loss below zero",
    "a fall to nothing",
    "a wave of many levels",
    "levels in turn",
    "a rare kind",
)


@pytest.mark.parametrize("kind", [kind for kind in HEALTHY if kind not in DOUBLED_IS_HEALTHY])
@pytest.mark.parametrize("step", [200, 5_000, 9_999])
def test_a_loss_that_doubles_is_found_in_its_step_and_no_other_is(kind: str, step: int) -> None:
    def poisoned(at: int, draw: random.Random) -> float:
        return HEALTHY[kind](at, draw) * (2.0 if at == step else 1.0)

    found = verdicts(poisoned, ("skip",))
    assert [at for at, verdict in enumerate(found) if verdict] == [step]
    assert found[step] == "skip"


@pytest.mark.parametrize("step", [MIN_LOSSES, 40, 55, 80])
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_on_a_curve_that_falls_a_spike_is_found_while_the_window_holds_its_beginning(step: int, noise: float) -> None:
    """Also the second and the third, which the first does not hide."""

    def poisoned(at: int, draw: random.Random) -> float:
        healthy = (11.0 * math.exp(-at / 8) + 0.01) * math.exp(draw.gauss(0.0, noise))
        return 15.0 if at in (step, step + 4, step + 5) else healthy

    found = verdicts(poisoned, ("clip", "skip", "back"), 300)
    assert {at: verdict for at, verdict in enumerate(found) if verdict} == {
        step: "clip",
        step + 4: "skip",
        step + 5: "back",
    }


def test_nothing_is_judged_before_enough_losses_are_known() -> None:
    assert limit_of([2.0] * (MIN_LOSSES - 1)) == math.inf
    assert limit_of([2.0] * MIN_LOSSES) < 3.0
    assert SpikeWatch(("stop",)).ballot(0) == SpikeBallot(0, 0.0, VERDICTS.index("stop"))


def test_poisoned_losses_do_not_hide_the_next_one() -> None:
    clean = [2.0 + 0.01 * (i % 7) for i in range(WINDOW)]
    poisoned = [*clean[: WINDOW - 8], *[1e6] * 8]
    assert limit_of(poisoned) < 3.0


def test_each_spike_goes_one_action_further_and_the_last_stays() -> None:
    spikes = {100: "clip", 110: "skip", 120: "stop", 130: "stop"}
    found = verdicts(
        lambda step, draw: 9.0 if step in spikes else 2.0 + 0.01 * draw.random(), ("clip", "skip", "stop"), 140
    )
    assert {step: verdict for step, verdict in enumerate(found) if verdict} == spikes


def test_after_a_window_without_a_spike_the_escalation_begins_anew() -> None:
    spikes = {100: "clip", 110: "skip", 110 + WINDOW + 1: "clip"}
    found = verdicts(lambda step, draw: 9.0 if step in spikes else 2.0 + 0.01 * draw.random(), ("clip", "skip"), 200)
    assert {step: verdict for step, verdict in enumerate(found) if verdict} == spikes


def test_a_level_that_lasts_is_no_spike_for_long() -> None:
    found = verdicts(lambda step, draw: (2.0 if step < 500 else 3.0) + draw.gauss(0.0, 0.02), (), 1000)
    told = [step for step, verdict in enumerate(found) if verdict]
    assert told[0] == 500
    assert told[-1] < 500 + WINDOW


def test_gradients_are_clipped_harder_for_some_steps_after_the_spike() -> None:
    watch = SpikeWatch(("clip",))
    for step in range(100):
        watch.saw(step, 2.0, "clip" if step == 50 else "")
        assert watch.ballot(step + 1).clips_harder == (51 <= step + 1 < 50 + CLIP_STEPS)


def test_a_loss_that_is_not_finite_is_no_part_of_the_window() -> None:
    watch = SpikeWatch()
    for step in range(WINDOW):
        watch.saw(step, math.nan if step % 2 else 2.0, "")
    assert watch.ballot(WINDOW).limit == pytest.approx(2.0 * (1 + 8 * 0.01))


def test_a_rank_that_goes_back_forgets_the_steps_that_run_again() -> None:
    watch, other = SpikeWatch(("skip",)), SpikeWatch(("skip",))
    for step in range(80):
        watch.saw(step, 2.0 + 0.01 * (step % 5), "skip" if step == 75 else "")
    for step in range(60):
        other.saw(step, 2.0 + 0.01 * (step % 5), "")
    back, expected = watch.ballot(60), other.ballot(60)
    # The window is shorter by what the later steps pushed out of it.
    assert (back.num_seen, back.verdict, back.clips_harder) == (60, expected.verdict, False)
    assert back.limit == pytest.approx(expected.limit, rel=1e-2)


def test_a_rank_that_missed_a_step_knows_nothing_of_those_before() -> None:
    watch = SpikeWatch(("skip",))
    for step in range(80):
        watch.saw(step, 2.0, "")
    assert watch.ballot(90) == SpikeBallot(0, 0.0, VERDICTS.index("skip"))
