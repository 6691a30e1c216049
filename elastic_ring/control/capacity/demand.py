"""How many workers a run asks the cluster's autoscaler for. Pure; `runtime.autoscaler` does the asking.

Ray's autoscaler (v2) grants a request as a whole or not at all. So after a refusal the run asks for fewer workers, and
for all of them again later.
"""

from __future__ import annotations

from dataclasses import dataclass

TRY_AGAIN_S = 20.0
"""After a refusal the run asks for a little more this often: limits may be raised, machines may come free."""


@dataclass(frozen=True)
class Ask:
    """A request to the autoscaler: room for `num_workers` in the whole cluster, 0 for nothing.

    `refused`: the smallest number that was refused lately; None if none was. `refused_at`: when, in seconds on the
    clock of `now`. `is_trial`: this request tests whether the autoscaler grants a little more now.
    """

    num_workers: int = 0
    refused: int | None = None
    refused_at: float = 0.0
    is_trial: bool = False


def sizes(min_dp: int, max_dp: int, cp: int, spares: int) -> tuple[int, ...]:
    """The numbers of workers that are of use, rising: whole rings, with and without the spares."""
    rings = range(min_dp, max_dp + 1)
    return tuple(sorted({dp * cp for dp in rings} | {dp * cp + spares for dp in rings}))


def outstanding(ask: Ask, num_placed: int) -> int:
    """What of `ask` to send to the autoscaler while `num_placed` workers have a process.

    Nothing once they are as many: their nodes are busy, and Ray (v2) counts a request that stays against any node that
    it fits, also against one that the run has left, which then never counts as idle.
    """
    return ask.num_workers if ask.is_trial or ask.num_workers > num_placed else 0


def next_ask(ask: Ask, wanted: tuple[int, ...], num_here: int, is_refused: bool, now: float) -> Ask:
    """The next request.

    `wanted`: the useful numbers of workers, rising; none if nothing is wanted. `num_here`: for how many there is room.
    `is_refused`: the autoscaler says that it cannot satisfy `ask`. The run first asks for the largest number. After a
    refusal it bisects between `num_here` and the refused number. When none is left between, it asks for `num_here`, and
    every TRY_AGAIN_S for the next larger one; once that is granted, for the largest again.
    """
    if not wanted:
        return Ask()
    if is_refused and ask.num_workers:
        ask = Ask(ask.num_workers, ask.num_workers, now)
    if ask.is_trial and num_here < ask.num_workers:
        return ask  # granted: its nodes are on their way
    if ask.refused is None:
        return Ask(wanted[-1])
    left = [number for number in wanted if num_here < number < ask.refused]
    if ask.num_workers in left:
        return ask
    if left:
        return Ask(left[len(left) // 2], ask.refused, ask.refused_at)
    more = [number for number in wanted if number > num_here]
    if not more:
        return Ask(wanted[-1])
    if now >= ask.refused_at + TRY_AGAIN_S:
        return Ask(more[0], is_trial=True)
    here = max((number for number in wanted if number <= num_here), default=0)
    return Ask(here, ask.refused, ask.refused_at)
