"""Skipped steps, at every door: how they are reported, and when they end the run.

`vote.Outcome` says whether a step is skipped; `guard_table` says which door has which guard. No process groups here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from elastic_ring.control.decisions.loss_spikes import WINDOW, Action, SpikeWatch
from elastic_ring.errors import LossSpike, TooManySkipped
from elastic_ring.train.vote import MustGoBack, Outcome

NUM_NAMED = 20


def listed(sample_ids: Sequence[int]) -> str:
    """Sequences by number, for a message."""
    shown = ", ".join(map(str, sample_ids[:NUM_NAMED]))
    return f"{shown}, ..." if len(sample_ids) > NUM_NAMED else shown


def remark_on(outcome: Outcome, sample_ids: Callable[[int], Sequence[int]]) -> str:
    """A step's report besides its metrics: a spike, or that it was skipped; empty for an ordinary step."""
    step, loss, spike = outcome.vote.step, outcome.loss, outcome.spike
    if not spike and not outcome.skip:
        return ""
    sequences = f"; its sequences are {listed(sample_ids(step))}"
    if spike:
        response = {"clip": "gradients are clipped harder", "skip": "the step changes nothing"}.get(spike)
        return (
            f"loss spike in step {step}: {loss:.4g}, above {outcome.spike_limit:.4g}; "
            f"{response or 'nothing is done (loss_spike=log)'}{sequences}"
        )
    cause = "its gradient is not finite" if math.isfinite(loss) else f"its loss is {loss}"
    return f"step {step} is skipped and changes nothing: {cause}{sequences}"


def watch_of(loss_spike: str, actions: Sequence[Action]) -> SpikeWatch | None:
    """The judge of losses that the settings `loss_spike` and `loss_spike_actions` ask for."""
    return None if loss_spike == "off" else SpikeWatch(actions if loss_spike == "act" else ())


def raise_for_skips(
    outcome: Outcome, in_a_row: int, max_skipped: int, sample_ids: Callable[[int], Sequence[int]], *, goes_back: bool
) -> None:
    """Call it once the step is applied or its skip is counted; `in_a_row`: with this step.

    Raises TooManySkipped, LossSpike, and MustGoBack where going back is a response.
    """
    step = outcome.vote.step
    if outcome.spike == "stop":
        raise LossSpike(
            f"step {step}: the loss is {outcome.loss:.4g}, and more than {outcome.spike_limit:.4g} is far above "
            f"the last {WINDOW} steps; loss_spike_actions has come to stop. The step was not applied. "
            f"Look at its sequences ({listed(sample_ids(step))}), lower the learning rate, or go on with "
            "loss_spike='log'",
            step=step,
        )
    if outcome.spike == "back":
        told = f"the loss of step {step} is {outcome.loss:.4g}, above {outcome.spike_limit:.4g}"
        raise MustGoBack(told, first_step=step, step=step)
    if in_a_row <= max_skipped:
        return
    if goes_back:
        told = f"{in_a_row} steps in a row up to step {step} were skipped (max_skipped={max_skipped})"
        raise MustGoBack(told, first_step=step + 1 - in_a_row, step=step)
    raise TooManySkipped(
        f"step {step}: {in_a_row} steps in a row were skipped, for a non-finite gradient or loss or a loss "
        f"spike (max_skipped={max_skipped}); lower the learning rate, look at the data of these steps, "
        "or raise max_skipped",
        step=step,
    )
